"""GELU, its approximations and SiLU in Triton, with their derivatives.

GELU is the exact one, at the speed of memory. With u = |h|, the upper tail of the normal
distribution is exp(-u**2 / 2) times a smooth function, here a polynomial of degree 4 in a t that
falls from 1 at u = 0 to 0 at infinity:

  1 - cdf(u) = exp(-u**2 / 2) * (C1 * t + ... + C4 * t**4),  t = 1 / sqrt(1 + A * u + B * u**2)

Its relative error is at most 2e-5, even where GELU is tiny, because nothing cancels for negative h.
Of the 65,280 finite bfloat16 h, all but 132 give the exact GELU correctly rounded. The others have
an error of at most 0.505 units in the last place. The derivative has an absolute error of at most
7.2e-6, and a relative error of 2.7e-5 for h < -1. Results below 2**-126 may be flushed to zero.
(Measured in IEEE arithmetic; by NVIDIA's bounds a GPU's root and power of two add less than 1e-6 of
the result.)

The approximations of GELU, and SiLU, are h * sigmoid(z): their upper tail is sigmoid(-z) at |h|.
"""

import triton
import triton.language as tl

from sbjax.ops import rows

# Fitted to minimize the largest relative error for 0 <= u <= 14.
A, B = tl.constexpr(0.6661622255212556), tl.constexpr(0.13190116201256763)
C1, C2 = tl.constexpr(0.14464860219831463), tl.constexpr(0.13632541350357955)
C3, C4 = tl.constexpr(0.09615968892895972), tl.constexpr(0.12285927372896173)
HALF_LOG2_E = tl.constexpr(0.7213475204444817)
DENSITY = tl.constexpr(0.3989422804014327)  # Of the normal distribution at 0.
LOG2_E = tl.constexpr(1.4426950408889634)
QUICK_GELU_SLOPE = tl.constexpr(rows.QUICK_GELU_SLOPE)
GELU_TANH_SLOPE = tl.constexpr(rows.GELU_TANH_SLOPE)
GELU_TANH_CUBE = tl.constexpr(rows.GELU_TANH_CUBE)
GELU_TANH_BOUND = tl.constexpr(rows.GELU_TANH_BOUND)


@triton.jit
def active(h, ACTIVATION: tl.constexpr):
  """The activation of float32 h; NaN if h is not finite."""
  if ACTIVATION == "gelu":
    tail, _ = _tail_and_density(h)
  else:
    tail, _ = _sigmoid_tail(h, ACTIVATION)
  return _gated(h, tail)


@triton.jit
def active_and_slope(h, ACTIVATION: tl.constexpr):
  """The activation of float32 h, and its derivative there."""
  if ACTIVATION == "gelu":
    tail, density = _tail_and_density(h)
    slope = tl.fma(h * density, DENSITY, tl.where(h < 0, tail, 1.0 - tail))
  else:
    tail, density = _sigmoid_tail(h, ACTIVATION)
    slope = tl.fma(h, density, tl.where(h < 0, tail, 1.0 - tail))
  return _gated(h, tail), slope


@triton.jit
def _gated(h, tail):
  """h * gate(h) as max(h, 0) - |h| * tail, for tail = 1 - gate(|h|)."""
  return tl.fma(-tl.abs(h), tail, tl.maximum(h, 0.0))


@triton.jit
def _tail_and_density(h):
  """1 - cdf(|h|) and exp(-h**2 / 2)."""
  u = tl.abs(h)
  density = tl.exp2(h * h * -HALF_LOG2_E)
  # A root is one instruction; a division, as in t = 1 / (1 + A * u), takes several.
  t = tl.rsqrt(tl.fma(tl.fma(u, B, A), u, 1.0))
  polynomial = tl.fma(tl.fma(tl.fma(t, C4, C3), t, C2), t, C1)
  return density * (t * polynomial), density


@triton.jit
def _sigmoid_tail(h, ACTIVATION: tl.constexpr):
  """sigmoid(-z) at |h|, and the derivative of sigmoid(z), for h * sigmoid(z)."""
  if ACTIVATION == "quick_gelu":
    z, slope = tl.abs(h) * QUICK_GELU_SLOPE, QUICK_GELU_SLOPE
  elif ACTIVATION == "silu":
    z, slope = tl.abs(h), 1.0
  else:
    u = tl.minimum(tl.abs(h), GELU_TANH_BOUND)
    square = u * u
    z = u * tl.fma(square, GELU_TANH_CUBE, GELU_TANH_SLOPE)
    slope = tl.fma(square, 3 * GELU_TANH_CUBE, GELU_TANH_SLOPE)
  power = tl.exp2(z * -LOG2_E)
  root = tl.rsqrt(1.0 + power)  # One instruction; a division takes several.
  gate = root * root
  tail = power * gate
  return tail, (gate * tail) * slope
