"""FP4 training, simulated: no speed on Hopper, whose tensor cores have no 4-bit formats.

The recipes "fp4_direct", "fp4_dge" and "fp4" show how a model trains if the forward product takes
4-bit operands (Wang et al. 2025, https://arxiv.org/abs/2501.17116). E2M1 holds 0, 0.5, 1, 1.5, 2,
3, 4, 6 and their negatives. Each row of x and each column of w has a scale, absmax / 6:

  fwd    y  = x4 @ w4 + rest @ w         x4, w4 in E2M1 with their scales; rest, w in 16 bits
  dgrad  dx = dy @ w4.T
  wgrad  dw = ((x4 + rest).T @ dy) * dge(w / scale)

- dge: a rounding to E2M1 has no useful derivative. `dge` is that of a smooth curve near the steps
  (section 3.1). Without it the gradient passes straight through.
- rest: the largest and the smallest values of a row are clamped to those next to them, so that the
  others get a finer scale. A product in 16 bits multiplies what the clamp took away (section 3.2).
  A clamp that loses this rest is worse than none, so there is no recipe for it.

The paper's equations leave dy and the backward products in high precision, and so do we. Its code
(MS-AMP) rounds them to 8 bits, takes powers of two as scales, and drops the rest.

All is plain jnp on every backend. E2M1 values are exact in 16 bits, and the float32 sum of their
products is exact up to K of 116,508.
"""

import dataclasses

import jax

from sbjax.fp4_ops import dge, fp4_round
from sbjax.quantized_dot import quantized_dot
from sbjax.recipes import FULL, Fp4

__all__ = ["dge", "fp4_dot", "fp4_round"]


def fp4_dot(
  x: jax.Array, w: jax.Array, clamp: float | None = 0.99, compensate: bool = True
) -> jax.Array:
  """x @ w [..., N] with operands in simulated FP4, for x [..., K] and w [K, N], in x's dtype.

  Differentiable once, as the module says: dw is multiplied by `dge`. The recipe "fp4" of
  `quantized_dot` and the layers is the same product.

  Args:
    clamp: the quantile at which a row of x is clamped, at both ends: of K values, (1 - clamp) K
      at each end, rounded down. So rows of fewer than 100 values have none at 0.99. None: no clamp,
      the recipe "fp4_dge".
    compensate: must be True with a clamp.

  Raises:
    ValueError: operands that are not floating-point arrays of 16 bits or more, or do not match; a
      clamp that is not above 0.5 and at most 1; a clamp without compensation.

  >>> fp4_dot(jnp.full((2, 128), 6.0), jnp.full((128, 3), -6.0))
  Array([[-4608., -4608., -4608.],
         [-4608., -4608., -4608.]], dtype=float32)
  """
  if clamp is not None and not compensate:
    raise ValueError(
      f"clamp={clamp!r} needs compensate=True: a clamp that loses its rest is less accurate than"
      " none. Use clamp=None for a product without both."
    )
  return quantized_dot(x, w, dataclasses.replace(FULL, fp4=Fp4(clamp=clamp)))
