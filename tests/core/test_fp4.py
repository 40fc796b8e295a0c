"""Simulated FP4: rounding to E2M1, the gradient estimator, clamp and compensation."""

import doctest
import functools

import jax
import jax.flatten_util
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from clip_case import clip, compiled, pairs, random_params
from dot_case import apply, assert_same, changed, make_case
from jax.sharding import PartitionSpec as P
from pairwise import mainly

from sbjax import SwitchBackDense, quantized_dot
from sbjax.distributed.fsdp import gather_weight
from sbjax.linear.fused import layer_norm_mlp
from sbjax.ops.rows import LayerNormParams
from sbjax.recipes import RECIPES, SIMULATED, Recipe, as_recipe, parse_recipe
from sbjax.studies.fp4 import Fp4, dge, fp4_dot, fp4_round

E2M1 = ml_dtypes.float4_e2m1fn
DOT, QUANTIZED_DOT = (jax.jit(f, static_argnums=2) for f in (fp4_dot, quantized_dot))
every_recipe = pytest.mark.parametrize("name", SIMULATED)


# ---- Rounding


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_is_that_of_the_format_for_every_16_bit_number(dtype):
  x = np.arange(2**16, dtype=np.uint16).view(jnp.dtype(dtype))
  with np.errstate(invalid="ignore"):  # Signalling NaNs.
    x = x[np.isfinite(x.astype(np.float64))]
  rounded = np.asarray(fp4_round(jnp.asarray(x)))
  assert rounded.dtype == x.dtype
  np.testing.assert_array_equal(rounded, x.astype(E2M1).astype(x.dtype))


def test_ties_go_to_the_even_mantissa():
  ties = jnp.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
  expected = np.array([0, 1, 1, 2, 2, 4, 4], np.float32)
  for sign in (1, -1):
    np.testing.assert_array_equal(fp4_round(sign * ties), sign * expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_values_are_never_rounded_to_finite_ones(bad):
  x = jnp.array([1.0, bad, -7.0])
  assert np.isfinite(fp4_round(x)).tolist() == [True, False, True]
  assert np.isnan(fp4_round(x)[1])


# ---- The estimator


def smooth(x, k):
  """Equation 7 of the paper in float64, between the neighbours of each x."""
  grid = np.array([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6])
  below = np.clip(np.searchsorted(grid, x, side="right") - 1, 0, len(grid) - 2)
  low, delta = grid[below], np.diff(grid)[below]
  t = 2 * (x - low) / delta - 1
  return low + delta / 2 * (1 + np.sign(t) * np.abs(t) ** (1 / k))


@pytest.mark.parametrize("k", [2, 5])
def test_the_estimator_is_the_derivative_of_the_smooth_curve(k):
  x = np.random.default_rng(0).uniform(-6, 6, 500)
  h = 1e-7
  expected = (smooth(x + h, k) - smooth(x - h, k)) / (2 * h)
  steep = expected > 2.5  # Near the peaks the curve bends within h.
  np.testing.assert_allclose(dge(jnp.float32(x), k)[~steep], expected[~steep], rtol=1e-3)
  np.testing.assert_array_less(2.4, dge(jnp.float32(x), k)[steep])


def test_the_estimator_has_the_values_of_the_authors_test():
  x = jnp.linspace(-6, 6, 20).astype(jnp.bfloat16)
  half = [0.2002, 0.4375, 0.6055, 0.2168, 1.8359, 0.2695, 0.3027, 0.2695, 0.2402, 0.5781]
  actual = dge(x).astype(jnp.bfloat16).astype(jnp.float32)
  np.testing.assert_allclose(actual, half + half[::-1], atol=5e-5)


def test_the_estimator_is_bounded_and_smallest_at_the_values_of_the_format():
  slope = jax.jit(dge, static_argnames=("k", "top"))
  x = np.linspace(-8, 8, 4097, dtype=np.float32)
  slopes = np.asarray(slope(x))
  assert slopes.max() == 3 and np.isclose(slopes.min(), 0.2)
  grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 100, np.nan], np.float32)
  *at_values, at_nan = np.asarray(slope(grid))
  np.testing.assert_allclose(at_values, 0.2, rtol=1e-6)
  assert slope(np.float32(0.75), top=7.0) == 7
  np.testing.assert_array_equal(slope(x, k=1), np.ones_like(x))
  assert np.isnan(at_nan)


