"""Softmax attention's forward pass on Hopper (H100, H200): Pallas Mosaic GPU, wgmma and TMA.

The kernel is persistent: one thread block runs on each SM and takes one head of one example after
another. Its keys and values stay in shared memory. Two compute warpgroups take tiles of 64 queries
in turns: one's exponentials hide behind the other's matmuls. A warpgroup has all logits of a tile
in registers, so softmax needs no running maximum. A third warpgroup loads ahead.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from sbjax.pallas.sm90.hopper import (
  BY_COLUMN,
  COMPUTE_REGISTERS,
  COMPUTE_WARPGROUPS,
  LOG2_E,
  MEMORY_REGISTERS,
  TILE,
  Heads,
  ThreadBlock,
  across,
  barriers_of,
  first_column,
  load,
  persistent_kernel,
  sums,
  unsupported_heads,
  varying,
  with_zeros,
)

SHARED_MEMORY = 232_448  # Bytes that a thread block can have.


def unsupported(device, *qkv, causal: bool, length: int) -> str | None:
  """Why the kernel does not take these, or None."""
  del device, causal
  return unsupported_heads(qkv, length)


def is_slower(*qkv, causal: bool, length: int) -> bool:
  """Whether the kernel is less than 10 % faster than Triton's on an H100.

  With few tokens and columns, Triton's is as fast. With 193 to 256 tokens and wide heads, the
  compiler spills registers.
  """
  del causal
  head_dim = qkv[0].shape[-1]
  if length <= 192:
    return head_dim < 96 and length < 129
  return head_dim != 64 and length != 257


def attention_forward(
  *qkv: jax.Array, causal: bool, length: int, num_sms: int | None = None, interpret=False
) -> tuple[jax.Array, jax.Array]:
  """`sbjax.ops.attention.attention_forward` without padding, but for the rounding of sums.

  Args:
    num_sms: how many thread blocks run; None for one on each SM of the device.
    interpret: False, or plgpu.InterpretGPUParams for a run on the CPU.
  """
  assert length == qkv[0].shape[1]
  plan = Plan.of(qkv, causal)
  batch, tokens, heads = plan.batch, plan.tokens, plan.heads
  o = jax.ShapeDtypeStruct((batch, tokens, 1, heads, plan.head_dim), plan.dtype)
  lse = jax.ShapeDtypeStruct((batch * heads, plan.tiles * TILE), jnp.float32)
  kernel = persistent_kernel(
    functools.partial(_kernel, plan=plan),
    [o, lse],
    name="sbjax_attention_forward",
    blocks=plan.thread_blocks(num_sms),
    interpret=interpret,
  )
  o, lse = kernel(*qkv)
  return o[:, :, 0], lse.reshape(batch, heads, -1)[:, :, :tokens]


def _kernel(*refs, plan: "Plan"):
  """Makes o and lse of qkv."""

  @functools.partial(
    pl.run_scoped, **plan.buffers(), **plan.barriers(), collective_axes="warpgroup"
  )
  def _(**shared):
    *qkv, o, lse = refs
    block = Forward(plan, qkv, shared | {"o_array": o, "lse": lse})
    pl.when(block.warpgroup == COMPUTE_WARPGROUPS)(block.load_all)
    pl.when(block.warpgroup < COMPUTE_WARPGROUPS)(block.compute_all)


@dataclasses.dataclass(frozen=True)
class Plan(Heads):
  """The constants of the kernel."""

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

  @functools.cached_property
  def stages(self) -> tuple[int, int]:
    """How many heads' keys and values fit in shared memory, and how many tiles of queries."""

    def fits(kv_stages, stages):
      rows = 2 * kv_stages * (self.keys + 8) + (stages + COMPUTE_WARPGROUPS) * TILE
      return rows * sum(self.widths) * self.dtype.itemsize + 4096 <= SHARED_MEMORY

    # A power of two of tiles of queries, so that each buffer is always the same warpgroup's.
    return next(n for n in ((2, 4), (2, 2), (1, 4), (1, 2)) if fits(*n))

  def buffers(self) -> dict:
    """Shared memory by name. The tail's key and value are the first of 8 rows."""
    kv_stages, stages = self.stages
    rows = {"k": self.keys, "v": self.keys, "tail_k": 8, "tail_v": 8}
    found = {name: self.of_blocks(kv_stages, rows) for name, rows in rows.items()}
    return found | {
      "q": self.of_blocks(stages, TILE),
      "o": self.of_blocks(COMPUTE_WARPGROUPS, TILE),
    }

  def barriers(self) -> dict:
    (kv_stages, stages), copies = self.stages, len(self.widths)
    return barriers_of(
      {
        "k_loaded": (copies * (1 + self.has_tail), kv_stages),
        "v_loaded": (copies * (1 + self.has_tail), kv_stages),
        "kv_free": (COMPUTE_WARPGROUPS, kv_stages),
        "q_loaded": (copies, stages),
        "q_free": (1, stages),
      }
    )


