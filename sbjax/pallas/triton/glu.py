"""A gated linear unit and its gradient: `sbjax.ops.rows` with one read of each row.

Few gated MLPs have biases, so the gradient does not sum over rows, as GELU's does, and no program
has to loop over many of them.
"""

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
)
from sbjax.quantize import Quantized, Spec

_struct = jax.ShapeDtypeStruct


def forward_config(k: int, itemsize: int) -> Config:
  """At most 26 elements a thread of each of two rows."""
  return Config(
    rows=1, warps=min(16, triton.next_power_of_2(triton.cdiv(k, 832))), vector=16 // itemsize
  )


def backward_config(k: int, itemsize: int) -> Config:
  """At most 16 elements a thread of each of three rows, and of three that are made of them."""
  return Config(
    rows=1, warps=min(16, triton.next_power_of_2(triton.cdiv(k, 512))), vector=16 // itemsize
  )


unsupported = unsupported_rows  # Of the kernels of either pass.


def glu_quantize(
  gate: jax.Array,
  up: jax.Array,
  spec: Spec | None,
  keep: Spec | None = None,
  *,
  activation: str = "silu",
  config: Config | None = None,
) -> tuple[Quantized | jax.Array, tuple[Quantized | jax.Array, Quantized | jax.Array]]:
  """`sbjax.ops.rows.glu_quantize`, with the error of `active`."""
  if gate.size == 0:
    return fused_ops.glu_quantize(gate, up, spec, keep, activation=activation)
  shape, dtype = gate.shape, gate.dtype
  config = forward_config(shape[1], dtype.itemsize) if config is None else config
  g, g_scale, *kept = triton_call(
    gate,
    up,
    kernel=_glu_kernel,
    name="sbjax_glu_quantize",
    grid=triton.cdiv(shape[0], config.rows),
    out=(
      *((_struct(shape, dtype), UNUSED) if spec is None else quantized_rows(shape, spec)),
      *quantized_rows(shape, keep),
      *quantized_rows(shape, keep),
    ),
    num_warps=config.warps,
    **row_constants(*shape, config),
    VIA_FLOAT16=compute_capability() < 90,
    **dict(LIMIT=limit_of(spec), KEEP_LIMIT=limit_of(keep), ACTIVATION=activation),
  )
  g = g if spec is None else Quantized(g, g_scale, spec)
  if keep is None:
    return g, (gate, up)
  return g, (Quantized(*kept[:2], keep), Quantized(*kept[2:], keep))


def glu_backward(
  gate: jax.Array | Quantized,
  up: jax.Array | Quantized,
  dg: jax.Array,
  spec: Spec | None,
  *,
  activation: str = "silu",
  folds: tuple[jax.Array | None, jax.Array | None] = (None, None),
  config: Config | None = None,
) -> tuple[tuple[jax.Array, jax.Array], tuple[Quantized, Quantized] | None, jax.Array]:
  """`sbjax.ops.rows.glu_backward`, with the error of `active_and_slope`."""
  if dg.size == 0:
    return fused_ops.glu_backward(gate, up, dg, spec, activation=activation, folds=folds)
  config = backward_config(dg.shape[1], dg.dtype.itemsize) if config is None else config
  unread = jnp.zeros((1, 1), jnp.float32)
  is_kept = isinstance(gate, Quantized)
  hs = [(h.values, h.scale) if isinstance(h, Quantized) else (h, unread) for h in (gate, up)]
  row, quantized = _struct(dg.shape, dg.dtype), quantized_rows(dg.shape, spec)
  d_gate, d_up, g, *values = triton_call(
    *(*hs[0], *hs[1], dg, *(unread if fold is None else fold for fold in folds)),
    kernel=_glu_backward_kernel,
    name="sbjax_glu_backward",
    grid=triton.cdiv(len(dg), config.rows),
    out=(row, row, row, *quantized, *quantized),
    in_place={4: 2} if is_kept or hs[0][0].dtype != dg.dtype else {0: 0, 2: 1, 4: 2},
    num_warps=config.warps,
    **row_constants(*dg.shape, config),
    VIA_FLOAT16=compute_capability() < 90,
    **dict(LIMIT=limit_of(spec), DEQUANTIZE=is_kept, ACTIVATION=activation),
    **dict(FOLD_GATE=folds[0] is not None, FOLD_UP=folds[1] is not None),
  )
  if spec is None:
    return (d_gate, d_up), None, g
  return (d_gate, d_up), (Quantized(*values[:2], spec), Quantized(*values[2:], spec)), g


@triton.jit
def _load_float32(
  x_ptr,
  scale_ptr,
  row,
  M: tl.constexpr,
  RAGGED,
  K: tl.constexpr,
  PIECES: tl.constexpr,
  VECTOR: tl.constexpr,
  DEQUANTIZE: tl.constexpr,
):
  """A row of x in float32, times its scale if x is quantized."""
  xs = to_float32(load_row(x_ptr, row, M, RAGGED, K, PIECES, VECTOR))
  if DEQUANTIZE:
    scale, ys = tl.load(scale_ptr + row, mask=row < M, other=0.0), ()
    for i in tl.static_range(len(PIECES)):
      ys += (xs[i] * scale,)
    xs = ys
  return xs


