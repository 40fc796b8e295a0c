"""SwitchBackDense and SwitchBackLinear equal Flax's own layers except for the three products."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax import nnx
from flax_case import assert_close, drawn, linen, normal, value_and_grads

from sbjax import RECIPES, SwitchBackDense, SwitchBackLinear, quantize
from sbjax.linear.layers import LayerScale
from sbjax.recipes import FULL, SWITCHBACK

every_recipe = pytest.mark.parametrize("name", RECIPES)
either_dtype = pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])


def shapes(module, *args, **kwargs):
  """The shapes of a linen module's variables."""
  return jax.eval_shape(functools.partial(module.init, **kwargs), jax.random.key(0), *args)


def run_nnx(layer, x):
  """Output and gradients in parameters and x, through nnx's own transformations."""
  graph, params, rest = nnx.split(layer, nnx.Param, ...)
  params = drawn(jax.eval_shape(lambda: params))
  return value_and_grads(lambda params, x: nnx.merge(graph, params, rest)(x), params, x)


# ---- SwitchBackDense


@every_recipe
@pytest.mark.parametrize("use_bias", [True, False])
def test_dense_has_the_parameters_of_nn_dense_for_every_recipe(name, use_bias):
  kwargs = dict(use_bias=use_bias, param_dtype=jnp.bfloat16, dtype=jnp.float32)
  x = normal((2, 5, 12))
  assert shapes(SwitchBackDense(8, recipe=name, **kwargs), x) == shapes(nn.Dense(8, **kwargs), x)


def test_dense_initializes_as_nn_dense():
  x = normal((5, 12))
  ours, flax_s = (
    jax.jit(layer.init)(jax.random.key(3), x)
    for layer in (
      SwitchBackDense(8, bias_init=nn.initializers.ones),
      nn.Dense(8, bias_init=nn.initializers.ones),
    )
  )
  jax.tree.map(np.testing.assert_array_equal, ours, flax_s)


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("shape", [(12,), (5, 12), (2, 3, 5, 12)], ids=str)
def test_full_dense_equals_nn_dense(shape, use_bias):
  x = normal(shape)
  actual = linen(SwitchBackDense(8, recipe="full", use_bias=use_bias), x)
  assert_close(actual, linen(nn.Dense(8, use_bias=use_bias), x), 1e-6)


def test_full_dense_in_bfloat16_equals_nn_dense_but_sums_gradients_in_float32():
  x = normal((2, 5, 12), "bfloat16")
  actual = linen(SwitchBackDense(8, recipe=FULL, dtype="bfloat16"), x)
  expected = linen(nn.Dense(8, dtype="bfloat16"), x)
  np.testing.assert_array_equal(actual[0], expected[0])
  assert_close(actual, expected, 2**-6)  # nn.Dense sums gradients in bfloat16.


@pytest.mark.parametrize(
  ("name", "dtype"),
  [("switchback", "float32"), *((name, "bfloat16") for name in RECIPES if name != "full")],
)
def test_dense_equals_the_reference_linear_layer_with_a_bias(name, dtype):
  x, dy = normal((10, 12), dtype), normal((10, 8), dtype, seed=1)
  layer = SwitchBackDense(8, recipe=name, dtype=dtype)
  variables = drawn(shapes(layer, x))

  @jax.jit
  def run(variables, x, dy):
    y, backward = jax.vjp(layer.apply, variables, x)
    return y, *backward(dy)

  actual_y, actual, actual_dx = run(variables, x, dy)
  kernel, bias = variables["params"]["kernel"], variables["params"]["bias"]
  y, dx, dw = reference.linear(name, x, kernel, dy)
  # With recipe "full" the bias is cast to the compute dtype, and so is the sum.
  added = reference.UNIT[dtype] * (np.abs(y.value) + 2 * np.abs(bias))
  reference.assert_within(actual_y, reference.Product(y.value + bias, y.error + 1.01 * added))
  reference.assert_within(actual_dx, dx)
  reference.assert_within(actual["params"]["kernel"], dw)
  assert actual_y.dtype == actual_dx.dtype == dtype


