"""Makes the tables of README and the pages in docs, and plots of the results.

  python -m benchmarks.report

Reads benchmarks/results/. If a case was measured more than once on a chip, the last line counts.
Writes the tables between markers, and a plot of CHIP's results for each file.
"""

import math
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import attention_report, remat_report, scaling_report, steps_report
from benchmarks.speedrun import table as speedrun
from benchmarks.steps_report import FLAX, OURS, best
from benchmarks.tables import CHIP, RESULTS, last, name_of, read
from examples.trained_models import table as trained_models

README = RESULTS.parent.parent / "README.md"
DOCS = README.parent / "docs"
PERFORMANCE, SCALING = DOCS / "performance.md", DOCS / "scaling.md"
MARKERS = "<!-- {}: made by python -m benchmarks.report -->", "<!-- end of {} -->"


def main() -> None:
  step, steps_elsewhere = by_chip(sorted(last(read("step"), "chip", "size"), key=largest_first))
  size = ("chip", "m", "n", "k")
  matmuls = read("matmul")
  matmul, matmuls_elsewhere = by_chip(last(matmuls, *size))
  raced, _ = by_chip(last([row for row in matmuls if has_triton(row)], *size))
  case = ("chip", "operation", "format", "scaling", "rows", "width", "dtype")
  quantize, _ = by_chip(last(read("quantize"), *case))
  linear, _ = by_chip(last(read("linear"), "chip", "tokens", "dim"))
  plot_step(step)
  plot_matmul(matmul, raced)
  plot_quantize(quantize)
  plot_linear(linear)
  plot_operations(linear)
  open_clip = last(read("open_clip"), "chip", "size", "remat")
  open_clip = sorted(open_clip, key=lambda row: -row["milliseconds"])
  steps_report.plot(step, open_clip, RESULTS / "steps.png")
  write("steps", steps_report.short_table(step, open_clip), README)
  write("steps", step_table(step, steps_elsewhere))
  dropout, _ = by_chip(last(read("step_patch_dropout"), "chip", "size"))
  write("patch_dropout", dropout_table(sorted(dropout, key=largest_first)))
  write("texts", steps_report.texts_table(last(read("step_texts"), "chip", "size")))
  write("speedrun", speedrun.of(read("speedrun")), DOCS / "speedrun.md")
  memory = last(read("remat_memory"), "size", "batch_size")
  write("remat", remat_report.table(memory, read("step") + read("remat")))
  write("open_clip", steps_report.open_clip_table(open_clip))
  write("speeds", table(matmul, matmuls_elsewhere, raced, quantize, linear))
  attention, elsewhere = by_chip(last(read("attention"), "chip", "case"))
  write("attention", attention_report.table(attention, of_h100(elsewhere)))
  lengths, _ = by_chip(last(read("attention_lengths"), "chip", "case"))
  write("attention_lengths", attention_report.lengths_table(lengths))
  serving = [row for row in read("serving") if row["benchmark"] == "serving speed"]
  serving, _ = by_chip(last(serving, "chip", "size", "batch_size"))
  write("serving", serving_table(serving), DOCS / "embedding.md")
  write("data", data_table(read("data")), DOCS / "data.md")
  write("trained_models", trained_models.of(read("trained_models")), DOCS / "rounding.md")
  several = read("scaling")
  scaling = [row for row in several if row["benchmark"] == "scaling"]
  scaling, _ = by_chip(last(scaling, "chip", "row"))
  ddp = [row for row in several if row["benchmark"] == "scaling_open_clip"]
  ddp = [row for row in ddp if row.get("compiled") != "blocks"]  # Slower, perhaps.
  ddp, _ = by_chip(last(ddp, "chip", "row", "gpus"))
  scaling = sorted(scaling, key=lambda row: -scaling_report.one_gpu([row]).get(row["row"], 0))
  scaling_report.plot(scaling, RESULTS / "scaling.png")
  write("scaling", scaling_report.table(scaling), SCALING)
  write("open_clip_scaling", scaling_report.open_clip_table(ddp, scaling), SCALING)
  write("links", scaling_report.prediction(scaling_report.one_gpu(scaling)), SCALING)
  evidence = DOCS / "evidence.md"
  for path in sorted((RESULTS / "figures").glob("figure_*.md")):  # By benchmarks/figures.
    name, lines = path.stem.replace("_", " "), path.read_text().splitlines()
    if MARKERS[0].format(name) in evidence.read_text():  # Of the others it has a link.
      write(name, of_all_sizes(lines), evidence)