@triton.jit
def _glu_kernel(
  gate_ptr,
  up_ptr,
  g_ptr,
  g_scale_ptr,
  gate_kept_ptr,
  gate_scale_ptr,
  up_kept_ptr,
  up_scale_ptr,
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
  """Makes g [ROWS, K]; with LIMIT g is quantized, with KEEP_LIMIT gate and up are, as kept."""
  RAGGED: tl.constexpr = M % ROWS != 0
  for r in tl.static_range(ROWS):
    row = tl.program_id(0) * ROWS + r
    gates = to_float32(load_row(gate_ptr, row, M, RAGGED, K, PIECES, VECTOR))
    ups = to_float32(load_row(up_ptr, row, M, RAGGED, K, PIECES, VECTOR))
    if KEEP_LIMIT is not None:
      quantize_row(
        *(gate_kept_ptr, gate_scale_ptr, gates, row, M, RAGGED),
        *(K, PIECES, VECTOR, THREADS, KEEP_LIMIT, VIA_FLOAT16),
      )
      quantize_row(
        *(up_kept_ptr, up_scale_ptr, ups, row, M, RAGGED),
        *(K, PIECES, VECTOR, THREADS, KEEP_LIMIT, VIA_FLOAT16),
      )
    gs = ()
    for i in tl.static_range(len(PIECES)):
      gs += (active(gates[i], ACTIVATION) * ups[i],)
    if LIMIT is not None:
      quantize_row(
        g_ptr, g_scale_ptr, gs, row, M, RAGGED, K, PIECES, VECTOR, THREADS, LIMIT, VIA_FLOAT16
      )
    else:
      store_row(g_ptr, gs, row, M, RAGGED, K, PIECES, VECTOR)


@triton.jit
def _glu_backward_kernel(
  gate_ptr,
  gate_scale_ptr,
  up_ptr,
  up_scale_ptr,
  dg_ptr,
  gate_fold_ptr,
  up_fold_ptr,
  d_gate_ptr,
  d_up_ptr,
  g_ptr,
  gate_values_ptr,
  d_gate_scale_ptr,
  up_values_ptr,
  d_up_scale_ptr,
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
  FOLD_GATE: tl.constexpr,
  FOLD_UP: tl.constexpr,
):
  """Makes d_gate, d_up and g [ROWS, K], with LIMIT also the first two quantized."""
  if d_gate_ptr is None:
    d_gate_ptr = gate_ptr
  if d_up_ptr is None:
    d_up_ptr = up_ptr
  if g_ptr is None:
    g_ptr = dg_ptr
  RAGGED: tl.constexpr = M % ROWS != 0
  for r in tl.static_range(ROWS):
    row = tl.program_id(0) * ROWS + r
    gates = _load_float32(gate_ptr, gate_scale_ptr, row, M, RAGGED, K, PIECES, VECTOR, DEQUANTIZE)
    ups = _load_float32(up_ptr, up_scale_ptr, row, M, RAGGED, K, PIECES, VECTOR, DEQUANTIZE)
    dgs = to_float32(load_row(dg_ptr, row, M, RAGGED, K, PIECES, VECTOR))
    tl.debug_barrier()  # All threads have read what the results overwrite.
    gs, d_gates, d_ups = (), (), ()
    for i in tl.static_range(len(PIECES)):
      one, slope = active_and_slope(gates[i], ACTIVATION)
      gs += (one * ups[i],)
      d_gates += (dgs[i] * ups[i] * slope,)
      d_ups += (dgs[i] * one,)
    store_row(g_ptr, gs, row, M, RAGGED, K, PIECES, VECTOR)
    store_row(d_gate_ptr, d_gates, row, M, RAGGED, K, PIECES, VECTOR)
    store_row(d_up_ptr, d_ups, row, M, RAGGED, K, PIECES, VECTOR)
    if FOLD_GATE:
      d_gates = folded_row(d_gates, gate_fold_ptr, K, PIECES, VECTOR)
    if FOLD_UP:
      d_ups = folded_row(d_ups, up_fold_ptr, K, PIECES, VECTOR)
    if LIMIT is not None:
      quantize_row(
        *(gate_values_ptr, d_gate_scale_ptr, d_gates, row, M, RAGGED),
        *(K, PIECES, VECTOR, THREADS, LIMIT, VIA_FLOAT16),
      )
      quantize_row(
        *(up_values_ptr, d_up_scale_ptr, d_ups, row, M, RAGGED),
        *(K, PIECES, VECTOR, THREADS, LIMIT, VIA_FLOAT16),
      )
