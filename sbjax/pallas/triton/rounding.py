"""Functions that Triton kernels share: rows in registers, sums over them, rounding to 8 bits.

A program holds a row in pieces, a tuple of vectors. For a sum or maximum over the row, each thread
first reduces its elements of all pieces, so that threads exchange values only once.
"""

import dataclasses

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from sbjax.ops.rows import MAX_WIDTH_IN_REGISTERS
from sbjax.quantize import Quantized, Spec

UNUSED = jax.ShapeDtypeStruct((1, 1), jnp.float32)  # An output that is not needed.
FLOAT32_MAX = tl.constexpr(float(jnp.finfo(jnp.float32).max))


@dataclasses.dataclass(frozen=True)
class Config:
  """How many rows a program has, and how many warps share a row.

  vector: how many neighbouring elements a thread loads at once.
  """

  rows: int
  warps: int
  vector: int


def pieces(k: int) -> tuple[tuple[int, int], ...]:
  """At most four (first, lanes) that cover k; lanes are powers of two, the last may overhang."""
  ranges, first = [], 0
  while first < k:
    lanes = triton.next_power_of_2(k - first)
    lanes = lanes // 2 if lanes > k - first and len(ranges) < 3 else lanes
    ranges.append((first, lanes))
    first += lanes
  return tuple(ranges)


def even_pieces(k: int, lanes: int) -> tuple[tuple[int, int], ...]:
  """(first, lanes) that divide k: as many of this width as fit, then narrower powers of two."""
  ranges, first = [], 0
  while first < k:
    while lanes > k - first:
      lanes //= 2
    ranges.append((first, lanes))
    first += lanes
  return tuple(ranges)


def row_constants(m: int, k: int, config: Config, parts: int = 1) -> dict:
  """Constants of a kernel that loops over rows [m, k]; each piece is within one part."""
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


def quantized_rows(shape, spec: Spec | None) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
  """The outputs for values and scales of rows of that shape; not needed if spec is None."""
  if spec is None:
    return UNUSED, UNUSED
  of_rows = jax.ShapeDtypeStruct((shape[0], 1), jnp.float32)
  return jax.ShapeDtypeStruct(shape, spec.dtype), of_rows


def limit_of(spec: Spec | None) -> float | None:
  """The largest value of the format."""
  return None if spec is None else spec.format.max


def unsupported_rows(device, x, *others, **options) -> str | None:
  """Why kernels that hold rows in registers do not take rows like x's, or None.

  others: the operands and their specs.
  """
  del device, options
  specs = [other.spec if isinstance(other, Quantized) else other for other in (x, *others)]
  if not all(spec.is_rowwise for spec in specs if isinstance(spec, Spec)):
    return "takes one scale a row, not one for all rows"
  (_, width), most = (x.values if isinstance(x, Quantized) else x).shape, MAX_WIDTH_IN_REGISTERS
  if width > most:
    return f"takes rows of at most {most:,}, which stay in registers, not {width:,}"
  return None


@triton.jit
def larger(a, b):
  return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rounding_factor(absmax, LIMIT: tl.constexpr):
  """`sbjax.quantize.factor_and_scale`; the division is rounded as IEEE says."""
  factor = tl.minimum(tl.div_rn(tl.cast(LIMIT, tl.float32), absmax), FLOAT32_MAX)
  scale = tl.where(absmax < float("inf"), absmax * (1.0 / LIMIT), float("nan"))
  return factor, scale


@triton.jit
def power_of_two_factor(absmax, LIMIT: tl.constexpr):
  """`sbjax.quantize.factor_and_scale` for "tensorwise_pow2"."""
  limit = tl.cast(LIMIT, tl.float32).to(tl.int32, bitcast=True)
  exponent = tl.minimum((limit - absmax.to(tl.int32, bitcast=True)) >> 23, 126)
  factor = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
  scale = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
  return factor, tl.where(absmax < float("inf"), scale, float("nan"))


@triton.jit
def cast(y, dtype: tl.constexpr, VIA_FLOAT16: tl.constexpr):
  """Rounds |y| <= the format's maximum half to even; int8 has no NaN and gets 0."""
  values = cast_finite(y, dtype, VIA_FLOAT16)
  if dtype == tl.int8:
    values = tl.where(y == y, values, 0).to(tl.int8)
  return values


