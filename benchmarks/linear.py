"""How much faster is a transformer's MLP in 8 bits, and what does quantizing cost?

  XLA_FLAGS=--xla_gpu_enable_triton_gemm=false python -m benchmarks.linear

Forward, input gradient and weight gradient of fc1 [dim, 4 dim] and fc2 [4 dim, dim] with every
quantize, under one jit, as in figures 3, 4 (left) and 12 of Wortsman et al. 2023. Activations are
bfloat16, weights float32 for every recipe, and nothing stands between the layers. The whole is
timed by the clock; what each kernel in it takes, by JAX's profiler. Adds a line a (tokens, dim).
"""

import argparse
import re

import jax
import jax.numpy as jnp

from benchmarks.kernels import GROUPS, kernels
from benchmarks.timing import Contender, append, contender, provenance, race
from sbjax import quantized_dot

RECIPES = ("full", "switchback", "switchback_m", "switchback_q", "fp8_switchback")
# A weight gradient's parts are summed in a kernel of XLA's (sbjax/token_sum.py).
MATMULS = f"{GROUPS['8-bit matmuls']}|{GROUPS['16-bit matmuls']}|^loop_reduce_fusion"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", default="benchmarks/results/linear.jsonl")
  parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536, 131072])
  parser.add_argument("--dims", type=int, nargs="+", default=[1024, 1280, 2048, 4096])
  args = parser.parse_args()
  for tokens in args.tokens:
    for dim in args.dims:
      line = measure(tokens, dim)
      faster = "  ".join(f"{name} {ratio:.2f}x" for name, ratio in line["speedup"].items())
      share = line["share_of_quantizing"]["switchback"]
      print(f"{tokens:6} tokens, dim {dim:4}  {faster}  quantizing {share:.1%}", flush=True)
      append(args.out, [line | provenance()])


def measure(tokens: int, dim: int) -> dict:
  keys = jax.random.split(jax.random.key(dim), 4)
  x, dy = (jax.random.normal(key, (tokens, dim), jnp.bfloat16) for key in keys[:2])
  w1 = jax.random.normal(keys[2], (dim, 4 * dim)) * dim**-0.5
  w2 = jax.random.normal(keys[3], (4 * dim, dim)) * (4 * dim) ** -0.5
  contenders = {name: contender(whole(name), [(x, w1, w2, dy)]) for name in RECIPES}
  race(list(contenders.values()), rounds=7, seconds=0.03)
  times = {name: one.seconds for name, one in contenders.items()}
  parts = {name: profile(one) for name, one in contenders.items()}
  return {
    "benchmark": "linear",
    "tokens": tokens,
    "dim": dim,
    "milliseconds": {name: round(time * 1e3, 4) for name, time in times.items()},
    "speedup": {name: round(times["full"] / time, 3) for name, time in times.items()},
    "kernels": parts,
    "share_of_quantizing": {name: share_of_quantizing(found) for name, found in parts.items()},
    "data": "normal x, dy and w",
  }


def whole(recipe: str):
  """dx, dw1 and dw2 of two layers, and y."""

  def run(x, w1, w2, dy):
    def layers(x, w1, w2):
      return quantized_dot(quantized_dot(x, w1, recipe), w2, recipe)

    y, gradients = jax.vjp(layers, x, w1, w2)
    return y, *gradients(dy)

  return run


def profile(one: Contender, calls: int = 5, seconds: float = 0.2) -> list[tuple[str, float]]:
  """Name and milliseconds of every kernel of a call, in their order: means over some calls.

  These come after `seconds` of the same work, so that the chip's clock is what it is in a race.
  """
  before = int(seconds / one.seconds)

  def work():
    for _ in range(before + calls):
      result = one.call(one.sets)
    return result

  listed = kernels(work)
  each = len(listed) // (before + calls)
  listed = listed[-calls * each :]
  times = [sum(k.milliseconds for k in listed[i::each]) / calls for i in range(each)]
  return [(k.name[:60], round(t, 4)) for k, t in zip(listed[:each], times, strict=True)]


def share_of_quantizing(found) -> float:
  """What all kernels but the matmuls take, of the whole: what a recipe's rounding costs."""
  matmul = sum(time for name, time in found if re.search(MATMULS, name))
  return round(1 - matmul / sum(time for _, time in found), 4)


if __name__ == "__main__":
  main()
