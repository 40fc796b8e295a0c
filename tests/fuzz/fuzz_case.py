"""Random arrays for the fuzz, and float64 bounds for what the library makes of them.

A result lies within the half steps of its operands' rounding, and float32's error.
"""

import os
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from sbjax import (
  E4M3,
  E5M2,
  INT8,
)

TIMES = int(os.environ.get("SBJAX_FUZZ", "1"))


def fuzz(draws):
  return settings(
    max_examples=draws * TIMES,
    derandomize=TIMES == 1,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[phase for phase in Phase if phase != Phase.explain],
  )


LEAST, MOST = 2.0**-126, float(np.finfo(np.float32).max)  # Machines flush smaller numbers to 0.


class Content(NamedTuple):
  """Random numbers of a size; one row of another size; one NaN or infinity."""

  seed: int
  size: float
  row_size: float
  poison: float | None

  def array(self, *shape, dtype="float32"):
    rng = np.random.default_rng(self.seed)
    x = rng.uniform(-1, 1, shape)
    with np.errstate(all="ignore"):
      x *= self.size
      if x.size:
        x[rng.integers(len(x))] *= self.row_size
        if self.poison is not None:
          x.flat[rng.integers(x.size)] = self.poison
      x = x if np.dtype(dtype) == np.float64 else np.clip(x, -MOST, MOST)
      return (x if self.poison is None else np.where(np.isnan(x), np.nan, x)).astype(dtype)


usually_1 = st.sampled_from((1.0, 1.0, 1.0, 1.0, 0.0, 1e30, MOST, 1e-30, 1e-40))
contents = st.builds(
  Content,
  st.integers(0, 2**32 - 1),
  usually_1,
  usually_1,
  st.sampled_from((None, None, None, None, np.nan, np.inf)),
)
mild = st.builds(
  Content, st.integers(0, 2**32 - 1), st.sampled_from((0.1, 1.0, 1e6)), st.just(1.0), st.none()
)

LARGEST = {INT8: 127, E4M3: 448, E5M2: 57344}
HALF_UNIT = {E4M3: 2.0**-4, E5M2: 2.0**-3}
HALF_LEAST = {E4M3: 2.0**-10, E5M2: 2.0**-17}
UNIT = {"float64": 2.0**-24, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def half_step(a, spec, axis=1):
  """How far each element of a may move, NaN where a NaN or an infinity shares its scale; scales.

  A static scale of fp8 is constant: only the NaN or infinity itself is NaN.
  """
  if spec is None:
    return np.where(np.abs(a) < LEAST, np.abs(a), 0), 1
  a = a.astype(np.float32).astype(np.float64)
  most, magnitude = LARGEST[spec.dtype], np.abs(a)
  shared = {"rowwise": axis, "columnwise": 1 - axis}.get(spec.scaling)
  absmax = np.max(magnitude, axis=shared, keepdims=True, initial=0)
  if spec.scaling == "static":
    scale = np.full_like(absmax, 2.0**-spec.exponent)
  elif spec.scaling == "tensorwise_pow2":
    ratio = most / np.where((absmax == 0) | ~np.isfinite(absmax), 1, absmax)
    scale = 2.0 ** -np.minimum(np.floor(np.log2(ratio)), 126)
  else:
    scale = absmax / most
  if spec.dtype == INT8:
    step = 0.5 * scale + np.zeros_like(a)
  else:
    step = np.maximum(magnitude * HALF_UNIT[spec.dtype], scale * HALF_LEAST[spec.dtype])
  step = np.maximum(step, magnitude - most * scale) + 2.0**-20 * magnitude
  step = np.where(magnitude < LEAST, np.maximum(step, magnitude), step)
  step = np.where(scale < LEAST, absmax, step)
  shares = absmax if spec.scaling != "static" or spec.dtype == INT8 else magnitude
  return np.where(np.isfinite(shares), step, np.nan), np.where(np.isfinite(absmax), scale, 1)


class Bound(NamedTuple):
  value: np.ndarray
  error: np.ndarray
  overflows: np.ndarray  # Where float32 may not hold an intermediate result.


def product(a, b, pair, dtype, a_error=0):
  """a [m, k] @ b [k, n] in float64, whose operands may be off by `a_error` and their rounding."""
  if pair is None:
    a, b = np.asarray(a).astype(dtype), np.asarray(b).astype(dtype)
  a, b = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
  a_spec, b_spec = pair or (None, None)
  db, b_scale = half_step(b, b_spec, 0)
  flushed = folded = b_spec is not None and b_spec.scaling == "columnwise"
  if folded:  # a takes the scales of b before it is rounded.
    fold = np.where(b_scale == 0, 1, b_scale).T
    flushed = (fold < LEAST) | (np.abs(a) < LEAST)
    a = a.astype(np.float32).astype(np.float64) * fold
    a_error, b, db, b_scale = a_error * fold, b / fold.T, db / fold.T, 1
  da, a_scale = half_step(a, a_spec)
  da = np.where(flushed, np.maximum(da, np.abs(a)), da)
  if pair and np.any(a_error):  # The scale is that of the perturbed operand.
    da = da + half_step(np.zeros_like(a) + a_error, a_spec)[0]
  da = da + a_error
  size = (np.abs(a) + da) @ (np.abs(b) + db)
  scale = a_scale * b_scale
  error = da @ np.abs(b) + np.abs(a) @ db + da @ db
  error += np.where(scale < LEAST, size, (a.shape[1] + 16) * UNIT["float32"] * size)
  error += (a.shape[1] + 1) * LEAST
  overflows = folded & (np.max(np.abs(a), axis=1, keepdims=True, initial=0) > MOST / 2)
  return Bound(a @ b, error, (scale > MOST / 2) | (size > MOST / 2) | overflows)


def cast(bound, dtype):
  least = 2.0**-24 if dtype == "float16" else LEAST
  size = np.abs(bound.value) + bound.error
  most = float(jnp.finfo(jnp.dtype(dtype)).max) * 0.99
  error = bound.error + UNIT[dtype] * size + least
  return bound._replace(error=error, overflows=bound.overflows | (size > most))


def plus(bound, added):
  if added is None:
    return bound
  added = np.asarray(added).astype(np.float64)
  size = np.abs(bound.value) + np.abs(added)
  error = bound.error + 2 * UNIT["float32"] * size + LEAST
  return Bound(bound.value + added, error, bound.overflows | (size > MOST / 2))


def assert_within(actual, bound):
  actual = np.asarray(actual)
  assert actual.shape == bound.value.shape
  actual = actual.astype(np.float64)
  lost = ~np.isfinite(bound.value) | np.isnan(bound.error)
  close = np.abs(actual - bound.value) <= bound.error
  silent = np.where(lost, np.isfinite(actual), ~close & (np.isfinite(actual) | ~bound.overflows))
  assert not np.any(silent), f"{actual[silent]} for {bound.value[silent]}"
