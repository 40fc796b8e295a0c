"""Softmax attention over short sequences in Triton: each program has one head of one example.

The keys and values of a head, or its queries, fit in shared memory. So the forward pass computes
softmax at once, and the backward pass has each product once: it holds the gradient of all queries
in registers, while it computes those of one tile of keys after another. Nothing is added in memory.

Tiles have powers of two rows. A length is covered by a few of them, and 257 tokens by 256 and 16.
A head's size is cut in the same way, 80 into 64 and 16. So an operand is a tuple of matrices, its
pieces along the head's size. On Hopper a product of fewer than 64 rows is computed transposed,
because its tensor cores take 64 rows.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from sbjax.pallas.rounding_triton import larger, plus
from sbjax.pallas.triton import compute_capability, triton_call

LOG2_E, LOG_2 = tl.constexpr(math.log2(math.e)), tl.constexpr(math.log(2))
ROWS = tl.constexpr(64)  # Of a tensor core's instruction on Hopper.

_struct = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Config:
  """How a program cuts its head.

  block_q: rows of a tile of queries.
  block_k: rows of a tile of keys.
  warps: of a program.
  parts: how many programs share a head's queries in the backward pass. From 2 on, they write
    float32 gradients of k and v, which XLA adds.
  """

  block_q: int
  block_k: int
  warps: int
  parts: int = 1


def forward_config(length: int, head_dim: int) -> Config:
  """Logits of a tile with all keys take about half of the registers."""
  return Config(block_q=64, block_k=256, warps=4 if length <= 288 else 8)


def backward_config(length: int, head_dim: int, capability: int) -> Config:
  """The gradient of a program's queries takes a third of the registers of 8 warps."""
  if length <= 80:
    return Config(block_q=64, block_k=64, warps=4)
  values = 21_760 if capability == 90 else 10_240
  width = sum(size for _, size in _pieces(head_dim))
  return Config(block_q=128, block_k=64, warps=8, parts=math.ceil(length * width / values))


