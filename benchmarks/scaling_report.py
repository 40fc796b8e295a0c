"""The tables, the plot and the prediction of docs/scaling.md; benchmarks/report.py writes them."""

import statistics

import jax
import matplotlib.pyplot as plt
import optax

from sbjax.models.clip import CLIP
from sbjax.models.sizes import SIZES
from sbjax.models.transformer import BLOCK_LINEARS
from train.sharding import parameter_axes, path_name
from train.step import make_init
from train.task import CLIPTask

# Bytes a second that a device sends. NVLink: measured on two H200s that sum 400 MB. PCIe 4.0 x16:
# as users report it.
LINKS = {"NVLink": 281e9, "PCIe": 20e9}
TILED = 1 + 4 / 512  # Bytes of a value in `mesh.gradient_exchange=e4m3` or int8.
# name: bytes to sum a parameter of the blocks' kernels, and of another matrix; bytes to gather one
# of the kernels, None: not gathered.
WAYS = {
  "data, float32": (4, 4, None),
  "data, bfloat16": (2, 4, None),
  "data, exchanged in 8 bits": (TILED, TILED, None),
  "fsdp, int8 gathered, float32 summed": (4, 4, 1),
  "fsdp, int8, bfloat16": (2, 4, 1),
  "fsdp, int8, exchanged in 8 bits": (TILED, TILED, 1),
  "fsdp, bfloat16, float32 (16-bit recipes)": (4, 4, 2),
}


def table(rows: list[dict]) -> list[str]:
  lines = [
    "| model | images a GPU | GPUs | recipe | ms | images/s | of so many single GPUs |"
    " over plain Flax | GB a GPU | compiled in |",
    "|" + "---|" * 10,
  ]
  for row in rows:
    cases = [case for case in row["cases"] if "milliseconds" in case]
    for case in cases:
      mesh = f"{case['data'] * case['fsdp']}: data {case['data']}, fsdp {case['fsdp']}"
      recipe = f"`{case['recipe']}`" if case["fused"] else "plain Flax"
      if case["remat"] != "none":
        recipe += ", blocks rematerialised"
      if case["gradient_dtype"] != "float32":
        recipe += f", {case['gradient_dtype']} gradients"
      if (exchange := case.get("gradient_exchange", "float32")) != "float32":
        recipe += f", gradients sent in {exchange}"
      several = case["data"] * case["fsdp"] > 1
      efficiency = f"**{case['efficiency']:.3f}**" if several and case["fused"] else ""
      gain = _over_flax(case, cases)
      lines.append(
        f"| {row['row']} | {case['batch_size']} | {mesh} | {recipe} | {case['milliseconds']:.0f} |"
        f" {case['images_per_second']:,.0f} | {efficiency} | {gain and f'{gain:.2f}x'} |"
        f" {case['gigabytes']:.0f} | {case['compile_seconds']:.0f} s |"
      )
  return lines


def _over_flax(case, cases):
  """Images a second relative to the fastest plain Flax on the same mesh."""
  mesh = (case["data"], case["fsdp"])
  flax = [
    c["images_per_second"]
    for c in cases
    if not c["fused"] and (c["data"], c["fsdp"]) == mesh and "milliseconds" in c
  ]
  return case["images_per_second"] / max(flax) if flax and case["fused"] else ""


def plot(rows: list[dict], path) -> None:
  """A panel for each model: a bar for each case, and a dotted line at perfect scaling."""
  figure, axes = plt.subplots(2, -(-len(rows) // 2), figsize=(9, 5), squeeze=False)
  for axis, row in zip(axes.flat, rows, strict=False):
    cases = [case for case in row["cases"] if "milliseconds" in case]
    singles = [c["images_per_second"] for c in cases if c["data"] * c["fsdp"] == 1]
    colors = ["tab:blue" if case["fused"] else "tab:gray" for case in cases]
    axis.barh(range(len(cases)), [case["images_per_second"] for case in cases], color=colors)
    if singles:
      most = max(c["data"] * c["fsdp"] for c in cases)
      axis.axvline(most * statistics.mean(singles), color="tab:blue", ls=":", lw=1)
    axis.set_yticks(range(len(cases)), [_label(case) for case in cases], fontsize=7)
    axis.invert_yaxis()
    axis.set_title(f"{row['row']}, images/s", fontsize=9)
  figure.tight_layout()
  figure.savefig(path, dpi=80)


def _label(case: dict) -> str:
  parts = [case["recipe"] if case["fused"] else "plain Flax"]
  parts += [f"{axis} {case[axis]}" for axis in ("data", "fsdp") if case[axis] > 1] or ["one GPU"]
  if not case["fused"]:
    parts.append(f"{case['batch_size']} images")
  if case["remat"] != "none":
    parts.append("remat")
  if case["gradient_dtype"] != "float32":
    parts.append("bfloat16 gradients")
  return ", ".join(parts)


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


def sent(size: str, devices: int, summed: float, others: float, gathered: int | None) -> float:
  """Bytes that each device sends in a step.

  To gather an array of S bytes, or to sum and scatter it, takes S (n - 1) / n; to sum it on all
  devices takes twice that. Parameters other than matrices are summed, and all but the blocks'
  kernels gathered, in float32.
  """
  count, share = parameters(size), (devices - 1) / devices
  if gathered is None:
    return 2 * share * (summed * count["kernels"] + others * count["split"] + 4 * count["whole"])
  split = (summed + gathered) * count["kernels"] + (others + 4) * count["split"]
  return share * (split + 2 * 4 * count["whole"])


def prediction(milliseconds: dict[str, float]) -> list[str]:
  """The cost of communication if none of it overlaps, given one GPU's milliseconds by size."""
  lines = [
    "| model | way | GB that each of 2, 4, 8 GPUs sends | NVLink: ms | efficiency |"
    " PCIe: ms | efficiency |",
    "|" + "---|" * 7,
  ]
  for size, one in milliseconds.items():
    for way, bytes_of in WAYS.items():
      moved = [sent(size, n, *bytes_of) for n in (2, 4, 8)]
      cells = [", ".join(f"{b / 1e9:.2f}" for b in moved)]
      for rate in LINKS.values():
        times = [b / rate * 1e3 for b in moved]
        cells.append(", ".join(f"{t:.0f}" if t >= 10 else f"{t:.1f}" for t in times))
        cells.append(", ".join(f"{one / (one + t):.3f}" for t in times))
      lines.append(f"| {size} | {way} | {' | '.join(cells)} |")
  return lines


def one_gpu(rows: list[dict]) -> dict[str, float]:
  """Milliseconds of a step on the first GPU by itself, by size."""
  found = {}
  for row in rows:
    for case in row["cases"]:
      if case["data"] * case["fsdp"] == 1 and "milliseconds" in case:
        found.setdefault(row["row"], case["milliseconds"])
  return found
