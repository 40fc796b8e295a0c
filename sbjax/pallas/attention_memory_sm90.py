"""The memory warpgroup of attention's backward pass on Hopper.

It loads ahead (TMA), and computes what all keys need of a query: lse in base 2, and delta, the sum
of o * dO. It also has a class token's key, the tail: 257 tokens are 256 keys for the compute
warpgroups, and one for this one.
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from sbjax.pallas.attention_block_sm90 import Block
from sbjax.pallas.attention_parts_sm90 import (
  BY_COLUMN,
  BY_ROW,
  LOG2_E,
  TILE,
  first_column,
  in_first_row,
  load,
  sums,
  varying,
)


class MemoryWarpgroup:
  """Its methods run in all threads of the warpgroup."""

  def __init__(self, block: Block):
    self.block, self.plan = block, block.plan

  def run(self):
    block, plan = self.block, self.plan
    plgpu.set_max_registers(plan.config.memory_registers, action="decrease")
    self.load_keys(jnp.int32(0))
    for step in range(0 if plan.has_sums else plan.o_stages):
      self.load_o(jnp.int32(step))
    for step in range(plan.stages - 1):
      self.load_queries(jnp.int32(step))
    if plan.kv_stages == 2:
      self.load_keys(jnp.int32(1))

    @pl.loop(0, block.items)
    def _(i):
      for part in range(plan.parts):
        self.keys(i, part)

    # These load nothing. They wait for the last signals, since a warpgroup must observe each.
    self.load_queries(block.items * plan.parts * plan.tiles + plan.stages - 1)
    if plan.kv_stages == 2:
      self.load_keys(block.items * plan.parts + 1)
    if plan.has_tail:
      plgpu.wait_smem_to_gmem(0)

  def keys(self, i, part):
    """Serves a part of the i-th head's keys, the last of which has the tail."""
    block, plan = self.block, self.plan
    unit = i * plan.parts + part
    kv_slot = unit % plan.kv_stages
    # The gradients of 64 columns are transposed: a product has at least 64 rows.
    accs = [sums(TILE, 8 if width == TILE else width) for width in plan.widths]
    of_tail = plan.has_tail and part == plan.parts - 1

    def all_queries(*accs):
      def queries(tile):
        self.queries(i, part, tile, *accs)

      def queries_and_keys(tile):
        queries(tile)
        pl.when((unit > 0) & (tile == 0))(lambda: self.load_keys(unit + 1))

      # Keys and values are loaded when all warpgroups are about to leave the previous ones.
      if plan.kv_stages == 2 and plan.parts == 1:
        # With heads of 64 one loop spills registers, with parts of wider ones this form does.
        queries_and_keys(0)
        pl.loop(1, plan.tiles)(queries)
      else:
        pl.loop(0, plan.tiles)(queries_and_keys if plan.kv_stages == 2 else queries)
      if plan.has_tail:
        plgpu.barrier_arrive(block.kv_free.at[kv_slot])
      if of_tail:
        self.store_tail(i, *accs)

    if plan.has_tail:
      plgpu.barrier_wait(block.kv_loaded.at[kv_slot])
    pl.run_scoped(all_queries, *[accs] * 2 * of_tail)
    if plan.kv_stages == 1:
      self.load_keys(unit + 1)

  def queries(self, i, part, tile, *accs):
    """Makes what all keys need of a tile of queries, and the tail key's gradients of it."""
    block, plan = self.block, self.plan
    step = (i * plan.parts + part) * plan.tiles + tile
    slot, kept = step % plan.stages, block.kept(i * plan.tiles + tile)
    if part == 0:
      lse2, delta = self.lse_and_delta(i, tile, slot, kept)
    else:
      plgpu.barrier_wait(block.loaded.at[slot])
      lse2, delta = (load(block.of_query.at[kept, n], BY_ROW) for n in range(2))
    if accs:
      kv_slot = (i * plan.parts + part) % plan.kv_stages + varying(step)
      ds = self.tail(slot, kv_slot, tile, lse2, delta)
      if plan.has_dq:
        block.of_query.at[kept, 2][...] = ds
    if part == 0 or accs:
      plgpu.commit_smem()  # All warps have read o, too.
    if accs and not plan.has_dq:
      to = block.ds_of(block.item(i), i * 0 + plan.tokens - 1, 8, tile)
      plgpu.copy_smem_to_gmem(block.tail_ds_rows, to)
    if part == 0 or (accs and plan.has_dq):
      plgpu.barrier_arrive(block.ready.at[slot])
    if part == 0 and not plan.has_sums:
      self.load_o(i * plan.tiles + tile + plan.o_stages)
    if accs:
      self.tail_gradients(slot, *accs)
    self.free_queries(step)

  def lse_and_delta(self, i, tile, slot, kept):
    """Stores lse in base 2, and the sums of o * dO, of a tile of queries."""
    block, plan = self.block, self.plan
    o_barrier, o_slot = self.o_slots(i * plan.tiles + tile)
    # TMA would need an address that is a multiple of 16 bytes.
    first = block.item(i) * plan.tokens + tile * TILE
    lse2 = load(block.lse.at[pl.ds(first, TILE)], BY_ROW) * LOG2_E
    plgpu.barrier_wait(block.loaded.at[slot])
    plgpu.barrier_wait(block.o_loaded.at[o_barrier])
    row = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=BY_ROW)
    # lse beyond the last token is another head's, and must count for nothing.
    lse2 = jnp.where(row < plan.tokens - tile * TILE, lse2, jnp.inf)
    delta = sum(
      jnp.sum(
        block.o[n].at[o_slot][...].astype(jnp.float32)
        * block.do[n].at[slot][...].astype(jnp.float32),
        axis=1,
      )
      for n in plan.blocks
    )
    block.of_query.at[kept, 0][...] = lse2
    block.of_query.at[kept, 1][...] = delta
    return lse2, delta

  def free_queries(self, step):
    plgpu.barrier_arrive(self.block.free.at[step % self.plan.stages])
    self.load_queries(step + self.plan.stages - 1)

  def tail(self, slot, kv_slot, tile, lse2, delta):
    """Stores the tail key's probabilities and dS in shared memory, and returns dS."""
    block, plan = self.block, self.plan

    def products(s_acc, dp_acc):
      for n in plan.blocks:
        k, v = (block.tail_kv[n].at[2 * kv_slot + m].transpose((1, 0)) for m in range(2))
        plgpu.wgmma(s_acc, block.q[n].at[slot], k)
        plgpu.wgmma(dp_acc, block.do[n].at[slot], v)
      return [first_column(acc[...]) for acc in (s_acc, dp_acc)]

    s, dp = pl.run_scoped(products, *[sums(TILE, 8)] * 2)
    p = jnp.exp2(s * (plan.scale * LOG2_E) - lse2)
    if plan.causal:
      row = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=BY_ROW)
      p = jnp.where(row >= plan.tokens - 1 - tile * TILE, p, 0.0)
    ds = p * (dp - delta)
    if not plan.has_dq:
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # The previous tile's dS has left.
    block.tail_p_rows.at[0][...] = p.astype(plan.dtype)
    block.tail_ds_rows.at[0][...] = ds.astype(plan.dtype)
    return ds

  def tail_gradients(self, slot, dk_accs, dv_accs):
    """Adds the tile's queries to the gradients of the tail key and its value."""
    block, plan = self.block, self.plan
    for accs, queries, tile, rows in (
      (dk_accs, block.q, block.tail_ds, block.tail_ds_rows),
      (dv_accs, block.do, block.tail_p, block.tail_p_rows),
    ):
      for acc, width, operand in zip(accs, plan.widths, queries, strict=True):
        if width == TILE:
          plgpu.wgmma(acc, operand.at[slot].transpose((1, 0)), tile.transpose((1, 0)))
        else:
          plgpu.wgmma(acc, in_first_row(load(rows.at[0], BY_COLUMN)), operand.at[slot])
    plgpu.wgmma_wait(0)
    plgpu.commit_smem()  # All warps have read the tail's rows.

  def store_tail(self, i, dk_accs, dv_accs):
    """Stores the gradients of the tail key and its value."""
    block, plan = self.block, self.plan
    for which, accs, factor in ((1, dk_accs, plan.scale), (2, dv_accs, 1.0)):
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      for n, acc in enumerate(accs):
        if plan.widths[n] == TILE:
          gradient = (first_column(acc[...]) * factor).astype(plan.dtype)
          block.tail_out_rows[n].at[0][...] = gradient
        else:
          block.tail_out[n][...] = (acc[...] * factor).astype(plan.dtype)
      plgpu.commit_smem()
      for n, ref in enumerate(block.tail_out_rows):
        rows = pl.ds(i * 0 + plan.tokens - 1, ref.shape[0])  # TMA clips all but the first.
        plgpu.copy_smem_to_gmem(ref, block.head(block.dqkv, which, block.item(i), rows, n))

  def load_queries(self, step):
    """Starts to load a tile of q and dO for a part of the keys, if there is one."""
    block, plan = self.block, self.plan
    slot, (unit, tile) = step % plan.stages, divmod(step, plan.tiles)
    i = unit // plan.parts
    pl.when(step >= plan.stages)(lambda: plgpu.barrier_wait(block.free.at[slot]))
    arrays = (block.qkv, block.q_rows), ([block.do_array], block.do_rows)
    self._load_tile(i, tile, arrays, slot, block.loaded.at[slot])
    if plan.has_sums:
      block.if_part(unit, 0, lambda: self.load_o(i * plan.tiles + tile))

  def load_o(self, step):
    """Starts to load a tile of o, if there is one; its buffer is free. Parts do not count."""
    block, (i, tile) = self.block, divmod(step, self.plan.tiles)
    barrier, slot = self.o_slots(step)
    arrays = (([block.o_array], block.o_rows),)
    self._load_tile(i, tile, arrays, slot, block.o_loaded.at[barrier])

  def o_slots(self, step):
    """Of a tile of o: its barrier's, and its own."""
    barrier = step % self.plan.o_stages
    return barrier, self.block.in_sums(step) if self.plan.has_sums else barrier

  def _load_tile(self, i, tile, arrays, slot, barrier):
    block = self.block

    @pl.when(i < block.items)
    def _():
      for array, buffers in arrays:
        for n in self.plan.blocks:
          rows = block.head(array, 0, block.item(i), pl.ds(tile * TILE, TILE), n)
          plgpu.copy_gmem_to_smem(rows, buffers[n].at[slot], barrier)

  def load_keys(self, unit):
    """Starts to load the keys and values of a unit, if there is one."""
    block, plan = self.block, self.plan
    slot, part, item = unit % plan.kv_stages, unit % plan.parts, block.item(unit // plan.parts)
    pl.when(unit >= plan.kv_stages)(lambda: plgpu.barrier_wait(block.kv_free.at[slot]))

    def copy(which, first, buffers):
      for n, to in enumerate(buffers):
        rows = pl.ds(unit * 0 + first, to.shape[0])
        from_ = block.head(block.qkv, which, item, rows, n)
        plgpu.copy_gmem_to_smem(from_, to, block.kv_loaded.at[slot])

    @pl.when(unit < block.items * plan.parts)
    def _():
      for which, buffers in ((1, block.k_rows), (2, block.v_rows)):
        for first in range(0, plan.keys, TILE):
          to = [ref.at[slot, pl.ds(first, TILE)] for ref in buffers]
          copy(which, part * plan.keys + first, to)
        if plan.has_tail:
          to = [ref.at[2 * slot + which - 1] for ref in block.tail_kv_rows]
          copy(which, plan.tokens - 1, to)
