"""scaled_matmul on Hopper (H100, H200): Pallas Mosaic GPU, 8-bit wgmma, the scales in the epilogue.

One block of threads a multiprocessor works through the output, block after block. A memory
warpgroup keeps `stages` slices of both operands on their way (TMA); two compute warpgroups multiply
them. These take whole blocks of the output in turns: while one scales, casts and stores its own,
the other multiplies, and the tensor cores need not wait for a block to end. Or they share each
block, a half for either, where that is faster: with few blocks, and at some sizes with many.

What bounds it on an H200 is what the tensor cores do at the clock that the power limit leaves, as
long as they need not wait: neither for the end of a block, nor for shared memory. At full rate
wgmma reads 64 + 4096 / n bytes a clock of it for n columns, and the loads write 4096 / block_m +
4096 / block_n, of 128 that there are. So blocks are as large as the accumulators' registers allow,
unless there are too few of them for the multiprocessors: a product of some hundred rows takes up to
a third less time in blocks half as large. (benchmarks/matmul.py has the times.)
"""

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from sbjax.device import num_sms, target
from sbjax.formats import accumulator_dtype
from sbjax.matmul import check_operands, check_residual, nothing
from sbjax.pallas import tuning
from sbjax.pallas.epilogue_sm90 import Pieces, scaling_of
from sbjax.pallas.tuning import MANY_ROWS
from sbjax.quantize import Quantized

_COMPUTE_WARPGROUPS = 2
_MEMORY_REGISTERS, _COMPUTE_REGISTERS = 24, 240  # A thread's; 128 * (24 + 2 * 240) <= 65,536.
_EPILOGUE_ROWS, _EPILOGUE_BYTES = 64, 128  # What is stored at a time: 128 bytes of 64 rows.


@dataclasses.dataclass(frozen=True)
class Config:
  """How the output is cut into blocks, and in which order they are taken.

  block_m, block_n: an output block; split: the side that the two compute warpgroups halve; None if
    they take whole blocks in turns.
  block_k, stages: the slices of the operands, and how many are loaded ahead.
  cluster: two blocks that lie next to each other along this side share the other operand's loads;
    None for no sharing.
  minor, width: blocks are taken in a snake, `width` of them along the `minor` side at a time.
  """

  block_m: int = 256
  block_n: int = 128
  split: Literal["m", "n"] | None = "m"
  block_k: int = 128
  stages: int = 4
  cluster: Literal["m", "n"] | None = "n"
  minor: Literal["m", "n"] = "n"
  width: int = 16

  def __post_init__(self):
    part_m, part_n = self.warpgroup
    if part_m % 64 or part_n % 32 or part_n > 256 or part_m * part_n > 128 * 192:
      raise ValueError(
        f"block_m={self.block_m}, block_n={self.block_n} give a warpgroup {part_m} x {part_n}; it"
        " takes 64s of rows and 32s of up to 256 columns, 24,576 elements at most."
      )
    if self.block_k % 32 or self.stages < 2:
      raise ValueError(
        f"block_k={self.block_k} must be a multiple of 32, stages={self.stages} > 1."
      )

  @property
  def warpgroup(self) -> tuple[int, int]:
    """The part of a block that one warpgroup computes."""
    return self.block_m // (1 + (self.split == "m")), self.block_n // (1 + (self.split == "n"))

  @property
  def clustered(self) -> tuple[int, int]:
    """How many blocks of a cluster lie along m and along n."""
    return 1 + (self.cluster == "m"), 1 + (self.cluster == "n")


# What the rule chooses from: a shape whose blocks are few wants small ones, and shared.
IN_TURNS = Config(block_m=128, block_n=192, split=None, cluster="m", minor="m", width=8)
TALL_IN_TURNS = Config(block_m=192, block_n=128, split=None, minor="m", width=8)
WIDE = Config(block_m=128, block_n=256, cluster="m")
SMALL = Config(block_m=128, block_n=128, stages=6, cluster=None)
NARROW = Config(block_m=128, block_n=64, stages=8, cluster=None)


def config_for(m: int, n: int, k: int, chip: str, multiprocessors: int) -> Config:
  """The one that was fastest where (chip, n, k) was tuned for about m rows; else a rule."""
  if tuned := _tuned_for(m, n, k, chip):
    return Config(**tuned["config"])
  return by_rule(m, n, k, multiprocessors)


