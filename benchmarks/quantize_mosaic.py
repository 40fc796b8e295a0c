"""The row-wise int8 quantizer in Mosaic, a rival of sbjax/pallas/quantize_triton.py.

One kernel language for a Hopper would be worth something, so benchmarks/quantize.py races the two.
Triton is faster, as docs/design.md says.
"""

import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from sbjax.formats import INT8
from sbjax.quantize import Quantized, Spec

LONG_ROW = 2048  # Up to here a warp has a row of its own, above four share one.


def quantize(x: jax.Array, *, interpret=False) -> Quantized:
  """`sbjax.quantize.quantize` to rows of int8, but for the last bit of its division on a GPU.

  Raises:
    NotImplementedError: other than whole blocks of rows; it is here to be timed.
  """
  rows, k = x.shape
  if rows % 4 or k % 128:
    raise NotImplementedError(f"x [{rows}, {k}]: it takes [4 i, 128 j].")
  is_long = k > LONG_ROW
  block = 1 if is_long else 4

  def kernel(x, values, scale):
    at = pl.ds(lax.axis_index("blocks") * block, block)
    row = plgpu.load(x.at[at], layout=layout(k, is_long), optimized=False).astype(jnp.float32)
    absmax = jnp.max(jnp.where(row == row, jnp.abs(row), jnp.inf), axis=1)
    # Mosaic has no isfinite, so factor_and_scale is written out.
    factor = jnp.minimum(127 / absmax, jnp.finfo(jnp.float32).max)
    store(scale, at, jnp.where(absmax < jnp.inf, absmax * (1 / 127), jnp.nan))
    scaled = row * lax.broadcast_in_dim(factor, row.shape, (0,))
    values[at] = jnp.round(jnp.clip(scaled, -127, 127)).astype(INT8)

  like = jax.ShapeDtypeStruct
  values, scale = plgpu.kernel(
    kernel,
    out_type=(like(x.shape, INT8), like((rows,), jnp.float32)),
    grid=(rows // block,),
    grid_names=("blocks",),
    kernel_name="sbjax_quantize_mosaic",
    interpret=interpret,
  )(x)
  return Quantized(values, scale[:, None], Spec(INT8, "rowwise"))


def store(ref, at, value) -> None:
  """A few values, of which a newer JAX wants to be told that they fill no sector of memory."""
  if hasattr(plgpu, "store"):
    plgpu.store(ref.at[at], value, optimized=False)
  else:
    ref[at] = value


def layout(k: int, is_long: bool) -> plgpu.Layout:
  """A thread loads up to 16 bytes at a time, a warp 32 times that, side by side."""
  vector = math.gcd(8, k // (128 if is_long else 32))
  lanes = 32 * vector
  tiles = ((1, 4 * lanes), (lanes,), (vector,)) if is_long else ((4, lanes), (vector,))
  return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
