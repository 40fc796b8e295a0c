"""Which cut of the work is fastest for which shape? Makes a matmul kernel's table.

  python -m benchmarks.tune
  python -m benchmarks.tune --kernel triton --out my_chip.jsonl

The kernel is the one that `backend=None` takes here: Mosaic's on Hopper, else Triton's. A table of
one's own is used with SBJAX_TUNING=my_chip.jsonl (sbjax/pallas/tuning.py).

Every candidate runs at every shape of CLIP's linear layers, with int8 normals, and the fastest goes
into the table; rows of other chips and sizes stay there. With few rows there are other candidates,
and the kernels' own time counts.

Adds a line a shape to benchmarks/results/tuning.jsonl: the rate of the fastest (`tops`), of the cut
that would be taken without the table (`rule_tops`), of XLA where rows are few (`xla_tops`), and of
every candidate (`cuts`; those of older runs are in cuts.jsonl).
"""

import argparse
import concurrent.futures
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.kernels import kernel_race
from benchmarks.operands import DISTRIBUTION, WIDTHS, Operands, shapes, tops
from benchmarks.timing import TRITON_GEMM, append, contender, provenance, race
from sbjax import matmul
from sbjax.backends import get_backend
from sbjax.device import num_sms
from sbjax.formats import INT8
from sbjax.pallas.scaled_matmul_sm90 import (
  IN_TURNS,
  MANY_ROWS,
  NARROW,
  SMALL,
  TALL_IN_TURNS,
  WIDE,
  Config,
  by_rule,
  scaled_matmul,
)

KERNELS = {"mosaic": "scaled_matmul_sm90", "triton": "scaled_matmul_triton"}
KEY = ("chip", "m", "n", "k")
CANDIDATES = [
  Config(),
  WIDE,
  IN_TURNS,
  dataclasses.replace(IN_TURNS, minor="n", width=16),
  dataclasses.replace(IN_TURNS, minor="n", width=16, block_n=160),
  TALL_IN_TURNS,
  dataclasses.replace(TALL_IN_TURNS, minor="n", width=16),
]
FOR_FEW_ROWS = [
  Config(),
  WIDE,
  SMALL,
  NARROW,
  Config(block_m=64, block_n=128, split="n", stages=8, cluster=None),
  Config(block_m=64, block_n=64, split="n", stages=12, cluster="m"),
]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--kernel", choices=KERNELS, help="default: as backend=None chooses")
  parser.add_argument("--out", help="default: the table that the kernel ships with")
  parser.add_argument("--rates", default="benchmarks/results/tuning.jsonl")
  parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 16384, 65536])
  parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
  args = parser.parse_args()
  kernel, tune_one = choose(args.kernel)
  out = Path(args.out or f"sbjax/pallas/{kernel}.jsonl")
  operands = Operands(INT8)
  for m in args.tokens:
    for n, k in shapes(args.widths):
      try:
        found = tune_one(operands.sets(m, n, k, megabytes=100), m, n, k)
      except RuntimeError as error:  # One size's, out of memory for instance: others may do.
        print(f"{m:6} x {n:5} x {k:5}  left out: {error}", flush=True)
        continue
      found = {"kernel": kernel} | found
      write(out, found)
      line = {"benchmark": "tuning", **found, "data": DISTRIBUTION}
      append(args.rates, [line | provenance()])


def choose(backend: str | None):
  """The kernel's name, and the function that tunes it; ends where that does not run."""
  try:
    name = get_backend(backend).name
  except NotImplementedError as error:
    raise SystemExit(f"{error}") from None
  if name == "xla":
    raise SystemExit("There is no kernel to tune: backend=None is 'xla' on this device.")
  if name == "mosaic":
    return KERNELS[name], tune
  from benchmarks import tune_triton  # Triton is not everywhere.

  return KERNELS[name], tune_triton.tune


def tune(sets, m: int, n: int, k: int) -> dict:
  """The fastest candidate, and the rate of each."""

  def build(config):
    # Under its own jit it is lowered once, not once a set.
    run = jax.jit(lambda lhs, rhs: scaled_matmul(lhs, rhs, jnp.bfloat16, config=config))
    return contender(run, sets)

  few = m < MANY_ROWS
  rule = by_rule(m, n, k, num_sms(jax.devices()[0]) or 132)
  candidates = list(dict.fromkeys([*(FOR_FEW_ROWS if few else CANDIDATES), rule]))
  with concurrent.futures.ThreadPoolExecutor() as pool:
    contenders = list(pool.map(build, candidates))
  if few:
    cublas = {TRITON_GEMM: False}
    xla = contender(lambda lhs, rhs: matmul.scaled_matmul(lhs, rhs, jnp.bfloat16), sets, **cublas)
    contenders.append(xla)
    seconds = kernel_race(contenders)
  else:
    race(contenders, rounds=5, seconds=0.004)
    seconds = [one.seconds for one in contenders]
  rates = [round(tops(m, n, k, s), 1) for s in seconds]
  best = min(range(len(candidates)), key=lambda i: seconds[i])
  found = {
    "chip": jax.devices()[0].device_kind,
    "m": m,
    "n": n,
    "k": k,
    "config": in_short(candidates[best]),
    "tops": rates[best],
    "rule_tops": rates[candidates.index(rule)],
  }
  print(f"{m:6} x {n:5} x {k:5} ", *rates, found["config"], flush=True)
  # XLA's rate, if there is one, comes last.
  found["cuts"] = [[in_short(one), rate] for one, rate in zip(candidates, rates, strict=False)]
  return found | ({"xla_tops": rates[-1]} if few else {})


def in_short(config: Config) -> dict:
  """Its fields that differ from those of Config()."""
  default = dataclasses.asdict(Config())
  return {k: v for k, v in dataclasses.asdict(config).items() if v != default[k]}


def write(path: Path, found: dict) -> None:
  """Adds the configuration to the table, in place of that of the same kernel, chip and sizes."""
  names = {"kernel": path.stem}  # In a table that ships with a kernel, rows may leave out its name.
  row = {name: found[name] for name in ("kernel", *KEY, "config") if name in found}
  rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
  same = names | row
  rows = [
    old for old in rows if any((names | old)[name] != same[name] for name in ("kernel", *KEY))
  ]
  path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, row]))


if __name__ == "__main__":
  main()
