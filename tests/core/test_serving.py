"""Parameters in 8 bits: the same model applies them, in a quarter of the bytes."""

import functools
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from clip_case import MICRO, clip, compiled, pairs, random_params
from flax.traverse_util import flatten_dict, unflatten_dict
from flax_case import normal
from pairwise import mainly

from sbjax import SwitchBackDense, dequantize, quantized_dot
from sbjax.interop.serving import load_serving, save_serving, serving_params, size_of
from sbjax.linear.fused import layer_norm_dense, layer_norm_mlp
from sbjax.linear.weight import serving_weight
from sbjax.models.clip import CLIP
from sbjax.models.sizes import SIZES
from sbjax.ops.rows import LayerNormParams
from sbjax.quantize import Quantized, Spec, quantize
from sbjax.recipes import RECIPES, Recipe

TABLE = ("text", "token_embedding", "embedding")
INT8_FORWARD = Recipe(
  fwd=(Spec(jnp.int8, "rowwise"), Spec(jnp.int8, "rowwise")), dgrad=None, wgrad=None
)


@functools.partial(compiled, static_argnames="model")
def features(model, params, image, text):
  variables = {"params": params}
  return (
    model.apply(variables, image, method="encode_image"),
    model.apply(variables, text, method="encode_text"),
  )


# What is served, by the parameters and the recipe.
serve = jax.jit(serving_params, static_argnums=1)


def with_rounded_table(params, served):
  """Float parameters whose token embeddings are those of the served ones."""
  table = dequantize(flatten_dict(served)[TABLE])
  return unflatten_dict({**flatten_dict(params), TABLE: table})


@pytest.mark.parametrize(
  ("recipe", "scan"),
  mainly(
    [(INT8_FORWARD, True)],
    [
      ("switchback", True),
      ("switchback_q", False),
      ("switchback_c", True),
      ("fp8_switchback", True),
      (INT8_FORWARD, True),
    ],
  ),
)
def test_serving_features_are_those_of_the_float_parameters(recipe, scan):
  model, params = clip(recipe=recipe, scan=scan), random_params(scan=scan)
  served = serve(params, recipe)
  expected = features(model, with_rounded_table(params, served), *pairs())
  for ours, theirs in zip(features(model, served, *pairs()), expected, strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def test_each_kernel_of_a_block_has_no_float_and_one_orientation():
  served = flatten_dict(serve(random_params(), "switchback_q"))
  kernels = {path: leaf for path, leaf in served.items() if path[-1] == "kernel" and len(path) > 3}
  assert len(kernels) == 8
  width = MICRO.vision.width
  for leaf in kernels.values():
    assert [x.dtype for x in jax.tree.leaves(leaf)] == [jnp.int8, jnp.float32]
  fc1 = kernels["image", "blocks", "fc1", "kernel"]
  layers, hidden = MICRO.vision.layers, int(width * MICRO.vision.mlp_ratio)
  assert fc1.values.shape == (layers, hidden, width) and fc1.scale.shape == (layers, hidden, 1)


def test_rules_leave_other_kernels_as_they_are():
  params = random_params()
  served = serving_params(params, "text/*=full, *=switchback")
  assert isinstance(served["image"]["blocks"]["fc1"]["kernel"], Quantized)
  assert served["text"]["blocks"]["fc1"]["kernel"] is params["text"]["blocks"]["fc1"]["kernel"]
  with pytest.raises(ValueError, match=r"recipe='full' leaves every kernel in 16 bits"):
    serving_params(params, "full")


@pytest.mark.parametrize("size", mainly(["B/32"], ["S/16", "B/32", "L/14", "H/14"]))
def test_serving_parameters_take_three_tenths_of_float32_and_half_of_bfloat16(size):
  config = SIZES[size]
  side, length = config.vision.image_size, config.text.context_length
  image = jax.ShapeDtypeStruct((1, side, side, 3), jnp.float32)
  text = jax.ShapeDtypeStruct((1, length), jnp.int32)
  params = jax.eval_shape(CLIP(config).init, jax.random.key(0), image, text)["params"]
  served = jax.eval_shape(lambda params: serving_params(params, "switchback_q"), params)
  assert size_of(served) <= 0.3 * size_of(params)
  assert size_of(served) <= 0.55 * size_of(params) / 2


def test_the_size_is_that_of_all_arrays():
  params = {"a": quantize(jnp.ones((4, 8)), Spec(jnp.int8, "rowwise")), "b": jnp.ones(3)}
  assert size_of(params) == 4 * 8 + 4 * 4 + 3 * 4


# ---- A frozen base: only its input and what is beside it have gradients

FP8_BACKWARD = Recipe(
  fwd=INT8_FORWARD.fwd, dgrad=RECIPES["fp8_switchback"].dgrad, wgrad=None
)  # No matmul takes int8 with fp8.
X, DY = normal((6, 32)), normal((6, 16), seed=1) * np.float32(1e-3)
W = normal((32, 16), seed=2) * np.exp(normal((1, 16), seed=3))  # Columns of other magnitudes.


def frozen(recipe):
  return serving_weight(quantize(jnp.asarray(W.T), recipe.fwd[1]))


def input_gradient(w, recipe):
  return jax.vjp(lambda x: quantized_dot(x, w, recipe), X)[1](DY)[0]


@pytest.mark.parametrize(
  "name",
  mainly(
    ["switchback", "switchback_c", "fp8_static"],
    ["switchback", "switchback_m", "switchback_c", "fp8_switchback", "fp8_static"],
  ),
)
def test_a_frozen_kernel_that_serves_both_matmuls_gives_the_input_gradient_of_its_floats(name):
  recipe = RECIPES[name]
  expected = input_gradient(jnp.asarray(W), recipe)
  np.testing.assert_array_equal(input_gradient(frozen(recipe), recipe), expected)


@pytest.mark.parametrize(
  ("recipe", "bound"),
  [
    (RECIPES["switchback_q"], 0.02),
    (RECIPES["llm_int8"], 0.02),
    (RECIPES["fp8_dinov3"], 0.05),
    (INT8_FORWARD, 1e-5),
    (FP8_BACKWARD, 1e-5),
  ],
)
def test_a_frozen_kernel_with_a_scale_for_each_output_is_not_rounded_again(recipe, bound):
  kernel = frozen(recipe)
  expected = DY @ np.asarray(dequantize(kernel.fwd))
  actual = input_gradient(kernel, recipe)
  assert np.linalg.norm(actual - expected) < bound * np.linalg.norm(expected)


@pytest.mark.parametrize(
  "name", mainly(["switchback_c"], ["switchback", "switchback_q", "switchback_c"])
)
def test_the_fused_layers_have_input_gradients_on_frozen_kernels(name):
  kernels = W, W.T.copy()
  bits = [serving_weight(quantize(jnp.asarray(w.T), RECIPES[name].fwd[1])) for w in kernels]
  floats = [jnp.asarray(w) for w in kernels]
  norm, b1, b2 = LayerNormParams(jnp.ones(32), jnp.zeros(32)), jnp.ones(16), jnp.ones(32)

  def gradients(w1, w2):
    def loss(x, b1, b2):
      x, y = layer_norm_dense(x, norm, w1, name, bias=b1)
      z = layer_norm_mlp(x, norm, w1, b1, w2, b2, name, add_residual=True)
      return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(z))

    return jax.grad(loss, (0, 1, 2))(X, b1, b2)

  for actual, expected in zip(gradients(*bits), gradients(*floats), strict=True):
    assert np.linalg.norm(actual - expected) < 0.03 * np.linalg.norm(expected)


