"""scaled_matmul on Hopper (H100, H200): Pallas Mosaic GPU, 8-bit wgmma, scales in the epilogue.

The kernel is persistent: one thread block runs on each SM and computes output blocks one after
another. A memory warpgroup loads `stages` slices of both operands ahead (TMA). Two compute
warpgroups multiply them by one of CUTLASS's schedules:

- ping-pong: the warpgroups compute whole blocks in turn. One scales, casts and stores its block
  while the other multiplies, so the tensor cores do not wait for epilogues.
- cooperative: each warpgroup computes half of every block. This is faster if there are few blocks,
  and at some sizes with many.

On an H200 the limit is the rate of the tensor cores at the clock that the power limit leaves,
provided that shared memory keeps up. It moves 128 bytes a clock. At full rate a wgmma of n columns
reads 64 + 4096 / n of them, and the loads write 4096 / block_m + 4096 / block_n. So blocks are as
large as the accumulators' registers allow, unless they would be too few for the SMs: at a few
hundred rows, blocks half as large take up to a third less time. (benchmarks/matmul.py has the
times.)
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from sbjax.ops import device as devices
from sbjax.ops.matmul import check_operands, check_residual, empty_product
from sbjax.pallas import tuning
from sbjax.pallas.limits import unsupported_matmul
from sbjax.pallas.tuning import MANY_ROWS
from sbjax.quantize import Quantized, format_of

NAME = "scaled_matmul_sm90"  # In tables.

_COMPUTE_WARPGROUPS = 2
_MEMORY_REGISTERS, _COMPUTE_REGISTERS = 24, 240  # A thread's; 128 * (24 + 2 * 240) <= 65,536.
_EPILOGUE_ROWS, _EPILOGUE_BYTES = 64, 128  # An epilogue tile: 128 bytes of 64 rows.
_AXES = (0, 1, 1)  # The output axis that lhs' scales, rhs' scales and the bias belong to.
# Of a thread's 240 registers, those for sums and for vectors that are loaded ahead.
_REGISTERS = 160


@dataclasses.dataclass(frozen=True)
class TileConfig:
  """The shape of an output block, how it is computed, and the order of the blocks.

  block_m, block_n: the shape of an output block.
  schedule: "pingpong", or the side of a block that the two compute warpgroups halve.
  block_k, stages: the width of an operand slice, and how many slices are loaded ahead.
  cluster: pairs of blocks that are neighbours along this side share the loads of one operand; None
    for no sharing.
  raster_order, raster_width: blocks are visited along `raster_order` first, `raster_width` at a
    time, and in a snake along the other side.
  """

  block_m: int = 256
  block_n: int = 128
  schedule: Literal["pingpong", "cooperative_m", "cooperative_n"] = "cooperative_m"
  block_k: int = 128
  stages: int = 4
  cluster: Literal["m", "n"] | None = "n"
  raster_order: Literal["m", "n"] = "n"
  raster_width: int = 16

  def __post_init__(self):
    tile_m, tile_n = self.warpgroup_tile
    if tile_m % 64 or tile_n % 32 or tile_n > 256 or tile_m * tile_n > 128 * 192:
      raise ValueError(
        f"block_m={self.block_m}, block_n={self.block_n} give a warpgroup {tile_m} x {tile_n}; it"
        " takes 64s of rows and 32s of up to 256 columns, 24,576 elements at most."
      )
    if self.block_k % 32 or self.stages < 2:
      raise ValueError(
        f"block_k={self.block_k} must be a multiple of 32, stages={self.stages} > 1."
      )

  @property
  def warpgroup_tile(self) -> tuple[int, int]:
    """The part of a block that one warpgroup computes."""
    halves_m, halves_n = self.schedule == "cooperative_m", self.schedule == "cooperative_n"
    return self.block_m // (1 + halves_m), self.block_n // (1 + halves_n)

  @property
  def cluster_shape(self) -> tuple[int, int]:
    """How many blocks of a cluster lie along m and along n."""
    return 1 + (self.cluster == "m"), 1 + (self.cluster == "n")


# The candidates of `by_rule`, beside TileConfig(). A few blocks should be small and cooperative.
PINGPONG = TileConfig(
  block_m=128, block_n=192, schedule="pingpong", cluster="m", raster_order="m", raster_width=8
)
TALL_PINGPONG = TileConfig(
  block_m=192, block_n=128, schedule="pingpong", raster_order="m", raster_width=8
)
WIDE = TileConfig(block_m=128, block_n=256, cluster="m")
SMALL = TileConfig(block_m=128, block_n=128, stages=6, cluster=None)
NARROW = TileConfig(block_m=128, block_n=64, stages=8, cluster=None)


def config_for(m: int, n: int, k: int, device_kind: str, num_sms: int) -> TileConfig:
  """The tuned config for (device_kind, n, k) and about m rows; the rule's if there is none."""
  tables = (tuning.user_table(NAME, TileConfig), _shipped())
  if row := tuning.row_for(tables, m, n, k, (device_kind, "sm_90"), TileConfig):
    return TileConfig(**row["config"])
  return by_rule(m, n, k, num_sms)


