"""The table, the results and the plot of what `measure` found."""

import math
import re
from pathlib import Path

from sbjax.convert.matmuls import in_columns
from sbjax.convert.rounding import ALL, Estimate, Rounding
from sbjax.models.transformer import BLOCK_LINEARS
from train.rounding.measure import Measured


def results(measured: Measured, names: list[str]) -> dict:
  """{recipe: {layer: {quantity: [value, low, high]}}}; null is infinite or unknown."""
  return {
    name: {
      layer: {
        field: [x if math.isfinite(x) else None for x in estimate]
        for field, estimate in rounding._asdict().items()
      }
      for layer, rounding in _gradients(measured, name).items()
    }
    for name in names
  }


def _gradients(measured: Measured, name: str) -> dict[str, Rounding]:
  return measured.gradients(name, measured.about["batch_size"])


def describe(measured: Measured, names: list[str], layers: int) -> str:
  about = measured.about
  batches = sum(group.batches for group in measured.groups)
  step = "weights" if about["step"] is None else f"step {about['step']}"
  head = (
    f"{step}: gradients of {batches} batches of {about['batch_size']:,} pairs of {about['data']},"
    f" against recipe full in {about['dtype']}. Intervals are 95 %."
  )
  return "\n\n".join([head, *(_describe(measured, name, layers) for name in names)])


def _describe(measured: Measured, name: str, layers: int) -> str:
  found, batch = _gradients(measured, name), measured.about["batch_size"]
  every, forward = found.pop(ALL), measured.forward.get(name)
  share = (batch / every.critical_batch.value) ** 0.5
  lines = [
    f"{name}: a batch's error is {_interval(every.error)} of its noise. The bias is"
    f" {_interval(every.bias)} of the mean gradient",
    f"  and as large as the noise at a batch of {_pairs(every.critical_batch)}. At"
    f" {batch:,} pairs it is {share:.2g} of the noise.",
  ]
  if forward:
    errors = ", ".join(f"{output} {error:.2%}" for output, error in forward.outputs.items())
    lines.append(f"  Errors of outputs: {errors}.")
  worst = sorted(found, key=lambda layer: found[layer].critical_batch.value)[:layers]
  rows = [("layer", "B*", "error/noise", "bias/gradient")]
  rows += [(layer, *_cells(found[layer])) for layer in worst]
  if forward:
    rows[0] += ("y", "logits, alone", "logits, without")
    rows[1:] = [row + _forward_cells(forward, row[0]) for row in rows[1:]]
  return "\n".join([*lines, *(f"  {row}" for row in in_columns(rows))])


def _cells(rounding: Rounding) -> tuple[str, ...]:
  critical = rounding.critical_batch
  return _pairs(critical), _interval(rounding.error), _interval(rounding.bias)


def _forward_cells(forward, layer: str) -> tuple[str, ...]:
  """The layer's own error, that of the logits if it is rounded alone, and without it."""
  of_logits = forward.alone[layer]["logits"], forward.without[layer]["logits"]
  return tuple(f"{error:.2%}" for error in (forward.products[layer], *of_logits))


def _interval(estimate: Estimate) -> str:
  if not math.isfinite(estimate.value):
    return "unknown"
  return "{:.2g} ({:.2g} to {:.2g})".format(*estimate)


def _pairs(critical: Estimate) -> str:
  if not math.isfinite(critical.high):
    return f"at least {_count(critical.low)} pairs"
  value, low, high = map(_count, critical)
  return f"{value} pairs ({low} to {high})"


def _count(pairs: float) -> str:
  """Two digits of a number of pairs."""
  if not math.isfinite(pairs):
    return "infinitely many"
  return f"{float(f'{pairs:.2g}'):,.0f}"


def draw(path: Path, measured: Measured, names: list[str]) -> None:
  """B* by block and kind of layer: a row for each recipe, a column for each tower."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(12, 4 * len(names)), layout="constrained")
  panels = figure.subplots(len(names), 2, sharey=True, squeeze=False)
  for row, name in zip(panels, names, strict=True):
    found = _gradients(measured, name)
    for axis, tower in zip(row, ("image", "text"), strict=True):
      for i, kind in enumerate(BLOCK_LINEARS):
        _draw_kind(axis, found, tower, kind, offset=0.15 * (i - 1.5), colour=f"C{i}")
      axis.axhline(measured.about["batch_size"], color="black", linestyle="--", linewidth=0.8)
      if math.isfinite(found[ALL].critical_batch.value):
        axis.axhline(found[ALL].critical_batch.value, color="gray", linewidth=0.8)
      axis.set_yscale("log")
      axis.xaxis.get_major_locator().set_params(integer=True)
      axis.set_title(f"{name}, {tower}")
      axis.set_xlabel("block. Dashed: the measured batch; gray: all layers; arrows: at least")
    row[0].set_ylabel("batch at which noise = bias, pairs")
  figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
  figure.savefig(path, dpi=110)


def _draw_kind(axis, found, tower: str, kind: str, offset: float, colour: str) -> None:
  """One kind of layer in all blocks, with intervals; an arrow where there is no upper bound."""
  label = kind
  for layer, rounding in found.items():
    match = re.fullmatch(rf"{tower}/block_(\d+)/{kind}", layer)
    if not match:
      continue
    x, critical = int(match[1]) + offset, rounding.critical_batch
    if math.isfinite(critical.high):
      spread = [[critical.value - critical.low], [critical.high - critical.value]]
      axis.errorbar(x, critical.value, spread, fmt="o", color=colour, label=label, markersize=4)
    else:
      axis.plot(x, critical.low, "^", color=colour, label=label, markersize=4)
    label = None
