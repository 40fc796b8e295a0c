"""The tables of attention in docs/performance.md."""

import math

from benchmarks.tables import last, read


def table() -> list[str]:
  rows = last(read("attention"), "chip", "case")
  lines = [
    "| forward / forward + backward, ms | batch, tokens, heads, head size | cuDNN"
    " | PyTorch's fastest | Triton | over cuDNN |",
    "|---|---|---|---|---|---|",
  ]
  for row in rows:
    times = row["milliseconds"]
    torch = [both for name, both in times.items() if name.startswith("torch")]
    shape = f"{row['batch']}, {row['length']}, {row['heads']}, {row['head_dim']}"
    lines.append(
      f"| {row['case']}{', causal' if row['causal'] else ''} | {shape} | {pair(times['cudnn'])} |"
      f" {pair(min(torch, key=lambda both: both[1]))} | {pair(times['triton'])} |"
      f" **{gain(row):.2f}x** |"
    )
  mean = math.exp(sum(math.log(gain(row)) for row in rows) / len(rows))
  return [*lines, f"\nGeometric mean over cuDNN: {mean:.2f}x."]


def lengths_table() -> list[str]:
  """Forward and backward over cuDNN, by tokens and head size."""
  rows = last(read("attention_lengths"), "chip", "case")
  gains = {(row["length"], row["head_dim"]): gain(row) for row in rows}
  sizes = sorted({head_dim for _, head_dim in gains})
  lines = [
    "| tokens | " + " | ".join(f"heads of {size}" for size in sizes) + " |",
    "|---" * (len(sizes) + 1) + "|",
  ]
  for length in sorted({length for length, _ in gains}):
    cells = [f"{gains[length, s]:.2f}x" if (length, s) in gains else "" for s in sizes]
    lines.append(f"| {length} | " + " | ".join(cells) + " |")
  return lines


def gain(row) -> float:
  return row["milliseconds"]["cudnn"][1] / row["milliseconds"]["triton"][1]


def pair(both) -> str:
  return f"{both[0]:.3f} / {both[1]:.3f}"
