"""The operations between the matmuls of a transformer block: norms, GELU, GLU, their gradients.

These functions are the definition. Each takes rows [M, K] in the compute dtype, computes in
float32, and rounds once: to 8 bits, to the compute dtype, or to both. The 8-bit values are rounded
from float32, not from the compute dtype. Operations that work on column shards accept `quantize=`,
so that absmax can be reduced across devices.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sbjax.ops.operation import Operation
from sbjax.quantize import Quantized, Spec, dequantize, folded, quantize

NORM_EPSILON = 1e-5
GELUS = ("gelu", "gelu_tanh", "quick_gelu")
ACTIVATIONS = (*GELUS, "silu")
# The kernels' limit: longer rows and their results do not fit in registers.
MAX_WIDTH_IN_REGISTERS = 8192
# The approximations of GELU: the slopes of the sigmoid's argument. Beyond the bound the sigmoid of
# gelu_tanh is 0 or 1, and its cube would overflow.
QUICK_GELU_SLOPE = 1.702
GELU_TANH_SLOPE = math.sqrt(8 / math.pi)
GELU_TANH_CUBE = 0.044715 * GELU_TANH_SLOPE
GELU_TANH_BOUND = 64.0


class LayerNormParams(NamedTuple):
  """A layer norm's parameters, or their gradients."""

  scale: jax.Array  # [K] float32
  bias: jax.Array  # [K] float32


class RMSNormParams(NamedTuple):
  """An RMS norm's parameter, or its gradient."""

  scale: jax.Array  # [K] float32


Norm = LayerNormParams | RMSNormParams


def norm_quantize(
  x: jax.Array, norm: Norm, spec: Spec | None, *, epsilon: float = NORM_EPSILON
) -> Quantized | jax.Array:
  """The norm of the rows of x [M, K], quantized; in x's dtype where spec is None.

  norm: of a layer norm, or of an RMS norm, x / sqrt(mean(x**2) + epsilon) * scale (Zhang and
    Sennrich 2019, https://arxiv.org/abs/1910.07467).
  epsilon: added to the variance, or to the mean of the squares.
  """
  n = _affine(_standardize(x, norm, epsilon)[0], norm)
  return n.astype(x.dtype) if spec is None else quantize(n, spec)


def norm_backward(
  x: jax.Array,
  norm: Norm,
  dn: jax.Array,
  dx: jax.Array | None,
  *,
  epsilon: float = NORM_EPSILON,
) -> tuple[jax.Array, Norm, jax.Array]:
  """The gradients of a norm, and its output again for the weight gradient.

  Args:
    x: [M, K], the input of the norm.
    norm: as in norm_quantize.
    dn: [M, K], the gradient of the norm's output.
    dx: [M, K] or None, a gradient that reaches x by another way (a residual connection); added.

  Returns:
    x's gradient in x's dtype, the parameters' in float32, the norm's output in x's dtype.
  """
  standard, inverse = _standardize(x, norm, epsilon)
  dn = dn.astype(jnp.float32)
  gradient = dn * norm.scale.astype(jnp.float32)[None, :]
  along = jnp.mean(gradient * standard, axis=1, keepdims=True)
  d_norm = RMSNormParams(jnp.sum(dn * standard, axis=0))
  if isinstance(norm, LayerNormParams):
    gradient -= jnp.mean(gradient, axis=1, keepdims=True)
    d_norm = LayerNormParams(d_norm.scale, jnp.sum(dn, axis=0))
  total = (gradient - standard * along) * inverse
  if dx is not None:
    total += dx.astype(jnp.float32)
  return total.astype(x.dtype), d_norm, _affine(standard, norm).astype(x.dtype)


def gelu_quantize(
  h: jax.Array,
  spec: Spec | None,
  keep: Spec | None = None,
  *,
  activation: str = "gelu",
  quantize=quantize,
) -> tuple[Quantized | jax.Array, Quantized | jax.Array]:
  """GELU of h [M, K], quantized (in h's dtype where spec is None), and what its backward keeps.

  That is h as it is, or quantized to `keep`.

  activation: "gelu", the exact one, or an approximation: "gelu_tanh", h * sigmoid(1.6 h + 0.07 h^3)
    (Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415), or "quick_gelu",
    h * sigmoid(1.702 h); or "silu", h * sigmoid(h).
  """
  g = _ACTIVATIONS[activation](h.astype(jnp.float32))[0]
  g = g.astype(h.dtype) if spec is None else quantize(g, spec)
  return g, h if keep is None else quantize(h, keep)


