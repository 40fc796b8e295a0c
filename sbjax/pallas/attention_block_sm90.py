"""What a thread block of attention's backward pass on Hopper has: its heads and shared memory."""

import dataclasses
import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from sbjax.pallas.attention_heads_sm90 import Heads, ThreadBlock, barriers_of
from sbjax.pallas.attention_parts_sm90 import (
  COMPUTE_WARPGROUPS,
  TILE,
  by_name,
  fits_tma,
  swizzled,
  tiled,
)

O_STAGES = 2


@dataclasses.dataclass(frozen=True)
class Config:
  """What a thread block keeps in shared memory, and the registers of its threads.

  stages: tiles of queries, at least 2.
  kv_stages: 1 or 2 heads' keys and values, or parts of them; 1 if sums of dQ take the memory.
  ds_buffers: 1 or 2 tiles of dS. With two, a warpgroup need not wait for the other's product.
  memory_registers: of a thread of the memory warpgroup; the two compute warpgroups get the rest of
    3 * 168.
  """

  stages: int = 2
  kv_stages: int = 1
  ds_buffers: int = 2
  memory_registers: int = 56

  def __post_init__(self):
    # Anything else would wait for ever, or is no number of registers that a warpgroup can have.
    if self.stages < 2 or not {self.kv_stages, self.ds_buffers} <= {1, 2}:
      raise ValueError(f"{self}: stages must be at least 2, kv_stages and ds_buffers 1 or 2.")
    if self.memory_registers not in range(24, 169, 16):
      raise ValueError(f"{self}: memory_registers must be 24, 40, 56, ... or 168.")

  @property
  def compute_registers(self) -> int:
    return (3 * 168 - self.memory_registers) // COMPUTE_WARPGROUPS


def default_config(tokens: int, head_dim: int) -> Config:
  """The fastest of those tried on an H100 or H200.

  Heads from 88 on get as many registers as keep the compiler from serializing products.
  """
  if head_dim > 96:
    return Config(ds_buffers=1)
  if head_dim > 80 and tokens > 129:
    return Config(kv_stages=2, ds_buffers=1, memory_registers=104 if has_tail(tokens) else 88)
  if head_dim > 64:
    return Config(ds_buffers=2 if tokens <= 129 else 1, memory_registers=104)
  if tokens <= 129:
    return Config(stages=3, kv_stages=2, ds_buffers=1 if tokens == 129 else 2)
  return Config(memory_registers=56 if has_tail(tokens) else 40)


def has_tail(tokens: int) -> bool:
  """Whether the last key is the memory warpgroup's: the others have a multiple of 128."""
  return tokens % 128 == 1


def fits(tokens: int, head_dim: int) -> bool:
  """Whether the kernel takes such heads, and is faster than Triton's on an H200.

  With 66 tokens, half of two tiles of keys are zeros: in Triton, heads of 104 and 128 were faster.
  """
  return fits_tma(tokens, head_dim) and (head_dim <= 96 or tokens > 80)


