"""The 8-bit matmul: an exact or float32 sum of products, then the scales, then one cast.

And the one that a recipe leaves in full.
"""

import jax
import jax.numpy as jnp

from sbjax.ops.operation import Operation
from sbjax.quantize import Quantized, check_quantized, floating_dtype, format_of


def scaled_matmul(
  lhs: Quantized,
  rhs: Quantized,
  out_dtype,
  out_sharding=None,
  *,
  bias: jax.Array | None = None,
  residual: jax.Array | None = None,
) -> jax.Array:
  """`dequantize(lhs) @ dequantize(rhs).T + bias + residual` for lhs [M, K] and rhs [N, K], [M, N].

  int8 products are summed in int32 without error, fp8 products in float32. The product of the
  two scales multiplies the sum in float32, bias [N] and then the residual [M, N], which has
  `out_dtype`, are added in float32, and the result is cast once, to `out_dtype`. `out_sharding`
  is jax.lax.dot_general's.

  Raises:
    ValueError: the contracted sizes differ, int8 meets fp8, K > 131,072 in int8, an operand is
      columnwise, or a residual of another shape or dtype than the result's.

  >>> lhs = quantize(jnp.ones((2, 16)), Spec(INT8, "rowwise"))
  >>> scaled_matmul(lhs, lhs, jnp.bfloat16)
  Array([[16, 16],
         [16, 16]], dtype=bfloat16)
  """
  check_quantized("lhs", lhs)
  check_quantized("rhs", rhs)
  out_dtype = floating_dtype("out_dtype", out_dtype)
  for name, operand in (("lhs", lhs), ("rhs", rhs)):
    if operand.spec.is_columnwise:
      raise ValueError(
        f"{name} is columnwise: its scales are summed over. Fold the other operand with them."
      )
  check_operands(lhs.values, rhs.values)
  check_residual(residual, (lhs.values.shape[0], rhs.values.shape[0]), out_dtype)
  own = format_of(lhs.values.dtype)
  lhs_values, rhs_values = lhs.values, rhs.values
  if own.is_exact:  # XLA multiplies no integers of fewer bits.
    lhs_values, rhs_values = lhs_values.astype(jnp.int8), rhs_values.astype(jnp.int8)
  total = jax.lax.dot_general(
    lhs_values,
    rhs_values,
    (((1,), (1,)), ((), ())),
    preferred_element_type=own.accumulator,
    out_sharding=out_sharding,
  )
  return apply_scales(total, lhs.scale, rhs.scale, out_dtype, bias, residual)


def apply_scales(total, lhs_scale, rhs_scale, out_dtype, bias=None, residual=None) -> jax.Array:
  """What `scaled_matmul` makes of the sums [M, N] of 8-bit products."""
  y = total.astype(jnp.float32) * (lhs_scale * rhs_scale.T)
  return with_added(y, out_dtype, bias, residual)


def at_least_float32(x) -> jax.Array:
  """x in float32, or wider if it is."""
  return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def with_added(y, out_dtype, bias=None, residual=None) -> jax.Array:
  """y [M, N] float32 plus bias [N] and residual [M, N], cast once."""
  if bias is not None:
    y += bias.astype(jnp.float32)[None, :]
  if residual is not None:
    y += residual.astype(jnp.float32)
  return y.astype(out_dtype)


def check_operands(lhs: jax.Array, rhs: jax.Array) -> None:
  """Raises the ValueErrors of `scaled_matmul` for 8-bit values lhs [M, K] and rhs [N, K]."""
  (_, k), (_, rhs_k) = lhs.shape, rhs.shape
  if k != rhs_k:
    raise ValueError(f"lhs [M, K] and rhs [N, K] must agree in K: {k} and {rhs_k}.")
  own, other = format_of(lhs.dtype), format_of(rhs.dtype)
  if own.accumulator != other.accumulator:
    raise ValueError(f"No matmul takes {lhs.dtype.name} with {rhs.dtype.name}.")
  most = min((f.most_terms for f in (own, other) if f.most_terms is not None), default=k)
  if k > most:
    raise ValueError(
      f"{k=} {lhs.dtype.name} products can overflow {own.accumulator.name}; at most {most}."
    )


def check_residual(residual: jax.Array | None, shape: tuple[int, ...], dtype) -> None:
  """Raises the ValueError of `scaled_matmul` for a residual that does not fit."""
  if residual is not None and (residual.shape != shape or residual.dtype != dtype):
    raise ValueError(
      f"residual must be {jnp.dtype(dtype).name} {shape} as the result,"
      f" not {residual.dtype.name} {residual.shape}."
    )


def empty_product(shape, dtype, bias, residual) -> jax.Array:
  """What `scaled_matmul` makes of no products."""
  one = jnp.ones((1, 1))
  return apply_scales(jnp.zeros(shape), one, one, dtype, bias, residual)


def full_dot(lhs, rhs, contracting, out_dtype, out_sharding=None) -> jax.Array:
  """A matmul in the operands' own dtype, as plain Flax has it; the sums are float32 on GPUs too.

  The result is asked for in `out_dtype`: a float32 one would be written out to be cast.
  """
  return jax.lax.dot_general(
    lhs, rhs, (contracting, ((), ())), preferred_element_type=out_dtype, out_sharding=out_sharding
  )


OPERATIONS = {
  "scaled_matmul": Operation(
    scaled_matmul,
    "mk m. nk n. mn -> mn",
    kernels=("sm90.scaled_matmul", "triton.scaled_matmul"),
    static=("out_dtype", "out_sharding"),
  ),
}