def by_rule(m: int, n: int, k: int, multiprocessors: int) -> Config:
  """The one that a model of the chip finds fastest, for a shape that is not in the table."""
  candidates = [WIDE, Config(), SMALL, NARROW]
  # At few rows it was not measured. Of other N a store's pieces are narrower, and there are fewer
  # registers than these blocks would take.
  if m >= MANY_ROWS and n % 64 == 0:
    candidates += [IN_TURNS, TALL_IN_TURNS]
  return min(candidates, key=lambda c: _clocks(c, m, n, k, multiprocessors))


def _tuned_for(m: int, n: int, k: int, chip: str) -> dict | None:
  """The row for (chip, n, k) that holds for m, of the user's table or else of ours."""
  tables = (tuning.user_table("scaled_matmul_sm90", Config), _tuned())
  return tuning.row_for(tables, m, n, k, (chip, "sm_90"), Config)


def _clocks(config: Config, m: int, n: int, k: int, multiprocessors: int) -> float:
  """About how long it takes: what shared memory allows for the products, and the end of a block.

  That is 2,500 for two warpgroups, and 6,000 for one, beside the products of the other. Shared
  memory was not seen to hold these back.
  """
  block_m, block_n, (cluster_m, cluster_n) = config.block_m, config.block_n, config.clustered
  blocks = pl.cdiv(m, block_m * cluster_m) * pl.cdiv(n, block_n * cluster_n) * cluster_m * cluster_n
  bytes_a_clock = 64 + 4096 * (1 / config.warpgroup[1] + 1 / block_m + 1 / block_n)
  products = pl.cdiv(k, config.block_k) * config.block_k * block_m * block_n / 4096
  in_a_row = pl.cdiv(blocks, multiprocessors)
  if config.split is None:
    return in_a_row * max(products, (products + 6000) / 2) + 6000
  return in_a_row * (products * max(1, bytes_a_clock / 128) + 2500)


def tuned_configs() -> set[Config]:
  """Every cut that the table has."""
  return {Config(**row["config"]) for row in _tuned()}


@functools.cache
def _tuned() -> list[dict]:
  """The `config` that `python -m benchmarks.tune` found fastest for each chip, m, n and k."""
  return tuning.shipped_table("scaled_matmul_sm90")


def scaled_matmul(
  lhs: Quantized,
  rhs: Quantized,
  out_dtype,
  *,
  bias: jax.Array | None = None,
  residual: jax.Array | None = None,
  config: Config | None = None,
  multiprocessors: int | None = None,
  interpret=False,
) -> jax.Array:
  """`sbjax.matmul.scaled_matmul`, bit for bit in int8, for any M, and K and N in sixteens.

  fp8 products are summed by the tensor core, which keeps fewer bits than float32.

  Args:
    config: None looks it up.
    multiprocessors: how many blocks of threads run; None for as many as the chip has.
    interpret: False, or plgpu.InterpretGPUParams for a run on the CPU.

  Raises:
    ValueError: as the definition.
    NotImplementedError: other K and N, or another out_dtype.
  """
  check_residual(residual, (len(lhs.values), len(rhs.values)), out_dtype)
  scales = [lhs.scale[:, 0], rhs.scale[:, 0]]
  if bias is not None:
    scales.append(bias.astype(jnp.float32))
  run = (config, multiprocessors, interpret)
  return _matmul(lhs.values, rhs.values, scales, residual, out_dtype, *run)


def accumulate(
  lhs: jax.Array, rhs: jax.Array, *, config=None, multiprocessors=None, interpret=False
) -> jax.Array:
  """The sums alone, `lhs @ rhs.T` [M, N] in int32 or float32: parts of a K cut over devices."""
  out_dtype = accumulator_dtype(lhs.dtype)
  return _matmul(lhs, rhs, [], None, out_dtype, config, multiprocessors, interpret)


