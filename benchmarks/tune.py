"""Finds the fastest tile config for each shape and writes a matmul kernel's tuning table.

  python -m benchmarks.tune
  python -m benchmarks.tune --kernel triton --out my_device.jsonl

The default kernel is that of `backend=None`: Mosaic's on Hopper, else Triton's.
SBJAX_TUNING=my_device.jsonl makes the library use a table of your own (sbjax/pallas/tuning.py).

Every candidate runs at every shape of CLIP's linear layers with int8 normals, and the fastest goes
into the table. Rows of other devices and sizes stay unchanged. Matmuls with few rows have other
candidates and are compared by the kernels' own time.

Adds a line for each shape to benchmarks/results/tuning.jsonl: the rates of the fastest candidate
(`tops`), of the rule's (`rule_tops`), of XLA at few rows (`xla_tops`), and of every candidate
(`candidates`; older lines have older names: `cuts`, `split`, `minor`, `width`).
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
from sbjax.ops import matmul
from sbjax.ops.device import num_sms
from sbjax.ops.registry import get_backend
from sbjax.pallas.sm90.scaled_matmul import (
  MANY_ROWS,
  NARROW,
  PINGPONG,
  SMALL,
  TALL_PINGPONG,
  WIDE,
  TileConfig,
  by_rule,
  scaled_matmul,
)
from sbjax.quantize import INT8

KERNELS = {"mosaic": "scaled_matmul_sm90", "triton": "scaled_matmul_triton"}
SHIPPED = {
  "scaled_matmul_sm90": "sbjax/pallas/sm90/scaled_matmul.jsonl",
  "scaled_matmul_triton": "sbjax/pallas/triton/scaled_matmul.jsonl",
}
KEY = ("device", "m", "n", "k")
CANDIDATES = [
  TileConfig(),
  WIDE,
  PINGPONG,
  dataclasses.replace(PINGPONG, raster_order="n", raster_width=16),
  dataclasses.replace(PINGPONG, raster_order="n", raster_width=16, block_n=160),
  TALL_PINGPONG,
  dataclasses.replace(TALL_PINGPONG, raster_order="n", raster_width=16),
]
FOR_FEW_ROWS = [
  TileConfig(),
  WIDE,
  SMALL,
  NARROW,
  TileConfig(block_m=64, block_n=128, schedule="cooperative_n", stages=8, cluster=None),
  TileConfig(block_m=64, block_n=64, schedule="cooperative_n", stages=12, cluster="m"),
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
  out = Path(args.out or SHIPPED[kernel])
  operands = Operands(INT8)
  for m in args.tokens:
    for n, k in shapes(args.widths):
      try:
        result = {"kernel": kernel} | tune_one(operands.sets(m, n, k, megabytes=100), m, n, k)
      except RuntimeError as error:  # For example out of memory; other sizes may fit.
        print(f"{m:6} x {n:5} x {k:5}  left out: {error}", flush=True)
        continue
      write(out, result | {"device": jax.devices()[0].device_kind})
      append(args.rates, [{"benchmark": "tuning", **result, "data": DISTRIBUTION} | provenance()])


def choose(backend: str | None):
  """The kernel's name, and the function that tunes it; exits if the kernel does not run here."""
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
  """The fastest candidate, and the rates of all."""

  def build(config):
    # The inner jit lowers the kernel once for all sets.
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
  result = {
    "m": m,
    "n": n,
    "k": k,
    "config": non_defaults(candidates[best]),
    "tops": rates[best],
    "rule_tops": rates[candidates.index(rule)],
  }
  print(f"{m:6} x {n:5} x {k:5} ", *rates, result["config"], flush=True)
  # XLA's rate, if there is one, comes last.
  pairs = zip(candidates, rates, strict=False)
  result["candidates"] = [[non_defaults(config), rate] for config, rate in pairs]
  return result | ({"xla_tops": rates[-1]} if few else {})


def non_defaults(config) -> dict:
  """The fields of a tile config that differ from their defaults."""
  defaults = dataclasses.asdict(type(config)())
  return {k: v for k, v in dataclasses.asdict(config).items() if v != defaults[k]}


def write(path: Path, result: dict) -> None:
  """Adds the config to the table and removes the row of the same kernel, device and sizes."""
  key = ("kernel", *KEY)
  row = {name: result[name] for name in (*key, "config")}
  rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
  rows = [old for old in rows if any(old[name] != row[name] for name in key)]
  path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, row]))


if __name__ == "__main__":
  main()
