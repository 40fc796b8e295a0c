"""Softmax attention's backward pass on Hopper (H100, H200): Pallas Mosaic GPU, wgmma and TMA.

Of a head with queries Q, keys K and values V, whose output is O, from the gradient dO:

  P = exp(Q K^T / sqrt(D) - lse)            dV = P^T dO
  dS = P * (dO V^T - rowsum(O * dO))        dQ = dS K / sqrt(D)        dK = dS^T Q / sqrt(D)

The kernel is persistent: one thread block runs on each SM and takes one head of one example after
another. Its keys and values stay in shared memory, and a ring of tiles of 64 queries passes by.
Each of the five matmuls is computed once, by two compute warpgroups. A third one loads ahead.

Registers hold the gradients of all keys and values with heads of 64, or up to 129 tokens. Otherwise
keys come in parts of 128: a head's queries pass by once for each. The sums of dQ stay in shared
memory, or, where they do not fit, dS leaves and a second kernel makes dQ (attention_dq.py).

Heads that are not 64 wide have two blocks of columns, since wgmma reads at most 128 bytes of a row.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from sbjax.pallas.sm90.attention_dq import with_query_gradient
from sbjax.pallas.sm90.hopper import (
  BY_COLUMN,
  BY_ROW,
  COMPUTE_WARPGROUPS,
  LOG2_E,
  TILE,
  Heads,
  ThreadBlock,
  across,
  barriers_of,
  by_name,
  first_column,
  load,
  persistent_kernel,
  sums,
  swizzled,
  tiled,
  unsupported_heads,
  varying,
  with_zeros,
  zeros,
)


@dataclasses.dataclass(frozen=True)
class Config:
  """What a thread block keeps in shared memory, and the registers of its threads.

  stages: tiles of queries, at least 2.
  kv_stages: 1 or 2 heads' keys and values, or parts of them; 1 if sums of dQ take the memory.
  ds_buffers: 1 or 2 tiles of dS. With two, a warpgroup need not wait for the other's matmul.
  memory_registers: of a thread of the memory warpgroup; the two compute warpgroups get the rest of
    3 * 168.
  """

  stages: int = 2
  kv_stages: int = 1
  ds_buffers: int = 2
  memory_registers: int = 56

  def __post_init__(self):
    # Anything else would wait for ever, or is no number of registers that a warpgroup can have.
    if self.stages < 2 or not {self.kv_stages, self.ds_buffers} <= {1, 2}:
      raise ValueError(f"{self}: stages must be at least 2, kv_stages and ds_buffers 1 or 2.")
    if self.memory_registers not in range(24, 169, 16):
      raise ValueError(f"{self}: memory_registers must be 24, 40, 56, ... or 168.")

  @property
  def compute_registers(self) -> int:
    return (3 * 168 - self.memory_registers) // COMPUTE_WARPGROUPS


def default_config(tokens: int, head_dim: int) -> Config:
  """The fastest of those tried on an H100 or H200.

  Heads from 88 on get as many registers as keep the compiler from serializing matmuls.
  """
  if head_dim > 96:
    return Config(ds_buffers=1)
  if head_dim > 80 and tokens > 129:
    return Config(kv_stages=2, ds_buffers=1, memory_registers=104 if has_tail(tokens) else 88)
  if head_dim > 64:
    return Config(ds_buffers=2 if tokens <= 129 else 1, memory_registers=104)
  if tokens <= 129:
    return Config(stages=3, kv_stages=2, ds_buffers=1 if tokens == 129 else 2)
  return Config(memory_registers=56 if has_tail(tokens) else 40)


def has_tail(tokens: int) -> bool:
  """Whether the last key is the memory warpgroup's: the others have a multiple of 128."""
  return tokens % 128 == 1


def unsupported(device, o, lse, do, *qkv, causal: bool, length: int) -> str | None:
  """Why the kernel does not take these, or None."""
  del device, o, lse, do, causal
  return unsupported_heads(qkv, length)


def is_slower(o, lse, do, *qkv, causal: bool, length: int) -> bool:
  """Whether Triton's kernel is faster on an H200.

  With 66 tokens, half of two tiles of keys are zeros: in Triton, heads of 104 and 128 were faster.
  """
  del o, lse, do, causal
  return qkv[0].shape[-1] > 96 and length <= 80


