"""Will my model gain? Predicts the speedup of 8 bits at a width and a number of tokens.

  python -m benchmarks.predict --width 1280 --tokens 65536 --chip "NVIDIA H200"
  python -m benchmarks.predict --width 1024 --tokens 32768 --card card_l40.json
  python -m benchmarks.predict --check

The gain of recipe `switchback` over bfloat16, from the result files:

- A linear layer [width, mlp_ratio * width] with its gradients: a sum of kernels that were measured
  one by one, in matmul.jsonl and quantize.jsonl. They lack the weight gradient; its time is assumed
  to be the mean of the other two products in bfloat16.
- An MLP's two linear layers: linear.jsonl, measured as a whole at mlp_ratio 4. For another ratio,
  the gain is multiplied by the ratio of the two sums of kernels.
- A whole step: step.jsonl, by the image tower's width and tokens a batch, over plain Flax. If few
  sizes were measured on a chip: the nearest one's gain, scaled as the H200's gain changes.

A measured size has its measured gain. Between sizes the gain is interpolated, in the logarithms of
sizes and gains. Outside them it is the nearest size's gain, without bounds. Bounds are the largest
error that `--check` finds when it predicts measured gains: for the H200's five steps, each from the
other four, 7.4% (3.2% in the mean); for its twelve MLPs, each from the others, 4.4% (2.2%); for
the same MLPs, each as a sum of kernels, 7.1% (2.4%). The last also bounds sums of kernels on other
chips, where it was not checked. Models other than CLIP, and other recipes, may differ.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.tables import CHIP, card_rows, last, read
from sbjax.models.sizes import SIZES

BASES, OURS = ("flax", "flax_loop"), ("switchback", "switchback_loop")
Points = dict[tuple, float]  # Measured figures by sizes.


@dataclasses.dataclass(frozen=True)
class Estimate:
  gain: float
  error: float | None  # Relative to the gain; 0 if measured, None if there is no bound.
  how: str

  def __str__(self):
    if not self.error:
      return f"{self.gain:5.2f}x{'':16} {self.how}"
    low, high = self.gain * (1 - self.error), self.gain * (1 + self.error)
    return f"{self.gain:5.2f}x ({low:.2f} to {high:.2f})  {self.how}"


class Chip:
  """A chip's measurements, from rows of the result files or of a card."""

  def __init__(self, name: str, rows: Callable[[str], list[dict]]):
    def of_chip(section, *keys):
      # On a card, a failed case has a reason instead of sizes.
      there = [row for row in rows(section) if row["chip"] == name and set(keys) <= set(row)]
      return last(there, *keys)

    self.name = name
    self.products = {
      contender: {
        (row["n"] / row["k"], min(row["n"], row["k"]), row["m"]): row["tops"][contender]
        for row in of_chip("matmul", "m", "n", "k")
        if {"xla_bf16", "ours_int8"} <= set(row.get("tops", {}))
      }
      for contender in ("xla_bf16", "ours_int8")
    }
    quantizers = [row for row in rows("quantize") if row["chip"] == name]
    self.quantizers = {
      (row["width"],): row["terabytes_per_second"]["ours"]
      for row in quantizers
      if (row.get("operation"), row.get("format"), row.get("scaling"))
      == ("quantize", "int8", "rowwise")
      and "ours" in row.get("terabytes_per_second", {})
    }
    self.mlps = {
      (row["dim"], row["tokens"]): row["speedup"]["switchback"]
      for row in of_chip("linear", "dim", "tokens")
    }
    self.steps, self.models = {}, {}
    for row in rows("step"):  # The last row of a size counts.
      if row["chip"] == name and (gain := gain_of_step(row)):
        vision = SIZES[row["size"]].vision
        at = (vision.width, row["batch_size"] * vision.tokens)
        for old in [old for old, size in self.models.items() if size == row["size"]]:
          del self.steps[old], self.models[old]
        self.steps[at], self.models[at] = gain, row["size"]

  def __bool__(self):
    return bool(self.products["xla_bf16"] or self.mlps or self.steps)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--width", type=positive)
  parser.add_argument("--tokens", type=positive, help="A batch's, of one GPU.")
  parser.add_argument("--mlp_ratio", type=float, default=4.0)
  parser.add_argument("--chip", default=CHIP, help="As JAX names it.")
  parser.add_argument("--card", type=Path, help="A file of benchmarks/card.py, instead of --chip.")
  parser.add_argument("--check", action="store_true", help="Predict each measured size instead.")
  args = parser.parse_args()
  h200 = Chip(CHIP, read)
  if args.check:
    print("\n".join(report(h200)))
    return
  if args.width is None or args.tokens is None:
    parser.error("--width and --tokens are needed, or --check.")
  if not 0.1 <= args.mlp_ratio <= 100:
    parser.error(f"--mlp_ratio must be from 0.1 to 100, not {args.mlp_ratio}.")
  if args.card:
    chip = Chip(chip_of_card(args.card), lambda section: card_rows(args.card, section))
  else:
    chip = Chip(args.chip, read)
  if not chip:
    sys.exit(nothing_of(chip.name))
  print(
    f"{chip.name}, width {args.width:,}, {args.tokens:,} tokens, mlp_ratio {args.mlp_ratio:g}:"
    " `switchback` over bfloat16"
  )
  for name, estimate in predict(chip, h200, args.width, args.tokens, args.mlp_ratio).items():
    print(f"  {name:32} {estimate or 'no rows of this chip'}")


