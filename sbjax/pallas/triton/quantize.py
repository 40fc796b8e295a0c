"""`sbjax.quantize.quantize` in Triton, at the speed of memory.

Rowwise, a row that fits into registers is read once: one kernel computes its absmax, scale and
values. All else takes two passes, `absmax` and `cast_scaled`, so that absmax can be reduced over
devices between them. `cast_scaled` can also write the transpose of the values it computes.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from sbjax.pallas.triton.call import compute_capability, triton_call
from sbjax.pallas.triton.rounding import (
  Config,
  cast,
  folded_row,
  larger,
  load_row,
  pieces,
  power_of_two_factor,
  quantize_row,
  rounding_factor,
  to_float32,
)
from sbjax.quantize import Quantized, Spec, check_quantizable, factor_and_scale, folded

_struct = jax.ShapeDtypeStruct
ONE_PASS_WIDTH = 16384
MANY_ROWS = 8192  # of a column, whose partial maxima each block of the cast reads: up to these


def config_for(rows: int, k: int, itemsize: int) -> Config:
  """About 40 elements of a row a thread, loaded 16 bytes at a time; two short rows a program."""
  return Config(
    rows=2 if k <= 1280 and rows >= 4096 else 1,
    warps=min(8, triton.next_power_of_2(triton.cdiv(k, 1664))),
    vector=16 // itemsize,
  )


def quantize(
  x: jax.Array, spec: Spec, *, fold: jax.Array | None = None, config: Config | None = None
) -> Quantized:
  """`sbjax.quantize.quantize`, bit for bit, for bfloat16, float16 and float32 x [rows, K].

  Where the scale is NaN, only int8 values are equal: the bits of an fp8 NaN depend on the device.

  fold: [K] float32, what multiplies x first (`sbjax.quantize.folded`).
  """
  check_quantizable(x)
  rows, k = x.shape
  if not spec.is_rowwise or k > ONE_PASS_WIDTH:
    return Quantized(*_two_passes(folded(x, fold), spec, spec.axis, transpose=False), spec)
  if x.size == 0:
    return Quantized(jnp.zeros(x.shape, spec.dtype), jnp.zeros((rows, 1), jnp.float32), spec)
  config = config_for(rows, k, x.dtype.itemsize) if config is None else config
  values, scale = triton_call(
    x,
    x if fold is None else fold,
    kernel=_rowwise_kernel,
    name="sbjax_quantize_rowwise",
    grid=triton.cdiv(rows, config.rows),
    out=(_struct(x.shape, spec.dtype), _struct((rows, 1), jnp.float32)),
    num_warps=config.warps,
    **dict(ROWS=rows, K=k, BLOCK_ROWS=config.rows, PIECES=pieces(k), VECTOR=config.vector),
    THREADS=32 * config.warps,
    LIMIT=spec.format.max,
    VIA_FLOAT16=compute_capability() < 90,
    FOLD=fold is not None,
  )
  return Quantized(values, scale, spec)


def quantize_transposed(x: jax.Array, spec: Spec) -> Quantized:
  """`quantize(x.T, spec)` without writing x.T; a rowwise scale belongs to a column of x."""
  check_quantizable(x)
  values, scale = _two_passes(x, spec, spec.T.axis, transpose=True)
  return Quantized(values, scale.T, spec)


def quantize_both(x: jax.Array, spec: Spec) -> tuple[Quantized, Quantized]:
  """`quantize(x, spec)` and its transpose, from two reads of x."""
  check_quantizable(x)
  (values, transposed), scale = _two_passes(x, spec, spec.axis, transpose="both")
  return Quantized(values, scale, spec), Quantized(transposed, scale.T, spec.T)


def _two_passes(x, spec, axis, transpose):
  """(values, scale), from an absmax along `axis` of x, or of all of x (None); then the cast."""
  is_few = axis is None or (axis == 0 and transpose and len(x) <= MANY_ROWS)
  if is_few and not spec.is_static and x.size:
    # The cast itself reduces the partial maxima, which saves kernels.
    partial = _partial_absmax(x.reshape(1, x.size), 1) if axis is None else _partial_absmax(x, 0)
    shape = (0, 0) if axis is None else (0, x.shape[1])
    *arrays, scale = _cast_call(x, partial, spec, transpose, shape)
    return _select(*arrays, transpose), scale
  largest = absmax(x, axis) if spec.takes_absmax else jnp.zeros((1, 1), jnp.float32)
  return cast_scaled(x, largest, spec, transpose=transpose), factor_and_scale(largest, spec)[1]


def absmax(x: jax.Array, axis: int | None) -> jax.Array:
  """max |x| along `axis` as float32 [rows, 1] (1), [1, K] (0) or [1, 1] (None).

  A NaN counts as infinity: a later maximum, over parts or devices, keeps that but may drop a NaN.
  """
  if axis is None:
    return absmax(x.reshape(1, x.size), 1)
  rows, k = x.shape
  if x.size == 0:
    return jnp.zeros((rows, 1) if axis == 1 else (1, k), jnp.float32)
  return jnp.max(_partial_absmax(x, axis), axis=axis, keepdims=True)


def _partial_absmax(x, axis):
  """Maxima of parts of the axis: [rows, parts] for axis 1, [parts, K] for axis 0."""
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
  """The values of `quantize` for a given absmax: x times its factor, rounded.

  Args:
    absmax: [rows, 1], [1, K] or [1, 1], as `absmax` returns it.
    transpose: False for values [rows, K], True for their transpose [K, rows], "both" for the pair
      from one read of x.
  """
  check_quantizable(x)
  assert absmax.shape in ((x.shape[0], 1), (1, x.shape[1]), (1, 1)), (x.shape, absmax.shape)
  if x.size == 0:
    values = jnp.zeros(x.shape, spec.dtype)
    return _select(values, values.T, transpose)
  values, transposed, _ = _cast_call(x, absmax, spec, transpose, shape=absmax.shape)
  return _select(values, transposed, transpose)


def _select(values, transposed, transpose):
  return (values, transposed) if transpose == "both" else transposed if transpose else values


def _cast_call(x, absmax, spec, transpose, shape):
  """(values, transposed, scale) for absmax of that shape.

  Without rows it is partial maxima, which the kernel reduces: of all of x (0, 0) or of its columns.
  """
  rows, k = x.shape
  block_rows, block_k = _cast_blocks(k, transpose)
  has_values, has_transposed = transpose in (False, "both"), transpose in (True, "both")
  parts = len(absmax) if shape[1] else absmax.size
  # An output that is not needed has one element, which is not written.
  values = _struct((rows, k) if has_values else (1, 1), spec.dtype)
  transposed = _struct((k, rows) if has_transposed else (1, 1), spec.dtype)
  return triton_call(
    x,
    absmax,
    kernel=_cast_kernel,
    name="sbjax_cast_scaled",
    grid=triton.cdiv(rows, block_rows) * triton.cdiv(k, block_k),
    out=(values, transposed, _struct((1, max(1, shape[1])), jnp.float32)),
    num_warps=block_rows * block_k // 1024,
    **dict(ROWS=rows, K=k, BLOCK_ROWS=block_rows, BLOCK_K=block_k),
    **dict(ABSMAX_ROWS=shape[0], ABSMAX_K=shape[1]),
    PARTS=0 if shape[0] else parts,
    PARTS_BLOCK=triton.next_power_of_2(parts),
    LIMIT=spec.format.max,
    POWER_OF_TWO=spec.scaling == "tensorwise_pow2",
    STATIC_FACTOR=2.0**spec.exponent if spec.is_static else 0.0,
    VIA_FLOAT16=compute_capability() < 90,
    **dict(WRITE_VALUES=has_values, WRITE_TRANSPOSED=has_transposed),
  )


def _absmax_blocks(rows, k, axis):
  """(block_rows, block_k, steps): a program reads `steps` blocks of 4096 elements along `axis`."""
  if axis == 0:
    few = rows <= MANY_ROWS  # A weight: as many programs as leave the cast 16 parts to reduce.
    block_k = min(32 if few else 128, triton.next_power_of_2(k))
    block_rows = 4096 // block_k
    blocks = triton.cdiv(rows, block_rows)
    return block_rows, block_k, triton.cdiv(blocks, 16) if few else min(8, blocks)
  if rows == 1:  # About a thousand programs keep the memory of a GPU busy.
    return 1, 4096, triton.cdiv(k, 4096 * 1024)
  block_k = min(1024, max(128, k & -k), triton.next_power_of_2(k))
  return 4096 // block_k, block_k, min(8, triton.cdiv(k, block_k))


def _cast_blocks(k, transpose):
  """(block_rows, block_k); for a transpose, 128 bytes of a 16-bit row of x and of its transpose."""
  if transpose:
    return 128, 64
  block_k = min(1024, max(128, k & -k), triton.next_power_of_2(k))
  return 4096 // block_k, block_k


@triton.jit
def _rowwise_kernel(
  x_ptr,
  fold_ptr,
  values_ptr,
  scale_ptr,
  ROWS: tl.constexpr,
  K: tl.constexpr,
  BLOCK_ROWS: tl.constexpr,
  PIECES: tl.constexpr,
  VECTOR: tl.constexpr,
  THREADS: tl.constexpr,
  LIMIT: tl.constexpr,
  VIA_FLOAT16: tl.constexpr,
  FOLD: tl.constexpr,
):
  """Makes values [BLOCK_ROWS, K] and scale [BLOCK_ROWS, 1]; PIECES are (first, lanes) of a row."""
  first_row = tl.program_id(0) * BLOCK_ROWS
  RAGGED: tl.constexpr = ROWS % BLOCK_ROWS != 0
  rows = ()
  for r in tl.static_range(BLOCK_ROWS):
    rows += (load_row(x_ptr, first_row + r, ROWS, RAGGED, K, PIECES, VECTOR),)

  for r in tl.static_range(BLOCK_ROWS):
    xs = to_float32(rows[r])
    if FOLD:
      xs = folded_row(xs, fold_ptr, K, PIECES, VECTOR)
    quantize_row(
      *(values_ptr, scale_ptr, xs),
      *(first_row + r, ROWS, RAGGED, K, PIECES, VECTOR, THREADS, LIMIT, VIA_FLOAT16),
    )


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
  """Makes the absmax over AXIS of STEPS neighbouring blocks."""
  row_block, k_block = tl.program_id(0) // K_BLOCKS, tl.program_id(0) % K_BLOCKS
  row = row_block * BLOCK_ROWS * (STEPS if AXIS == 0 else 1) + tl.arange(0, BLOCK_ROWS)
  column = k_block.to(tl.int64) * BLOCK_K * (STEPS if AXIS == 1 else 1) + tl.arange(0, BLOCK_K)
  largest = tl.full((BLOCK_ROWS, BLOCK_K), 0.0, tl.float32)
  for step in range(STEPS):
    r = row + step * BLOCK_ROWS if AXIS == 0 else row
    c = column + step * BLOCK_K if AXIS == 1 else column
    mask = (r < ROWS)[:, None] & (c < K)[None, :]
    x = tl.load(x_ptr + r.to(tl.int64)[:, None] * K + c[None, :], mask=mask, other=0.0)
    largest = larger(largest, tl.abs(x.to(tl.float32)))
  result = tl.reduce(largest, AXIS, larger)
  result = tl.where(result == result, result, float("inf"))
  if AXIS == 0:
    tl.store(out_ptr + row_block.to(tl.int64) * K + column, result, mask=column < K)
  else:
    tl.store(out_ptr + row.to(tl.int64) * K_BLOCKS + k_block, result, mask=row < ROWS)


@triton.jit
def _cast_kernel(
  x_ptr,
  absmax_ptr,
  values_ptr,
  transposed_ptr,
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
  POWER_OF_TWO: tl.constexpr,
  STATIC_FACTOR: tl.constexpr,
  VIA_FLOAT16: tl.constexpr,
  WRITE_VALUES: tl.constexpr,
  WRITE_TRANSPOSED: tl.constexpr,
):
  """Makes values [BLOCK_ROWS, BLOCK_K], their transpose, or both."""
  k_blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
  row = tl.program_id(0) // k_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
  column = tl.program_id(0) % k_blocks * BLOCK_K + tl.arange(0, BLOCK_K)
  row, column = row.to(tl.int64)[:, None], column.to(tl.int64)[None, :]
  mask = (row < ROWS) & (column < K)
  x = tl.load(x_ptr + row * K + column, mask=mask, other=0.0).to(tl.float32)
  if PARTS > 0 and ABSMAX_K > 1:
    part = tl.arange(0, PARTS_BLOCK)[:, None]
    in_parts = (part < PARTS) & (column < K)
    absmax = tl.load(absmax_ptr + part * K + column, mask=in_parts, other=0.0)
    absmax = tl.reduce(absmax, 0, larger)[None, :]
  elif PARTS > 0:
    part = tl.arange(0, PARTS_BLOCK)
    absmax = tl.reduce(tl.load(absmax_ptr + part, mask=part < PARTS, other=0.0), 0, larger)
  elif ABSMAX_ROWS > 1:
    absmax = tl.load(absmax_ptr + row, mask=row < ROWS, other=0.0)
  elif ABSMAX_K > 1:
    absmax = tl.load(absmax_ptr + column, mask=column < K, other=0.0)
  else:
    absmax = tl.load(absmax_ptr)
  # Computed here, because XLA's division on a GPU is not rounded as IEEE says.
  if POWER_OF_TWO:
    factor, scale = power_of_two_factor(absmax, LIMIT)
  else:
    factor, scale = rounding_factor(absmax, LIMIT)
  if STATIC_FACTOR > 0:  # 0: the factor follows from absmax.
    factor = STATIC_FACTOR
  if PARTS > 0 and ABSMAX_K > 1:
    tl.store(scale_ptr + column, scale, mask=(column < K) & (tl.program_id(0) < k_blocks))
  elif PARTS > 0:
    tl.store(scale_ptr, scale, mask=tl.program_id(0) == 0)
  y = tl.clamp(x * factor, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
  if STATIC_FACTOR > 0 and values_ptr.dtype.element_ty != tl.int8:
    y = tl.where(tl.abs(x) < float("inf"), y, float("nan"))
  values = cast(y, values_ptr.dtype.element_ty, VIA_FLOAT16)
  if WRITE_VALUES:
    tl.store(values_ptr + row * K + column, values, mask=mask)
  if WRITE_TRANSPOSED:
    tl.store(transposed_ptr + column * ROWS + row, values, mask=mask)