@dataclasses.dataclass(frozen=True)
class Plan(Heads):
  """The constants of a kernel that takes a part of the keys, and tiles of queries."""

  config: Config

  @property
  def has_tail(self) -> bool:
    return has_tail(self.tokens)

  @functools.cached_property
  def keys(self) -> int:
    """Keys of a part. Two warpgroups' registers hold their gradients, and their values'."""
    most = 256 if self.head_dim <= 64 else 128
    return min(most, pl.cdiv(self.tokens - self.has_tail, 128) * 128)

  @functools.cached_property
  def parts(self) -> int:
    return pl.cdiv(self.tokens - self.has_tail, self.keys)

  @property
  def has_dq(self) -> bool:
    """Whether the kernel computes dQ, too: shared memory may not hold the sums of several parts."""
    return self.parts == 1 or self.head_dim <= 80

  @property
  def has_sums(self) -> bool:
    """Whether sums of dQ stay in shared memory, for all parts of the keys."""
    return self.has_dq and self.parts > 1

  @property
  def own_keys(self) -> int:
    return self.keys // COMPUTE_WARPGROUPS

  @property
  def last_queries(self) -> int:
    """That the last tile is computed for: a class token may be its only query."""
    rest = self.tokens - (self.tiles - 1) * TILE
    return next(n for n in (8, 16, 32, TILE) if n >= rest)

  @functools.cached_property
  def widths(self) -> tuple[int, ...]:
    whole, rest = divmod(self.head_dim, TILE)
    return (TILE,) * whole + ((next(w for w in (16, 32, TILE) if w >= rest),) if rest else ())

  @property
  def stages(self) -> int:
    return self.config.stages

  @property
  def dq_lag(self) -> int:
    """How many tiles later a tile's dQ is computed, so that the other warpgroup's dS is there."""
    return self.config.ds_buffers - 1

  @property
  def kept(self) -> int:
    """Tiles of queries of which numbers stay in shared memory.

    dQ reads them when its tile of queries is free already. If keys have parts, all of a head's
    stay, and a tile's place is first o's, then the sums' of dQ, and then dQ's: it has left when
    the next o comes, since its warpgroup has then stored another one, two tiles later.
    """
    return max(self.tiles if self.parts > 1 else 0, self.stages + self.dq_lag + 3)

  @property
  def o_stages(self) -> int:
    return self.stages if self.has_sums else O_STAGES

  @property
  def stages_in_ds(self) -> bool:
    """Whether the gradients of keys and values leave by way of dS's buffers, or dQ's."""
    return self.has_sums or len(self.widths) == 1

  @property
  def kv_stages(self) -> int:
    return 1 if self.has_sums else self.config.kv_stages

  def buffers(self) -> dict:
    """Shared memory by name, for `pl.run_scoped`."""
    widths, dtype, kv_stages, ds_buffers = (
      self.widths, self.dtype, self.kv_stages, self.config.ds_buffers
    )  # fmt: skip

    def sums_o_dq(width):
      """The sums have 4 bytes, o and dQ have 2: theirs is each second place."""
      # In tiles of 8 columns, a thread's addresses differ by constants.
      sums = swizzled((self.kept, TILE, width), 8, jnp.float32)
      return tiled(2 * self.kept, TILE, width, dtype, sums)

    def ds_copy(width):
      """A warpgroup's rows of this dS are as many bytes as TILE / width tiles of a gradient."""
      copy = swizzled((ds_buffers, self.keys, TILE), width, dtype)
      return tiled(ds_buffers, self.keys * TILE // width, width, dtype, copy)

    of_dq: dict[str, Any]
    if self.has_sums:
      of_dq = {"sums_o_dq": [sums_o_dq(width) for width in widths]}
    else:
      # Without dQ, dS and gradients leave by way of its place.
      of_dq = {
        "o": self.of_blocks(self.o_stages, TILE),
        "dq": self.of_blocks(COMPUTE_WARPGROUPS, TILE),
      }
    if self.has_dq:
      # Pallas multiplies only operands that are swizzled alike: dS is there for each width.
      of_dq["ds"] = tiled(ds_buffers, self.keys, TILE, dtype)
      of_dq["ds_copies"] = [ds_copy(width) for width in widths if width < TILE]
    return {
      **of_dq,
      "q": self.of_blocks(self.stages, TILE),
      "do": self.of_blocks(self.stages, TILE),
      "k": self.of_blocks(kv_stages, self.keys),
      "v": self.of_blocks(kv_stages, self.keys),
      # Of each query: lse in base 2, delta, and the tail key's dS.
      "of_query": plgpu.SMEM((self.kept, 3, TILE), jnp.float32),
      # The tail key is the first of 8 rows, and so are its probabilities and dS.
      "tail_kv": self.of_blocks(2 * kv_stages, 8),
      "tail_p": tiled(0, 8, TILE, dtype),
      "tail_ds": tiled(0, 8, TILE, dtype),
      "tail_out": [tiled(0, 8 if w == TILE else TILE, w, dtype) for w in widths],
    }

  def barriers(self) -> dict:
    """Barriers by name, for `pl.run_scoped`."""
    copies, tail, kv_stages = len(self.widths), self.has_tail, self.kv_stages
    arrivals = {
      "loaded": (2 * copies, self.stages),
      "o_loaded": (copies, self.o_stages),
      "ready": (1, self.stages),
      "free": (COMPUTE_WARPGROUPS + 1, self.stages),
      "kv_loaded": (2 * copies * (self.keys // TILE + tail), kv_stages),
      "kv_free": (COMPUTE_WARPGROUPS + tail, kv_stages),
    }
    if self.has_dq:
      # Of tiles whose dQ the one or the other warpgroup computes.
      arrivals |= {"ds_ready": (COMPUTE_WARPGROUPS, 2), "ds_free": (1, 2)}
    return barriers_of(arrivals)


class Block(ThreadBlock):
  """A unit of its work is a part of the keys of a head."""

  def __init__(self, plan: Plan, refs, **shared):
    self.plan, arrays = plan, (len(refs) - 3) // 2
    inputs, outputs = refs[: arrays + 3], refs[arrays + 3 :]
    *self.qkv, self.o_array, self.do_array, self.lse = inputs
    self.dqkv, self.ds_array = outputs[:arrays], outputs[-1]
    self.dq_sums = ()
    if plan.has_sums:
      self.dq_sums, *o = by_name(shared.pop("sums_o_dq"), 3)
      (self.o, self.o_rows), (self.dq, self.dq_rows) = o, o
    self.ds_copies, self.outs, self.outs_rows = by_name(shared.pop("ds_copies", []), 3)
    for name in {"ds", "tail_p", "tail_ds"} & shared.keys():
      tile, rows = shared.pop(name)
      setattr(self, name, tile)
      setattr(self, f"{name}_rows", rows)
    super().__init__(plan, shared)

  def kept(self, step):
    """Where the numbers of a tile of queries are; parts of the keys do not count as steps."""
    return step % self.plan.kept

  def in_sums(self, step):
    """Where a tile of o or dQ is, if it takes the place of the sums, which have twice the bytes."""
    return 2 * self.kept(step)

  def ds_of(self, item, first_key, keys, tile):
    """Rows of dS in global memory, [keys, TILE], of which TMA clips what is beyond the tokens."""
    return self.ds_array.at[item, pl.ds(first_key, keys), pl.ds(tile * TILE, TILE)]

  def if_part(self, unit, part, function):
    parts = self.plan.parts
    return pl.when(unit % parts == part)(function) if parts > 1 else function()
