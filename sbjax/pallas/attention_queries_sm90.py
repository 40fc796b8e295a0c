"""Tiles of queries pass a head's keys: what attention's forward pass and dQ share on Hopper.

A head's keys and values stay in shared memory. Two compute warpgroups take tiles of 64 queries in
turns: one's exponentials hide behind the other's products. A third one loads ahead.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from sbjax.pallas.attention_heads_sm90 import Heads, ThreadBlock
from sbjax.pallas.attention_parts_sm90 import (
  COMPUTE_WARPGROUPS,
  TILE,
  first_column,
  sums,
  varying,
)

MEMORY_REGISTERS, COMPUTE_REGISTERS = 40, 232  # Of a thread.
SHARED_MEMORY = 232_448  # Bytes that a thread block can have.


@dataclasses.dataclass(frozen=True)
class TilePlan(Heads):
  """The constants of a kernel that takes a tile of queries and all keys at a time."""

  @property
  def has_tail(self) -> bool:
    """Whether the last key, such as a class token's, is apart from tiles of 64."""
    return self.tokens % TILE == 1

  @property
  def columns(self) -> int:
    """Columns of logits but for the tail's: wgmma computes multiples of 8."""
    return pl.cdiv(self.tokens - self.has_tail, 8) * 8

  @property
  def keys(self) -> int:
    """Keys in shared memory, of which those beyond the last token are zeros."""
    return pl.cdiv(self.columns, TILE) * TILE

  @functools.cached_property
  def widths(self) -> tuple[int, ...]:
    columns = pl.cdiv(self.head_dim, 16) * 16
    rest = (width for width in (32, 16) if columns % (2 * width) >= width)
    return (TILE,) * (columns // TILE) + tuple(rest)

  def stages(self, arrays: int) -> tuple[int, int]:
    """How many heads' keys and values fit in shared memory, and how many tiles of queries.

    Args:
      arrays: of as many rows as the queries.
    """

    def fits(kv_stages, stages):
      rows = 2 * kv_stages * (self.keys + 8) + (stages + COMPUTE_WARPGROUPS * (arrays - 1)) * TILE
      return rows * sum(self.widths) * self.dtype.itemsize + 4096 <= SHARED_MEMORY

    return next(n for n in ((2, 4), (2, 2), (1, 4), (1, 2)) if fits(*n))

  def keys_and_values(self, kv_stages: int) -> dict:
    """Buffers by name. The tail's key and value are the first of 8 rows."""
    names = {"k": self.keys, "v": self.keys, "tail_k": 8, "tail_v": 8}
    return {name: self.of_blocks(kv_stages, rows) for name, rows in names.items()}

  def barriers(self, kv_stages: int, stages: dict[str, int]) -> dict:
    """Barriers by name; `stages` are of arrays of tiles of queries, by name."""
    copies = len(self.widths)
    found = {
      "k_loaded": _barrier(copies * (1 + self.has_tail), kv_stages),
      "v_loaded": _barrier(copies * (1 + self.has_tail), kv_stages),
      "kv_free": _barrier(COMPUTE_WARPGROUPS, kv_stages),
    }
    for name, count in stages.items():
      found |= {f"{name}_loaded": _barrier(copies, count), f"{name}_free": _barrier(1, count)}
    return found


def _barrier(arrivals, count):
  return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


class TilesOfQueries(ThreadBlock):
  """A thread block, and its warpgroups' loops.

  An array of tiles of queries has a power of two of buffers, so that each is always the same
  warpgroup's.
  """

  heads: TilePlan

  def __init__(
    self, heads: TilePlan, qkv: Sequence, kv_stages: int, stages: dict[str, int], shared: dict
  ):
    super().__init__(heads, shared)
    self.qkv, self.kv_stages, self.stages = qkv, kv_stages, stages

  def array(self, name) -> tuple[Sequence, int]:
    """An array of tiles of queries, as `ThreadBlock.head` takes it."""
    raise NotImplementedError

  def tile(self, i, tile):
    """Computes a tile of queries."""
    raise NotImplementedError

  def slots(self, i, tile):
    """The tile's number, and the buffer of the head's keys."""
    step = i * self.heads.tiles + tile
    return step, i % self.kv_stages + varying(step)

  def run(self):
    pl.when(self.warpgroup == COMPUTE_WARPGROUPS)(self.load_all)
    pl.when(self.warpgroup < COMPUTE_WARPGROUPS)(self.compute_all)

  def load_all(self):
    """Loads all heads, and tiles of queries, as buffers become free."""
    plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
    tiles, (first, *others) = self.heads.tiles, self.stages

    @pl.loop(0, self.items)
    def _(i):
      slot = i % self.kv_stages
      pl.when(i >= self.kv_stages)(lambda: plgpu.barrier_wait(self.kv_free.at[slot]))
      self.load_head(i, 1, self.k_rows, self.tail_k_rows, self.k_loaded)

      @pl.loop(0, tiles)
      def _(tile):
        self.load_tile(first, i, tile)

        @pl.when(tile == 0)
        def _():
          self.load_head(i, 2, self.v_rows, self.tail_v_rows, self.v_loaded)

        for name in others:
          self.load_tile(name, i, tile)

    # A warpgroup must observe each signal.
    for name, count in self.stages.items():
      self.wait_for_last(getattr(self, f"{name}_free"), self.items * tiles, count)
    self.wait_for_last(self.kv_free, self.items, self.kv_stages)

  def wait_for_last(self, barriers, used, count):
    for n in range(count):
      wait = functools.partial(plgpu.barrier_wait, barriers.at[(used + n) % count])
      pl.when(used + n >= count)(wait)

  def load_head(self, i, which, buffers, tails, loaded):
    """Loads a head's keys, or its values with which = 2."""
    slot, heads = i % self.kv_stages, self.heads

    def load(first, buffer, b):
      rows = pl.ds(i * 0 + first, buffer.shape[1])
      rows = self.head(self.qkv, which, self.item(i), rows, b)
      plgpu.copy_gmem_to_smem(rows, buffer.at[slot], loaded.at[slot])

    for b in heads.blocks:
      load(0, buffers[b], b)
      if heads.has_tail:
        load(heads.tokens - 1, tails[b], b)

  def load_tile(self, name, i, tile):
    step, count = i * self.heads.tiles + tile, self.stages[name]
    slot = step % count
    pl.when(step >= count)(lambda: plgpu.barrier_wait(getattr(self, f"{name}_free").at[slot]))
    for b in self.heads.blocks:
      rows = self.head(*self.array(name), self.item(i), pl.ds(tile * TILE, TILE), b)
      to = getattr(self, f"{name}_rows")[b].at[slot]
      plgpu.copy_gmem_to_smem(rows, to, getattr(self, f"{name}_loaded").at[slot])

  def compute_all(self):
    """Computes each second tile of queries."""
    plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
    tiles = self.heads.tiles

    @pl.loop(0, self.items)
    def _(i):
      plgpu.barrier_wait(self.k_loaded.at[i % self.kv_stages])
      first = (self.warpgroup + i * tiles) % COMPUTE_WARPGROUPS
      own = (tiles - first + COMPUTE_WARPGROUPS - 1) // COMPUTE_WARPGROUPS
      pl.loop(0, own)(lambda n: self.tile(i, first + n * COMPUTE_WARPGROUPS))
      plgpu.barrier_arrive(self.kv_free.at[i % self.kv_stages])

    plgpu.wait_smem_to_gmem(0)

  def wait_for_values(self, i, tile):
    """The warpgroup's first tile of a head waits."""
    wait = functools.partial(plgpu.barrier_wait, self.v_loaded.at[i % self.kv_stages])
    pl.when(tile < COMPUTE_WARPGROUPS)(wait)

  def products(self, left, slot, right, tail, kv_slot, first, count):
    """Of a tile of queries with keys or values, [TILE, count], and with the tail's, [TILE]."""

    def both(acc, *tail_acc):
      for b in self.heads.blocks:
        rows = right[b].at[kv_slot, pl.ds(first, count)].transpose((1, 0))
        plgpu.wgmma(acc, left[b].at[slot], rows)
        for acc_ in tail_acc:
          plgpu.wgmma(acc_, left[b].at[slot], tail[b].at[kv_slot].transpose((1, 0)))
      return [acc[...], *(first_column(acc_[...]) for acc_ in tail_acc)]

    with_tail = self.heads.has_tail and first == 0
    return pl.run_scoped(both, sums(TILE, count), *[sums(TILE, 8)] * with_tail)

  def hidden(self, tile, first, count):
    """Which keys count for nothing: beyond the last token, or later than the query; or None."""
    heads, layout, shape = self.heads, plgpu.Layout.WGMMA, (TILE, count)
    key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout) + first
    last = heads.tokens - 1
    if heads.causal:
      last = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + tile * TILE
      # A row beyond the last token is not stored.
    elif first + count <= heads.tokens:
      return None
    return key > last

  def tail_is_hidden(self, tile):
    if not self.heads.causal:
      return None
    row = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
    return row + tile * TILE < self.heads.tokens - 1
