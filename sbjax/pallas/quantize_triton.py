"""Quantizing at the speed of memory: `sbjax.quantize.quantize` in Triton.

A row that fits into registers is read once: its absmax, factor, scale and values come from one
kernel. Everything else takes two passes, `absmax` and `cast_scaled`, between which a sharded
axis finds its global maximum. `cast_scaled` also writes the transpose, from the same read.
"""

import dataclasses

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from sbjax.formats import INT8, max_value
from sbjax.pallas.triton import compute_capability, triton_call
from sbjax.quantize import Quantized, Spec, check_quantizable, factor_and_scale

_struct = jax.ShapeDtypeStruct
MAX_ROW = 16384  # Longer rows do not stay in registers.
FLOAT32_MAX = tl.constexpr(float(jnp.finfo(jnp.float32).max))


@dataclasses.dataclass(frozen=True)
class Config:
  """How the one-pass kernel is cut: a program's rows, and the warps that share each of them.

  vector: neighbouring elements that one thread takes.
  """

  rows: int
  warps: int
  vector: int


def config_for(rows: int, k: int, itemsize: int) -> Config:
  """About 40 elements of a row for each thread; 16 bytes at a time; short rows in twos."""
  return Config(
    rows=2 if k <= 1280 and rows >= 4096 else 1,
    warps=min(8, triton.next_power_of_2(triton.cdiv(k, 1664))),
    vector=16 // itemsize,
  )


def quantize(x: jax.Array, spec: Spec, *, config: Config | None = None) -> Quantized:
  """`sbjax.quantize.quantize`, bit for bit, for bfloat16, float16 and float32 x [rows, K].

  Under a NaN scale the values are equal in int8 alone: a NaN in fp8 has its chip's own bits.

  Raises:
    NotImplementedError: float64, or an fp8 format on a chip without it.
  """
  _check(x, spec)
  rows, k = x.shape
  if spec.scaling != "rowwise" or k > MAX_ROW:
    return Quantized(*_two_passes(x, spec, 1, transpose=False))
  if x.size == 0:
    return Quantized(jnp.zeros(x.shape, spec.dtype), jnp.zeros((rows, 1), jnp.float32))
  config = config_for(rows, k, x.dtype.itemsize) if config is None else config
  values, scale = triton_call(
    x,
    kernel=_rowwise_kernel,
    name="sbjax_quantize_rowwise",
    grid=triton.cdiv(rows, config.rows),
    out=(_struct(x.shape, spec.dtype), _struct((rows, 1), jnp.float32)),
    num_warps=config.warps,
    **dict(ROWS=rows, K=k, BLOCK_ROWS=config.rows, PIECES=_pieces(k), VECTOR=config.vector),
    LIMIT=max_value(spec.dtype),
    VIA_FLOAT16=compute_capability() < 90,
  )
  return Quantized(values, scale)


def quantize_transposed(x: jax.Array, spec: Spec) -> Quantized:
  """`quantize(x.T, spec)`, x.T never written: a row scale is then shared by a column of x."""
  _check(x, spec)
  values, scale = _two_passes(x, spec, 0, transpose=True)
  return Quantized(values, scale.T)


def quantize_both(x: jax.Array, spec: Spec) -> tuple[Quantized, Quantized]:
  """`(quantize(x, spec), quantize(x.T, spec))` for one scale, from two reads of x in all."""
  _check(x, spec)
  if spec.scaling == "rowwise":
    raise ValueError("The rows of x and of x.T do not share scales: use 'tensorwise' or 'static'.")
  (values, transposed), scale = _two_passes(x, spec, None, transpose="both")
  return Quantized(values, scale), Quantized(transposed, scale)


def _two_passes(x, spec, axis, transpose):
  """(values, scale): absmax along the axis of a row scale, or of the whole; then the cast."""
  if spec.scaling == "tensorwise" and x.size:
    # The cast ends the maximum over the parts itself: two kernels in all.
    *values, scale = _cast_call(x, _parts_of_absmax(x.reshape(1, x.size), 1), spec.dtype, transpose)
    return _asked_for(*values, transpose), scale
  largest = absmax(x, axis if spec.scaling == "rowwise" else None)
  return cast_scaled(x, largest, spec, transpose=transpose), factor_and_scale(largest, spec)[1]


