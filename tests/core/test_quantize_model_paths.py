"""`quantize_model` where the paths of parameters do not tell them apart."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx
from flax_case import normal

from sbjax import quantize_model


def of_two_kernels(kind, x):
  """Results of a model whose two kernels could be taken for one another, and of it converted."""

  class Pair(NamedTuple):
    a: jax.Array
    b: jax.Array

  class Head(nn.Module):
    a: nn.Module
    b: nn.Module

    @nn.compact
    def __call__(self, x):
      return self.a(x), self.b(x)

  class Outer(nn.Module):
    convert: Callable

    @nn.compact
    def __call__(self, x):
      layers = (nn.Dense(x.shape[-1], name=name) for name in ("a", "b"))
      return self.convert(Head)(*layers)(x)

  class Structured(nn.Module):
    @nn.compact
    def __call__(self, x):
      draw = nn.initializers.normal()
      shape = x.shape[-1], x.shape[-1]
      init = lambda key: Pair(*(draw(k, shape) for k in jax.random.split(key)))  # noqa: E731
      pair = self.param("pair", init)
      return x @ pair.a, x @ pair.b

  class Tree(nnx.Module):
    def __init__(self):
      self.p = nnx.Param({"a": normal((4, 4)), "b": 2 * normal((4, 4))})

    def __call__(self, x):
      p = self.p.get_value()
      return x @ p["a"], x @ p["b"]

  key = jax.random.key(0)
  slashes = {"a/b": normal((4, 4)), "a": {"b": 2 * normal((4, 4))}}
  function = lambda p, x: (x @ p["a/b"], x @ p["a"]["b"])  # noqa: E731
  structured, plain = Structured(), Outer(lambda cls: cls)
  full = functools.partial(quantize_model, rules="full")
  if kind == "function":
    return function(slashes, x), full(function)(slashes, x)
  if kind == "a tree":
    return Tree()(x), full(Tree())(x)
  model, converted = (
    (plain, Outer(full)) if kind == "outer modules" else (structured, full(structured))
  )
  params = model.init(key, x)
  return model.apply(params, x), converted.apply(params, x)


@pytest.mark.parametrize("kind", ["function", "outer modules", "a NamedTuple", "a tree"])
def test_parameters_with_one_path_keep_their_own_values(kind):
  expected, actual = of_two_kernels(kind, normal((2, 4)))
  assert not np.allclose(*expected)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), actual, expected)
