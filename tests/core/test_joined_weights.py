"""Weights that a model joins before it multiplies by them: one product, with one set of scales."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbjax import quantize_model, quantize_weights, quantized_dot, suggest_rules
from sbjax.convert.switches import forward_rounding

WIDTH = 16
NAMES = ("q", "k", "v")


def parameters(dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(0), 3)
  return {
    name: {"kernel": 10.0**i * jax.random.normal(key, (WIDTH, WIDTH), dtype)}
    for i, (name, key) in enumerate(zip(NAMES, keys, strict=True))
  }


def inputs(dtype=jnp.float32):
  return jax.random.normal(jax.random.key(1), (8, WIDTH), dtype)


def side_by_side(params, dtype):
  return jnp.concatenate([params[name]["kernel"].astype(dtype) for name in NAMES], axis=1)


def concatenated(params, x):
  return x @ side_by_side(params, x.dtype)


def stacked(params, x):
  kernels = jnp.stack([params[name]["kernel"].astype(x.dtype) for name in NAMES])
  return jnp.einsum("bk,ikn->bin", x, kernels).reshape(len(x), -1)


def cut_and_joined_again(params, x):
  halves = [params["q"]["kernel"][:, :8], params["k"]["kernel"][:, 8:]]
  return x @ jnp.concatenate([half.astype(x.dtype) for half in halves], axis=1)


def value_and_gradients(function, *args):
  def loss(*args):
    y = function(*args)
    return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

  return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*args)


def assert_same_bits(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize(
  ("how", "around", "dtype"),
  [
    (concatenated, lambda f: f, jnp.float32),
    (concatenated, jax.checkpoint, jnp.bfloat16),
    (stacked, jax.jit, jnp.float32),
    (stacked, jax.checkpoint, jnp.float32),
    (cut_and_joined_again, jax.jit, jnp.bfloat16),
  ],
)
def test_the_product_is_that_of_the_joined_kernel(how, around, dtype):
  def expected(params, x):
    whole = jax.tree.map(lambda w: w.astype(jnp.float32), params)  # Its masters are rounded.
    if how is cut_and_joined_again:
      halves = [whole["q"]["kernel"][:, :8], whole["k"]["kernel"][:, 8:]]
      w = jnp.concatenate(halves, axis=1)
    else:
      w = side_by_side(whole, jnp.float32)
    return quantized_dot(x, w, "switchback")

  ours = quantize_model(around(how), "switchback")
  found = value_and_gradients(ours, parameters(), inputs(dtype))
  assert_same_bits(found, value_and_gradients(expected, parameters(), inputs(dtype)))


def test_the_table_names_all_that_are_joined(capsys):
  quantize_model(concatenated, "switchback", verbose=True)(parameters(), inputs())
  (_, row) = capsys.readouterr().out.splitlines()
  assert row.split("  ")[0] == "q/kernel + k/kernel + v/kernel" and row.endswith("switchback")


def test_joined_weights_of_several_recipes_stay_and_are_named(capsys):
  rules = {"q": None, "*": "switchback"}
  model = quantize_model(concatenated, rules, verbose=True)
  with pytest.warns(UserWarning, match=r"q/kernel \+ k/kernel \+ v/kernel .* several recipes"):
    y = model(parameters(), inputs())
  assert_same_bits(y, jax.jit(concatenated)(parameters(), inputs()))
  assert "joined weights with several recipes" in capsys.readouterr().out


def test_tokens_that_are_parameters_beside_activations_are_no_weights():
  def model(params, x):
    tokens = jnp.concatenate([params["class"], params["registers"]])
    return jnp.concatenate([tokens, x]) @ params["kernel"]

  params = {
    "class": jnp.ones((1, WIDTH)),
    "registers": jnp.ones((2, WIDTH)),
    "kernel": parameters()["q"]["kernel"],
  }
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    y = quantize_model(model, {"kernel": "switchback", "*": None})(params, inputs())
  rows = jnp.concatenate([jnp.ones((3, WIDTH)), inputs()])
  assert_same_bits(
    y, jax.jit(quantized_dot, static_argnums=2)(rows, params["kernel"], "switchback")
  )


def test_frozen_weights_that_a_model_joins_are_one_sentence():
  frozen = quantize_weights(parameters(), "switchback")
  model = quantize_model(concatenated, "switchback")
  with pytest.raises(ValueError, match="q/kernel is in 8 bits, and the model takes it in concaten"):
    model(frozen, inputs())


def test_weights_that_a_model_joins_are_served_in_floats():
  def model(params, x):
    return concatenated(params, x) @ params["out"]["kernel"]

  params = parameters() | {"out": {"kernel": jnp.ones((3 * WIDTH, 4))}}
  with pytest.warns(UserWarning, match="leaves [qkv]/kernel in floats: .* concatenate") as told:
    frozen = quantize_weights(params, "switchback", call=lambda params: model(params, inputs()))
  assert len(told) == 3
  assert_same_bits({name: frozen[name] for name in NAMES}, parameters())
  assert not isinstance(frozen["out"]["kernel"], jax.Array)
  ours = jax.jit(quantize_model(model, "switchback"))
  assert_same_bits(ours(frozen, inputs()), ours(params, inputs()))


def loss_of(params, x):
  return jnp.mean(jnp.square(concatenated(params, x)))


def test_suggested_rules_are_of_each_that_is_joined():
  """v is much larger than q: one scale for both rounds q away, and the loss is of q alone."""
  params = parameters() | {name: parameters()["q"] for name in ("a", "b")}
  params["v"] = {"kernel": 1e3 * params["v"]["kernel"]}

  def small_q(params, x):
    y = x @ jnp.concatenate([params["q"]["kernel"], params["v"]["kernel"]], axis=1)
    for name in ("a", "b"):
      x = x @ params[name]["kernel"]
    return 100 * jnp.mean(jnp.square(y[:, :WIDTH])) + jnp.mean(jnp.square(x))

  rules = suggest_rules(params, inputs(), small_q, recipes=("switchback", "full"))
  assert {pattern for pattern, _ in rules.rules} in ({"q", "v", "*"}, {"q/kernel", "v/kernel", "*"})
  with warnings.catch_warnings():
    warnings.simplefilter("error")  # Both that are joined have one recipe.
    quantize_model(small_q, rules)(params, inputs())


def test_joined_weights_are_one_layer_of_the_meter():
  found = forward_rounding(
    lambda params, x: {"y": concatenated(params, x)}, parameters(), [inputs()], "switchback"
  )
  assert [*found.products] == [" + ".join(f"{name}/kernel" for name in NAMES)]
  assert 0 < found.outputs["y"] < 0.1
