"""The pieces of `sbjax.fp4`: rounding to E2M1, the operands of each product, the estimator."""

import jax
import jax.numpy as jnp

from sbjax.formats import E4M3
from sbjax.matmul import full_dot, wide
from sbjax.quantize import Spec, as_floating, largest
from sbjax.recipes import Fp4

LARGEST = 6.0
_ROW = Spec(E4M3, "rowwise")  # `largest` reads only which values share a scale.


def fp4_round(x: jax.Array) -> jax.Array:
  """x of any shape rounded to the nearest value of E2M1, in x's dtype.

  A tie goes to the value with an even mantissa, as in IEEE 754: 0.25 to 0, 0.75 to 1, 2.5 to 2, 5
  to 4. Larger magnitudes than 6 become 6. E2M1 has no NaN and no infinity: both become NaN.

  Raises:
    ValueError: x is not a floating-point array of 16 bits or more.

  >>> fp4_round(jnp.array([0.25, -0.75, 2.5, 5.1, 100.0]))
  Array([ 0., -1.,  2.,  6.,  6.], dtype=float32)
  """
  x = as_floating("x", x)
  magnitude = jnp.minimum(jnp.abs(x), LARGEST)
  step = _interval(magnitude)
  rounded = jnp.copysign(jnp.round(magnitude / step) * step, x)
  return jnp.where(jnp.isfinite(x), rounded, jnp.nan).astype(x.dtype)


def dge(x: jax.Array, k: float = 5.0, top: float = 3.0) -> jax.Array:
  """The derivative of a smooth curve near `fp4_round`, at x of any shape; float32 or wider.

  Between two neighbours of E2M1 at a distance d, it is `|2 t / d - 1|**(1/k - 1) / k` at distance
  t from the lower one, at most `top` (Wang et al. 2025, https://arxiv.org/abs/2501.17116, equation
  8): 1/k at a value of E2M1, and `top` halfway. Beyond -6 and 6 it is that of -6 and 6.

  Args:
    k: how steep the curve is; 1 gives 1 everywhere.
    top: bounds the peak, which is infinite.

  Raises:
    ValueError: x is not a floating-point array of 16 bits or more, k < 1, or top <= 0.

  >>> [round(float(slope), 2) for slope in dge(jnp.array([0.5, 0.6, 0.75, 6.0]))]
  [0.2, 0.3, 3.0, 0.2]
  """
  x = as_floating("x", x)
  if not k >= 1:
    raise ValueError(f"{k=} must be at least 1, such as 5.")
  if not top > 0:
    raise ValueError(f"{top=} must be more than 0, such as 3.")
  magnitude = jnp.minimum(jnp.abs(wide(x)), LARGEST)
  position = magnitude / _interval(magnitude)
  distance = jnp.abs(2 * (position - jnp.floor(position)) - 1)
  return jnp.minimum(distance ** (1 / k - 1) / k, top)


def product(x: jax.Array, w: jax.Array, how: Fp4) -> jax.Array:
  """x @ w [M, N] in float32, with x [M, K] and w [K, N] rounded as the recipe's `fp4` says."""
  clamped, rest = _clamped(x, how.clamp)
  x_values, x_scale = _quantize(x, clamped, 1)
  w_values, w_scale = _quantize(w, w, 0)
  y = full_dot(x_values, w_values.astype(x.dtype), ((1,), (0,)), wide(x).dtype)
  y *= x_scale * w_scale
  if rest is not None:
    y += full_dot(rest, w.astype(x.dtype), ((1,), (0,)), y.dtype)
  return y


def rounded_rows(x: jax.Array, how: Fp4) -> jax.Array:
  """x [M, K] as the product took it, in x's dtype: rounded, with the rest of the clamp."""
  clamped, rest = _clamped(x, how.clamp)
  values, scale = _quantize(x, clamped, 1)
  values = wide(values) * scale
  return (values if rest is None else values + wide(rest)).astype(x.dtype)


def rounded_weight(w: jax.Array, dtype) -> jax.Array:
  """w [K, N] as the product took it, in `dtype`."""
  values, scale = _quantize(w, w, 0)
  return (wide(values) * scale).astype(dtype)


def slope(w: jax.Array, how: Fp4) -> jax.Array | float:
  """What multiplies the weight gradient [K, N]."""
  return dge(_scaled(w, _scale(w, w, 0))) if how.dge else 1.0


def _quantize(x, clamped, axis) -> tuple[jax.Array, jax.Array]:
  """The values of E2M1 in x's dtype, and the scales, each for a row (axis 1) or a column of x.

  Where x has a NaN or an infinity the scale is NaN.
  """
  scale = _scale(x, clamped, axis)
  return fp4_round(_scaled(clamped, scale)).astype(x.dtype), scale


def _scale(x, clamped, axis) -> jax.Array:
  absmax = largest(clamped if axis else clamped.T, _ROW)
  if clamped is not x:
    absmax = jnp.where(jnp.isfinite(largest(x, _ROW)), absmax, jnp.nan)
  scale = jnp.where(jnp.isfinite(absmax), absmax * (1 / LARGEST), jnp.nan)
  return scale if axis else scale.T


def _scaled(x, scale) -> jax.Array:
  return wide(x) / jnp.where(scale == 0, 1.0, scale)


def _clamped(x: jax.Array, clamp: float | None) -> tuple[jax.Array, jax.Array | None]:
  """x [M, K] with the ends of each row clamped, and the rest; x and None if nothing is cut."""
  width = x.shape[1]
  cut = 0 if clamp is None else int((1 - clamp) * width + 1e-6)
  if cut == 0:
    return x, None
  ordered = jnp.sort(x, axis=1)
  clamped = jnp.clip(x, ordered[:, cut, None], ordered[:, width - 1 - cut, None])
  return clamped, x - clamped


def _interval(magnitude) -> jax.Array:
  """The distance from a value of E2M1 to the next one above it."""
  steps = jnp.where(magnitude < 2, 0.5, jnp.where(magnitude < 4, 1.0, 2.0))
  return steps.astype(magnitude.dtype)
