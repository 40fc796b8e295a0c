"""Parts of attention on Hopper: registers and shared memory in the layouts of wgmma."""

import math
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

TILE = 64  # Rows of a tile of queries or keys.
LOG2_E = math.log2(math.e)
COMPUTE_WARPGROUPS = 2  # Of a thread block, which has one more, for memory.
BY_ROW, BY_COLUMN = (plgpu.Layout.WGMMA.reduce(axis) for axis in (1, 0))


def persistent_kernel(body, out_type, *, name: str, blocks: int, interpret) -> Any:
  """A kernel whose thread blocks share the heads; operands may be refs, to be written to."""
  mesh = plgpu.Mesh(
    grid=(blocks,),
    grid_names=("sm",),
    num_threads=COMPUTE_WARPGROUPS + 1,
    thread_name="warpgroup",
    kernel_name=name,
  )
  params = plgpu.CompilerParams(
    approx_math=True,
    unsafe_no_auto_barriers=True,  # `commit_smem` stands where one is needed.
    lowering_semantics=plgpu.LoweringSemantics.Lane,
  )
  return pl.kernel(
    body, out_type, mesh=mesh, name=name, compiler_params=params, interpret=interpret
  )


def sums(rows, columns):
  """A product's sums [rows, columns], in registers."""
  return plgpu.ACC((rows, columns), jnp.float32)  # pyright: ignore


def load(ref, layout: Any = plgpu.Layout.WGMMA):
  """A tile in registers; with BY_ROW or BY_COLUMN a vector, a number for each of a tile's."""
  return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]


def zeros(shape, dtype):
  return plgpu.layout_cast(jnp.zeros(shape, dtype), plgpu.Layout.WGMMA)


def load_if(condition, ref):
  """A tile in registers, of zeros unless the condition holds."""
  return lax.cond(condition, lambda: load(ref), lambda: zeros(ref.shape, ref.dtype))


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
  """The columns of x, then zeros up to a multiple of TILE."""
  missing = -x.shape[1] % TILE
  return lax.concatenate([x, zeros((TILE, missing), x.dtype)], 1) if missing else x


def fits_tma(tokens: int, head_dim: int) -> bool:
  """Whether the kernels' blocks suit such heads: rows of whole 16 bytes, and two tiles of them."""
  return 64 <= head_dim <= 128 and head_dim % 8 == 0 and TILE < tokens <= 4 * TILE + 1


def swizzled(shape, columns, dtype):
  """Shared memory for wgmma, tiled in blocks of `columns`, of which the last axis is a multiple."""
  transforms = plgpu.TilingTransform((8, columns)), _swizzle(columns, dtype)
  return plgpu.SMEM(shape, dtype, transforms=transforms)


def _swizzle(columns, dtype):
  return plgpu.SwizzleTransform(columns * jnp.dtype(dtype).itemsize)


def tiled(buffers, rows, columns, dtype, *others):
  """Shared memory of 16, 32 or 64 columns under two names: for wgmma and for TMA.

  wgmma's is tiled. TMA's is not, since it clips whole rows to an array, of which 8 need not divide
  the tokens. With one tile a row, both lay the same bytes out. `others` are further names, which
  come first.
  """
  shape = (buffers, rows, columns) if buffers else (rows, columns)
  for_tma = plgpu.SMEM(shape, dtype, transforms=(_swizzle(columns, dtype),))
  return plgpu.RefUnion(*others, swizzled(shape, columns, dtype), for_tma)


def by_name(blocks, names: int = 2) -> list[tuple[Any, ...]]:
  """A tuple of the blocks for each of their names."""
  return [tuple(block[name] for block in blocks) for name in range(names)]