@pytest.mark.parametrize("name", ["full", "switchback_m", "fp8_tensorwise"])
def test_the_kernel_s_gradient_is_the_float32_accumulator(name):
  x = normal((2, 5, 12), "bfloat16")
  _, (grads, _) = linen(SwitchBackDense(8, recipe=name, dtype="bfloat16"), x)
  kernel = grads["params"]["kernel"]
  assert kernel.dtype == np.float32
  assert np.mean(kernel != kernel.astype(jnp.bfloat16).astype(np.float32)) > 0.9


@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@either_dtype
def test_the_output_has_the_dtype_that_flax_infers(x_dtype, param_dtype, dtype):
  x = normal((5, 12), x_dtype)
  kwargs = dict(dtype=dtype, param_dtype=jnp.dtype(param_dtype))
  with jax.numpy_dtype_promotion("standard"):  # Flax's dtype inference promotes.
    ours, flax_s = (
      jax.eval_shape(layer.init_with_output, jax.random.key(0), x)[0].dtype
      for layer in (SwitchBackDense(8, **kwargs), nn.Dense(8, **kwargs))
    )
    linear = SwitchBackLinear(12, 8, rngs=nnx.Rngs(0), **kwargs)
    assert jax.eval_shape(linear, x).dtype == ours == flax_s


def test_a_recipe_by_name_equals_the_recipe_by_value():
  x = normal((5, 12))
  by_name, by_value = (
    linen(SwitchBackDense(8, recipe="switchback"), x),
    linen(SwitchBackDense(8), x),
  )
  jax.tree.map(np.testing.assert_array_equal, by_name, by_value)
  assert SwitchBackDense(8).recipe == SWITCHBACK


def test_dense_under_scan_and_remat_equals_a_loop():
  class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
      return jnp.tanh(SwitchBackDense(12, name="linear")(x)), None

  class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
      block = nn.scan(
        nn.remat(Block, prevent_cse=False),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=3,
      )
      return block(name="blocks")(x, None)[0]

  def looped(variables, x):
    for i in range(3):
      params = jax.tree.map(lambda a, i=i: a[i], variables["params"]["blocks"])
      x = Block().apply({"params": params}, x, None)[0]
    return x

  x = normal((5, 12))
  variables = drawn(shapes(Scanned(), x))
  assert variables["params"]["blocks"]["linear"]["kernel"].shape == (3, 12, 12)
  actual = value_and_grads(Scanned().apply, variables, x)
  assert_close(actual, value_and_grads(looped, variables, x), 1e-6)


@pytest.mark.parametrize(
  "replaced",
  [
    {"precision": "highest"},
    {"dot_general": jax.lax.dot_general},
    {"dot_general_cls": lambda: jax.lax.dot_general},
    {"promote_dtype": lambda *a, **k: a},
  ],
  ids=lambda kwargs: next(iter(kwargs)),
)
def test_arguments_that_replace_the_product_are_refused(replaced):
  message = f"The recipe decides the product; leave {next(iter(replaced))} unset"
  with pytest.raises(ValueError, match=message):
    shapes(SwitchBackDense(8, **replaced), normal((5, 12)))
  if "dot_general_cls" not in replaced:
    with pytest.raises(ValueError, match=message):
      SwitchBackLinear(12, 8, rngs=nnx.Rngs(0), **replaced)


def test_errors_name_the_value_and_what_would_be_right():
  x = normal((5, 12))
  with pytest.raises(ValueError, match=r"'int4'.*full, switchback"):
    shapes(SwitchBackDense(8, recipe="int4"), x)
  with pytest.raises(ValueError, match=r"'int4'.*full, switchback"):
    SwitchBackLinear(12, 8, recipe="int4", rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match=r"x must be floating.*int32"):
    shapes(SwitchBackDense(8), x.astype(np.int32))
  with pytest.raises(ValueError, match=r"x must be floating.*int32"):
    SwitchBackLinear(12, 8, rngs=nnx.Rngs(0))(x.astype(np.int32))
  with pytest.raises(NotImplementedError, match=r"mosaic.*needs an NVIDIA GPU"):
    shapes(SwitchBackDense(8, backend="mosaic"), x)
  with pytest.raises(NotImplementedError, match=r"mosaic.*needs an NVIDIA GPU"):
    SwitchBackLinear(12, 8, backend="mosaic", rngs=nnx.Rngs(0))(x)