def gelu_backward(
  h: jax.Array | Quantized,
  dg: jax.Array,
  spec: Spec | None,
  *,
  activation: str = "gelu",
  fold: jax.Array | None = None,
  quantize=quantize,
) -> tuple[jax.Array, Quantized | None, jax.Array, jax.Array]:
  """The gradient of GELU, and its output again for the weight gradient.

  Args:
    h: [M, K], what went in, as gelu_quantize kept it.
    dg: [M, K], the gradient of what came out.
    spec: the format that the gradient is quantized to, or None.
    activation: as in gelu_quantize.
    fold: [K] float32 or None, what multiplies the gradient before it is quantized.

  Returns:
    h's gradient in dg's dtype; folded and quantized; summed over the rows, [K] float32: a bias's
    gradient; and GELU's output in dg's dtype.
  """
  h = dequantize(h) if isinstance(h, Quantized) else h.astype(jnp.float32)
  g, slope = _ACTIVATIONS[activation](h)
  dh = dg.astype(jnp.float32) * slope
  dh_q = None if spec is None else quantize(folded(dh, fold), spec)
  return dh.astype(dg.dtype), dh_q, jnp.sum(dh, axis=0), g.astype(dg.dtype)


def glu_quantize(
  gate: jax.Array,
  up: jax.Array,
  spec: Spec | None,
  keep: Spec | None = None,
  *,
  activation: str = "silu",
  quantize=quantize,
) -> tuple[Quantized | jax.Array, tuple[Quantized | jax.Array, Quantized | jax.Array]]:
  """A gated linear unit, `activation(gate) * up` of [M, K] each, and what its backward keeps.

  The unit is quantized (in gate's dtype where spec is None). Kept are gate and up as they are, or
  each quantized to `keep`.

  activation: as in gelu_quantize. With "silu" the unit is SwiGLU, with "gelu" GEGLU (Shazeer 2020,
    https://arxiv.org/abs/2002.05202).
  """
  g = _ACTIVATIONS[activation](gate.astype(jnp.float32))[0] * up.astype(jnp.float32)
  g = g.astype(gate.dtype) if spec is None else quantize(g, spec)
  return g, (gate, up) if keep is None else (quantize(gate, keep), quantize(up, keep))


def glu_backward(
  gate: jax.Array | Quantized,
  up: jax.Array | Quantized,
  dg: jax.Array,
  spec: Spec | None,
  *,
  activation: str = "silu",
  folds: tuple[jax.Array | None, jax.Array | None] = (None, None),
  quantize=quantize,
) -> tuple[tuple[jax.Array, jax.Array], tuple[Quantized, Quantized] | None, jax.Array]:
  """The gradients of a gated linear unit, and the unit again for the weight gradient.

  Args:
    gate, up: [M, K], what went in, as glu_quantize kept it.
    dg: [M, K], the gradient of what came out.
    spec: the format that both gradients are quantized to, or None.
    activation: as in glu_quantize.
    folds: [K] float32 or None, what multiplies each gradient before it is quantized.

  Returns:
    The gradients of gate and up in dg's dtype; both folded and quantized, or None; and the unit in
    dg's dtype.
  """
  gate, up = (
    dequantize(h) if isinstance(h, Quantized) else h.astype(jnp.float32) for h in (gate, up)
  )
  active, slope = _ACTIVATIONS[activation](gate)
  dg, dtype = dg.astype(jnp.float32), dg.dtype
  gradients = dg * up * slope, dg * active
  quantized = None
  if spec is not None:
    d_gate, d_up = (
      quantize(folded(d, fold), spec) for d, fold in zip(gradients, folds, strict=True)
    )
    quantized = d_gate, d_up
  d_gate, d_up = (d.astype(dtype) for d in gradients)
  return (d_gate, d_up), quantized, (active * up).astype(dtype)


