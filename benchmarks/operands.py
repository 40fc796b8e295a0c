"""The matmuls of CLIP's linear layers, and 8-bit operands to time them on."""

import jax
import jax.numpy as jnp

from sbjax.quantize import Quantized, Spec

WIDTHS = (768, 1024, 1280, 1664, 4096)
# As lhs [tokens, K] with rhs [N, K]: forward, then the same layer's input gradient.
LAYERS = {
  "qkv": lambda width: (3 * width, width),
  "out": lambda width: (width, width),
  "fc1": lambda width: (4 * width, width),
  "fc2": lambda width: (width, 4 * width),
}
DISTRIBUTION = "8-bit values of a normal distribution, standard deviation 30 of 127 (28 of 448)"


def shapes(widths=WIDTHS) -> dict[tuple[int, int], str]:
  """(N, K) of every forward and dgrad matmul, with the first layer's name that has it."""
  found = {}
  for width in widths:
    for layer, of in LAYERS.items():
      n, k = of(width)
      found.setdefault((n, k), f"{layer} {width}")
      found.setdefault((k, n), f"{layer} dgrad {width}")
  return found


class Operands:
  """Draws once, then cuts operands out of that: a new shape costs no new random numbers."""

  def __init__(self, dtype, elements: int = 2**31 + 2**28):
    @jax.jit
    def draw(key):
      return jnp.clip(30 * jax.random.normal(key, (2**24,), jnp.bfloat16), -127, 127).astype(dtype)

    self._values = jnp.concatenate([draw(jax.random.key(i)) for i in range(elements // 2**24)])

  def sets(self, m: int, n: int, k: int, megabytes: int = 200):
    """Two input sets or more, of so many megabytes with their results: row-wise lhs, one scale."""
    count = max(2, round(megabytes * 1e6 / (m * k + n * k + 2 * m * n)))
    return [self._one(i, m, n, k) for i in range(count)]

  def _one(self, i, m, n, k):
    # An odd number of values apart, as K is even: else rows of one would be rows of the other.
    starts = [(i * 2**22 + j * (2**21 + 1)) % (self._values.size - size)
              for j, size in enumerate((m * k, n * k))]  # fmt: skip
    lhs, rhs = (
      jax.lax.dynamic_slice(self._values, (start,), (rows * k,)).reshape(rows, k)
      for start, rows in zip(starts, (m, n), strict=True)
    )
    scale = jax.random.uniform(jax.random.key(i), (m, 1), minval=0.01, maxval=0.02)
    return (
      Quantized(lhs, scale, Spec(lhs.dtype, "rowwise")),
      Quantized(rhs, jnp.full((1, 1), 1e-3), Spec(rhs.dtype, "tensorwise")),
    )


def tops(m: int, n: int, k: int, seconds: float) -> float:
  """10^12 operations a second, two for each product."""
  return 2 * m * n * k / seconds / 1e12
