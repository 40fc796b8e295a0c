"""Products of float32 matrices on tensor cores: each operand in two 16-bit parts.

With x ~= hi + lo, both of 16 bits, x y = hi hi + hi lo + lo hi but for lo lo, and float32 sums the
three products (Markidis et al. 2018, https://arxiv.org/abs/1803.04014). In float16 that leaves out
2**-24 of a product at most, about what float32 rounds; in bfloat16, which has float32's range,
2**-18.
"""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Split:
  """Parts of one dtype, of operands that are multiplied by `factor` first."""

  dtype: jnp.dtype
  exponent_bits: int
  mantissa_bits: int
  factor: float  # A power of two.


# None is float32 itself. In float16, elements below 2**3 do not overflow, and of those above 2**-27
# hi is no subnormal number: both parts together are at most 2**-38 away from any x.
PRODUCTS = {
  "float32": None,
  "float16": Split(jnp.float16, 5, 10, 2.0**13),
  "bfloat16": Split(jnp.bfloat16, 8, 7, 1.0),
}
# The parts (0: hi, 1: lo) that are multiplied, by the number of parts. The largest product comes
# last, so that sums are small while the others are added.
_PAIRS = {1: ((0, 0),), 2: ((1, 0), (0, 1), (0, 0))}


def split(x: jax.Array, by: Split | None) -> tuple[jax.Array, ...]:
  """The parts of a float32 array, (hi, lo) or itself."""
  if by is None:
    return (x,)
  x = x * by.factor
  # XLA may leave out a cast to 16 bits and back (xla_allow_excess_precision), and lo would be zero.
  hi = jax.lax.reduce_precision(x, by.exponent_bits, by.mantissa_bits)
  return hi.astype(by.dtype), (x - hi).astype(by.dtype)


def unit(by: Split | None) -> float:
  """The factor on the products of parts that makes them those of the operands."""
  return 1.0 if by is None else by.factor**-2


def operand(parts: tuple[jax.Array, ...], side: int) -> jax.Array:
  """Parts beside each other in the order in which `row_products` sums them; side 0 or 1."""
  return jnp.concatenate([parts[pair[side]] for pair in _PAIRS[len(parts)]], axis=1)


def row_products(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
  """`lhs @ rhs.T` in units of `unit`, of the operands on side 0 and side 1: one matmul."""
  return _dot(lhs, rhs, (1, 1))


def beside(parts: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
  """hi, and all parts beside each other: the rhs of `add_product`, made outside of its loop."""
  return parts[0], jnp.concatenate(parts, axis=1)


def add_product(to: jax.Array, lhs: tuple, rhs: tuple) -> jax.Array:
  """`to + lhs @ rhs` in units of `unit`, of lhs's parts and of rhs's `beside`."""
  *hi, last = lhs
  to = _dot(last, rhs[0], (1, 0)) + to
  # One matmul of hi with both parts: XLA would make it of two, and the rhs again for each tile.
  return sum(jnp.split(_dot(*hi, rhs[1], (1, 0)), 2, axis=1)[::-1], to) if hi else to


def add_transposed_product(to: jax.Array, lhs: tuple, rhs: tuple) -> jax.Array:
  """`to + lhs.T @ rhs` in units of `unit`, of parts of both."""
  for i, j in _PAIRS[len(lhs)]:
    to = _dot(lhs[i], rhs[j], (0, 0)) + to  # In this order XLA's matmuls on a GPU add in place.
  return to


def _dot(lhs, rhs, axes):
  # An f32 matmul is TF32 by default on a GPU: 3 digits.
  precision = "highest" if lhs.dtype == jnp.float32 else None
  contracting = (tuple((axis,) for axis in axes), ((), ()))
  return jax.lax.dot_general(
    lhs, rhs, contracting, precision=precision, preferred_element_type=jnp.float32
  )