def attention_backward(
  o: jax.Array,
  lse: jax.Array,
  do: jax.Array,
  *qkv: jax.Array,
  causal: bool,
  length: int,
  config: Config | None = None,
  num_sms: int | None = None,
  interpret=False,
) -> tuple[jax.Array, ...]:
  """`sbjax.ops.attention.attention_backward` without padding, but for the rounding of sums.

  Args:
    num_sms: how many thread blocks run; None for one on each SM of the device.
    interpret: False, or plgpu.InterpretGPUParams for a run on the CPU.
  """
  _, tokens, _, _, head_dim = qkv[0].shape
  assert length == tokens
  config = config or default_config(tokens, head_dim)
  plan = Plan.of(qkv, causal, config)
  blocks = plan.thread_blocks(num_sms)
  out_type = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in qkv]
  if not plan.has_dq:
    # dS, transposed. Rows of whole sectors, of 32 bytes.
    shape = plan.batch * plan.heads, plan.tokens, pl.cdiv(plan.tokens, 16) * 16
    out_type.append(jax.ShapeDtypeStruct(shape, plan.dtype))
  kernel = persistent_kernel(
    functools.partial(_kernel, plan=plan),
    out_type,
    name="sbjax_attention_backward",
    blocks=blocks,
    interpret=interpret,
  )
  do, lse = do[:, :, None], jnp.pad(lse.reshape(-1), (0, TILE))
  results = kernel(*qkv, o[:, :, None], do, lse)
  if plan.has_dq:
    return tuple(results)
  *dqkv, ds = results
  dq = with_query_gradient(dqkv[0], ds, *qkv, blocks=blocks, interpret=interpret)
  return dq, *dqkv[1:]


def _kernel(*refs, plan: "Plan"):
  """Makes the gradients of qkv; `refs` are qkv, o, do and lse, the gradients, and delta."""
  names = plan.buffers() | plan.barriers()

  @functools.partial(pl.run_scoped, **names, collective_axes="warpgroup")
  def _(**shared):
    block = Block(plan, refs, **shared)
    pl.when(block.warpgroup == COMPUTE_WARPGROUPS)(MemoryWarpgroup(block).run)
    pl.when(block.warpgroup < COMPUTE_WARPGROUPS)(ComputeWarpgroup(block).run)


class ComputeWarpgroup:
  """Owns half of the keys, and holds the gradients of them and their values in registers.

  Its methods run in all threads of the warpgroup. Probabilities are computed transposed, [keys,
  queries]: as registers they are then the left operand of the matmuls with dO and Q. Both
  warpgroups write dS to shared memory, and take turns to multiply a tile's dS with all keys.
  """

  def __init__(self, block: "Block"):
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
    """Stores dS of the warpgroup's keys, for attention_dq.py."""
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

    def matmul(acc, left, right):
      for b in plan.blocks:
        columns = right[b].at[slot, pl.ds(0, queries)].transpose((1, 0))
        plgpu.wgmma(acc, left[b].at[kv_slot, rows], columns)
      return acc[...]

    def of_query(m):
      row = load(block.of_query.at[kept, m, pl.ds(0, queries)], BY_COLUMN)
      return across(row, 1, queries)

    def probabilities(acc):
      s = matmul(acc, block.k, block.q)
      p = jnp.exp2(s * (plan.scale * LOG2_E) - of_query(0))
      return self.mask(p, unit % plan.parts * plan.keys + self.first_key, n * TILE, tile)

    def logit_gradients(acc, p):
      ds = p * (matmul(acc, block.v, block.do) - of_query(1))
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
    dq += _load_if(part > 0, so_far)

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


def _load_if(condition, ref):
  """A tile in registers, of zeros unless the condition holds."""
  return lax.cond(condition, lambda: load(ref), lambda: zeros(ref.shape, ref.dtype))


