"""A multiplier of the three products, which the epilogue of an 8-bit matmul applies."""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dot_case import Result, assert_close, assert_same, make_case
from flax import nnx

from sbjax import RECIPES, SwitchBackDense, SwitchBackLinear, quantized_dot
from sbjax.linear.weight import quantize_weight

every_recipe = pytest.mark.parametrize("name", RECIPES)


def gradients(x, w, dy, multiplier, **options):
  y, backward = jax.vjp(functools.partial(quantized_dot, multiplier=multiplier, **options), x, w)
  return Result(y, *backward(dy))


layer = jax.jit(gradients, static_argnames=("multiplier", "recipe"))


@every_recipe
def test_a_power_of_two_multiplies_all_three_products_exactly(name):
  case = make_case()
  once = layer(*case, multiplier=1.0, recipe=name)
  expected = jax.tree.map(lambda a: a * 2.0**-5, once)
  assert_same(layer(*case, multiplier=2.0**-5, recipe=name), expected)


@pytest.mark.parametrize("name", ["full", "switchback", "switchback_m", "fp8_static"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_multiplier_multiplies_the_result(name, dtype):
  case, multiplier = make_case(dtype), 130**-0.5
  once = layer(*case, multiplier=1.0, recipe=name)
  expected = Result(*(a.astype(jnp.float32) * multiplier for a in once))
  rtol = 2.0**-22 if dtype == "float32" else 2.0**-7
  assert_close(layer(*case, multiplier=multiplier, recipe=name), expected, rtol)


@pytest.mark.parametrize("name", ["full", "switchback", "fp8_static"])
def test_bias_and_residual_are_added_after_the_multiplier(name):
  x, w, dy = make_case()
  bias, residual = jnp.arange(w.shape[1], dtype=jnp.float32), jnp.asarray(dy) * 1e4
  dot = functools.partial(quantized_dot, x, w, name, multiplier=0.25)
  assert_close(dot(bias=bias, residual=residual), dot() + bias[None] + residual, 1e-6)


def test_a_quantized_weight_takes_a_multiplier():
  x, w, _ = make_case()
  expected = quantized_dot(x, w, "switchback", multiplier=0.3)
  weight = quantize_weight(w, "switchback")
  assert_same(quantized_dot(x, weight, "switchback", multiplier=0.3), expected)


def test_a_static_gradient_is_rounded_before_the_multiplier():
  """Smaller than e5m2's least number if it were multiplied first."""
  x, w, dy = jnp.ones((2, 16)), jnp.ones((16, 16)), jnp.full((2, 16), 2.0**-14)
  _, dx, _ = layer(x, w, dy, multiplier=2.0**-8, recipe="fp8_static")
  np.testing.assert_array_equal(dx, jnp.full((2, 16), 16 * 2.0**-22))


@pytest.mark.parametrize("name", ["switchback", "fp8_static"])
def test_flax_s_layers_take_a_multiplier(name):
  x, w, _ = make_case()
  options = {"use_bias": False, "recipe": name, "multiplier": 0.3}
  expected = quantized_dot(x, w, name, multiplier=0.3)
  dense: nn.Module = SwitchBackDense(w.shape[1], **options)
  assert_same(dense.apply({"params": {"kernel": w}}, x), expected)
  linear: Callable = SwitchBackLinear(*w.shape, rngs=nnx.Rngs(0), **options)
  linear.kernel = nnx.Param(w)
  assert_same(linear(x), expected)


@pytest.mark.parametrize("multiplier", [0, float("inf"), float("nan"), None, "fan_in", True])
def test_a_multiplier_that_is_no_number_is_refused(multiplier):
  x, w, _ = make_case()
  with pytest.raises(ValueError, match=r"multiplier=.*finite number.*K \*\* -0.5"):
    quantized_dot(x, w, "switchback", multiplier=multiplier)
