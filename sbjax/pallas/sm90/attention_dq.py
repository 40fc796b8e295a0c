"""The gradient of attention's queries on Hopper, where the pass over the keys cannot hold its sums.

With wide heads and many tokens that pass stores dS, and this one multiplies it with the keys. Keys
pass by 64 at a time, with their rows of dS. Two compute warpgroups hold the sums of all of a head's
queries in registers. A third one loads ahead.
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from sbjax.pallas.sm90.hopper import (
  COMPUTE_REGISTERS,
  COMPUTE_WARPGROUPS,
  MEMORY_REGISTERS,
  TILE,
  Heads,
  ThreadBlock,
  barriers_of,
  persistent_kernel,
  sums,
  tiled,
  varying,
)

STAGES = 3  # Tiles of keys, and of their rows of dS.


def with_query_gradient(
  dqkv: jax.Array, ds: jax.Array, *qkv: jax.Array, blocks: int, interpret
) -> jax.Array:
  """`dqkv`, of which this writes dQ in place.

  Args:
    dqkv: the gradient of `qkv[0]`, [B, L, 1 or 3, H, D].
    ds: the gradient of the logits before their scale, transposed, [B * H, L, multiple of 8].
    blocks: how many thread blocks run.
  """
  kernel = persistent_kernel(
    functools.partial(_kernel, heads=Plan.of(qkv, causal=False)),  # dS has the zeros.
    (),
    name="sbjax_attention_backward_dq",
    blocks=blocks,
    interpret=interpret,
  )
  ref = jax.new_ref(dqkv)
  kernel(*qkv, ds, ref)
  return jax.freeze(ref)


@dataclasses.dataclass(frozen=True)
class Plan(Heads):
  """The constants of the kernel."""

  @property
  def widths(self) -> tuple[int, ...]:
    """Pallas multiplies only operands that are swizzled alike, and dS has tiles of 64 columns."""
    return (TILE,) * pl.cdiv(self.head_dim, TILE)

  @property
  def own_tiles(self) -> int:
    """Of queries, of a warpgroup."""
    return pl.cdiv(self.tiles, COMPUTE_WARPGROUPS)


def _kernel(*refs, heads: Plan):
  """Makes dQ; `refs` are qkv, dS and the gradient."""
  arrivals = len(heads.widths) + heads.tiles
  names = {
    "k": heads.of_blocks(STAGES, TILE),
    "ds": [tiled(STAGES * heads.tiles, TILE, TILE, heads.dtype)],
    "dq": heads.of_blocks(COMPUTE_WARPGROUPS, TILE),
  }
  names |= barriers_of({"loaded": (arrivals, STAGES), "free": (COMPUTE_WARPGROUPS, STAGES)})

  @functools.partial(pl.run_scoped, **names, collective_axes="warpgroup")
  def _(**shared):
    *qkv, ds_array, dqkv = refs
    shared |= {"ds_array": ds_array, "dqkv": dqkv}
    block = QueryGradients(heads, shared)
    pl.when(block.warpgroup == COMPUTE_WARPGROUPS)(lambda: block.load_all(qkv))
    pl.when(block.warpgroup < COMPUTE_WARPGROUPS)(block.compute_all)


class QueryGradients(ThreadBlock):
  """A step of its work is a tile of a head's keys."""

  heads: Plan

  def load_all(self, qkv):
    plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
    steps = self.items * self.heads.tiles
    pl.loop(0, steps)(functools.partial(self.load, qkv))
    self.wait_for_last(self.free, steps, STAGES)

  def load(self, qkv, step):
    heads, slot, (i, part) = self.heads, step % STAGES, divmod(step, self.heads.tiles)
    keys = pl.ds(part * TILE, TILE)
    pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(self.free.at[slot]))
    for b in heads.blocks:
      from_ = self.head(qkv, 1, self.item(i), keys, b)
      plgpu.copy_gmem_to_smem(from_, self.k_rows[b].at[slot], self.loaded.at[slot])
    for tile in range(heads.tiles):
      queries = pl.ds(step * 0 + tile * TILE, TILE)
      from_ = self.ds_array.at[self.item(i), keys, queries]
      to = self.ds_rows[0].at[slot * heads.tiles + tile]
      plgpu.copy_gmem_to_smem(from_, to, self.loaded.at[slot])

  def compute_all(self):
    plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
    accs = [[sums(TILE, width) for width in self.heads.widths]] * self.heads.own_tiles
    pl.loop(0, self.items)(lambda i: pl.run_scoped(functools.partial(self.gradients, i), accs))
    plgpu.wait_smem_to_gmem(0)

  def gradients(self, i, accs):
    """Stores dQ of each second tile of a head's queries."""
    heads = self.heads

    @pl.loop(0, heads.tiles)
    def _(part):
      step = i * heads.tiles + part
      slot = step % STAGES
      plgpu.barrier_wait(self.loaded.at[slot])
      for n, blocks in enumerate(accs):
        # With an odd number of tiles, both warpgroups compute the last one.
        tile = jnp.minimum(self.tile(n), heads.tiles - 1)
        ds = self.ds[0].at[slot * heads.tiles + tile].transpose((1, 0))
        for b, acc in enumerate(blocks):
          plgpu.wgmma(acc, ds, self.k[b].at[slot])
      plgpu.wgmma_wait(0)
      plgpu.barrier_arrive(self.free.at[slot])

    for n, blocks in enumerate(accs):
      dq = [(acc[...] * heads.scale).astype(heads.dtype) for acc in blocks]
      pl.when(self.tile(n) < heads.tiles)(functools.partial(self.store, i, self.tile(n), dq))

  def tile(self, n):
    """The warpgroup's n-th."""
    return self.warpgroup + n * COMPUTE_WARPGROUPS

  def store(self, i, tile, dq):
    slot = self.warpgroup + varying(i)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for b, x in enumerate(dq):
      self.dq[b].at[slot][...] = x
    plgpu.commit_smem()
    for b in self.heads.blocks:
      to = self.head([self.dqkv], 0, self.item(i), pl.ds(tile * TILE, TILE), b)
      plgpu.copy_smem_to_gmem(self.dq_rows[b].at[slot], to)
