"""How a warpgroup's part of an output block leaves the Mosaic matmul: scaled, added to, stored."""

import dataclasses
import itertools
import math
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax


def factors_of(scales, at, shape):
  """For the part `shape` of the output at `at`: what multiplies its rows, and its columns."""
  if not scales:
    return None
  row, column = (_vector(scales[axis], at[axis], shape[axis], axis) for axis in (0, 1))
  if scales[1].shape == (1,):
    return row * column, None
  return (None, row * column) if scales[0].shape == (1,) else (row, column)


def bias_of(scales, at, columns):
  """For so many columns of the output at `at`: what is added to them, or None."""
  return _vector(scales[2], at[1], columns, 1) if len(scales) == 3 else None


def _vector(vector, start, size, axis):
  """A part of what belongs to the output's rows (axis 0) or columns, as registers hold these."""
  if vector.shape == (1,):
    return vector[0]
  layout = plgpu.Layout.WGMMA.reduce(1 - axis)
  return plgpu.load(vector.at[pl.ds(start, size)], layout=layout, optimized=False)


def scaled(total, factors, bias):
  """`total * (row * column) + bias`."""
  if factors is None:
    return total

  def spread(vector, axis):
    return lax.broadcast_in_dim(vector, total.shape, (axis,) if vector.ndim else ())

  factor = [spread(v, axis) for axis, v in enumerate(factors) if v is not None]
  y = total.astype(jnp.float32) * math.prod(factor[1:], start=factor[0])
  return y if bias is None else y + spread(bias, 1)


@dataclasses.dataclass(frozen=True)
class Pieces:
  """A warpgroup's part `shape` of the output at `at`: it goes out in pieces through two buffers.

  What is to be added comes in through the same two, the first pieces of it during the products.
  """

  out: Any
  addend: Any | None
  at: tuple
  shape: tuple[int, int]
  buffers: Any  # [2, rows, columns]
  fetched: Any  # A barrier for each buffer of each warpgroup.

  @property
  def corners(self) -> list[tuple[int, int]]:
    steps = self.buffers.shape[-2:]
    return list(itertools.product(*map(range, (0, 0), self.shape, steps)))

  def place(self, corner) -> tuple:
    """Where in the output a piece lies."""
    steps = self.buffers.shape[-2:]
    return tuple(pl.ds(at + c, size) for at, c, size in zip(self.at, corner, steps, strict=True))

  def arrived(self, i: int):
    return self.fetched.at[lax.axis_index("warpgroup") * 2 + i % 2]

  def fetch(self, first: int) -> None:
    """Asks for what is added to two pieces, as soon as their buffers are free."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for i, corner in enumerate(self.corners[first : first + 2]):
      piece = self.addend.at[self.place(corner)]
      plgpu.copy_gmem_to_smem(piece, self.buffers.at[i], self.arrived(i))

  def store(self, y) -> None:
    """Writes y, which is float32 if there is something to add."""
    rows, columns = self.buffers.shape[-2:]
    for i, (r, c) in enumerate(self.corners):
      buffer, piece = self.buffers.at[i % 2], y[r : r + rows, c : c + columns]
      if self.addend is None:
        # After an odd number of pieces the block before has left the first buffer in use.
        is_used = i == 0 and len(self.corners) % 2
        plgpu.wait_smem_to_gmem(0 if is_used else 1, wait_read_only=True)
      else:
        if i and i % 2 == 0:
          self.fetch(i)
        plgpu.barrier_wait(self.arrived(i))
        piece += plgpu.load(buffer, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        plgpu.commit_smem()  # All have read what is now overwritten.
      buffer[...] = piece.astype(self.out.dtype)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(buffer, self.out.at[self.place((r, c))])
