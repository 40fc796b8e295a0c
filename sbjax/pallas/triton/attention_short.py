"""Softmax attention over short sequences in Triton: each program has one head of one example.

The keys and values of a head, or its queries, fit in shared memory. So the forward pass computes
softmax at once, and the backward pass has each matmul once: it holds the gradient of all queries
in registers, while it computes those of one tile of keys after another. Nothing is added in memory.
Longer sequences go to attention_tiles.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from sbjax.ops.attention import HEAD_DIMS
from sbjax.pallas.triton import attention_tiles as tiles
from sbjax.pallas.triton.attention_parts import (
  LOG2_E,
  LOG_2,
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
from sbjax.pallas.triton.call import compute_capability, triton_call
from sbjax.pallas.triton.rounding import larger, plus

_struct = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Config:
  """How a program cuts its head.

  block_q: rows of a tile of queries.
  block_k: rows of a tile of keys.
  warps: of a program.
  """

  block_q: int
  block_k: int
  warps: int = 4


def forward_config(rows: int, head_dim: int) -> Config | None:
  """None where programs with a tile of queries are faster."""
  return Config(block_q=64, block_k=256) if rows <= _longest(head_dim, 208) else None


def backward_config(rows: int, head_dim: int) -> Config | None:
  """None where programs with tiles are faster: not all queries' gradient fits in registers."""
  return Config(block_q=64, block_k=64) if rows <= _longest(head_dim, 144) else None


def _longest(head_dim: int, on_hopper: int) -> int:
  """Of other chips' tensor cores the operands are in registers."""
  return on_hopper if head_dim <= 64 and compute_capability() == 90 else 80


def unsupported(device, *arrays: jax.Array, causal: bool, length: int) -> str | None:
  """Why the kernels of either pass do not take these, or None."""
  del device, causal, length
  head_dim, dtype = arrays[-1].shape[-1], jnp.dtype(arrays[-1].dtype)
  if dtype not in (jnp.bfloat16, jnp.float16):
    return f"takes bfloat16 and float16, not {dtype.name}"
  if head_dim not in HEAD_DIMS:
    return f"takes heads of {', '.join(map(str, HEAD_DIMS))}, not {head_dim}"
  return None


def attention_forward(
  *qkv: jax.Array, causal: bool, length: int, config: Config | None = None
) -> tuple[jax.Array, jax.Array]:
  """`sbjax.ops.attention.attention_forward`, but for the rounding of sums."""
  batch, rows, _, heads, head_dim = qkv[0].shape
  config = config or forward_config(rows, head_dim)
  if config is None:
    return tiles.attention_forward(*qkv, causal=causal, length=length)
  looped = rows // config.block_q if rows >= 2 * config.block_q else 0
  return triton_call(
    *three(qkv),
    kernel=_attention_kernel,
    name="sbjax_attention_forward",
    grid=batch * heads,
    out=(
      _struct((batch, rows, heads, head_dim), qkv[0].dtype),
      _struct((batch, heads, rows), jnp.float32),
    ),
    num_warps=config.warps,
    num_stages=1,
    QUERIES=pieces(rows, config.block_q, looped * config.block_q),
    KEYS=_keys(length, config.block_k),
    LOOPED=looped,
    BLOCK_Q=config.block_q,
    **shape_constants(qkv, causal, length),
  )


def attention_backward(
  o: jax.Array,
  lse: jax.Array,
  do: jax.Array,
  *qkv: jax.Array,
  causal: bool,
  length: int,
  config: Config | None = None,
) -> tuple[jax.Array, ...]:
  """`sbjax.ops.attention.attention_backward`, but for the rounding of sums."""
  batch, rows, _, heads, head_dim = qkv[0].shape
  config = config or backward_config(rows, head_dim)
  if config is None:
    return tiles.attention_backward(o, lse, do, *qkv, causal=causal, length=length)
  packed, looped = len(qkv) == 1, length // config.block_k
  whole = _struct(qkv[0].shape, qkv[0].dtype)
  dq, dk, dv = triton_call(
    *three(qkv),
    *(o, lse, do),
    kernel=_attention_backward_kernel,
    name="sbjax_attention_backward",
    grid=batch * heads,
    out=(whole, *2 * (_struct((1,), whole.dtype) if packed else whole,)),
    num_warps=config.warps,
    num_stages=1,
    QUERIES=pieces(rows, config.block_q),
    LOOPED=looped,
    BLOCK_K=config.block_k,
    REST=pieces(rows, config.block_k, looped * config.block_k),
    **shape_constants(qkv, causal, length),
  )
  return (dq,) if packed else (dq, dk, dv)


