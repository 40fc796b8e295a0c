"""Layer norm, RMS norm and their gradients: `sbjax.ops.rows` with one read of each row.

A program loops over neighbouring rows and loads the next row while it computes one. Column vectors
stay in its registers: forward, the norm's parameters; backward, their gradients summed over its
rows. It stores these sums once, and XLA adds those of all programs.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from sbjax.ops import rows as fused_ops
from sbjax.ops.rows import NORM_EPSILON, LayerNormParams, Norm, RMSNormParams
from sbjax.pallas.triton.call import compute_capability, triton_call
from sbjax.pallas.triton.rounding import (
  UNUSED,
  Config,
  load_row,
  quantize_row,
  row_constants,
  row_sum,
  row_sums,
  store_row,
  to_float32,
  unsupported_rows,
  zero_row,
)
from sbjax.quantize import FORMATS, INT8, Quantized, Spec

_struct = jax.ShapeDtypeStruct


def forward_config(m: int, k: int, itemsize: int) -> Config:
  """About 40 elements of a row a thread; the parameters are loaded once for 16 rows."""
  return Config(
    rows=min(16, triton.next_power_of_2(triton.cdiv(m, 4096))),
    warps=triton.next_power_of_2(triton.cdiv(k * itemsize, 2560)),
    vector=16 // itemsize,
  )


def backward_config(m: int, k: int, itemsize: int) -> Config:
  """About 12 elements of a row a thread; a sum for each 64 rows is 2.5 % of the bytes."""
  return Config(
    rows=min(64, triton.next_power_of_2(triton.cdiv(m, 512))),
    warps=min(16, triton.next_power_of_2(triton.cdiv(k * itemsize, 832))),
    vector=16 // itemsize,
  )


unsupported = unsupported_rows  # Of the kernels of either pass.


def norm_quantize(
  x: jax.Array,
  norm: Norm,
  spec: Spec | None,
  *,
  epsilon: float = NORM_EPSILON,
  config: Config | None = None,
) -> Quantized | jax.Array:
  """`sbjax.ops.rows.norm_quantize`, but for the rounding of sums over a row."""
  if x.size == 0:
    return fused_ops.norm_quantize(x, norm, spec, epsilon=epsilon)
  m, k = x.shape
  config = forward_config(m, k, x.dtype.itemsize) if config is None else config
  out, scale = triton_call(
    x,
    *_vectors(norm),
    kernel=_norm_kernel,
    name="sbjax_norm_quantize",
    grid=triton.cdiv(m, config.rows),
    out=(
      _struct(x.shape, x.dtype if spec is None else spec.dtype),
      _struct((1, 1) if spec is None else (m, 1), jnp.float32),
    ),
    num_warps=config.warps,
    **row_constants(m, k, config),
    EPSILON=epsilon,
    RMS=isinstance(norm, RMSNormParams),
    QUANTIZED=spec is not None,
    LIMIT=FORMATS[INT8 if spec is None else spec.dtype].max,
    VIA_FLOAT16=compute_capability() < 90,
  )
  return out if spec is None else Quantized(out, scale, spec)


def norm_backward(
  x: jax.Array,
  norm: Norm,
  dn: jax.Array,
  dx: jax.Array | None,
  *,
  epsilon: float = NORM_EPSILON,
  config: Config | None = None,
) -> tuple[jax.Array, Norm, jax.Array]:
  """`sbjax.ops.rows.norm_backward`, but for the rounding of sums."""
  if x.size == 0:
    return fused_ops.norm_backward(x, norm, dn, dx, epsilon=epsilon)
  m, k = x.shape
  config = backward_config(m, k, x.dtype.itemsize) if config is None else config
  is_rms = isinstance(norm, RMSNormParams)
  sums = _struct((triton.cdiv(m, config.rows), k), jnp.float32)
  total, n, d_scale, d_bias = triton_call(
    x,
    *_vectors(norm),
    dn,
    norm.scale if dx is None else dx,  # The kernel does not read it if dx is None.
    kernel=_norm_backward_kernel,
    name="sbjax_norm_backward",
    grid=sums.shape[0],
    out=(_struct(x.shape, x.dtype), _struct(x.shape, x.dtype), sums, UNUSED if is_rms else sums),
    in_place={0: 1, 3: 0} if dn.dtype == x.dtype else {0: 1},
    num_warps=config.warps,
    **row_constants(m, k, config),
    EPSILON=epsilon,
    RMS=is_rms,
    ADD=dx is not None,
  )
  d_norm = RMSNormParams(jnp.sum(d_scale, axis=0))
  if not is_rms:
    d_norm = LayerNormParams(d_norm.scale, jnp.sum(d_bias, axis=0))
  return total, d_norm, n


def _vectors(norm: Norm) -> tuple[jax.Array, jax.Array]:
  """The scale and the bias; the kernels of an RMS norm do not read the second."""
  scale = norm.scale.astype(jnp.float32)
  return scale, scale if isinstance(norm, RMSNormParams) else norm.bias.astype(jnp.float32)


@triton.jit
def _standardize(
  xs,
  K: tl.constexpr,
  PIECES: tl.constexpr,
  THREADS: tl.constexpr,
  EPSILON: tl.constexpr,
  RMS: tl.constexpr,
):
  """(x - mean) / deviation of a row, and 1 / deviation; RMS: x / root mean square, and 1 / that."""
  mean = 0.0 if RMS else row_sum(xs, THREADS) * (1.0 / K)
  centred, squares = (), ()
  for i in tl.static_range(len(PIECES)):
    c = xs[i] - mean
    centred += (c,)
    squares += (c * c,)
  inverse = tl.rsqrt(row_sum(squares, THREADS) * (1.0 / K) + EPSILON)
  standard = ()
  for i in tl.static_range(len(PIECES)):
    standard += (centred[i] * inverse,)
  return standard, inverse


@triton.jit
def _affine(standard, gains, biases, i: tl.constexpr, RMS: tl.constexpr):
  """Piece i of the norm."""
  return standard * gains[i] if RMS else tl.fma(standard, gains[i], biases[i])


@triton.jit
def _norm_kernel(
  x_ptr,
  gain_ptr,
  bias_ptr,
  out_ptr,
  scale_ptr,
  M: tl.constexpr,
  K: tl.constexpr,
  ROWS: tl.constexpr,
  PIECES: tl.constexpr,
  VECTOR: tl.constexpr,
  THREADS: tl.constexpr,
  EPSILON: tl.constexpr,
  RMS: tl.constexpr,
  QUANTIZED: tl.constexpr,
  LIMIT: tl.constexpr,
  VIA_FLOAT16: tl.constexpr,
):
  """Makes out [ROWS, K] and, if it is quantized, scale [ROWS, 1]."""
  first = tl.program_id(0) * ROWS
  RAGGED: tl.constexpr = M % ROWS != 0
  end = tl.minimum(first + ROWS, M) if RAGGED else first + ROWS
  gains = load_row(gain_ptr, 0, 1, False, K, PIECES, VECTOR)
  biases = () if RMS else load_row(bias_ptr, 0, 1, False, K, PIECES, VECTOR)
  ahead = load_row(x_ptr, first, end, RAGGED, K, PIECES, VECTOR)
  for r in range(ROWS):
    row = first + r
    xs = to_float32(ahead)
    ahead = load_row(x_ptr, row + 1, end, True, K, PIECES, VECTOR)
    standard, _ = _standardize(xs, K, PIECES, THREADS, EPSILON, RMS)
    ys = ()
    for i in tl.static_range(len(PIECES)):
      ys += (_affine(standard[i], gains, biases, i, RMS),)
    if QUANTIZED:
      quantize_row(
        out_ptr, scale_ptr, ys, row, M, RAGGED, K, PIECES, VECTOR, THREADS, LIMIT, VIA_FLOAT16
      )
    else:
      store_row(out_ptr, ys, row, M, RAGGED, K, PIECES, VECTOR)


@triton.jit
def _norm_backward_kernel(
  x_ptr,
  gain_ptr,
  bias_ptr,
  dn_ptr,
  dx_ptr,
  total_ptr,
  n_ptr,
  d_gain_ptr,
  d_bias_ptr,
  M: tl.constexpr,
  K: tl.constexpr,
  ROWS: tl.constexpr,
  PIECES: tl.constexpr,
  VECTOR: tl.constexpr,
  THREADS: tl.constexpr,
  EPSILON: tl.constexpr,
  RMS: tl.constexpr,
  ADD: tl.constexpr,
):
  """Makes total and n [ROWS, K] in place of dn and x; d_gain and d_bias [1, K], sums over ROWS."""
  if total_ptr is None:
    total_ptr = dn_ptr
  if n_ptr is None:
    n_ptr = x_ptr
  first = tl.program_id(0) * ROWS
  RAGGED: tl.constexpr = M % ROWS != 0
  end = tl.minimum(first + ROWS, M) if RAGGED else first + ROWS
  d_gains, d_biases = zero_row(PIECES), zero_row(PIECES)
  ahead = load_row(x_ptr, first, end, RAGGED, K, PIECES, VECTOR)
  for r in range(ROWS):
    row = first + r
    xs = to_float32(ahead)
    dns = to_float32(load_row(dn_ptr, row, M, RAGGED, K, PIECES, VECTOR))
    dxs = load_row(dx_ptr, row, M, RAGGED, K, PIECES, VECTOR) if ADD else ()
    ahead = load_row(x_ptr, row + 1, end, True, K, PIECES, VECTOR)
    tl.debug_barrier()  # All threads have read dn and x, which total and n overwrite.
    standard, inverse = _standardize(xs, K, PIECES, THREADS, EPSILON, RMS)
    # Loaded for each row, from the L1 cache: no registers are left to keep them.
    gains = load_row(gain_ptr, 0, 1, False, K, PIECES, VECTOR)
    biases = () if RMS else load_row(bias_ptr, 0, 1, False, K, PIECES, VECTOR)
    ns, gradients, products, d_gains_next, d_biases_next = (), (), (), (), ()
    for i in tl.static_range(len(PIECES)):
      ns += (_affine(standard[i], gains, biases, i, RMS),)
      gradients += (dns[i] * gains[i],)
      products += (gradients[i] * standard[i],)
      d_gains_next += (tl.fma(dns[i], standard[i], d_gains[i]),)
      d_biases_next += (d_biases[i] + dns[i],)
    d_gains, d_biases = d_gains_next, d_biases_next
    store_row(n_ptr, ns, row, M, RAGGED, K, PIECES, VECTOR)
    if RMS:
      mean, along = 0.0, row_sum(products, THREADS) * (1.0 / K)
    else:
      sums = row_sums(gradients, products, THREADS)
      mean, along = sums[0] * (1.0 / K), sums[1] * (1.0 / K)
    totals = ()
    for i in tl.static_range(len(PIECES)):
      total = tl.fma(standard[i], -along, gradients[i] - mean) * inverse
      totals += (total + dxs[i].to(tl.float32) if ADD else total,)
    store_row(total_ptr, totals, row, M, RAGGED, K, PIECES, VECTOR)
  store_row(d_gain_ptr, d_gains, tl.program_id(0), M, False, K, PIECES, VECTOR)
  if not RMS:
    store_row(d_bias_ptr, d_biases, tl.program_id(0), M, False, K, PIECES, VECTOR)
