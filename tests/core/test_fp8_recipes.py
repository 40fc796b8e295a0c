"""Scales of fp8 that are powers of two or constants, and DINOv3's recipe against its algorithm."""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dot_case import apply, assert_same, changed, make_case

from sbjax import E4M3, E5M2, INT8, RECIPES, Spec, dequantize, quantize, quantized_dot
from sbjax.quantize import format_of
from sbjax.recipes import as_recipe, fp8_cscale, parse_recipe

FORMATS = [INT8, E4M3, E5M2]
jitted = jax.jit(quantize, static_argnums=1)
every_format = pytest.mark.parametrize("dtype", FORMATS, ids=lambda dtype: dtype.name)
fp8 = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=lambda dtype: dtype.name)


def values(q):
  return np.asarray(q.values).astype(np.float64)


def reductions(function, *args):
  return [
    eqn.primitive.name
    for eqn in jax.make_jaxpr(function)(*args).jaxpr.eqns
    if eqn.primitive.name.startswith("reduce_max")
  ]


# ---- Powers of two


@every_format
@pytest.mark.parametrize("absmax", [1.0, 447.9, 448.0, 448.1, 57344.0, 0.3, 1e-20, 1e30])
def test_the_scale_is_the_smallest_power_of_two_that_does_not_saturate(dtype, absmax):
  x = jnp.array([[absmax, -absmax / 3]], jnp.float32)
  q = jitted(x, Spec(dtype, "tensorwise_pow2"))
  power = math.floor(math.log2(format_of(dtype).max / float(x[0, 0])))
  assert q.scale == 2.0**-power
  largest = float(x[0, 0]) * 2.0**power
  assert largest <= format_of(dtype).max < 2 * largest


@every_format
@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 1e-38, 3e38])
def test_extreme_magnitudes_have_a_finite_scale(dtype, magnitude):
  x = np.array([[1.0, -0.5, 0.0]]) * magnitude
  q = jitted(x.astype(np.float32), Spec(dtype, "tensorwise_pow2"))
  assert np.isfinite(q.scale) and q.scale > 0
  # Magnitudes below the smallest scale's round to 0; a CPU flushes subnormal numbers.
  np.testing.assert_allclose(dequantize(q), x, atol=max(magnitude / 8, 2.0**-126))


@every_format
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_makes_the_tensor_nan(dtype, bad):
  q = jitted(jnp.array([[1.0, bad], [2.0, 3.0]]), Spec(dtype, "tensorwise_pow2"))
  assert np.all(np.isnan(dequantize(q)))


# ---- Constants


@every_format
@pytest.mark.parametrize("exponent", [-63, -4, 0, 7, 63])
def test_a_static_scale_multiplies_and_saturates_every_finite_value(dtype, exponent):
  limit, size = format_of(dtype).max, 2.0**-exponent
  x = np.array([[1.0, -2.0, limit, 1.2 * limit, -9 * limit]]) * size
  q = jitted(
    jnp.asarray(np.append(x, [[3e38, -3e38]], axis=1), jnp.float32), Spec(dtype, "static", exponent)
  )
  assert q.scale.shape == (1, 1) and q.scale == size
  expected = np.array([[1, -2, limit, limit, -limit]]) * size
  np.testing.assert_array_equal(np.asarray(dequantize(q))[:, :5], expected)
  assert np.all(np.isfinite(dequantize(q)))


@fp8
@pytest.mark.parametrize("exponent", [-8, 0, 8])
def test_a_value_that_is_not_finite_is_nan_alone_under_a_static_scale(dtype, exponent):
  x = jnp.array([[1.0, np.nan, 2.0], [np.inf, 1.0, -np.inf]]) * 2.0**-exponent
  restored = dequantize(jitted(x, Spec(dtype, "static", exponent)))
  np.testing.assert_array_equal(np.isnan(restored), ~np.isfinite(x))
  np.testing.assert_array_equal(restored[0, 0], x[0, 0])


def test_a_static_scale_takes_no_maximum_but_in_int8():
  x = jnp.ones((4, 8))
  assert reductions(lambda x: quantize(x, Spec(INT8, "static")), x) == ["reduce_max"]
  for dtype in (E4M3, E5M2):
    assert reductions(lambda x, d=dtype: quantize(x, Spec(d, "static", 3)), x) == []
    assert reductions(lambda x, d=dtype: quantize(x, Spec(d, "tensorwise")), x) == ["reduce_max"]


@pytest.mark.parametrize(
  ("scaling", "exponent", "message"),
  [
    ("static", 64, r"exponent=64.*-63 to 63"),
    ("static", 0.5, r"exponent=0.5.*integer"),
    ("static", True, r"exponent=True.*integer"),
    ("tensorwise", 2, r"exponent=2 needs scaling='static', not 'tensorwise'"),
  ],
)
def test_a_wrong_exponent_is_refused(scaling, exponent, message):
  with pytest.raises(ValueError, match=message):
    Spec(E4M3, scaling, exponent)


# ---- Recipes