def by_rule(m: int, n: int, k: int, num_sms: int) -> TileConfig:
  """The candidate with the fewest estimated cycles."""
  candidates = [WIDE, TileConfig(), SMALL, NARROW]
  # Ping-pong was not measured at few rows. Where 64 does not divide n, epilogue tiles are narrower
  # and there are fewer registers than ping-pong's blocks need.
  if m >= MANY_ROWS and n % 64 == 0:
    candidates += [PINGPONG, TALL_PINGPONG]
  return min(candidates, key=lambda config: _estimated_cycles(config, m, n, k, num_sms))


def _estimated_cycles(config: TileConfig, m: int, n: int, k: int, num_sms: int) -> float:
  """Cycles of the busiest SM: main loops, epilogues of 2,500 (cooperative) or 6,000 (ping-pong).

  Shared memory bounds the cooperative main loop. It was not seen to slow ping-pong, where one
  warpgroup's epilogue overlaps the other's main loop.
  """
  block_m, block_n, (cluster_m, cluster_n) = config.block_m, config.block_n, config.cluster_shape
  blocks = pl.cdiv(m, block_m * cluster_m) * pl.cdiv(n, block_n * cluster_n) * cluster_m * cluster_n
  bytes_per_cycle = 64 + 4096 * (1 / config.warpgroup_tile[1] + 1 / block_m + 1 / block_n)
  main_loop = pl.cdiv(k, config.block_k) * config.block_k * block_m * block_n / 4096
  blocks_per_sm = pl.cdiv(blocks, num_sms)
  if config.schedule == "pingpong":
    return blocks_per_sm * max(main_loop, (main_loop + 6000) / 2) + 6000
  return blocks_per_sm * (main_loop * max(1, bytes_per_cycle / 128) + 2500)


@functools.cache
def _shipped() -> list[dict]:
  return tuning.shipped_table(__file__)


def tile_configs() -> set[TileConfig]:
  """Every tile config of the table that the kernel ships with."""
  return {TileConfig(**row["config"]) for row in _shipped()}


def unsupported(device, lhs, rhs, out_dtype, **options) -> str | None:
  """Why the kernel does not take these, or None."""
  del device, lhs, options
  return unsupported_matmul(rhs, out_dtype)