def write(name: str, lines: list[str], page: Path = PERFORMANCE) -> None:
  """Replaces the lines between a page's markers of that name."""
  begin, end = (marker.format(name) for marker in MARKERS)
  before, rest = page.read_text().split(begin)
  _, after = rest.split(end)
  text = "\n".join(lines)
  page.write_text(f"{before}{begin}\n{text}\n{end}{after}")
  print(text)


def of_all_sizes(lines: list[str]) -> list[str]:
  """A table's lines of all sizes without their empty columns; all of it if it has no such lines."""
  head, rule, *rows = lines
  if not (rows := [line for line in rows if line.startswith("| all sizes |")]):
    return lines
  columns = zip(*(line.strip("|").split("|") for line in (head, rule, *rows)), strict=True)
  _, *full = [column for column in columns if any(cell.strip() for cell in column[2:])]
  return [f"|{'|'.join(cells)}|" for cells in zip(*full, strict=True)]


def has_triton(row) -> bool:
  """Whether a line has XLA's Triton kernel; few do. Older lines, with a note, do not count."""
  return "xla_int8_triton" in row["tops"] and "note" not in row


def of_h100(rows) -> list[dict]:
  return [row for row in rows if row["chip"].startswith("NVIDIA H100")]


def by_chip(rows) -> tuple[list[dict], list[dict]]:
  """The rows of CHIP, and the rows of other chips, which name their chip."""
  ours = [row for row in rows if row["chip"] == CHIP]
  return ours, [row for row in rows if row["chip"] != CHIP]


def largest_first(row) -> float:
  return -row["model_teraflops"] / row["batch_size"]


def tokens_of(rows) -> str:
  return " and ".join(f"{m:,}" for m in sorted({row["m"] for row in rows}))


def width_of(row) -> int:
  """The width of the CLIP that has this matmul's layer."""
  return int(row["layer"].split()[-1])


def widths_of(rows) -> str:
  return ", ".join(f"{width:,}" for width in sorted(set(map(width_of, rows))))


def ratio(rows, *over: str) -> str:
  """Geometric mean and range of our int8 rate over another's, or over the best of several."""
  return mean_and_range(
    row["tops"]["ours_int8"] / max(row["tops"][one] for one in over) for row in rows
  )


def mean_and_range(ratios) -> str:
  """The geometric mean and the range of ratios."""
  ratios = list(ratios)
  return f"**{statistics.geometric_mean(ratios):.2f}x** ({min(ratios):.2f} to {max(ratios):.2f})"


STEP_HEAD = [
  f"| a whole training step on one {name_of(CHIP)} | images a batch | plain Flax, bf16 |"
  " `switchback` | over plain Flax | its images/s | its MFU | memory: Flax, `switchback` |",
  "|---|---|---|---|---|---|---|---|",
]


def step_table(step, elsewhere) -> list[str]:
  lines = list(STEP_HEAD)
  for row in step + elsewhere:
    each = row["contenders"]
    lines.append(step_line(row, best(each, OURS), ", every block rematerialised"))
    if less := each.get("switchback_no_remat"):
      lines.append(step_line(row, less, ", only plain Flax rematerialised"))
  return lines


