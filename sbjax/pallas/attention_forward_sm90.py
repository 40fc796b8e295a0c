"""Softmax attention's forward pass on Hopper (H100, H200): Pallas Mosaic GPU, wgmma and TMA.

The kernel is persistent: one thread block runs on each SM and takes one head of one example after
another. A warpgroup has all logits of a tile of 64 queries in registers, so softmax needs no
running maximum.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from sbjax.pallas.attention_parts_sm90 import (
  BY_COLUMN,
  COMPUTE_WARPGROUPS,
  LOG2_E,
  TILE,
  across,
  fits_tma,
  load,
  persistent_kernel,
  sums,
  varying,
  with_zeros,
)
from sbjax.pallas.attention_queries_sm90 import TilePlan, TilesOfQueries


def fits(tokens: int, head_dim: int) -> bool:
  """Whether the kernel takes such heads, and is at least 10 % faster than Triton's on an H100.

  Each compute warpgroup needs a tile of each head. With few tokens and columns, Triton's is as
  fast. With 193 to 256 tokens and wide heads, the compiler spills registers.
  """
  if not fits_tma(tokens, head_dim):
    return False
  if tokens <= 192:
    return head_dim >= 96 or tokens >= 129
  return head_dim == 64 or tokens == 257


def attention_forward(
  *qkv: jax.Array, causal: bool, num_sms: int | None = None, interpret=False
) -> tuple[jax.Array, jax.Array]:
  """`sbjax.attention_ops.attention_forward` without padding, but for the rounding of sums.

  Args:
    num_sms: how many thread blocks run; None for one on each SM of the device.
    interpret: False, or plgpu.InterpretGPUParams for a run on the CPU.
  """
  shape = TilePlan.of(qkv, causal)
  batch, tokens, heads = shape.batch, shape.tokens, shape.heads
  o = jax.ShapeDtypeStruct((batch, tokens, 1, heads, shape.head_dim), shape.dtype)
  lse = jax.ShapeDtypeStruct((batch * heads, shape.tiles * TILE), jnp.float32)
  kernel = persistent_kernel(
    functools.partial(_kernel, heads=shape),
    [o, lse],
    name="sbjax_attention_forward",
    blocks=shape.thread_blocks(num_sms),
    interpret=interpret,
  )
  o, lse = kernel(*qkv)
  return o[:, :, 0], lse.reshape(batch, heads, -1)[:, :, :tokens]


def _kernel(*refs, heads: TilePlan):
  """Makes o and lse of qkv."""
  kv_stages, stages = heads.stages(arrays=2)
  tiles = {"q": stages}
  names = heads.keys_and_values(kv_stages) | heads.barriers(kv_stages, tiles)
  names |= {"q": heads.of_blocks(stages, TILE), "o": heads.of_blocks(COMPUTE_WARPGROUPS, TILE)}

  @functools.partial(pl.run_scoped, **names, collective_axes="warpgroup")
  def _(**shared):
    shared |= {"o_array": refs[-2], "lse": refs[-1]}
    Forward(heads, refs[:-2], kv_stages, tiles, shared).run()


class Forward(TilesOfQueries):
  """A tile is of q; a warpgroup multiplies it with all keys at once."""

  def array(self, name):
    return self.qkv, 0

  def tile(self, i, tile):
    """Stores a tile of o and its lse."""
    heads, (step, kv_slot) = self.heads, self.slots(i, tile)
    slot = step % self.stages["q"]
    plgpu.barrier_wait(self.q_loaded.at[slot])
    s, *s_tail = self.products(self.q, slot, self.k, self.tail_k, kv_slot, 0, heads.columns)
    plgpu.barrier_arrive(self.q_free.at[slot])
    p, p_tail, largest, total = self.softmax(tile, s, s_tail)
    rows = pl.ds(tile * TILE, TILE)
    lse = largest * heads.scale + jnp.log2(total) / LOG2_E
    self.lse.at[self.item(i), rows][...] = lse
    self.wait_for_values(i, tile)
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

  def softmax(self, tile, s, s_tail):
    """Exponentials of logits less the largest, of the tail's, the largest logit, and their sum."""
    heads = self.heads
    hidden, tail_is_hidden = self.hidden(tile, 0, heads.columns), self.tail_is_hidden(tile)
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

    def products(*accs):
      for acc, values in zip(accs, self.v, strict=True):
        plgpu.wgmma(acc, p, values.at[kv_slot])
      return [acc[...] for acc in accs]

    def with_tail(b, o):
      for p in p_tail:
        v = load(self.tail_v_rows[b].at[kv_slot, 0], BY_COLUMN).astype(jnp.float32)
        o += across(p, 0, widths[b]) * across(v, 1, widths[b])
      return o * across(1 / total, 0, widths[b])

    outputs = pl.run_scoped(products, *[sums(TILE, width) for width in widths])
    return [with_tail(b, o) for b, o in enumerate(outputs)]
