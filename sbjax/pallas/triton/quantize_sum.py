"""A gradient in 8 bits, and its sum over rows: `sbjax.ops.rows` with one read of each row."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from sbjax.ops import rows
from sbjax.ops.rows import MAX_WIDTH_IN_REGISTERS
from sbjax.pallas.triton.call import compute_capability, triton_call
from sbjax.pallas.triton.quantize import quantize
from sbjax.pallas.triton.rounding import (
  Config,
  folded_row,
  piece,
  quantize_row,
  row_constants,
  store_row,
  to_float32,
  zero_row,
)
from sbjax.quantize import Quantized, Spec

_struct = jax.ShapeDtypeStruct


def sum_config(m: int, k: int, itemsize: int) -> Config:
  """At most 40 elements of a row a thread, because little is computed with them."""
  return Config(
    rows=min(32, triton.next_power_of_2(triton.cdiv(m, 512))),
    warps=triton.next_power_of_2(triton.cdiv(k, 1280)),
    vector=16 // itemsize,
  )


def quantize_sum(
  parts: tuple[jax.Array, ...],
  spec: Spec,
  *,
  fold: jax.Array | None = None,
  config: Config | None = None,
) -> tuple[jax.Array, Quantized, jax.Array]:
  """`sbjax.ops.rows.quantize_sum`: finite rows are equal bit for bit, sums but for rounding.

  The kernel concatenates three parts (q, k and v) as it reads them. XLA does it for other numbers.
  Where rows share a scale or do not fit in registers, the quantizer's kernel follows XLA's sum.
  """
  if not spec.is_rowwise or sum(part.shape[1] for part in parts) > MAX_WIDTH_IN_REGISTERS:
    return rows.quantize_sum(parts, spec, fold=fold, quantize=quantize)
  if len(parts) not in (1, 3):
    parts = (jnp.concatenate(parts, axis=1),)
  ((m, width),) = {part.shape for part in parts}
  dy = _struct((m, width * len(parts)), parts[0].dtype)
  if dy.size == 0:
    return rows.quantize_sum(parts, spec, fold=fold)
  config = sum_config(*dy.shape, dy.dtype.itemsize) if config is None else config
  quantized = _struct(dy.shape, spec.dtype), _struct((m, 1), jnp.float32)
  sums = _struct((triton.cdiv(m, config.rows), dy.shape[1]), jnp.float32)
  joined, values, scale, sums = triton_call(
    *(parts if len(parts) == 3 else 3 * parts),
    parts[0] if fold is None else fold,
    kernel=_quantize_sum_kernel,
    name="sbjax_quantize_sum",
    grid=triton.cdiv(len(dy), config.rows),
    out=(dy if len(parts) == 3 else _struct((1, 1), jnp.float32), *quantized, sums),
    num_warps=config.warps,
    **row_constants(*dy.shape, config, len(parts)),
    VIA_FLOAT16=compute_capability() < 90,
    **dict(LIMIT=spec.format.max, PARTS=len(parts), FOLD=fold is not None),
  )
  dy = joined if len(parts) == 3 else parts[0]
  return dy, Quantized(values, scale, spec), jnp.sum(sums, axis=0)


@triton.jit
def _load_parts(
  parts, row, ROWS, RAGGED, WIDTH: tl.constexpr, PIECES: tl.constexpr, VECTOR: tl.constexpr
):
  """`load_row` for a row whose columns are split into `parts`, each [M, WIDTH]."""
  xs = ()
  for i in tl.static_range(len(PIECES)):
    offset, mask = piece(row, PIECES[i][0] % WIDTH, PIECES[i][1], ROWS, WIDTH, RAGGED, VECTOR)
    xs += (tl.load(parts[PIECES[i][0] // WIDTH] + offset, mask=mask, other=0.0),)
  return xs


@triton.jit
def _quantize_sum_kernel(
  first_ptr,
  second_ptr,
  third_ptr,
  fold_ptr,
  dy_ptr,
  values_ptr,
  scale_ptr,
  sum_ptr,
  M: tl.constexpr,
  K: tl.constexpr,
  ROWS: tl.constexpr,
  PIECES: tl.constexpr,
  VECTOR: tl.constexpr,
  THREADS: tl.constexpr,
  VIA_FLOAT16: tl.constexpr,
  LIMIT: tl.constexpr,
  PARTS: tl.constexpr,
  FOLD: tl.constexpr,
):
  """Makes values [ROWS, K], scale [ROWS, 1] and the sum over ROWS; for three PARTS also dy."""
  parts = (first_ptr, second_ptr, third_ptr) if PARTS == 3 else (first_ptr,)
  first = tl.program_id(0) * ROWS
  RAGGED: tl.constexpr = M % ROWS != 0
  end = tl.minimum(first + ROWS, M) if RAGGED else first + ROWS
  sums = zero_row(PIECES)
  ahead = _load_parts(parts, first, end, RAGGED, K // PARTS, PIECES, VECTOR)
  for r in range(ROWS):
    row = first + r
    if PARTS == 3:
      store_row(dy_ptr, ahead, row, M, RAGGED, K, PIECES, VECTOR)
    dys = to_float32(ahead)
    ahead = _load_parts(parts, row + 1, end, True, K // PARTS, PIECES, VECTOR)
    sums_next = ()
    for i in tl.static_range(len(PIECES)):
      sums_next += (sums[i] + dys[i],)
    sums = sums_next
    if FOLD:
      dys = folded_row(dys, fold_ptr, K, PIECES, VECTOR)
    quantize_row(
      values_ptr, scale_ptr, dys, row, M, RAGGED, K, PIECES, VECTOR, THREADS, LIMIT, VIA_FLOAT16
    )
  store_row(sum_ptr, sums, tl.program_id(0), M, False, K, PIECES, VECTOR)
