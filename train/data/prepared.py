"""Prepared data: records on disk, read at random by grain.

The stream is a function of (seed, position). Each epoch is a new permutation of the data, cut into
batches of `config.batch_size`; the remainder is dropped, so no batch holds a pair twice. Each batch
is split over the processes. The number of workers or processes does not change the batches, and the
position is one number, so a run resumes exactly, even on another machine.
"""

import contextlib
import functools
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np
import tensorflow_datasets as tfds
from jax.sharding import Mesh
from tensorflow_datasets.proto import tf_example_pb2

from train.config import Config
from train.data import collate
from train.data.augment import CentreCrop, RandomCrop
from train.data.builders import feature, prepare, unreadable
from train.data.decode import Limits
from train.data.machine import cores
from train.data.records import Records
from train.data.tokenizer import Tokenizer
from train.data.workers import in_workers, worker_died
from train.errors import RunError
from train.parallel.sharding import rows_to_devices


class Prepared(NamedTuple):
  """A data set on disk, as TFDS describes it."""

  config: Config
  builder: tfds.core.DatasetBuilder

  @property
  def full_name(self) -> str:
    return self.builder.info.full_name

  @property
  def class_names(self) -> list[str] | None:
    key = self.config.data.label_key
    if not key:
      return None
    # An import has its names here, since TFDS's feature has no two equal ones.
    metadata = dict(self.builder.info.metadata or {})
    return metadata.get("source", {}).get("class_names") or list(feature(self.builder, key).names)

  def identity(self) -> dict[str, object]:
    """Features, and for each split its sizes and a digest of the beginning of each file."""
    names = ("features.json", "*.labels.txt")
    found: dict[str, object] = {}
    found["the digest of its features"] = _digest(
      path for name in names for path in sorted(self.builder.data_path.glob(name))
    )
    for name, split in self.builder.info.splits.items():
      sizes = [os.path.getsize(path) for path in split.filepaths]
      found[f"its split {name} (examples, files, bytes, digest)"] = [
        *(split.num_examples, len(sizes), sum(sizes)),
        _digest(split.filepaths),
      ]
    return found

  def size(self, split: str) -> int:
    splits = self.builder.info.splits
    if split.partition("[")[0] not in splits:  # "train[:90%]" is a split, too.
      raise ValueError(f"{self.full_name} has no split {split!r}: it has {', '.join(splits)}.")
    try:
      return max(0, splits[split].num_examples)  # Less in train[5:3].
    except (ValueError, AssertionError, KeyError, NotImplementedError) as error:
      reason = str(error).partition("\n")[0].rstrip(".")
      raise ValueError(
        f"{self.full_name} has no split {split!r}: {reason}. A part is written as train[:90%] or"
        " train[100:]."
      ) from error

  def captions(self) -> Iterator[str]:
    if self.config.data.text_key:
      examples = _Examples(self, self.config.data.train_split)
      for i in range(len(examples)):
        yield from examples[i]["captions"]
    else:
      for name in self.class_names:
        yield from collate.prompts(self.config.data.templates, name)

  def train_iterator(
    self,
    tokenizer: Tokenizer,
    *,
    image_size: int,
    context_length: int,
    process_index: int = 0,
    process_count: int = 1,
    **_,
  ) -> grain.DatasetIterator:
    """This process's share of every batch: its rows of what `to_devices` gives."""
    tokenize = collate.Tokenize(tokenizer, context_length)
    share = slice(process_index, None, process_count)
    return _Batches(self, functools.partial(_train_batches, self, tokenize, image_size, share))

  def to_devices(self, mesh: Mesh, **_) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return rows_to_devices(mesh)

  def eval_batches(
    self, split: str, *, image_size: int, batch_size: int
  ) -> Iterator[dict[str, Any]]:
    batches = (
      grain.MapDataset.source(_Examples(self, split))
      .map(CentreCrop(image_size, Limits.of(self.config.data)))
      .batch(batch_size, batch_fn=collate.stack)
      .to_iter_dataset(_threads(self.config.data.prefetch))
    )
    with contextlib.closing(iter(batches)) as iterator:
      yield from iterator


def open_prepared(config: Config) -> Prepared:
  """The data set that the config names, which is built if it is missing."""
  return Prepared(config, prepare(config.data))


def _digest(paths: Iterable[os.PathLike]) -> str:
  digest = hashlib.sha256()
  for path in paths:
    with open(path, "rb") as file:
      digest.update(file.read(1 << 16))
  return digest.hexdigest()[:12]


