"""The tables of attention in docs/performance.md; benchmarks/report.py writes them."""

import statistics

from benchmarks.tables import name_of

OURS = ("mosaic", "triton")


def table(rows: list[dict], others: list[dict] = ()) -> list[str]:
  """A line for each case; `others` are rows of one more chip, shown by their ratio."""
  elsewhere = {row["case"]: gain(row, fastest(row, OURS)) for row in others}
  chip = f" on {name_of(others[0]['chip'])}" if others else ""
  lines = [
    "| forward / forward + backward, ms | batch, tokens, heads, head size | cuDNN"
    f" | PyTorch's fastest | ours | over cuDNN |{f' the same{chip} |' * bool(others)}",
    "|" + "---|" * (6 + bool(others)),
  ]
  gains = [gain(row, fastest(row, OURS)) for row in rows]
  for row, over in zip(rows, gains, strict=True):
    times = row["milliseconds"]
    torch, ours = fastest(row, "torch"), fastest(row, OURS)
    shape = f"{row['batch']}, {row['length']}, {row['heads']}, {row['head_dim']}"
    there = f" {elsewhere[row['case']]:.2f}x |" if row["case"] in elsewhere else " |" * bool(others)
    lines.append(
      f"| {row['case']}{', causal' if row['causal'] else ''} | {shape} | {pair(times['cudnn'])} |"
      f" {pair(times[torch]) if torch else ''} | {pair(times[ours])} | **{over:.2f}x** |{there}"
    )
  mean = f"\nGeometric mean over cuDNN: {statistics.geometric_mean(gains):.2f}x"
  if others:
    mean += f",{chip} {statistics.geometric_mean(elsewhere.values()):.2f}x"
  return [*lines, f"{mean}."]


def lengths_table(rows: list[dict]) -> list[str]:
  """Forward and backward over cuDNN, by tokens and head size."""
  gains = {(row["length"], row["head_dim"]): gain(row, fastest(row, OURS)) for row in rows}
  sizes = sorted({head_dim for _, head_dim in gains})
  lines = [
    "| tokens | " + " | ".join(f"heads of {size}" for size in sizes) + " |",
    "|---" * (len(sizes) + 1) + "|",
  ]
  for length in sorted({length for length, _ in gains}):
    cells = [f"{gains[length, s]:.2f}x" if (length, s) in gains else "" for s in sizes]
    lines.append(f"| {length} | " + " | ".join(cells) + " |")
  return lines


def fastest(row, start: str | tuple[str, ...]) -> str | None:
  """Of the contenders whose names start so, the one with the fastest forward and backward pass."""
  times = {name: both[1] for name, both in row["milliseconds"].items() if name.startswith(start)}
  return min(times, key=times.__getitem__, default=None)


def gain(row, name: str) -> float:
  """How many times as fast as cuDNN a contender is, forward and backward."""
  return row["milliseconds"]["cudnn"][1] / row["milliseconds"][name][1]


def pair(both) -> str:
  return f"{both[0]:.3f} / {both[1]:.3f}"
