"""`quantized_dot` and the layers on an x that is in 8 bits already."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dot_case import apply, assert_same, make_case
from flax import nnx

from sbjax import (
  INT8,
  RECIPES,
  SWITCHBACK,
  Spec,
  SwitchBackDense,
  SwitchBackLinear,
  dequantize,
  quantize,
  quantized_dot,
)
from sbjax.quantize import SCALINGS


@pytest.mark.parametrize("name", ["switchback", "switchback_q", "fp8_switchback", "fp8_tensorwise"])
def test_the_product_is_the_array_s_and_dw_sees_the_dequantized(name):
  x, w, dy = make_case("bfloat16")
  bias, recipe = np.linspace(-1, 1, w.shape[1], dtype=np.float32), RECIPES[name]
  kept = quantize(x, recipe.fwd[0])

  def run(x, dtype=None):
    dot = lambda w, bias: quantized_dot(x, w, recipe, bias=bias, dtype=dtype)  # noqa: E731
    y, backward = jax.vjp(dot, w, bias)
    return y, *backward(dy)

  of_bits = functools.partial(run, dtype=jnp.bfloat16)
  y, dw, d_bias = (np.asarray(a) for a in jax.jit(of_bits)(kept))
  expected, _, expected_d_bias = (np.asarray(a) for a in jax.jit(run)(x))
  assert_same(y, expected)
  np.testing.assert_allclose(d_bias, expected_d_bias, rtol=1e-5, atol=1e-9)
  assert_same(dw, apply(dequantize(kept, jnp.bfloat16), w, dy, recipe).dw)


def test_a_layer_takes_it_and_gives_its_own_dtype():
  x, w, _ = make_case("bfloat16")
  kept = quantize(x, SWITCHBACK.fwd[0])
  dense = SwitchBackDense(w.shape[1], dtype=jnp.bfloat16)
  params = jax.jit(dense.init)(jax.random.key(0), x)
  assert_same(jax.jit(dense.apply)(params, kept), jax.jit(dense.apply)(params, x))
  linear = SwitchBackLinear(*w.shape, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
  assert_same(linear(kept), linear(x))
  assert SwitchBackDense(8).apply(SwitchBackDense(8).init(jax.random.key(0), kept), kept).dtype == (
    jnp.float32
  )


@pytest.mark.parametrize("scaling", SCALINGS)
def test_no_gradient_ends_in_it_unseen(scaling):
  x, w, _ = make_case()
  recipe = dataclasses.replace(SWITCHBACK, fwd=(Spec(INT8, scaling), SWITCHBACK.fwd[1]))

  def loss(x, stop=lambda x: x):
    kept = stop(quantize(x, recipe.fwd[0]))
    return jnp.sum(quantized_dot(kept, w, recipe, dtype=jnp.float32)) + jnp.sum(x)

  for transformed in (loss, jax.jit(loss), jax.checkpoint(loss)):
    with pytest.raises(ValueError, match=r"no gradient goes through 8 bits.*norm_dot.*stop_grad"):
      jax.grad(transformed)(x)
  gradient = jax.jit(jax.grad(functools.partial(loss, stop=jax.lax.stop_gradient)))(x)
  assert_same(gradient, np.ones_like(x))


@pytest.mark.parametrize(
  ("name", "spec", "dtype", "message"),
  [
    ("full", ("int8", "rowwise"), "float32", "needs a recipe that quantizes the forward"),
    ("switchback", ("int8", "rowwise"), None, "dtype=None must be floating"),
    ("switchback", ("int8", "rowwise"), "int8", "dtype='int8' must be floating"),
    ("switchback", ("int8", "tensorwise"), "float32", r"x \(2, 4\) as .*tensorwise.*rowwise"),
    ("switchback", ("float8_e4m3fn", "rowwise"), "float32", r"float8_e4m3fn.*rowwise"),
    ("switchback", None, "float32", "is for a Quantized x"),
  ],
)
def test_it_must_be_what_the_recipe_takes(name, spec, dtype, message):
  x = np.ones((2, 4), np.float32)
  if spec:
    x = quantize(x, Spec(jnp.dtype(spec[0]), spec[1]))
  with pytest.raises(ValueError, match=message):
    quantized_dot(x, np.ones((4, 3), np.float32), name, dtype=dtype)