def test_an_adapter_on_a_frozen_layer_learns_and_the_layer_does_not():
  class Adapted(nn.Module):
    @nn.compact
    def __call__(self, x):
      y = SwitchBackDense(16, recipe="switchback_q", name="first")(x)
      y += nn.Dense(16, use_bias=False, name="up")(nn.Dense(2, use_bias=False, name="down")(x))
      return SwitchBackDense(16, recipe="switchback", name="last")(jnp.tanh(y))

  model = Adapted()
  params = model.init(jax.random.key(0), X)["params"]
  for layer, scaling in (("first", "rowwise"), ("last", "tensorwise")):
    kernel = params[layer]["kernel"]
    params[layer]["kernel"] = quantize(kernel.T, Spec(jnp.int8, scaling))

  kernels = {layer: params[layer].pop("kernel") for layer in ("first", "last")}

  def loss(learned, kernels):
    both = {layer: {**learned[layer], "kernel": kernels[layer]} for layer in kernels}
    return jnp.sum(jnp.sin(model.apply({"params": learned | both}, X)))

  gradient = jax.jit(jax.grad(loss))(params, kernels)
  assert all(np.any(gradient[name]["kernel"] != 0) for name in ("up", "down"))
  assert all(np.any(gradient[name]["bias"] != 0) for name in kernels)
  with pytest.raises(ValueError, match="w is frozen in 8 bits and has no gradient"):
    jax.grad(loss, 1, allow_int=True)(params, kernels)


def test_kernels_of_another_recipe_or_size_are_refused():
  params = {"kernel": quantize(jnp.ones((16, 32)), Spec(jnp.int8, "rowwise"))}
  x = jnp.ones((4, 32))
  assert SwitchBackDense(16, recipe="switchback_q", use_bias=False).apply({"params": params}, x)[
    0, 0
  ] == pytest.approx(32)
  for recipe in ("switchback", "full"):
    with pytest.raises(ValueError, match="quantized for another recipe"):
      SwitchBackDense(16, recipe=recipe, use_bias=False).apply({"params": params}, x)
  with pytest.raises(ValueError, match=r"parameter kernel must be \(24, 32\), not \(16, 32\)"):
    SwitchBackDense(24, recipe="switchback_q", use_bias=False).apply({"params": params}, x)


def assert_same(ours, theirs):
  assert jax.tree.structure(ours) == jax.tree.structure(theirs)
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)


def test_orbax_restores_serving_parameters(tmp_path):
  served = jax.jit(serving_params, static_argnums=1)(random_params(), "switchback")
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "served", served)
    checkpointer.wait_until_finished()
    assert_same(checkpointer.restore(tmp_path / "served", served), served)


@pytest.mark.interop
@pytest.mark.parametrize("recipe", ["switchback_q", "fp8_switchback"])
def test_a_file_holds_the_serving_parameters(tmp_path, recipe):
  numpy = pytest.importorskip("safetensors.numpy")
  served = serving_params(random_params(), recipe)
  path = tmp_path / "served.safetensors"
  save_serving(served, path)
  assert_same(load_serving(path), served)
  assert path.stat().st_size < size_of(served) + 20_000
  numpy.save_file({"a": np.ones(3)}, path)
  with pytest.raises(ValueError, match="was not written by save_serving"):
    load_serving(path)


def test_without_safetensors_the_error_names_it(tmp_path, monkeypatch):
  for name in ("safetensors", "safetensors.numpy"):
    monkeypatch.setitem(sys.modules, name, None)
  with pytest.raises(ImportError, match="This file needs safetensors: install it, or the"):
    load_serving(tmp_path / "served.safetensors")
  with pytest.raises(ImportError, match="This file needs safetensors: install it, or the"):
    save_serving({"a": np.ones(3)}, tmp_path / "served.safetensors")
