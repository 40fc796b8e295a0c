"""`scaled_matmul` is dequantize(lhs) @ dequantize(rhs).T: an exact sum in int8, one cast."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from sbjax import E4M3, INT8, Quantized, Spec, scaled_matmul
from sbjax.quantize import FORMATS

jitted = jax.jit(scaled_matmul, static_argnums=2)


def operand(seed, rows, k, fmt="int8", shares="row"):
  """A quantized [rows, k] whose scales are distinct powers of two."""
  a = np.random.default_rng(seed).normal(size=(rows, k))
  values, scale = reference.rounded(a, fmt, 1 if shares == "row" else None)
  spec = Spec(values.dtype, "rowwise" if shares == "row" else "tensorwise")
  return Quantized(values, np.exp2(np.arange(scale.size, dtype=np.float32) - 9)[:, None], spec)


def float64(q):
  return np.asarray(q.values).astype(np.float64) * np.asarray(q.scale).astype(np.float64)


@pytest.mark.parametrize("shares", ["row", "tensor"])
def test_int8_products_are_exact(shares):
  # Sums are below 2**24 and scales are powers of two: nothing is rounded.
  lhs, rhs = operand(0, 7, 100), operand(1, 5, 100, "int8", shares)
  for function in (scaled_matmul, jitted):
    y = function(lhs, rhs, jnp.float32)
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(y, float64(lhs) @ float64(rhs).T)


@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")])
def test_fp8_products_are_summed_in_float32(formats):
  lhs, rhs = operand(0, 7, 100, formats[0]), operand(1, 5, 100, formats[1], "tensor")
  a, b = float64(lhs), float64(rhs)
  error = 100 * 2.0**-24 * (np.abs(a) @ np.abs(b).T)
  reference.assert_within(
    np.asarray(jitted(lhs, rhs, jnp.float32)), reference.Product(a @ b.T, error)
  )


@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float16])
def test_the_result_is_cast_once_at_the_end(out_dtype):
  lhs, rhs = operand(0, 7, 100), operand(1, 5, 100)
  lhs = dataclasses.replace(lhs, scale=lhs.scale / 3)
  y = jitted(lhs, rhs, out_dtype)
  assert y.dtype == out_dtype
  np.testing.assert_array_equal(y, jitted(lhs, rhs, jnp.float32).astype(out_dtype))


@pytest.mark.parametrize("out_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("bias_dtype", [jnp.float32, jnp.bfloat16])
def test_a_bias_is_added_to_each_row_before_the_cast(bias_dtype, out_dtype):
  lhs, rhs = operand(0, 7, 100), operand(1, 5, 100)
  bias = jnp.asarray(np.random.default_rng(2).normal(size=5), bias_dtype)
  y = jax.jit(lambda b: scaled_matmul(lhs, rhs, out_dtype, bias=b))(bias)
  # The product is exact: one rounding in the sum, one in the cast.
  expected = (float64(lhs) @ float64(rhs).T + np.asarray(bias, np.float64)).astype(np.float32)
  np.testing.assert_array_equal(y, expected.astype(out_dtype))


@pytest.mark.parametrize("out_dtype", [jnp.float32, jnp.bfloat16])
def test_a_residual_is_added_after_the_bias_and_before_the_cast(out_dtype):
  lhs, rhs = operand(0, 7, 100), operand(1, 5, 100)
  numbers = np.random.default_rng(2)
  bias = np.asarray(numbers.normal(size=5), np.float32)
  residual = jnp.asarray(numbers.normal(size=(7, 5)), out_dtype)
  y = jax.jit(lambda b, a: scaled_matmul(lhs, rhs, out_dtype, bias=b, residual=a))(bias, residual)
  first = (float64(lhs) @ float64(rhs).T + bias).astype(np.float32)
  expected = (first.astype(np.float64) + np.asarray(residual, np.float64)).astype(np.float32)
  np.testing.assert_array_equal(y, expected.astype(out_dtype))


@pytest.mark.parametrize(("shape", "dtype"), [((7, 4), "float32"), ((7, 5), "bfloat16")])
def test_a_residual_of_another_shape_or_dtype_is_refused(shape, dtype):
  lhs, rhs = operand(0, 7, 100), operand(1, 5, 100)
  with pytest.raises(ValueError, match=rf"float32 \(7, 5\).*not {dtype}"):
    scaled_matmul(lhs, rhs, jnp.float32, residual=jnp.zeros(shape, dtype))


@pytest.mark.parametrize("sign", [1, -1])
def test_the_longest_int8_sum_does_not_overflow(sign):
  k = FORMATS[INT8].most_terms
  one = np.ones((1, 1), np.float32)
  lhs = Quantized(np.full((1, k), 127, np.int8), one, Spec(np.int8, "tensorwise"))
  rhs = Quantized(np.full((1, k), sign * 127, np.int8), one, Spec(np.int8, "tensorwise"))
  assert jitted(lhs, rhs, jnp.float32) == sign * 127 * 127 * k


def test_a_longer_int8_sum_is_refused():
  too_long = jax.ShapeDtypeStruct((1, 131_073), jnp.int8)
  scale = jax.ShapeDtypeStruct((1, 1), jnp.float32)
  q = Quantized(too_long, scale, Spec(np.int8, "tensorwise"))
  with pytest.raises(ValueError, match=r"131073.*overflow.*131072"):
    jax.eval_shape(lambda q: scaled_matmul(q, q, jnp.float32), q)


def test_a_longer_fp8_sum_is_accepted():
  scale = jax.ShapeDtypeStruct((1, 1), jnp.float32)
  q = Quantized(jax.ShapeDtypeStruct((1, 131_073), E4M3), scale, Spec(E4M3, "tensorwise"))
  assert jax.eval_shape(lambda q: scaled_matmul(q, q, jnp.float32), q).shape == (1, 1)


def test_a_nan_scale_makes_only_its_row_nan():
  lhs, rhs = operand(0, 7, 100), operand(1, 5, 100)
  scale = np.where(np.arange(7)[:, None] == 2, np.float32(np.nan), lhs.scale)
  nan = dataclasses.replace(lhs, scale=scale)
  rows = np.isnan(jitted(nan, rhs, jnp.float32))
  np.testing.assert_array_equal(rows, np.broadcast_to(np.arange(7)[:, None] == 2, (7, 5)))
  columns = np.isnan(jitted(rhs, nan, jnp.float32))
  np.testing.assert_array_equal(columns, rows.T)


def test_different_contractions_are_refused():
  with pytest.raises(ValueError, match=r"agree in K: 16 and 8"):
    scaled_matmul(operand(0, 4, 16), operand(1, 3, 8), jnp.float32)


@pytest.mark.parametrize("side", ["lhs", "rhs"])
def test_scales_that_are_summed_over_are_refused(side):
  operands = {"lhs": operand(0, 16, 16), "rhs": operand(1, 16, 16)}
  operands[side] = operands[side].T
  with pytest.raises(ValueError, match=f"{side} is columnwise.*Fold the other operand"):
    scaled_matmul(**operands, out_dtype=jnp.float32)


def test_int8_with_fp8_is_refused():
  with pytest.raises(ValueError, match=r"int8 with float8_e4m3fn"):
    scaled_matmul(operand(0, 4, 16), operand(1, 3, 16, "e4m3"), jnp.float32)
