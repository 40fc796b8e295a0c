"""Matrices that a model takes from a stack by their numbers, as experts or heads of tasks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbjax import quantize_model, quantize_weights, quantized_dot

EXPERTS, WIDTH, OUT = 5, 16, 8
INDICES = jnp.array([3, 0, 3])


def parameters():
  sizes = 10.0 ** jnp.arange(EXPERTS, dtype=jnp.float32)[:, None, None]
  return {"kernel": sizes * jax.random.normal(jax.random.key(0), (EXPERTS, WIDTH, OUT))}


def inputs():
  return jax.random.normal(jax.random.key(1), (len(INDICES), 4, WIDTH))


def by_index(params, x):
  return jnp.einsum("emk,ekn->emn", x, params["kernel"][INDICES])


def by_take(params, x):
  return jnp.einsum("emk,ekn->emn", x, jnp.take(params["kernel"], INDICES, axis=0))


def of_the_last_axis(params, x):
  stack = jnp.moveaxis(params["kernel"], 0, -1)
  return jnp.einsum("emk,kne->emn", x, stack[..., INDICES])


def each(params, x):
  """Each expert's own product."""
  kernels = [params["kernel"][i] for i in INDICES]
  return jnp.stack([quantized_dot(a, w, "switchback") for a, w in zip(x, kernels, strict=True)])


def with_gradients(function):
  def loss(params, x):
    y = function(params, x)
    return jnp.sum(jnp.sin(y / jnp.max(jnp.abs(y)))), y

  return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(parameters(), inputs())


@pytest.mark.parametrize("model", [by_index, by_take, of_the_last_axis])
def test_each_gathered_matrix_is_multiplied_by_its_own_scale(model):
  found, expected = with_gradients(quantize_model(model, "switchback")), with_gradients(each)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), found, expected)
  plain = with_gradients(model)
  assert not np.array_equal(found[0][1], plain[0][1])


@pytest.mark.parametrize("recipe", ["switchback", "switchback_q"])  # One scale, and by column.
@pytest.mark.parametrize("model", [by_index, by_take, of_the_last_axis])
def test_a_frozen_stack_gives_the_numbers_of_its_floats(model, recipe):
  params, x = parameters(), inputs()
  ours = jax.jit(quantize_model(model, recipe))
  frozen = quantize_weights(params, recipe, call=lambda params: model(params, x))
  assert not isinstance(frozen["kernel"], jax.Array)
  np.testing.assert_array_equal(ours(frozen, x), ours(params, x))


def test_rows_of_a_table_are_activations():
  """Not weights of the product that they enter, on whichever side."""

  def model(params, _):
    return (params["kernel"][0].T @ params["table"][INDICES].T).T

  params = parameters() | {"table": jax.random.normal(jax.random.key(2), (7, WIDTH))}
  y = quantize_model(model, {"kernel": "switchback", "*": None})(params, None)
  expected = quantized_dot(params["table"][INDICES], params["kernel"][0], "switchback")
  np.testing.assert_allclose(y, expected, rtol=1e-6)
