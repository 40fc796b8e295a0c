"""The tables, the plot and the prediction of docs/scaling.md; benchmarks/report.py writes them."""

import functools
import math
import statistics

import jax
import matplotlib.pyplot as plt
import optax

from sbjax.models.clip import CLIP
from sbjax.models.sizes import SIZES
from sbjax.models.transformer import BLOCK_LINEARS
from train.parallel.sharding import parameter_axes, path_name
from train.step import make_init
from train.task import CLIPTask

# Bytes a second that a device sends. NVLink: measured on two H200s that sum 400 MB. PCIe 4.0 x16:
# as users report it.
LINKS = {"NVLink": 281e9, "PCIe": 20e9}
TILED = 1 + 4 / 512  # Bytes of a value in `mesh.gradient_exchange=e4m3` or int8.
BYTES = {"float32": 4, "bfloat16": 2, "e4m3": TILED, "int8": TILED}
# name: bytes to sum a parameter of the blocks' kernels, and of another matrix; bytes to gather one
# of the kernels over `fsdp`.
WAYS = {
  "data, float32": (4, 4, 0),
  "data, bfloat16": (2, 4, 0),
  "data, exchanged in 8 bits": (TILED, TILED, 0),
  "fsdp, int8 gathered, float32 summed": (4, 4, 1),
  "fsdp, int8, bfloat16": (2, 4, 1),
  "fsdp, int8, exchanged in 8 bits": (TILED, TILED, 1),
  "fsdp, bfloat16, float32 (16-bit recipes)": (4, 4, 2),
}


def table(rows: list[dict]) -> list[str]:
  """A line for each mesh: `switchback` with gradients in float32 and bfloat16, and plain Flax."""
  lines = [
    "| model, images a GPU | GPUs: data x fsdp | ms | images/s | of so many single GPUs |"
    " expected | plain Flax, images/s | over plain Flax | GB a GPU |",
    "|" + "---|" * 9,
  ]
  for row in rows:
    measured, one = _measured(row), one_gpu([row]).get(row["row"])
    for mesh in dict.fromkeys((case["data"], case["fsdp"]) for case in measured if case["fused"]):
      there = [case for case in measured if (case["data"], case["fsdp"]) == mesh]
      lines.append(_line(row["row"], mesh, there, one))
  return lines


def open_clip_table(open_clip: list[dict], rows: list[dict]) -> list[str]:
  """open_clip under DDP beside our fastest mesh, where both ran on as many GPUs; GB of both."""
  lines = [
    "| model, images a GPU | GPUs | open_clip, compiled, DDP: images/s | of so many single GPUs |"
    " sbjax: images/s | of so many single GPUs | ratio | GB a GPU |",
    "|" + "---|" * 8,
  ]
  for row in open_clip:
    gpus, theirs = row["gpus"], row["together"]
    cases = [c for r in rows if r["row"] == row["row"] for c in _measured(r)]
    cases = [c for c in cases if c["fused"] and _devices(c) == gpus]
    if not cases:
      continue
    ours = max(cases, key=lambda c: c["images_per_second"])
    ratio = ours["images_per_second"] / theirs["images_per_second"]
    lines.append(
      f"| {row['row']}, {row['batch_size']} | {gpus} | {theirs['images_per_second']:,.0f} |"
      f" {theirs['efficiency']:.3f} | {ours['images_per_second']:,.0f} |"
      f" {ours['efficiency']:.3f} | **{ratio:.2f}x** |"
      f" {theirs['gigabytes']:.0f}, {ours['gigabytes']:.0f} |"
    )
  return lines


def _measured(row: dict) -> list[dict]:
  """The cases of a row that have a time; an interrupted row may lack any."""
  return [case for case in row["cases"] if "milliseconds" in case]


def _line(size: str, mesh: tuple[int, int], cases: list[dict], one: float | None) -> str:
  ours = [case for case in cases if case["fused"]]
  flax = max((c["images_per_second"] for c in cases if not c["fused"]), default=None)
  best = max(case["images_per_second"] for case in ours)

  def shown(key: str, form: str) -> str:
    return ", ".join(form.format(case[key]) for case in ours if case.get(key) is not None)

  model = f"{size}, {ours[0]['batch_size']}"
  if ours[0]["remat"] != "none":
    model += ", blocks rematerialised"
  if (exchange := _exchange(ours[0])) != "float32":
    model += f", gradients sent in {exchange}"
  devices = math.prod(mesh)
  if devices == 1:
    cells = [_range(ours, "milliseconds"), _range(ours, "images_per_second"), "", ""]
    ours = ours[:1]
  else:
    cells = [
      shown("milliseconds", "{:.0f}"),
      shown("images_per_second", "{:,.0f}"),
      shown("efficiency", "**{:.3f}**"),
      ", ".join(f"{_expected(size, case, one):.3f}" for case in ours if one),
    ]
  cells += [
    "" if flax is None else f"{flax:,.0f}",
    "" if flax is None else f"{best / flax:.2f}x",
    f"{max(case['gigabytes'] for case in ours):.0f}",
  ]
  return f"| {model} | {devices}: {mesh[0]} x {mesh[1]} | {' | '.join(cells)} |"