def absmax(x: jax.Array, axis: int | None) -> jax.Array:
  """max |x| along an axis that stays, with size 1: [rows, 1], [1, K] or, for None, [1, 1].

  Float32, and infinite where there was a NaN, so that no maximum taken of it afterwards, over
  parts or over devices, can lose that.
  """
  if axis is None:
    return absmax(x.reshape(1, x.size), 1)
  rows, k = x.shape
  if x.size == 0:
    return jnp.zeros((rows, 1) if axis == 1 else (1, k), jnp.float32)
  return jnp.max(_parts_of_absmax(x, axis), axis=axis, keepdims=True)


def _parts_of_absmax(x, axis):
  """[rows, parts] for axis 1, [parts, K] for axis 0."""
  rows, k = x.shape
  block_rows, block_k, steps = _absmax_blocks(rows, k, axis)
  row_blocks = triton.cdiv(rows, block_rows * (steps if axis == 0 else 1))
  k_blocks = triton.cdiv(k, block_k * (steps if axis == 1 else 1))
  return triton_call(
    x,
    kernel=_absmax_kernel,
    name="sbjax_absmax",
    grid=row_blocks * k_blocks,
    out=_struct((row_blocks, k) if axis == 0 else (rows, k_blocks), jnp.float32),
    num_warps=4,
    **dict(ROWS=rows, K=k, BLOCK_ROWS=block_rows, BLOCK_K=block_k),
    STEPS=steps,
    K_BLOCKS=k_blocks,
    AXIS=axis,
  )


def cast_scaled(x: jax.Array, absmax: jax.Array, spec: Spec, *, transpose=False):
  """x times the factor that follows from absmax, rounded; the values of `quantize` alone.

  Args:
    absmax: [rows, 1], [1, K] or [1, 1]: what `absmax` found, perhaps over several devices.
    transpose: False for the values [rows, K], True for their transpose [K, rows], "both" for the
      pair, from one read of x.
  """
  _check(x, spec)
  assert absmax.shape in ((x.shape[0], 1), (1, x.shape[1]), (1, 1)), (x.shape, absmax.shape)
  if x.size == 0:
    values = jnp.zeros(x.shape, spec.dtype)
    return _asked_for(values, values.T, transpose)
  if spec.scaling == "static":
    absmax = jnp.full_like(absmax, max_value(spec.dtype))  # The factor is then 1.
  straight, turned, _ = _cast_call(x, absmax, spec.dtype, transpose, shape=absmax.shape)
  return _asked_for(straight, turned, transpose)


def _asked_for(straight, turned, transpose):
  return (straight, turned) if transpose == "both" else turned if transpose else straight


def _cast_call(x, absmax, dtype, transpose, shape=(0, 0)):
  """(values, their transpose, scale); the maximum of all of absmax counts if it has no shape."""
  rows, k = x.shape
  block_rows, block_k = _cast_blocks(k, transpose)
  is_straight, is_turned = transpose in (False, "both"), transpose in (True, "both")
  # What is not asked for is an element that no one writes.
  straight = _struct((rows, k) if is_straight else (1, 1), dtype)
  turned = _struct((k, rows) if is_turned else (1, 1), dtype)
  return triton_call(
    x,
    absmax,
    kernel=_cast_kernel,
    name="sbjax_cast_scaled",
    grid=triton.cdiv(rows, block_rows) * triton.cdiv(k, block_k),
    out=(straight, turned, _struct((1, 1), jnp.float32)),
    num_warps=block_rows * block_k // 1024,
    **dict(ROWS=rows, K=k, BLOCK_ROWS=block_rows, BLOCK_K=block_k),
    **dict(ABSMAX_ROWS=shape[0], ABSMAX_K=shape[1]),
    PARTS=0 if shape[0] else absmax.size,
    PARTS_BLOCK=triton.next_power_of_2(absmax.size),
    LIMIT=max_value(dtype),
    VIA_FLOAT16=compute_capability() < 90,
    **dict(STRAIGHT=is_straight, TURNED=is_turned),
  )


def _check(x, spec):
  check_quantizable(x, spec)
  if x.dtype.name not in ("bfloat16", "float16", "float32"):
    raise NotImplementedError(f"Triton quantizes bfloat16, float16, float32, not {x.dtype.name}.")
  if jnp.dtype(spec.dtype) != INT8 and (chip := compute_capability()) < 89:
    name = jnp.dtype(spec.dtype).name
    raise NotImplementedError(
      f"{name} needs compute capability 8.9; this GPU (sm_{chip}) has int8."
    )


