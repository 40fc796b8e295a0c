"""A model whose products have switches: each in a recipe or as it is, in one program.

So the share of each layer in the error of a model's outputs is measured without a compilation for
each: alone in 8 bits, or alone in 16. Beside it a product has its own error, by the recipe, for the
operands that it has there.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sbjax.convert.matmuls import Conversion, Products
from sbjax.convert.quantize_model import Rules, pairs_of
from sbjax.convert.rewrite import rewritten


class Forward(NamedTuple):
  """Errors of a recipe in the forward pass, each over the size of what it changes.

  Attributes:
    products: of each layer's own output, for operands without errors.
    outputs: of each output of the model, by its path.
    alone: {layer: of each output, if only this layer is rounded}.
    without: {layer: of each output, if all others are}.
  """

  products: dict[str, float]
  outputs: dict[str, float]
  alone: dict[str, dict[str, float]]
  without: dict[str, dict[str, float]]


def forward_rounding(function: Callable, params, batches: Iterable, rules: Rules) -> Forward:
  """The errors of a model's outputs, function(params, batch), by layer.

  A layer is a parameter by its path, whose products `quantize_model` replaces by these rules.

  Raises:
    ValueError: no batch; no product of a parameter; one within a loop, such as `nn.scan`, whose
      layers share a path: unroll it.

  >>> function = lambda params, x: {"y": jnp.tanh(x @ params["a"]) @ params["b"]}
  >>> params = {"a": jnp.ones((32, 16)) / 7, "b": jnp.ones((16, 4)) / 3}
  >>> x = jax.random.normal(jax.random.key(0), (8, 32))
  >>> found = forward_rounding(function, params, [x], "switchback")
  >>> [*found.products], [*found.outputs]
  (['a', 'b'], ['y'])
  """
  run = jax.jit(functools.partial(_with_switches, function, pairs_of(rules)))
  errors: dict[Any, np.ndarray] = {}
  layers: list[str] = []

  def add(key, squares) -> None:
    for name, pair in jax.device_get(squares).items():
      errors[*key, name] = errors.get((*key, name), 0) + np.asarray(pair, np.float64)

  for batch in batches:
    layers = layers or [*jax.eval_shape(run, {}, params, batch)[1]]
    if not layers:
      raise ValueError("The function multiplies by no parameter that has a recipe.")
    off, on = dict.fromkeys(layers, False), dict.fromkeys(layers, True)
    try:
      exact, products = run(off, params, batch)
    except jax.errors.UnexpectedTracerError as error:  # A product's error was made within a loop.
      raise ValueError("Layers of a loop, such as nn.scan, have one path: unroll it.") from error
    add(("products",), products)
    add(("outputs",), _apart(run(on, params, batch)[0], exact))
    for layer in layers:
      add(("alone", layer), _apart(run(off | {layer: True}, params, batch)[0], exact))
      add(("without", layer), _apart(run(on | {layer: False}, params, batch)[0], exact))
  if not layers:
    raise ValueError("There is no batch.")

  def under(*key) -> dict[str, float]:
    found = {k[-1]: pair for k, pair in errors.items() if k[:-1] == key}
    return {name: float(np.sqrt(a / b)) if b else 0.0 for name, (a, b) in found.items()}

  return Forward(
    under("products"),
    under("outputs"),
    {layer: under("alone", layer) for layer in layers},
    {layer: under("without", layer) for layer in layers},
  )


def _with_switches(function, rules, on: Mapping[str, Any], params, batch):
  """function(params, batch), and the error of each product: {path: (|y8 - y|^2, |y|^2)}.

  on: for a path whether its products are rounded; those without one are not.
  """
  keyed, tree = jax.tree.flatten_with_path(params)
  paths = [jax.tree_util.keystr(keys, simple=True, separator="/") or "params" for keys, _ in keyed]
  switches = _Switches(rules, on)
  run = rewritten(lambda *leaves: function(tree.unflatten(leaves), batch), paths, switches)
  result = run(*[leaf for _, leaf in keyed])
  return result, switches.errors


class _Switches(Products):
  def __init__(self, rules, on: Mapping[str, Any]):
    super().__init__(Conversion(rules))
    self.on = on
    self.errors: dict[str, tuple] = {}

  def __call__(self, eqn, operands, weights):
    rounded = super().__call__(eqn, operands, weights)
    if rounded is None:
      return None
    (y8,), path = rounded, next(weight.path for weight in reversed(weights) if weight)
    y = eqn.primitive.bind(*operands, **eqn.params)
    before = self.errors.get(path, (0.0, 0.0))
    own = jnp.square(y8.astype(jnp.float32) - _float32(y)), jnp.square(_float32(y))
    self.errors[path] = tuple(a + jnp.sum(b) for a, b in zip(before, own, strict=True))
    return [jnp.where(self.on.get(path, False), y8, y)]


@jax.jit
def _apart(a, b) -> dict[str, tuple]:
  """(|a - b|^2, |b|^2) of each output, by its path."""
  named = zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True)
  return {
    jax.tree_util.keystr(path, simple=True, separator="/") or "output": (
      jnp.sum(jnp.square(_float32(a) - _float32(b))),
      jnp.sum(jnp.square(_float32(b))),
    )
    for (path, a), b in named
  }


def _float32(x: jax.Array) -> jax.Array:
  return x.astype(jnp.float32)
