"""Softmax attention in Triton for longer sequences: each program has a tile of queries, or of keys.

Keys stream past a tile of queries, in the forward pass with a running maximum. In the backward pass
programs of queries come first and also leave delta, the sum of o * do over the head's size. Then
queries stream past tiles of keys. That is seven matmuls instead of five, but nothing is added in
memory, and several programs share a multiprocessor. The last tile is narrower where few tokens are
left, and its program takes wider steps.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from sbjax.pallas.triton.attention_parts import (
  LOG2_E,
  LOG_2,
  ROWS,
  add_dot,
  dot_transposed,
  head_start,
  heads_of,
  load_lse,
  load_tile,
  masked,
  pieces,
  power_of_two,
  row_dot,
  shape_constants,
  store_tile,
  three,
  zeros,
)
from sbjax.pallas.triton.call import triton_call
from sbjax.pallas.triton.rounding import larger, plus

_WIDE_STEP = 64  # Of a last tile's program, so that the tensor cores have enough rows.

_struct = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class TileConfig:
  """How a program goes over its head.

  block: rows of a program's tile.
  step: rows of the other operand that it takes at a time.
  warps: of a program.
  stages: how many steps' loads are in flight.
  """

  block: int
  step: int
  warps: int = 4
  stages: int = 3


def forward_config(head_dim: int) -> TileConfig:
  return TileConfig(64, 64) if head_dim <= 80 else TileConfig(128, 64, stages=2)


def queries_config(head_dim: int) -> TileConfig:
  return TileConfig(64, 64) if head_dim <= 80 else TileConfig(128, 32)


def keys_config(head_dim: int) -> TileConfig:
  return TileConfig(64, 64) if 64 < head_dim <= 80 else TileConfig(64, 32)


def attention_forward(
  *qkv: jax.Array, causal: bool, length: int, config: TileConfig | None = None
) -> tuple[jax.Array, jax.Array]:
  """`sbjax.ops.attention.attention_forward`, but for the rounding of sums."""
  batch, rows, _, heads, head_dim = qkv[0].shape
  config = forward_config(head_dim) if config is None else config
  return triton_call(
    *three(qkv),
    kernel=_attention_forward_kernel,
    name="sbjax_attention_forward",
    out=(
      _struct((batch, rows, heads, head_dim), qkv[0].dtype),
      _struct((batch, heads, rows), jnp.float32),
    ),
    **_tiles(batch * heads, rows, length, config),
    **shape_constants(qkv, causal, length),
  )


def attention_backward(
  o: jax.Array,
  lse: jax.Array,
  do: jax.Array,
  *qkv: jax.Array,
  causal: bool,
  length: int,
  config: TileConfig | None = None,
) -> tuple[jax.Array, ...]:
  """`sbjax.ops.attention.attention_backward`, but for the rounding of sums."""
  batch, rows, arrays, heads, head_dim = qkv[0].shape
  constants = shape_constants(qkv, causal, length)
  whole = _struct(qkv[0].shape, qkv[0].dtype)
  dq, delta = triton_call(
    *(*three(qkv), o, lse, do),
    kernel=_attention_queries_kernel,
    name="sbjax_attention_backward_queries",
    out=(whole, _struct(lse.shape, jnp.float32)),
    **_tiles(batch * heads, rows, length, config or queries_config(head_dim)),
    **constants,
  )
  packed = arrays == 3
  gradients = triton_call(
    *(*three(qkv), delta, lse, do, *((dq,) if packed else ())),
    kernel=_attention_packed_keys_kernel if packed else _attention_keys_kernel,
    name="sbjax_attention_backward_keys",
    out=(whole,) if packed else (whole, whole),
    in_place={6: 0} if packed else None,
    **_tiles(batch * heads, rows, length, config or keys_config(head_dim)),
    **constants,
  )
  return tuple(gradients) if packed else (dq, *gradients)


def _tiles(heads: int, rows: int, length: int, config: TileConfig) -> dict:
  """How `rows` are cut into programs, and `length` into steps."""
  tiles = math.ceil(rows / config.block)
  last = rows - (tiles - 1) * config.block
  return {
    "grid": heads * tiles,
    "num_warps": config.warps,
    "TILES": tiles,
    "BLOCK": config.block,
    "LAST": power_of_two(last),
    "STEP": config.step,
    "REST": pieces(length, config.step, length // config.step * config.step),
    "WIDE_STEP": _WIDE_STEP,
    "WIDE_REST": pieces(length, _WIDE_STEP, length // _WIDE_STEP * _WIDE_STEP),
    "STAGES": config.stages,
  }


@triton.jit
def _attention_forward_kernel(
  q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
  TILES: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr, STEP: tl.constexpr,
  REST: tl.constexpr, WIDE_STEP: tl.constexpr, WIDE_REST: tl.constexpr, STAGES: tl.constexpr,
  L: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
  ARRAYS: tl.constexpr, WIDTHS: tl.constexpr, CAUSAL: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
  head, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
  q_ptr, k_ptr, v_ptr = heads_of(q_ptr, k_ptr, v_ptr, head, PADDED, HEADS, D, ARRAYS)
  o_ptr += head_start(head, PADDED, HEADS, D, 1)
  lse_ptr += head * PADDED
  if LAST == BLOCK or tile < TILES - 1:
    _forward(
      q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, tile * BLOCK, BLOCK, STEP, REST,
      L, PADDED, HEADS, D, ARRAYS, WIDTHS, CAUSAL, SCALE, STAGES,
    )  # fmt: skip
  else:
    _forward(
      q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, tile * BLOCK, LAST, WIDE_STEP, WIDE_REST,
      L, PADDED, HEADS, D, ARRAYS, WIDTHS, CAUSAL, SCALE, 1,
    )  # fmt: skip


@triton.jit
def _forward(
  q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, first, SIZE: tl.constexpr, STEP: tl.constexpr,
  REST: tl.constexpr, L: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr,
  D: tl.constexpr, ARRAYS: tl.constexpr, WIDTHS: tl.constexpr, CAUSAL: tl.constexpr,
  SCALE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
  """Attention of SIZE queries from `first` on."""
  q = load_tile(q_ptr, first, SIZE, L, HEADS, D, ARRAYS, WIDTHS)
  largest = tl.full([SIZE], float("-inf"), tl.float32)
  total = tl.full([SIZE], 0.0, tl.float32)
  o = zeros(SIZE, WIDTHS)
  for i in tl.range(_steps_before(first + SIZE, STEP, L, CAUSAL), num_stages=STAGES):
    largest, total, o = _add_keys(
      q, largest, total, o, k_ptr, v_ptr, first, i * STEP, STEP, False,
      L, HEADS, D, ARRAYS, WIDTHS, CAUSAL, SCALE,
    )  # fmt: skip
  for i in tl.static_range(len(REST)):
    largest, total, o = _add_keys(
      q, largest, total, o, k_ptr, v_ptr, first, REST[i][0], REST[i][1], True,
      L, HEADS, D, ARRAYS, WIDTHS, CAUSAL, SCALE,
    )  # fmt: skip
  store_tile(o_ptr, o, (1.0 / total)[:, None], first, SIZE, PADDED, HEADS, D, 1, WIDTHS)
  rows = first + tl.arange(0, SIZE)
  tl.store(lse_ptr + rows, (largest + tl.log2(total)) * LOG_2, mask=rows < PADDED)


@triton.jit
def _add_keys(
  q, largest, total, o, k_ptr, v_ptr, first_row, first, SIZE: tl.constexpr, BEYOND: tl.constexpr,
  L: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, ARRAYS: tl.constexpr,
  WIDTHS: tl.constexpr, CAUSAL: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
  """Adds SIZE keys and values from `first` on to a softmax with a running maximum."""
  end = L if BEYOND else None
  k = load_tile(k_ptr, first, SIZE, end, HEADS, D, ARRAYS, WIDTHS)
  v = load_tile(v_ptr, first, SIZE, end, HEADS, D, ARRAYS, WIDTHS)
  s = masked(dot_transposed(q, k), first_row, first, L, CAUSAL, BEYOND)
  larger_now = larger(largest, tl.reduce(s, 1, larger) * (SCALE * LOG2_E))
  shrink = tl.exp2(largest - larger_now)
  p = tl.exp2(tl.fma(s, SCALE * LOG2_E, -larger_now[:, None]))
  shrunk = ()
  for i in tl.static_range(len(o)):
    shrunk += (o[i] * (shrink[None, :] if q[0].shape[0] < ROWS else shrink[:, None]),)
  o = add_dot(shrunk, p.to(k_ptr.dtype.element_ty), v)
  return larger_now, total * shrink + tl.reduce(p, 1, plus), o


@triton.jit
def _attention_queries_kernel(
  q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, do_ptr, dq_ptr, delta_ptr,
  TILES: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr, STEP: tl.constexpr,
  REST: tl.constexpr, WIDE_STEP: tl.constexpr, WIDE_REST: tl.constexpr, STAGES: tl.constexpr,
  L: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
  ARRAYS: tl.constexpr, WIDTHS: tl.constexpr, CAUSAL: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
  head, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
  q_ptr, k_ptr, v_ptr = heads_of(q_ptr, k_ptr, v_ptr, head, PADDED, HEADS, D, ARRAYS)
  dq_ptr += head_start(head, PADDED, HEADS, D, ARRAYS)
  o_ptr += head_start(head, PADDED, HEADS, D, 1)
  do_ptr += head_start(head, PADDED, HEADS, D, 1)
  lse_ptr += head * PADDED
  delta_ptr += head * PADDED
  if LAST == BLOCK or tile < TILES - 1:
    _queries(
      q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, do_ptr, dq_ptr, delta_ptr, tile * BLOCK, BLOCK, STEP,
      REST, L, PADDED, HEADS, D, ARRAYS, WIDTHS, CAUSAL, SCALE, STAGES,
    )  # fmt: skip
  else:
    _queries(
      q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, do_ptr, dq_ptr, delta_ptr, tile * BLOCK, LAST,
      WIDE_STEP, WIDE_REST, L, PADDED, HEADS, D, ARRAYS, WIDTHS, CAUSAL, SCALE, 1,
    )  # fmt: skip


@triton.jit
def _queries(
  q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, do_ptr, dq_ptr, delta_ptr, first, SIZE: tl.constexpr,
  STEP: tl.constexpr, REST: tl.constexpr, L: tl.constexpr, PADDED: tl.constexpr,
  HEADS: tl.constexpr, D: tl.constexpr, ARRAYS: tl.constexpr, WIDTHS: tl.constexpr,
  CAUSAL: tl.constexpr, SCALE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
  """Stores the gradient and delta of SIZE queries from `first` on."""
  q = load_tile(q_ptr, first, SIZE, L, HEADS, D, ARRAYS, WIDTHS)
  do = load_tile(do_ptr, first, SIZE, L, HEADS, D, 1, WIDTHS)
  delta = row_dot(do, load_tile(o_ptr, first, SIZE, L, HEADS, D, 1, WIDTHS))
  rows = first + tl.arange(0, SIZE)
  tl.store(delta_ptr + rows, delta, mask=rows < PADDED)
  lse, dq = load_lse(lse_ptr, first, SIZE, L), zeros(SIZE, WIDTHS)
  for i in tl.range(_steps_before(first + SIZE, STEP, L, CAUSAL), num_stages=STAGES):
    dq = _add_keys_gradient(
      q, do, lse, delta, dq, k_ptr, v_ptr, first, i * STEP, STEP, False,
      L, HEADS, D, ARRAYS, WIDTHS, CAUSAL, SCALE,
    )  # fmt: skip
  for i in tl.static_range(len(REST)):
    dq = _add_keys_gradient(
      q, do, lse, delta, dq, k_ptr, v_ptr, first, REST[i][0], REST[i][1], True,
      L, HEADS, D, ARRAYS, WIDTHS, CAUSAL, SCALE,
    )  # fmt: skip
  store_tile(dq_ptr, dq, SCALE, first, SIZE, PADDED, HEADS, D, ARRAYS, WIDTHS)


@triton.jit
def _add_keys_gradient(
  q, do, lse, delta, dq, k_ptr, v_ptr, first_row, first, SIZE: tl.constexpr, BEYOND: tl.constexpr,
  L: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, ARRAYS: tl.constexpr,
  WIDTHS: tl.constexpr, CAUSAL: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
  """Adds the part of SIZE keys from `first` on to the gradient of queries."""
  end = L if BEYOND else None
  k = load_tile(k_ptr, first, SIZE, end, HEADS, D, ARRAYS, WIDTHS)
  v = load_tile(v_ptr, first, SIZE, end, HEADS, D, ARRAYS, WIDTHS)
  logits = tl.fma(dot_transposed(q, k), SCALE * LOG2_E, -lse[:, None])
  p = tl.exp2(masked(logits, first_row, first, L, CAUSAL, BEYOND))
  ds = p * (dot_transposed(do, v) - delta[:, None])
  return add_dot(dq, ds.to(k_ptr.dtype.element_ty), k)


@triton.jit
def _attention_keys_kernel(
  q_ptr, k_ptr, v_ptr, delta_ptr, lse_ptr, do_ptr, dk_ptr, dv_ptr,
  TILES: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr, STEP: tl.constexpr,
  REST: tl.constexpr, WIDE_STEP: tl.constexpr, WIDE_REST: tl.constexpr, STAGES: tl.constexpr,
  L: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
  ARRAYS: tl.constexpr, WIDTHS: tl.constexpr, CAUSAL: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
  head, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
  q_ptr, k_ptr, v_ptr = heads_of(q_ptr, k_ptr, v_ptr, head, PADDED, HEADS, D, ARRAYS)
  _, dk_ptr, dv_ptr = heads_of(dk_ptr, dk_ptr, dv_ptr, head, PADDED, HEADS, D, ARRAYS)
  do_ptr += head_start(head, PADDED, HEADS, D, 1)
  lse_ptr += head * PADDED
  delta_ptr += head * PADDED
  if LAST == BLOCK or tile < TILES - 1:
    _keys(
      q_ptr, k_ptr, v_ptr, delta_ptr, lse_ptr, do_ptr, dk_ptr, dv_ptr, tile * BLOCK, BLOCK, STEP,
      REST, L, PADDED, HEADS, D, ARRAYS, WIDTHS, CAUSAL, SCALE, STAGES,
    )  # fmt: skip
  else:
    _keys(
      q_ptr, k_ptr, v_ptr, delta_ptr, lse_ptr, do_ptr, dk_ptr, dv_ptr, tile * BLOCK, LAST,
      WIDE_STEP, WIDE_REST, L, PADDED, HEADS, D, ARRAYS, WIDTHS, CAUSAL, SCALE, 1,
    )  # fmt: skip


@triton.jit
def _attention_packed_keys_kernel(
  q_ptr, k_ptr, v_ptr, delta_ptr, lse_ptr, do_ptr, gradients_ptr, same_ptr,
  TILES: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr, STEP: tl.constexpr,
  REST: tl.constexpr, WIDE_STEP: tl.constexpr, WIDE_REST: tl.constexpr, STAGES: tl.constexpr,
  L: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
  ARRAYS: tl.constexpr, WIDTHS: tl.constexpr, CAUSAL: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
  """`_attention_keys_kernel` that writes beside dq, into the array that has it."""
  _attention_keys_kernel(
    q_ptr, k_ptr, v_ptr, delta_ptr, lse_ptr, do_ptr, gradients_ptr, gradients_ptr,
    TILES, BLOCK, LAST, STEP, REST, WIDE_STEP, WIDE_REST, STAGES,
    L, PADDED, HEADS, D, ARRAYS, WIDTHS, CAUSAL, SCALE,
  )  # fmt: skip


@triton.jit
def _keys(
  q_ptr, k_ptr, v_ptr, delta_ptr, lse_ptr, do_ptr, dk_ptr, dv_ptr, first, SIZE: tl.constexpr,
  STEP: tl.constexpr, REST: tl.constexpr, L: tl.constexpr, PADDED: tl.constexpr,
  HEADS: tl.constexpr, D: tl.constexpr, ARRAYS: tl.constexpr, WIDTHS: tl.constexpr,
  CAUSAL: tl.constexpr, SCALE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
  """Stores the gradients of SIZE keys and values from `first` on."""
  k = load_tile(k_ptr, first, SIZE, L, HEADS, D, ARRAYS, WIDTHS)
  v = load_tile(v_ptr, first, SIZE, L, HEADS, D, ARRAYS, WIDTHS)
  dk, dv = zeros(SIZE, WIDTHS), zeros(SIZE, WIDTHS)
  before = first // STEP if CAUSAL else 0  # Of earlier queries than all keys.
  for i in tl.range(before, L // STEP, num_stages=STAGES):
    dk, dv = _add_queries(
      k, v, dk, dv, q_ptr, do_ptr, lse_ptr, delta_ptr, first, i * STEP, STEP, False,
      L, HEADS, D, ARRAYS, WIDTHS, CAUSAL, SCALE,
    )  # fmt: skip
  for i in tl.static_range(len(REST)):
    dk, dv = _add_queries(
      k, v, dk, dv, q_ptr, do_ptr, lse_ptr, delta_ptr, first, REST[i][0], REST[i][1], True,
      L, HEADS, D, ARRAYS, WIDTHS, CAUSAL, SCALE,
    )  # fmt: skip
  ZERO_FROM: tl.constexpr = L if L < PADDED else None
  store_tile(dk_ptr, dk, SCALE, first, SIZE, PADDED, HEADS, D, ARRAYS, WIDTHS, ZERO_FROM)
  store_tile(dv_ptr, dv, 1.0, first, SIZE, PADDED, HEADS, D, ARRAYS, WIDTHS, ZERO_FROM)


@triton.jit
def _add_queries(
  k, v, dk, dv, q_ptr, do_ptr, lse_ptr, delta_ptr, first_key, first, SIZE: tl.constexpr,
  BEYOND: tl.constexpr, L: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
  ARRAYS: tl.constexpr, WIDTHS: tl.constexpr, CAUSAL: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
  """Adds the part of SIZE queries from `first` on to the gradients of keys and values."""
  end = L if BEYOND else None
  q = load_tile(q_ptr, first, SIZE, end, HEADS, D, ARRAYS, WIDTHS)
  do = load_tile(do_ptr, first, SIZE, end, HEADS, D, 1, WIDTHS)
  lse = load_lse(lse_ptr, first, SIZE, end)
  rows = first + tl.arange(0, SIZE)
  delta = (
    tl.load(delta_ptr + rows, mask=rows < L, other=0.0) if BEYOND else tl.load(delta_ptr + rows)
  )
  p = tl.exp2(tl.fma(dot_transposed(k, q), SCALE * LOG2_E, -lse[None, :]))  # [keys, queries]
  if CAUSAL:
    keys = first_key + tl.arange(0, k[0].shape[0])
    p = tl.where(keys[:, None] <= rows[None, :], p, 0.0)
  ds = p * (dot_transposed(v, do) - delta[None, :])
  dk = add_dot(dk, ds.to(q_ptr.dtype.element_ty), q)
  return dk, add_dot(dv, p.to(q_ptr.dtype.element_ty), do)


@triton.jit
def _steps_before(end, STEP: tl.constexpr, L: tl.constexpr, CAUSAL: tl.constexpr):
  """How many whole steps of keys queries before `end` attend to."""
  steps = L // STEP
  return tl.minimum((end + STEP - 1) // STEP, steps) if CAUSAL else steps
