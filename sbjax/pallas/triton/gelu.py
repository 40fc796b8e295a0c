"""GELU and its gradient: `sbjax.ops.rows` with one read of each row."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from sbjax.ops import rows as fused_ops
from sbjax.pallas.triton.activations import active, active_and_slope
from sbjax.pallas.triton.call import compute_capability, triton_call
from sbjax.pallas.triton.rounding import (
  UNUSED,
  Config,
  folded_row,
  limit_of,
  load_row,
  quantize_row,
  quantized_rows,
  row_constants,
  store_row,
  to_float32,
  unsupported_rows,
  zero_row,
)
from sbjax.quantize import Quantized, Spec

_struct = jax.ShapeDtypeStruct


def forward_config(m: int, k: int, itemsize: int) -> Config:
  """About 40 elements of a row a thread, loaded 16 bytes at a time; two short rows a program."""
  return Config(
    rows=2 if k <= 1280 and m >= 4096 else 1,
    warps=min(8, triton.next_power_of_2(triton.cdiv(k, 1664))),
    vector=16 // itemsize,
  )


def backward_config(m: int, k: int, itemsize: int) -> Config:
  """At most 32 elements of a row a thread; a sum for each 64 rows is at most 5 % of the bytes."""
  return Config(
    rows=min(64, triton.next_power_of_2(triton.cdiv(m, 512))),
    warps=triton.next_power_of_2(triton.cdiv(k, 1024)),
    vector=16 // itemsize,
  )


unsupported = unsupported_rows  # Of the kernels of either pass.


def gelu_quantize(
  h: jax.Array,
  spec: Spec | None,
  keep: Spec | None = None,
  *,
  activation: str = "gelu",
  config: Config | None = None,
) -> tuple[Quantized | jax.Array, Quantized | jax.Array]:
  """`sbjax.ops.rows.gelu_quantize`, with the error of `active`."""
  if h.size == 0:
    return fused_ops.gelu_quantize(h, spec, keep, activation=activation)
  m, k = h.shape
  config = forward_config(m, k, h.dtype.itemsize) if config is None else config
  g, g_scale, saved, saved_scale = triton_call(
    h,
    kernel=_gelu_kernel,
    name="sbjax_gelu_quantize",
    grid=triton.cdiv(m, config.rows),
    out=(
      *((_struct(h.shape, h.dtype), UNUSED) if spec is None else quantized_rows(h.shape, spec)),
      *quantized_rows(h.shape, keep),
    ),
    num_warps=config.warps,
    **row_constants(*h.shape, config),
    VIA_FLOAT16=compute_capability() < 90,
    **dict(LIMIT=limit_of(spec), KEEP_LIMIT=limit_of(keep), ACTIVATION=activation),
  )
  g = g if spec is None else Quantized(g, g_scale, spec)
  return g, h if keep is None else Quantized(saved, saved_scale, keep)


def gelu_backward(
  h: jax.Array | Quantized,
  dg: jax.Array,
  spec: Spec | None,
  *,
  activation: str = "gelu",
  fold: jax.Array | None = None,
  config: Config | None = None,
) -> tuple[jax.Array, Quantized | None, jax.Array, jax.Array]:
  """`sbjax.ops.rows.gelu_backward`, with the error of `active_and_slope`."""
  if dg.size == 0:
    return fused_ops.gelu_backward(h, dg, spec, activation=activation, fold=fold)
  config = backward_config(*dg.shape, dg.dtype.itemsize) if config is None else config
  h_values, h_scale = (
    (h.values, h.scale) if isinstance(h, Quantized) else (h, jnp.zeros((1, 1), jnp.float32))
  )
  dh, values, scale, sums, g = triton_call(
    *(h_values, h_scale, dg, h_scale if fold is None else fold),
    kernel=_gelu_backward_kernel,
    name="sbjax_gelu_backward",
    grid=triton.cdiv(len(dg), config.rows),
    out=(
      _struct(dg.shape, dg.dtype),
      *quantized_rows(dg.shape, spec),
      _sums(dg, config),
      _struct(dg.shape, dg.dtype),
    ),
    in_place={2: 0} if isinstance(h, Quantized) or h.dtype != dg.dtype else {0: 4, 2: 0},
    num_warps=config.warps,
    **row_constants(*dg.shape, config),
    VIA_FLOAT16=compute_capability() < 90,
    **dict(LIMIT=limit_of(spec), DEQUANTIZE=isinstance(h, Quantized), ACTIVATION=activation),
    FOLD=fold is not None,
  )
  return dh, None if spec is None else Quantized(values, scale, spec), jnp.sum(sums, axis=0), g


def _sums(x, config):
  return _struct((triton.cdiv(len(x), config.rows), x.shape[1]), jnp.float32)


@triton.jit
def _gelu_kernel(
  h_ptr,
  g_ptr,
  g_scale_ptr,
  saved_ptr,
  saved_scale_ptr,
  M: tl.constexpr,
  K: tl.constexpr,
  ROWS: tl.constexpr,
  PIECES: tl.constexpr,
  VECTOR: tl.constexpr,
  THREADS: tl.constexpr,
  VIA_FLOAT16: tl.constexpr,
  LIMIT: tl.constexpr,
  KEEP_LIMIT: tl.constexpr,
  ACTIVATION: tl.constexpr,
):
  """Makes g [ROWS, K]; with LIMIT g is quantized, with KEEP_LIMIT h is quantized as saved."""
  first = tl.program_id(0) * ROWS
  RAGGED: tl.constexpr = M % ROWS != 0
  loaded = ()
  for r in tl.static_range(ROWS):
    loaded += (load_row(h_ptr, first + r, M, RAGGED, K, PIECES, VECTOR),)

  for r in tl.static_range(ROWS):
    row = first + r
    hs = to_float32(loaded[r])
    if KEEP_LIMIT is not None:
      quantize_row(
        *(saved_ptr, saved_scale_ptr, hs, row, M, RAGGED),
        *(K, PIECES, VECTOR, THREADS, KEEP_LIMIT, VIA_FLOAT16),
      )
    gs = ()
    for i in tl.static_range(len(PIECES)):
      gs += (active(hs[i], ACTIVATION),)
    if LIMIT is not None:
      quantize_row(
        g_ptr, g_scale_ptr, gs, row, M, RAGGED, K, PIECES, VECTOR, THREADS, LIMIT, VIA_FLOAT16
      )
    else:
      store_row(g_ptr, gs, row, M, RAGGED, K, PIECES, VECTOR)


@triton.jit
def _gelu_backward_kernel(
  h_ptr,
  h_scale_ptr,
  dg_ptr,
  fold_ptr,
  dh_ptr,
  values_ptr,
  scale_ptr,
  sum_ptr,
  g_ptr,
  M: tl.constexpr,
  K: tl.constexpr,
  ROWS: tl.constexpr,
  PIECES: tl.constexpr,
  VECTOR: tl.constexpr,
  THREADS: tl.constexpr,
  VIA_FLOAT16: tl.constexpr,
  LIMIT: tl.constexpr,
  DEQUANTIZE: tl.constexpr,
  ACTIVATION: tl.constexpr,
  FOLD: tl.constexpr,
):
  """Makes dh and g [ROWS, K], with LIMIT also dh quantized, and the sum of dh over ROWS."""
  if dh_ptr is None:
    dh_ptr = dg_ptr
  if g_ptr is None:
    g_ptr = h_ptr
  first = tl.program_id(0) * ROWS
  RAGGED: tl.constexpr = M % ROWS != 0
  end = tl.minimum(first + ROWS, M) if RAGGED else first + ROWS
  sums = zero_row(PIECES)
  hs_ahead = load_row(h_ptr, first, end, RAGGED, K, PIECES, VECTOR)
  dgs_ahead = load_row(dg_ptr, first, end, RAGGED, K, PIECES, VECTOR)
  for r in range(ROWS):
    row = first + r
    tl.debug_barrier()  # All threads have read dg and h, which dh and g overwrite.
    hs, dgs = to_float32(hs_ahead), to_float32(dgs_ahead)
    hs_ahead = load_row(h_ptr, row + 1, end, True, K, PIECES, VECTOR)
    dgs_ahead = load_row(dg_ptr, row + 1, end, True, K, PIECES, VECTOR)
    factor = tl.load(h_scale_ptr + row, mask=row < M, other=0.0) if DEQUANTIZE else 1.0
    gs, dhs, sums_next = (), (), ()
    for i in tl.static_range(len(PIECES)):
      h = hs[i] * factor if DEQUANTIZE else hs[i]
      g, slope = active_and_slope(h, ACTIVATION)
      gs += (g,)
      dhs += (dgs[i] * slope,)
      sums_next += (sums[i] + dhs[i],)
    sums = sums_next
    store_row(g_ptr, gs, row, M, RAGGED, K, PIECES, VECTOR)
    store_row(dh_ptr, dhs, row, M, RAGGED, K, PIECES, VECTOR)
    if FOLD:
      dhs = folded_row(dhs, fold_ptr, K, PIECES, VECTOR)
    if LIMIT is not None:
      quantize_row(
        values_ptr, scale_ptr, dhs, row, M, RAGGED, K, PIECES, VECTOR, THREADS, LIMIT, VIA_FLOAT16
      )
  store_row(sum_ptr, sums, tl.program_id(0), M, False, K, PIECES, VECTOR)
