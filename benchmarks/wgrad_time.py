"""What could a faster weight gradient save?

  XLA_FLAGS=--xla_gpu_enable_triton_gemm=false python -m benchmarks.wgrad_time

`dw = x.T @ dy` of the linear layers of a block, float32 from bfloat16 rows as a step computes it:
in one product, and in several that each sum a part of the tokens. Beside it what 8 bits would take:
the int8 product alone, of operands that lie there turned, and turning them, in one read and one
write, with scales that are known already. Adds a line a layer to the results.
"""

import argparse
import functools

import jax
import jax.numpy as jnp

from benchmarks.operands import LAYERS
from benchmarks.timing import append, contender, provenance, race
from sbjax.backends import get_backend
from sbjax.formats import INT8
from sbjax.quantize import Quantized, Spec
from sbjax.token_sum import token_sum

INT8_ROW = Spec(INT8, "rowwise")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", default="benchmarks/results/wgrad_time.jsonl")
  parser.add_argument("--tokens", type=int, default=66048, help="256 images of 258, filled up.")
  parser.add_argument("--widths", type=int, nargs="+", default=[768, 1024, 1280, 1664])
  parser.add_argument("--parts", type=int, nargs="+", default=[1, 2, 3, 4])
  args = parser.parse_args()
  for width in args.widths:
    for layer, of in LAYERS.items():
      n, k = of(width)
      line = measure(args.tokens, k, n, layer, args.parts)
      print(f"{layer} {k} x {n}", *line["milliseconds"].items(), flush=True)
      append(args.out, [line | provenance()])


def measure(tokens: int, k: int, n: int, layer: str, parts: list[int]) -> dict:
  from sbjax.pallas import quantize_triton

  keys = jax.random.split(jax.random.key(0), 4)
  x, dy = (
    jax.random.normal(key, (tokens, w), jnp.bfloat16)
    for key, w in zip(keys[:2], (k, n), strict=True)
  )
  x_q, dy_q = (
    Quantized(
      jax.random.randint(key, (w, tokens), -127, 128, jnp.int8),
      jnp.ones((w, 1)),
      Spec(jnp.int8, "rowwise"),
    )
    for key, w in zip(keys[2:], (k, n), strict=True)
  )

  def turn(x):
    largest = jnp.full((1, x.shape[1]), 4.0)
    return quantize_triton.cast_scaled(x, largest, INT8_ROW, transpose=True)

  add = functools.partial(token_sum, dtype=jnp.float32)
  multiply = functools.partial(get_backend().scaled_matmul, out_dtype=jnp.float32)
  contenders = {
    **{f"bf16 in {p}": contender(functools.partial(add, parts=p), [(x, dy)]) for p in parts},
    "int8 product": contender(multiply, [(x_q, dy_q)]),
    "turning x": contender(turn, [(x,)]),
    "turning dy": contender(turn, [(dy,)]),
  }
  race(list(contenders.values()), rounds=5, seconds=0.02)
  return {
    "benchmark": "wgrad_time",
    "layer": layer,
    "tokens": tokens,
    "k": k,
    "n": n,
    "milliseconds": {name: round(one.seconds * 1e3, 4) for name, one in contenders.items()},
    "data": "standard normal; uniform int8",
  }


if __name__ == "__main__":
  main()