def step_line(row, ours, remat: str) -> str:
  flax = best(row["contenders"], FLAX)
  remat = remat if row["remat"] == "block" else ""
  where = "" if row["chip"] == CHIP else f", on one {name_of(row['chip'])}"
  return f"| ViT-{row['size']}{remat}{where} |{step_cells(row, flax, ours)}"


def step_cells(row, flax, ours) -> str:
  """Images, the times of plain Flax and ours, the ratio, our rates, and memory."""
  mfu = ours["mfu_of_bf16_peak"]
  return (
    f" {row['batch_size']} | {flax['milliseconds']:.0f} ms |"
    f" {ours['milliseconds']:.0f} ms | **{ours['speedup']:.2f}x** |"
    f" {ours['images_per_second']:,.0f} | {'' if mfu is None else f'{mfu:.0%}'} |"
    f" {flax['peak_gigabytes']:.0f}, {ours['peak_gigabytes']:.0f} GB |"
  )


def dropout_table(rows) -> list[str]:
  """The steps of benchmarks/step.py with --patch_dropout."""
  lines = list(STEP_HEAD)
  for row in rows:
    flax = best(row["contenders"], (*FLAX, "flax_no_remat"))
    ours = best(row["contenders"], (*OURS, "switchback_no_remat"))
    name = f"ViT-{row['size']}, {row['patch_dropout']:.0%} of the patches dropped"
    lines.append(f"| {name} |{step_cells(row, flax, ours)}")
  return lines


def serving_table(rows) -> list[str]:
  """Images a second of each contender, and the first's over the others'."""
  lines = [
    f"| images/s on one {name_of(CHIP)} | images a batch | int8, `switchback` | plain Flax, bf16 |"
    " open_clip, compiled, bf16 | over Flax | over open_clip |",
    "|---|---|---|---|---|---|---|",
  ]
  for row in rows:
    names = ("serving switchback", "flax bfloat16", "open_clip")
    ours, flax, open_clip = (row["contenders"][name]["images_per_second"] for name in names)
    lines.append(
      f"| ViT-{row['size']} | {row['batch_size']} | {ours:,.0f} | {flax:,.0f} | {open_clip:,.0f} |"
      f" **{ours / flax:.2f}x** | **{ours / open_clip:.2f}x** |"
    )
  return lines


def data_table(rows) -> list[str]:
  """What benchmarks/data_scale.py, a program of commit 0c222cb, measured."""
  rows = last([row for row in rows if "measure" in row], "measure", "case")
  lines = [f"| on {rows[0]['cores']} CPU cores | | |", "|---|---|---|"]
  for row in rows:
    digits = 0 if row["value"] > 99 else 2
    lines.append(f"| {row['measure']} | {row['case']} | {row['value']:,.{digits}f} |")
  return lines


