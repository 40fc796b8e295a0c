"""A table and a plot of benchmarks/width_transfer.py's results.

  python -m benchmarks.width_report

Reads benchmarks/results/width_transfer.jsonl, or the file that --rows names. The last line of a
contender and width on a chip counts. Prints the table in Markdown and the claims, and writes the
plot beside the rows.
"""

import argparse
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.tables import CHIP, RESULTS, last, read_file
from benchmarks.width_transfer import verdict

_NAMES = {
  "standard": "standard, bfloat16",
  "unit": "unit, bfloat16",
  "unit, fp8_static": "unit, `fp8_static`",
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--rows", type=Path, default=RESULTS / "width_transfer.jsonl")
  parser.add_argument("--chip", default=CHIP)
  args = parser.parse_args()
  rows = rows_of(read_file(args.rows), args.chip)
  print("\n".join(table(rows)), "", *(f"{k}: {v}" for k, v in verdict(rows).items()), sep="\n")
  plot(rows, args.rows.with_suffix(".png"))


def rows_of(rows: list[dict], chip: str) -> list[dict]:
  """The last row of each contender and width on a chip.

  Raises:
    SystemExit: there is none.
  """
  chips = {row["chip"]: None for row in rows}
  if chip not in chips:
    raise SystemExit(f"No row is of chip {chip!r}: the file has {', '.join(chips) or 'none'}.")
  return last([row for row in rows if row["chip"] == chip], "contender", "width")


def table(rows: list[dict]) -> list[str]:
  """A line for each contender: the best rate and its loss at each width."""
  widths = sorted({row["width"] for row in rows})
  lines = [
    "| contender | " + " | ".join(f"width {width:,}" for width in widths) + " |",
    "|---|" + "---|" * len(widths),
  ]
  found = {(row["contender"], row["width"]): row for row in rows}
  for name in dict.fromkeys(row["contender"] for row in rows):
    cells = " | ".join(_cell(found.get((name, width))) for width in widths)
    lines.append(f"| {_NAMES.get(name, name)} | {cells} |")
  return lines


def _cell(row: dict | None) -> str:
  """ "2^-7: 1.234"; in brackets where the best rate is the first or the last one tried."""
  if row is None:
    return ""
  if row["best_rate"] is None:
    return "not finite"
  rate = f"2^{math.log2(row['best_rate']):.0f}"
  return f"{f'({rate})' if row['at_edge'] else rate}: {row['best_loss']:.3f}"


def plot(rows: list[dict], path: Path) -> None:
  """The loss against the rate: a panel for each contender, a line for each width."""
  names = [n for n in dict.fromkeys(row["contender"] for row in rows) if "float16" not in n]
  widths = sorted({row["width"] for row in rows})
  figure, axes = plt.subplots(1, len(names), figsize=(3.0 * len(names), 3), squeeze=False)
  finite = [loss for row in rows for loss in row["losses"] if loss is not None]
  for axis, name in zip(axes[0], names, strict=True):
    for row in sorted((r for r in rows if r["contender"] == name), key=lambda r: r["width"]):
      color = plt.cm.viridis(widths.index(row["width"]) / max(len(widths), 2))
      exponents = [math.log2(rate) for rate in row["rates"]]
      losses = [math.nan if loss is None else loss for loss in row["losses"]]
      axis.plot(exponents, losses, "o-", ms=3, color=color, label=f"{row['width']:,}")
    axis.set_title(_NAMES.get(name, name).replace("`", ""), fontsize=9)
    axis.set_xlabel("log2 of the learning rate", fontsize=8)
    axis.set_ylim(0.98 * min(finite), min(1.6 * min(finite), 1.02 * max(finite)))
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
  axes[0][0].set_ylabel("test loss, nats a byte", fontsize=8)
  axes[0][-1].legend(title="width", fontsize=7, title_fontsize=7, frameon=False)
  figure.tight_layout()
  figure.savefig(path, dpi=110)
  plt.close(figure)


if __name__ == "__main__":
  main()
