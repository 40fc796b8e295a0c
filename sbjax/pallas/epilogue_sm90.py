"""How a warpgroup's part of an output block leaves the Mosaic matmul: scaled, added to, stored."""

import dataclasses
import itertools
import math
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

_AXES = (0, 1, 1)  # Of the rows' scales, the columns' scales and the bias.
_REGISTERS = 160  # So many of a thread for the sums and what waits beside them; in all it has 240.


def scaling_of(scales, at, shape, piece):
  """How pieces of the part `shape` of the output at `at` are scaled: a function of (sums, corner).

  Scales and bias are asked for here, before the products, so that they are there after them. Those
  of columns are read piece by piece where the sums leave no registers for them.
  """
  axes = _AXES[: len(scales)]

  def load(which, offset):
    vector, axis = scales[which], axes[which]
    if vector.shape == (1,):
      return vector[0]
    part = vector.at[pl.ds(at[axis] + offset, piece[axis])]
    layout = plgpu.Layout.WGMMA.reduce(1 - axis)
    return plgpu.load(part, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]

  held, registers = {}, math.prod(shape) // 128
  for which, axis in enumerate(axes):
    is_large = axis == 1 and scales[which].shape != (1,)
    registers += is_large * shape[1] // 4
    if not is_large or registers <= _REGISTERS:
      for offset in range(0, shape[axis], piece[axis]):
        held[which, offset] = load(which, offset)

  def scaled(total, corner):
    """`total * (row * column) + bias`."""
    if not scales:
      return total
    keys = [(which, corner[axis]) for which, axis in enumerate(axes)]
    vectors = [held[key] if key in held else load(*key) for key in keys]
    row, column, *bias = (
      lax.broadcast_in_dim(vector, total.shape, (axis,) if vector.ndim else ())
      for vector, axis in zip(vectors, axes, strict=True)
    )
    y = total.astype(jnp.float32) * (row * column)
    return y + bias[0] if bias else y

  return scaled


@dataclasses.dataclass(frozen=True)
class Pieces:
  """A warpgroup's part `shape` of the output at `at`: it goes out in pieces through two buffers.

  What is to be added comes in through the same two, the first pieces of it during the products.
  """

  out: Any
  residual: Any  # or None
  at: tuple
  shape: tuple[int, int]
  buffers: Any  # [2, rows, columns]
  fetched: Any  # A barrier for each buffer of each warpgroup.

  @property
  def corners(self) -> list[tuple[int, ...]]:
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
      piece = self.residual.at[self.place(corner)]
      plgpu.copy_gmem_to_smem(piece, self.buffers.at[i], self.arrived(i))

  def store(self, total, scaled) -> None:
    """Writes the sums as `scaled` makes them, in float32 if there is something to add."""
    rows, columns = self.buffers.shape[-2:]
    for i, (r, c) in enumerate(self.corners):
      buffer = self.buffers.at[i % 2]
      piece = scaled(total[r : r + rows, c : c + columns], (r, c))
      if self.residual is None:
        # After an odd number of pieces its own block before has left the first buffer in use.
        is_used = i == 0 and len(self.corners) % 2
        plgpu.wait_smem_to_gmem(0 if is_used else 1, wait_read_only=True)
      else:
        if i and i % 2 == 0:
          self.fetch(i)
        plgpu.barrier_wait(self.arrived(i))
        residual = plgpu.load(buffer, layout=plgpu.Layout.WGMMA)  # pyright: ignore[reportCallIssue]
        piece += residual.astype(jnp.float32)
        plgpu.commit_smem()  # All have read what is now overwritten.
      buffer[...] = piece.astype(self.out.dtype)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(buffer, self.out.at[self.place((r, c))])
