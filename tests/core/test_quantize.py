"""`quantize` is round-half-even of `x * (max / absmax)`; non-finite values stay visible."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from sbjax import E4M3, E5M2, INT8, Quantized, Spec, dequantize, quantize
from sbjax.quantize import factor_and_scale, format_of

FORMATS = {"int8": INT8, "e4m3": E4M3, "e5m2": E5M2}
SPECS = [
  Spec(dtype, scaling) for dtype in FORMATS.values() for scaling in ("rowwise", "tensorwise")
]
INT8_ROW, INT8_TENSOR = SPECS[:2]
jitted = jax.jit(quantize, static_argnums=1)


@pytest.fixture
def x():
  """[33, 257] with rows of very different magnitude, one outlier and one zero row."""
  x = np.random.default_rng(0).normal(size=(33, 257)).astype(np.float32)
  x *= np.exp2(np.arange(33, dtype=np.float32) - 24)[:, None]
  x[5, 7] = 1000.0
  x[9] = 0.0
  return x


def bits(a):
  return np.asarray(a).view(np.uint8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_values_equal_numpy_s_bit_for_bit(x, fmt, scaling, dtype):
  x = jnp.asarray(x).astype(dtype)
  values, scale = reference.rounded(x, fmt, 1 if scaling == "rowwise" else None)
  for function in (quantize, jitted):
    q = function(x, Spec(FORMATS[fmt], scaling))
    assert q.values.dtype == FORMATS[fmt] and q.scale.dtype == jnp.float32
    assert q.scale.shape == ((33, 1) if scaling == "rowwise" else (1, 1))
    # Zero has a sign in fp8, and the definition keeps it.
    np.testing.assert_array_equal(bits(q.values), bits(values))
    # Two roundings: of 1 / max, and of its product with absmax.
    np.testing.assert_allclose(q.scale, scale, rtol=2.02 * 2**-24)


def test_halves_round_to_even():
  x = jnp.array([[0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5, 126.5, 127.0]])
  for scaling in ("static", "rowwise"):  # The factor is 127 / 127.
    values = jitted(x, Spec(INT8, scaling)).values
    np.testing.assert_array_equal(values, [[0, 2, 2, 4, 0, -2, -2, 126, 127]])


@pytest.mark.parametrize("spec", SPECS[:2], ids=str)
def test_int8_errs_by_half_a_step_at_most(x, spec):
  q = jitted(x, spec)
  scale = np.asarray(q.scale, np.float64)
  error = np.abs(x - np.asarray(q.values, np.float64) * scale)
  # A value of up to 127 steps has three float32 roundings of half a unit in the last place each.
  assert np.all(error <= scale * (0.5 + 127 * 4 * 2.0**-24))


@pytest.mark.parametrize("spec", SPECS[2:], ids=str)
def test_fp8_errs_by_half_a_unit_in_the_last_place_at_most(x, spec):
  fraction_bits, smallest_normal = {E4M3: (3, 2.0**-6), E5M2: (2, 2.0**-14)}[spec.dtype]
  q = jitted(x, spec)
  scale = np.asarray(q.scale, np.float64)
  error = np.abs(x - np.asarray(q.values).astype(np.float64) * scale)
  relative = np.maximum(np.abs(x), smallest_normal * scale) * 2.0 ** -(fraction_bits + 1)
  assert np.all(error <= relative * (1 + 2**-18))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_negation_commutes_with_quantization(x, spec):
  q, negated = jitted(x, spec), jitted(-x, spec)
  np.testing.assert_array_equal(
    np.asarray(negated.values, np.float32), -np.asarray(q.values, np.float32)
  )
  np.testing.assert_array_equal(negated.scale, q.scale)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_power_of_two_changes_only_the_scale(x, spec):
  q, scaled = jitted(x, spec), jitted(x * np.float32(2**20), spec)
  np.testing.assert_array_equal(bits(scaled.values), bits(q.values))
  np.testing.assert_array_equal(scaled.scale, np.asarray(q.scale) * np.float32(2**20))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_permutation_of_rows_commutes_with_quantization(x, spec):
  order = np.random.default_rng(1).permutation(len(x))
  q, permuted = jitted(x, spec), jitted(x[order], spec)
  np.testing.assert_array_equal(bits(permuted.values), bits(q.values)[order])
  if spec.scaling == "rowwise":
    np.testing.assert_array_equal(permuted.scale, np.asarray(q.scale)[order])


@pytest.mark.parametrize("spec", [*SPECS, Spec(INT8, "static"), Spec(E4M3, "static")], ids=str)
def test_zeros_stay_zeros(spec):
  q = jitted(jnp.zeros((3, 8)), spec)
  assert np.all(np.isfinite(q.scale))
  np.testing.assert_array_equal(dequantize(q), np.zeros((3, 8)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_non_finite_values_make_their_scale_nan(x, spec, bad):
  x[4, 100] = bad
  scale = np.asarray(jitted(x, spec).scale)
  if spec.scaling == "rowwise":
    np.testing.assert_array_equal(np.isnan(scale[:, 0]), np.arange(33) == 4)
    assert np.all(np.isnan(dequantize(jitted(x, spec))[4]))
  else:
    assert np.isnan(scale)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_values_make_a_static_scale_of_int8_nan(bad):
  q = jitted(jnp.array([[1.0, bad]]), Spec(INT8, "static"))
  assert np.all(np.isnan(dequantize(q)))


@pytest.mark.parametrize("dtype", FORMATS.values(), ids=str)
def test_a_static_scale_is_one_and_saturates(dtype):
  largest = {INT8: 127.0, E4M3: 448.0, E5M2: 57344.0}[dtype]
  x = jnp.array([[1.0, -2.0, 1.04 * largest, 10 * largest, -10 * largest]])
  q = jitted(x, Spec(dtype, "static"))
  assert q.scale.shape == (1, 1) and q.scale == 1
  np.testing.assert_array_equal(dequantize(q), [[1, -2, largest, largest, -largest]])


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 1e-37, 1e-36, 3e38])
def test_extreme_magnitudes_stay_finite_and_in_range(spec, magnitude):
  x = np.array([[1.0, -0.5, 0.25, 0.0], [0.1, 0.2, 0.3, 0.4]]) * magnitude
  q = jitted(x.astype(np.float32), spec)
  restored = np.asarray(dequantize(q))
  assert np.all(np.isfinite(np.asarray(q.values, np.float32))) and np.all(np.isfinite(q.scale))
  assert np.all(np.abs(restored) <= magnitude * (1 + 2**-20))
  if magnitude > 1:
    np.testing.assert_allclose(restored, x, atol=magnitude / 8)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
@pytest.mark.parametrize("spec", SPECS[:2], ids=str)
def test_empty_arrays_quantize_to_empty_arrays(spec, shape):
  q = quantize(jnp.zeros(shape), spec)
  assert q.values.shape == shape
  assert q.scale.shape == ((shape[0], 1) if spec.scaling == "rowwise" else (1, 1))


def test_dequantize_multiplies_in_float32_and_casts_once(x):
  q = jitted(x, INT8_ROW)
  expected = np.asarray(q.values, np.float32) * np.asarray(q.scale)
  np.testing.assert_array_equal(dequantize(q), expected)
  half = dequantize(q, jnp.bfloat16)
  assert half.dtype == jnp.bfloat16
  np.testing.assert_array_equal(half, jnp.asarray(expected).astype(jnp.bfloat16))


@pytest.mark.parametrize("spec", [*SPECS, Spec(INT8, "columnwise")], ids=str)
def test_the_transpose_of_the_quantized_is_the_quantized_transpose(x, spec):
  x[7, 20] = np.nan
  transposed, expected = jitted(x, spec).T, jitted(x.T, spec.T)
  assert transposed.spec == expected.spec
  np.testing.assert_array_equal(bits(transposed.values), bits(expected.values))
  np.testing.assert_array_equal(transposed.scale, expected.scale)


def test_quantize_accepts_a_spec_with_a_scalar_type_or_a_string(x):
  for dtype in (jnp.int8, "int8"):
    q = quantize(x, Spec(dtype, "rowwise"))
    assert q.values.dtype == INT8
    np.testing.assert_array_equal(q.values, jitted(x, INT8_ROW).values)


def test_quantized_is_a_pytree_with_a_static_spec(x):
  q = jitted(x, INT8_ROW)
  assert isinstance(q, Quantized) and q.spec == INT8_ROW
  assert jax.tree.map(lambda leaf: leaf[:2], q).spec == INT8_ROW


def test_specs_of_one_dtype_in_any_form_are_equal():
  assert {Spec(jnp.int8, "rowwise"), Spec("int8", "rowwise"), INT8_ROW} == {INT8_ROW}


@pytest.mark.parametrize(
  ("dtype", "scaling", "message"),
  [
    (jnp.float16, "rowwise", r"float16.*int8, float8_e4m3fn, float8_e5m2"),
    ("int7", "rowwise", r"int7.*int8, float8_e4m3fn, float8_e5m2"),
    (INT8, "blockwise", r"blockwise.*rowwise, columnwise, tensorwise, tensorwise_pow2, static"),
  ],
)
def test_an_impossible_spec_is_refused(dtype, scaling, message):
  with pytest.raises(ValueError, match=message):
    Spec(dtype, scaling)


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise", "tensorwise_pow2", "static"])
def test_zeros_quantize_without_infs_or_nans(scaling):
  with jax.debug_infs(True), jax.debug_nans(True):
    q = jax.jit(quantize, static_argnums=1)(jnp.zeros((2, 3)), Spec(INT8, scaling))
  assert not np.any(q.values)


@pytest.mark.parametrize("dtype", [INT8, E4M3, E5M2])
def test_the_factor_of_the_smallest_magnitudes_is_the_largest_float32(dtype):
  largest = np.finfo(np.float32).max
  edge = np.float32(format_of(dtype).max / largest)
  magnitudes = np.array([0, np.nextafter(edge, np.float32(0)), edge, 2 * edge], np.float32)
  with np.errstate(divide="ignore", over="ignore"):
    expected = np.minimum(np.float32(format_of(dtype).max) / magnitudes, largest)
  factor, _ = jax.jit(factor_and_scale, static_argnums=1)(magnitudes, Spec(dtype, "rowwise"))
  np.testing.assert_array_equal(factor, expected)


@pytest.mark.parametrize(
  ("x", "spec", "message"),
  [
    (jnp.ones((2, 3), jnp.int32), INT8_ROW, r"floating point.*int32"),
    (jnp.ones((2, 3), bool), INT8_ROW, r"floating point.*bool"),
    (jnp.ones((2, 3, 4)), INT8_ROW, r"\[rows, K\].*\(2, 3, 4\)"),
    (jnp.ones(3), INT8_ROW, r"\[rows, K\].*\(3,\)"),
  ],
)
def test_errors_name_the_value_and_what_would_be_right(x, spec, message):
  with pytest.raises(ValueError, match=message):
    quantize(x, spec)