class Forward(ThreadBlock):
  """A compute warpgroup multiplies a tile of queries with all keys at once."""

  heads: Plan

  def __init__(self, plan: Plan, qkv: Sequence, shared: dict):
    super().__init__(plan, shared)
    self.qkv, (self.kv_stages, self.stages) = qkv, plan.stages

  def load_all(self):
    """Loads all heads, and tiles of queries, as buffers become free."""
    plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
    tiles = self.heads.tiles

    @pl.loop(0, self.items)
    def _(i):
      slot = i % self.kv_stages
      pl.when(i >= self.kv_stages)(lambda: plgpu.barrier_wait(self.kv_free.at[slot]))
      self.load_head(i, 1, self.k_rows, self.tail_k_rows, self.k_loaded)

      @pl.loop(0, tiles)
      def _(tile):
        self.load_tile(i, tile)

        @pl.when(tile == 0)
        def _():
          self.load_head(i, 2, self.v_rows, self.tail_v_rows, self.v_loaded)

    self.wait_for_last(self.q_free, self.items * tiles, self.stages)
    self.wait_for_last(self.kv_free, self.items, self.kv_stages)

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

  def load_tile(self, i, tile):
    step = i * self.heads.tiles + tile
    slot = step % self.stages
    pl.when(step >= self.stages)(lambda: plgpu.barrier_wait(self.q_free.at[slot]))
    for b in self.heads.blocks:
      rows = self.head(self.qkv, 0, self.item(i), pl.ds(tile * TILE, TILE), b)
      plgpu.copy_gmem_to_smem(rows, self.q_rows[b].at[slot], self.q_loaded.at[slot])

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

  def tile(self, i, tile):
    """Stores a tile of o and its lse."""
    heads, step = self.heads, i * self.heads.tiles + tile
    kv_slot, slot = i % self.kv_stages + varying(step), step % self.stages
    plgpu.barrier_wait(self.q_loaded.at[slot])
    s, *s_tail = self.logits(slot, kv_slot)
    plgpu.barrier_arrive(self.q_free.at[slot])
    p, p_tail, largest, total = self.softmax(tile, s, s_tail)
    rows = pl.ds(tile * TILE, TILE)
    lse = largest * heads.scale + jnp.log2(total) / LOG2_E
    self.lse.at[self.item(i), rows][...] = lse
    wait_for_values = functools.partial(plgpu.barrier_wait, self.v_loaded.at[i % self.kv_stages])
    pl.when(tile < COMPUTE_WARPGROUPS)(wait_for_values)  # The warpgroup's first tile of a head.
    o = self.outputs(p, kv_slot, p_tail, total)
    warpgroup = self.warpgroup + varying(tile)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for b in heads.blocks:
      self.o[b].at[warpgroup][...] = o[b].astype(heads.dtype)
    plgpu.commit_smem()
    for b in heads.blocks:
      plgpu.copy_smem_to_gmem(
        self.o_rows[b].at[warpgroup], self.head([self.o_array], 0, self.item(i), rows, b)
      )

  def logits(self, slot, kv_slot):
    """Of a tile of queries with all keys, [TILE, columns], and with the tail's, [TILE]."""
    heads = self.heads

    def matmuls(acc, *tail_acc):
      for b in heads.blocks:
        keys = self.k[b].at[kv_slot, pl.ds(0, heads.columns)].transpose((1, 0))
        plgpu.wgmma(acc, self.q[b].at[slot], keys)
        for acc_ in tail_acc:
          tail = self.tail_k[b].at[kv_slot].transpose((1, 0))
          plgpu.wgmma(acc_, self.q[b].at[slot], tail)
      return [acc[...], *(first_column(acc_[...]) for acc_ in tail_acc)]

    return pl.run_scoped(matmuls, sums(TILE, heads.columns), *[sums(TILE, 8)] * heads.has_tail)

  def hidden(self, tile):
    """Which keys count for nothing: beyond the last token, or later than the query; or None."""
    heads, layout, shape = self.heads, plgpu.Layout.WGMMA, (TILE, self.heads.columns)
    key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
    last = heads.tokens - 1
    if heads.causal:
      last = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + tile * TILE
      # A row beyond the last token is not stored.
    elif heads.columns <= heads.tokens:
      return None
    return key > last

  def tail_is_hidden(self, tile):
    if not self.heads.causal:
      return None
    row = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
    return row + tile * TILE < self.heads.tokens - 1

  def softmax(self, tile, s, s_tail):
    """Exponentials of logits less the largest, of the tail's, the largest logit, and their sum."""
    heads, hidden, tail_is_hidden = self.heads, self.hidden(tile), self.tail_is_hidden(tile)
    if hidden is not None:
      s = jnp.where(hidden, -jnp.inf, s)
    if tail_is_hidden is not None:
      s_tail = [jnp.where(tail_is_hidden, -jnp.inf, x) for x in s_tail]
    largest = functools.reduce(jnp.maximum, s_tail, jnp.max(s, axis=1))
    scale = heads.scale * LOG2_E
    p = jnp.exp2((s - across(largest, 0, heads.columns)) * scale)
    p_tail = [jnp.exp2((x - largest) * scale) for x in s_tail]
    total = sum(p_tail, jnp.sum(p, axis=1))
    # The barrier keeps pairs in one register.
    return lax.optimization_barrier(p.astype(heads.dtype)), p_tail, largest, total

  def outputs(self, p, kv_slot, p_tail, total):
    """A tile of o, by blocks of columns."""
    widths, p = self.heads.widths, with_zeros(p)

    def matmuls(*accs):
      for acc, values in zip(accs, self.v, strict=True):
        plgpu.wgmma(acc, p, values.at[kv_slot])
      return [acc[...] for acc in accs]

    def with_tail(b, o):
      for p in p_tail:
        v = load(self.tail_v_rows[b].at[kv_slot, 0], BY_COLUMN).astype(jnp.float32)
        o += across(p, 0, widths[b]) * across(v, 1, widths[b])
      return o * across(1 / total, 0, widths[b])

    outputs = pl.run_scoped(matmuls, *[sums(TILE, width) for width in widths])
    return [with_tail(b, o) for b, o in enumerate(outputs)]