def predict(
  chip: Chip, h200: Chip, width: int, tokens: int, mlp_ratio: float = 4.0
) -> dict[str, Estimate | None]:
  hidden = round(width * mlp_ratio)
  return {
    f"a linear layer [{width}, {hidden}]": of_layers(chip, h200, tokens, [(width, hidden)]),
    "an MLP's two linear layers": of_mlp(chip, h200, width, tokens, mlp_ratio),
    "a whole training step": of_step(chip, h200, width, tokens),
  }


def weights(points: Points, at: tuple) -> dict[tuple, float]:
  """The measured points around `at` and their interpolation weights, one axis after another."""
  if not at:
    return {(): 1.0}
  values = sorted({point[0] for point in points})
  below = max((v for v in values if v <= at[0]), default=values[0])
  above = min((v for v in values if v >= at[0]), default=values[-1])
  part = 0.0 if below >= above else math.log(at[0] / below) / math.log(above / below)
  found = {}
  for value, weight in ((below, 1 - part), (above, part)):
    if weight:
      rest = {point[1:]: v for point, v in points.items() if point[0] == value}
      inner = weights(rest, at[1:])
      found |= {(value, *point): weight * w for point, w in inner.items()}
  return found


def interpolate(points: Points, at: tuple) -> float:
  around = weights(points, at)
  if len(around) == 1:
    return points[next(iter(around))]
  return math.exp(sum(w * math.log(points[p]) for p, w in around.items()))


def is_inside(points: Points, at: tuple) -> bool:
  """Whether each size is between the smallest and the largest measured size."""
  axes = list(zip(*points, strict=True))
  return all(min(axis) <= size <= max(axis) for axis, size in zip(axes, at, strict=True))


def is_between(points: Points, at: tuple) -> bool:
  """Whether the points around `at` enclose it in every size, so that no size was clamped."""
  around = weights(points, at).items()
  return all(
    math.isclose(math.log(size), sum(w * math.log(p[i]) for p, w in around), abs_tol=1e-9)
    for i, size in enumerate(at)
  )


def ranges(points: Points, names: tuple[str, ...]) -> str:
  axes = zip(names, zip(*points, strict=True), strict=True)
  return ", ".join(f"{name} {short(min(axis))} to {short(max(axis))}" for name, axis in axes)


def short(size: float) -> str:
  return f"{size:,}" if size == int(size) else f"{size:.2f}"


