"""Which cut of the work is fastest for which shape? Makes the Mosaic matmul's table.

  XLA_FLAGS=--xla_gpu_enable_triton_gemm=false python -m benchmarks.tune

Every candidate runs at every shape of CLIP's linear layers, with int8 normals; the fastest is kept.
Small ones have candidates of their own and go by the kernels' own time, and what XLA reaches is
noted beside (`xla_tops`). Rows of other chips and sizes stay in the file.
"""

import argparse
import concurrent.futures
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.kernels import kernel_seconds
from benchmarks.operands import WIDTHS, Operands, shapes, tops
from benchmarks.timing import contender, race
from sbjax import matmul
from sbjax.formats import INT8
from sbjax.pallas.scaled_matmul_sm90 import Config, scaled_matmul

WIDE = Config(block_m=128, block_n=256, cluster="m")
CANDIDATES = [
  Config(),
  Config(width=8, minor="m"),
  Config(block_m=128, block_n=128, stages=6),
  WIDE,
  dataclasses.replace(WIDE, minor="m"),
  dataclasses.replace(WIDE, lead=1),
]
SMALL = 4096  # Fewer rows than that are small.
FOR_SMALL = [
  Config(),
  WIDE,
  Config(block_m=128, block_n=128, stages=6, cluster=None),
  Config(block_m=128, block_n=64, stages=8, cluster=None),
  Config(block_m=64, block_n=128, split="n", stages=8, cluster=None),
  Config(block_m=64, block_n=64, split="n", stages=12, cluster="m"),
]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", default="sbjax/pallas/scaled_matmul_sm90.jsonl")
  parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 16384, 65536])
  parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
  args = parser.parse_args()
  operands = Operands(INT8)
  for m in args.tokens:
    for n, k in shapes(args.widths):
      write(Path(args.out), tune(operands.sets(m, n, k, megabytes=100), m, n, k))


def tune(sets, m: int, n: int, k: int) -> dict:
  def build(config):
    # Under its own jit it is lowered once, not once a set.
    run = jax.jit(lambda lhs, rhs: scaled_matmul(lhs, rhs, jnp.bfloat16, config=config))
    return contender(run, sets)

  candidates = FOR_SMALL if m < SMALL else CANDIDATES
  with concurrent.futures.ThreadPoolExecutor() as pool:
    contenders = list(pool.map(build, candidates))
  if m < SMALL:
    xla = contender(lambda lhs, rhs: matmul.scaled_matmul(lhs, rhs, jnp.bfloat16), sets)
    seconds = [kernel_seconds(one, calls=3) for one in (*contenders, xla)]
  else:
    race(contenders, rounds=5, seconds=0.004)
    seconds = [one.seconds for one in contenders]
  rates = [round(tops(m, n, k, s)) for s in seconds]
  best = max(range(len(candidates)), key=lambda i: rates[i])
  default = dataclasses.asdict(Config())
  config = dataclasses.asdict(candidates[best])
  found = {
    "chip": jax.devices()[0].device_kind,
    "m": m,
    "n": n,
    "k": k,
    "config": {name: value for name, value in config.items() if value != default[name]},
    "tops": rates[best],
  }
  print(f"{m:6} x {n:5} x {k:5} ", *rates, found["config"], flush=True)
  return found | ({"xla_tops": rates[-1]} if m < SMALL else {})


def write(path: Path, row: dict) -> None:
  """Adds a row to the file, in place of that of the same chip and sizes."""
  key = ("chip", "m", "n", "k")
  rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
  rows = [old for old in rows if any(old[name] != row[name] for name in key)] + [row]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
  main()
