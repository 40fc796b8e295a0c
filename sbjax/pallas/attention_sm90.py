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
  both,
  branches,
  column_blocks,
  first_column,
  in_first_row,
  load,
  store,
  sums,
  swizzled,
  tiled,
  varying,
  vector,
  with_zeros,
)

_COMPUTE_WARPGROUPS = 2
_O_STAGES = 2
_LOG2_E = math.log2(math.e)

attention_forward = attention_triton.attention_forward


@dataclasses.dataclass(frozen=True)
class Config:
  """What a thread block keeps in shared memory, and the registers of its threads.

  stages: tiles of queries.
  kv_stages: parts of heads' keys and values, the next part included.
  ds_buffers: tiles of dS. With two, a warpgroup need not wait for the other's product.
  memory_registers: of a thread of the memory warpgroup; the two compute warpgroups get the rest of
    3 * 168.
  """

  stages: int = 2
  kv_stages: int = 1
  ds_buffers: int = 2
  memory_registers: int = 56

  @property
  def compute_registers(self) -> int:
    return (3 * 168 - self.memory_registers) // _COMPUTE_WARPGROUPS


def default_config(tokens: int, head_dim: int) -> Config:
  """The fastest of benchmarks/attention.py's on an H200."""
  if head_dim > 64:
    return Config(ds_buffers=1 if tokens > 129 or head_dim > 96 else 2, memory_registers=88)
  if tokens > 129:
    return Config()
  return Config(stages=2 if tokens == 129 else 3, kv_stages=2)


def fits(tokens: int, head_dim: int) -> bool:
  """Whether shared memory and registers hold what the kernel needs of a head."""
  return 64 <= head_dim <= 128 and 65 <= tokens <= (257 if head_dim <= 80 else 129)


def split_keys(tokens: int, head_dim: int) -> tuple[bool, int, int]:
  """Whether the memory warpgroup has a key, and how many keys a part has, and how many parts."""
  # The tensor cores' keys are a multiple of 128; a single key beyond is the memory warpgroup's.
  has_tail = tokens % 128 == 1
  # The gradients of so many keys and values fit in two warpgroups' registers.
  keys = min(256 if head_dim <= 64 else 128, pl.cdiv(tokens - has_tail, 128) * 128)
  return has_tail, keys, pl.cdiv(tokens - has_tail, keys)


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
  if not fits(tokens, head_dim) or length != tokens:
    return attention_triton.attention_backward(o, lse, do, *qkv, causal=causal, length=length)
  num_sms = num_sms or devices.num_sms(devices.target()) or 132
  blocks = min(batch * heads, num_sms)
  out_type = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in qkv]
  if split_keys(tokens, head_dim)[2] > 1:
    shape = blocks, pl.cdiv(tokens, TILE) * TILE, sum(column_blocks(head_dim))
    out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))
  kernel = plgpu.kernel(
    functools.partial(
      _kernel,
      arrays=len(qkv),
      config=config or default_config(tokens, head_dim),
      causal=causal,
    ),
    out_type=out_type,
    grid=(blocks,),
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
  )
  results = kernel(*qkv, o[:, :, None], do[:, :, None], jnp.pad(lse.reshape(-1), (0, TILE)))
  return tuple(results[: len(qkv)])