def quantize_sum(
  parts: tuple[jax.Array, ...], spec: Spec, *, fold: jax.Array | None = None, quantize=quantize
) -> tuple[jax.Array, Quantized, jax.Array]:
  """A gradient dy [M, K], of `parts` side by side, [M, K / P] each.

  Args:
    fold: [K] float32 or None, what multiplies dy before it is quantized.

  Returns:
    dy; folded and quantized; and summed over its rows, [K] float32: a bias's gradient.
  """
  dy = jnp.concatenate(parts, axis=1)
  return dy, quantize(folded(dy, fold), spec), jnp.sum(dy.astype(jnp.float32), axis=0)


def _standardize(x, norm, epsilon):
  """x times 1 / the root of its rows' mean square, and that factor [M, 1].

  A layer norm first takes the mean from each row.
  """
  x = x.astype(jnp.float32)
  if isinstance(norm, LayerNormParams):
    x -= jnp.mean(x, axis=1, keepdims=True)
  inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=1, keepdims=True) + epsilon)
  return x * inverse, inverse


def _affine(standard, norm):
  scaled = standard * norm.scale.astype(jnp.float32)[None, :]
  if isinstance(norm, RMSNormParams):
    return scaled
  return scaled + norm.bias.astype(jnp.float32)[None, :]


def activate(h: jax.Array, activation: str) -> jax.Array:
  """The activation of h, computed in float32."""
  return _ACTIVATIONS[activation](h.astype(jnp.float32))[0].astype(h.dtype)


def _gelu(h):
  """h * cdf(h), and its derivative: cdf(h) + h * pdf(h), of the standard normal distribution."""
  cdf = 0.5 * jax.lax.erfc(h * -math.sqrt(0.5))
  pdf = jnp.exp(-0.5 * jnp.square(h)) * (1 / math.sqrt(2 * math.pi))
  return h * cdf, cdf + h * pdf


def _gelu_tanh(h):
  """h * sigmoid(z), and its derivative, for z = sqrt(8 / pi) * (h + 0.044715 * h**3)."""
  u = jnp.clip(h, -GELU_TANH_BOUND, GELU_TANH_BOUND)
  square = jnp.square(u)
  z = u * (GELU_TANH_SLOPE + GELU_TANH_CUBE * square)
  return _sigmoid_unit(h, z, GELU_TANH_SLOPE + 3 * GELU_TANH_CUBE * square)


def _quick_gelu(h):
  return _sigmoid_unit(h, QUICK_GELU_SLOPE * h, QUICK_GELU_SLOPE)


def _silu(h):
  return _sigmoid_unit(h, h, 1.0)


def _sigmoid_unit(h, z, slope):
  """h * sigmoid(z), and its derivative; slope is that of z."""
  gate = jax.nn.sigmoid(z)
  return h * gate, gate + h * (slope * (gate * jax.nn.sigmoid(-z)))


_ACTIVATIONS: dict[str, Callable] = dict(
  zip(ACTIVATIONS, (_gelu, _gelu_tanh, _quick_gelu, _silu), strict=True)
)


OPERATIONS = {
  "norm_quantize": Operation(
    norm_quantize, "m. -> m.", kernels=("triton.norm",), static=("epsilon",)
  ),
  "norm_backward": Operation(
    norm_backward, "m. -> m.", kernels=("triton.norm",), static=("epsilon",)
  ),
  "gelu_quantize": Operation(
    gelu_quantize, "mk -> mk", kernels=("triton.gelu",), static=("activation",)
  ),
  "gelu_backward": Operation(
    gelu_backward, "mk -> mk", kernels=("triton.gelu",), static=("activation",)
  ),
  "glu_quantize": Operation(
    glu_quantize, "mk -> mk", kernels=("triton.glu",), static=("activation",)
  ),
  "glu_backward": Operation(
    glu_backward, "mk -> mk", kernels=("triton.glu",), static=("activation",)
  ),
  "quantize_sum": Operation(quantize_sum, "mk -> mk", kernels=("triton.quantize_sum",)),
}
