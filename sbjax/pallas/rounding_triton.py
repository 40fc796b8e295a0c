"""Rows in registers, in pieces, and their rounding to 8 bits: what Triton kernels share.

A program holds a row as a tuple of vectors. A sum or a maximum over it is first taken by each
thread of what it has of every piece, so that the threads meet only once.
"""

import dataclasses

import jax.numpy as jnp
import triton
import triton.language as tl

from sbjax.formats import INT8
from sbjax.fused_ops import MAX_WIDTH_IN_REGISTERS
from sbjax.quantize import Spec, check_quantizable

FLOAT32_MAX = tl.constexpr(float(jnp.finfo(jnp.float32).max))


@dataclasses.dataclass(frozen=True)
class Config:
  """How a kernel is cut: a program's rows, and the warps that share each of them.

  vector: neighbouring elements that one thread takes.
  """

  rows: int
  warps: int
  vector: int


def check_formats(dtype, fmt, chip: int) -> None:
  """Raises NotImplementedError unless a chip (80, 89, 90...) rounds dtype to the 8 bits of fmt."""
  if dtype.name not in ("bfloat16", "float16", "float32"):
    raise NotImplementedError(f"Triton quantizes bfloat16, float16, float32, not {dtype.name}.")
  if jnp.dtype(fmt) != INT8 and chip < 89:
    name = jnp.dtype(fmt).name
    raise NotImplementedError(
      f"{name} needs compute capability 8.9; this GPU (sm_{chip}) has int8."
    )


def check_rows(x, *specs: Spec | None, chip: int) -> None:
  """Raises unless a program can hold rows like those of x [M, K] and round them to each spec."""
  for spec in specs:
    check_formats(x.dtype, INT8 if spec is None else spec.dtype, chip)
    if spec is None:
      continue
    check_quantizable(x)
    if spec.scaling != "rowwise":
      raise NotImplementedError(
        f"A row is rounded when it is made, which takes scaling 'rowwise', not {spec.scaling!r}."
      )
  if x.shape[1] > MAX_WIDTH_IN_REGISTERS:
    raise NotImplementedError(
      f"Rows of {x.shape[1]}: at most {MAX_WIDTH_IN_REGISTERS} stay in registers;"
      " backend 'xla' takes any."
    )


def pieces(k: int) -> tuple[tuple[int, int], ...]:
  """At most four (first, lanes) that cover k, lanes powers of two; only the last may overhang."""
  found, first = [], 0
  while first < k:
    lanes = triton.next_power_of_2(k - first)
    lanes = lanes // 2 if lanes > k - first and len(found) < 3 else lanes
    found.append((first, lanes))
    first += lanes
  return tuple(found)


def even_pieces(k: int, lanes: int) -> tuple[tuple[int, int], ...]:
  """(first, lanes) that are k: as many of this width as fit, then narrower powers of two."""
  found, first = [], 0
  while first < k:
    while lanes > k - first:
      lanes //= 2
    found.append((first, lanes))
    first += lanes
  return tuple(found)


def row_constants(m: int, k: int, config: Config, parts: int = 1) -> dict:
  """What a kernel that walks over rows of [m, k] takes as constants; no piece is of two parts."""
  threads, width = 32 * config.warps, k // parts
  pieces_of_part = even_pieces(width, threads * config.vector)
  return {
    "M": m,
    "K": k,
    "ROWS": config.rows,
    "PIECES": tuple((p * width + first, n) for p in range(parts) for first, n in pieces_of_part),
    "VECTOR": config.vector,
    "THREADS": threads,
  }


@triton.jit
def larger(a, b):
  return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rounding_factor(absmax, LIMIT: tl.constexpr):
  """sbjax.quantize.factor_and_scale: a division that is rounded as IEEE says, a product."""
  factor = tl.minimum(tl.div_rn(tl.cast(LIMIT, tl.float32), absmax), FLOAT32_MAX)
  scale = tl.where(absmax < float("inf"), absmax * (1.0 / LIMIT), float("nan"))
  return factor, scale


@triton.jit
def cast(y, dtype: tl.constexpr, VIA_FLOAT16: tl.constexpr):
  """Rounds |y| <= the format's maximum, half to even; NaN becomes 0 in int8, which has none."""
  values = cast_finite(y, dtype, VIA_FLOAT16)
  if dtype == tl.int8:
    values = tl.where(y == y, values, 0).to(tl.int8)
  return values