def _pieces(k: int) -> tuple[tuple[int, int], ...]:
  """At most four (first, lanes) that cover k, lanes powers of two; only the last may overhang."""
  pieces, first = [], 0
  while first < k:
    lanes = triton.next_power_of_2(k - first)
    lanes = lanes // 2 if lanes > k - first and len(pieces) < 3 else lanes
    pieces.append((first, lanes))
    first += lanes
  return tuple(pieces)


def _absmax_blocks(rows, k, axis):
  """(block_rows, block_k, steps): blocks of 4096 elements, followed along the axis."""
  if axis == 0:
    block_k = min(128, triton.next_power_of_2(k))
    block_rows = 4096 // block_k
    return block_rows, block_k, min(8, triton.cdiv(rows, block_rows))
  if rows == 1:  # One number of the whole: about a thousand parts, enough to keep a chip loading.
    return 1, 4096, triton.cdiv(k, 4096 * 1024)
  block_k = min(1024, max(128, k & -k), triton.next_power_of_2(k))
  return 4096 // block_k, block_k, min(8, triton.cdiv(k, block_k))


def _cast_blocks(k, transpose):
  """(block_rows, block_k): wide blocks to write rows; to turn them, 128 bytes of either."""
  if transpose:
    return 128, 64
  block_k = min(1024, max(128, k & -k), triton.next_power_of_2(k))
  return 4096 // block_k, block_k


@triton.jit
def _larger(a, b):
  return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _factor_and_scale(absmax, LIMIT: tl.constexpr):
  """sbjax.quantize.factor_and_scale: a division that is rounded as IEEE says, a product."""
  factor = tl.minimum(tl.div_rn(tl.cast(LIMIT, tl.float32), absmax), FLOAT32_MAX)
  scale = tl.where(absmax < float("inf"), absmax * (1.0 / LIMIT), float("nan"))
  return factor, scale


