"""scaled_matmul on Ampere, Ada and Hopper: Triton, 8-bit tensor cores, scales in the epilogue."""

import dataclasses
import functools

import jax
import triton
import triton.language as tl

from sbjax.ops.device import slow_int8, target
from sbjax.ops.matmul import check_operands, check_residual, empty_product
from sbjax.pallas import tuning
from sbjax.pallas.limits import unsupported_matmul
from sbjax.pallas.triton.call import compute_capability, triton_call
from sbjax.quantize import Quantized, format_of

NAME = "scaled_matmul_triton"


@dataclasses.dataclass(frozen=True)
class TileConfig:
  """The shape of an output block, how it is computed, and the order of the blocks.

  block_m, block_n: the shape of an output block.
  block_k: the width of an operand slice; at least 32, the K of a tensor core's instruction. With 16
    another Triton kernel gave twice the sum.
  num_warps: the warps that share a block.
  num_stages: how many slices are loaded ahead.
  group_m: blocks are visited so many along M at a time, so that concurrent ones share operands in
    L2.
  """

  block_m: int = 128
  block_n: int = 128
  block_k: int = 128
  num_warps: int = 8
  num_stages: int = 3
  group_m: int = 8

  def __post_init__(self):
    for field, least, most in (
      ("block_m", 16, 256),
      ("block_n", 16, 256),
      ("block_k", 32, 256),
      ("num_warps", 1, 16),
    ):
      value = getattr(self, field)
      if not least <= value <= most or value & (value - 1):
        raise ValueError(f"{field}={value} must be a power of two from {least} to {most}.")
    for field, most in (("num_stages", 8), ("group_m", 1024)):
      if not 1 <= (value := getattr(self, field)) <= most:
        raise ValueError(f"{field}={value} must be from 1 to {most}.")


def config_for(m: int, n: int, k: int, device_kind: str, has_residual: bool = False) -> TileConfig:
  """The tuned config for (device_kind, n, k) and about m rows; the rule's if there is none.

  Tables are tuned without a residual. On sm_90 their blocks leave no registers for one.
  """
  capability = compute_capability()
  if not (capability == 90 and has_residual):
    tables = (tuning.user_table(NAME, TileConfig), _shipped())
    devices = (device_kind, f"sm_{capability}")
    if row := tuning.row_for(tables, m, n, k, devices, TileConfig):
      return TileConfig(**row["config"])
  return by_rule(m, n, capability, has_residual)


def by_rule(m: int, n: int, capability: int, has_residual: bool = False) -> TileConfig:
  """The largest blocks that fit into shared memory, if there is at least one for each SM."""
  if m <= 64:
    return TileConfig(block_m=64, block_n=64, num_stages=4, num_warps=4)
  if capability == 90 and has_residual:  # A residual does not fit into registers beside more sums.
    large, num_sms = TileConfig(num_stages=4), 132
  elif capability in (80, 90):
    large, num_sms = TileConfig(block_m=128, block_n=256, num_stages=4), 108
  else:
    large, num_sms = TileConfig(block_n=128, block_k=64, num_stages=4, num_warps=4), 128
  if triton.cdiv(m, large.block_m) * triton.cdiv(n, large.block_n) >= num_sms:
    return large
  return TileConfig(block_m=64, block_n=128, block_k=64, num_stages=4, num_warps=4)


@functools.cache
def _shipped() -> list[dict]:
  return tuning.shipped_table(__file__)


def tile_configs() -> set[TileConfig]:
  """Every tile config of the table that the kernel ships with."""
  return {TileConfig(**row["config"]) for row in _shipped()}


def unsupported(device, lhs, rhs, out_dtype, **options) -> str | None:
  """Why the kernel does not take these, or None."""
  del options
  # For Blackwell, triton 3.6 and 3.7 write tcgen05.mma for fp8, and Ampere's mma.sync for int8.
  if lhs.spec.format.is_exact and (lacking := slow_int8(device)):
    return f"takes no int8 on a chip with {lacking}"
  return unsupported_matmul(rhs, out_dtype)


def scaled_matmul(
  lhs: Quantized,
  rhs: Quantized,
  out_dtype,
  *,
  bias: jax.Array | None = None,
  residual: jax.Array | None = None,
  config: TileConfig | None = None,
) -> jax.Array:
  """`sbjax.ops.matmul.scaled_matmul`, bit for bit in int8; K and N must be multiples of 16.

  Raises:
    ValueError: as the definition.
  """
  check_residual(residual, (len(lhs.values), len(rhs.values)), out_dtype)
  scales = (lhs.scale, rhs.scale)
  return _matmul(lhs.values, rhs.values, scales, bias, residual, out_dtype, config)


def accumulate(lhs: jax.Array, rhs: jax.Array, *, config: TileConfig | None = None) -> jax.Array:
  """`lhs @ rhs.T` [M, N] without scales, in int32 or float32: partial sums of a sharded K."""
  return _matmul(lhs, rhs, None, None, None, format_of(lhs.dtype).accumulator, config)


