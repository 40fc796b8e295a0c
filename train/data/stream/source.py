"""The Source of tar shards that are read where they lie: of a disk or of an object store.

A run reads them in the order that `order` gives, keeps nothing on the disk but a list of what it
left out, and holds `data.streams` x two blocks in memory, over all processes.
"""

import contextlib
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from train.config import Config, DataConfig
from train.data import collate
from train.data.augment import CentreCrop, RandomCrop
from train.data.classes import read_class_names
from train.data.decode import Limits
from train.data.eval_batches import decoded
from train.data.sample import Unusable, Wanted
from train.data.stream import formats, stores
from train.data.stream.batches import Batches, Plan
from train.data.stream.streams import Reading, ShardSet, example_of
from train.data.tar_shards import DamagedShard
from train.data.tokenizer import Tokenizer
from train.errors import RunError
from train.parallel.sharding import rows_to_devices
from train.paths import local_path

_MOST_STREAMS = 64  # by default
_CAPTIONS = 20_000  # that a tokenizer is made of
_SHARDS_OF_CAPTIONS = 16  # from which these are taken


class Streamed(NamedTuple):
  """Sets of shards to train on, and those to evaluate on."""

  config: Config
  sets: tuple[ShardSet, ...]
  eval_shards: tuple[str, ...]
  class_names: list[str] | None

  @property
  def full_name(self) -> str:
    return self.config.data.name

  def identity(self) -> dict[str, object]:
    shards = sum(len(each.shards) for each in self.sets)
    return {
      "its shards (number, digest of their names)": [shards, self._digest()],
      "those to evaluate on": _digest(self.eval_shards),
    }

  def size(self, split: str) -> int | None:
    data = self.config.data
    if split == data.train_split:
      return None
    if split == data.eval_split and self.eval_shards:
      return len(self.eval_shards)  # Their samples are not counted.
    raise ValueError(
      f"data.stream reads whole splits: data.train_split={data.train_split!r} is that of"
      f" data.train_shards, and data.eval_split={data.eval_split!r} needs data.eval_shards."
    )

  def captions(self) -> Iterator[str]:
    """The first captions of some shards: all of a large set would take as long as a run."""
    data = self.config.data
    if not data.text_key:
      for name in self.class_names or ():
        yield from collate.prompts(data.templates, name)
      return
    shards = [shard for each in self.sets for shard in each.shards]
    places = np.linspace(0, len(shards) - 1, min(len(shards), _SHARDS_OF_CAPTIONS)).astype(int)
    chosen = [shards[i] for i in places]
    for shard in chosen:
      examples = self._examples(shard, trains=True)
      texts = (text for example in examples for text in example["captions"])
      yield from itertools.islice(texts, _CAPTIONS // len(chosen))

  def train_iterator(
    self,
    tokenizer: Tokenizer,
    *,
    image_size: int,
    context_length: int,
    process_index: int = 0,
    process_count: int = 1,
    workdir: Path | None = None,
  ) -> Batches:
    config, data, streams = self.config, self.config.data, self._streams(process_count)
    plan = Plan(
      sets=self.sets,
      streams=streams,
      each=config.batch_size // streams,
      seed=config.seed,
      reading=self._reading(trains=True),
      crop=RandomCrop(image_size, tuple(data.crop_scale), data.flip, Limits.of(data)),
      tokenize=collate.Tokenize(tokenizer, context_length),
    )
    own = streams // process_count
    name = "skipped.jsonl" if not process_index else f"skipped-{process_index}.jsonl"
    return Batches(
      plan,
      range(process_index * own, (process_index + 1) * own),
      data.workers,
      data.prefetch,
      self._digest(),
      workdir / name if workdir else None,
      data.max_bad_share,
    )

  def to_devices(self, mesh: Mesh, **_) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return rows_to_devices(mesh)

  def eval_batches(
    self, split: str, *, image_size: int, batch_size: int
  ) -> Iterator[dict[str, Any]]:
    self.size(split)
    crop = CentreCrop(image_size, Limits.of(self.config.data))
    examples = (e for shard in self.eval_shards for e in self._examples(shard, trains=False))
    yield from decoded(examples, crop, batch_size, skipped=[])

  def _examples(self, shard: str, trains: bool) -> Iterator[dict[str, Any]]:
    """The samples of a shard that can be used, in their order; images are not decoded."""
    reading = self._reading(trains)
    try:
      for _, key, files in formats.samples(shard, 0, reading.max_bytes, *reading.columns):
        with contextlib.suppress(Unusable):
          yield example_of(shard, key, files, reading)
    except DamagedShard as error:
      raise RunError(f"{error} The shard is damaged: copy it again.") from error
    except stores.Unreadable as error:
      raise RunError(f"{error} The same command continues.") from error

  def _reading(self, trains: bool) -> Reading:
    data, names = self.config.data, self.class_names
    classes = None if names is None else len(names)
    return Reading(
      Wanted(bool(data.text_key), data.caption_key, classes, trains),
      tuple(tuple(collate.prompts(data.templates, name)) for name in names or ()),
      data.max_member_bytes,
      self._columns,
      data.block,
      data.unreadable == "skip",
    )

  @property
  def _columns(self) -> tuple[str, str]:
    """The columns of a csv; by default those of open_clip."""
    data = self.config.data
    image = "filepath" if data.image_key == DataConfig.image_key else data.image_key
    return image, data.caption_key or "title"

  def _digest(self) -> str:
    return _digest(f"{each.weight:g} {shard}" for each in self.sets for shard in each.shards)

  def _streams(self, process_count: int) -> int:
    """The number of streams, which does not depend on that of the processes.

    Raises:
      ValueError: it does not go with the shards, the batch or the processes.
    """
    batch, asked = self.config.batch_size, self.config.data.streams
    few = min(self.sets, key=lambda each: len(each.shards)).shards
    found = asked or min(_MOST_STREAMS, batch & -batch, 1 << (len(few).bit_length() - 1))
    fits = [n for n in range(1, batch + 1) if batch % n == 0 and n % process_count == 0]
    if found > len(few) or found not in fits:
      fits = [n for n in fits if n <= len(few)]
      nearest = min(fits, key=lambda n: abs(n - found), default=None)
      advice = f"set data.streams={nearest}" if nearest else "make more and smaller shards"
      raise ValueError(
        f"data.streams={found} must divide batch_size={batch}, be a multiple of the"
        f" {process_count} processes, and at most the {len(few)} shards of a set, such as"
        f" {few[0]}: {advice}."
      )
    return found


def open_streamed(config: Config) -> Streamed | None:
  """The shards that the config names, if it streams them.

  Raises:
    ValueError, RunError: there are none, or the config asks for something else of them.
  """
  data = config.data
  if not data.stream:
    return None
  if not data.train_shards:
    raise ValueError("data.stream=true needs data.train_shards, the shards to read.")
  collate.check_captions(data)
  parts = data.train_shards.split("::") if data.weights else [data.train_shards]
  weights = data.weights or (1.0,)
  if len(parts) != len(weights):
    raise ValueError(
      f"data.weights={weights} are {len(weights)} numbers, and data.train_shards="
      f"{data.train_shards!r} are {len(parts)} sets, joined by '::': give each set a weight."
    )
  sets = tuple(
    ShardSet(tuple(stores.expand(part, data.root)), weight)
    for part, weight in zip(parts, weights, strict=True)
  )
  evaluated = tuple(stores.expand(data.eval_shards, data.root)) if data.eval_shards else ()
  trained = {shard for each in sets for shard in each.shards}
  for shard in {os.path.splitext(shard)[1]: shard for shard in (*trained, *evaluated)}.values():
    formats.kind(shard)  # Another ending fails now, and not hours later.
  if shared := trained & set(evaluated):
    raise ValueError(
      f"data.train_shards={data.train_shards!r} and data.eval_shards={data.eval_shards!r} both name"
      f" {min(shared)}: an evaluation would score what was trained on."
    )
  return Streamed(config, sets, evaluated, _class_names(config))


def _class_names(config: Config) -> list[str] | None:
  data = config.data
  if not data.label_key:
    return None
  if not data.class_names:
    raise ValueError(
      "data.stream with data.label_key needs data.class_names, a file with the name of each class:"
      " what labels there are is not known before all shards were read."
    )
  try:
    return read_class_names(local_path(data.root, "data.root") / data.class_names)
  except FileNotFoundError as error:
    raise ValueError(f"No file data.class_names={data.class_names!r}.") from error


def _digest(names) -> str:
  digest = hashlib.sha256()
  for name in names:
    digest.update(name.encode(errors="surrogateescape") + b"\0")
  return digest.hexdigest()[:16]
