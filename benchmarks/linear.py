"""How much faster is a transformer's MLP in 8 bits, and what does quantizing cost?

  XLA_FLAGS=--xla_gpu_enable_triton_gemm=false python -m benchmarks.linear

Times forward, input gradient and weight gradient of fc1 [dim, 4 dim] and fc2 [4 dim, dim], with
quantization, under one jit, as in figures 3, 4 (left) and 12 of Wortsman et al. 2023. Activations
are bfloat16, weights are float32 for every recipe, and there is no activation function between the
layers. The clock times the whole, and JAX's profiler each of its kernels. Each operation of `full`
and `switchback` is also timed by itself, for both layers together. One input set is several times
as large as the chip's cache; operations on weights have four sets. Adds a line for each
(tokens, dim).
"""

import re
import statistics
from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.kernels import GROUPS, kernels
from benchmarks.timing import Contender, append, contender, parser_of, provenance, race
from sbjax import Quantized, Spec, quantized_dot
from sbjax.ops.matmul import full_dot
from sbjax.ops.registry import get_backend
from sbjax.ops.split_k import split_k_matmul
from sbjax.quantize import INT8

RECIPES = (
  "full", "switchback", "switchback_m", "switchback_q", "switchback_c", "fp8_switchback",
)  # fmt: skip
ROW, TENSOR = Spec(INT8, "rowwise"), Spec(INT8, "tensorwise")
OPERATIONS = {  # The operations of a linear layer in `full` and `switchback`.
  "quantize x": lambda ops, a: ops.quantize(a.x, ROW),
  "quantize dy": lambda ops, a: ops.quantize(a.dy, ROW),
  "quantize w.T": lambda ops, a: ops.quantize_transposed(a.w, TENSOR),
  "quantize w": lambda ops, a: ops.quantize(a.w, TENSOR),
  "x w, int8": lambda ops, a: ops.scaled_matmul(a.x8, a.turned8, a.x.dtype),
  "dy w.T, int8": lambda ops, a: ops.scaled_matmul(a.dy8, a.w8, a.x.dtype),
  "cast w": lambda ops, a: a.w.astype(a.x.dtype),
  "x w": lambda ops, a: full_dot(a.x, a.w16, ((1,), (0,)), a.x.dtype),
  "dy w.T": lambda ops, a: full_dot(a.dy, a.w16, ((1,), (1,)), a.x.dtype),
  "x.T dy": lambda ops, a: split_k_matmul(a.x, a.dy, a.w.dtype),
}
OF_W = ("quantize w.T", "quantize w", "cast w")
# A kernel of XLA's sums the parts of a split-K weight gradient (sbjax/ops/split_k.py).
MATMULS = f"{GROUPS['8-bit matmuls']}|{GROUPS['16-bit matmuls']}|^loop_reduce_fusion"


class Layer(NamedTuple):
  """The operands of a linear layer's operations: x [M, K], w [K, N] and dy [M, N], also rounded."""

  x: jax.Array
  w: jax.Array
  dy: jax.Array
  w16: jax.Array
  x8: Quantized
  turned8: Quantized  # w.T
  w8: Quantized
  dy8: Quantized


def main() -> None:
  parser = parser_of(__doc__, "linear")
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
    "spread": {name: one.spread for name, one in contenders.items()},
    "speedup": {name: round(times["full"] / time, 3) for name, time in times.items()},
    "operation_milliseconds": by_itself(x, w1, w2, dy),
    "kernels": parts,
    "share_of_quantizing": {name: share_of_quantizing(found) for name, found in parts.items()},
    "data": "normal x, dy and w",
  }


def by_itself(x, w1, w2, dy) -> dict[str, float]:
  """Milliseconds of each operation for fc1 and fc2 together: medians of three, in turns."""
  ops = get_backend(None)
  between = jax.random.normal(jax.random.key(0), (len(x), w1.shape[1]), x.dtype)
  layers = [layer(ops, x, w1, between), layer(ops, between, w2, dy)]
  others = [[one._replace(w=jnp.copy(one.w)) for one in layers] for _ in range(3)]
  contenders = {
    name: contender(
      lambda *layers, run=run: [run(ops, one) for one in layers],
      [layers, *others] if name in OF_W else [layers],
    )
    for name, run in OPERATIONS.items()
  }
  race(list(contenders.values()), rounds=1, seconds=0.01)  # `profile` needs a first estimate.
  rounds = [
    {
      name: sum(time for _, time in profile(one, seconds=0.03)) / len(one.sets)
      for name, one in contenders.items()
    }
    for _ in range(3)
  ]
  return {name: round(statistics.median(r[name] for r in rounds), 4) for name in contenders}


def layer(ops, x, w, dy) -> Layer:
  quantized = {
    "x8": ops.quantize(x, ROW),
    "turned8": ops.quantize_transposed(w, TENSOR),
    "w8": ops.quantize(w, TENSOR),
    "dy8": ops.quantize(dy, ROW),
  }
  return Layer(x, w, dy, w16=w.astype(x.dtype), **quantized)


def whole(recipe: str):
  """A function that returns y, dx, dw1 and dw2 of two layers."""

  def run(x, w1, w2, dy):
    def layers(x, w1, w2):
      return quantized_dot(quantized_dot(x, w1, recipe), w2, recipe)

    y, gradients = jax.vjp(layers, x, w1, w2)
    return y, *gradients(dy)

  return run


def profile(one: Contender, calls: int = 5, seconds: float = 0.2) -> list[tuple[str, float]]:
  """Name and milliseconds of every kernel of a call, in order: means over `calls` calls.

  Runs the same work for `seconds` before, so that the chip's clock is the same as in a race.
  """
  before = int(seconds / (one.seconds * len(one.sets)))

  def work():
    for _ in range(before + calls):
      result = one.call(one.sets)
    return result

  listed = kernels(work)
  each = len(listed) // (before + calls)
  listed = listed[-calls * each :]
  times = [sum(k.milliseconds for k in listed[i::each]) / calls for i in range(each)]
  return [(k.name[:60], round(t, 4)) for k, t in zip(listed[:each], times, strict=True)]


def share_of_quantizing(listed) -> float:
  """The part of the time in kernels that are no matmuls: the cost of a recipe's rounding."""
  matmul = sum(time for name, time in listed if re.search(MATMULS, name))
  return round(1 - matmul / sum(time for _, time in listed), 4)


if __name__ == "__main__":
  main()