def test_a_quantized_input_is_refused():
  x = quantize(normal((5, 12)), SWITCHBACK.fwd[0])
  with pytest.raises(ValueError, match="x is Quantized"):
    shapes(SwitchBackDense(8), x)
  with pytest.raises(ValueError, match="x is Quantized"):
    SwitchBackLinear(12, 8, rngs=nnx.Rngs(0))(x)


# ---- SwitchBackLinear


@every_recipe
def test_linear_has_the_parameters_of_nnx_linear_for_every_recipe(name):
  for kwargs in ({}, {"use_bias": False, "param_dtype": jnp.bfloat16}):
    ours = nnx.state(SwitchBackLinear(12, 8, recipe=name, rngs=nnx.Rngs(3), **kwargs))
    flax_s = nnx.state(nnx.Linear(12, 8, rngs=nnx.Rngs(3), **kwargs))
    jax.tree.map(np.testing.assert_array_equal, ours, flax_s)
    assert nnx.to_flat_state(ours).paths == nnx.to_flat_state(flax_s).paths


def test_full_linear_equals_nnx_linear():
  x = normal((2, 5, 12))
  for kwargs in ({}, {"use_bias": False}):
    actual = run_nnx(SwitchBackLinear(12, 8, recipe="full", rngs=nnx.Rngs(0), **kwargs), x)
    assert_close(actual, run_nnx(nnx.Linear(12, 8, rngs=nnx.Rngs(0), **kwargs), x), 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linear_equals_dense(dtype):
  x = normal((2, 5, 12), dtype)
  y, (params, dx) = linen(SwitchBackDense(8, recipe="switchback_m", dtype=dtype), x)
  linear = SwitchBackLinear(12, 8, recipe="switchback_m", dtype=dtype, rngs=nnx.Rngs(0))
  actual_y, (actual_params, actual_dx) = run_nnx(linear, x)
  np.testing.assert_array_equal(actual_y, y)
  np.testing.assert_array_equal(actual_dx, dx)
  np.testing.assert_array_equal(actual_params["kernel"][...], params["params"]["kernel"])
  np.testing.assert_array_equal(actual_params["bias"][...], params["params"]["bias"])


def test_linear_trains_under_nnx_transformations():
  layer = SwitchBackLinear(12, 8, rngs=nnx.Rngs(0))
  x = normal((5, 12))

  @nnx.jit
  def loss_and_grads(layer, x):
    return nnx.value_and_grad(lambda layer: jnp.sum(jnp.square(layer(x))))(layer)

  loss, grads = loss_and_grads(layer, x)
  step = 1e-3
  layer.kernel[...] -= step * grads["kernel"][...]
  layer.bias[...] -= step * grads["bias"][...]
  assert loss_and_grads(layer, x)[0] < loss
  assert grads["kernel"][...].dtype == jnp.float32


# ---- LayerScale


@pytest.mark.parametrize("init", [0.0, 0.5])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)], ids=str)
def test_layer_scale_multiplies_the_last_axis(shape, init):
  x = normal(shape, "bfloat16")
  layer = LayerScale(init)
  variables = layer.init(jax.random.key(0), x)
  assert variables["params"]["gamma"].dtype == jnp.float32
  np.testing.assert_array_equal(layer.apply(variables, x), x * x.dtype.type(init))
  gamma = {"params": {"gamma": np.arange(4, dtype=np.float32)}}
  np.testing.assert_array_equal(layer.apply(gamma, x), x * np.arange(4).astype(x.dtype))


def test_layer_scale_casts_to_its_dtype():
  x = normal((3, 4), "bfloat16")
  layer = LayerScale(0.5, dtype=jnp.float32)
  y = layer.apply(layer.init(jax.random.key(0), x), x)
  assert y.dtype == jnp.float32
  np.testing.assert_array_equal(y, 0.5 * x.astype(np.float32))
