"""The matmuls of CLIP's linear layers, and 8-bit operands to time them on."""

import jax
import jax.numpy as jnp

from sbjax.quantize import Quantized, Spec

WIDTHS = (768, 1024, 1280, 1664, 4096)
# (N, K) of each layer's forward matmul, lhs [tokens, K] with rhs [N, K]. Its dgrad has (K, N).
LAYERS = {
  "qkv": lambda width: (3 * width, width),
  "out": lambda width: (width, width),
  "fc1": lambda width: (4 * width, width),
  "fc2": lambda width: (width, 4 * width),
}
DISTRIBUTION = "8-bit values of a normal distribution, standard deviation 30 of 127 (28 of 448)"


def shapes(widths=WIDTHS) -> dict[tuple[int, int], str]:
  """(N, K) of every forward and dgrad matmul, with the name of the first layer that has it."""
  names = {}
  for width in widths:
    for layer, of in LAYERS.items():
      n, k = of(width)
      names.setdefault((n, k), f"{layer} {width}")
      names.setdefault((k, n), f"{layer} dgrad {width}")
  return names


class Operands:
  """Draws values once and slices all operands from them, so a new shape needs no new draw."""

  def __init__(self, dtype, elements: int = 2**31 + 2**28):
    @jax.jit
    def draw(key):
      return jnp.clip(30 * jax.random.normal(key, (2**24,), jnp.bfloat16), -127, 127).astype(dtype)

    self._values = jnp.concatenate([draw(jax.random.key(i)) for i in range(elements // 2**24)])

  def sets(self, m: int, n: int, k: int, megabytes: int = 200):
    """At least two sets (rowwise lhs, tensorwise rhs), with their results of about `megabytes`."""
    count = max(2, round(megabytes * 1e6 / (m * k + n * k + 2 * m * n)))
    return [self._one(i, m, n, k) for i in range(count)]

  def _one(self, i, m, n, k):
    # The starts differ by an odd number. K is even, so lhs and rhs have no rows in common.
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
  """10^12 operations a second; a multiply-add counts as two."""
  return 2 * m * n * k / seconds / 1e12