def estimate(points: Points, at: tuple, names: tuple[str, ...], error: float | None) -> Estimate:
  """The gain at `at`: measured, interpolated, or that of the nearest size, as `how` says."""
  gain = interpolate(points, at)
  if at in points:
    return Estimate(gain, 0.0, "measured")
  around = weights(points, at)
  near = " and ".join(" x ".join(map(short, point)) for point in around)
  if is_inside(points, at):
    how = f"interpolated between {near}" if len(around) > 1 else f"as at {near}, the nearest"
    return Estimate(gain, error, how)
  beyond = f"out of range ({ranges(points, names)} were measured)"
  return Estimate(gain, None, f"{beyond}: as at {near}, without bounds")


def of_step(chip: Chip, h200: Chip, width: int, tokens: int) -> Estimate | None:
  at, names = (width, tokens), ("width", "tokens")
  if not chip.steps:
    return None
  if at in chip.steps:
    return Estimate(chip.steps[at], 0.0, f"measured: ViT-{chip.models[at]}")
  if len(chip.steps) > 2:
    return estimate(chip.steps, at, names, worst(leave_one_out(chip.steps)))
  nearest = min(
    chip.steps, key=lambda p: sum(abs(math.log(a / b)) for a, b in zip(p, at, strict=True))
  )
  theirs = estimate(h200.steps, at, names, None)
  gain = chip.steps[nearest] * theirs.gain / interpolate(h200.steps, nearest)
  how = f"ViT-{chip.models[nearest]}'s {chip.steps[nearest]:.2f}x, changed as the {CHIP}'s changes"
  return Estimate(gain, None, f"{how} from there to here ({theirs.how}); without bounds")


def of_mlp(chip: Chip, h200: Chip, width: int, tokens: int, mlp_ratio: float) -> Estimate | None:
  if not chip.mlps:
    hidden = round(width * mlp_ratio)
    return of_layers(chip, h200, tokens, [(width, hidden), (hidden, width)])
  found = estimate(chip.mlps, (width, tokens), ("width", "tokens"), worst(leave_one_out(chip.mlps)))
  if mlp_ratio == 4:
    return found
  both = [[(width, hidden), (hidden, width)] for hidden in (round(width * mlp_ratio), 4 * width)]
  here, at_four = (sum_of_kernels(chip, tokens, layers) for layers in both)
  error = None if found.error is None else max(found.error, worst(check_sums(chip)))
  how = f"{found.how}; from mlp_ratio 4 to {mlp_ratio:g} as the sum of kernels changes"
  if not all(is_between(chip.products["xla_bf16"], at) for at in products_of(tokens, both[0])):
    error, how = None, f"{how}, which is out of range and without bounds"
  return Estimate(found.gain * here / at_four, error, how)


def of_layers(chip: Chip, h200: Chip, tokens: int, layers) -> Estimate | None:
  """For linear layers [K, N]: their kernels' time in bfloat16 over the time in `switchback`."""
  points = chip.products["xla_bf16"]
  if not points:
    return None
  gain = sum_of_kernels(chip, tokens, layers)
  how = "a sum of kernels, each measured"
  products = products_of(tokens, layers)
  error = worst(check_sums(h200))
  if not all(is_between(points, at) for at in products):
    names = ("N / K", "width", "tokens")
    how = f"a sum of kernels, out of range ({ranges(points, names)} were measured), without bounds"
    error = None
  elif not all(at in points for at in products):
    how = "a sum of kernels, interpolated between measured sizes"
  if not chip.quantizers:
    return Estimate(gain, None, f"{how}; no quantizers of this chip are measured: at most this")
  return Estimate(gain, error, how)


def place(m: int, n: int, k: int) -> tuple:
  """A matmul's coordinates for interpolation: N / K, the smaller of N and K, and its rows."""
  return n / k, min(n, k), m


def products_of(tokens: int, layers) -> list[tuple]:
  """The coordinates (`place`) of the forward matmuls and of the input gradients'."""
  return [at for k, n in layers for at in (place(tokens, n, k), place(tokens, k, n))]