def scaled_matmul(
  lhs: Quantized,
  rhs: Quantized,
  out_dtype,
  *,
  bias: jax.Array | None = None,
  residual: jax.Array | None = None,
  config: TileConfig | None = None,
  num_sms: int | None = None,
  interpret=False,
) -> jax.Array:
  """`sbjax.ops.matmul.scaled_matmul`, bit for bit in int8; K and N must be multiples of 16.

  The tensor core sums fp8 products with fewer bits than float32 has.

  Args:
    config: None for `config_for`'s.
    num_sms: how many thread blocks run; None for one on each SM of the device.
    interpret: False, or plgpu.InterpretGPUParams for a run on the CPU.

  Raises:
    ValueError: as the definition.
  """
  check_residual(residual, (len(lhs.values), len(rhs.values)), out_dtype)
  scales = [lhs.scale[:, 0], rhs.scale[:, 0]]
  if bias is not None:
    scales.append(bias.astype(jnp.float32))
  options = (config, num_sms, interpret)
  return _matmul(lhs.values, rhs.values, scales, residual, out_dtype, *options)


def accumulate(
  lhs: jax.Array, rhs: jax.Array, *, config=None, num_sms=None, interpret=False
) -> jax.Array:
  """`lhs @ rhs.T` [M, N] without scales, in int32 or float32: partial sums of a sharded K."""
  out_dtype = format_of(lhs.dtype).accumulator
  return _matmul(lhs, rhs, [], None, out_dtype, config, num_sms, interpret)


