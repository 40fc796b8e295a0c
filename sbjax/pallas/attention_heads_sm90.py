"""The heads of a kernel of attention on Hopper, and which of them a thread block has."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from sbjax.ops import device as devices
from sbjax.pallas.attention_parts_sm90 import TILE, by_name, tiled

MEMORY_REGISTERS, COMPUTE_REGISTERS = 40, 232  # Of a thread, in kernels without a config.


def barriers_of(arrivals: dict[str, tuple[int, int]]) -> dict:
  """Barriers for `pl.run_scoped`: how many signals each awaits, and how many there are, by name."""
  return {
    name: plgpu.Barrier(num_arrivals=n, num_barriers=count) for name, (n, count) in arrivals.items()
  }


@dataclasses.dataclass(frozen=True)
class Heads:
  """The constants of a kernel."""

  batch: int
  tokens: int
  heads: int
  head_dim: int
  dtype: jnp.dtype
  causal: bool

  @classmethod
  def of(cls, qkv: Sequence[jax.Array], causal: bool, *more) -> Self:
    """Of q, k and v as one array or three; `more` are a subclass's own constants."""
    batch, tokens, _, heads, head_dim = qkv[0].shape
    return cls(batch, tokens, heads, head_dim, jnp.dtype(qkv[0].dtype), causal, *more)

  @property
  def tiles(self) -> int:
    return pl.cdiv(self.tokens, TILE)

  @property
  def widths(self) -> tuple[int, ...]:
    """Of blocks of columns: multiples of 16 up to 64, the last maybe too wide."""
    raise NotImplementedError

  @property
  def blocks(self) -> range:
    return range(len(self.widths))

  @property
  def scale(self) -> float:
    return self.head_dim**-0.5

  def of_blocks(self, buffers: int, rows: int) -> list:
    """Shared memory of a head's rows, by blocks of columns."""
    return [tiled(buffers, rows, width, self.dtype) for width in self.widths]

  def thread_blocks(self, num_sms: int | None) -> int:
    """How many run; None for one on each SM of the device."""
    return min(self.batch * self.heads, num_sms or devices.num_sms(devices.target()) or 132)


class ThreadBlock:
  """Its shared memory and arrays, by name, and which heads are its own: the i-th is `item(i)`.

  Buffers with blocks of columns are two tuples: `q` for wgmma and `q_rows` for TMA, and so on.
  """

  def __init__(self, heads: Heads, shared: dict):
    self.heads = heads
    for name, ref in shared.items():
      if isinstance(ref, list | tuple):
        tiles, rows = by_name(ref)
        setattr(self, name, tiles)
        setattr(self, f"{name}_rows", rows)
      else:
        setattr(self, name, ref)
    self.warpgroup = lax.axis_index("warpgroup")
    self.sm, self.sms = lax.axis_index("sm"), lax.axis_size("sm")
    self.items = (heads.batch * heads.heads - self.sm + self.sms - 1) // self.sms

  if TYPE_CHECKING:

    def __getattr__(self, name: str) -> Any: ...

  def wait_for_last(self, signals, used, count):
    """Waits for the last of `used` signals: a warpgroup must observe each."""
    for n in range(count):
      wait = functools.partial(plgpu.barrier_wait, signals.at[(used + n) % count])
      pl.when(used + n >= count)(wait)

  def item(self, i):
    """The head's number, with those of an example in a row."""
    return self.sm + i * self.sms

  def head(self, arrays, which, item, rows, block):
    """Rows and a block of columns of a head, in global memory.

    Args:
      arrays: one [B, L, 3, H, D] or three [B, L, 1, H, D], of q, k and v; or one [B, L, 1, H, D].
      which: 0, 1, 2 for q, k, v.
    """
    heads = self.heads
    array, index = (arrays[0], which) if len(arrays) == 1 else (arrays[which], 0)
    first, width = sum(heads.widths[:block]), heads.widths[block]
    # TMA clips a block that is wider than the rest of a head. Pallas rejects such a slice if it is
    # constant.
    columns = pl.ds(first if first + width <= heads.head_dim else item * 0 + first, width)
    return array.at[item // heads.heads, rows, index, item % heads.heads, columns]