def _matmul(lhs, rhs, scales, bias, residual, out_dtype, config):
  check_operands(lhs, rhs)
  (m, k), (n, _) = lhs.shape, rhs.shape
  if m == 0 or n == 0 or k == 0:
    return empty_product((m, n), out_dtype, bias, residual)
  config = config or config_for(m, n, k, target().device_kind, residual is not None)
  # The kernel does not read a scale, bias or residual that is None: any pointer will do.
  lhs_scale, rhs_scale = (lhs, rhs) if scales is None else scales
  return triton_call(
    lhs,
    rhs,
    lhs_scale,
    rhs_scale,
    rhs_scale if bias is None else bias,
    rhs_scale if residual is None else residual,
    kernel=_scaled_matmul_kernel,
    name="sbjax_accumulate" if scales is None else "sbjax_scaled_matmul",
    grid=triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n),
    out=jax.ShapeDtypeStruct((m, n), out_dtype),
    num_warps=config.num_warps,
    num_stages=config.num_stages,
    M=m,
    N=n,
    K=k,
    LHS_SCALES=lhs_scale.shape[0],
    RHS_SCALES=rhs_scale.shape[0],
    SCALED=scales is not None,
    HAS_BIAS=bias is not None,
    HAS_RESIDUAL=residual is not None,
    BLOCK_M=config.block_m,
    BLOCK_N=config.block_n,
    BLOCK_K=config.block_k,
    GROUP=config.group_m,
  )


@triton.jit
def _scaled_matmul_kernel(
  lhs_ptr,
  rhs_ptr,
  lhs_scale_ptr,
  rhs_scale_ptr,
  bias_ptr,
  residual_ptr,
  out_ptr,
  M: tl.constexpr,
  N: tl.constexpr,
  K: tl.constexpr,
  LHS_SCALES: tl.constexpr,
  RHS_SCALES: tl.constexpr,
  SCALED: tl.constexpr,
  HAS_BIAS: tl.constexpr,
  HAS_RESIDUAL: tl.constexpr,
  BLOCK_M: tl.constexpr,
  BLOCK_N: tl.constexpr,
  BLOCK_K: tl.constexpr,
  GROUP: tl.constexpr,
):
  """Makes out [BLOCK_M, BLOCK_N] from lhs [BLOCK_M, K] and rhs [BLOCK_N, K]."""
  m_blocks: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
  n_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
  group, in_group = tl.program_id(0) // (GROUP * n_blocks), tl.program_id(0) % (GROUP * n_blocks)
  group_rows = tl.minimum(m_blocks - group * GROUP, GROUP)
  row_block, column_block = group * GROUP + in_group % group_rows, in_group // group_rows
  row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
  column = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
  # Rows beyond the last read the last one again; their results are not stored.
  safe_row, safe_column = tl.minimum(row, M - 1), tl.minimum(column, N - 1)

  along_k = tl.arange(0, BLOCK_K)
  lhs_ptrs = lhs_ptr + safe_row.to(tl.int64)[:, None] * K + along_k[None, :]
  rhs_ptrs = rhs_ptr + safe_column.to(tl.int64)[None, :] * K + along_k[:, None]
  accumulator: tl.constexpr = tl.int32 if lhs_ptr.dtype.element_ty == tl.int8 else tl.float32
  total = tl.full((BLOCK_M, BLOCK_N), 0, accumulator)
  for start in range(0, K, BLOCK_K):
    if K % BLOCK_K == 0:
      lhs = tl.load(lhs_ptrs + start)
      rhs = tl.load(rhs_ptrs + start)
    else:
      in_k = along_k < K - start
      lhs = tl.load(lhs_ptrs + start, mask=in_k[None, :], other=0.0)
      rhs = tl.load(rhs_ptrs + start, mask=in_k[:, None], other=0.0)
    total = tl.dot(lhs, rhs, total, out_dtype=accumulator)

  if SCALED:
    lhs_scale = tl.load(lhs_scale_ptr + (safe_row if LHS_SCALES > 1 else safe_row * 0))
    rhs_scale = tl.load(rhs_scale_ptr + (safe_column if RHS_SCALES > 1 else safe_column * 0))
    total = total.to(tl.float32) * (lhs_scale[:, None] * rhs_scale[None, :])
  if HAS_BIAS:
    total = total + tl.load(bias_ptr + safe_column).to(tl.float32)[None, :]
  # Offsets within the block have 32 bits; 64-bit offsets into the output would take registers.
  first = (row_block * BLOCK_M).to(tl.int64) * N + column_block * BLOCK_N
  offset = tl.arange(0, BLOCK_M)[:, None] * N + tl.arange(0, BLOCK_N)[None, :]
  mask = (row < M)[:, None] & (column < N)[None, :]
  if HAS_RESIDUAL:
    total = total + tl.load(residual_ptr + first + offset, mask=mask, other=0.0).to(tl.float32)
  tl.store(out_ptr + first + offset, total.to(out_ptr.dtype.element_ty), mask=mask)
