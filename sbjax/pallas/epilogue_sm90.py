"""The epilogue of the Mosaic matmul: scales a warpgroup's sums, adds a residual, and stores."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

_AXES = (0, 1, 1)  # The output axis that lhs' scales, rhs' scales and the bias belong to.
# Of a thread's 240 registers, those for sums and for vectors that are loaded ahead.
_REGISTERS = 160


def scale_function(scales, origin, shape, tile) -> Callable:
  """Loads scales and bias; returns scale(total, offset), which applies them to an epilogue tile.

  `shape` is a warpgroup's part of the output and lies at `origin`; `tile` is the shape of its
  epilogue tiles, and `offset` is where one lies in it. The loads start here, before the products,
  to hide their latency. Column vectors for which the sums leave no registers are loaded for each
  epilogue tile instead.
  """
  axes = _AXES[: len(scales)]

  def load(which, offset):
    vector, axis = scales[which], axes[which]
    if vector.shape == (1,):
      return vector[0]
    part = vector.at[pl.ds(origin[axis] + offset, tile[axis])]
    layout = plgpu.Layout.WGMMA.reduce(1 - axis)
    return plgpu.load(part, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]

  loaded, registers = {}, math.prod(shape) // 128
  for which, axis in enumerate(axes):
    is_column_vector = axis == 1 and scales[which].shape != (1,)
    registers += is_column_vector * shape[1] // 4
    if not is_column_vector or registers <= _REGISTERS:
      for offset in range(0, shape[axis], tile[axis]):
        loaded[which, offset] = load(which, offset)

  def scale(total, offset):
    """`total * (lhs_scale * rhs_scale) + bias`."""
    if not scales:
      return total
    keys = [(which, offset[axis]) for which, axis in enumerate(axes)]
    vectors = [loaded[key] if key in loaded else load(*key) for key in keys]
    lhs_scale, rhs_scale, *bias = (
      lax.broadcast_in_dim(vector, total.shape, (axis,) if vector.ndim else ())
      for vector, axis in zip(vectors, axes, strict=True)
    )
    y = total.astype(jnp.float32) * (lhs_scale * rhs_scale)
    return y + bias[0] if bias else y

  return scale


@dataclasses.dataclass(frozen=True)
class EpilogueTiles:
  """A warpgroup's part of the output, which is stored tile by tile through two buffers.

  The residual's tiles are fetched into the same buffers, the first two during the products.
  """

  out: Any
  residual: Any  # or None
  origin: tuple  # Where the part lies in the output.
  shape: tuple[int, int]
  buffers: Any  # [2, rows, columns]
  fetched_barriers: Any  # One for each buffer of each warpgroup.

  @property
  def offsets(self) -> list[tuple[int, ...]]:
    """Where the tiles lie in the part."""
    steps = self.buffers.shape[-2:]
    return list(itertools.product(*map(range, (0, 0), self.shape, steps)))

  def slices(self, offset) -> tuple:
    """Where in the output the tile at `offset` lies."""
    sizes = self.buffers.shape[-2:]
    return tuple(
      pl.ds(start + o, size) for start, o, size in zip(self.origin, offset, sizes, strict=True)
    )

  def barrier(self, i: int):
    return self.fetched_barriers.at[lax.axis_index("warpgroup") * 2 + i % 2]

  def fetch(self, first: int) -> None:
    """Starts to load two tiles of the residual once the stores have left the buffers."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for i, offset in enumerate(self.offsets[first : first + 2]):
      tile = self.residual.at[self.slices(offset)]
      plgpu.copy_gmem_to_smem(tile, self.buffers.at[i], self.barrier(i))

  def store(self, total, scale) -> None:
    """Scales the sums, adds the residual in float32, casts and stores."""
    rows, columns = self.buffers.shape[-2:]
    for i, (r, c) in enumerate(self.offsets):
      buffer = self.buffers.at[i % 2]
      tile = scale(total[r : r + rows, c : c + columns], (r, c))
      if self.residual is None:
        # If tiles are odd in number, the previous block's last store also used the first buffer.
        is_used = i == 0 and len(self.offsets) % 2
        plgpu.wait_smem_to_gmem(0 if is_used else 1, wait_read_only=True)
      else:
        if i and i % 2 == 0:
          self.fetch(i)
        plgpu.barrier_wait(self.barrier(i))
        residual = plgpu.load(buffer, layout=plgpu.Layout.WGMMA)  # pyright: ignore[reportCallIssue]
        tile += residual.astype(jnp.float32)
        plgpu.commit_smem()  # All threads have read the buffer, which is overwritten next.
      buffer[...] = tile.astype(self.out.dtype)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(buffer, self.out.at[self.slices((r, c))])
