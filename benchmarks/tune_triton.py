"""Which tile config is fastest for the Triton matmul; benchmarks/tune.py has the command.

A candidate counts where it compiles, runs, and gives the definition's bits; the others are listed
with the reason, since which blocks fit depends on a chip's shared memory and registers.
"""

import concurrent.futures

import jax
import jax.numpy as jnp

from benchmarks.kernels import kernel_race
from benchmarks.operands import tops
from benchmarks.timing import TRITON_GEMM, Contender, contender, race
from sbjax import matmul
from sbjax.pallas import scaled_matmul_triton as product
from sbjax.pallas.scaled_matmul_triton import Config
from sbjax.pallas.triton import compute_capability
from sbjax.pallas.tuning import MANY_ROWS

CANDIDATES = [
  Config(block_m=128, block_n=256, num_stages=3),
  Config(block_m=128, block_n=256, num_stages=4),
  Config(block_m=128, block_n=256, block_k=64, num_stages=4),
  Config(block_m=256, block_n=128, num_stages=3),
  Config(block_m=256, block_n=128, block_k=64, num_stages=4),
  Config(),
  Config(num_warps=4),
  Config(block_k=64, num_warps=4, num_stages=4),
  Config(block_k=64, num_warps=4, num_stages=4, group_m=16),
  Config(block_m=64, block_n=256, num_warps=4, num_stages=3),
  Config(block_m=128, block_n=64, num_warps=4, num_stages=4),
]
FOR_FEW_ROWS = [
  Config(block_m=128, block_n=64, num_warps=4, num_stages=4),
  Config(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=4),
  Config(block_m=64, block_n=64, num_warps=4, num_stages=4),
  Config(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=6),
  Config(block_m=64, block_n=32, num_warps=4, num_stages=5),
  Config(block_m=32, block_n=128, num_warps=4, num_stages=4),
  Config(block_m=32, block_n=64, num_warps=4, num_stages=5),
]


def tune(sets, m: int, n: int, k: int) -> dict:
  """The fastest candidate, and the rate of each, or the reason why it has none."""
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
  found = {
    "chip": jax.devices()[0].device_kind,
    "m": m,
    "n": n,
    "k": k,
    "config": in_short(best),
    "tops": rates[best],
    "rule_tops": rates.get(rule),
    "xla_tops": round(tops(m, n, k, xla_seconds), 1),
    "cuts": [[in_short(c), rates.get(c, r)] for c, r in zip(candidates, results, strict=True)],
  }
  print(f"{m:6} x {n:5} x {k:5} ", *rates.values(), found["config"], flush=True)
  return found


def compiled(candidates: list[Config], sets) -> list[Contender | str]:
  """Each candidate, or why it does not compile."""

  def build(config):
    # Under its own jit it is lowered once, not once a set.
    run = jax.jit(lambda lhs, rhs: product.scaled_matmul(lhs, rhs, jnp.bfloat16, config=config))
    try:
      return contender(run, sets)
    except Exception as error:  # Triton's, ptxas's or XLA's: each has classes of its own.
      return reason(error)

  with concurrent.futures.ThreadPoolExecutor() as pool:
    found = list(pool.map(build, candidates))
  # One that failed beside others may compile by itself.
  return [
    build(config) if isinstance(one, str) else one
    for config, one in zip(candidates, found, strict=True)
  ]


def check(one: Contender, expected) -> Contender | str:
  """The candidate, or what is wrong with it."""
  try:
    differing = int((one.call(one.sets)[0] != expected).sum())
  except Exception as error:
    return reason(error)
  return f"{differing} results are not the definition's" if differing else one


def measured(contenders: list[Contender], few: bool) -> list[float]:
  """Seconds of each: by the kernels' own time where a launch takes as long."""
  if few:
    return kernel_race(contenders)
  race(contenders, rounds=5, seconds=0.004)
  return [one.seconds for one in contenders]


def reason(error: Exception) -> str:
  first_line, *_ = str(error).strip().splitlines() or [""]
  return f"{type(error).__name__}: {first_line}"[:200]


def in_short(config: Config) -> dict:
  """Its fields that differ from those of Config()."""
  default = vars(Config())
  return {field: value for field, value in vars(config).items() if value != default[field]}
