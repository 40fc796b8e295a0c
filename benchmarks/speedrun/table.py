"""The table of records: what each entry took, and how many of its runs reached the target."""

import statistics
from collections.abc import Sequence

from benchmarks.figures.analysis import estimate
from benchmarks.tables import last, name_of

_COLUMNS = (
  "track", "entry", "seconds", "of the first", "waiting for data, %", "accuracy, %", "reached",
  "on", "commit",
)  # fmt: skip


def of(rows: Sequence[dict]) -> list[str]:
  """The lines of the table: one for each entry of each track; the last row of a seed counts.

  An entry reaches the target with the mean of its runs. If it does not, its seconds are in
  brackets; one whose runs all failed says why.
  """
  entries: dict[tuple[str, str], list[dict]] = {}
  for row in last(rows, "track", "words", "seed"):
    entries.setdefault((row["track"], row["words"]), []).append(row)
  lines = [f"| {' | '.join(_COLUMNS)} |", len(_COLUMNS) * "|---" + "|"]
  first: dict[str, float] = {}  # seconds, by the track
  for (track, words), found in entries.items():
    cells = _cells(found, first)
    where = name_of(found[-1]["chip"]), found[-1]["commit"]
    lines.append(f"| {' | '.join((track, words, *cells, *where))} |")
  return lines


def _cells(rows: Sequence[dict], first: dict[str, float]) -> tuple[str, str, str, str, str]:
  target, hits = 100 * rows[0]["target"], sum(row["reached"] for row in rows)
  reached = f"{target:g} %: {hits} of {len(rows)}"
  ended = [row for row in rows if "seconds" in row]
  if not ended:
    return rows[-1]["error"].splitlines()[-1], "", "", "", reached
  seconds, scores = [row["seconds"] for row in ended], [100 * row["acc1"] for row in ended]
  mean = statistics.mean(seconds)
  share = mean / first.setdefault(rows[0]["track"], mean)
  took = with_interval(seconds, 0)
  if statistics.mean(scores) < target:
    took = f"({took})"
  waiting = 100 * statistics.mean(row["waiting"] for row in ended) / mean
  return took, f"{share:.2f}", f"{waiting:.0f}", with_interval(scores, 1), reached


def with_interval(values: Sequence[float], digits: int) -> str:
  found = estimate(values)
  half = f" ± {found.half:.{digits}f}" if found.n > 1 else ""
  return f"{found.mean:.{digits}f}{half}"
