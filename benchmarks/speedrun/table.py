"""The table of records: what each entry took, and how many of its runs reached the target."""

import math
import statistics
from collections.abc import Sequence

# Student's t at 97.5 %, by the number of runs.
_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
_COLUMNS = ("entry", "seconds", "of the first", "zero-shot accuracy", "reached", "commit")


def of(rows: Sequence[dict]) -> str:
  """A line for each entry, in the order of the rows; "reached" is 5/5 (the target).

  An entry reaches the target with the mean of its runs. If it does not, its seconds are in
  brackets; a run without a result says why.
  """
  entries: dict[str, list[dict]] = {}
  for row in rows:
    entries.setdefault(row["words"], []).append(row)
  lines, first = [], None
  for words, found in entries.items():
    ended = [row for row in found if "seconds" in row]
    if not ended:
      lines.append(f"| {words} | | | {found[-1]['error'].splitlines()[-1]} | | |")
      continue
    seconds, scores = ([row[name] for row in ended] for name in ("seconds", "acc1"))
    first = first or statistics.mean(seconds)
    share, target = statistics.mean(seconds) / first, found[0]["target"]
    took = mean(seconds, "{:.0f}")
    reached = statistics.mean(scores) >= target
    hits = sum(row["reached"] for row in found)
    lines.append(
      f"| {words} | {took if reached else f'({took})'} | {share:.2f}"
      f" | {mean([100 * score for score in scores], '{:.1f}')} %"
      f" | {hits}/{len(found)} ({100 * target:.0f} %) | {ended[-1]['commit']} |"
    )
  head = f"| {' | '.join(_COLUMNS)} |\n{len(_COLUMNS) * '|---'}|"
  return "\n".join([head, *lines])


def mean(values: Sequence[float], form: str) -> str:
  """The mean, with the half width of its interval of 95 % if there are several."""
  text = form.format(statistics.mean(values))
  if len(values) < 2:
    return text
  half = _T.get(len(values), 2.0) * statistics.stdev(values) / math.sqrt(len(values))
  return f"{text} ± {form.format(half)}"