# ---- Products


def quantized(a, axis):
  """a in E2M1 with its scales along an axis, in float64; and a over its scale."""
  scale = np.max(np.abs(a), axis=axis, keepdims=True) / 6
  scale = np.where(scale == 0, 1, scale)
  return (a / scale).astype(np.float32).astype(E2M1).astype(np.float64) * scale, a / scale


def reference(name, x, w, dy):
  """(y, dx, dw) in float64."""
  x, w, dy = (np.asarray(a).astype(np.float64) for a in (x, w, dy))
  clamped = x
  if name == "fp4":
    cut = int(x.shape[1] * 0.01)
    ordered = np.sort(x, axis=1)
    clamped = np.clip(x, ordered[:, [cut]], ordered[:, [-1 - cut]])
  w4, scaled = quantized(w, 0)
  x4, rest = quantized(clamped, 1)[0], x - clamped
  slope = 1 if name == "fp4_direct" else np.asarray(dge(jnp.float32(scaled)))
  return x4 @ w4 + rest @ w, dy @ w4.T, (x4 + rest).T @ dy * slope


@every_recipe
@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-5), ("bfloat16", 2**-7)])
def test_forward_and_gradients_equal_the_reference(name, dtype, rtol):
  case = make_case(dtype)
  for actual, expected in zip(apply(*case, as_recipe(name)), reference(name, *case), strict=True):
    actual = actual.astype(np.float64)
    assert np.linalg.norm(actual - expected) <= rtol * np.linalg.norm(expected)
    assert np.max(np.abs(actual - expected)) <= rtol * np.max(np.abs(expected))


def test_the_clamp_alone_is_worse_than_none_and_with_its_rest_better():
  """With heavy tails; the paper's table 1 has the same order for activations of a model."""
  rng = np.random.default_rng(1)
  x = rng.normal(size=(512, 128)) * np.exp(1.13 * rng.normal(size=(512, 128)))
  x, w = np.float32(x), np.float32(rng.normal(size=(128, 128)))
  ordered = np.sort(x, axis=1)
  rest = x - np.clip(x, ordered[:, [1]], ordered[:, [-2]])

  def error(y):
    return np.linalg.norm(y - x @ w) / np.linalg.norm(x @ w)

  y, without = (np.asarray(DOT(x, w, clamp)) for clamp in (0.99, None))
  plain, clamped, compensated = error(without), error(y - rest @ w), error(y)
  assert plain == pytest.approx(0.181, abs=0.015)
  assert clamped == pytest.approx(0.494, abs=0.02)
  assert compensated == pytest.approx(0.120, abs=0.01)


def test_fp4_dot_is_the_product_of_the_recipes():
  x, w, _ = make_case()
  for clamp, name in ((0.99, "fp4"), (None, "fp4_dge")):
    assert_same(DOT(x, w, clamp), QUANTIZED_DOT(x, w, name))


