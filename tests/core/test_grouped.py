"""Activations kept in e4m3 with a scale for each 16 numbers (COAT), for the backward pass."""

import doctest
import functools

import jax
import jax.flatten_util
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from clip_case import MICRO, clip, compiled, pairs, random_params
from flax_case import bitwise, normal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from pairwise import mainly

from sbjax import E4M3, LayerNormDense, LayerNormMLP, Spec
from sbjax.linear.fused import layer_norm_dense, layer_norm_mlp
from sbjax.linear.grouped import group, ungroup
from sbjax.models import BlockOptions
from sbjax.ops.rows import ACTIVATIONS, LayerNormParams, gelu_backward
from train.config import ModelConfig
from train.task import block_options

WIDTH, HIDDEN = 48, 96


def tailed(shape, dtype="float32"):
  """Rows of different magnitude with heavy tails."""
  rng = np.random.default_rng(0)
  x = rng.standard_t(3, size=shape) * np.exp(3 * rng.normal(size=(shape[0], 1)))
  return jnp.asarray(x, jnp.float32).astype(dtype)


# ---- The format


def test_values_and_scales_equal_numpy_s():
  x = np.asarray(tailed((64, 96)))
  groups = x.reshape(64, 6, 16)
  scale = (np.abs(groups).max(2, keepdims=True) / np.float32(448)).astype(ml_dtypes.bfloat16)
  values = np.clip(groups / scale.astype(np.float32), -448, 448).astype(ml_dtypes.float8_e4m3fn)
  kept = group(jnp.asarray(x))
  assert kept.values.dtype == E4M3 and kept.scale.dtype == jnp.bfloat16
  np.testing.assert_array_equal(kept.values, values)
  np.testing.assert_array_equal(kept.scale, scale)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_number_is_off_by_a_sixteenth_at_most(dtype):
  x = tailed((256, 80), dtype)
  found = np.asarray(ungroup(group(x), jnp.float32)).reshape(256, 5, 16)
  x = np.asarray(x.astype(jnp.float32)).reshape(found.shape)
  largest = np.max(np.abs(x), axis=2, keepdims=True)
  small = np.abs(x) < 2**-14 * largest
  bound = np.where(small, 2**-18 * largest, 2**-4 * np.abs(x))
  assert np.all(np.abs(found - x) <= bound * (1 + 2**-20))