def _train_batches(
  source: Prepared,
  tokenize: collate.Tokenize,
  image_size: int,
  share: slice,  # of the batches of all processes
  split: str,
) -> grain.MapDataset:
  """This process's share of the batches of a split, again and again."""
  config, examples = source.config, _Examples(source, split)
  batch_size, count = config.batch_size, len(examples)
  if batch_size % share.step:
    raise ValueError(f"{batch_size=} is not a multiple of process_count={share.step}.")
  if batch_size > count:
    raise ValueError(
      f"{batch_size=} is more than the {count} examples of {config.data.name} "
      f"{config.data.train_split}: a batch holds a pair at most once."
    )
  return (
    grain.MapDataset.source(examples)
    .seed(config.seed)
    .shuffle()
    # Before the split over processes, so that random numbers depend on the position only.
    .random_map(
      RandomCrop(
        image_size, tuple(config.data.crop_scale), config.data.flip, Limits.of(config.data)
      )
    )
    .slice(slice(count // batch_size * batch_size))
    .batch(batch_size // share.step, batch_fn=tokenize)
    # In the order of processes, their shares are the rows of the batch of a single process.
    .slice(share)
    .repeat()
  )


def _extent(builder: tfds.core.DatasetBuilder, split: str) -> dict[str, Any]:
  """What a run's examples are, though further shards may be imported later.

  {"split": with the numbers of its first and last example, "shards": of an import, how many,
  "checksum": of them}
  """
  (part,) = tfds.core.ReadInstruction.from_spec(split).to_absolute(builder.info.splits)
  shards = _shards(builder, part.splitname)
  last = builder.info.splits[part.splitname].num_examples if part.to is None else part.to
  where = f"{part.splitname}[{part.from_ or 0}:{last}]"
  return {"split": where, "shards": len(shards), "checksum": _checksum(shards)}


def _shards(builder: tfds.core.DatasetBuilder, split: str) -> list:
  source = dict(builder.info.metadata or {}).get("source", {})
  # The name, which may have folders, the size and, of newer imports, the time and a checksum.
  entries = source.get("shards", {}).get(split, [])
  return [[os.path.basename(entry[0]), entry[1], *entry[3:]] for entry in entries]


def _checksum(shards: Sequence) -> int:
  return zlib.crc32(json.dumps(shards).encode())


class _Examples:
  """A split as a sequence of {"where", "image": bytes, "captions": list of str, "label": int}."""

  def __init__(self, source: Prepared, split: str):
    source.size(split)  # Raises an error that names the splits.
    self._config, self._split, self._folder = source.config, split, source.builder.data_dir
    self._names = source.class_names
    # Raw records: tfds takes longer to decode a record than ArrayRecord takes to read it.
    self._records = Records(source.builder, split)

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, index: int) -> dict[str, Any]:
    keys, where = self._config.data, f"{self._config.data.name} {self._split}[{index}]"
    try:
      record = tf_example_pb2.Example.FromString(self._records[index]).features.feature
      image = _only(record[keys.image_key].bytes_list, keys.image_key)
      label = _only(record[keys.label_key].int64_list, keys.label_key) if keys.label_key else -1
      if keys.text_key:
        texts = record[keys.text_key].bytes_list.value
        texts = [text.decode("utf-8", errors="replace") for text in texts]
      else:
        texts = collate.prompts(keys.templates, self._names[label]) if label >= 0 else []
    except Exception as error:  # ArrayRecord and protobuf have their own kinds.
      raise unreadable(f"Record {where}", self._folder, error) from error
    if not texts and (label < 0 or self._split == keys.train_split):
      raise ValueError(f"{where} has no caption.")
    return {
      "where": where,
      "image": image,
      "captions": texts,
      "label": label,
    }


def _only(values: Any, key: str) -> Any:
  if len(values.value) != 1:
    raise ValueError(f"its {key} has {len(values.value)} values")
  return values.value[0]


def _threads(ahead: int) -> grain.ReadOptions:
  """Reads with threads of this process, one batch a thread, up to `ahead` batches ahead."""
  return grain.ReadOptions(num_threads=min(ahead, cores()), prefetch_buffer_size=ahead)


class _Batches(grain.DatasetIterator):
  """Iterates over an endless MapDataset of batches; its state is the number of batches given."""

  def __init__(self, source: Prepared, make: Callable[[str], grain.MapDataset]):  # of a split
    super().__init__()
    self._given = 0
    # Before what may raise: grain closes what it deletes.
    self._iterator: grain.DatasetIterator | None = None
    data = source.config.data
    self._source, self._workers, self._ahead = source, data.workers, data.prefetch
    self._make, self._batches = make, make(data.train_split)
    self._extent = _extent(source.builder, data.train_split)

  def start_prefetch(self) -> None:
    if self._iterator is None:
      self._iterator = iter(self._from(self._given))
      self._iterator.start_prefetch()

  def _from(self, first: int) -> grain.IterDataset:
    batches = self._batches.slice(slice(first, None))
    if not self._workers:
      return batches.to_iter_dataset(_threads(self._ahead))
    # One thread in each worker is enough, since the workers run in parallel.
    dataset = batches.to_iter_dataset(_threads(1))
    return in_workers(dataset, self._workers, self._ahead // self._workers)

  def __next__(self) -> dict[str, np.ndarray]:
    self.start_prefetch()
    with worker_died(self._workers):
      batch = next(self._iterator)
    self._given += 1
    # Copies out of the workers' shared memory. grain frees that with its arrays: late, at exit.
    return {name: np.array(values) for name, values in batch.items()} if self._workers else batch

  def get_state(self) -> dict[str, Any]:
    return {"batches": self._given, "data": self._extent}

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on with the examples of then, also if further shards have been imported since."""
    self.close()
    self._given = state["batches"]
    before = state.get("data", self._extent)  # Older checkpoints do not have it.
    if before == self._extent:
      return
    name, split = self._source.full_name, before["split"]
    shards = _shards(self._source.builder, split.partition("[")[0])
    if _checksum(shards[: before["shards"]]) != before["checksum"]:
      raise RunError(
        f"{name} has other shards, or others first, than those that this run began with: it was"
        " imported again. Choose a new --workdir, or bring back the data set of then."
      )
    self._batches, self._extent = self._make(split), before
    print(f"{name} has grown: this run goes on with {split}, with which it began.", flush=True)

  def close(self) -> None:
    """Ends the threads or processes; `next` starts them again."""
    if self._iterator is not None:
      self._iterator.close()
      self._iterator = None
