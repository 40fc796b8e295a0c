"""Which shard a stream reads when: a function of the seed, whatever reads it and however fast.

A run has a fixed number of logical streams, and a batch takes equally from each. In every pass over
a set its shards are permuted anew, and stream s reads those at s, s + streams, s + 2 streams...
"""

import functools
from typing import NamedTuple

import numpy as np


class Position(NamedTuple):
  """Where a stream is in a set: whole numbers, all that a checkpoint needs of it."""

  epoch: int = 0  # passes over the set that are behind
  turn: int = 0  # shards of this pass that are behind
  start: int = 0  # where the block begins in its shard, as `formats.samples` counts
  taken: int = 0  # samples of the block that were given
  size: int = 0  # bytes of the shard when it was read; 0: not known

  def next_shard(self) -> "Position":
    return Position(self.epoch, self.turn + 1)

  def next_epoch(self) -> "Position":
    return Position(self.epoch + 1)


class Order(NamedTuple):
  """The order of a set's shards in one of the streams."""

  shards: int
  streams: int
  stream: int
  seed: tuple[int, ...]  # of the run and of the set

  def shard(self, position: Position) -> int | None:
    """The number of the shard of a position; None: this pass of the stream is over."""
    place = self.stream + position.turn * self.streams
    if place >= self.shards:
      return None
    return int(_permutation(self.shards, (*self.seed, position.epoch))[place])

  def shuffled(self, position: Position, count: int) -> np.ndarray:
    """The order of the `count` samples of the block that begins at a position."""
    key = (*self.seed, self.stream, position.epoch, position.turn, position.start)
    return np.random.default_rng(key).permutation(count)


@functools.lru_cache(maxsize=8)
def _permutation(count: int, seed: tuple[int, ...]) -> np.ndarray:
  return np.random.default_rng(seed).permutation(count)