class MemoryWarpgroup:
  """Loads ahead (TMA), and computes what all keys need of a query.

  That is lse in base 2, and delta, the sum of o * dO. It also has a class token's key, the tail:
  257 tokens are 256 keys for the compute warpgroups, and one for this one. Its methods run in all
  threads of the warpgroup.
  """

  def __init__(self, block: "Block"):
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
    # The gradients of 64 columns are transposed: a matmul has at least 64 rows.
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

    def matmuls(s_acc, dp_acc):
      for n in plan.blocks:
        k, v = (block.tail_kv[n].at[2 * kv_slot + m].transpose((1, 0)) for m in range(2))
        plgpu.wgmma(s_acc, block.q[n].at[slot], k)
        plgpu.wgmma(dp_acc, block.do[n].at[slot], v)
      return [first_column(acc[...]) for acc in (s_acc, dp_acc)]

    s, dp = pl.run_scoped(matmuls, *[sums(TILE, 8)] * 2)
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
          plgpu.wgmma(acc, _in_first_row(load(rows.at[0], BY_COLUMN)), operand.at[slot])
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


def _in_first_row(vector):
  """A tile [TILE, TILE] of zeros, but for a vector in the first row."""
  row = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 0, layout=plgpu.Layout.WGMMA)
  return jnp.where(row == 0, across(vector, 1), 0.0)


_O_STAGES = 2


