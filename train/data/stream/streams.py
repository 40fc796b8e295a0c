"""A logical stream: samples of its shards without end, in blocks that are shuffled within.

A thread reads a block while the one before is given. What a stream gives next is a
function of its state, some whole numbers, and of what its shards hold; so a run that resumes reads
a block of each stream again and goes on.
"""

import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from train.data import machine, sample
from train.data.sample import Unusable
from train.data.stream import formats, stores
from train.data.stream.order import Order, Position
from train.data.stream.versions import Versions
from train.data.tar_shards import DamagedShard
from train.errors import RunError

_EMPTY = 10  # passes
_READS_NEXT = 1 / 8  # of a block is given before the next is read: first those of all streams
MOST_BYTES = 2**26  # of a block: larger samples make shorter blocks
# To read from a disk is work for a core: more threads would only take the interpreter's lock from
# each other. A store is waited for.
_DISK_TURNS = threading.Semaphore(max(2, machine.cores()))


class Reading(NamedTuple):
  """How samples are read."""

  wanted: sample.Wanted
  prompts: tuple[tuple[str, ...], ...]  # of each label, for data without captions
  max_bytes: int  # of a file
  columns: tuple[str, str]  # of a csv: those of the images' paths and of the captions
  block: int  # samples that are shuffled together
  leaves_out: bool  # whether an unreadable shard is left out, and does not end the run


class ShardSet(NamedTuple):
  """Shards that are read with one weight."""

  shards: tuple[str, ...]
  weight: float = 1.0


class Skipped(NamedTuple):
  """A sample, or the rest of a shard, that was left out."""

  shard: str
  key: str | None  # None: the rest of the shard
  reason: str
  detail: str = ""


class Block(NamedTuple):
  position: Position  # of its beginning
  examples: list[dict[str, Any]]  # in the order in which they are given
  skipped: list[Skipped]


def blocks(
  shards: Sequence[str], order: Order, position: Position, reading: Reading, versions: Versions
) -> Iterator[Block]:
  """The blocks of a stream from a position on, without end.

  Raises:
    RunError: a shard cannot be read or has changed, or none of the stream has a sample.
  """
  empty = 0  # passes without a sample; the shards of the next are others
  while True:
    number = order.shard(position)
    if number is None:
      if empty == _EMPTY:
        raise RunError(
          f"Stream {order.stream} of {order.streams} found no sample that can be used in {empty}"
          " passes: fewer data.streams have more shards each."
        )
      position, empty = position.next_epoch(), empty + 1
      continue
    for block in _of_shard(shards[number], order, position, reading, versions):
      empty = 0 if block.examples else empty
      yield block
    position = position.next_shard()


def _of_shard(
  shard: str, order: Order, begins: Position, reading: Reading, versions: Versions
) -> Iterator[Block]:
  """The blocks of a shard from a position on; the last may hold only what was left out."""
  examples, skipped, count, size = [], [], 0, 0

  def block() -> Block:
    return Block(begins, [examples[i] for i in order.shuffled(begins, len(examples))], skipped)

  for item in _samples(shard, begins, reading, versions):
    match item:
      case int(bytes_of_shard):
        begins = begins._replace(size=bytes_of_shard, taken=0)
      case Skipped():
        skipped.append(item)
      case end, key, files:
        count += 1
        try:
          examples.append(example_of(shard, key, files, reading))
          size += len(examples[-1]["image"])
        except Unusable as error:
          skipped.append(Skipped(shard, key, error.reason, error.detail))
        if count == reading.block or size >= MOST_BYTES:
          yield block()
          begins = begins._replace(start=end)
          examples, skipped, count, size = [], [], 0, 0
  if examples or skipped:
    yield block()


def _samples(
  shard: str, begins: Position, reading: Reading, versions: Versions
) -> Iterator[int | tuple[int, str, sample.Files] | Skipped]:
  """The shard's size, its samples from a position on, and what ended it before its end."""
  try:
    size = 0
    if formats.kind(shard) != "folder":  # It has no version, and positions count its names.
      version = stores.version(shard)
      versions.check(shard, version, begins.size)
      size = version.size
    yield size
    yield from formats.samples(shard, begins.start, reading.max_bytes, *reading.columns)
  except DamagedShard as error:
    yield Skipped(shard, None, "damaged", str(error))
  except stores.Unreadable as error:
    if not reading.leaves_out:
      raise RunError(
        f"{error} data.unreadable='skip' leaves such shards out. The same command continues."
      ) from error
    yield Skipped(shard, None, "unreadable", str(error))