def table(matmul, elsewhere, raced, quantize, linear) -> list[str]:
  large = [row for row in matmul if row["m"] >= 16384]
  rows_of_x = [row["of_copy"] for row in quantize
               if (row["operation"], row["scaling"]) == ("quantize", "rowwise")]  # fmt: skip
  speed = {(row["tokens"], row["dim"]): row["speedup"] for row in linear}
  share = {(row["tokens"], row["dim"]): row["share_of_quantizing"] for row in linear}
  lines = [
    f"| on one {name_of(CHIP)} (jax {matmul[0]['jax']}) | |",
    "|---|---|",
    f"| int8 matmul with scales, over XLA's bf16 matmul: {len(large)} sizes of CLIP's layers from"
    f" 16k tokens on | {ratio(large, 'xla_bf16')} |",
    f"| over XLA's int8 matmul by cuBLAS, with scales: the same sizes |"
    f" {ratio(large, 'xla_int8')} |",
    "| over the faster of XLA's two int8 matmuls, by cuBLAS and by Triton with the scales in it:"
    f" {len(raced)} of these sizes ({tokens_of(raced)} tokens, widths {widths_of(raced)}) |"
    f" {ratio(raced, 'xla_int8', 'xla_int8_triton')} |",
    f"| over our own kernel in fp8 (e4m3): the {len(large)} sizes | {ratio(large, 'ours_fp8')} |",
    f"| over our own kernel for one large matmul (32,768 x 8,192 x 8,192) in the same run, in"
    f" operations a second: the {len(large)} sizes |"
    f" {mean_and_range(row['tops']['ours_int8'] / row['int8_ceiling'] for row in large)} |",
    *(
      f"| on one {name_of(chip)}, over XLA's bf16, and over XLA's int8 by cuBLAS:"
      f" {len(rows)} sizes of {tokens_of(rows)} tokens |"
      f" {ratio(rows, 'xla_bf16')}, {ratio(rows, 'xla_int8')} |"
      for chip in dict.fromkeys(row["chip"] for row in elsewhere)
      if (rows := [row for row in elsewhere if row["chip"] == chip and row["m"] >= 16384])
    ),
    "| row-wise quantizing, its bytes a second as a part of a device copy's: widths 768 to 16,384 |"
    f" {min(rows_of_x):.0%} to {max(rows_of_x):.0%} |",
  ]
  for tokens, dim in ((65536, 1280), (65536, 4096), (16384, 1024)):
    one, quantizing = speed[tokens, dim], share[tokens, dim]["switchback"]
    lines.append(
      f"| an MLP's linear layers, forward and backward, over recipe `full`: {tokens:,} tokens,"
      f" width {dim:,} | `switchback` **{one['switchback']:.2f}x**, {quantizing:.0%} of it"
      f" quantizing; `switchback_q` {one['switchback_q']:.2f}x;"
      f" `switchback_m` {one['switchback_m']:.2f}x |"
    )
  return lines


