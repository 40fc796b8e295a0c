"""Parts of attention on Hopper: registers and shared memory in the layouts of wgmma."""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

TILE = 64  # Rows of a tile of queries or keys.
BY_ROW, BY_COLUMN = (plgpu.Layout.WGMMA.reduce(axis) for axis in (1, 0))


def sums(rows, columns):
  """A product's sums [rows, columns], in registers."""
  return plgpu.ACC((rows, columns), jnp.float32)  # pyright: ignore


def vector(ref, layout):
  """A vector [TILE] in registers: a number for each row, or each column, of a tile."""
  return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]


def store_vector(ref, values):
  """Stores a vector in global memory, two bytes a thread, which JAX 0.12 must be told to allow."""
  if hasattr(plgpu, "store"):
    plgpu.store(ref, values, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
  else:
    ref[...] = values


def varying(step):
  """Zero, as the compiler cannot know: it would hold addresses that stay the same in registers."""
  return step >> 24


def across(vector, axis):
  """A tile [TILE, TILE] of a vector that varies along `axis`."""
  return lax.broadcast_in_dim(vector, (TILE, TILE), (axis,))


def first_column(x):
  """The first column of sums [TILE, 8]."""
  column = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=plgpu.Layout.WGMMA)
  return jnp.sum(jnp.where(column == 0, x, 0.0), axis=1)


def tiled(buffers, rows, columns, dtype):
  """Shared memory of 64 columns under two names: for wgmma and for TMA.

  wgmma's is tiled. TMA's is not, since it clips whole rows to an array, of which 8 need not divide
  the tokens. With 128 bytes a row, both lay the same bytes out.
  """
  assert columns * jnp.dtype(dtype).itemsize == 128
  shape = (buffers, rows, columns) if buffers else (rows, columns)
  swizzle = plgpu.SwizzleTransform(128)
  for_wgmma = plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), swizzle))
  return plgpu.RefUnion(for_wgmma, plgpu.SMEM(shape, dtype, transforms=(swizzle,)))
