"""Softmax attention's backward pass on Hopper (H100, H200): Pallas Mosaic GPU, wgmma and TMA.

The kernel is persistent: one thread block runs on each SM and takes one head of one example after
another. Its keys and values stay in shared memory, and a ring of tiles of 64 queries passes by.
Each array is read and written once, and each of the five products is computed once:

- Two compute warpgroups own half of the keys each. They hold the gradients of these keys and values
  in registers. Probabilities are computed transposed, [keys, queries]: as registers they are then
  the left operand of the products with dO and Q.
- Both write dS to shared memory. They take turns to multiply a tile's dS with all keys.
- A memory warpgroup loads ahead (TMA). In its spare time it computes what a query needs once, and
  what a class token's key adds: 257 tokens are 256 keys for the tensor cores, and one in float32.
"""

import dataclasses
import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from sbjax import device as devices
from sbjax.pallas import attention_triton
from sbjax.pallas.attention_parts_sm90 import (
  BY_COLUMN,
  BY_ROW,
  TILE,
  across,
  first_column,
  store_vector,
  sums,
  tiled,
  varying,
  vector,
)

_COMPUTE_WARPGROUPS = 2
# A thread's. Three warpgroups start with 168 registers each: 56 + 2 * 224 = 3 * 168.
_MEMORY_REGISTERS, _COMPUTE_REGISTERS = 56, 224
_LOG2_E = math.log2(math.e)

attention_forward = attention_triton.attention_forward


@dataclasses.dataclass(frozen=True)
class Config:
  """What a thread block keeps in shared memory.

  stages: tiles of queries.
  kv_stages: heads' keys and values, the next head's included.
  ds_buffers: tiles of dS. With two, a warpgroup need not wait for the other's product.
  """

  stages: int = 2
  kv_stages: int = 1
  ds_buffers: int = 2


def default_config(tokens: int) -> Config:
  """The fastest of benchmarks/attention.py's on an H200."""
  if tokens > 129:
    return Config()
  return Config(stages=2 if tokens == 129 else 3, kv_stages=2)


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
  """`sbjax.attention_ops.attention_backward`, but for the rounding of sums.

  Heads of another size than 64, padding, and less than 65 or more than 257 tokens go to Triton.

  Args:
    num_sms: how many thread blocks run; None for one on each SM of the device.
    interpret: False, or plgpu.InterpretGPUParams for a run on the CPU.
  """
  batch, tokens, _, heads, head_dim = qkv[0].shape
  if head_dim != 64 or not 65 <= tokens <= 257 or length != tokens:
    return attention_triton.attention_backward(o, lse, do, *qkv, causal=causal, length=length)
  num_sms = num_sms or devices.num_sms(devices.target()) or 132
  config = config or default_config(tokens)
  return plgpu.kernel(
    functools.partial(_kernel, config=config, causal=causal),
    out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in qkv],
    grid=(min(batch * heads, num_sms),),
    grid_names=("sm",),
    num_threads=_COMPUTE_WARPGROUPS + 1,
    thread_name="warpgroup",
    kernel_name="sbjax_attention_backward",
    compiler_params=plgpu.CompilerParams(
      approx_math=True,
      unsafe_no_auto_barriers=True,  # `commit_smem` stands where one is needed.
      lowering_semantics=plgpu.LoweringSemantics.Lane,
    ),
    interpret=interpret,
  )(*qkv, o[:, :, None], do[:, :, None], jnp.pad(lse.reshape(-1), (0, TILE)))


