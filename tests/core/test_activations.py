"""The approximations of GELU, layer norm's epsilon, and models that use them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clip_case import MICRO, clip, pairs, random_params
from pairwise import mainly

from sbjax.linear.fused import layer_norm_dense, layer_norm_mlp
from sbjax.models.flax_block import FlaxBlock
from sbjax.ops import rows as fused_ops
from sbjax.ops.rows import ACTIVATIONS, LayerNormParams

REFERENCES = {
  "gelu": functools.partial(jax.nn.gelu, approximate=False),
  "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
  "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
  "silu": jax.nn.silu,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_their_slopes_are_jax_s(activation):
  h = jnp.linspace(-12, 12, 999).reshape(1, -1)
  reference = REFERENCES[activation]
  dh, _, _, g = fused_ops.gelu_backward(h, jnp.ones_like(h), None, activation=activation)
  # JAX's 1 + tanh cancels for negative h, so slopes are in float64.
  np.testing.assert_allclose(g, reference(h), rtol=1e-5, atol=1e-6)
  with jax.enable_x64(True):
    slopes = jax.vmap(jax.grad(reference))(np.float64(h[0]))
  np.testing.assert_allclose(dh[0], slopes, rtol=1e-5, atol=4e-6)
  np.testing.assert_array_equal(fused_ops.gelu_quantize(h, None, activation=activation)[0], g)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_the_largest_values_are_finite(activation):
  h = jnp.asarray([[-3e38, -1e20, 1e20, 3e38]])
  dh, _, _, g = fused_ops.gelu_backward(h, jnp.ones_like(h), None, activation=activation)
  np.testing.assert_array_equal(g, jnp.maximum(h, 0))
  np.testing.assert_array_equal(dh, [[0, 0, 1, 1]])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_fused_mlp_is_differentiated_as_its_parts(activation):
  keys = jax.random.split(jax.random.key(0), 4)
  x, w1, w2 = (
    jax.random.normal(key, shape) / 4
    for key, shape in zip(keys, [(6, 16), (16, 32), (32, 16)], strict=False)
  )
  norm, epsilon = LayerNormParams(jnp.linspace(0.5, 2, 16), jnp.linspace(-1, 1, 16)), 0.1

  def fused(x, w1):
    how = {"activation": activation, "epsilon": epsilon, "add_residual": True}
    return jnp.sum(jnp.sin(layer_norm_mlp(x, norm, w1, None, w2, None, "full", **how)))

  def parts(x, w1):
    centred = x - jnp.mean(x, axis=1, keepdims=True)
    deviation = jnp.sqrt(jnp.mean(centred**2, axis=1, keepdims=True) + epsilon)
    n = centred / deviation * norm.scale[None] + norm.bias[None]
    return jnp.sum(jnp.sin(x + REFERENCES[activation](n @ w1) @ w2))

  got, want = (jax.jit(jax.value_and_grad(f, (0, 1)))(x, w1) for f in (fused, parts))
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize("activation", mainly(["quick_gelu"], ["gelu_tanh", "quick_gelu"]))
def test_a_config_s_activation_and_epsilon_reach_both_towers(activation):
  vision, text = (
    dataclasses.replace(tower, activation=activation, norm_epsilon=0.3)
    for tower in (MICRO.vision, MICRO.text)
  )
  config = dataclasses.replace(MICRO, vision=vision, text=text)
  params = random_params()
  got, plain = (clip(config, block=block) for block in (clip().block, FlaxBlock))
  got, plain, exact = (
    jax.jit(model.apply)({"params": params}, *pairs()) for model in (got, plain, clip(MICRO))
  )
  for name in ("image_features", "text_features"):
    np.testing.assert_allclose(got[name], plain[name], atol=2e-5)
    assert np.max(np.abs(got[name] - exact[name])) > 1e-2


def test_an_unknown_activation_or_epsilon_is_refused():
  norm, w = LayerNormParams(jnp.ones(16), jnp.zeros(16)), jnp.ones((16, 16))
  with pytest.raises(ValueError, match="activation='relu' must be one of gelu, gelu_tanh"):
    layer_norm_mlp(jnp.ones((2, 16)), norm, w, None, w, None, "full", activation="relu")
  with pytest.raises(ValueError, match="epsilon=0 must be a positive float"):
    layer_norm_dense(jnp.ones((2, 16)), norm, w, "full", epsilon=0)
  with pytest.raises(ValueError, match="activation='relu' must be one of gelu, gelu_tanh"):
    dataclasses.replace(MICRO.vision, activation="relu")
  with pytest.raises(ValueError, match="activation='silu' must be one of gelu, gelu_tanh"):
    dataclasses.replace(MICRO.vision, activation="silu")  # No format of CLIP's configs has it.
