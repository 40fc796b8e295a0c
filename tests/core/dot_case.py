"""One linear layer for tests of `quantized_dot`, and two ways to compare its results."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sbjax import quantized_dot

# The recipes whose y and dx are exact sums: the order of summation does not matter.
INT8_SUMS = (
  "switchback",
  "switchback_m",
  "switchback_q",
  "switchback_c",
  "switchback_cm",
  "llm_int8",
  "switchback_fp8_wgrad",
  "switchback_e4m3_wgrad",
)


class Case(NamedTuple):
  x: np.ndarray  # [m, k]
  w: np.ndarray  # [k, n] float32
  dy: np.ndarray  # [m, n]


class Result(NamedTuple):
  y: jax.Array
  dx: jax.Array
  dw: jax.Array


@functools.partial(jax.jit, static_argnums=3)
def layer(x, w, dy, recipe):
  """y, dx and dw of one layer."""
  y, backward = jax.vjp(lambda x, w: quantized_dot(x, w, recipe), x, w)
  return Result(y, *backward(dy))


def apply(x, w, dy, recipe):
  """`layer` in numpy arrays."""
  return jax.tree.map(np.asarray, layer(x, w, dy, recipe))


def make_case(dtype="float32", m=34, k=130, n=129, seed=0):
  """Tokens and gradients of different magnitude, with one outlier in each array.

  Arrays have more than 4096 elements: XLA's CPU reductions of fewer take another path.
  """
  rng = np.random.default_rng(seed)
  x, w, dy = (rng.normal(size=shape).astype(np.float32) for shape in ((m, k), (k, n), (m, n)))
  x *= np.exp(rng.normal(size=(m, 1)))
  dy *= 1e-4 * np.exp(rng.normal(size=(m, 1)))
  w *= 0.1
  x[3, 5], w[7, 2], dy[11, 13] = 60, 3, 0.1
  return Case(x.astype(jnp.dtype(dtype)), w, dy.astype(jnp.dtype(dtype)))


def changed(array, index, value):
  """A copy with `array[index] = value`."""
  array = array.copy()
  array[index] = value
  return array


def assert_same(actual, expected):
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


def assert_close(actual, expected, rtol):
  """Each array within rtol of its largest element."""
  for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    a, b = np.asarray(a).astype(np.float32), np.asarray(b).astype(np.float32)
    np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.max(np.abs(b), initial=0))