@pytest.mark.parametrize(("width", "size"), [(48, 16), (40, 10), (8, 8), (17, 1), (13, 13)])
def test_groups_divide_the_row(width, size):
  x = normal((5, width))
  kept = group(x)
  assert kept.values.shape == (5, width // size, size)
  assert ungroup(kept, x.dtype).shape == x.shape


def test_it_takes_a_byte_and_an_eighth_a_number():
  assert sum(a.nbytes for a in group(normal((32, 64), "bfloat16"))) == 1.125 * 32 * 64


def test_the_example_prints_the_shown_output():
  test = doctest.DocTestParser().get_doctest(
    group.__doc__, {"jnp": jnp, "group": group}, "", None, 0
  )
  assert test.examples and doctest.DocTestRunner().run(test).failed == 0


def test_zeros_stay_zeros():
  x = normal((4, 32))
  x[1], x[2, 3] = 0, 0
  found = ungroup(group(jnp.asarray(x)), jnp.float32)
  assert not np.any(found[1]) and found[2, 3] == 0


def test_tiny_numbers_stay_finite():
  """Their scales are subnormal numbers of bfloat16, and off by up to a half."""
  x = jnp.asarray(np.float32(10.0) ** np.linspace(-38, -34, 200, dtype=np.float32))
  found = ungroup(group(jnp.tile(x[:, None], (1, 16))), jnp.float32)
  assert np.all(np.isfinite(found)) and np.max(np.abs(found)) < 2e-34


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_number_makes_its_group_nan_and_no_other(bad):
  x = np.array(normal((300, 32)))
  clean = ungroup(group(jnp.asarray(x)), jnp.float32)
  x[7, 20] = bad
  found = ungroup(group(jnp.asarray(x)), jnp.float32)
  expected = np.array(clean)
  expected[7, 16:] = np.nan
  np.testing.assert_array_equal(found, expected)


def test_no_matmul_takes_it():
  with pytest.raises(ValueError, match="Unknown scaling 'grouped'"):
    Spec(E4M3, "grouped")


# ---- Gradients


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gradient_of_gelu_is_off_by_a_sixteenth_of_what_comes_in_at_most(activation):
  h, dg = jnp.linspace(-8, 8, 64 * 128).reshape(64, 128), jnp.ones((64, 128))
  kept = ungroup(group(h), h.dtype)
  dh, expected = (gelu_backward(a, dg, None, activation=activation)[0] for a in (kept, h))
  assert 2**-9 < jnp.max(jnp.abs(dh - expected)) <= 2**-4


def mlp_case(dtype="float32"):
  norm = LayerNormParams(1 + normal((WIDTH,), seed=1) / 4, normal((WIDTH,), seed=2) / 4)
  w1, w2 = normal((WIDTH, HIDDEN), seed=3) / 7, normal((HIDDEN, WIDTH), seed=4) / 9
  b1, b2 = normal((HIDDEN,), seed=5) / 2, normal((WIDTH,), seed=6) / 2
  return normal((70, WIDTH), dtype, 7) * 3 + 1, (norm, w1, b1, w2, b2), normal((70, WIDTH), dtype)


@functools.partial(compiled, static_argnames=("recipe", "keep", "add_residual"))
def gradients(x, parameters, dy, recipe, keep, add_residual=False):
  """dx and the gradients of the parameters."""

  def forward(x, parameters):
    how = {"keep": keep, "add_residual": add_residual, "backend": "xla"}
    y = layer_norm_mlp(x, *parameters, recipe, **how)
    return y if add_residual else y[1]

  return jax.vjp(forward, x, parameters)[1](dy)


@pytest.mark.parametrize(
  "recipe", mainly(["full", "switchback_m"], ["full", "switchback", "switchback_m"])
)
@pytest.mark.parametrize("add_residual", [False, True])
def test_the_gradients_of_an_mlp_are_off_by_a_sixteenth_at_most(recipe, add_residual):
  case = mlp_case()
  expected, found = (
    gradients(*case, recipe=recipe, keep=keep, add_residual=add_residual)
    for keep in ("original", "grouped")
  )
  errors = [
    float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
  ]
  assert max(errors) <= 2**-4 and sum(error > 2**-9 for error in errors) >= 2
  assert errors[-1] < 1e-6  # The last bias: nothing is kept for it.


def test_the_output_is_the_same():
  x, parameters, _ = mlp_case()

  def output(x, parameters, keep):
    return layer_norm_mlp(x, *parameters, "switchback", keep=keep)[1]

  run = jax.jit(output, static_argnums=2)
  one, other = (run(x, parameters, keep) for keep in ("original", "grouped"))
  np.testing.assert_array_equal(one, other)


def test_a_linear_layer_keeps_the_input_of_its_norm():
  x, (norm, w1, b1, _, _), _ = mlp_case("bfloat16")

  def saved(keep):
    def forward(x):
      return layer_norm_dense(x, norm, w1, "switchback", bias=b1, keep=keep, backend="xla")

    leaves = jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(forward, x)[1], x))
    return [a for a in leaves if a.shape[:1] == x.shape[:1]]

  assert [(a.shape, a.dtype) for a in saved("original")] == [(x.shape, x.dtype)]
  assert [(a.shape, a.dtype) for a in saved("grouped")] == [
    ((70, 3, 16), E4M3),
    ((70, 3, 1), jnp.bfloat16),
  ]


@pytest.mark.parametrize(
  ("recipe", "original", "grouped"),
  [("full", 2, 1.125), ("switchback", 2, 1.125), ("switchback_m", 1, 1)],
)
def test_an_mlp_saves_a_byte_and_an_eighth_of_x_and_of_the_input_of_gelu(recipe, original, grouped):
  x, parameters, _ = mlp_case("bfloat16")

  def saved(keep):
    def forward(x, parameters):
      return layer_norm_mlp(x, *parameters, recipe, add_residual=True, keep=keep, backend="xla")

    leaves = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(forward, *a)[1], x, parameters))
    return sum(a.size * a.dtype.itemsize for a in leaves if a.shape[:1] == x.shape[:1]) / len(x)

  scales = 4 if recipe == "switchback_m" else 0  # A float32 for each row of int8 values.
  assert saved("original") == 2 * WIDTH + original * HIDDEN + scales
  assert saved("grouped") == 1.125 * WIDTH + grouped * HIDDEN + scales


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_token_stays_visible_in_the_gradients(bad):
  x, parameters, dy = mlp_case()
  x[3, 4] = bad
  dx, d_parameters = gradients(x, parameters, dy, recipe="full", keep="grouped")
  assert np.all(np.isnan(dx[3])) and np.all(np.isfinite(np.delete(dx, 3, axis=0)))
  assert not np.any(np.isfinite(d_parameters[1]))  # w1's