@triton.jit
def cast_finite(y, dtype: tl.constexpr, VIA_FLOAT16: tl.constexpr):
  """`cast` of what is not NaN."""
  if dtype == tl.int8:
    # Adding 1.5 * 2**23 leaves the integer in the low bits; its last byte is two's complement.
    values = (y + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
  elif VIA_FLOAT16:
    values = _snap(y, dtype.fp_mantissa_width, dtype.exponent_bias).to(dtype)
  else:
    values = y.to(dtype)
  return values


@triton.jit
def _snap(y, FRACTION_BITS: tl.constexpr, BIAS: tl.constexpr):
  """Rounds y to an fp8 format's values, in float32.

  On sm_89 Triton's own cast truncates to float16 first, which these values survive.
  """
  bits = y.to(tl.int32, bitcast=True)
  exponent = tl.maximum(bits & 0x7F800000, (128 - BIAS) << 23)
  # 1.5 * 2**(exponent + 23 - FRACTION_BITS): whose last bit is the last bit that stays.
  shift = (exponent + ((23 - FRACTION_BITS) << 23) | 0x400000).to(tl.float32, bitcast=True)
  snapped = (y + shift) - shift
  # Zero has a sign.
  signed = snapped.to(tl.int32, bitcast=True) | (bits & -0x80000000)
  return tl.where(y == y, signed.to(tl.float32, bitcast=True), y)


@triton.jit
def piece(row, FIRST: tl.constexpr, LANES: tl.constexpr, ROWS, K, RAGGED, VECTOR: tl.constexpr):
  """Where columns FIRST to FIRST + LANES of a row lie, and which of them exist."""
  column = FIRST + tl.arange(0, LANES)
  offset = tl.max_contiguous(
    tl.cast(row, tl.int64) * K + column, VECTOR if VECTOR < LANES else LANES
  )
  # A mask that is known to be true costs nothing.
  mask = tl.full((LANES,), True, tl.int1)
  if RAGGED:
    mask = mask & (row < ROWS)
  if FIRST + LANES > K:
    mask = mask & (column < K)
  return offset, mask


@triton.jit
def load_row(x_ptr, row, ROWS, RAGGED, K: tl.constexpr, PIECES: tl.constexpr, VECTOR: tl.constexpr):
  """The pieces of a row as they are stored; zeros in lanes beyond K and, if RAGGED, ROWS."""
  xs = ()
  for i in tl.static_range(len(PIECES)):
    offset, mask = piece(row, PIECES[i][0], PIECES[i][1], ROWS, K, RAGGED, VECTOR)
    xs += (tl.load(x_ptr + offset, mask=mask, other=0.0),)
  return xs


@triton.jit
def zero_row(PIECES: tl.constexpr):
  xs = ()
  for i in tl.static_range(len(PIECES)):
    xs += (_zeros(PIECES[i][1]),)
  return xs


@triton.jit
def _zeros(LANES: tl.constexpr):
  return tl.full((LANES,), 0.0, tl.float32)


@triton.jit
def to_float32(xs):
  ys = ()
  for i in tl.static_range(len(xs)):
    ys += (xs[i].to(tl.float32),)
  return ys


@triton.jit
def store_row(
  x_ptr, xs, row, ROWS, RAGGED, K: tl.constexpr, PIECES: tl.constexpr, VECTOR: tl.constexpr
):
  """Rounds the pieces of a row to the dtype that x_ptr points to."""
  for i in tl.static_range(len(PIECES)):
    offset, mask = piece(row, PIECES[i][0], PIECES[i][1], ROWS, K, RAGGED, VECTOR)
    tl.store(x_ptr + offset, xs[i].to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def row_sum(xs, THREADS: tl.constexpr):
  """The sum over a row, a scalar."""
  parts, rest = _parts_of_sum(xs, THREADS)
  return tl.reduce(parts, 0, _sum) + rest


@triton.jit
def row_sums(xs, ys, THREADS: tl.constexpr):
  """`row_sum` of each, in one exchange between the threads."""
  xs_parts, xs_rest = _parts_of_sum(xs, THREADS)
  ys_parts, ys_rest = _parts_of_sum(ys, THREADS)
  x, y = tl.reduce((xs_parts, ys_parts), 0, _sum_of_two)
  return x + xs_rest, y + ys_rest


@triton.jit
def row_absmax(xs, THREADS: tl.constexpr):
  """The largest magnitude in a row, a scalar; NaN if there is one."""
  parts, rest = _zeros(THREADS), 0.0
  for i in tl.static_range(len(xs)):
    x = tl.abs(xs[i])
    if x.shape[0] >= THREADS:
      x = tl.reshape(x, (THREADS, x.shape[0] // THREADS))
      parts = larger(parts, tl.reduce(x, 1, larger))
    else:
      rest = larger(rest, tl.reduce(x, 0, larger))
  return larger(tl.reduce(parts, 0, larger), rest)


@triton.jit
def _parts_of_sum(xs, THREADS: tl.constexpr):
  """A sum in each thread [THREADS], and of the pieces that are too narrow for that, a scalar."""
  parts, rest = _zeros(THREADS), 0.0
  for i in tl.static_range(len(xs)):
    if xs[i].shape[0] >= THREADS:
      x = tl.reshape(xs[i], (THREADS, xs[i].shape[0] // THREADS))
      parts += tl.reduce(x, 1, _sum)
    else:
      rest += tl.reduce(xs[i], 0, _sum)
  return parts, rest


@triton.jit
def _sum(a, b):
  return a + b


@triton.jit
def _sum_of_two(a, b, c, d):
  return a + c, b + d


@triton.jit
def quantize_row(
  values_ptr,
  scale_ptr,
  xs,
  row,
  ROWS,
  RAGGED,
  K: tl.constexpr,
  PIECES: tl.constexpr,
  VECTOR: tl.constexpr,
  THREADS: tl.constexpr,
  LIMIT: tl.constexpr,
  VIA_FLOAT16: tl.constexpr,
):
  """Writes values and scale of a row whose pieces are xs, in float32."""
  absmax = row_absmax(xs, THREADS)
  factor, scale = rounding_factor(absmax, LIMIT)
  tl.store(scale_ptr + row, scale, mask=row < ROWS)
  # One question a row, where to look for a NaN in each element costs as much as to round it.
  if absmax < float("inf"):
    for i in tl.static_range(len(PIECES)):
      offset, mask = piece(row, PIECES[i][0], PIECES[i][1], ROWS, K, RAGGED, VECTOR)
      values = cast_finite(xs[i] * factor, values_ptr.dtype.element_ty, VIA_FLOAT16)
      tl.store(values_ptr + offset, values, mask=mask)
  else:
    store_row(values_ptr, zero_row(PIECES), row, ROWS, RAGGED, K, PIECES, VECTOR)
