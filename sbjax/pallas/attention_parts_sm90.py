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
  """A vector in registers: a number for each row, or each column, of a tile."""
  return load(ref, layout)


def load(ref, layout=plgpu.Layout.WGMMA):
  return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]


def branches(refs):
  """Functions of nothing for lax.cond: what the refs hold, and zeros."""

  def zeros():
    return [plgpu.layout_cast(jnp.zeros(ref.shape, ref.dtype), plgpu.Layout.WGMMA) for ref in refs]

  return lambda: [load(ref) for ref in refs], zeros


def store(ref, values):
  """Stores in global memory, a few bytes a thread, which JAX 0.12 must be told to allow."""
  if hasattr(plgpu, "store"):
    plgpu.store(ref, values, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
  else:
    ref[...] = values


def varying(step):
  """Zero, as the compiler cannot know: it would hold addresses that stay the same in registers."""
  return step >> 24


def across(vector, axis, columns=TILE):
  """A tile [TILE, columns] of a vector that varies along `axis`."""
  return lax.broadcast_in_dim(vector, (TILE, columns), (axis,))


def first_column(x):
  """The first column of sums [TILE, 8]."""
  column = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=plgpu.Layout.WGMMA)
  return jnp.sum(jnp.where(column == 0, x, 0.0), axis=1)


def in_first_row(vector):
  """A tile [TILE, TILE] of zeros, but for a vector in the first row."""
  row = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 0, layout=plgpu.Layout.WGMMA)
  return jnp.where(row == 0, across(vector, 1), 0.0)


def with_zeros(x):
  """A tile [TILE, TILE]: the columns of x, then zeros."""
  if x.shape[1] == TILE:
    return x
  zeros = jnp.zeros((TILE, TILE - x.shape[1]), x.dtype)
  return lax.concatenate([x, plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)], 1)


def column_blocks(head_dim: int) -> tuple[int, ...]:
  """The widths of blocks of a head's columns: 64, and last 16, 32 or 64, maybe too wide."""
  whole, rest = divmod(head_dim, TILE)
  return (TILE,) * whole + ((next(w for w in (16, 32, TILE) if w >= rest),) if rest else ())


def swizzled(shape, columns, dtype):
  """Shared memory for wgmma, tiled in blocks of `columns`, of which the last axis is a multiple."""
  swizzle = plgpu.SwizzleTransform(columns * jnp.dtype(dtype).itemsize)
  return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), swizzle))


def tiled(buffers, rows, columns, dtype):
  """Shared memory of 16, 32 or 64 columns under two names: for wgmma and for TMA.

  wgmma's is tiled. TMA's is not, since it clips whole rows to an array, of which 8 need not divide
  the tokens. With one tile a row, both lay the same bytes out.
  """
  shape = (buffers, rows, columns) if buffers else (rows, columns)
  swizzle = plgpu.SwizzleTransform(columns * jnp.dtype(dtype).itemsize)
  for_tma = plgpu.SMEM(shape, dtype, transforms=(swizzle,))
  return plgpu.RefUnion(swizzled(shape, columns, dtype), for_tma)


def both(smem):
  """Two tuples of the two names of each block."""
  return tuple(zip(*smem, strict=True))
