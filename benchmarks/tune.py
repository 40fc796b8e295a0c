"""Which cut of the work is fastest for which shape? Makes the Mosaic matmul's table.

  python -m benchmarks.tune --out sbjax/pallas/scaled_matmul_sm90.jsonl

Every candidate runs at every shape of CLIP's linear layers, with int8 normals; the fastest is kept.
Rows of other chips stay in the file.
"""

import argparse
import concurrent.futures
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.operands import Operands, shapes, tops
from benchmarks.timing import contender, race
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


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", default="sbjax/pallas/scaled_matmul_sm90.jsonl")
  parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536])
  args = parser.parse_args()
  operands, rows = Operands(INT8), []
  for n, k in shapes():
    for m in args.tokens:
      rows.append(tune(operands.sets(m, n, k, megabytes=150), m, n, k))
      print(f"{m:6} x {n:5} x {k:5}  {rows[-1]['tops']:5} TOP/s  {rows[-1]['config']}", flush=True)
  write(Path(args.out), rows)


def tune(sets, m: int, n: int, k: int) -> dict:
  def build(config):
    return contender(lambda lhs, rhs: scaled_matmul(lhs, rhs, jnp.bfloat16, config=config), sets)

  with concurrent.futures.ThreadPoolExecutor() as pool:
    contenders = list(pool.map(build, CANDIDATES))
  race(contenders, rounds=5, seconds=0.004)
  best = min(range(len(contenders)), key=lambda i: contenders[i].seconds)
  default = dataclasses.asdict(Config())
  config = dataclasses.asdict(CANDIDATES[best])
  return {
    "chip": jax.devices()[0].device_kind,
    "m": m,
    "n": n,
    "k": k,
    "config": {name: value for name, value in config.items() if value != default[name]},
    "tops": round(tops(m, n, k, contenders[best].seconds)),
  }


def write(path: Path, rows: list[dict]) -> None:
  kept = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
  chip = jax.devices()[0].device_kind
  rows = [row for row in kept if row["chip"] != chip] + rows
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
  main()
