"""Finds the fastest tile config for each shape and writes a matmul kernel's tuning table.

  python -m benchmarks.tune
  python -m benchmarks.tune --kernel triton --out my_device.jsonl

The default kernel is that of `backend=None`: Mosaic's on Hopper, else Triton's.
SBJAX_TUNING=my_device.jsonl makes the library use a table of your own (sbjax/pallas/tuning.py).

Every candidate runs at every shape of CLIP's linear layers with int8 normals, and the fastest goes
into the table. A candidate counts if it compiles, runs, and has the same bits as the definition: a
device's shared memory and registers limit the blocks. Rows of other devices and sizes stay
unchanged. Matmuls with few rows have other candidates and are compared by the kernels' own time.

Adds a line for each shape to benchmarks/results/tuning.jsonl: the rates of the fastest candidate
(`tops`), of the rule's (`rule_tops`), of XLA (`xla_tops`), and of every candidate, or why it has
none (`candidates`; older lines have older names: `cuts`, `split`, `minor`, `width`).
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.kernels import kernel_race
from benchmarks.operands import DISTRIBUTION, WIDTHS, Operands, shapes, tops
from benchmarks.timing import TRITON_GEMM, Contender, append, contender, provenance, race, reason
from sbjax.ops import device, matmul
from sbjax.ops.registry import get_backend
from sbjax.pallas.tuning import MANY_ROWS
from sbjax.quantize import INT8

KERNELS = {"mosaic": "scaled_matmul_sm90", "triton": "scaled_matmul_triton"}
SHIPPED = {
  "scaled_matmul_sm90": "sbjax/pallas/sm90/scaled_matmul.jsonl",
  "scaled_matmul_triton": "sbjax/pallas/triton/scaled_matmul.jsonl",
}
KEY = ("device", "m", "n", "k")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--kernel", choices=KERNELS, help="default: as backend=None chooses")
  parser.add_argument("--out", help="default: the table that the kernel ships with")
  parser.add_argument("--rates", default="benchmarks/results/tuning.jsonl")
  parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 16384, 65536])
  parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
  args = parser.parse_args()
  name, tuner = choose(args.kernel)
  out = Path(args.out or SHIPPED[name])
  operands = Operands(INT8)
  for m in args.tokens:
    for n, k in shapes(args.widths):
      try:
        sets = operands.sets(m, n, k, megabytes=100)
        result = {"kernel": name} | tune(tuner, sets, m, n, k)
      except RuntimeError as error:  # For example out of memory; other sizes may fit.
        print(f"{m:6} x {n:5} x {k:5}  left out: {error}", flush=True)
        continue
      write(out, result | {"device": device.target().device_kind})
      append(args.rates, [{"benchmark": "tuning", **result, "data": DISTRIBUTION} | provenance()])


def choose(backend: str | None):
  """The kernel's name, and its module of candidates; exits if the kernel does not run here."""
  try:
    name = get_backend(backend).name
  except NotImplementedError as error:
    raise SystemExit(f"{error}") from None
  if name == "xla":
    raise SystemExit("There is no kernel to tune: backend=None is 'xla' on this device.")
  return KERNELS[name], importlib.import_module(f"benchmarks.tune_{name}")


def tune(tuner, sets, m: int, n: int, k: int) -> dict:
  """The fastest candidate, and the rates of all, or why a candidate has none.

  tuner: benchmarks/tune_mosaic.py or benchmarks/tune_triton.py.
  """
  few, rule = m < MANY_ROWS, tuner.rule(m, n, k)
  candidates = list(dict.fromkeys([rule, *(tuner.FOR_FEW_ROWS if few else tuner.CANDIDATES)]))
  cublas = {TRITON_GEMM: False}
  xla = contender(lambda lhs, rhs: matmul.scaled_matmul(lhs, rhs, jnp.bfloat16), sets, **cublas)
  expected = xla.call(sets)[0]
  built = compiled(tuner.kernel, candidates, sets)
  results = [check(one, expected) if isinstance(one, Contender) else one for one in built]
  usable = {c: r for c, r in zip(candidates, results, strict=True) if isinstance(r, Contender)}
  if not usable:
    raise RuntimeError(f"No candidate runs at {m} x {n} x {k}; the rule's: {results[0]}")
  *seconds, xla_seconds = measured([*usable.values(), xla], few)
  times = dict(zip(usable, seconds, strict=True))
  rates = {config: round(tops(m, n, k, time), 1) for config, time in times.items()}
  best = min(times, key=times.get)
  result = {
    "m": m,
    "n": n,
    "k": k,
    "config": non_defaults(best),
    "tops": rates[best],
    "rule_tops": rates.get(rule),
    "xla_tops": round(tops(m, n, k, xla_seconds), 1),
    "candidates": [
      [non_defaults(c), rates.get(c, r)] for c, r in zip(candidates, results, strict=True)
    ],
  }
  print(f"{m:6} x {n:5} x {k:5} ", *rates.values(), result["config"], flush=True)
  return result


def compiled(kernel, candidates: list, sets) -> list[Contender | str]:
  """Each candidate, or why it does not compile."""

  def build(config):
    product = functools.partial(kernel.scaled_matmul, config=config)
    # The inner jit lowers the kernel once for all sets.
    run = jax.jit(lambda lhs, rhs: product(lhs, rhs, jnp.bfloat16))
    try:
      return contender(run, sets)
    except Exception as error:  # Triton, ptxas and XLA each have their own exceptions.
      return reason(error)

  with concurrent.futures.ThreadPoolExecutor() as pool:
    built = list(pool.map(build, candidates))
  # A candidate that failed while others compiled may compile by itself.
  return [
    build(config) if isinstance(one, str) else one
    for config, one in zip(candidates, built, strict=True)
  ]


def check(one: Contender, expected) -> Contender | str:
  """The candidate, or the reason why it does not count."""
  try:
    differing = int((one.call(one.sets)[0] != expected).sum())
  except Exception as error:
    return reason(error)
  return f"{differing} results are not the definition's" if differing else one


def measured(contenders: list[Contender], few: bool) -> list[float]:
  """Seconds of each; at few rows only the kernels' own time, since a launch takes as long."""
  if few:
    return kernel_race(contenders)
  race(contenders, rounds=5, seconds=0.004)
  return [one.seconds for one in contenders]


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
