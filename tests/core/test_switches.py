"""Errors of outputs by layer: products with switches are those of `quantize_model`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbjax import quantize_model
from sbjax.convert.switches import forward_rounding


class Net(nn.Module):
  @nn.compact
  def __call__(self, x):
    h = nn.relu(nn.Dense(16, name="one")(x))
    return {"h": h, "y": nn.Dense(4, name="two")(h)}


ONE, TWO = "params/one/kernel", "params/two/kernel"


@pytest.fixture(scope="module")
def case():
  xs = [jax.random.normal(jax.random.key(i), (8, 12)) for i in range(2)]
  return Net().init(jax.random.key(5), xs[0]), xs


def apart(params, xs, rules):
  """The error of each output of a converted model, by hand."""
  square, size = {}, {}
  for x in xs:
    exact, rounded = Net().apply(params, x), quantize_model(Net(), rules).apply(params, x)
    for name, y in exact.items():
      square[name] = square.get(name, 0) + np.square(rounded[name] - y).sum()
      size[name] = size.get(name, 0) + np.square(y).sum()
  return {name: np.sqrt(square[name] / size[name]) for name in size}


@pytest.mark.parametrize("recipe", ["switchback", "fp8_switchback"])
def test_each_error_is_that_of_the_converted_model(case, recipe):
  params, xs = case
  found = forward_rounding(Net().apply, params, xs, recipe)
  only = {ONE: [("one/*", recipe), ("*", None)], TWO: [("two/*", recipe), ("*", None)]}
  close = {"rtol": 1e-4, "atol": 1e-7}

  def check(got, rules):
    want = apart(params, xs, rules)
    np.testing.assert_allclose([got[name] for name in want], [*want.values()], **close)

  check(found.outputs, recipe)
  for layer, other in ((ONE, TWO), (TWO, ONE)):
    check(found.alone[layer], only[layer])
    check(found.without[layer], only[other])
  # The second layer is the last: its own error is the output's, if nothing else is rounded.
  assert found.products[TWO] == pytest.approx(found.alone[TWO]["y"], rel=1e-4)
  assert found.alone[TWO]["h"] == 0


def test_layers_without_a_recipe_have_no_switch(case):
  params, xs = case
  found = forward_rounding(Net().apply, params, xs, [("*/two/*", "switchback"), ("*", None)])
  assert [*found.products] == [*found.alone] == [TWO]
  assert found.outputs == pytest.approx(found.alone[TWO])


class Scanned(nn.Module):
  @nn.compact
  def __call__(self, x):
    step = nn.scan(
      lambda dense, x, _: (dense(x), None), variable_axes={"params": 0},
      split_rngs={"params": True}, length=3,
    )  # fmt: skip
    return step(nn.Dense(12), x, None)[0]


@pytest.mark.parametrize(
  ("function", "batches", "message"),
  [
    (Scanned().apply, 1, r"Layers of a loop, such as nn\.scan, have one path: unroll it"),
    (lambda params, x: jnp.sin(x), 1, "multiplies by no parameter that has a recipe"),
    (Scanned().apply, 0, "There is no batch"),
  ],
)
def test_what_has_no_errors_of_layers_is_a_sentence(case, function, batches, message):
  _, (x, _) = case
  params = Scanned().init(jax.random.key(0), x)
  with pytest.raises(ValueError, match=message):
    forward_rounding(function, params, [x] * batches, "switchback")