def _keys(length: int, block: int) -> tuple[tuple[int, int], ...]:
  """Pieces of all keys: one where it is more than three quarters full, since fewer are faster."""
  whole = power_of_two(length)
  return ((0, whole),) if whole <= block and 4 * length > 3 * whole else pieces(length, block)


@triton.jit
def _attention_kernel(
  q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
  QUERIES: tl.constexpr, KEYS: tl.constexpr, LOOPED: tl.constexpr, BLOCK_Q: tl.constexpr,
  L: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
  ARRAYS: tl.constexpr, WIDTHS: tl.constexpr, CAUSAL: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
  program = tl.program_id(0)
  q_ptr, k_ptr, v_ptr = heads_of(q_ptr, k_ptr, v_ptr, program, PADDED, HEADS, D, ARRAYS)
  o_ptr += head_start(program, PADDED, HEADS, D, 1)
  lse_ptr += program * PADDED
  ks, vs = (), ()
  for j in tl.static_range(len(KEYS)):
    ks += (load_tile(k_ptr, KEYS[j][0], KEYS[j][1], L, HEADS, D, ARRAYS, WIDTHS),)
    vs += (load_tile(v_ptr, KEYS[j][0], KEYS[j][1], L, HEADS, D, ARRAYS, WIDTHS),)
  for i in tl.range(LOOPED, num_stages=3):
    _attend(
      q_ptr, ks, vs, o_ptr, lse_ptr, i * BLOCK_Q, BLOCK_Q,
      KEYS, L, PADDED, HEADS, D, ARRAYS, WIDTHS, CAUSAL, SCALE,
    )  # fmt: skip
  for i in tl.static_range(len(QUERIES)):
    _attend(
      q_ptr, ks, vs, o_ptr, lse_ptr, QUERIES[i][0], QUERIES[i][1],
      KEYS, L, PADDED, HEADS, D, ARRAYS, WIDTHS, CAUSAL, SCALE,
    )  # fmt: skip


@triton.jit
def _attend(
  q_ptr, ks, vs, o_ptr, lse_ptr, first, SIZE: tl.constexpr, KEYS: tl.constexpr, L: tl.constexpr,
  PADDED: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, ARRAYS: tl.constexpr,
  WIDTHS: tl.constexpr, CAUSAL: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
  """Attention of SIZE queries from `first` on."""
  q = load_tile(q_ptr, first, SIZE, L, HEADS, D, ARRAYS, WIDTHS)
  logits = ()
  largest = tl.full([SIZE], float("-inf"), tl.float32)
  for j in tl.static_range(len(KEYS)):
    s = masked(dot_transposed(q, ks[j]), first, KEYS[j][0], L, CAUSAL, KEYS[j][0] + KEYS[j][1] > L)
    logits += (s,)
    largest = tl.maximum(largest, tl.reduce(s, 1, larger))
  largest *= SCALE * LOG2_E
  total = tl.full([SIZE], 0.0, tl.float32)
  o = zeros(SIZE, WIDTHS)
  for j in tl.static_range(len(KEYS)):
    p = tl.exp2(tl.fma(logits[j], SCALE * LOG2_E, -largest[:, None]))
    total += tl.reduce(p, 1, plus)
    o = add_dot(o, p.to(q_ptr.dtype.element_ty), vs[j])
  store_tile(o_ptr, o, (1.0 / total)[:, None], first, SIZE, PADDED, HEADS, D, 1, WIDTHS)
  rows = first + tl.arange(0, SIZE)
  tl.store(lse_ptr + rows, (largest + tl.log2(total)) * LOG_2, mask=rows < PADDED)


@triton.jit
def _attention_backward_kernel(
  q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr,
  QUERIES: tl.constexpr, LOOPED: tl.constexpr, BLOCK_K: tl.constexpr, REST: tl.constexpr,
  L: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
  ARRAYS: tl.constexpr, WIDTHS: tl.constexpr, CAUSAL: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
  program = tl.program_id(0)
  q_ptr, k_ptr, v_ptr = heads_of(q_ptr, k_ptr, v_ptr, program, PADDED, HEADS, D, ARRAYS)
  if ARRAYS == 3:
    dk_ptr, dv_ptr = dq_ptr, dq_ptr
  dq_ptr, dk, dv = heads_of(dq_ptr, dk_ptr, dv_ptr, program, PADDED, HEADS, D, ARRAYS)
  o_ptr += head_start(program, PADDED, HEADS, D, 1)
  do_ptr += head_start(program, PADDED, HEADS, D, 1)
  lse_ptr += program * PADDED
  qs, dos, lses, deltas, dqs = (), (), (), (), ()
  for i in tl.static_range(len(QUERIES)):
    qs += (load_tile(q_ptr, QUERIES[i][0], QUERIES[i][1], L, HEADS, D, ARRAYS, WIDTHS),)
    do = load_tile(do_ptr, QUERIES[i][0], QUERIES[i][1], L, HEADS, D, 1, WIDTHS)
    o = load_tile(o_ptr, QUERIES[i][0], QUERIES[i][1], L, HEADS, D, 1, WIDTHS)
    dos += (do,)
    deltas += (row_dot(do, o),)
    lses += (load_lse(lse_ptr, QUERIES[i][0], QUERIES[i][1], L),)
    dqs += (zeros(QUERIES[i][1], WIDTHS),)
  for j in range(LOOPED):
    dqs = _add_keys(
      qs, dos, lses, deltas, dqs, k_ptr, v_ptr, dk, dv, j * BLOCK_K, BLOCK_K, False,
      QUERIES, L, PADDED, HEADS, D, ARRAYS, WIDTHS, CAUSAL, SCALE,
    )  # fmt: skip
  for j in tl.static_range(len(REST)):
    dqs = _add_keys(
      qs, dos, lses, deltas, dqs, k_ptr, v_ptr, dk, dv, REST[j][0], REST[j][1], True,
      QUERIES, L, PADDED, HEADS, D, ARRAYS, WIDTHS, CAUSAL, SCALE,
    )  # fmt: skip
  for i in tl.static_range(len(QUERIES)):
    store_tile(
      dq_ptr, dqs[i], SCALE, QUERIES[i][0], QUERIES[i][1],
      PADDED, HEADS, D, ARRAYS, WIDTHS,
    )  # fmt: skip


@triton.jit
def _add_keys(
  qs, dos, lses, deltas, dqs, k_ptr, v_ptr, dk_ptr, dv_ptr, first, SIZE: tl.constexpr,
  MASKED: tl.constexpr, QUERIES: tl.constexpr, L: tl.constexpr, PADDED: tl.constexpr,
  HEADS: tl.constexpr, D: tl.constexpr, ARRAYS: tl.constexpr,
  WIDTHS: tl.constexpr, CAUSAL: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
  """Stores the gradients of SIZE keys and values from `first` on, and adds their part to dqs."""
  k = load_tile(k_ptr, first, SIZE, L, HEADS, D, ARRAYS, WIDTHS)
  v = load_tile(v_ptr, first, SIZE, L, HEADS, D, ARRAYS, WIDTHS)
  dk, dv, sums = zeros(SIZE, WIDTHS), zeros(SIZE, WIDTHS), ()
  for i in tl.static_range(len(QUERIES)):
    logits = tl.fma(dot_transposed(qs[i], k), SCALE * LOG2_E, -lses[i][:, None])
    p = tl.exp2(masked(logits, QUERIES[i][0], first, L, CAUSAL, MASKED))
    dp = dot_transposed(dos[i], v)
    ds = p * (dp - deltas[i][:, None])
    p, ds = p.to(k_ptr.dtype.element_ty), ds.to(k_ptr.dtype.element_ty)
    dv = add_dot(dv, tl.trans(p), dos[i])
    dk = add_dot(dk, tl.trans(ds), qs[i])
    sums += (add_dot(dqs[i], ds, k),)
  store_tile(dv_ptr, dv, 1.0, first, SIZE, PADDED, HEADS, D, ARRAYS, WIDTHS)
  store_tile(dk_ptr, dk, SCALE, first, SIZE, PADDED, HEADS, D, ARRAYS, WIDTHS)
  return sums
