"""What Hopper's attention kernels share: layouts of wgmma, and which heads a thread block has."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.sharding import ManualAxisType

from sbjax.ops import device as devices

TILE = 64  # Rows of a tile of queries or keys.
LOG2_E = math.log2(math.e)
COMPUTE_WARPGROUPS = 2  # Of a thread block, which has one more, for memory.
MEMORY_REGISTERS, COMPUTE_REGISTERS = 40, 232  # Of a thread, in kernels without a config.
BY_ROW, BY_COLUMN = (plgpu.Layout.WGMMA.reduce(axis) for axis in (1, 0))


def persistent_kernel(body, out_type, *, name: str, blocks: int, interpret) -> Any:
  """A kernel whose thread blocks share the heads; operands may be refs, to be written to."""
  mesh = plgpu.Mesh(
    grid=(blocks,),
    grid_names=("sm",),
    num_threads=COMPUTE_WARPGROUPS + 1,
    thread_name="warpgroup",
    kernel_name=name,
  )
  params = plgpu.CompilerParams(
    approx_math=True,
    unsafe_no_auto_barriers=True,  # `commit_smem` stands where one is needed.
    lowering_semantics=plgpu.LoweringSemantics.Lane,
  )
  # In a `jax.shard_map` types say over which axes results vary. A kernel knows of none: on shards
  # that vary it runs as a module of its own (sbjax/ops/partition.py).
  unvarying = functools.partial(jax.ShapeDtypeStruct.update, manual_axis_type=ManualAxisType())
  out_type = jax.tree.map(unvarying, out_type)
  return pl.kernel(
    body, out_type, mesh=mesh, name=name, compiler_params=params, interpret=interpret
  )


def sums(rows, columns):
  """A matmul's sums [rows, columns], in registers."""
  return plgpu.ACC((rows, columns), jnp.float32)  # pyright: ignore


def load(ref, layout: Any = plgpu.Layout.WGMMA):
  """A tile in registers; with BY_ROW or BY_COLUMN a vector, a number for each of a tile's."""
  return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]


def zeros(shape, dtype):
  return plgpu.layout_cast(jnp.zeros(shape, dtype), plgpu.Layout.WGMMA)


def varying(step):
  """Zero, as the compiler cannot know: it would hold addresses that stay the same in registers."""
  return step >> 24


def across(vector, axis, columns=TILE):
  """A tile [TILE, columns] of a vector that varies along `axis`."""
  return lax.broadcast_in_dim(vector, (TILE, columns), (axis,))


def first_column(x):
  """The first column of sums [TILE, 8]."""
  column = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=plgpu.Layout.WGMMA)
  return jnp.sum(jnp.where(column == 0, x, 0.0), axis=1)


def with_zeros(x):
  """The columns of x, then zeros up to a multiple of TILE."""
  missing = -x.shape[1] % TILE
  return lax.concatenate([x, zeros((TILE, missing), x.dtype)], 1) if missing else x


def unsupported_heads(qkv: Sequence[jax.Array], length: int) -> str | None:
  """Why the kernels do not take q, k and v, or None.

  TMA loads whole 16 bytes of a row, and each compute warpgroup needs a tile of each head.
  """
  _, tokens, _, _, head_dim = qkv[0].shape
  dtype = jnp.dtype(qkv[0].dtype)
  if dtype not in (jnp.bfloat16, jnp.float16):
    return f"takes bfloat16 and float16, not {dtype.name}"
  if not 64 <= head_dim <= 128 or head_dim % 8:
    return f"takes heads of 64 to 128, multiples of 8, not {head_dim}"
  if not TILE < tokens <= 4 * TILE + 1:
    return f"takes {TILE + 1} to {4 * TILE + 1} tokens, not {tokens}"
  return None if length == tokens else f"takes no padding, here {tokens - length} tokens of it"


def swizzled(shape, columns, dtype):
  """Shared memory for wgmma, tiled in blocks of `columns`, of which the last axis is a multiple."""
  transforms = plgpu.TilingTransform((8, columns)), _swizzle(columns, dtype)
  return plgpu.SMEM(shape, dtype, transforms=transforms)


def _swizzle(columns, dtype):
  return plgpu.SwizzleTransform(columns * jnp.dtype(dtype).itemsize)


