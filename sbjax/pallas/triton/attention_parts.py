"""What attention's Triton kernels share: tiles of a head, matmuls of them, and how both are cut.

Tiles have powers of two rows. A length is covered by a few of them, and 257 tokens by 256 and 16.
A head's size is cut in the same way, 80 into 64 and 16. So an operand is a tuple of matrices, its
pieces along the head's size. On Hopper a matmul of fewer than 64 rows is computed transposed,
because its tensor cores take 64 rows.
"""

import math

import triton
import triton.language as tl

from sbjax.pallas.triton.rounding import plus

LOG2_E, LOG_2 = tl.constexpr(math.log2(math.e)), tl.constexpr(math.log(2))
ROWS = tl.constexpr(64)  # Of a tensor core's instruction on Hopper.


def three(qkv):
  """Three operands; one array that holds q, k and v is passed thrice."""
  return qkv * 3 if len(qkv) == 1 else qkv


def shape_constants(qkv, causal: bool, length: int) -> dict:
  """The constants that all kernels have."""
  _, rows, arrays, heads, head_dim = qkv[0].shape
  return {
    "L": length,
    "PADDED": rows,
    "HEADS": heads,
    "D": head_dim,
    "ARRAYS": arrays,
    "WIDTHS": pieces(head_dim),
    "CAUSAL": causal,
    "SCALE": head_dim**-0.5,
  }


def pieces(end: int, largest: int = 256, first: int = 0) -> tuple[tuple[int, int], ...]:
  """(first, size) that cover first to end: few powers of two from 16 on, with little beyond end."""
  if first >= end:
    return ()
  n = end - first
  size = power_of_two(n)
  if n > 64 and n <= 7 * size // 8:
    size //= 2
  size = min(size, largest)
  return ((first, size), *pieces(end, largest, first + size))


def power_of_two(n: int) -> int:
  return max(16, triton.next_power_of_2(n))


@triton.jit
def masked(s, first_row, first_key, L, CAUSAL: tl.constexpr, BEYOND: tl.constexpr):
  """-inf for keys from L on, if there are any BEYOND, and for later keys than the query."""
  keys = first_key + tl.arange(0, s.shape[1])[None, :]
  if BEYOND:
    s = tl.where(keys < L, s, float("-inf"))
  if CAUSAL:
    s = tl.where(keys <= first_row + tl.arange(0, s.shape[0])[:, None], s, float("-inf"))
  return s


@triton.jit
def dot_transposed(a, b):
  """a @ b.T"""
  if a[0].shape[0] < ROWS and a[0].shape[0] < b[0].shape[0]:
    return tl.trans(dot_transposed(b, a))
  total = tl.dot(a[0], tl.trans(b[0]))
  for i in tl.static_range(1, len(a)):
    total = tl.dot(a[i], tl.trans(b[i]), total)
  return total


@triton.jit
def add_dot(sums, a, b):
  """sums + a @ b; the sums are transposed where a has few rows."""
  added = ()
  for i in tl.static_range(len(b)):
    if a.shape[0] < ROWS:
      added += (tl.dot(tl.trans(b[i]), tl.trans(a), sums[i]),)
    else:
      added += (tl.dot(a, b[i], sums[i]),)
  return added


@triton.jit
def zeros(SIZE: tl.constexpr, WIDTHS: tl.constexpr):
  """Sums for `add_dot`."""
  sums = ()
  for i in tl.static_range(len(WIDTHS)):
    if SIZE < ROWS:
      sums += (tl.full([WIDTHS[i][1], SIZE], 0.0, tl.float32),)
    else:
      sums += (tl.full([SIZE, WIDTHS[i][1]], 0.0, tl.float32),)
  return sums


@triton.jit
def row_dot(a, b):
  """The sums of a * b over the head's size."""
  total = tl.reduce(a[0].to(tl.float32) * b[0].to(tl.float32), 1, plus)
  for i in tl.static_range(1, len(a)):
    total += tl.reduce(a[i].to(tl.float32) * b[i].to(tl.float32), 1, plus)
  return total


@triton.jit
def heads_of(
  q_ptr, k_ptr, v_ptr, head, PADDED: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
  ARRAYS: tl.constexpr,
):  # fmt: skip
  """Where a head begins in q, k and v, or in one array of all three."""
  start = head_start(head, PADDED, HEADS, D, ARRAYS)
  skip: tl.constexpr = HEADS * D if ARRAYS == 3 else 0
  return q_ptr + start, k_ptr + start + skip, v_ptr + start + 2 * skip


@triton.jit
def head_start(
  head, PADDED: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, ARRAYS: tl.constexpr
):
  """Where a head begins in an array [B, L, ARRAYS, H, D]."""
  return (head // HEADS).to(tl.int64) * (PADDED * ARRAYS * HEADS * D) + head % HEADS * D


@triton.jit
def load_tile(
  ptr, first, SIZE: tl.constexpr, end, HEADS: tl.constexpr, D: tl.constexpr, ARRAYS: tl.constexpr,
  WIDTHS: tl.constexpr,
):  # fmt: skip
  """SIZE rows of a head, in pieces; zeros from row `end` on, unless that is None."""
  row = first + tl.arange(0, SIZE)[:, None]
  pieces = ()
  for i in tl.static_range(len(WIDTHS)):
    column = WIDTHS[i][0] + tl.arange(0, WIDTHS[i][1])[None, :]
    place = ptr + row * (ARRAYS * HEADS * D) + column
    if WIDTHS[i][0] + WIDTHS[i][1] > D:
      mask = (row < end) & (column < D) if end is not None else column < D
      pieces += (tl.load(place, mask=mask, other=0.0),)
    elif end is not None:
      pieces += (tl.load(place, mask=row < end, other=0.0),)
    else:
      pieces += (tl.load(place),)
  return pieces


@triton.jit
def load_lse(lse_ptr, first, SIZE: tl.constexpr, end):
  """In base 2; infinity from row `end` on, if there is one: it makes all probabilities zero."""
  row = first + tl.arange(0, SIZE)
  if end is None:
    lse = tl.load(lse_ptr + row)
  else:
    lse = tl.load(lse_ptr + row, mask=row < end, other=float("inf"))
  return lse * LOG2_E


@triton.jit
def store_tile(
  ptr, sums, factor, first, SIZE: tl.constexpr, end, HEADS: tl.constexpr, D: tl.constexpr,
  ARRAYS: tl.constexpr, WIDTHS: tl.constexpr, L: tl.constexpr = None,
):  # fmt: skip
  """Sums of `add_dot` times a factor, up to row `end`; with L zeros from row L on."""
  row = first + tl.arange(0, SIZE)[:, None]
  for i in tl.static_range(len(WIDTHS)):
    column = WIDTHS[i][0] + tl.arange(0, WIDTHS[i][1])[None, :]
    piece = (tl.trans(sums[i]) if SIZE < ROWS else sums[i]) * factor
    if L is not None:
      piece = tl.where(row < L, piece, 0.0)
    place = ptr + row * (ARRAYS * HEADS * D) + column
    tl.store(place, piece.to(ptr.dtype.element_ty), mask=(row < end) & (column < D))
