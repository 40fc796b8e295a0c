"""Does the best learning rate at one width serve all? Standard models, munit's, and its in fp8.

  python -m benchmarks.width_transfer --captions path/to/flickr8k-train-*.tar.gz

Trains a language model over the bytes of captions (benchmarks/byte_lm.py) with AdamW at each width
and each of seven learning rates, which run together under `vmap` from the same parameters and on
the same bytes. The rates of a unit model are those at the smallest width. `loss` is that of bytes
kept for the test, in nats a byte; null: not finite. At one width a standard and a unit model also
train in float16 without a loss scale. Adds a line for each contender and width, and prints whether
the papers' claims hold (`verdict`). `benchmarks/width_report.py` makes the table and the plot.
XLA computes all products, since kernels do not run under `vmap`.
"""

import argparse
import math
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.byte_lm import ByteLM, config_of, loss_of, read_captions, split, windows_at
from benchmarks.timing import append, provenance
from sbjax.models.transformer import BlockOptions
from train.config import OptimizerConfig
from train.optimizer import make_optimizer


class Contender(NamedTuple):
  parametrization: str
  recipe: str
  dtype: str


CONTENDERS = {
  "standard": Contender("standard", "full", "bfloat16"),
  "unit, float32": Contender("unit", "full", "float32"),
  "unit": Contender("unit", "full", "bfloat16"),
  "unit, fp8_static": Contender("unit", "fp8_static", "bfloat16"),
}
FLOAT16 = {  # Without a loss scale, and what they are compared with.
  "standard, float32": Contender("standard", "full", "float32"),
  "standard, float16": Contender("standard", "full", "float16"),
  "unit, float16": Contender("unit", "full", "float16"),
}
ALL = CONTENDERS | FLOAT16
# Seven powers of two from the largest on; of "unit" at the smallest width.
LARGEST = {"standard": -6, "unit": 0}


def main() -> None:
  args = parse()
  data = read_captions(args.captions)
  rows = []
  for name, width in cases(args):
    contender = ALL[name]
    row = {"benchmark": "width_transfer", "contender": name, "width": width}
    row |= contender._asdict() | measure(contender, width, data, args)
    row |= {key: getattr(args, key) for key in ("steps", "batch", "length", "layers", "seed")}
    row |= {"base_width": args.widths[0], "bytes": len(data)}
    print(f"{name:20} {width:5} {row['best_rate']} {row['losses']}", flush=True)
    append(args.out, [row | provenance()])
    rows.append(row)
  for name, figure in verdict(rows).items():
    print(f"{name}: {figure}")


def parse(arguments=None):
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--captions", nargs="+", required=True, help="tar shards, or text files")
  parser.add_argument("--out", default="benchmarks/results/width_transfer.jsonl")
  parser.add_argument("--widths", type=int, nargs="+", default=[128, 256, 512, 1024])
  parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=ALL)
  parser.add_argument("--float16_width", type=int, default=256, help="0: no float16")
  parser.add_argument("--rates", type=int, default=7, help="how many")
  parser.add_argument("--largest_standard", type=int, default=LARGEST["standard"], help="log2")
  parser.add_argument("--largest_unit", type=int, default=LARGEST["unit"], help="log2")
  parser.add_argument("--together", type=int, default=0, help="rates at a time; 0: all; 1: no vmap")
  parser.add_argument("--steps", type=int, default=250)
  parser.add_argument("--batch", type=int, default=32)
  parser.add_argument("--length", type=int, default=128)
  parser.add_argument("--layers", type=int, default=4)
  parser.add_argument("--tests", type=int, default=128, help="windows of the test")
  parser.add_argument("--seed", type=int, default=0)
  return parser.parse_args(arguments)


def cases(args) -> list[tuple[str, int]]:
  """The names and widths of what is trained."""
  pairs = [(name, width) for name in args.contenders for width in args.widths]
  if width := args.float16_width:
    pairs += [(name, width) for name in FLOAT16 if (name, width) not in pairs]
  return pairs


def measure(contender: Contender, width: int, data: np.ndarray, args) -> dict:
  """The rates, the test's loss for each after training, the best, and seconds."""
  largest = getattr(args, f"largest_{contender.parametrization}")
  rates = [2.0 ** (largest - i) for i in reversed(range(args.rates))]
  started = time.perf_counter()
  operands = jnp.asarray(rates, jnp.float32), *drawn(data, args)
  run = jax.jit(trainer(contender, width, args)).lower(*operands).compile()
  compiled = time.perf_counter()
  losses = np.asarray(run(*operands)).astype(float).tolist()
  seconds = time.perf_counter() - compiled
  losses = [round(loss, 5) if math.isfinite(loss) else None for loss in losses]
  return {
    "rates": rates,
    "losses": losses,
    **best(rates, losses),
    "compile_seconds": round(compiled - started, 2),
    "seconds": round(seconds, 2),
  }