def attention_forward(
  *qkv: jax.Array, causal: bool, length: int, config: Config | None = None
) -> tuple[jax.Array, jax.Array]:
  """`sbjax.attention_ops.attention_forward`, but for the rounding of sums."""
  batch, rows, _, heads, head_dim = qkv[0].shape
  config = forward_config(rows, head_dim) if config is None else config
  looped = rows // config.block_q if rows >= 2 * config.block_q else 0
  return triton_call(
    *_three(qkv),
    kernel=_attention_kernel,
    name="sbjax_attention_forward",
    grid=batch * heads,
    out=(
      _struct((batch, rows, heads, head_dim), qkv[0].dtype),
      _struct((batch, heads, rows), jnp.float32),
    ),
    num_warps=config.warps,
    num_stages=1,
    QUERIES=_pieces(rows, config.block_q, looped * config.block_q),
    KEYS=_pieces(length, config.block_k),
    LOOPED=looped,
    BLOCK_Q=config.block_q,
    **_constants(qkv, causal, length),
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
  """`sbjax.attention_ops.attention_backward`, but for the rounding of sums."""
  batch, rows, _, heads, head_dim = qkv[0].shape
  if config is None:
    config = backward_config(rows, head_dim, compute_capability())
  packed, parts = len(qkv) == 1, config.parts
  dtype, looped = qkv[0].dtype, length // config.block_k
  whole, unused = _struct(qkv[0].shape, dtype), _struct((1,), dtype)
  part = _struct((parts, *o.shape), jnp.float32)
  dq, dk, dv = triton_call(
    *_three(qkv),
    *(o, lse, do),
    kernel=_attention_backward_kernel,
    name="sbjax_attention_backward",
    grid=batch * heads * parts,
    out=(whole, *2 * (part if parts > 1 else unused if packed else whole,)),
    num_warps=config.warps,
    num_stages=1,
    QUERIES=_pieces(math.ceil(rows / parts), config.block_q),
    LOOPED=looped,
    BLOCK_K=config.block_k,
    REST=_pieces(rows, config.block_k, looped * config.block_k),
    PARTS=parts,
    PART=math.ceil(rows / parts),
    **_constants(qkv, causal, length),
  )
  if parts > 1:
    dk, dv = (jnp.sum(x, axis=0, keepdims=True).astype(dtype) for x in (dk, dv))
    dk, dv = (jnp.moveaxis(x, 0, 2) for x in (dk, dv))
    return (jnp.concatenate([dq[:, :, :1], dk, dv], axis=2),) if packed else (dq, dk, dv)
  return (dq,) if packed else (dq, dk, dv)


def _three(qkv):
  """Three operands; one array that holds q, k and v is passed thrice."""
  return qkv * 3 if len(qkv) == 1 else qkv


def _constants(qkv, causal, length):
  _, rows, arrays, heads, head_dim = qkv[0].shape
  return {
    "L": length,
    "PADDED": rows,
    "HEADS": heads,
    "D": head_dim,
    "ARRAYS": arrays,
    "WIDTHS": _pieces(head_dim),
    "CAUSAL": causal,
    "SCALE": head_dim**-0.5,
  }


def _pieces(end: int, largest: int = 256, first: int = 0) -> tuple[tuple[int, int], ...]:
  """(first, size) that cover first to end: few powers of two from 16 on, with little beyond end."""
  if first >= end:
    return ()
  n = end - first
  size = _power_of_two(n)
  if n > 64 and n <= 7 * size // 8:
    size //= 2
  size = min(size, largest)
  return ((first, size), *_pieces(end, largest, first + size))


def _power_of_two(n: int) -> int:
  return max(16, triton.next_power_of_2(n))


@triton.jit
def _attention_kernel(
  q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
  QUERIES: tl.constexpr, KEYS: tl.constexpr, LOOPED: tl.constexpr, BLOCK_Q: tl.constexpr,
  L: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
  ARRAYS: tl.constexpr, WIDTHS: tl.constexpr, CAUSAL: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
  program = tl.program_id(0)
  q_ptr, k_ptr, v_ptr = _heads(q_ptr, k_ptr, v_ptr, program, PADDED, HEADS, D, ARRAYS)
  o_ptr += _head(program, PADDED, HEADS, D, 1)
  lse_ptr += program * PADDED
  ks, vs = (), ()
  for j in tl.static_range(len(KEYS)):
    ks += (_load(k_ptr, KEYS[j][0], KEYS[j][1], L, HEADS, D, ARRAYS, WIDTHS),)
    vs += (_load(v_ptr, KEYS[j][0], KEYS[j][1], L, HEADS, D, ARRAYS, WIDTHS),)
  for i in range(LOOPED):
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
  q = _load(q_ptr, first, SIZE, L, HEADS, D, ARRAYS, WIDTHS)
  logits = ()
  largest = tl.full([SIZE], float("-inf"), tl.float32)
  for j in tl.static_range(len(KEYS)):
    s = _mask(_dot_transposed(q, ks[j]), first, KEYS[j][0], L, CAUSAL, KEYS[j][0] + KEYS[j][1] > L)
    logits += (s,)
    largest = tl.maximum(largest, tl.reduce(s, 1, larger))
  largest *= SCALE * LOG2_E
  total = tl.full([SIZE], 0.0, tl.float32)
  o = _zeros(SIZE, WIDTHS)
  for j in tl.static_range(len(KEYS)):
    p = tl.exp2(tl.fma(logits[j], SCALE * LOG2_E, -largest[:, None]))
    total += tl.reduce(p, 1, plus)
    o = _add_dot(o, p.to(q_ptr.dtype.element_ty), vs[j])
  _store(o_ptr, o, (1.0 / total)[:, None], first, SIZE, PADDED, HEADS, D, 1, WIDTHS)
  rows = first + tl.arange(0, SIZE)
  tl.store(lse_ptr + rows, (largest + tl.log2(total)) * LOG_2, mask=rows < PADDED)


@triton.jit
def _attention_backward_kernel(
  q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr,
  QUERIES: tl.constexpr, LOOPED: tl.constexpr, BLOCK_K: tl.constexpr, REST: tl.constexpr,
  PARTS: tl.constexpr, PART: tl.constexpr, L: tl.constexpr, PADDED: tl.constexpr,
  HEADS: tl.constexpr, D: tl.constexpr, ARRAYS: tl.constexpr, WIDTHS: tl.constexpr,
  CAUSAL: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
  program, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
  q_ptr, k_ptr, v_ptr = _heads(q_ptr, k_ptr, v_ptr, program, PADDED, HEADS, D, ARRAYS)
  if PARTS == 1 and ARRAYS == 3:
    dk_ptr, dv_ptr = dq_ptr, dq_ptr
  dq_ptr, dk, dv = _heads(dq_ptr, dk_ptr, dv_ptr, program, PADDED, HEADS, D, ARRAYS)
  if PARTS > 1:  # Each part has arrays of its own, [B, L, H, D].
    heads = part * (tl.num_programs(0) // PARTS) + program
    dk = dk_ptr + _head(heads, PADDED, HEADS, D, 1)
    dv = dv_ptr + _head(heads, PADDED, HEADS, D, 1)
  ARRAYS_D: tl.constexpr = ARRAYS if PARTS == 1 else 1
  o_ptr += _head(program, PADDED, HEADS, D, 1)
  do_ptr += _head(program, PADDED, HEADS, D, 1)
  lse_ptr += program * PADDED
  start = part * PART
  end = tl.minimum(start + PART, PADDED)
  valid = tl.minimum(end, L)
  qs, dos, lses, deltas, dqs = (), (), (), (), ()
  for i in tl.static_range(len(QUERIES)):
    qs += (_load(q_ptr, start + QUERIES[i][0], QUERIES[i][1], valid, HEADS, D, ARRAYS, WIDTHS),)
    do = _load(do_ptr, start + QUERIES[i][0], QUERIES[i][1], valid, HEADS, D, 1, WIDTHS)
    o = _load(o_ptr, start + QUERIES[i][0], QUERIES[i][1], valid, HEADS, D, 1, WIDTHS)
    dos += (do,)
    deltas += (_row_dot(do, o),)
    lses += (_load_lse(lse_ptr, start + QUERIES[i][0], QUERIES[i][1], valid),)
    dqs += (_zeros(QUERIES[i][1], WIDTHS),)
  for j in range(LOOPED):
    dqs = _add_keys(
      qs, dos, lses, deltas, dqs, k_ptr, v_ptr, dk, dv, start, j * BLOCK_K, BLOCK_K, False,
      QUERIES, L, PADDED, HEADS, D, ARRAYS, ARRAYS_D, WIDTHS, CAUSAL, SCALE,
    )  # fmt: skip
  for j in tl.static_range(len(REST)):
    dqs = _add_keys(
      qs, dos, lses, deltas, dqs, k_ptr, v_ptr, dk, dv, start, REST[j][0], REST[j][1], True,
      QUERIES, L, PADDED, HEADS, D, ARRAYS, ARRAYS_D, WIDTHS, CAUSAL, SCALE,
    )  # fmt: skip
  for i in tl.static_range(len(QUERIES)):
    _store(
      dq_ptr, dqs[i], SCALE, start + QUERIES[i][0], QUERIES[i][1],
      end, HEADS, D, ARRAYS, WIDTHS,
    )  # fmt: skip


@triton.jit
def _add_keys(
  qs, dos, lses, deltas, dqs, k_ptr, v_ptr, dk_ptr, dv_ptr, start, first, SIZE: tl.constexpr,
  MASKED: tl.constexpr, QUERIES: tl.constexpr, L: tl.constexpr, PADDED: tl.constexpr,
  HEADS: tl.constexpr, D: tl.constexpr, ARRAYS: tl.constexpr, ARRAYS_D: tl.constexpr,
  WIDTHS: tl.constexpr, CAUSAL: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
  """Stores the gradients of SIZE keys and values from `first` on, and adds their part to dqs."""
  k = _load(k_ptr, first, SIZE, L, HEADS, D, ARRAYS, WIDTHS)
  v = _load(v_ptr, first, SIZE, L, HEADS, D, ARRAYS, WIDTHS)
  dk, dv, sums = _zeros(SIZE, WIDTHS), _zeros(SIZE, WIDTHS), ()
  for i in tl.static_range(len(QUERIES)):
    logits = tl.fma(_dot_transposed(qs[i], k), SCALE * LOG2_E, -lses[i][:, None])
    p = tl.exp2(_mask(logits, start + QUERIES[i][0], first, L, CAUSAL, MASKED))
    dp = _dot_transposed(dos[i], v)
    ds = p * (dp - deltas[i][:, None])
    p, ds = p.to(k_ptr.dtype.element_ty), ds.to(k_ptr.dtype.element_ty)
    dv = _add_dot(dv, tl.trans(p), dos[i])
    dk = _add_dot(dk, tl.trans(ds), qs[i])
    sums += (_add_dot(dqs[i], ds, k),)
  _store(dv_ptr, dv, 1.0, first, SIZE, PADDED, HEADS, D, ARRAYS_D, WIDTHS)
  _store(dk_ptr, dk, SCALE, first, SIZE, PADDED, HEADS, D, ARRAYS_D, WIDTHS)
  return sums


@triton.jit
def _mask(s, first_row, first_key, L, CAUSAL: tl.constexpr, BEYOND: tl.constexpr):
  """-inf for keys from L on, if there are any BEYOND, and for later keys than the query."""
  keys = first_key + tl.arange(0, s.shape[1])[None, :]
  if BEYOND:
    s = tl.where(keys < L, s, float("-inf"))
  if CAUSAL:
    s = tl.where(keys <= first_row + tl.arange(0, s.shape[0])[:, None], s, float("-inf"))
  return s


@triton.jit
def _dot_transposed(a, b):
  """a @ b.T"""
  if a[0].shape[0] < ROWS and a[0].shape[0] < b[0].shape[0]:
    return tl.trans(_dot_transposed(b, a))
  total = tl.dot(a[0], tl.trans(b[0]))
  for i in tl.static_range(1, len(a)):
    total = tl.dot(a[i], tl.trans(b[i]), total)
  return total


@triton.jit
def _add_dot(sums, a, b):
  """sums + a @ b; the sums are transposed where a has few rows."""
  added = ()
  for i in tl.static_range(len(b)):
    if a.shape[0] < ROWS:
      added += (tl.dot(tl.trans(b[i]), tl.trans(a), sums[i]),)
    else:
      added += (tl.dot(a, b[i], sums[i]),)
  return added


@triton.jit
def _zeros(SIZE: tl.constexpr, WIDTHS: tl.constexpr):
  """Sums for `_add_dot`."""
  sums = ()
  for i in tl.static_range(len(WIDTHS)):
    if SIZE < ROWS:
      sums += (tl.full([WIDTHS[i][1], SIZE], 0.0, tl.float32),)
    else:
      sums += (tl.full([SIZE, WIDTHS[i][1]], 0.0, tl.float32),)
  return sums


@triton.jit
def _row_dot(a, b):
  """The sums of a * b over the head's size."""
  total = tl.reduce(a[0].to(tl.float32) * b[0].to(tl.float32), 1, plus)
  for i in tl.static_range(1, len(a)):
    total += tl.reduce(a[i].to(tl.float32) * b[i].to(tl.float32), 1, plus)
  return total


@triton.jit
def _heads(
  q_ptr, k_ptr, v_ptr, head, PADDED: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
  ARRAYS: tl.constexpr,
):  # fmt: skip
  """Where a head begins in q, k and v, or in one array of all three."""
  start = _head(head, PADDED, HEADS, D, ARRAYS)
  skip: tl.constexpr = HEADS * D if ARRAYS == 3 else 0
  return q_ptr + start, k_ptr + start + skip, v_ptr + start + 2 * skip


@triton.jit
def _head(head, PADDED: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, ARRAYS: tl.constexpr):
  """Where a head begins in an array [B, L, ARRAYS, H, D]."""
  return (head // HEADS).to(tl.int64) * (PADDED * ARRAYS * HEADS * D) + head % HEADS * D


@triton.jit
def _load(
  ptr, first, SIZE: tl.constexpr, end, HEADS: tl.constexpr, D: tl.constexpr, ARRAYS: tl.constexpr,
  WIDTHS: tl.constexpr,
):  # fmt: skip
  """SIZE rows of a head, in pieces; zeros from row `end` on."""
  row = first + tl.arange(0, SIZE)[:, None]
  pieces = ()
  for i in tl.static_range(len(WIDTHS)):
    column = WIDTHS[i][0] + tl.arange(0, WIDTHS[i][1])[None, :]
    mask = (row < end) & (column < D) if WIDTHS[i][0] + WIDTHS[i][1] > D else row < end
    pieces += (tl.load(ptr + row * (ARRAYS * HEADS * D) + column, mask=mask, other=0.0),)
  return pieces


@triton.jit
def _load_lse(lse_ptr, first, SIZE: tl.constexpr, end):
  """In base 2; infinity from row `end` on, which makes all probabilities zero."""
  row = first + tl.arange(0, SIZE)
  return tl.load(lse_ptr + row, mask=row < end, other=float("inf")) * LOG2_E


@triton.jit
def _store(
  ptr, sums, factor, first, SIZE: tl.constexpr, end, HEADS: tl.constexpr, D: tl.constexpr,
  ARRAYS: tl.constexpr, WIDTHS: tl.constexpr,
):  # fmt: skip
  """Sums of `_add_dot` times a factor, up to row `end`."""
  row = first + tl.arange(0, SIZE)[:, None]
  for i in tl.static_range(len(WIDTHS)):
    column = WIDTHS[i][0] + tl.arange(0, WIDTHS[i][1])[None, :]
    piece = (tl.trans(sums[i]) if SIZE < ROWS else sums[i]) * factor
    place = ptr + row * (ARRAYS * HEADS * D) + column
    tl.store(place, piece.to(ptr.dtype.element_ty), mask=(row < end) & (column < D))