def test_cscale_has_one_exponent_for_all_operands():
  recipe = fp8_cscale(-3)
  specs = {spec for pair in (recipe.fwd, recipe.dgrad, recipe.wgrad) for spec in pair}
  assert specs == {Spec(E4M3, "static", -3), Spec(E5M2, "static", -3)}
  assert recipe.dgrad[0].dtype == recipe.wgrad[1].dtype == E5M2


def test_cscale_has_a_name_for_each_exponent():
  assert as_recipe("fp8_cscale:4") == fp8_cscale(4) != fp8_cscale(5)
  assert parse_recipe("*/fc1=fp8_cscale:-2, *=full").at("a/fc1") == fp8_cscale(-2)
  for unknown in ("fp8_cscale", "fp8_cscale:", "fp8_cscale:1.5"):
    with pytest.raises(ValueError, match=r"Unknown recipe.*fp8_cscale:<exponent>"):
      as_recipe(unknown)
  with pytest.raises(ValueError, match="exponent=99"):
    as_recipe("fp8_cscale:99")


def test_cscale_of_operands_that_saturate_is_finite():
  x, w, dy = (np.float32(1e6) * a for a in make_case())
  for result in apply(x, w, dy, fp8_cscale(2)):
    assert np.all(np.isfinite(result))


def test_cscale_equals_static_on_operands_times_its_power():
  x, w, dy = make_case()
  power = np.float32(2.0**3)
  scaled = apply(power * x, power * w, power * dy, RECIPES["fp8_static"])
  assert_same(apply(x, w, dy, fp8_cscale(3)), jax.tree.map(lambda a: a / power**2, scaled))


def test_amax_differs_from_static_only_by_powers_of_two():
  """Each operand is in the binade below the format's maximum, so that AMAX's scales are 1."""
  x, w, dy = make_case()
  x *= 400 / np.max(np.abs(x))
  w *= 400 / np.max(np.abs(w))
  dy *= 50000 / np.max(np.abs(dy))
  assert_same(apply(x, w, dy, RECIPES["fp8_amax"]), apply(x, w, dy, RECIPES["fp8_static"]))


# ---- DINOv3 (https://arxiv.org/abs/2508.10104), from a description of its linear layer


def e4m3(t, absmax):
  """t / scale in e4m3, and the scale: max(absmax, 1e-12) / 448."""
  scale = np.maximum(absmax.astype(np.float32), np.float32(1e-12)) / np.float32(448)
  return (t.astype(np.float32) / scale).astype(ml_dtypes.float8_e4m3fn), scale


def dinov3_matmul(a, absmax_a, b_t, absmax_b):
  """a [m, k] with b_t [n, k], each divided by its scale; products in float64, then the scales."""
  (a, scale_a), (b_t, scale_b) = e4m3(a, absmax_a), e4m3(b_t, absmax_b)
  return (a.astype(np.float64) @ b_t.astype(np.float64).T) * scale_a * scale_b.T


def dinov3_linear(x, w, dy):
  """(y, dx, dw) for x [m, k], weight w [n, k] as PyTorch has it, and dy [m, n]."""

  def absmax(t):
    return np.max(np.abs(t), axis=1, keepdims=True)

  y = dinov3_matmul(x, absmax(x), w, absmax(w))
  whole = np.full((w.shape[1], 1), np.max(absmax(w)))
  dx = dinov3_matmul(dy, absmax(dy), w.T, whole)
  return y, dx, dy.T.astype(np.float64) @ x.astype(np.float64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dinov3_s_recipe_is_its_algorithm(dtype):
  x, w, dy = make_case(dtype)
  y, dx, dw = dinov3_linear(np.asarray(x), w.T, np.asarray(dy))
  result = apply(x, w, dy, RECIPES["fp8_dinov3"])
  # Theirs divides by the scale and ours multiplies by its inverse: a value that is next to a tie
  # may round to the other side. One such value moves a sum by a 16th of the term.
  unit = {"float32": 2.0**-20, "bfloat16": 2.0**-8}[dtype]
  for actual, expected in zip(result, (y, dx, dw.T), strict=True):
    error = np.abs(np.asarray(actual).astype(np.float64) - expected)
    bound = unit * (np.abs(expected) + np.max(np.abs(expected), axis=1, keepdims=True))
    assert np.mean(error <= bound) > 0.99
    assert np.max(error) <= 2.0**-5 * np.max(np.abs(expected))


def test_dinov3_s_recipe_scales_w_by_outputs_forward_and_as_a_whole_backward():
  """A large column of w, one output, costs the others no digits forward, but it does backward."""
  x, w, dy = make_case()
  large, recipe = changed(w, (slice(None), 6), 4096 * w[:, 6]), RECIPES["fp8_dinov3"]
  others = np.arange(w.shape[1]) != 6
  dot = jax.jit(functools.partial(quantized_dot, recipe=recipe))
  y, y_large = (np.asarray(dot(x, w)) for w in (w, large))
  np.testing.assert_array_equal(y[:, others], y_large[:, others])
  np.testing.assert_array_equal(4096 * y[:, 6], y_large[:, 6])
  dy = changed(dy, (slice(None), 6), 0)
  one, other = (np.asarray(apply(x, w, dy, recipe).dx) for w in (w, large))
  assert np.any(one != other)