@dataclasses.dataclass(frozen=True)
class Plan(Heads):
  """The constants of a kernel that takes a part of the keys, and tiles of queries."""

  config: Config

  @property
  def has_tail(self) -> bool:
    return has_tail(self.tokens)

  @functools.cached_property
  def keys(self) -> int:
    """Keys of a part. Two warpgroups' registers hold their gradients, and their values'."""
    most = 256 if self.head_dim <= 64 else 128
    return min(most, pl.cdiv(self.tokens - self.has_tail, 128) * 128)

  @functools.cached_property
  def parts(self) -> int:
    return pl.cdiv(self.tokens - self.has_tail, self.keys)

  @property
  def has_dq(self) -> bool:
    """Whether the kernel computes dQ, too: shared memory may not hold the sums of several parts."""
    return self.parts == 1 or self.head_dim <= 80

  @property
  def has_sums(self) -> bool:
    """Whether sums of dQ stay in shared memory, for all parts of the keys."""
    return self.has_dq and self.parts > 1

  @property
  def own_keys(self) -> int:
    return self.keys // COMPUTE_WARPGROUPS

  @property
  def last_queries(self) -> int:
    """That the last tile is computed for: a class token may be its only query."""
    rest = self.tokens - (self.tiles - 1) * TILE
    return next(n for n in (8, 16, 32, TILE) if n >= rest)

  @functools.cached_property
  def widths(self) -> tuple[int, ...]:
    whole, rest = divmod(self.head_dim, TILE)
    return (TILE,) * whole + ((next(w for w in (16, 32, TILE) if w >= rest),) if rest else ())

  @property
  def stages(self) -> int:
    return self.config.stages

  @property
  def dq_lag(self) -> int:
    """How many tiles later a tile's dQ is computed, so that the other warpgroup's dS is there."""
    return self.config.ds_buffers - 1

  @property
  def kept(self) -> int:
    """Tiles of queries of which numbers stay in shared memory.

    dQ reads them when its tile of queries is free already. If keys have parts, all of a head's
    stay, and a tile's place is first o's, then the sums' of dQ, and then dQ's: it has left when
    the next o comes, since its warpgroup has then stored another one, two tiles later.
    """
    return max(self.tiles if self.parts > 1 else 0, self.stages + self.dq_lag + 3)

  @property
  def o_stages(self) -> int:
    return self.stages if self.has_sums else _O_STAGES

  @property
  def stages_in_ds(self) -> bool:
    """Whether the gradients of keys and values leave by way of dS's buffers, or dQ's."""
    return self.has_sums or len(self.widths) == 1

  @property
  def kv_stages(self) -> int:
    return 1 if self.has_sums else self.config.kv_stages

  def buffers(self) -> dict:
    """Shared memory by name, for `pl.run_scoped`."""
    widths, dtype, kv_stages, ds_buffers = (
      self.widths, self.dtype, self.kv_stages, self.config.ds_buffers
    )  # fmt: skip

    def sums_o_dq(width):
      """The sums have 4 bytes, o and dQ have 2: theirs is each second place."""
      # In tiles of 8 columns, a thread's addresses differ by constants.
      sums = swizzled((self.kept, TILE, width), 8, jnp.float32)
      return tiled(2 * self.kept, TILE, width, dtype, sums)

    def ds_copy(width):
      """A warpgroup's rows of this dS are as many bytes as TILE / width tiles of a gradient."""
      copy = swizzled((ds_buffers, self.keys, TILE), width, dtype)
      return tiled(ds_buffers, self.keys * TILE // width, width, dtype, copy)

    of_dq: dict[str, Any]
    if self.has_sums:
      of_dq = {"sums_o_dq": [sums_o_dq(width) for width in widths]}
    else:
      # Without dQ, dS and gradients leave by way of its place.
      of_dq = {
        "o": self.of_blocks(self.o_stages, TILE),
        "dq": self.of_blocks(COMPUTE_WARPGROUPS, TILE),
      }
    if self.has_dq:
      # Pallas multiplies only operands that are swizzled alike: dS is there for each width.
      of_dq["ds"] = tiled(ds_buffers, self.keys, TILE, dtype)
      of_dq["ds_copies"] = [ds_copy(width) for width in widths if width < TILE]
    return {
      **of_dq,
      "q": self.of_blocks(self.stages, TILE),
      "do": self.of_blocks(self.stages, TILE),
      "k": self.of_blocks(kv_stages, self.keys),
      "v": self.of_blocks(kv_stages, self.keys),
      # Of each query: lse in base 2, delta, and the tail key's dS.
      "of_query": plgpu.SMEM((self.kept, 3, TILE), jnp.float32),
      # The tail key is the first of 8 rows, and so are its probabilities and dS.
      "tail_kv": self.of_blocks(2 * kv_stages, 8),
      "tail_p": tiled(0, 8, TILE, dtype),
      "tail_ds": tiled(0, 8, TILE, dtype),
      "tail_out": [tiled(0, 8 if w == TILE else TILE, w, dtype) for w in widths],
    }

  def barriers(self) -> dict:
    """Barriers by name, for `pl.run_scoped`."""
    copies, tail, kv_stages = len(self.widths), self.has_tail, self.kv_stages
    arrivals = {
      "loaded": (2 * copies, self.stages),
      "o_loaded": (copies, self.o_stages),
      "ready": (1, self.stages),
      "free": (COMPUTE_WARPGROUPS + 1, self.stages),
      "kv_loaded": (2 * copies * (self.keys // TILE + tail), kv_stages),
      "kv_free": (COMPUTE_WARPGROUPS + tail, kv_stages),
    }
    if self.has_dq:
      # Of tiles whose dQ the one or the other warpgroup computes.
      arrivals |= {"ds_ready": (COMPUTE_WARPGROUPS, 2), "ds_free": (1, 2)}
    return barriers_of(arrivals)


class Block(ThreadBlock):
  """The arrays and the shared memory. A unit of its work is a part of the keys of a head."""

  def __init__(self, plan: Plan, refs, **shared):
    self.plan, arrays = plan, (len(refs) - 3) // 2
    inputs, outputs = refs[: arrays + 3], refs[arrays + 3 :]
    *self.qkv, self.o_array, self.do_array, self.lse = inputs
    self.dqkv, self.ds_array = outputs[:arrays], outputs[-1]
    self.dq_sums = ()
    if plan.has_sums:
      self.dq_sums, *o = by_name(shared.pop("sums_o_dq"), 3)
      (self.o, self.o_rows), (self.dq, self.dq_rows) = o, o
    self.ds_copies, self.outs, self.outs_rows = by_name(shared.pop("ds_copies", []), 3)
    for name in {"ds", "tail_p", "tail_ds"} & shared.keys():
      tile, rows = shared.pop(name)
      setattr(self, name, tile)
      setattr(self, f"{name}_rows", rows)
    super().__init__(plan, shared)

  def kept(self, step):
    """Where the numbers of a tile of queries are; parts of the keys do not count as steps."""
    return step % self.plan.kept

  def in_sums(self, step):
    """Where a tile of o or dQ is, if it takes the place of the sums, which have twice the bytes."""
    return 2 * self.kept(step)

  def ds_of(self, item, first_key, keys, tile):
    """Rows of dS in global memory, [keys, TILE], of which TMA clips what is beyond the tokens."""
    return self.ds_array.at[item, pl.ds(first_key, keys), pl.ds(tile * TILE, TILE)]

  def if_part(self, unit, part, function):
    parts = self.plan.parts
    return pl.when(unit % parts == part)(function) if parts > 1 else function()
