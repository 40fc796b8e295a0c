"""Products of float32 matrices on tensor cores: each operand is split into two 16-bit parts.

With x ~= hi + lo, both in 16 bits, a product is hi hi + hi lo + lo hi, summed in float32; lo lo is
left out (Markidis et al. 2018, https://arxiv.org/abs/1803.04014). In float16 that is at most 2**-22
of a product, near float32's rounding. In bfloat16, which has float32's range, it is 2**-16.
"""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Split:
  """Operands are multiplied by `factor`, then split into parts of `dtype`."""

  dtype: jnp.dtype
  exponent_bits: int
  mantissa_bits: int
  factor: float  # A power of two.


# None does not split. In float16, elements below 2**3 do not overflow, and hi is a normal number
# for elements above 2**-27. Underflow of the parts changes their sum by at most 2**-38.
PRODUCTS = {
  "float32": None,
  "float16": Split(jnp.float16, 5, 10, 2.0**13),
  "bfloat16": Split(jnp.bfloat16, 8, 7, 1.0),
}
# The pairs of parts (0: hi, 1: lo) to multiply, by the number of parts. The largest product is
# last, so that the sum is small while the others are added.
_PAIRS = {1: ((0, 0),), 2: ((1, 0), (0, 1), (0, 0))}


def split(x: jax.Array, by: Split | None) -> tuple[jax.Array, ...]:
  """The parts (hi, lo) of a float32 array, or (x,) if `by` is None."""
  if by is None:
    return (x,)
  x = x * by.factor
  # Not a cast: XLA may remove a cast to 16 bits and back (xla_allow_excess_precision), so lo is 0.
  hi = jax.lax.reduce_precision(x, by.exponent_bits, by.mantissa_bits)
  return hi.astype(by.dtype), (x - hi).astype(by.dtype)


def unit(by: Split | None) -> float:
  """The factor that turns products of parts into products of the operands."""
  return 1.0 if by is None else by.factor**-2


def operand(parts: tuple[jax.Array, ...], side: int) -> jax.Array:
  """Concatenates parts for `row_products`, in the order of its sum; side 0 is lhs, 1 is rhs."""
  return jnp.concatenate([parts[pair[side]] for pair in _PAIRS[len(parts)]], axis=1)


def row_products(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
  """`lhs @ rhs.T` in units of `unit`, as one matmul of two `operand`s, of side 0 and side 1."""
  return _dot(lhs, rhs, (1, 1))


def beside(parts: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
  """(hi, all parts concatenated): the rhs of `add_product`, computed once outside a loop."""
  return parts[0], jnp.concatenate(parts, axis=1)


def add_product(to: jax.Array, lhs: tuple, rhs: tuple) -> jax.Array:
  """`to + lhs @ rhs` in units of `unit`, from the parts of lhs and `beside` of rhs's parts."""
  *hi, last = lhs
  to = _dot(last, rhs[0], (1, 0)) + to
  # One matmul of hi with both parts. XLA would merge two, and concatenate the rhs for each tile.
  return sum(jnp.split(_dot(*hi, rhs[1], (1, 0)), 2, axis=1)[::-1], to) if hi else to


def add_transposed_product(to: jax.Array, lhs: tuple, rhs: tuple) -> jax.Array:
  """`to + lhs.T @ rhs` in units of `unit`, from the parts of both."""
  for i, j in _PAIRS[len(lhs)]:
    to = _dot(lhs[i], rhs[j], (0, 0)) + to  # In this order XLA's GPU matmuls accumulate in place.
  return to


def _dot(lhs, rhs, axes):
  # An f32 matmul is TF32 by default on a GPU: 3 digits.
  precision = "highest" if lhs.dtype == jnp.float32 else None
  contracting = (tuple((axis,) for axis in axes), ((), ()))
  return jax.lax.dot_general(
    lhs, rhs, contracting, precision=precision, preferred_element_type=jnp.float32
  )
