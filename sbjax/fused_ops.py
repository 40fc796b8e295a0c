"""The operations between the matmuls of a transformer block: layer norm, GELU, their gradients.

These functions are the definition. Each takes rows [M, K] in the compute dtype, computes in
float32, and rounds once: to 8 bits, to the compute dtype, or to both. The 8-bit values are rounded
from float32, not from the compute dtype. Operations that work on column shards accept `quantize=`,
so that absmax can be reduced across devices.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sbjax.quantize import Quantized, Spec, dequantize, quantize

NORM_EPSILON = 1e-5
# The kernels' limit: longer rows and their results do not fit in registers.
MAX_WIDTH_IN_REGISTERS = 8192


class LayerNormParams(NamedTuple):
  """A layer norm's parameters, or their gradients."""

  scale: jax.Array  # [K] float32
  bias: jax.Array  # [K] float32


def norm_quantize(x: jax.Array, norm: LayerNormParams, spec: Spec | None) -> Quantized | jax.Array:
  """Layer norm over the rows of x [M, K], quantized; in x's dtype where spec is None."""
  centred, inverse = _standardize(x)
  n = _affine(centred * inverse, norm)
  return n.astype(x.dtype) if spec is None else quantize(n, spec)


def norm_backward(
  x: jax.Array, norm: LayerNormParams, dn: jax.Array, dx: jax.Array | None
) -> tuple[jax.Array, LayerNormParams, jax.Array]:
  """The gradients of layer norm, and its output again for the weight gradient.

  Args:
    x: [M, K], the input of layer norm.
    dn: [M, K], the gradient of layer norm's output.
    dx: [M, K] or None, a gradient that reaches x by another way (a residual connection); added.

  Returns:
    x's gradient in x's dtype, the parameters' in float32, layer norm's output in x's dtype.
  """
  centred, inverse = _standardize(x)
  standard, dn = centred * inverse, dn.astype(jnp.float32)
  gradient = dn * norm.scale.astype(jnp.float32)[None, :]
  mean = jnp.mean(gradient, axis=1, keepdims=True)
  along = jnp.mean(gradient * standard, axis=1, keepdims=True)
  total = (gradient - mean - standard * along) * inverse
  if dx is not None:
    total += dx.astype(jnp.float32)
  d_norm = LayerNormParams(jnp.sum(dn * standard, axis=0), jnp.sum(dn, axis=0))
  return total.astype(x.dtype), d_norm, _affine(standard, norm).astype(x.dtype)


def gelu_quantize(
  h: jax.Array, spec: Spec | None, keep: Spec | None = None, *, quantize=quantize
) -> tuple[Quantized | jax.Array, Quantized | jax.Array]:
  """GELU of h [M, K], quantized (in h's dtype where spec is None), and what its backward keeps.

  That is h as it is, or quantized to `keep`.
  """
  g = _gelu(h.astype(jnp.float32))[0]
  g = g.astype(h.dtype) if spec is None else quantize(g, spec)
  return g, h if keep is None else quantize(h, keep)


def gelu_backward(
  h: jax.Array | Quantized, dg: jax.Array, spec: Spec | None, *, quantize=quantize
) -> tuple[jax.Array, Quantized | None, jax.Array, jax.Array]:
  """The gradient of GELU, and its output again for the weight gradient.

  Args:
    h: [M, K], what went in, as gelu_quantize kept it.
    dg: [M, K], the gradient of what came out.
    spec: the format that the gradient is quantized to, or None.

  Returns:
    h's gradient in dg's dtype; quantized; summed over the rows, [K] float32: a bias's gradient; and
    GELU's output in dg's dtype.
  """
  h = dequantize(h) if isinstance(h, Quantized) else h.astype(jnp.float32)
  g, slope = _gelu(h)
  dh = dg.astype(jnp.float32) * slope
  dh_q = None if spec is None else quantize(dh, spec)
  return dh.astype(dg.dtype), dh_q, jnp.sum(dh, axis=0), g.astype(dg.dtype)


def quantize_sum(
  parts: tuple[jax.Array, ...], spec: Spec, *, quantize=quantize
) -> tuple[jax.Array, Quantized, jax.Array]:
  """A gradient dy [M, K], of `parts` side by side, [M, K / P] each.

  Returns:
    dy; quantized; and summed over its rows, [K] float32: a bias's gradient.
  """
  dy = jnp.concatenate(parts, axis=1)
  return dy, quantize(dy, spec), jnp.sum(dy.astype(jnp.float32), axis=0)


def _standardize(x):
  """x less its rows' mean, and 1 / their standard deviation [M, 1]."""
  x = x.astype(jnp.float32)
  centred = x - jnp.mean(x, axis=1, keepdims=True)
  variance = jnp.mean(jnp.square(centred), axis=1, keepdims=True)
  return centred, jax.lax.rsqrt(variance + NORM_EPSILON)


def _affine(standard, norm):
  scale, bias = norm.scale.astype(jnp.float32), norm.bias.astype(jnp.float32)
  return standard * scale[None, :] + bias[None, :]


def _gelu(h):
  """h * cdf(h), and its derivative: cdf(h) + h * pdf(h), of the standard normal distribution."""
  cdf = 0.5 * jax.lax.erfc(h * -math.sqrt(0.5))
  pdf = jnp.exp(-0.5 * jnp.square(h)) * (1 / math.sqrt(2 * math.pi))
  return h * cdf, cdf + h * pdf