def test_values_of_the_format_are_multiplied_exactly():
  rng = np.random.default_rng(0)
  grid = np.array([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
  x, w = rng.choice(grid, (8, 64)), rng.choice(grid, (64, 5))
  x[:, 0], w[0] = 6, 6
  assert_same(QUANTIZED_DOT(x, w, "fp4_direct"), x @ w)


@every_recipe
def test_scaling_by_powers_of_two_is_exact(name):
  x, w, dy = make_case()
  result, recipe = apply(x, w, dy, as_recipe(name)), as_recipe(name)
  scaled = apply(x * np.float32(2**9), w * np.float32(2**-3), dy * np.float32(2**5), recipe)
  for a, b, power in zip(scaled, result, (6, 2, 14), strict=True):
    assert_same(a, b * np.float32(2**power))


@every_recipe
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_values_reach_their_whole_row_or_column(name, bad):
  x, w, dy = make_case()
  recipe = as_recipe(name)
  clean = apply(x, w, dy, recipe)
  y, dx, dw = apply(changed(x, (4, 9), bad), w, dy, recipe)
  assert np.all(np.isnan(y[4])) and np.all(np.isnan(dw))
  assert_same((np.delete(y, 4, 0), dx), (np.delete(clean.y, 4, 0), clean.dx))
  y, dx, dw = apply(x, changed(w, (9, 5), bad), dy, recipe)
  assert np.all(np.isnan(y[:, 5])) and np.all(np.isnan(dx))
  assert np.all(np.isnan(dw[:, 5])) == (name != "fp4_direct")
  assert_same(np.delete(y, 5, 1), np.delete(clean.y, 5, 1))


@every_recipe
@pytest.mark.parametrize("zero", ["x", "w", "dy"])
def test_a_zero_operand_gives_zeros(name, zero):
  case = make_case()
  case = case._replace(**{zero: np.zeros_like(getattr(case, zero))})
  y, dx, dw = apply(*case, as_recipe(name))
  assert [np.any(a) for a in (y, dx, dw)] == [zero == "dy", zero == "x", zero == "w"]
  assert all(np.all(np.isfinite(a)) for a in (y, dx, dw))


def test_bias_residual_and_multiplier_are_those_of_other_recipes():
  x, w, dy = make_case()
  bias, residual = np.float32(np.arange(w.shape[1])), dy
  more = {"bias": bias, "residual": residual, "multiplier": 0.5}
  y = jax.jit(lambda x, w: quantized_dot(x, w, "fp4", **more))(x, w)
  plain = jax.jit(lambda x, w: quantized_dot(x, w, "fp4"))(x, w)
  expected = 0.5 * np.asarray(plain) + bias + residual
  np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-5)

  @functools.partial(jax.jit, static_argnums=0)
  def gradients(multiplier):
    return jax.vjp(lambda *a: quantized_dot(*a, "fp4", multiplier=multiplier), x, w)[1](dy)

  assert_same(gradients(0.5), tuple(np.asarray(a) / 2 for a in gradients(1.0)))


# ---- Recipes


def test_the_names_are_recipes_everywhere():
  assert [as_recipe(name) for name in SIMULATED] == list(SIMULATED.values())
  assert parse_recipe("*/fc1=fp4, *=switchback").at("image/fc1") == SIMULATED["fp4"]
  assert not SIMULATED.keys() & RECIPES.keys() and not any(r.simulated for r in RECIPES.values())
  with pytest.raises(ValueError, match=r"Unknown recipe 'fp5'.*fp4_direct, fp4_dge, fp4"):
    as_recipe("fp5")


def test_what_cannot_be_meant_is_refused():
  x, w = jnp.ones((2, 128)), jnp.ones((128, 4))
  for clamp in (0.5, 1.5, np.nan):
    with pytest.raises(ValueError, match=r"clamp=.*more than 0\.5 and at most 1"):
      fp4_dot(x, w, clamp)
  with pytest.raises(ValueError, match="fwd, dgrad and wgrad must be None"):
    Recipe(fwd=RECIPES["switchback"].fwd, dgrad=None, wgrad=None, simulated=Fp4())
  with pytest.raises(ValueError, match=r"k=0\.5 must be at least 1"):
    dge(jnp.ones(3), k=0.5)
  with pytest.raises(ValueError, match=r"top=0 must be more than 0"):
    dge(jnp.ones(3), top=0)
  for function in (fp4_round, dge):
    with pytest.raises(ValueError, match="x must be floating point, not int32"):
      function(jnp.ones(3, jnp.int32))


def test_the_examples_of_the_docstrings_print_the_shown_output():
  with jax.numpy_dtype_promotion("standard"):
    for function in (fp4_round, dge, fp4_dot):
      names = {"jnp": jnp, function.__name__: function}
      test = doctest.DocTestParser().get_doctest(function.__doc__, names, "", None, 0)
      assert test.examples and doctest.DocTestRunner().run(test).failed == 0


def test_gradients_of_gradients_are_an_error():
  x, w = jnp.ones((2, 8)), jnp.ones((8, 4))
  gradient = jax.grad(lambda w: jnp.sum(fp4_dot(x, w) ** 2))
  with pytest.raises(NotImplementedError, match="Gradients of gradients"):
    jax.eval_shape(jax.grad(lambda w: jnp.sum(gradient(w))), w)


def test_a_layer_takes_the_recipe():
  x, w, _ = make_case()
  layer = SwitchBackDense(w.shape[1], recipe="fp4", use_bias=False)
  y = jax.jit(layer.apply)({"params": {"kernel": w}}, x)
  assert_same(y, QUANTIZED_DOT(x, w, "fp4"))


@pytest.mark.parametrize("name", mainly(["fp4"], SIMULATED))
def test_fused_layers_equal_separate_ones(name):
  rng = np.random.default_rng(0)
  x, w1, w2 = (jnp.float32(rng.normal(size=s)) for s in ((9, 32), (32, 128), (128, 32)))
  norm = LayerNormParams(jnp.ones(32), jnp.zeros(32))

  def plain(x, w1, w2):
    n = (x - x.mean(1, keepdims=True)) / jnp.sqrt(x.var(1, keepdims=True) + 1e-5)
    h = quantized_dot(n, w1, name)
    return quantized_dot(jax.nn.gelu(h, approximate=False), w2, name)

  def fused(x, w1, w2):
    return layer_norm_mlp(x, norm, w1, None, w2, None, name)[1]

  @functools.partial(compiled, static_argnums=0)
  def results(f, *arrays):
    y, backward = jax.vjp(f, *arrays)
    return y, *backward(y)

  for actual, other in zip(*(results(f, x, w1, w2) for f in (fused, plain)), strict=True):
    # A value next to a tie may round to the other side.
    assert jnp.linalg.norm(actual - other) <= 0.02 * jnp.linalg.norm(other)


def test_a_gathered_weight_is_rounded_from_float32():
  x, w, _ = make_case("bfloat16", k=128)
  mesh = jax.make_mesh((4,), ("fsdp",), (jax.sharding.AxisType.Auto,))

  @jax.jit
  @functools.partial(
    jax.shard_map, mesh=mesh, in_specs=(P(), P("fsdp")), out_specs=P(), check_vma=False
  )
  def layer(x, w):
    return quantized_dot(x, gather_weight(w, "fp4", "fsdp", dtype=jnp.bfloat16), "fp4")

  expected = jax.jit(quantized_dot, static_argnums=2)(x, w, "fp4")
  assert_same(layer(x, w), expected)


@pytest.mark.slow
def test_a_clip_takes_the_recipe():
  """Its gradients are finite and point as those of 16 bits do."""
  image = pairs()[0]

  @functools.partial(compiled, static_argnums=0)
  def gradient(recipe, params):
    model = clip(recipe=recipe)

    def loss(params):
      return jnp.sum(model.apply({"params": params}, image, method=model.encode_image)[:, 0])

    return jax.flatten_util.ravel_pytree(jax.grad(loss)(params)["image"])[0]

  a, b = (gradient(as_recipe(name), random_params()) for name in ("fp4", "full"))
  assert np.all(np.isfinite(a)) and np.any(a != b)
  assert jnp.vdot(a, b) > 0.7 * jnp.linalg.norm(a) * jnp.linalg.norm(b)