def test_tokens_split_over_devices_stay_split():
  """In JAX's explicit mode, where each reshape says how its result is split."""
  x, parameters, dy = mlp_case()
  expected = gradients(x, parameters, dy, recipe="full", keep="grouped")
  with jax.set_mesh(jax.make_mesh((2,), ("data",), (AxisType.Explicit,))):
    x, dy = (jax.device_put(a, P("data")) for a in (x, dy))
    parameters = jax.device_put(parameters, P())
    found = gradients(x, parameters, dy, recipe="full", keep="grouped")
    assert jax.typeof(found[0]).sharding.spec == P("data", None)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


# ---- The option of a model


def tower_gradient(params, **options):
  """The gradient of an image tower, as one vector; no rounding differs with what is recomputed."""
  image, model = pairs()[0], clip(**options)

  @bitwise
  def run(params):
    def loss(params):
      return jnp.sum(model.apply({"params": params}, image, method=model.encode_image)[:, 0])

    return jax.grad(loss)(params)["image"]

  return jax.flatten_util.ravel_pytree(run(params))[0]


@pytest.mark.slow
def test_a_clip_has_the_gradients_of_the_same_kept_bits_with_remat():
  params = random_params()
  full = tower_gradient(params)
  grouped = tower_gradient(params, keep="grouped")
  assert 0 < jnp.linalg.norm(grouped - full) <= 2**-4 * jnp.linalg.norm(full)
  again = tower_gradient(params, keep="grouped", remat="dots_and_residuals")
  assert jnp.linalg.norm(again - grouped) <= 1e-7 * jnp.linalg.norm(full)


@pytest.mark.parametrize("remat", ["none", "residuals", "dots_and_residuals"])
def test_a_block_keeps_groups_of_both_norms_inputs_and_of_gelu_s(remat):
  image, params = pairs()[0], random_params()

  def saved(keep):
    model = clip(keep=keep, remat=remat)
    encode = functools.partial(model.apply, method=model.encode_image)

    def backward(params):
      return jax.vjp(lambda p: encode({"params": p}, image), params)[1]

    found = jax.tree.leaves(jax.eval_shape(backward, params))
    return sum(a.size for a in found if a.dtype == E4M3)

  vision = MICRO.vision
  numbers = vision.layers * len(image) * ((vision.image_size // vision.patch_size) ** 2 + 1)
  assert saved("grouped") == numbers * (2 + vision.mlp_ratio) * vision.width
  assert saved("original") == 0


@pytest.mark.parametrize("recipe", ["full", "switchback_m"])
def test_the_default_keeps_no_group(recipe):
  image, params = pairs()[0], random_params()

  def program(**options):
    model = clip(recipe=recipe, **options)
    encode = functools.partial(model.apply, method=model.encode_image)
    return str(
      jax.make_jaxpr(lambda p: jax.vjp(lambda p: encode({"params": p}, image), p)[1])(params)
    )

  assert "f8_e4m3fn" not in program() and "f8_e4m3fn" in program(keep="grouped")


def test_the_config_and_the_layers_have_the_option():
  assert block_options(ModelConfig(size="tiny")).keep == "original"
  assert block_options(ModelConfig(size="tiny", keep="grouped")).keep == "grouped"
  x = normal((4, 32))
  for layer in (LayerNormMLP(64, keep="grouped"), LayerNormDense(64, keep="grouped")):
    params = jax.eval_shape(layer.init, jax.random.key(0), x)
    program = jax.make_jaxpr(lambda p, layer=layer: jax.vjp(lambda p: layer.apply(p, x), p)[1])
    assert "f8_e4m3fn" in str(program(params))


def test_an_unknown_way_to_keep_is_refused():
  x, parameters, _ = mlp_case()
  for call in (
    lambda: BlockOptions(keep="fp8"),
    lambda: layer_norm_mlp(x, *parameters, "full", keep="fp8"),
    lambda: layer_norm_dense(x, *parameters[:2], "full", keep="fp8"),
  ):
    with pytest.raises(ValueError, match="keep='fp8' must be one of original, grouped"):
      call()
