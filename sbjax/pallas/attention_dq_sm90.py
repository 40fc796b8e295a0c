"""The gradient of attention's queries on Hopper, where the pass over the keys cannot hold its sums.

Wide heads with many tokens are passed twice: first for the gradients of keys and values, and then,
tile by tile of queries, for theirs. That is two products more.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from sbjax.pallas.attention_parts_sm90 import (
  BY_COLUMN,
  BY_ROW,
  COMPUTE_WARPGROUPS,
  LOG2_E,
  TILE,
  across,
  load,
  persistent_kernel,
  sums,
  with_zeros,
)
from sbjax.pallas.attention_queries_sm90 import TilePlan, TilesOfQueries

KEYS = 64  # Whose logits and gradients a warpgroup has in registers.
STAGES = {"q": COMPUTE_WARPGROUPS, "do": COMPUTE_WARPGROUPS}


def with_query_gradient(
  dqkv: jax.Array, do, lse, delta, *qkv: jax.Array, causal: bool, blocks: int, interpret
) -> jax.Array:
  """`dqkv`, of which this writes dQ in place.

  Args:
    dqkv: the gradient of `qkv[0]`, [B, L, 1 or 3, H, D].
    do: the gradient of the outputs, [B, L, 1, H, D].
    lse: [B * H * L + TILE].
    delta: the sums of o * dO, [B * H, tiles * TILE].
    blocks: how many thread blocks run.
  """
  kernel = persistent_kernel(
    functools.partial(_kernel, heads=TilePlan.of(qkv, causal)),
    (),
    name="sbjax_attention_backward_dq",
    blocks=blocks,
    interpret=interpret,
  )
  ref = jax.new_ref(dqkv)
  kernel(*qkv, do, lse, delta, ref)
  return jax.freeze(ref)


def _kernel(*refs, heads: TilePlan):
  """Makes dQ; `refs` are qkv, dO, lse, delta and the gradient."""
  names = heads.keys_and_values(1) | heads.barriers(1, STAGES)
  names |= {name: heads.of_blocks(COMPUTE_WARPGROUPS, TILE) for name in ("q", "do", "dq")}

  @functools.partial(pl.run_scoped, **names, collective_axes="warpgroup")
  def _(**shared):
    shared |= zip(("do_array", "lse", "delta", "dqkv"), refs[-4:], strict=True)
    QueryGradients(heads, refs[:-4], 1, STAGES, shared).run()


class QueryGradients(TilesOfQueries):
  """A tile is of q, and of dO; a warpgroup multiplies it with 64 keys at a time."""

  def array(self, name):
    return ([self.do_array] if name == "do" else self.qkv), 0

  def tile(self, i, tile):
    """Stores dQ of a tile."""
    heads, (step, kv_slot) = self.heads, self.slots(i, tile)
    slot = step % COMPUTE_WARPGROUPS
    first = self.item(i) * heads.tokens + tile * TILE
    lse2 = load(self.lse.at[pl.ds(first, TILE)], BY_ROW) * LOG2_E
    delta = load(self.delta.at[self.item(i), pl.ds(tile * TILE, TILE)], BY_ROW)
    plgpu.barrier_wait(self.q_loaded.at[slot])
    gradients = functools.partial(self.gradients, i, tile, slot, kv_slot, lse2, delta)
    dq = pl.run_scoped(gradients, *[sums(TILE, width) for width in heads.widths])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for b in heads.blocks:
      self.dq[b].at[slot][...] = (dq[b] * heads.scale).astype(heads.dtype)
    plgpu.commit_smem()
    for b in heads.blocks:
      to = self.head([self.dqkv], 0, self.item(i), pl.ds(tile * TILE, TILE), b)
      plgpu.copy_smem_to_gmem(self.dq_rows[b].at[slot], to)

  def gradients(self, i, tile, slot, kv_slot, lse2, delta, *accs):
    """A tile of dQ, by blocks of columns."""
    heads, ds_tail = self.heads, []
    for first in range(0, heads.columns, KEYS):
      count = min(KEYS, heads.columns - first)
      is_last = first + count == heads.columns
      logits = self.products(self.q, slot, self.k, self.tail_k, kv_slot, first, count)
      if first == 0:
        self.wait_for_values(i, tile)
        plgpu.barrier_wait(self.do_loaded.at[slot])
      if is_last:
        plgpu.barrier_arrive(self.q_free.at[slot])
      p, *p_tail = self.probabilities(tile, first, lse2, *logits)
      dp, *dp_tail = self.products(self.do, slot, self.v, self.tail_v, kv_slot, first, count)
      if is_last:
        plgpu.barrier_arrive(self.do_free.at[slot])
      ds = p * (dp - across(delta, 0, count))
      ds_tail += [p * (dp - delta) for p, dp in zip(p_tail, dp_tail, strict=True)]
      # The barrier keeps pairs in one register.
      ds = with_zeros(lax.optimization_barrier(ds.astype(heads.dtype)))
      for acc, keys in zip(accs, self.k, strict=True):
        plgpu.wgmma(acc, ds, keys.at[kv_slot, pl.ds(first, ds.shape[1])])

    def with_tail(b, dq):
      for ds in ds_tail:
        k = load(self.tail_k_rows[b].at[kv_slot, 0], BY_COLUMN).astype(jnp.float32)
        dq += across(ds, 0, heads.widths[b]) * across(k, 1, heads.widths[b])
      return dq

    return [with_tail(b, acc[...]) for b, acc in enumerate(accs)]

  def probabilities(self, tile, first, lse2, s, *s_tail):
    scale = self.heads.scale * LOG2_E
    hidden, tail_is_hidden = self.hidden(tile, first, s.shape[1]), self.tail_is_hidden(tile)
    p = jnp.exp2(s * scale - across(lse2, 0, s.shape[1]))
    p_tail = [jnp.exp2(x * scale - lse2) for x in s_tail]
    if hidden is not None:
      p = jnp.where(hidden, 0.0, p)
    if tail_is_hidden is not None:
      p_tail = [jnp.where(tail_is_hidden, 0.0, x) for x in p_tail]
    return p, *p_tail