def tiled(buffers, rows, columns, dtype, *others):
  """Shared memory of 16, 32 or 64 columns under two names: for wgmma and for TMA.

  wgmma's is tiled. TMA's is not, since it clips whole rows to an array, of which 8 need not divide
  the tokens. With one tile a row, both lay the same bytes out. `others` are further names, which
  come first.
  """
  shape = (buffers, rows, columns) if buffers else (rows, columns)
  for_tma = plgpu.SMEM(shape, dtype, transforms=(_swizzle(columns, dtype),))
  return plgpu.RefUnion(*others, swizzled(shape, columns, dtype), for_tma)


def by_name(blocks, names: int = 2) -> list[tuple[Any, ...]]:
  """A tuple of the blocks for each of their names."""
  return [tuple(block[name] for block in blocks) for name in range(names)]


def barriers_of(arrivals: dict[str, tuple[int, int]]) -> dict:
  """Barriers for `pl.run_scoped`: how many signals each awaits, and how many there are, by name."""
  return {
    name: plgpu.Barrier(num_arrivals=n, num_barriers=count) for name, (n, count) in arrivals.items()
  }


@dataclasses.dataclass(frozen=True)
class Heads:
  """The constants of a kernel."""

  batch: int
  tokens: int
  heads: int
  head_dim: int
  dtype: jnp.dtype
  causal: bool

  @classmethod
  def of(cls, qkv: Sequence[jax.Array], causal: bool, *more) -> Self:
    """Of q, k and v as one array or three; `more` are a subclass's own constants."""
    batch, tokens, _, heads, head_dim = qkv[0].shape
    return cls(batch, tokens, heads, head_dim, jnp.dtype(qkv[0].dtype), causal, *more)

  @property
  def tiles(self) -> int:
    return pl.cdiv(self.tokens, TILE)

  @property
  def widths(self) -> tuple[int, ...]:
    """Of blocks of columns: multiples of 16 up to 64, the last maybe too wide."""
    raise NotImplementedError

  @property
  def blocks(self) -> range:
    return range(len(self.widths))

  @property
  def scale(self) -> float:
    return self.head_dim**-0.5

  def of_blocks(self, buffers: int, rows: int) -> list:
    """Shared memory of a head's rows, by blocks of columns."""
    return [tiled(buffers, rows, width, self.dtype) for width in self.widths]

  def thread_blocks(self, num_sms: int | None) -> int:
    """How many run; None for one on each SM of the device."""
    return min(self.batch * self.heads, num_sms or devices.num_sms(devices.target()) or 132)


class ThreadBlock:
  """Its shared memory and arrays, by name, and which heads are its own: the i-th is `item(i)`.

  Buffers with blocks of columns are two tuples: `q` for wgmma and `q_rows` for TMA, and so on.
  """

  def __init__(self, heads: Heads, shared: dict):
    self.heads = heads
    for name, ref in shared.items():
      if isinstance(ref, list | tuple):
        tiles, rows = by_name(ref)
        setattr(self, name, tiles)
        setattr(self, f"{name}_rows", rows)
      else:
        setattr(self, name, ref)
    self.warpgroup = lax.axis_index("warpgroup")
    self.sm, self.sms = lax.axis_index("sm"), lax.axis_size("sm")
    self.items = (heads.batch * heads.heads - self.sm + self.sms - 1) // self.sms

  if TYPE_CHECKING:

    def __getattr__(self, name: str) -> Any: ...

  def wait_for_last(self, signals, used, count):
    """Waits for the last of `used` signals: a warpgroup must observe each."""
    for n in range(count):
      wait = functools.partial(plgpu.barrier_wait, signals.at[(used + n) % count])
      pl.when(used + n >= count)(wait)

  def item(self, i):
    """The head's number, with those of an example in a row."""
    return self.sm + i * self.sms

  def head(self, arrays, which, item, rows, block):
    """Rows and a block of columns of a head, in global memory.

    Args:
      arrays: one [B, L, 3, H, D] or three [B, L, 1, H, D], of q, k and v; or one [B, L, 1, H, D].
      which: 0, 1, 2 for q, k, v.
    """
    heads = self.heads
    array, index = (arrays[0], which) if len(arrays) == 1 else (arrays[which], 0)
    first, width = sum(heads.widths[:block]), heads.widths[block]
    # TMA clips a block that is wider than the rest of a head. Pallas rejects such a slice if it is
    # constant.
    columns = pl.ds(first if first + width <= heads.head_dim else item * 0 + first, width)
    return array.at[item // heads.heads, rows, index, item % heads.heads, columns]