def sum_of_kernels(chip: Chip, tokens: int, layers) -> float:
  full = ours = 0.0
  for k, n in layers:
    for is_int8 in (False, True):
      rates = chip.products["ours_int8" if is_int8 else "xla_bf16"]
      teraflop = 2 * tokens * n * k / 1e12
      pair = [teraflop / interpolate(rates, place(tokens, *sizes)) for sizes in ((n, k), (k, n))]
      if is_int8:
        ours += sum(pair)
      else:
        full += sum(pair) + sum(pair) / 2
        ours += sum(pair) / 2  # The weight gradient, in both.
    if chip.quantizers:
      # x and dy are read in 16 bits and written in 8. w is float32: quantized to two layouts in
      # `switchback`, cast once in bfloat16.
      ours += sum(
        3e-12 * tokens * width / interpolate(chip.quantizers, (width,)) for width in (k, n)
      )
      weight = 1e-12 * n * k / interpolate(chip.quantizers, (k,))
      ours, full = ours + 10 * weight, full + 6 * weight
  return full / ours


def leave_one_out(points: Points) -> dict[tuple, tuple[float, float]]:
  """Each measured gain, and its prediction from the other sizes."""
  return {
    at: (gain, interpolate({p: v for p, v in points.items() if p != at}, at))
    for at, gain in points.items()
  }


def check_sums(chip: Chip) -> dict[tuple, tuple[float, float]]:
  """Each measured MLP's gain, and its prediction from the sum of its kernels."""
  return {
    (width, tokens): (gain, sum_of_kernels(chip, tokens, [(width, 4 * width), (4 * width, width)]))
    for (width, tokens), gain in chip.mlps.items()
  }


def worst(checked: dict[tuple, tuple[float, float]]) -> float:
  """The largest error, relative to the measurement."""
  return max(abs(predicted / measured - 1) for measured, predicted in checked.values())


def report(chip: Chip) -> list[str]:
  lines = []
  for name, checked in (
    ("whole steps, each from the other sizes", leave_one_out(chip.steps)),
    ("MLPs, each from the other sizes", leave_one_out(chip.mlps)),
    ("MLPs, each from the sum of its kernels", check_sums(chip)),
  ):
    errors = [predicted / measured - 1 for measured, predicted in checked.values()]
    mean = sum(map(abs, errors)) / len(errors)
    lines.append(
      f"{chip.name}, {name}: error {mean:.1%} in the mean, {worst(checked):.1%} at worst"
    )
    for at, (measured, predicted) in sorted(checked.items()):
      sizes = " x ".join(f"{size:,}" for size in at)
      model = f"ViT-{chip.models[at]}, " if name.startswith("whole") else ""
      lines.append(f"  {model}{sizes} tokens: measured {measured:.3f}x, predicted {predicted:.3f}x")
  return lines


def gain_of_step(row: dict) -> float | None:
  """The time of the fastest plain Flax over that of our fastest."""
  times = {
    n: one["milliseconds"]
    for n, one in row.get("contenders", {}).items()
    if one.get("milliseconds")
  }
  base, ours = ([times[n] for n in names if n in times] for names in (BASES, OURS))
  return min(base) / min(ours) if base and ours else None


def chip_of_card(path: Path) -> str:
  try:
    rows = [row for section in ("matmul", "quantize", "step") for row in card_rows(path, section)]
  except (OSError, ValueError, KeyError, TypeError) as error:
    sys.exit(f"{path} is no card that `python -m benchmarks.card` wrote: {error!r}")
  if not rows:
    sys.exit(f"{path} has no rows: its sections say why.")
  return rows[0]["chip"]


def nothing_of(chip: str) -> str:
  known = ", ".join(dict.fromkeys(row["chip"] for row in read("matmul") + read("step")))
  return (
    f"Nothing of {chip!r} is measured; benchmarks/results has {known}. `python -m benchmarks.card`"
    " takes ten minutes there. Its matmuls and quantizers give the linear layer and the MLP, and"
    " its step that of a ViT-B/16, from which other sizes follow as they do on the"
    f" {CHIP}: --card card_<chip>.json."
  )


def positive(text: str) -> int:
  if not text.isdecimal() or not int(text):
    raise argparse.ArgumentTypeError(f"{text!r} must be a positive integer.")
  return int(text)


if __name__ == "__main__":
  main()
