"""The limits of `quantized_dot`: quantized weights, second derivatives, export and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dot_case import make_case

from sbjax import INT8, RECIPES, Recipe, Spec, quantized_dot
from sbjax.linear.fused import layer_norm_dense, layer_norm_mlp
from sbjax.linear.weight import quantize_weight
from sbjax.ops.rows import LayerNormParams

# ---- Weights quantized beforehand


@pytest.mark.parametrize("name", ["switchback", "switchback_q", "llm_int8", "fp8_switchback"])
@pytest.mark.parametrize("shape", [(1, 16), (32, 1), (1, 1)], ids=str)
def test_a_weight_of_one_row_or_column_may_be_quantized_beforehand(name, shape):
  x, w = jnp.ones((4, shape[0])), jnp.ones(shape)

  @jax.jit
  def both(x, w):
    return quantized_dot(x, quantize_weight(w, name), name), quantized_dot(x, w, name)

  np.testing.assert_array_equal(*both(x, w))


def test_a_weight_quantized_with_another_scaling_is_refused():
  static = Spec(INT8, "static")
  recipe = Recipe(fwd=(static, static), dgrad=(static, static), wgrad=None)
  kernel = quantize_weight(jnp.ones((16, 16)), recipe)
  with pytest.raises(ValueError, match="quantized for another recipe"):
    quantized_dot(jnp.ones((4, 16)), kernel, "switchback")


# ---- Second derivatives, export and arguments of the wrong type


def _layer_norm_mlp(x, w, name):
  norm = LayerNormParams(jnp.ones(x.shape[-1]), jnp.zeros(x.shape[-1]))
  return layer_norm_mlp(x, norm, w, None, w.T, None, name, add_residual=True)


def _layer_norm_dense(x, w, name):
  return layer_norm_dense(
    x, LayerNormParams(jnp.ones(x.shape[-1]), jnp.zeros(x.shape[-1])), w, name
  )[1]


@pytest.mark.parametrize("function", [quantized_dot, _layer_norm_dense, _layer_norm_mlp])
def test_gradients_of_gradients_are_refused_except_with_full(function):
  x, w = jnp.ones((4, 16)), jnp.eye(16)

  def gradient_norm(x, w, name):
    return jnp.sum(jax.grad(lambda x, w: jnp.sum(function(x, w, name) ** 2), (0, 1))(x, w)[1] ** 2)

  with pytest.raises(NotImplementedError, match=r"Gradients of gradients.*'full'"):
    jax.eval_shape(functools.partial(jax.grad(gradient_norm), name="switchback"), x, w)
  assert np.all(np.isfinite(jax.jit(jax.grad(gradient_norm), static_argnums=2)(x, w, "full")))


@pytest.mark.parametrize("name", RECIPES)
def test_a_symbolic_batch_can_be_exported(name):
  rows = jax.export.symbolic_shape("b, 16")
  w = jax.ShapeDtypeStruct((16, 32), jnp.float32)
  run = jax.jit(lambda x, w: quantized_dot(x, w, name))
  exported = jax.export.export(run)(jax.ShapeDtypeStruct(rows, jnp.float32), w)
  x, w = make_case(m=16, k=16, n=32)[:2]
  np.testing.assert_array_equal(exported.call(x, w), run(x, w))


@pytest.mark.parametrize(
  ("x", "recipe", "message"),
  [
    ([[1.0]], "switchback", "x must be an array, not a list"),
    (jnp.ones((1, 1)), ["switchback"], r"a Recipe or the name of one, not \['switchback'\]"),
  ],
)
def test_arguments_of_the_wrong_type_are_named(x, recipe, message):
  with pytest.raises(ValueError, match=message):
    quantized_dot(x, jnp.ones((1, 1)), recipe)