@triton.jit
def _cast(y, dtype: tl.constexpr, VIA_FLOAT16: tl.constexpr):
  """Rounds |y| <= the format's maximum, half to even; NaN becomes 0 in int8, which has none."""
  if dtype == tl.int8:
    # Adding 1.5 * 2**23 leaves the integer in the low bits; its last byte is two's complement.
    integer = (y + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    values = tl.where(y == y, integer, 0).to(tl.int8)
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
def _piece(row, FIRST: tl.constexpr, LANES: tl.constexpr, ROWS, K, RAGGED, VECTOR: tl.constexpr):
  """Where columns FIRST to FIRST + LANES of a row lie, and which of them exist."""
  column = FIRST + tl.arange(0, LANES)
  offset = tl.max_contiguous(row.to(tl.int64) * K + column, VECTOR if VECTOR < LANES else LANES)
  # A mask that is known to be true costs nothing.
  mask = tl.full((LANES,), True, tl.int1)
  if RAGGED:
    mask = mask & (row < ROWS)
  if FIRST + LANES > K:
    mask = mask & (column < K)
  return offset, mask


@triton.jit
def _rowwise_kernel(
  x_ptr,
  values_ptr,
  scale_ptr,
  ROWS: tl.constexpr,
  K: tl.constexpr,
  BLOCK_ROWS: tl.constexpr,
  PIECES: tl.constexpr,
  VECTOR: tl.constexpr,
  LIMIT: tl.constexpr,
  VIA_FLOAT16: tl.constexpr,
):
  """Makes values [BLOCK_ROWS, K] and scale [BLOCK_ROWS, 1] from PIECES (first, lanes) of rows.

  A row's absmax is a scalar: pieces with lanes of different width never meet as vectors, which
  would move one of them through shared memory.
  """
  first_row = tl.program_id(0) * BLOCK_ROWS
  RAGGED: tl.constexpr = ROWS % BLOCK_ROWS != 0
  xs = ()
  for r in tl.static_range(BLOCK_ROWS):
    for i in tl.static_range(len(PIECES)):
      offset, mask = _piece(first_row + r, PIECES[i][0], PIECES[i][1], ROWS, K, RAGGED, VECTOR)
      xs += (tl.load(x_ptr + offset, mask=mask, other=0.0),)

  for r in tl.static_range(BLOCK_ROWS):
    row = first_row + r
    absmax = 0.0
    for i in tl.static_range(len(PIECES)):
      x = tl.abs(xs[r * len(PIECES) + i].to(tl.float32))
      absmax = _larger(absmax, tl.reduce(x, 0, _larger))
    factor, scale = _factor_and_scale(absmax, LIMIT)
    tl.store(scale_ptr + row, scale, mask=row < ROWS)
    for i in tl.static_range(len(PIECES)):
      offset, mask = _piece(row, PIECES[i][0], PIECES[i][1], ROWS, K, RAGGED, VECTOR)
      y = xs[r * len(PIECES) + i].to(tl.float32) * factor
      values = _cast(y, values_ptr.dtype.element_ty, VIA_FLOAT16)
      tl.store(values_ptr + offset, values, mask=mask)


@triton.jit
def _absmax_kernel(
  x_ptr,
  out_ptr,
  ROWS: tl.constexpr,
  K: tl.constexpr,
  BLOCK_ROWS: tl.constexpr,
  BLOCK_K: tl.constexpr,
  STEPS: tl.constexpr,
  K_BLOCKS: tl.constexpr,
  AXIS: tl.constexpr,
):
  """Makes the absmax of STEPS blocks that follow one another along AXIS."""
  row_block, k_block = tl.program_id(0) // K_BLOCKS, tl.program_id(0) % K_BLOCKS
  row = row_block * BLOCK_ROWS * (STEPS if AXIS == 0 else 1) + tl.arange(0, BLOCK_ROWS)
  column = k_block.to(tl.int64) * BLOCK_K * (STEPS if AXIS == 1 else 1) + tl.arange(0, BLOCK_K)
  largest = tl.full((BLOCK_ROWS, BLOCK_K), 0.0, tl.float32)
  for step in range(STEPS):
    r = row + step * BLOCK_ROWS if AXIS == 0 else row
    c = column + step * BLOCK_K if AXIS == 1 else column
    mask = (r < ROWS)[:, None] & (c < K)[None, :]
    x = tl.load(x_ptr + r.to(tl.int64)[:, None] * K + c[None, :], mask=mask, other=0.0)
    largest = _larger(largest, tl.abs(x.to(tl.float32)))
  result = tl.reduce(largest, AXIS, _larger)
  result = tl.where(result == result, result, float("inf"))
  if AXIS == 0:
    tl.store(out_ptr + row_block.to(tl.int64) * K + column, result, mask=column < K)
  else:
    tl.store(out_ptr + row.to(tl.int64) * K_BLOCKS + k_block, result, mask=row < ROWS)


@triton.jit
def _cast_kernel(
  x_ptr,
  absmax_ptr,
  straight_ptr,
  turned_ptr,
  scale_ptr,
  ROWS: tl.constexpr,
  K: tl.constexpr,
  BLOCK_ROWS: tl.constexpr,
  BLOCK_K: tl.constexpr,
  ABSMAX_ROWS: tl.constexpr,
  ABSMAX_K: tl.constexpr,
  PARTS: tl.constexpr,
  PARTS_BLOCK: tl.constexpr,
  LIMIT: tl.constexpr,
  VIA_FLOAT16: tl.constexpr,
  STRAIGHT: tl.constexpr,
  TURNED: tl.constexpr,
):
  """Makes values [BLOCK_ROWS, BLOCK_K], and writes them as they are, or turned, or both."""
  k_blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
  row = tl.program_id(0) // k_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
  column = tl.program_id(0) % k_blocks * BLOCK_K + tl.arange(0, BLOCK_K)
  row, column = row.to(tl.int64)[:, None], column.to(tl.int64)[None, :]
  mask = (row < ROWS) & (column < K)
  x = tl.load(x_ptr + row * K + column, mask=mask, other=0.0).to(tl.float32)
  if PARTS > 0:
    part = tl.arange(0, PARTS_BLOCK)
    absmax = tl.reduce(tl.load(absmax_ptr + part, mask=part < PARTS, other=0.0), 0, _larger)
  elif ABSMAX_ROWS > 1:
    absmax = tl.load(absmax_ptr + row, mask=row < ROWS, other=0.0)
  elif ABSMAX_K > 1:
    absmax = tl.load(absmax_ptr + column, mask=column < K, other=0.0)
  else:
    absmax = tl.load(absmax_ptr)
  # Here, and not in XLA, whose division on a GPU is not rounded as IEEE says.
  factor, scale = _factor_and_scale(absmax, LIMIT)
  if PARTS > 0:
    tl.store(scale_ptr, scale, mask=tl.program_id(0) == 0)
  y = tl.clamp(x * factor, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
  values = _cast(y, straight_ptr.dtype.element_ty, VIA_FLOAT16)
  if STRAIGHT:
    tl.store(straight_ptr + row * K + column, values, mask=mask)
  if TURNED:
    tl.store(turned_ptr + column * ROWS + row, values, mask=mask)
