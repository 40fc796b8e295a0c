"""A compute warpgroup of attention's backward pass on Hopper.

It owns half of the keys, and holds the gradients of them and their values in registers.
Probabilities are computed transposed, [keys, queries]: as registers they are then the left operand
of the products with dO and Q. Both warpgroups write dS to shared memory, and take turns to multiply
a tile's dS with all keys.
"""

import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from sbjax.pallas.attention_block_sm90 import Block
from sbjax.pallas.attention_parts_sm90 import (
  BY_COLUMN,
  BY_ROW,
  LOG2_E,
  TILE,
  across,
  load,
  load_if,
  sums,
  varying,
  with_zeros,
)


class ComputeWarpgroup:
  """Its methods run in all threads of the warpgroup."""

  def __init__(self, block: Block):
    self.block, self.plan = block, block.plan
    self.first_key = block.warpgroup * block.plan.own_keys

  def run(self):
    block, plan = self.block, self.plan
    plgpu.set_max_registers(plan.config.compute_registers, action="increase")

    @pl.loop(0, block.items * plan.parts)
    def _(unit):
      plgpu.barrier_wait(block.kv_loaded.at[unit % plan.kv_stages])
      accs = [[sums(TILE, width) for width in plan.widths]] * (plan.own_keys // TILE)
      pl.run_scoped(functools.partial(self.unit, unit), accs, accs)

    plgpu.wait_smem_to_gmem(0)

  def unit(self, unit, dk_accs, dv_accs):
    """Computes the gradients of the warpgroup's keys of a unit, and of half of its queries."""
    block, plan = self.block, self.plan

    def tile_of_queries(tile, queries):
      self.gradients(unit, tile, dk_accs, dv_accs, queries)
      if not plan.has_dq:
        self.send_logit_gradients(unit, tile)
      else:
        if plan.has_tail and plan.parts > 1:
          ready = block.ready.at[self.slots(unit, tile)[0]]  # Of the tail key's dS.
          block.if_part(unit, plan.parts - 1, lambda: plgpu.barrier_wait(ready))
        plgpu.commit_smem()
        plgpu.barrier_arrive(block.ds_ready.at[self.owner(unit, tile)])
      plgpu.barrier_arrive(block.free.at[self.slots(unit, tile)[0]])
      if plan.has_dq:
        self.query_gradient_if_own(unit, tile - plan.dq_lag)

    has_short_tile = plan.last_queries < TILE
    pl.loop(0, plan.tiles - has_short_tile)(lambda tile: tile_of_queries(tile, TILE))
    if has_short_tile:
      tile_of_queries(plan.tiles - 1 + varying(unit), plan.last_queries)
    for n in range(plan.dq_lag if plan.has_dq else 0, 0, -1):
      self.query_gradient_if_own(unit, plan.tiles - n + varying(unit))

    plgpu.barrier_arrive(block.kv_free.at[unit % plan.kv_stages])
    for n in range(plan.config.ds_buffers if plan.has_dq else 0, 0, -1):
      plgpu.barrier_wait(block.ds_free.at[self.owner(unit, plan.tiles - n)])
    self.key_gradients(unit, dk_accs, dv_accs)

  def owner(self, unit, tile):
    """The warpgroup that computes dQ of a tile: the same for all parts, whose sums it stores."""
    return (tile + unit // self.plan.parts) % 2

  def slots(self, unit, tile):
    """Of a tile's queries, of its dS, and of the unit's keys."""
    plan = self.plan
    step = unit * plan.tiles + tile
    kv_slot = unit % plan.kv_stages + varying(step)
    return step % plan.stages, step % plan.config.ds_buffers, kv_slot

  def step_of_head(self, unit, tile):
    """The tile's step, of which all parts of the keys have the same."""
    return unit // self.plan.parts * self.plan.tiles + tile

  def gradients(self, unit, tile, dk_accs, dv_accs, queries):
    """Adds the tile's first queries to the gradients of k and v, and stores its dS."""
    block, plan = self.block, self.plan
    slot, ds_slot, _ = self.slots(unit, tile)
    plgpu.barrier_wait(block.loaded.at[slot])
    block.if_part(unit, 0, lambda: plgpu.barrier_wait(block.ready.at[slot]))
    for n in range(plan.own_keys // TILE):
      p, ds = self.probabilities(unit, tile, n, queries)
      for b in plan.blocks:
        plgpu.wgmma(dv_accs[n][b], p, block.do[b].at[slot])
      if plan.has_dq:
        if n == 0:
          self.wait_for_ds_buffer(unit, tile)
        for ref in (block.ds, *block.ds_copies):
          ref.at[ds_slot, pl.ds(self.first_key + n * TILE, TILE)][...] = ds
      else:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        block.dq[0].at[block.warpgroup + varying(unit)][...] = ds
      for b in plan.blocks:
        plgpu.wgmma(dk_accs[n][b], ds, block.q[b].at[slot])
      plgpu.wgmma_wait(0)

  def send_logit_gradients(self, unit, tile):
    """Stores dS of the warpgroup's keys, for `attention_dq_sm90`."""
    block, plan = self.block, self.plan
    plgpu.commit_smem()
    first = unit % plan.parts * plan.keys + self.first_key
    to = block.ds_of(block.item(unit // plan.parts), first, TILE, tile)
    plgpu.copy_smem_to_gmem(block.dq_rows[0].at[block.warpgroup + varying(unit)], to)

  def probabilities(self, unit, tile, n, queries):
    """The probabilities and dS of the warpgroup's n-th tile of keys, [TILE, TILE]."""
    block, plan = self.block, self.plan
    slot, _, kv_slot = self.slots(unit, tile)
    kept = block.kept(self.step_of_head(unit, tile))
    rows = pl.ds(self.first_key + n * TILE, TILE)

    def product(acc, left, right):
      for b in plan.blocks:
        columns = right[b].at[slot, pl.ds(0, queries)].transpose((1, 0))
        plgpu.wgmma(acc, left[b].at[kv_slot, rows], columns)
      return acc[...]

    def of_query(m):
      row = load(block.of_query.at[kept, m, pl.ds(0, queries)], BY_COLUMN)
      return across(row, 1, queries)

    def probabilities(acc):
      s = product(acc, block.k, block.q)
      p = jnp.exp2(s * (plan.scale * LOG2_E) - of_query(0))
      return self.mask(p, unit % plan.parts * plan.keys + self.first_key, n * TILE, tile)

    def logit_gradients(acc, p):
      ds = p * (product(acc, block.v, block.do) - of_query(1))
      # The barrier keeps pairs in one register.
      p, ds = lax.optimization_barrier((p.astype(plan.dtype), ds.astype(plan.dtype)))
      return with_zeros(p), with_zeros(ds)

    p = pl.run_scoped(probabilities, sums(TILE, queries))
    return pl.run_scoped(functools.partial(logit_gradients, p=p), sums(TILE, queries))

  def mask(self, p, first, own, tile):
    """Zeros for keys beyond the last token, and for later ones than the query."""
    plan = self.plan
    beyond = plan.keys * plan.parts - plan.own_keys + own + TILE > plan.tokens
    if not beyond and not plan.causal:
      return p
    key = plgpu.broadcasted_iota(jnp.int32, p.shape, 0, layout=plgpu.Layout.WGMMA) + first + own
    if beyond:
      p = jnp.where(key < plan.tokens, p, 0.0)
    if plan.causal:
      query = plgpu.broadcasted_iota(jnp.int32, p.shape, 1, layout=plgpu.Layout.WGMMA)
      p = jnp.where(key <= query + tile * TILE, p, 0.0)
    return p

  def wait_for_ds_buffer(self, unit, tile):
    block, buffers = self.block, self.plan.config.ds_buffers
    other = block.ds_free.at[(self.owner(unit, tile) - buffers) % 2]
    pl.when(tile >= buffers)(lambda: plgpu.barrier_wait(other))
    if self.plan.stages_in_ds:
      # The stores of the previous unit's gradients have left the buffers.
      pl.when(tile < buffers)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))

  def query_gradient_if_own(self, unit, tile):
    is_own = (tile >= 0) & (self.owner(unit, tile) == self.block.warpgroup)
    pl.when(is_own)(lambda: self.query_gradient(unit, tile))

  def query_gradient(self, unit, tile):
    """Stores the gradient of the tile's queries, or its sum so far."""
    block, plan = self.block, self.plan
    part, step = unit % plan.parts, self.step_of_head(unit, tile)
    _, ds_slot, kv_slot = self.slots(unit, tile)
    kept = block.kept(step)
    dq_slot = (block.in_sums(step) if plan.parts > 1 else block.warpgroup) + varying(tile)
    plgpu.barrier_wait(block.ds_ready.at[block.warpgroup])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def stage(n, dq):
      if plan.parts > 1:
        plgpu.commit_smem()  # All warps have read the sums, which are in the same place.
      block.dq[n].at[dq_slot][...] = (dq * plan.scale).astype(plan.dtype)

    for n, width in enumerate(plan.widths):
      dq = pl.run_scoped(
        functools.partial(self.ds_times_keys, n, ds_slot, kv_slot), sums(TILE, width)
      )
      if plan.has_tail:
        ds = load(block.of_query.at[kept, 2], BY_ROW)
        if plan.parts > 1:
          ds = jnp.where(part == plan.parts - 1, ds, 0.0)
        k = load(block.tail_kv_rows[n].at[2 * kv_slot, 0], BY_COLUMN).astype(jnp.float32)
        dq += across(ds, 0, width) * across(k, 1, width)
      if plan.parts > 1:
        dq = self.add_sums(block.dq_sums[n].at[kept], part, dq)
      block.if_part(unit, plan.parts - 1, functools.partial(stage, n, dq))
    plgpu.barrier_arrive(block.ds_free.at[block.warpgroup])
    plgpu.commit_smem()

    def send():
      for n in plan.blocks:
        rows = pl.ds(tile * TILE, TILE)
        to = block.head(block.dqkv, 0, block.item(unit // plan.parts), rows, n)
        plgpu.copy_smem_to_gmem(block.dq_rows[n].at[dq_slot], to)

    block.if_part(unit, plan.parts - 1, send)

  def add_sums(self, so_far, part, dq):
    """Adds what earlier parts of the keys gave, and keeps the sum for the next."""
    dq += load_if(part > 0, so_far)

    @pl.when(part < self.plan.parts - 1)
    def _():
      so_far[...] = dq

    return dq

  def ds_times_keys(self, n, ds_slot, kv_slot, acc):
    """The unit's part of dQ, a block of columns."""
    block = self.block
    ds = block.ds if self.plan.widths[n] == TILE else block.ds_copies[0]
    plgpu.wgmma(acc, ds.at[ds_slot].transpose((1, 0)), block.k[n].at[kv_slot])
    return acc[...]

  def key_gradients(self, unit, dk_accs, dv_accs):
    """Stores the gradients of the warpgroup's keys and values by way of shared memory."""
    block, plan = self.block, self.plan
    ds_buffers = plan.config.ds_buffers

    def buffers(m, n, b):
      if not plan.stages_in_ds:  # The warpgroup then has one tile of keys.
        return [ref[b].at[block.warpgroup + varying(unit)] for ref in (block.dq, block.dq_rows)]
      first, slot = self.first_key + n * TILE, m % ds_buffers + varying(unit)
      if b == 0:
        return [ref.at[slot, pl.ds(first, TILE)] for ref in (block.ds, block.ds_rows)]
      rows = pl.ds(first * (TILE // plan.widths[b]), TILE)
      return [ref[0].at[slot, rows] for ref in (block.outs, block.outs_rows)]

    for m, (which, accs, factor) in enumerate(((2, dv_accs, 1.0), (1, dk_accs, plan.scale))):
      # dS's first buffer needs no wait; with it, the compiler's order of L/14 is 6 % faster.
      if m in (0, ds_buffers) or not plan.stages_in_ds:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      for n, blocks in enumerate(accs):
        for b, acc in enumerate(blocks):
          buffers(m, n, b)[0][...] = (acc[...] * factor).astype(plan.dtype)
      plgpu.commit_smem()
      for n in range(len(accs)):
        rows = pl.ds(unit % plan.parts * plan.keys + self.first_key + n * TILE, TILE)
        for b in plan.blocks:
          to = block.head(block.dqkv, which, block.item(unit // plan.parts), rows, b)
          plgpu.copy_smem_to_gmem(buffers(m, n, b)[1], to)
