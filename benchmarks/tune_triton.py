"""Finds the fastest tile config of the Triton matmul; benchmarks/tune.py has the command.

A candidate counts if it compiles, runs, and has the same bits as the definition. Others are listed
with the reason: the device's shared memory and registers limit the blocks.
"""

import concurrent.futures

import jax
import jax.numpy as jnp

from benchmarks.kernels import kernel_race
from benchmarks.operands import tops
from benchmarks.timing import TRITON_GEMM, Contender, contender, race
from benchmarks.tune import non_defaults
from sbjax.ops import matmul
from sbjax.pallas.triton import scaled_matmul as product
from sbjax.pallas.triton.call import compute_capability
from sbjax.pallas.triton.scaled_matmul import TileConfig
from sbjax.pallas.tuning import MANY_ROWS

CANDIDATES = [
  TileConfig(block_m=128, block_n=256, num_stages=3),
  TileConfig(block_m=128, block_n=256, num_stages=4),
  TileConfig(block_m=128, block_n=256, block_k=64, num_stages=4),
  TileConfig(block_m=256, block_n=128, num_stages=3),
  TileConfig(block_m=256, block_n=128, block_k=64, num_stages=4),
  TileConfig(),
  TileConfig(num_warps=4),
  TileConfig(block_k=64, num_warps=4, num_stages=4),
  TileConfig(block_k=64, num_warps=4, num_stages=4, group_m=16),
  TileConfig(block_m=64, block_n=256, num_warps=4, num_stages=3),
  TileConfig(block_m=128, block_n=64, num_warps=4, num_stages=4),
]
FOR_FEW_ROWS = [
  TileConfig(block_m=128, block_n=64, num_warps=4, num_stages=4),
  TileConfig(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=4),
  TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=4),
  TileConfig(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=6),
  TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=5),
  TileConfig(block_m=32, block_n=128, num_warps=4, num_stages=4),
  TileConfig(block_m=32, block_n=64, num_warps=4, num_stages=5),
]


def tune(sets, m: int, n: int, k: int) -> dict:
  """The fastest candidate, and the rates of all, or why a candidate has none."""
  few = m < MANY_ROWS
  rule = product.by_rule(m, n, compute_capability())
  candidates = list(dict.fromkeys([rule, *(FOR_FEW_ROWS if few else CANDIDATES)]))
  cublas = {TRITON_GEMM: False}
  xla = contender(lambda lhs, rhs: matmul.scaled_matmul(lhs, rhs, jnp.bfloat16), sets, **cublas)
  expected = xla.call(sets)[0]
  built = compiled(candidates, sets)
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


def compiled(candidates: list[TileConfig], sets) -> list[Contender | str]:
  """Each candidate, or why it does not compile."""

  def build(config):
    # The inner jit lowers the kernel once for all sets.
    run = jax.jit(lambda lhs, rhs: product.scaled_matmul(lhs, rhs, jnp.bfloat16, config=config))
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


def reason(error: Exception) -> str:
  first_line, *_ = str(error).strip().splitlines() or [""]
  return f"{type(error).__name__}: {first_line}"[:200]