def example_of(shard: str, key: str, files: sample.Files, reading: Reading) -> dict[str, Any]:
  """What is taken of a sample: "shard", "key", "where", "image", "captions", "label" (-1: none).

  Raises:
    Unusable: something is missing or wrong.
  """
  image, texts = sample.image(files), sample.texts(files, reading.wanted)
  label = -1 if texts.label is None else texts.label
  captions = texts.captions if reading.wanted.captions else list(reading.prompts[label])
  where = {"shard": shard, "key": key, "where": f"{shard}:{key}"}
  return {**where, "image": image, "captions": captions, "label": label}


class Stream:
  """Samples of one logical stream; `state` is where it is.

  drawn: samples so far, of which the caller counts the `undecodable` ones.
  unusable: samples, or rests of shards, that were left out before they could be drawn.

  With several sets each draw chooses one by a seeded number and the weights.
  """

  def __init__(
    self,
    sets: Sequence[ShardSet],
    index: int,
    count: int,
    seed: int,
    reading: Reading,
    versions: Versions,
    state: Sequence,
  ):
    """
    Args:
      index, count: which of how many streams.
      versions: of the shards that all streams of this process have opened.
      state: as `state` returned it, or () at the beginning.
    """
    self.drawn, self.unusable, self.undecodable, *positions = state or (0, 0, 0)
    self._seed = (seed, index)
    weights = np.array([each.weight for each in sets])
    self._edges = np.cumsum(weights / weights.sum())[:-1]
    self._readers = [
      _Reader(
        each.shards,
        Order(len(each.shards), count, index, (seed, number)),
        Position(*positions[number]) if positions else Position(),
        reading,
        versions,
      )
      for number, each in enumerate(sets)
    ]

  @property
  def state(self) -> list:
    positions = (list(reader.position) for reader in self._readers)
    return [self.drawn, self.unusable, self.undecodable, *positions]

  def draw(self) -> tuple[dict[str, Any], np.random.Generator, list[Skipped]]:
    """The next sample, the random numbers for it, and what was left out before it."""
    rng = np.random.default_rng((*self._seed, self.drawn))
    number = 0
    if len(self._edges):
      number = int(np.searchsorted(self._edges, rng.random(), side="right"))
    example, skipped = self._readers[number].take()
    self.drawn += 1
    self.unusable += len(skipped)
    return example, rng, skipped

  def close(self) -> None:
    for reader in self._readers:
      reader.close()


class _Reader:
  """The samples of a stream in one set; the next block is read ahead."""

  def __init__(
    self,
    shards: Sequence[str],
    order: Order,
    position: Position,
    reading: Reading,
    versions: Versions,
  ):
    self.position = position
    waits = any(map(stores.is_remote, shards))
    turns = contextlib.nullcontext() if waits else _DISK_TURNS
    self._ahead = _Ahead(blocks(shards, order, position, reading, versions), turns)
    self._block: Block | None = None
    self._given, self._reads = 0, True  # of the block; whether the next one is read

  def take(self) -> tuple[dict[str, Any], list[Skipped]]:
    skipped = []
    while self._block is None or self.position.taken >= len(self._block.examples):
      self._read_next()
      block, self._given, self._reads = next(self._ahead), 0, False
      resumed = self._block is None and self.position.taken > 0
      if not resumed:  # Else it was counted before.
        self.position = block.position
        skipped += block.skipped
      self._block = block
    example = self._block.examples[self.position.taken]
    self.position = self.position._replace(taken=self.position.taken + 1)
    self._given += 1
    if self._given > _READS_NEXT * len(self._block.examples):
      self._read_next()
    return example, skipped

  def _read_next(self) -> None:
    if not self._reads:
      self._ahead.read()
      self._reads = True

  def close(self) -> None:
    self._ahead.close()


class _Ahead(Iterator[Block]):
  """Reads the first block, and others when told, in a thread that no end of the program waits for.

  A store that does not answer holds it for minutes.
  """

  def __init__(self, blocks: Iterator[Block], turns: contextlib.AbstractContextManager):
    """turns: held while a block is read."""
    self._found: queue.SimpleQueue[Block | BaseException] = queue.SimpleQueue()
    self._turns = turns
    self._room, self._closed = threading.Semaphore(), False
    threading.Thread(target=self._read, args=[blocks], name="reads", daemon=True).start()

  def _read(self, blocks: Iterator[Block]) -> None:
    try:
      while self._room.acquire() and not self._closed:
        with self._turns:
          block = next(blocks)
        self._found.put(block)
    except BaseException as error:  # It belongs to whoever takes the block.
      self._found.put(error)

  def read(self) -> None:
    """Begins with another block."""
    self._room.release()

  def __next__(self) -> Block:
    found = self._found.get()
    if isinstance(found, BaseException):
      self._found.put(found)
      raise found
    return found

  def close(self) -> None:
    self._closed = True
    self._room.release()
