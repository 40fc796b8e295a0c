"""FP4 training, simulated: no speed on Hopper, whose tensor cores have no 4-bit formats.

The recipes "fp4_direct", "fp4_dge" and "fp4" show how a model trains if the forward matmul takes
4-bit operands (Wang et al. 2025, https://arxiv.org/abs/2501.17116). E2M1 holds 0, 0.5, 1, 1.5, 2,
3, 4, 6 and their negatives. Each row of x and each column of w has a scale, absmax / 6:

  fwd    y  = x4 @ w4 + rest @ w         x4, w4 in E2M1 with their scales; rest, w in 16 bits
  dgrad  dx = dy @ w4.T
  wgrad  dw = ((x4 + rest).T @ dy) * dge(w / scale)

- dge: a rounding to E2M1 has no useful derivative. `dge` is that of a smooth curve near the steps
  (section 3.1). Without it the gradient passes straight through.
- rest: the largest and the smallest values of a row are clamped to those next to them, so that the
  others get a finer scale. A matmul in 16 bits multiplies what the clamp took away (section 3.2).

The paper's code (MS-AMP) differs from its equations: it rounds dy and the backward matmuls to 8
bits, takes powers of two as scales, and drops the rest. All is plain jnp on every backend. E2M1
values are exact in 16 bits, and the float32 sum of their products is exact up to K of 116,508.
"""

import dataclasses

import jax
import jax.numpy as jnp

from sbjax.linear.quantized_dot import quantized_dot
from sbjax.ops.matmul import at_least_float32, full_dot
from sbjax.ops.split_k import split_k_matmul
from sbjax.quantize import abs_or_inf, as_floating
from sbjax.recipes import FULL, SIMULATED

LARGEST = 6.0


def fp4_round(x: jax.Array) -> jax.Array:
  """x of any shape rounded to the nearest value of E2M1, in x's dtype; a tie as in IEEE 754.

  Larger magnitudes than 6 become 6. E2M1 has no NaN and no infinity: both become NaN.

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
  magnitude = jnp.minimum(jnp.abs(at_least_float32(x)), LARGEST)
  position = magnitude / _interval(magnitude)
  distance = jnp.abs(2 * (position - jnp.floor(position)) - 1)
  return jnp.minimum(distance ** (1 / k - 1) / k, top)


@dataclasses.dataclass(frozen=True)
class Fp4:
  """The forward matmul in 4 bits; a `Simulation` of `sbjax.recipes`.

  dge: whether `dge` multiplies the weight gradient.
  clamp: the quantile at which rows of x are clamped, with compensation; None: not.
  """

  dge: bool = True
  clamp: float | None = None

  def __post_init__(self):
    if self.clamp is not None and not 0.5 < self.clamp <= 1:
      raise ValueError(f"clamp={self.clamp!r} must be more than 0.5 and at most 1, such as 0.99.")

  def fwd(self, x: jax.Array, w: jax.Array) -> jax.Array:
    clamped, rest = _clamped(x, self.clamp)
    x_values, x_scale = _quantize(x, clamped, 1)
    w_values, w_scale = _quantize(w, w, 0)
    y = full_dot(x_values, w_values.astype(x.dtype), ((1,), (0,)), at_least_float32(x).dtype)
    y *= x_scale * w_scale
    if rest is not None:
      y += full_dot(rest, w.astype(x.dtype), ((1,), (0,)), y.dtype)
    return y

  def rounded_weight(self, w: jax.Array, dtype) -> jax.Array:
    values, scale = _quantize(w, w, 0)
    return (at_least_float32(values) * scale).astype(dtype)

  def wgrad(self, x: jax.Array, dy: jax.Array, w: jax.Array, out_sharding) -> jax.Array:
    dw = split_k_matmul(self._rounded_rows(x), dy, jnp.float32, out_sharding)
    return dw * dge(_scaled(w, _scale(w, w, 0))) if self.dge else dw

  def _rounded_rows(self, x: jax.Array) -> jax.Array:
    """x [M, K] in its dtype: rounded, with the rest of the clamp."""
    clamped, rest = _clamped(x, self.clamp)
    values, scale = _quantize(x, clamped, 1)
    values = at_least_float32(values) * scale
    return (values if rest is None else values + at_least_float32(rest)).astype(x.dtype)


# With straight-through gradients; with the estimator of the weight gradient; with the clamp, too.
SIMULATED |= {
  "fp4_direct": dataclasses.replace(FULL, simulated=Fp4(dge=False)),
  "fp4_dge": dataclasses.replace(FULL, simulated=Fp4()),
  "fp4": dataclasses.replace(FULL, simulated=Fp4(clamp=0.99)),
}


def fp4_dot(x: jax.Array, w: jax.Array, clamp: float | None = 0.99) -> jax.Array:
  """x @ w [..., N] with operands in simulated FP4, for x [..., K] and w [K, N], in x's dtype.

  The recipe "fp4" of `quantized_dot` and the layers is the same matmul.

  Args:
    clamp: the quantile at which a row of x is clamped, at both ends: of K values, (1 - clamp) K
      at each end, rounded down. None: no clamp, the recipe "fp4_dge".

  Raises:
    ValueError: those of `quantized_dot`, or a clamp that is not above 0.5 and at most 1.

  >>> fp4_dot(jnp.full((2, 128), 6.0), jnp.full((128, 3), -6.0))
  Array([[-4608., -4608., -4608.],
         [-4608., -4608., -4608.]], dtype=float32)
  """
  return quantized_dot(x, w, dataclasses.replace(FULL, simulated=Fp4(clamp=clamp)))


def _quantize(x, clamped, axis) -> tuple[jax.Array, jax.Array]:
  """The values of E2M1 in x's dtype, and the scales, each for a row (axis 1) or a column of x.

  Where x has a NaN or an infinity the scale is NaN.
  """
  scale = _scale(x, clamped, axis)
  return fp4_round(_scaled(clamped, scale)).astype(x.dtype), scale


def _scale(x, clamped, axis) -> jax.Array:
  scale = _absmax(clamped, axis) * (1 / LARGEST)
  return jnp.where(jnp.isfinite(_absmax(x, axis)), scale, jnp.nan)


def _absmax(x, axis) -> jax.Array:
  return jnp.max(abs_or_inf(x.astype(jnp.float32)), axis, keepdims=True, initial=0.0)


def _scaled(x, scale) -> jax.Array:
  return at_least_float32(x) / jnp.where(scale == 0, 1.0, scale)


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
