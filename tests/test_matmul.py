"""`scaled_matmul` is dequantize(lhs) @ dequantize(rhs).T: an exact sum in int8, one cast."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from sbjax import E4M3, E5M2, INT8, Quantized, Spec, quantize, scaled_matmul
from sbjax.matmul import MAX_INT8_CONTRACTION

jitted = jax.jit(scaled_matmul, static_argnums=2)


def operand(seed, rows, k, dtype=INT8, scaling="rowwise"):
  """A quantized [rows, k] whose scales are powers of two, each row's its own."""
  rng = np.random.default_rng(seed)
  q = quantize(jnp.asarray(rng.normal(size=(rows, k)).astype(np.float32)), Spec(dtype, scaling))
  return q._replace(scale=jnp.exp2(jnp.arange(q.scale.shape[0]).astype(jnp.float32) - 9)[:, None])


def float64(q):
  return np.asarray(q.values).astype(np.float64) * np.asarray(q.scale).astype(np.float64)


@pytest.mark.parametrize("scalings", [("rowwise", "tensorwise"), ("rowwise", "rowwise")])
def test_int8_products_are_exact(scalings):
  # Sums below 2**24 and scales that are powers of two: not one rounding anywhere.
  lhs, rhs = operand(0, 7, 100, INT8, scalings[0]), operand(1, 5, 100, INT8, scalings[1])
  for function in (scaled_matmul, jitted):
    y = function(lhs, rhs, jnp.float32)
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(y, float64(lhs) @ float64(rhs).T)


@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=str)
def test_fp8_products_are_summed_in_float32(formats):
  lhs, rhs = operand(0, 7, 100, formats[0]), operand(1, 5, 100, formats[1], "tensorwise")
  a, b = float64(lhs), float64(rhs)
  error = 100 * 2.0**-24 * (np.abs(a) @ np.abs(b).T)
  reference.assert_within(
    np.asarray(jitted(lhs, rhs, jnp.float32)), reference.Product(a @ b.T, error)
  )


@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float16])
def test_the_result_is_cast_once_and_last(out_dtype):
  lhs, rhs = operand(0, 7, 100), operand(1, 5, 100)
  y = jitted(lhs, rhs, out_dtype)
  assert y.dtype == out_dtype
  np.testing.assert_array_equal(y, jitted(lhs, rhs, jnp.float32).astype(out_dtype))


@pytest.mark.parametrize("sign", [1, -1])
def test_the_longest_int8_sum_does_not_overflow(sign):
  k = MAX_INT8_CONTRACTION
  lhs = Quantized(jnp.full((1, k), 127, jnp.int8), jnp.ones((1, 1)))
  rhs = Quantized(jnp.full((1, k), sign * 127, jnp.int8), jnp.ones((1, 1)))
  assert scaled_matmul(lhs, rhs, jnp.float32) == sign * 127 * 127 * k


def test_a_longer_int8_sum_is_refused():
  too_long = jax.ShapeDtypeStruct((1, 131_073), jnp.int8)
  scale = jax.ShapeDtypeStruct((1, 1), jnp.float32)
  with pytest.raises(ValueError, match=r"131073.*overflow.*131072"):
    jax.eval_shape(lambda q: scaled_matmul(q, q, jnp.float32), Quantized(too_long, scale))


def test_a_longer_fp8_sum_is_not_refused():
  q = Quantized(jax.ShapeDtypeStruct((1, 131_073), E4M3), jax.ShapeDtypeStruct((1, 1), jnp.float32))
  assert jax.eval_shape(lambda q: scaled_matmul(q, q, jnp.float32), q).shape == (1, 1)


def test_a_nan_scale_makes_its_row_nan_and_no_other():
  lhs, rhs = operand(0, 4, 16), operand(1, 3, 16)
  lhs = lhs._replace(scale=lhs.scale.at[2].set(jnp.nan))
  y = np.isnan(scaled_matmul(lhs, rhs, jnp.float32))
  np.testing.assert_array_equal(y, np.broadcast_to(np.arange(4)[:, None] == 2, (4, 3)))
  y = np.isnan(scaled_matmul(rhs, lhs, jnp.float32))
  np.testing.assert_array_equal(y, np.broadcast_to(np.arange(4)[None] == 2, (3, 4)))


def test_different_contractions_are_refused():
  with pytest.raises(ValueError, match=r"agree in K: 16 and 8"):
    scaled_matmul(operand(0, 4, 16), operand(1, 3, 8), jnp.float32)


def test_int8_with_fp8_is_refused():
  with pytest.raises(ValueError, match=r"int8 with float8_e4m3fn"):
    scaled_matmul(operand(0, 4, 16), operand(1, 3, 16, E4M3), jnp.float32)