def _matmul(lhs, rhs, scales, residual, out_dtype, config, num_sms, interpret):
  check_operands(lhs, rhs)
  (m, k), n, out_dtype = lhs.shape, rhs.shape[0], jnp.dtype(out_dtype)
  if 0 in (m, n, k):
    return empty_product((m, n), out_dtype, scales[2] if len(scales) == 3 else None, residual)
  padded_m, padded_n, padded_k = _padded_shape(m, n, k)
  if (padded_m, padded_n, padded_k) != (m, n, k):
    lhs = jnp.pad(lhs, ((0, padded_m - m), (0, padded_k - k)))
    rhs = jnp.pad(rhs, ((0, padded_n - n), (0, padded_k - k)))
    if residual is not None:
      residual = jnp.pad(residual, ((0, padded_m - m), (0, padded_n - n)))
    y = _matmul(lhs, rhs, scales, residual, out_dtype, config, num_sms, interpret)
    return y[:m, :n]
  device = devices.target()
  num_sms = num_sms or devices.num_sms(device) or 132
  config = config or config_for(m, n, k, device.device_kind, num_sms)
  cluster_m, cluster_n = config.cluster_shape
  step_m, step_n = config.block_m * cluster_m, config.block_n * cluster_n
  blocks = pl.cdiv(m, step_m) * pl.cdiv(n, step_n)
  # TMA clips slices and stores to the arrays. Nothing clips loads of scales, so these are padded.
  scales = [
    scale if scale.shape == (1,) else jnp.pad(scale, (0, pl.cdiv(size, step) * step - scale.size))
    for scale, size, step in zip(scales, (m, n, n), (step_m, step_n, step_n), strict=False)
  ]
  return plgpu.kernel(
    functools.partial(_kernel, config=config, has_residual=residual is not None),
    out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
    grid=(min(blocks, num_sms // (cluster_m * cluster_n)),),
    grid_names=("clusters",),
    cluster=(cluster_m * cluster_n,),
    cluster_names=("cluster",),
    num_threads=_COMPUTE_WARPGROUPS + 1,
    thread_name="warpgroup",
    kernel_name="sbjax_scaled_matmul" if scales else "sbjax_accumulate",
    interpret=interpret,
  )(lhs, rhs, *scales, *([] if residual is None else [residual]))


def _padded_shape(m: int, n: int, k: int) -> tuple[int, int, int]:
  """The smallest (m, n, k) that TMA can tile; other operands are copied and padded.

  The output must also be larger than an epilogue tile in both directions. Mosaic takes a slice of
  the output's full size for the whole output, wherever the slice begins, and would store it at 0.
  """
  m, k = m + -m % 8, k + -k % 32
  return 72 if m == _EPILOGUE_ROWS else m, {16: 48, 32: 48, 64: 80}.get(n, n), k


def _kernel(lhs, rhs, *refs, config: TileConfig, has_residual: bool):
  """Makes out [M, N] from lhs [M, K] and rhs [N, K]; `refs` are scales, bias, residual and out."""
  *scales, out = refs
  residual = scales.pop() if has_residual else None
  (m, k), n = lhs.shape, rhs.shape[0]
  cluster_m, cluster_n = config.cluster_shape
  grid = pl.cdiv(m, config.block_m * cluster_m), pl.cdiv(n, config.block_n * cluster_n)
  steps, stages = pl.cdiv(k, config.block_k), config.stages
  # A barrier tells only odd from even phases, so whoever waits for it must wait for every phase.
  # Ping-pong warpgroups wait for different slices, so each has its own `loaded_barriers`.
  consumers = _COMPUTE_WARPGROUPS if config.schedule == "pingpong" else 1
  tile_m, tile_n = config.warpgroup_tile
  # TMA's tiles must divide the arrays.
  swizzle = math.gcd(k, 128)
  epilogue_n = math.gcd(n, tile_n, _EPILOGUE_BYTES // out.dtype.itemsize)
  free_type = plgpu.Barrier
  if config.cluster:
    free_type = functools.partial(plgpu.ClusterBarrier, collective_axes=("cluster",))

  @functools.partial(
    pl.run_scoped,
    lhs_smem=_swizzled((stages, config.block_m, config.block_k), lhs.dtype, swizzle),
    rhs_smem=_swizzled((stages, config.block_n, config.block_k), rhs.dtype, swizzle),
    out_smem=_swizzled((_COMPUTE_WARPGROUPS, 2, _EPILOGUE_ROWS, epilogue_n), out.dtype),
    loaded_barriers=plgpu.Barrier(num_arrivals=2, num_barriers=stages * consumers),
    free_barriers=free_type(num_arrivals=_COMPUTE_WARPGROUPS // consumers, num_barriers=stages),
    fetched_barriers=plgpu.Barrier(num_barriers=_COMPUTE_WARPGROUPS * 2),
    collective_axes="warpgroup",
  )
  def _(lhs_smem, rhs_smem, out_smem, loaded_barriers, free_barriers, fetched_barriers):
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == _COMPUTE_WARPGROUPS)
    def _():
      plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")

      @_for_each_block(grid, config)
      def _(row, column, index):
        first_step, consumer = index * steps, lax.rem(index, consumers)

        @pl.loop(0, steps)
        def _(step):
          stage = lax.rem(first_step + step, stages)
          is_reused = first_step + step >= stages
          pl.when(is_reused)(lambda: plgpu.barrier_wait(free_barriers.at[stage]))
          at_k = pl.ds(step * config.block_k, config.block_k)
          for gmem, rows, smem, is_shared in (
            (lhs, pl.ds(row, config.block_m), lhs_smem, config.cluster == "n"),
            (rhs, pl.ds(column, config.block_n), rhs_smem, config.cluster == "m"),
          ):
            plgpu.copy_gmem_to_smem(
              gmem.at[rows, at_k],
              smem.at[stage],
              loaded_barriers.at[consumer * stages + stage],
              collective_axes="cluster" if is_shared else None,
            )

      # Blocks of a cluster signal each other's barriers: do not exit before the last signal.
      total = _blocks_of_this_cluster(math.prod(grid)) * steps

      @pl.loop(lax.max(total - stages, 0), total)
      def _(step):
        plgpu.barrier_wait(free_barriers.at[lax.rem(step, stages)])

    @pl.when(warpgroup < _COMPUTE_WARPGROUPS)
    def _():
      plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
      offset_m = warpgroup * tile_m if config.schedule == "cooperative_m" else 0
      offset_n = warpgroup * tile_n if config.schedule == "cooperative_n" else 0

      def compute(row, column, index):
        first_step, consumer = index * steps, lax.rem(index, consumers)
        origin, shape = (row + offset_m, column + offset_n), (tile_m, tile_n)
        scale = _scale_function(scales, origin, shape, out_smem.shape[-2:])
        buffers = out_smem.at[warpgroup]
        tiles = EpilogueTiles(out, residual, origin, shape, buffers, fetched_barriers)

        def multiply(acc):
          @pl.loop(0, steps)
          def _(step):
            stage = lax.rem(first_step + step, stages)
            plgpu.barrier_wait(loaded_barriers.at[consumer * stages + stage])
            lhs_slice = lhs_smem.at[stage, pl.ds(offset_m, tile_m)]
            rhs_slice = rhs_smem.at[stage, pl.ds(offset_n, tile_n)]
            plgpu.wgmma(acc, lhs_slice, rhs_slice.transpose((1, 0)))
            if has_residual:
              pl.when(step == 0)(lambda: tiles.fetch(0))
            plgpu.wgmma_wait(1)  # The previous step's wgmma no longer reads its slices.
            previous = lax.rem(first_step + step + stages - 1, stages)
            pl.when(step > 0)(lambda: plgpu.barrier_arrive(free_barriers.at[previous]))

          plgpu.wgmma_wait(0)
          plgpu.barrier_arrive(free_barriers.at[lax.rem(first_step + steps - 1, stages)])
          return acc[...]

        acc = plgpu.ACC((tile_m, tile_n), format_of(lhs.dtype).accumulator)  # pyright: ignore
        total = pl.run_scoped(multiply, acc)
        tiles.store(total, scale)

      @_for_each_block(grid, config)
      def _(row, column, index):
        is_mine = config.schedule != "pingpong" or lax.rem(index, consumers) == warpgroup
        pl.when(is_mine)(lambda: compute(row, column, index))

      plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _swizzled(shape, dtype, swizzle: int = 128):
  """Shared memory in the layout that wgmma and TMA access without bank conflicts."""
  itemsize = jnp.dtype(dtype).itemsize
  swizzle = math.gcd(swizzle, shape[-1] * itemsize)
  tile = plgpu.TilingTransform((8, swizzle // itemsize))
  return plgpu.SMEM(shape, dtype, transforms=(tile, plgpu.SwizzleTransform(swizzle)))


def _for_each_block(grid, config):
  """Calls body(row, column, index) for the output blocks of this thread block.

  (row, column) is a block's corner; index counts the blocks from 0.
  """
  cluster_m, cluster_n = config.cluster_shape
  in_cluster = lax.axis_index("cluster")

  def run(body):
    @plgpu.nd_loop((math.prod(grid),), collective_axes="clusters")
    def _(info):
      minor = 0 if config.raster_order == "m" else 1
      at_m, at_n = plgpu.planar_snake(info.index[0], grid, minor, config.raster_width)
      at_m = at_m * cluster_m + (in_cluster if cluster_m == 2 else 0)
      at_n = at_n * cluster_n + (in_cluster if cluster_n == 2 else 0)
      body(at_m * config.block_m, at_n * config.block_n, info.local_index)

  return run


def _blocks_of_this_cluster(blocks: int):
  """How many times `_for_each_block` calls its body."""
  cluster, clusters = lax.axis_index("clusters"), lax.axis_size("clusters")
  return blocks // clusters + (cluster < blocks % clusters).astype(jnp.int32)


def _scale_function(scales, origin, shape, tile) -> Callable:
  """Loads scales and bias; returns scale(total, offset), which applies them to an epilogue tile.

  `shape` is a warpgroup's part of the output and lies at `origin`; `tile` is the shape of its
  epilogue tiles, and `offset` is where one lies in it. The loads start here, before the matmul,
  to hide their latency. Column vectors for which the sums leave no registers are loaded for each
  epilogue tile instead.
  """
  axes = _AXES[: len(scales)]

  def load(which, offset):
    vector, axis = scales[which], axes[which]
    if vector.shape == (1,):
      return vector[0]
    part = vector.at[pl.ds(origin[axis] + offset, tile[axis])]
    layout = plgpu.Layout.WGMMA.reduce(1 - axis)
    return plgpu.load(part, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]

  loaded, registers = {}, math.prod(shape) // 128
  for which, axis in enumerate(axes):
    is_column_vector = axis == 1 and scales[which].shape != (1,)
    registers += is_column_vector * shape[1] // 4
    if not is_column_vector or registers <= _REGISTERS:
      for offset in range(0, shape[axis], tile[axis]):
        loaded[which, offset] = load(which, offset)

  def scale(total, offset):
    """`total * (lhs_scale * rhs_scale) + bias`."""
    if not scales:
      return total
    keys = [(which, offset[axis]) for which, axis in enumerate(axes)]
    vectors = [loaded[key] if key in loaded else load(*key) for key in keys]
    lhs_scale, rhs_scale, *bias = (
      lax.broadcast_in_dim(vector, total.shape, (axis,) if vector.ndim else ())
      for vector, axis in zip(vectors, axes, strict=True)
    )
    y = total.astype(jnp.float32) * (lhs_scale * rhs_scale)
    return y + bias[0] if bias else y

  return scale


@dataclasses.dataclass(frozen=True)
class EpilogueTiles:
  """A warpgroup's part of the output, which is stored tile by tile through two buffers.

  The residual's tiles are fetched into the same buffers, the first two during the matmul.
  """

  out: Any
  residual: Any  # or None
  origin: tuple  # Where the part lies in the output.
  shape: tuple[int, int]
  buffers: Any  # [2, rows, columns]
  fetched_barriers: Any  # One for each buffer of each warpgroup.

  @property
  def offsets(self) -> list[tuple[int, ...]]:
    """Where the tiles lie in the part."""
    steps = self.buffers.shape[-2:]
    return list(itertools.product(*map(range, (0, 0), self.shape, steps)))

  def slices(self, offset) -> tuple:
    """Where in the output the tile at `offset` lies."""
    sizes = self.buffers.shape[-2:]
    return tuple(
      pl.ds(start + o, size) for start, o, size in zip(self.origin, offset, sizes, strict=True)
    )

  def barrier(self, i: int):
    return self.fetched_barriers.at[lax.axis_index("warpgroup") * 2 + i % 2]

  def fetch(self, first: int) -> None:
    """Starts to load two tiles of the residual once the stores have left the buffers."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for i, offset in enumerate(self.offsets[first : first + 2]):
      tile = self.residual.at[self.slices(offset)]
      plgpu.copy_gmem_to_smem(tile, self.buffers.at[i], self.barrier(i))

  def store(self, total, scale) -> None:
    """Scales the sums, adds the residual in float32, casts and stores."""
    rows, columns = self.buffers.shape[-2:]
    for i, (r, c) in enumerate(self.offsets):
      buffer = self.buffers.at[i % 2]
      tile = scale(total[r : r + rows, c : c + columns], (r, c))
      if self.residual is None:
        # If tiles are odd in number, the previous block's last store also used the first buffer.
        is_used = i == 0 and len(self.offsets) % 2
        plgpu.wait_smem_to_gmem(0 if is_used else 1, wait_read_only=True)
      else:
        if i and i % 2 == 0:
          self.fetch(i)
        plgpu.barrier_wait(self.barrier(i))
        residual = plgpu.load(buffer, layout=plgpu.Layout.WGMMA)  # pyright: ignore[reportCallIssue]
        tile += residual.astype(jnp.float32)
        plgpu.commit_smem()  # All threads have read the buffer, which is overwritten next.
      buffer[...] = tile.astype(self.out.dtype)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(buffer, self.out.at[self.slices((r, c))])