def plot_step(rows) -> None:
  """A bar for each contender, split by kernel groups; its length is relative to the first's."""
  bars = {}
  for row in rows:
    first = next(iter(row["contenders"].values()))["milliseconds"]
    for name, one in row["contenders"].items():
      parts = one.get("milliseconds_by_group", {"not profiled": 1.0})
      unit = one["milliseconds"] / first / sum(parts.values())
      bars[f"{row['size']}  {name}"] = {group: time * unit for group, time in parts.items()}
  groups = list(dict.fromkeys(group for parts in bars.values() for group in parts))
  groups.sort(key=lambda group: (group == "no kernel", group.startswith("XLA")))
  figure, axis = plt.subplots(figsize=(9, 1 + 0.4 * len(bars)))
  left = [0.0] * len(bars)
  for group in groups:
    widths = [parts.get(group, 0) for parts in bars.values()]
    axis.barh(list(bars), widths, left=left, label=group)
    left = [a + b for a, b in zip(left, widths, strict=True)]
  axis.invert_yaxis()
  axis.set_xlabel("time, as a part of the first contender's step")
  axis.legend(fontsize=7, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
  save(figure, "step")


def plot_matmul(rows, raced) -> None:
  """Rates from the last line of each case; `xla_int8_triton` is from `raced`."""
  fused = {(row["m"], row["n"], row["k"]): row["tops"]["xla_int8_triton"] for row in raced}
  tokens = sorted({row["m"] for row in rows if row["m"] >= 4096})
  figure, axes = plt.subplots(1, len(tokens), figsize=(5 * len(tokens), 5), sharex=True)
  for axis, m in zip(axes, tokens, strict=True):
    shown = [row for row in rows if row["m"] == m]
    shown.sort(key=lambda row: (width_of(row), row["n"], row["k"]))
    names = [f"{row['layer']}  {row['n']} x {row['k']}" for row in shown]
    for name, marker in (
      ("xla_bf16", "s"),
      ("xla_int8", "^"),
      ("ours_int8", "o"),
      ("ours_fp8", "x"),
    ):
      axis.plot([row["tops"][name] for row in shown], names, marker, label=name, markersize=4)
    rates = [fused.get((row["m"], row["n"], row["k"]), math.nan) for row in shown]
    axis.plot(rates, names, "v", label="xla_int8_triton", markersize=4)
    reached = statistics.median(row["int8_ceiling"] for row in shown)
    axis.axvline(reached, color="gray", ls=":", label="ours_int8, 32,768 x 8,192 x 8,192")
    axis.set_title(f"{m:,} tokens")
    axis.set_xlabel("TOP/s")
    axis.tick_params(axis="y", labelsize=6)
    axis.grid(alpha=0.3)
  figure.legend(*axes[0].get_legend_handles_labels(), loc="upper center", ncols=6, fontsize=8)
  save(figure, "matmul", top=0.95)


def plot_quantize(rows) -> None:
  shown = [row for row in rows if row["scaling"] == "rowwise" and row["operation"] == "quantize"
           and row["format"] == "int8"]  # fmt: skip
  figure, axis = plt.subplots(figsize=(6, 4))
  for name in ("copy", "ours", "xla"):
    rates = [row["terabytes_per_second"][name] for row in shown]
    axis.plot([row["width"] for row in shown], rates, "o-", label=name)
  axis.set(
    xscale="log", xlabel="width (65,536 rows, bfloat16 to int8)", ylabel="TB/s", ylim=(0, None)
  )
  axis.grid(alpha=0.3)
  axis.legend()
  save(figure, "quantize")


def plot_linear(rows) -> None:
  tokens = sorted({row["tokens"] for row in rows})
  size = (4 * len(tokens), 7)
  figure, axes = plt.subplots(2, len(tokens), figsize=size, sharex=True, sharey="row")
  for column, m in zip(axes.T, tokens, strict=True):
    shown = sorted((row for row in rows if row["tokens"] == m), key=lambda row: row["dim"])
    dims = [row["dim"] for row in shown]
    for axis, what in zip(column, ("speedup", "share_of_quantizing"), strict=True):
      for name in shown[0][what]:
        axis.plot(dims, [row[what][name] for row in shown], "o-", label=name)
      axis.grid(alpha=0.3)
    column[0].set_title(f"{m:,} tokens")
    column[1].set_xlabel("width")
  axes[0, 0].set_ylabel("speed over recipe full")
  axes[0, 0].legend(fontsize=7)
  axes[1, 0].set(ylabel="part that is no matmul", ylim=(0, None))
  save(figure, "linear")


def plot_operations(rows) -> None:
  """Each operation of an MLP's linear layers by itself, as in the paper's figure 12."""
  tokens = sorted({row["tokens"] for row in rows})
  size = (4.5 * len(tokens), 5)
  figure, (axes,) = plt.subplots(1, len(tokens), figsize=size, sharey=True, squeeze=False)
  for axis, m in zip(axes, tokens, strict=True):
    shown = sorted((row for row in rows if row["tokens"] == m), key=lambda row: row["dim"])
    dims = [row["dim"] for row in shown]
    for name in shown[0]["operation_milliseconds"]:
      kind = "o-" if "int8" in name else "^:" if name.startswith(("quantize", "cast")) else "s--"
      times = [row["operation_milliseconds"][name] for row in shown]
      axis.loglog(dims, times, kind, label=name, markersize=4)
    axis.set_title(f"{m:,} tokens")
    axis.set_xlabel("width")
    axis.set_xticks(dims, dims)
    axis.set_xticks([], minor=True)
    axis.grid(alpha=0.3, which="both")
  axes[0].set_ylabel("milliseconds, fc1 and fc2 together")
  figure.legend(*axes[0].get_legend_handles_labels(), loc="upper center", ncols=5, fontsize=8)
  save(figure, "linear_operations", top=0.9)


def save(figure, name: str, top: float = 1.0) -> None:
  figure.tight_layout(rect=(0, 0, 1, top))
  figure.savefig(RESULTS / f"{name}.png", dpi=80)


if __name__ == "__main__":
  main()