def _kernel(*refs, config: Config, causal: bool):
  """Makes the gradients of qkv; `refs` are qkv, o, do and lse, and the gradients."""
  arrays = (len(refs) - 3) // 2
  qkv, (o, do, lse), dqkv = refs[:arrays], refs[arrays : arrays + 3], refs[arrays + 3 :]
  batch, tokens, _, heads, head_dim = qkv[0].shape
  stages, kv_stages, ds_buffers = config.stages, config.kv_stages, config.ds_buffers
  scale, dtype = head_dim**-0.5, qkv[0].dtype
  # The tensor cores' keys are a multiple of 128; a single key beyond is the memory warpgroup's.
  has_tail = tokens % 128 == 1
  keys = pl.cdiv(tokens - has_tail, 128) * 128
  own_keys = keys // _COMPUTE_WARPGROUPS
  tiles = pl.cdiv(tokens, TILE)

  def head(array, which, item, rows):
    """Rows of q, k or v, or of their gradient; of o and do with which = 0."""
    array, index = (array[0], which) if len(array) == 1 else (array[which], 0)
    return array.at[item // heads, rows, index, item % heads]

  @functools.partial(
    pl.run_scoped,
    q_smem=tiled(stages, TILE, head_dim, dtype),
    do_smem=tiled(stages, TILE, head_dim, dtype),
    o_smem=tiled(stages, TILE, head_dim, dtype),
    k_smem=tiled(kv_stages, keys, head_dim, dtype),
    v_smem=tiled(kv_stages, keys, head_dim, dtype),
    ds_smem=tiled(ds_buffers, keys, TILE, dtype),
    dq_smem=tiled(_COMPUTE_WARPGROUPS, TILE, head_dim, dtype),
    # Of each query: lse in base 2, delta, and the tail key's dS.
    query_smem=plgpu.SMEM((stages, 3, TILE), jnp.float32),
    # The tail key is the first of 8 rows, and so are its probabilities and dS.
    tail_k_smem=tiled(kv_stages, 8, head_dim, dtype),
    tail_v_smem=tiled(kv_stages, 8, head_dim, dtype),
    tail_p_smem=tiled(0, 8, TILE, dtype),
    tail_ds_smem=tiled(0, 8, TILE, dtype),
    loaded=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
    ready=plgpu.Barrier(num_arrivals=1, num_barriers=stages),
    free=plgpu.Barrier(num_arrivals=_COMPUTE_WARPGROUPS + 1, num_barriers=stages),
    kv_loaded=plgpu.Barrier(num_arrivals=2 * (keys // TILE + has_tail), num_barriers=kv_stages),
    kv_free=plgpu.Barrier(num_arrivals=_COMPUTE_WARPGROUPS + has_tail, num_barriers=kv_stages),
    # Of tiles whose dQ the one or the other warpgroup computes.
    ds_ready=plgpu.Barrier(num_arrivals=_COMPUTE_WARPGROUPS, num_barriers=2),
    ds_free=plgpu.Barrier(num_arrivals=1, num_barriers=2),
    collective_axes="warpgroup",
  )
  def _(
    q_smem, do_smem, o_smem, k_smem, v_smem, ds_smem, dq_smem, query_smem,
    tail_k_smem, tail_v_smem, tail_p_smem, tail_ds_smem,
    loaded, ready, free, kv_loaded, kv_free, ds_ready, ds_free,
  ):  # fmt: skip
    (q_tile, q_rows), (do_tile, do_rows), (o_tile, o_rows) = q_smem, do_smem, o_smem
    (k_tile, k_rows), (v_tile, v_rows) = k_smem, v_smem
    (ds_tile, ds_rows), (dq_tile, dq_rows) = ds_smem, dq_smem
    (tail_k_tile, tail_k_row), (tail_v_tile, tail_v_row) = tail_k_smem, tail_v_smem
    (tail_p_tile, tail_p_row), (tail_ds_tile, tail_ds_row) = tail_p_smem, tail_ds_smem
    warpgroup = lax.axis_index("warpgroup")
    sm, sms = lax.axis_index("sm"), lax.axis_size("sm")
    items = (batch * heads - sm + sms - 1) // sms

    def load_queries(step):
      """Starts to load the tile that the thread block computes in this step, if there is one."""
      slot = step % stages
      pl.when(step >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))

      @pl.when(step < items * tiles)
      def _():
        item, tile = sm + step // tiles * sms, step % tiles
        rows = pl.ds(tile * TILE, TILE)
        for array, smem in ((qkv, q_rows), ([do], do_rows), ([o], o_rows)):
          plgpu.copy_gmem_to_smem(head(array, 0, item, rows), smem.at[slot], loaded.at[slot])

    def load_keys(i):
      """Starts to load the keys and values of the thread block's i-th head, if there is one."""
      slot = i % kv_stages
      pl.when(i >= kv_stages)(lambda: plgpu.barrier_wait(kv_free.at[slot]))

      @pl.when(i < items)
      def _():
        item = sm + i * sms
        for which, smem in ((1, k_rows), (2, v_rows)):
          for first in range(0, keys, TILE):
            rows = pl.ds(i * 0 + first, TILE)
            to = smem.at[slot, pl.ds(first, TILE)]
            plgpu.copy_gmem_to_smem(head(qkv, which, item, rows), to, kv_loaded.at[slot])
        if has_tail:
          for which, smem in ((1, tail_k_row), (2, tail_v_row)):
            rows = head(qkv, which, item, pl.ds(i * 0 + keys, 8))
            plgpu.copy_gmem_to_smem(rows, smem.at[slot], kv_loaded.at[slot])

    @pl.when(warpgroup == _COMPUTE_WARPGROUPS)
    def _():
      plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")
      load_keys(jnp.int32(0))
      for step in range(stages - 1):
        load_queries(jnp.int32(step))
      if kv_stages == 2:
        load_keys(jnp.int32(1))

      def queries(step, i, tile, *accs):
        """Makes what all keys need of a tile of queries; the tail key's probabilities and dS."""
        slot, kv_slot = step % stages, i % kv_stages
        # TMA would need an address that is a multiple of 16 bytes.
        first = (sm + i * sms) * tokens + tile * TILE
        lse2 = vector(lse.at[pl.ds(first, TILE)], BY_ROW) * _LOG2_E
        plgpu.barrier_wait(loaded.at[slot])
        row = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=BY_ROW)
        # Rows beyond the last token are another head's, and must count for nothing.
        lse2 = jnp.where(row < tokens - tile * TILE, lse2, jnp.inf)
        delta = jnp.sum(
          o_tile.at[slot][...].astype(jnp.float32) * do_tile.at[slot][...].astype(jnp.float32),
          axis=1,
        )
        query_smem.at[slot, 0][...] = lse2
        query_smem.at[slot, 1][...] = delta
        if has_tail:

          def products(s_acc, dp_acc):
            plgpu.wgmma(s_acc, q_tile.at[slot], tail_k_tile.at[kv_slot].transpose((1, 0)))
            plgpu.wgmma(dp_acc, do_tile.at[slot], tail_v_tile.at[kv_slot].transpose((1, 0)))
            return [first_column(acc[...]) for acc in (s_acc, dp_acc)]

          s, dp = pl.run_scoped(products, *[sums(TILE, 8)] * 2)
          p = jnp.exp2(s * (scale * _LOG2_E) - lse2)
          if causal:
            p = jnp.where(row >= tokens - 1 - tile * TILE, p, 0.0)
          tail_p_row.at[0][...] = p.astype(dtype)
          tail_ds_row.at[0][...] = (p * (dp - delta)).astype(dtype)
          query_smem.at[slot, 2][...] = p * (dp - delta)
          plgpu.commit_smem()
        plgpu.barrier_arrive(ready.at[slot])
        if has_tail:
          dk_acc, dv_acc = accs
          plgpu.wgmma(dv_acc, do_tile.at[slot].transpose((1, 0)), tail_p_tile.transpose((1, 0)))
          plgpu.wgmma(dk_acc, q_tile.at[slot].transpose((1, 0)), tail_ds_tile.transpose((1, 0)))
          plgpu.wgmma_wait(0)
          plgpu.commit_smem()  # All warps have read the tail's rows.
        plgpu.barrier_arrive(free.at[slot])
        load_queries(step + stages - 1)

      @pl.loop(0, items)
      def _(i):
        item = sm + i * sms

        def whole_head(*accs):
          if has_tail:
            plgpu.barrier_wait(kv_loaded.at[i % kv_stages])
          # Keys and values are loaded when all warpgroups are about to leave the previous ones.
          if kv_stages == 2:
            queries(i * tiles, i, 0, *accs)
            pl.when(i > 0)(lambda: load_keys(i + 1))

          @pl.loop(kv_stages - 1, tiles)
          def _(tile):
            queries(i * tiles + tile, i, tile, *accs)

          if has_tail:
            plgpu.barrier_arrive(kv_free.at[i % kv_stages])
          if kv_stages == 1:
            load_keys(i + 1)
          for acc, which, factor in zip(accs, (1, 2), (scale, 1.0), strict=False):
            gradient = first_column(acc[...]) * factor
            store_vector(head(dqkv, which, item, tokens - 1), gradient.astype(dtype))

        accs = [sums(head_dim, 8)] * 2 if has_tail else []
        pl.run_scoped(whole_head, *accs)

      # The last tile's and head's buffers are free: nobody signals a barrier after this.
      load_queries(items * tiles + stages - 1)
      if kv_stages == 2:
        load_keys(items + 1)

    @pl.when(warpgroup < _COMPUTE_WARPGROUPS)
    def _():
      plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
      first_key = warpgroup * own_keys

      def gradients(step, i, tile, dk_accs, dv_accs):
        """Adds the tile's queries to the gradients of k and v, and stores its dS."""
        slot, kv_slot, ds_slot = step % stages, i % kv_stages + varying(step), step % ds_buffers
        plgpu.barrier_wait(loaded.at[slot])
        plgpu.barrier_wait(ready.at[slot])
        for n in range(own_keys // TILE):
          rows = pl.ds(first_key + n * TILE, TILE)

          def probabilities(acc, n=n, rows=rows):
            plgpu.wgmma(acc, k_tile.at[kv_slot, rows], q_tile.at[slot].transpose((1, 0)))
            lse2 = vector(query_smem.at[slot, 0], BY_COLUMN)
            p = jnp.exp2(acc[...] * (scale * _LOG2_E) - across(lse2, 1))
            return mask(p, first_key + n * TILE, tile)

          def logit_gradients(acc, p, rows=rows):
            plgpu.wgmma(acc, v_tile.at[kv_slot, rows], do_tile.at[slot].transpose((1, 0)))
            delta = vector(query_smem.at[slot, 1], BY_COLUMN)
            ds = p * (acc[...] - across(delta, 1))
            # The barrier keeps pairs in one register.
            return lax.optimization_barrier((p.astype(dtype), ds.astype(dtype)))

          scores = sums(TILE, TILE)
          p = pl.run_scoped(probabilities, scores)
          p, ds = pl.run_scoped(functools.partial(logit_gradients, p=p), scores)
          plgpu.wgmma(dv_accs[n], p, do_tile.at[slot])
          if n == 0:
            pl.when(tile >= ds_buffers)(
              lambda: plgpu.barrier_wait(ds_free.at[(step - ds_buffers) % 2])
            )
            # The stores of the previous head's gradients have left the buffers.
            pl.when(tile < ds_buffers)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
          ds_tile.at[ds_slot, rows][...] = ds
          plgpu.wgmma(dk_accs[n], ds, q_tile.at[slot])
          plgpu.wgmma_wait(0)

      def mask(p, first, tile):
        """Zeros for keys beyond the last token, and for later ones than the query."""
        if keys + has_tail == tokens and not causal:
          return p
        key = plgpu.broadcasted_iota(jnp.int32, p.shape, 0, layout=plgpu.Layout.WGMMA) + first
        if keys + has_tail > tokens:
          p = jnp.where(key < tokens, p, 0.0)
        if causal:
          query = plgpu.broadcasted_iota(jnp.int32, p.shape, 1, layout=plgpu.Layout.WGMMA)
          p = jnp.where(key <= query + tile * TILE, p, 0.0)
        return p

      def query_gradient(step, i, item, tile):
        """Stores the gradient of the tile's queries."""
        slot, kv_slot, ds_slot = step % stages, i % kv_stages + varying(step), step % ds_buffers
        plgpu.barrier_wait(ds_ready.at[warpgroup])

        def product(acc):
          plgpu.wgmma(acc, ds_tile.at[ds_slot].transpose((1, 0)), k_tile.at[kv_slot])
          return acc[...]

        dq = pl.run_scoped(product, sums(TILE, head_dim))
        plgpu.barrier_arrive(ds_free.at[warpgroup])
        if has_tail:
          ds = vector(query_smem.at[slot, 2], BY_ROW)
          tail_k = vector(tail_k_row.at[kv_slot, 0], BY_COLUMN)
          dq += across(ds, 0) * across(tail_k.astype(jnp.float32), 1)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        dq_tile.at[warpgroup + varying(step)][...] = (dq * scale).astype(dtype)
        plgpu.commit_smem()
        rows = pl.ds(tile * TILE, TILE)
        plgpu.copy_smem_to_gmem(dq_rows.at[warpgroup], head(dqkv, 0, item, rows))

      def key_gradients(i, item, dk_accs, dv_accs):
        """Stores the gradients of the warpgroup's keys and values by way of the buffers of dS."""
        for n, (which, accs) in enumerate(((2, dv_accs), (1, dk_accs))):
          if n == 0 or ds_buffers == 1:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
          for m, acc in enumerate(accs):
            rows = pl.ds(first_key + m * TILE, TILE)
            gradient = acc[...] * (scale if which == 1 else 1.0)
            ds_tile.at[n % ds_buffers + varying(i), rows][...] = gradient.astype(dtype)
          plgpu.commit_smem()
          for m in range(len(accs)):
            rows = pl.ds(first_key + m * TILE, TILE)
            plgpu.copy_smem_to_gmem(ds_rows.at[n % ds_buffers, rows], head(dqkv, which, item, rows))

      @pl.loop(0, items)
      def _(i):
        item = sm + i * sms
        plgpu.barrier_wait(kv_loaded.at[i % kv_stages])

        def whole_head(dk_accs, dv_accs):
          @pl.loop(0, tiles)
          def _(tile):
            step = i * tiles + tile
            gradients(step, i, tile, dk_accs, dv_accs)
            plgpu.commit_smem()
            plgpu.barrier_arrive(ds_ready.at[step % 2])
            pl.when(step % 2 == warpgroup)(lambda: query_gradient(step, i, item, tile))
            plgpu.barrier_arrive(free.at[step % stages])

          plgpu.barrier_arrive(kv_free.at[i % kv_stages])
          for n in range(ds_buffers, 0, -1):
            plgpu.barrier_wait(ds_free.at[((i + 1) * tiles - n) % 2])
          key_gradients(i, item, dk_accs, dv_accs)

        accs = [sums(TILE, head_dim)] * (own_keys // TILE)
        pl.run_scoped(whole_head, accs, accs)

      plgpu.wait_smem_to_gmem(0)