def _expected(size: str, case: dict, one: float) -> float:
  """The efficiency if a step takes one GPU's time and that of the bytes over NVLink."""
  others = BYTES[_exchange(case)]
  summed = min(others, BYTES[case["gradient_dtype"]])  # One of the two is float32.
  moved = sent(size, case["data"], case["fsdp"], summed, others, 1)
  return one / (one + moved / LINKS["NVLink"] * 1e3)


def _exchange(case: dict) -> str:
  return case.get("gradient_exchange", "float32")  # Older lines lack it.


def _range(cases: list[dict], key: str) -> str:
  values = [case[key] for case in cases]
  return f"{statistics.mean(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def plot(rows: list[dict], path) -> None:
  """A panel for each model: a bar for each mesh, and a dotted line at perfect scaling."""
  figure, axes = plt.subplots(2, -(-len(rows) // 2), figsize=(9, 6), squeeze=False)
  for axis, row in zip(axes.flat, rows, strict=False):
    measured = _measured(row)
    fastest = {}  # Of each label: the gradients' dtype differs.
    for case in sorted(measured, key=lambda case: case["images_per_second"]):
      fastest[_label(case)] = case
    cases = sorted(fastest.values(), key=lambda c: (_devices(c), -c["data"], not c["fused"]))
    colors = ["tab:blue" if case["fused"] else "tab:gray" for case in cases]
    axis.barh(range(len(cases)), [case["images_per_second"] for case in cases], color=colors)
    singles = [c["images_per_second"] for c in measured if _devices(c) == 1]
    for devices in {_devices(case) for case in cases} if singles else ():
      axis.axvline(devices * statistics.mean(singles), color="tab:blue", ls=":", lw=1)
    axis.set_yticks(range(len(cases)), [_label(case) for case in cases], fontsize=7)
    axis.invert_yaxis()
    axis.set_title(f"{row['row']}, images/s", fontsize=9)
  figure.tight_layout()
  figure.savefig(path, dpi=80)


def _devices(case: dict) -> int:
  return case["data"] * case["fsdp"]


def _label(case: dict) -> str:
  parts = [case["recipe"] if case["fused"] else "plain Flax"]
  parts += [f"{axis} {case[axis]}" for axis in ("data", "fsdp") if case[axis] > 1] or ["one GPU"]
  if case["remat"] != "none":
    parts.append("remat")
  return ", ".join(parts)


@functools.cache
def parameters(size: str) -> dict[str, int]:
  """A CLIP's parameter counts: kernels of blocks, others that are split, and those kept whole."""
  state = jax.eval_shape(make_init(CLIPTask(CLIP(SIZES[size])), optax.identity(), 0))
  found = {"kernels": 0, "split": 0, "whole": 0}
  for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
    name = path_name(path)
    of_block = name.endswith("/kernel") and name.split("/")[-2] in BLOCK_LINEARS
    kind = "kernels" if of_block else "split" if "fsdp" in parameter_axes(name) else "whole"
    found[kind] += leaf.size
  return found


def sent(size: str, data: int, fsdp: int, summed: float, others: float, gathered: float) -> float:
  """Bytes that each device of a mesh sends in a step.

  To gather an array of S bytes, or to sum and scatter it, takes S (n - 1) / n; to sum it on all
  devices takes twice that. `fsdp` gathers and scatters, and `data` sums what that leaves on a
  device. Parameters other than matrices are summed, and all but the blocks' kernels gathered, in
  float32.
  """
  count, share = parameters(size), (fsdp - 1) / fsdp
  gathers = share * (gathered * count["kernels"] + 4 * count["split"])
  sums = share + 2 * (data - 1) / data / fsdp
  whole = 2 * (1 - 1 / (data * fsdp)) * 4 * count["whole"]
  return gathers + sums * (summed * count["kernels"] + others * count["split"]) + whole


def prediction(milliseconds: dict[str, float], gpus: int = 8) -> list[str]:
  """The efficiency on so many GPUs if no communication overlaps, given one GPU's milliseconds."""
  lines = [
    f"| {gpus} GPUs: GB that each sends, efficiency by {' and '.join(LINKS)} |"
    f" {' | '.join(milliseconds)} |",
    "|" + "---|" * (1 + len(milliseconds)),
  ]
  for way, bytes_of in WAYS.items():
    mesh, cells = (gpus, 1) if way.startswith("data") else (1, gpus), []
    for size, one in milliseconds.items():
      moved = sent(size, *mesh, *bytes_of)
      kept = [one / (one + moved / rate * 1e3) for rate in LINKS.values()]
      cells.append(f"{moved / 1e9:.2f} GB: {', '.join(f'{part:.3f}' for part in kept)}")
    lines.append(f"| {way} | {' | '.join(cells)} |")
  return lines


def one_gpu(rows: list[dict]) -> dict[str, float]:
  """Milliseconds of a step on one GPU by itself, the mean of all, by size."""
  found = {}
  for row in rows:
    if of_one := [case["milliseconds"] for case in _measured(row) if _devices(case) == 1]:
      found[row["row"]] = statistics.mean(of_one)
  return found