def _kernel(*refs, arrays: int, config: Config, causal: bool):
  """Makes the gradients of qkv; `refs` are qkv, o, do and lse, the gradients, and sums of dq."""
  qkv, (o, do, lse), dqkv = refs[:arrays], refs[arrays : arrays + 3], refs[arrays + 3 :][:arrays]
  dq_sums = refs[2 * arrays + 3 :]
  batch, tokens, _, heads, head_dim = qkv[0].shape
  ds_buffers = config.ds_buffers
  scale, dtype = head_dim**-0.5, qkv[0].dtype
  has_tail, keys, parts = split_keys(tokens, head_dim)
  own_keys = keys // _COMPUTE_WARPGROUPS
  tiles = pl.cdiv(tokens, TILE)
  # Tiles of queries stay for all parts of the keys, of which one fits beside them.
  stages, kv_stages = (tiles, 1) if parts > 1 else (config.stages, config.kv_stages)
  # Of the last tile, of which a class token may be the only query.
  last_queries = next(n for n in (8, 16, 32, TILE) if n >= tokens - (tiles - 1) * TILE)
  widths = column_blocks(head_dim)
  blocks = range(len(widths))

  def head(array, which, item, rows, block):
    """Rows and a block of columns of q, k or v, or of their gradient; of o and do with which = 0."""
    array, index = (array[0], which) if len(array) == 1 else (array[which], 0)
    first, width = block * TILE, widths[block]
    # TMA clips a block that is wider than what is left of a head; a constant slice may not be.
    columns = pl.ds(first if first + width <= head_dim else item * 0 + first, width)
    return array.at[item // heads, rows, index, item % heads, columns]

  def of_blocks(buffers, rows):
    return [tiled(buffers, rows, width, dtype) for width in widths]

  @functools.partial(
    pl.run_scoped,
    q_smem=of_blocks(stages, TILE),
    do_smem=of_blocks(stages, TILE),
    o_smem=of_blocks(_O_STAGES, TILE),
    k_smem=of_blocks(kv_stages, keys),
    v_smem=of_blocks(kv_stages, keys),
    # wgmma multiplies operands that are tiled alike: dS is there for each width of blocks.
    ds_smem=[tiled(ds_buffers, keys, TILE, dtype)]
    + [swizzled((ds_buffers, keys, TILE), width, dtype) for width in widths if width < TILE],
    dq_smem=of_blocks(_COMPUTE_WARPGROUPS, TILE),
    # Of each query: lse in base 2, delta, and the tail key's dS.
    query_smem=plgpu.SMEM((stages, 3, TILE), jnp.float32),
    # The tail key is the first of 8 rows, and so are its probabilities and dS.
    tail_kv_smem=of_blocks(2 * kv_stages, 8),
    tail_p_smem=tiled(0, 8, TILE, dtype),
    tail_ds_smem=tiled(0, 8, TILE, dtype),
    tail_out_smem=[tiled(0, 8 if width == TILE else TILE, width, dtype) for width in widths],
    loaded=plgpu.Barrier(num_arrivals=2 * len(widths), num_barriers=stages),
    o_loaded=plgpu.Barrier(num_arrivals=len(widths), num_barriers=_O_STAGES),
    ready=plgpu.Barrier(num_arrivals=1, num_barriers=stages),
    free=plgpu.Barrier(num_arrivals=_COMPUTE_WARPGROUPS + 1, num_barriers=stages),
    kv_loaded=plgpu.Barrier(
      num_arrivals=2 * len(widths) * (keys // TILE + has_tail), num_barriers=kv_stages
    ),
    kv_free=plgpu.Barrier(num_arrivals=_COMPUTE_WARPGROUPS + has_tail, num_barriers=kv_stages),
    # Of tiles whose dQ the one or the other warpgroup computes.
    ds_ready=plgpu.Barrier(num_arrivals=_COMPUTE_WARPGROUPS, num_barriers=2),
    ds_free=plgpu.Barrier(num_arrivals=1, num_barriers=2),
    collective_axes="warpgroup",
  )
  def _(
    q_smem, do_smem, o_smem, k_smem, v_smem, ds_smem, dq_smem, query_smem,
    tail_kv_smem, tail_p_smem, tail_ds_smem, tail_out_smem,
    loaded, o_loaded, ready, free, kv_loaded, kv_free, ds_ready, ds_free,
  ):  # fmt: skip
    # Of each block of columns, for wgmma and for TMA.
    (q_tile, q_rows), (do_tile, do_rows), (o_tile, o_rows) = map(both, (q_smem, do_smem, o_smem))
    (k_tile, k_rows), (v_tile, v_rows), (dq_tile, dq_rows) = map(both, (k_smem, v_smem, dq_smem))
    (tail_kv_tile, tail_kv_row), (tail_out_tile, tail_out_row) = map(
      both, (tail_kv_smem, tail_out_smem)
    )
    (ds_tile, ds_rows), *ds_copies = ds_smem
    (tail_p_tile, tail_p_row), (tail_ds_tile, tail_ds_row) = tail_p_smem, tail_ds_smem
    warpgroup = lax.axis_index("warpgroup")
    sm, sms = lax.axis_index("sm"), lax.axis_size("sm")
    # The thread block's heads; a unit of its work is a part of the keys of one.
    items = (batch * heads - sm + sms - 1) // sms

    def if_part(unit, part, function):
      return pl.when(unit % parts == part)(function) if parts > 1 else function()

    def slot_of(i, tile):
      return tile if parts > 1 else (i * tiles + tile) % stages

    def load_tile(i, tile, arrays, slot, barrier):
      """Starts to load a tile of queries of the thread block's i-th head, if there is one."""

      @pl.when(i < items)
      def _():
        for array, smem in arrays:
          for n in blocks:
            from_ = head(array, 0, sm + i * sms, pl.ds(tile * TILE, TILE), n)
            plgpu.copy_gmem_to_smem(from_, smem[n].at[slot], barrier.at[slot])

    def load_queries(i, tile):
      slot = slot_of(i, tile)
      pl.when(i * tiles + tile >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
      load_tile(i, tile, ((qkv, q_rows), ([do], do_rows)), slot, loaded)

    def load_o(step):
      load_tile(*divmod(step, tiles), (([o], o_rows),), step % _O_STAGES, o_loaded)

    def load_keys(unit):
      """Starts to load the keys and values of a unit, if there is one."""
      slot = unit % kv_stages
      pl.when(unit >= kv_stages)(lambda: plgpu.barrier_wait(kv_free.at[slot]))

      @pl.when(unit < items * parts)
      def _():
        item, part = sm + unit // parts * sms, unit % parts

        def copy(which, smem, first, rows):
          for n in blocks:
            from_ = head(qkv, which, item, pl.ds(unit * 0 + first, rows), n)
            plgpu.copy_gmem_to_smem(from_, smem[n], kv_loaded.at[slot])

        for which, smem in ((1, k_rows), (2, v_rows)):
          for first in range(0, keys, TILE):
            to = [ref.at[slot, pl.ds(first, TILE)] for ref in smem]
            copy(which, to, part * keys + first, TILE)
        if has_tail:
          for which in (1, 2):
            copy(which, [ref.at[2 * slot + which - 1] for ref in tail_kv_row], tokens - 1, 8)

    @pl.when(warpgroup == _COMPUTE_WARPGROUPS)
    def _():
      plgpu.set_max_registers(config.memory_registers, action="decrease")
      load_keys(jnp.int32(0))
      for step in range(_O_STAGES):
        load_o(jnp.int32(step))
      for step in range(stages - (parts == 1)):
        load_queries(*divmod(jnp.int32(step), tiles))
      if kv_stages == 2:
        load_keys(jnp.int32(1))

      def queries(i, tile, *accs):
        """Makes what all keys need of a tile of queries, and the tail key's gradients of it."""
        step = i * tiles + tile
        slot, o_slot, kv_slot = slot_of(i, tile), step % _O_STAGES, i * parts % kv_stages
        # TMA would need an address that is a multiple of 16 bytes.
        first = (sm + i * sms) * tokens + tile * TILE
        lse2 = vector(lse.at[pl.ds(first, TILE)], BY_ROW) * _LOG2_E
        plgpu.barrier_wait(loaded.at[slot])
        plgpu.barrier_wait(o_loaded.at[o_slot])
        row = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=BY_ROW)
        # Rows beyond the last token are another head's, and must count for nothing.
        lse2 = jnp.where(row < tokens - tile * TILE, lse2, jnp.inf)
        delta = sum(
          jnp.sum(
            o_tile[n].at[o_slot][...].astype(jnp.float32)
            * do_tile[n].at[slot][...].astype(jnp.float32),
            axis=1,
          )
          for n in blocks
        )
        query_smem.at[slot, 0][...] = lse2
        query_smem.at[slot, 1][...] = delta

        def tail_probabilities():
          def products(s_acc, dp_acc):
            for n in blocks:
              k, v = (tail_kv_tile[n].at[2 * kv_slot + m].transpose((1, 0)) for m in range(2))
              plgpu.wgmma(s_acc, q_tile[n].at[slot], k)
              plgpu.wgmma(dp_acc, do_tile[n].at[slot], v)
            return [first_column(acc[...]) for acc in (s_acc, dp_acc)]

          s, dp = pl.run_scoped(products, *[sums(TILE, 8)] * 2)
          p = jnp.exp2(s * (scale * _LOG2_E) - lse2)
          if causal:
            p = jnp.where(row >= tokens - 1 - tile * TILE, p, 0.0)
          tail_p_row.at[0][...] = p.astype(dtype)
          tail_ds_row.at[0][...] = (p * (dp - delta)).astype(dtype)
          query_smem.at[slot, 2][...] = p * (dp - delta)

        def tail_gradients():
          for acc_blocks, b_tile, a_tile, a_row in zip(
            accs, (q_tile, do_tile), (tail_ds_tile, tail_p_tile), (tail_ds_row, tail_p_row),
            strict=True,
          ):  # fmt: skip
            for n, acc in enumerate(acc_blocks):
              b = b_tile[n].at[slot]
              if widths[n] == TILE:
                plgpu.wgmma(acc, b.transpose((1, 0)), a_tile.transpose((1, 0)))
              else:
                plgpu.wgmma(acc, in_first_row(vector(a_row.at[0], BY_COLUMN)), b)
          plgpu.wgmma_wait(0)
          plgpu.commit_smem()  # All warps have read the tail's rows.

        if has_tail:
          tail_probabilities()
        plgpu.commit_smem()  # All warps have read o, too.
        plgpu.barrier_arrive(ready.at[slot])
        load_o(step + _O_STAGES)
        if has_tail:
          tail_gradients()
        plgpu.barrier_arrive(free.at[slot])
        if parts == 1:
          load_queries(*divmod(step + stages - 1, tiles))

      def store_tail(i, *accs):
        for which, acc_blocks, factor in zip((1, 2), accs, (scale, 1.0), strict=True):
          plgpu.wait_smem_to_gmem(0, wait_read_only=True)
          for n, acc in enumerate(acc_blocks):
            if widths[n] == TILE:
              tail_out_row[n].at[0][...] = (first_column(acc[...]) * factor).astype(dtype)
            else:
              tail_out_tile[n][...] = (acc[...] * factor).astype(dtype)
          plgpu.commit_smem()
          for n in blocks:
            rows = pl.ds(i * 0 + tokens - 1, tail_out_row[n].shape[0])
            to = head(dqkv, which, sm + i * sms, rows, n)
            plgpu.copy_smem_to_gmem(tail_out_row[n], to)

      @pl.loop(0, items)
      def _(i):
        def whole_head(*accs):
          kv_slot = i * parts % kv_stages
          if has_tail:
            plgpu.barrier_wait(kv_loaded.at[kv_slot])
          # Keys and values are loaded when all warpgroups are about to leave the previous ones.
          if kv_stages == 2:
            queries(i, 0, *accs)
            pl.when(i > 0)(lambda: load_keys(i + 1))

          pl.loop(kv_stages - 1, tiles)(lambda tile: queries(i, tile, *accs))
          if has_tail:
            plgpu.barrier_arrive(kv_free.at[kv_slot])
            store_tail(i, *accs)
          for part in range(1, parts):
            load_keys(i * parts + part)
            if has_tail:
              plgpu.barrier_wait(kv_loaded.at[0])
              plgpu.barrier_arrive(kv_free.at[0])
          if parts > 1:
            pl.loop(0, tiles)(lambda tile: load_queries(i + 1, tile))
          if kv_stages == 1:
            load_keys((i + 1) * parts)

        # The gradients of 64 columns are transposed: a product has at least 64 rows.
        accs = [sums(TILE, 8 if width == TILE else width) for width in widths]
        pl.run_scoped(whole_head, *[accs] * 2 * has_tail)

      # The last tile's and head's buffers are free: nobody signals a barrier after this.
      if parts == 1:
        load_queries(*divmod(items * tiles + stages - 1, tiles))
      if kv_stages == 2:
        load_keys(items + 1)
      if has_tail:
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup < _COMPUTE_WARPGROUPS)
    def _():
      plgpu.set_max_registers(config.compute_registers, action="increase")
      first_key = warpgroup * own_keys

      def gradients(step, unit, tile, dk_accs, dv_accs, queries):
        """Adds the tile's first queries to the gradients of k and v, and stores its dS."""
        slot, ds_slot = slot_of(unit // parts, tile), step % ds_buffers
        kv_slot = unit % kv_stages + varying(step)

        def wait():
          plgpu.barrier_wait(loaded.at[slot])
          plgpu.barrier_wait(ready.at[slot])

        if_part(unit, 0, wait)
        for n in range(own_keys // TILE):
          rows = pl.ds(first_key + n * TILE, TILE)

          def product(acc, left, right, rows=rows):
            for b in blocks:
              of_queries = right[b].at[slot, pl.ds(0, queries)]
              plgpu.wgmma(acc, left[b].at[kv_slot, rows], of_queries.transpose((1, 0)))
            return acc[...]

          def probabilities(acc, n=n):
            s = product(acc, k_tile, q_tile)
            lse2 = vector(query_smem.at[slot, 0, pl.ds(0, queries)], BY_COLUMN)
            p = jnp.exp2(s * (scale * _LOG2_E) - across(lse2, 1, queries))
            return mask(p, unit % parts * keys + first_key, n * TILE, tile)

          def logit_gradients(acc, p):
            dp = product(acc, v_tile, do_tile)
            delta = vector(query_smem.at[slot, 1, pl.ds(0, queries)], BY_COLUMN)
            ds = p * (dp - across(delta, 1, queries))
            # The barrier keeps pairs in one register.
            p, ds = lax.optimization_barrier((p.astype(dtype), ds.astype(dtype)))
            return with_zeros(p), with_zeros(ds)

          scores = sums(TILE, queries)
          p = pl.run_scoped(probabilities, scores)
          p, ds = pl.run_scoped(functools.partial(logit_gradients, p=p), scores)
          for b in blocks:
            plgpu.wgmma(dv_accs[n][b], p, do_tile[b].at[slot])
          if n == 0:
            pl.when(tile >= ds_buffers)(
              lambda: plgpu.barrier_wait(ds_free.at[(owner(unit, tile) - ds_buffers) % 2])
            )
            if len(blocks) == 1:
              # The stores of the previous unit's gradients have left the buffers.
              pl.when(tile < ds_buffers)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
          for ref in (ds_tile, *ds_copies):
            ref.at[ds_slot, rows][...] = ds
          for b in blocks:
            plgpu.wgmma(dk_accs[n][b], ds, q_tile[b].at[slot])
          plgpu.wgmma_wait(0)

      def mask(p, first, own, tile):
        """Zeros for keys beyond the last token, and for later ones than the query."""
        beyond = keys * parts - own_keys + own + TILE > tokens  # Of the last warpgroup's.
        if not beyond and not causal:
          return p
        key = plgpu.broadcasted_iota(jnp.int32, p.shape, 0, layout=plgpu.Layout.WGMMA) + first + own
        if beyond:
          p = jnp.where(key < tokens, p, 0.0)
        if causal:
          query = plgpu.broadcasted_iota(jnp.int32, p.shape, 1, layout=plgpu.Layout.WGMMA)
          p = jnp.where(key <= query + tile * TILE, p, 0.0)
        return p

      def query_gradient(step, unit, tile):
        """Stores the gradient of the tile's queries, or its sum so far."""
        slot, ds_slot = slot_of(unit // parts, tile), step % ds_buffers
        kv_slot = unit % kv_stages + varying(step)
        ds_for = dict(
          zip([TILE, *(w for w in widths if w < TILE)], [ds_tile, *ds_copies], strict=True)
        )
        rows, part = pl.ds(tile * TILE, TILE), unit % parts
        so_far = [ref.at[sm, rows, pl.ds(n * TILE, widths[n])] for ref in dq_sums for n in blocks]
        before = lax.cond(part > 0, *branches(so_far)) if so_far else []
        first_part = 1.0 if parts == 1 else jnp.where(part == 0, 1.0, 0.0)
        plgpu.barrier_wait(ds_ready.at[warpgroup])

        def product(acc, n):
          ds = ds_for[widths[n]].at[ds_slot].transpose((1, 0))
          plgpu.wgmma(acc, ds, k_tile[n].at[kv_slot])
          return acc[...]

        def stage(n, dq):
          dq_tile[n].at[warpgroup + varying(step)][...] = (dq * scale).astype(dtype)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for n in blocks:
          dq = pl.run_scoped(functools.partial(product, n=n), sums(TILE, widths[n]))
          if has_tail:
            ds = vector(query_smem.at[slot, 2], BY_ROW) * first_part
            tail_k = vector(tail_kv_row[n].at[2 * kv_slot, 0], BY_COLUMN).astype(jnp.float32)
            dq += across(ds, 0, widths[n]) * across(tail_k, 1, widths[n])
          if before:
            dq += before[n]
            pl.when(part < parts - 1)(functools.partial(store, so_far[n], dq))
          if_part(unit, parts - 1, functools.partial(stage, n, dq))
        plgpu.barrier_arrive(ds_free.at[warpgroup])
        plgpu.commit_smem()

        def send():
          for n in blocks:
            to = head(dqkv, 0, sm + unit // parts * sms, rows, n)
            plgpu.copy_smem_to_gmem(dq_rows[n].at[warpgroup], to)

        if_part(unit, parts - 1, send)

      def key_gradients(unit, dk_accs, dv_accs):
        """Stores the gradients of the warpgroup's keys and values by way of shared memory."""
        for m, (which, accs) in enumerate(((2, dv_accs), (1, dk_accs))):
          if m == 0 or ds_buffers == 1 or len(blocks) > 1:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

          def buffers(n, b, m=m):
            if len(blocks) > 1:
              return [ref[b].at[warpgroup + varying(unit)] for ref in (dq_tile, dq_rows)]
            rows = pl.ds(first_key + n * TILE, TILE)
            return [ref.at[m % ds_buffers + varying(unit), rows] for ref in (ds_tile, ds_rows)]

          for n, acc_blocks in enumerate(accs):
            for b, acc in enumerate(acc_blocks):
              gradient = acc[...] * (scale if which == 1 else 1.0)
              buffers(n, b)[0][...] = gradient.astype(dtype)
          plgpu.commit_smem()
          for n in range(len(accs)):
            rows = pl.ds(unit % parts * keys + first_key + n * TILE, TILE)
            for b in blocks:
              to = head(dqkv, which, sm + unit // parts * sms, rows, b)
              plgpu.copy_smem_to_gmem(buffers(n, b)[1], to)

      def owner(unit, tile):
        """The warpgroup that computes dQ of a tile, which is the same for all parts of a head."""
        return (tile + unit // parts) % 2

      @pl.loop(0, items * parts)
      def _(unit):
        plgpu.barrier_wait(kv_loaded.at[unit % kv_stages])

        def whole_unit(dk_accs, dv_accs):
          def compute(tile, queries):
            step = unit // parts * tiles + tile
            gradients(step, unit, tile, dk_accs, dv_accs, queries)
            plgpu.commit_smem()
            plgpu.barrier_arrive(ds_ready.at[owner(unit, tile)])
            pl.when(owner(unit, tile) == warpgroup)(lambda: query_gradient(step, unit, tile))
            if_part(
              unit, parts - 1, lambda: plgpu.barrier_arrive(free.at[slot_of(unit // parts, tile)])
            )

          has_short_tile = last_queries < TILE
          pl.loop(0, tiles - has_short_tile)(lambda tile: compute(tile, TILE))
          if has_short_tile:
            compute(tiles - 1 + varying(unit), last_queries)

          plgpu.barrier_arrive(kv_free.at[unit % kv_stages])
          for n in range(ds_buffers, 0, -1):
            plgpu.barrier_wait(ds_free.at[owner(unit, tiles - n)])
          key_gradients(unit, dk_accs, dv_accs)

        accs = [[sums(TILE, width) for width in widths]] * (own_keys // TILE)
        pl.run_scoped(whole_unit, accs, accs)

      plgpu.wait_smem_to_gmem(0)
