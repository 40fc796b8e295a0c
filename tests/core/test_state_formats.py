import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sbjax.optim.state_formats import (
  E4M3_EXPANDED,
  E4M3_SCALED,
  FLOAT16_SCALED,
  FORMATS,
)


def draw(shape, seed=0, binades=8.0):
  """Numbers of both signs, whose magnitudes spread over some binades, and a few zeros."""
  rng = np.random.default_rng(seed)
  x = rng.choice([-1, 1], shape) * np.exp2(rng.normal(0, binades, shape))
  return np.where(rng.random(shape) < 0.05, 0, x).astype(np.float32)


# Two programs: in one XLA could leave out a rounding that is undone at once.
@functools.partial(jax.jit, static_argnums=(0, 2))
def encode(form, x, axes=0):
  return form.encode(x, axes)


@functools.partial(jax.jit, static_argnums=0)
def decode(form, coded):
  return form.decode(coded)


def round_trip(form, x, axes=0):
  return np.asarray(decode(form, encode(form, jnp.asarray(x), axes)))


def grouped(x, group):
  return np.asarray(x).reshape(*x.shape[:-1], x.shape[-1] // group, group)


def expanded(x, top, exponent):
  """448 (|x| / top)^exponent, in float64."""
  ratio = np.abs(np.float64(x)) / np.where(top == 0, 1, top)
  return 448 * ratio ** np.float64(exponent)


def coded_groups(x):
  """The groups of x, and of it decoded, top and exponent, with an axis for the group."""
  coded = encode(E4M3_EXPANDED, jnp.asarray(x))
  top, exponent = (np.float64(d)[..., None] for d in coded.details)
  group = x.shape[-1] // coded.details[0].shape[-1]
  return grouped(x, group), grouped(decode(E4M3_EXPANDED, coded), group), top, exponent


@pytest.mark.parametrize("binades", [0.0, 1.0, 8.0, 20.0])
def test_expanded_values_equal_coat_s_formula_in_numpy(binades):
  x = draw((16, 512), binades=binades)
  groups, size = grouped(x, 128), np.abs(np.float64(grouped(x, 128)))
  top = size.max(-1, keepdims=True)
  low = np.where(size > 0, size, np.inf).min(-1, keepdims=True)
  with np.errstate(divide="ignore"):
    exponent = np.clip(np.floor(16 * np.log2(448**2 / 2) / np.log2(top / low)) / 16, 1 / 16, 64)
  coded = encode(E4M3_EXPANDED, jnp.asarray(x))
  np.testing.assert_array_equal(coded.details[0], top[..., 0])
  np.testing.assert_array_equal(coded.details[1], exponent[..., 0])
  values = (np.sign(groups) * expanded(groups, top, exponent)).astype(ml_dtypes.float8_e4m3fn)
  same = np.asarray(coded.values) == values.reshape(x.shape)
  assert same.mean() > 0.999  # Others are midpoints to within float32.
  decoded = np.sign(groups) * top * (np.abs(np.float64(values)) / 448) ** (1 / exponent)
  decoded = decoded.reshape(x.shape)[same]
  np.testing.assert_allclose(decode(E4M3_EXPANDED, coded)[same], decoded, rtol=1e-5)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("binades", [0.1, 3.0, 10.0, 15.0])
def test_an_expanded_number_is_within_half_a_step_of_e4m3(seed, binades):
  groups, decoded, top, exponent = coded_groups(draw((4, 256), seed, binades))
  there, back = expanded(groups, top, exponent), expanded(decoded, top, exponent)
  half = np.maximum(2.0**-10, np.exp2(np.floor(np.log2(np.maximum(there, 1e-9)))) / 16)
  assert (np.abs(there - back) <= half * (1 + 1e-3)).all()
  assert (np.abs(decoded) <= top * (1 + 1e-6)).all()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", [n for n in FORMATS if n != "E4M3_SCALED"])
def test_nonzero_numbers_stay_nonzero_and_keep_their_sign_and_zeros_stay_zero(name, seed):
  x = draw((3, 5, 384), seed, [1.0, 4.0, 12.0, 30.0][seed % 4])
  if name == "BFLOAT16_PAIR":
    x = np.where(np.abs(x) < 1e-30, 0, x)  # Denormals are flushed on a CPU.
  np.testing.assert_array_equal(np.sign(round_trip(FORMATS[name], x)), np.sign(x))


ERRORS = {  # relative to the number, and to its tensor's largest
  "FLOAT32": (0.0, 0.0),
  "BFLOAT16": (2.0**-8, 0.0),
  "BFLOAT16_PAIR": (2.0**-16, 0.0),
  "E4M3_SCALED": (2.0**-4, 2.0**-10 / 224),
  "FLOAT16_SCALED": (2.0**-11, 2.0**-24 / 32752),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_within_half_a_step(name, seed):
  x = draw((64, 96), seed, 4.0)
  of_number, of_largest = ERRORS[name]
  bound = np.maximum(of_number * np.abs(x), of_largest * np.abs(x).max())
  assert (np.abs(round_trip(FORMATS[name], x) - x) <= bound).all()


def test_a_scale_is_the_largest_power_of_two_that_fits():
  for form, limit in ((E4M3_SCALED, 448.0), (FLOAT16_SCALED, 65504.0)):
    for top in (1.0, 448.0, 449.0, 65504.0, 1e-30, 3e38):
      values, (scale,) = encode(form, jnp.asarray([top, -top / 2, 0.0], jnp.float32))
      assert np.frexp(scale)[0] == 0.5
      assert limit / 2 < np.max(np.float32(values)) * (1 + 2**-4) or top == 1e-30
      assert abs(round_trip(form, np.float32([top]))[0] / top - 1) <= 2**-4


@pytest.mark.parametrize(
  ("last", "group"), [(1, 1), (100, 100), (128, 128), (130, 65), (200, 100), (257, 1), (1664, 128)]
)
def test_groups_are_the_largest_divisor_of_the_last_axis_up_to_128(last, group):
  coded = jax.eval_shape(functools.partial(E4M3_EXPANDED.encode, axes=0), jnp.ones((2, 3, last)))
  assert [d.shape for d in coded.details] == [(2, 3, last // group)] * 2
  assert coded.values.shape == (2, 3, last)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (7,), (2, 1)])
def test_small_shapes_and_powers_of_two_survive(name, shape):
  for value in (0.0, 1.0, -4.0, 2.0**-40, 2.0**80):
    decoded = round_trip(FORMATS[name], np.full(shape, value, np.float32))
    np.testing.assert_allclose(decoded, np.full(shape, value), rtol=1e-6)


def test_equal_magnitudes_are_exact_and_groups_are_apart():
  x = np.ones((2, 256), np.float32)
  x[0, :128], x[0, 128:], x[1, 3] = 1e-12, -3.7e5, 0
  np.testing.assert_array_equal(round_trip(E4M3_EXPANDED, x), x)


@pytest.mark.parametrize("seed", range(4))
def test_the_whole_range_of_float32_fits_in_a_group(seed):
  rng = np.random.default_rng(seed)
  x = np.exp2(rng.uniform(-126, 127, (1, 128))).astype(np.float32)
  x[0, :2] = np.float32(2.0**-126), np.float32(3e38)
  decoded = round_trip(E4M3_EXPANDED, x)
  assert np.isfinite(decoded).all() and (decoded > 0).all()


@pytest.mark.parametrize("name", FORMATS)
def test_denormals_never_become_nan_and_keep_their_size(name):
  x = np.float32([1e-40, -1e-44, 0.0, 1e-38])
  assert (np.abs(round_trip(FORMATS[name], x)) <= 1.2e-38).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_finite_stays_visible(name, bad):
  x = draw((2, 256), 1, 2.0)
  x[1, 135], x[1, 201] = bad, 0
  decoded = round_trip(FORMATS[name], x)
  assert not np.isfinite(decoded[1, 135])
  if name == "E4M3_EXPANDED":
    assert np.isnan(decoded[1, 128:]).all() and np.isfinite(decoded[1, :128]).all()
    assert np.isfinite(decoded[0]).all()
  if name.endswith("SCALED"):
    assert np.isnan(decoded).all()


@pytest.mark.parametrize("name", FORMATS)
def test_a_stack_is_coded_as_its_layers(name):
  x = draw((3, 16, 64), 2) * np.float32([1, 1e6, 1e-6])[:, None, None]
  layers = [round_trip(FORMATS[name], layer) for layer in x]
  np.testing.assert_array_equal(round_trip(FORMATS[name], x, 1), layers)