def drawn(data: np.ndarray, args) -> tuple[jax.Array, ...]:
  """The bytes, where each window of each step begins, and the windows of the test."""
  starts, tests = split(data, args.steps, args.batch, args.length, args.tests, args.seed)
  return jnp.asarray(data), jnp.asarray(starts), jnp.asarray(tests)


def trainer(contender: Contender, width: int, args):
  """`train(rates, data, starts, tests)`: the test's loss for each rate [rates]."""
  options = BlockOptions(
    parametrization=contender.parametrization,
    recipe=contender.recipe,
    dtype=contender.dtype,
    backend="xla",
    attention_backend="xla",
  )
  model = ByteLM(config_of(width, args.layers, args.length), options)
  base = args.widths[0] if contender.parametrization == "unit" else 0
  config = OptimizerConfig(
    name="adamw",
    learning_rate=1.0,  # Times a rate under vmap.
    warmup_steps=args.steps // 10,
    eps=1e-10,  # A standard model's gradients of a mean over bytes are small.
    weight_decay=0.0,
    base_width=base,
  )
  optimizer, _ = make_optimizer(config, args.steps, parametrization=contender.parametrization)

  def train(rates, data, starts, tests):
    def loss_at(params, starts):
      return loss_of(model, params, windows_at(data, starts, args.length))

    def of_rate(rate):
      def step(state, starts):
        params, opt_state = state
        gradients = jax.grad(loss_at)(params, starts)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        updates = jax.tree.map(lambda u: rate * u, updates)
        return (optax.apply_updates(params, updates), opt_state), None

      params = model.init(jax.random.key(args.seed), tests[:1, :-1].astype(jnp.int32))["params"]
      (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), starts)
      return loss_of(model, params, tests)

    if args.together == 1:
      return jax.lax.map(of_rate, rates)
    return jax.lax.map(of_rate, rates, batch_size=args.together or len(rates))

  return train


def best(rates: list[float], losses: list[float | None]) -> dict:
  """The rate of the least loss, that loss, and whether the rate is the first or the last tried."""
  finite = [(loss, rate) for loss, rate in zip(losses, rates, strict=True) if loss is not None]
  if not finite:
    return {"best_rate": None, "best_loss": None, "at_edge": True}
  loss, rate = min(finite)
  return {"best_rate": rate, "best_loss": loss, "at_edge": rate in (rates[0], rates[-1])}


def verdict(rows: list[dict]) -> dict[str, float | bool]:
  """What the papers claim, of rows of one run; a claim whose rows are missing is left out.

  rate_spread: the largest over the smallest of the best rates of all widths: at most 2 of a unit
    model (munit), at least 4 of a standard one. It is a lower bound where a best rate is the first
    or the last one tried.
  fp8_excess: how much larger fp8's best loss is than float32's, as a share, at the worst width: at
    most .005.
  float16_excess: the same of float16 without a loss scale: at most .01 of a unit model (unit
    scaling); a standard one loses more, or is not finite (inf).
  """
  found = {(row["contender"], row["width"]): row for row in rows}
  figures = {}
  for name in ("standard", "unit"):
    own = [row for (other, _), row in found.items() if other == name]
    rates = [row["best_rate"] for row in own]
    if len(rates) > 1 and None not in rates:
      figures[f"{name}: rate_spread"] = spread = max(rates) / min(rates)
      inside = not any(row["at_edge"] for row in own)  # Else the spread is a lower bound.
      claimed = spread >= 4 if name == "standard" else spread <= 2 and inside
      figures[f"{name}: rate_spread as claimed"] = claimed
  pairs = (
    ("fp8_excess", "unit, fp8_static", "unit, float32", lambda x: x <= 0.005),
    ("unit: float16_excess", "unit, float16", "unit, float32", lambda x: x <= 0.01),
    ("standard: float16_excess", "standard, float16", "standard, float32", lambda x: x > 0.01),
  )
  for key, name, reference, holds in pairs:
    excess = [
      math.inf if row["best_loss"] is None else row["best_loss"] / other["best_loss"] - 1
      for (own, width), row in found.items()
      if own == name and (other := found.get((reference, width))) and other["best_loss"]
    ]
    if excess:
      figures[key] = worst = round(max(excess), 5)
      figures[f"{key} as claimed"] = holds(worst)
  return figures


if __name__ == "__main__":
  main()