@triton.jit
def cast_finite(y, dtype: tl.constexpr, VIA_FLOAT16: tl.constexpr):
  """`cast` for y without NaNs."""
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
  """Rounds float32 y to values of an fp8 format.

  On sm_89 Triton's own cast truncates to float16 first, which leaves such values as they are.
  """
  bits = y.to(tl.int32, bitcast=True)
  exponent = tl.maximum(bits & 0x7F800000, (128 - BIAS) << 23)
  # 1.5 * 2**(exponent + 23 - FRACTION_BITS); its last bit is the last fraction bit of the format.
  shift = (exponent + ((23 - FRACTION_BITS) << 23) | 0x400000).to(tl.float32, bitcast=True)
  snapped = (y + shift) - shift
  # Keeps the sign of zero.
  signed = snapped.to(tl.int32, bitcast=True) | (bits & -0x80000000)
  return tl.where(y == y, signed.to(tl.float32, bitcast=True), y)


@triton.jit
def piece(row, FIRST: tl.constexpr, LANES: tl.constexpr, ROWS, K, RAGGED, VECTOR: tl.constexpr):
  """Offsets of columns FIRST to FIRST + LANES of a row, and a mask of those that exist."""
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
  """The pieces of a row in the dtype of x; zeros beyond K and, if RAGGED, beyond ROWS."""
  xs = ()
  for i in tl.static_range(len(PIECES)):
    offset, mask = piece(row, PIECES[i][0], PIECES[i][1], ROWS, K, RAGGED, VECTOR)
    xs += (tl.load(x_ptr + offset, mask=mask, other=0.0),)
  return xs


@triton.jit
def folded_row(xs, fold_ptr, K: tl.constexpr, PIECES: tl.constexpr, VECTOR: tl.constexpr):
  """A row of float32 pieces xs times fold [K], which is read again: a row fills the registers."""
  fold, ys = load_row(fold_ptr, 0, 1, False, K, PIECES, VECTOR), ()
  for i in tl.static_range(len(PIECES)):
    ys += (xs[i] * fold[i],)
  return ys


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
  """Stores the pieces of a row in the dtype of x."""
  for i in tl.static_range(len(PIECES)):
    offset, mask = piece(row, PIECES[i][0], PIECES[i][1], ROWS, K, RAGGED, VECTOR)
    tl.store(x_ptr + offset, xs[i].to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def row_sum(xs, THREADS: tl.constexpr):
  """The sum over a row."""
  parts, rest = _parts_of_sum(xs, THREADS)
  return tl.reduce(parts, 0, plus) + rest


@triton.jit
def row_sums(xs, ys, THREADS: tl.constexpr):
  """`row_sum` of xs and of ys in one exchange between threads."""
  xs_parts, xs_rest = _parts_of_sum(xs, THREADS)
  ys_parts, ys_rest = _parts_of_sum(ys, THREADS)
  x, y = tl.reduce((xs_parts, ys_parts), 0, _sum_of_two)
  return x + xs_rest, y + ys_rest


@triton.jit
def row_absmax(xs, THREADS: tl.constexpr):
  """The largest magnitude in a row; NaN if the row has one."""
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
  """Sums of each thread [THREADS], and the sum of the pieces that are narrower than that."""
  parts, rest = _zeros(THREADS), 0.0
  for i in tl.static_range(len(xs)):
    if xs[i].shape[0] >= THREADS:
      x = tl.reshape(xs[i], (THREADS, xs[i].shape[0] // THREADS))
      parts += tl.reduce(x, 1, plus)
    else:
      rest += tl.reduce(xs[i], 0, plus)
  return parts, rest


@triton.jit
def plus(a, b):
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
  """Stores values and scale of a row of float32 pieces xs."""
  absmax = row_absmax(xs, THREADS)
  factor, scale = rounding_factor(absmax, LIMIT)
  tl.store(scale_ptr + row, scale, mask=row < ROWS)
  # One test for the row: testing each element for NaN would cost as much as rounding it.
  if absmax < float("inf"):
    for i in tl.static_range(len(PIECES)):
      offset, mask = piece(row, PIECES[i][0], PIECES[i][1], ROWS, K, RAGGED, VECTOR)
      values = cast_finite(xs[i] * factor, values_ptr.dtype.element_ty, VIA_FLOAT16)
      tl.store(values_ptr + offset, values, mask=mask)
  else:
    store_row(values_ptr, zero_row(PIECES), row, ROWS, RAGGED, K, PIECES, VECTOR)