def _matmul(lhs, rhs, scales, residual, out_dtype, config, multiprocessors, interpret):
  check_operands(lhs, rhs)
  (m, k), n, out_dtype = lhs.shape, rhs.shape[0], jnp.dtype(out_dtype)
  if k % 16 or n % 16:
    raise NotImplementedError(f"Mosaic takes K and N that are multiples of 16, not {k=}, {n=}.")
  if out_dtype.name not in ("bfloat16", "float16", "float32", "int32"):
    raise NotImplementedError(f"Mosaic gives bfloat16, float16 or float32, not {out_dtype.name}.")
  if 0 in (m, n, k):
    return nothing((m, n), out_dtype, scales[2] if len(scales) == 3 else None, residual)
  fitting = _fitting(m, n, k)
  if fitting != (m, n, k):
    m_fit, n_fit, k_fit = fitting
    lhs = jnp.pad(lhs, ((0, m_fit - m), (0, k_fit - k)))
    rhs = jnp.pad(rhs, ((0, n_fit - n), (0, k_fit - k)))
    if residual is not None:
      residual = jnp.pad(residual, ((0, m_fit - m), (0, n_fit - n)))
    y = _matmul(lhs, rhs, scales, residual, out_dtype, config, multiprocessors, interpret)
    return y[:m, :n]
  device = target()
  multiprocessors = multiprocessors or num_sms(device) or 132
  config = config or config_for(m, n, k, device.device_kind, multiprocessors)
  cluster_m, cluster_n = config.clustered
  step_m, step_n = config.block_m * cluster_m, config.block_n * cluster_n
  blocks = pl.cdiv(m, step_m) * pl.cdiv(n, step_n)
  # A load of 8-bit slices or a store may overhang the arrays; a load of scales may not.
  scales = [
    scale if scale.shape == (1,) else jnp.pad(scale, (0, pl.cdiv(size, step) * step - scale.size))
    for scale, size, step in zip(scales, (m, n, n), (step_m, step_n, step_n), strict=False)
  ]
  return plgpu.kernel(
    functools.partial(_kernel, config=config, adds=residual is not None),
    out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
    grid=(min(blocks, multiprocessors // (cluster_m * cluster_n)),),
    grid_names=("clusters",),
    cluster=(cluster_m * cluster_n,),
    cluster_names=("cluster",),
    num_threads=_COMPUTE_WARPGROUPS + 1,
    thread_name="warpgroup",
    kernel_name="sbjax_scaled_matmul" if scales else "sbjax_accumulate",
    interpret=interpret,
  )(lhs, rhs, *scales, *([] if residual is None else [residual]))


def _fitting(m: int, n: int, k: int) -> tuple[int, int, int]:
  """The next sizes that TMA can tile: others are filled up first, at the price of a copy.

  An output as high or as wide as what is stored at a time will not do either: Mosaic takes a slice
  of that size for the whole, wherever it begins, and would write what lies beyond over it.
  """
  m, k = m + -m % 8, k + -k % 32
  return 72 if m == _EPILOGUE_ROWS else m, {16: 48, 32: 48, 64: 80}.get(n, n), k


def _kernel(lhs, rhs, *refs, config: Config, adds: bool):
  """The whole output [M, N] from lhs [M, K], rhs [N, K] and, perhaps, scales, bias and residual."""
  *scales, out = refs
  residual = scales.pop() if adds else None
  (m, k), n = lhs.shape, rhs.shape[0]
  cluster_m, cluster_n = config.clustered
  grid = pl.cdiv(m, config.block_m * cluster_m), pl.cdiv(n, config.block_n * cluster_n)
  steps, stages = pl.cdiv(k, config.block_k), config.stages
  # A barrier knows only whether it was passed an odd or even number of times: who waits for it must
  # do so each time. So where warpgroups take turns each has its own for what was loaded.
  turns = _COMPUTE_WARPGROUPS if config.split is None else 1
  part_m, part_n = config.warpgroup
  # TMA takes tiles that divide the arrays.
  swizzle = math.gcd(k, 128)
  epilogue_n = math.gcd(n, part_n, _EPILOGUE_BYTES // out.dtype.itemsize)
  free_type = plgpu.Barrier
  if config.cluster:
    free_type = functools.partial(plgpu.ClusterBarrier, collective_axes=("cluster",))

  @functools.partial(
    pl.run_scoped,
    lhs_smem=_swizzled((stages, config.block_m, config.block_k), lhs.dtype, swizzle),
    rhs_smem=_swizzled((stages, config.block_n, config.block_k), rhs.dtype, swizzle),
    out_smem=_swizzled((_COMPUTE_WARPGROUPS, 2, _EPILOGUE_ROWS, epilogue_n), out.dtype),
    loaded=plgpu.Barrier(num_arrivals=2, num_barriers=stages * turns),
    free=free_type(num_arrivals=_COMPUTE_WARPGROUPS // turns, num_barriers=stages),
    fetched=plgpu.Barrier(num_barriers=_COMPUTE_WARPGROUPS * 2),
    collective_axes="warpgroup",
  )
  def _(lhs_smem, rhs_smem, out_smem, loaded, free, fetched):
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == _COMPUTE_WARPGROUPS)
    def _():
      plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")

      @_for_each_block(grid, config)
      def _(row, column, index):
        first, turn = index * steps, lax.rem(index, turns)

        @pl.loop(0, steps)
        def _(step):
          slot = lax.rem(first + step, stages)
          pl.when(first + step >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
          at_k = pl.ds(step * config.block_k, config.block_k)
          for gmem, rows, smem, shared in (
            (lhs, pl.ds(row, config.block_m), lhs_smem, config.cluster == "n"),
            (rhs, pl.ds(column, config.block_n), rhs_smem, config.cluster == "m"),
          ):
            plgpu.copy_gmem_to_smem(
              gmem.at[rows, at_k],
              smem.at[slot],
              loaded.at[turn * stages + slot],
              collective_axes="cluster" if shared else None,
            )

      # It may leave only when nobody will signal its barriers any more.
      total = _blocks_of_this_cluster(math.prod(grid)) * steps

      @pl.loop(lax.max(total - stages, 0), total)
      def _(step):
        plgpu.barrier_wait(free.at[lax.rem(step, stages)])

    @pl.when(warpgroup < _COMPUTE_WARPGROUPS)
    def _():
      plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
      part = warpgroup * part_m if config.split == "m" else 0
      part_column = warpgroup * part_n if config.split == "n" else 0

      def compute(row, column, index):
        first, turn = index * steps, lax.rem(index, turns)
        at = row + part, column + part_column
        scaled = scaling_of(scales, at, (part_m, part_n), out_smem.shape[-2:])
        pieces = Pieces(out, residual, at, (part_m, part_n), out_smem.at[warpgroup], fetched)

        def sums(acc):
          @pl.loop(0, steps)
          def _(step):
            slot = lax.rem(first + step, stages)
            plgpu.barrier_wait(loaded.at[turn * stages + slot])
            lhs_slice = lhs_smem.at[slot, pl.ds(part, part_m)]
            rhs_slice = rhs_smem.at[slot, pl.ds(part_column, part_n)]
            plgpu.wgmma(acc, lhs_slice, rhs_slice.transpose((1, 0)))
            if adds:
              pl.when(step == 0)(lambda: pieces.fetch(0))
            plgpu.wgmma_wait(1)  # The products before these are done with their slices.
            before = lax.rem(first + step + stages - 1, stages)
            pl.when(step > 0)(lambda: plgpu.barrier_arrive(free.at[before]))

          plgpu.wgmma_wait(0)
          plgpu.barrier_arrive(free.at[lax.rem(first + steps - 1, stages)])
          return acc[...]

        acc = plgpu.ACC((part_m, part_n), accumulator_dtype(lhs.dtype))  # pyright: ignore
        total = pl.run_scoped(sums, acc)
        pieces.store(total, scaled)

      @_for_each_block(grid, config)
      def _(row, column, index):
        is_mine = config.split is not None or lax.rem(index, turns) == warpgroup
        pl.when(is_mine)(lambda: compute(row, column, index))

      plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _swizzled(shape, dtype, swizzle: int = 128):
  """Shared memory in the layout that wgmma and TMA take without bank conflicts."""
  itemsize = jnp.dtype(dtype).itemsize
  swizzle = math.gcd(swizzle, shape[-1] * itemsize)
  tile = plgpu.TilingTransform((8, swizzle // itemsize))
  return plgpu.SMEM(shape, dtype, transforms=(tile, plgpu.SwizzleTransform(swizzle)))


def _for_each_block(grid, config):
  """Calls body(row, column, index): an output block's corner, and how many came before it here."""
  cluster_m, cluster_n = config.clustered
  in_cluster = lax.axis_index("cluster")

  def run(body):
    @plgpu.nd_loop((math.prod(grid),), collective_axes="clusters")
    def _(info):
      minor = 0 if config.minor == "m" else 1
      at_m, at_n = plgpu.planar_snake(info.index[0], grid, minor, config.width)
      at_m = at_m * cluster_m + (in_cluster if cluster_m == 2 else 0)
      at_n = at_n * cluster_n + (in_cluster if cluster_n == 2 else 0)
      body(at_m * config.block_m, at_n * config.block_n, info.local_index)

  return run


def _blocks_of_this_cluster(blocks: int):
  """How many times _for_each_block calls its body."""
  mine, clusters = lax.axis_index("clusters"), lax.axis_size("clusters")
  return blocks // clusters + (mine < blocks % clusters).astype(jnp.int32)
