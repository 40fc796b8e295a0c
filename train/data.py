"""Image-text batches: prepared data sets, read at random by grain.

The stream is a function of (seed, position). Each epoch is a new permutation of the data, cut into
batches of `config.batch_size`; the remainder is dropped, so no batch holds a pair twice. Each batch
is split over the processes. The number of workers or processes does not change the batches, and the
position is one number, so a run resumes exactly, even on another machine.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np
import tensorflow_datasets as tfds
from absl import flags
from jax.sharding import Mesh
from tensorflow_datasets.proto import tf_example_pb2

from train.augment import CentreCrop, RandomCrop
from train.batches import prepared
from train.config import Config
from train.datasets import pictures
from train.datasets.pictures import Limits
from train.datasets.prepared import feature, prepare, unreadable
from train.datasets.records import Records
from train.datasets.scenes import Scenes, Steps, make_train_drawing
from train.datasets.scenes_words import WORDS
from train.datasets.wds_folder import EVAL_SPLIT, WdsFolder, open_folder
from train.errors import RunError
from train.machine import cores, describe_exit
from train.paths import local_path
from train.sharding import batch_sharding
from train.tokenizer import Tokenizer

__all__ = [
  "captions",
  "check_eval_splits",
  "check_split",
  "class_names",
  "eval_batches",
  "eval_folders",
  "eval_splits",
  "folder_batches",
  "full_name",
  "identity",
  "prefetch_to_device",
  "prepare",
  "to_devices",
  "train_iterator",
]


_PATIENCE = 5.0  # seconds for workers to end
# Prepared records, or scenes to draw.
Source = tfds.core.DatasetBuilder | Scenes


def full_name(builder: Source) -> str:
  """The name of the data set, with its version if it is prepared."""
  return builder.full_name if isinstance(builder, Scenes) else builder.info.full_name


def identity(builder: Source) -> dict[str, object]:
  """What tells two data sets apart: name, features, and for each split its sizes and a digest.

  The digest is of the beginning of each file, so that it takes no time.
  """
  found: dict[str, object] = {"the data set": full_name(builder)}
  if isinstance(builder, Scenes):
    return found
  names = ("features.json", "*.labels.txt")
  found["the digest of its features"] = _digest(
    path for name in names for path in sorted(builder.data_path.glob(name))
  )
  for name, split in builder.info.splits.items():
    sizes = [os.path.getsize(path) for path in split.filepaths]
    found[f"its split {name} (examples, files, bytes, digest)"] = [
      *(split.num_examples, len(sizes), sum(sizes)),
      _digest(split.filepaths),
    ]
  return found


def _digest(paths: Iterable[os.PathLike]) -> str:
  digest = hashlib.sha256()
  for path in paths:
    with open(path, "rb") as file:
      digest.update(file.read(1 << 16))
  return digest.hexdigest()[:12]


def class_names(config: Config, builder: Source) -> list[str] | None:
  """Names of the classes in label order; None if the config names no label."""
  key = config.data.label_key
  if isinstance(builder, Scenes):
    return builder.class_names if key else None
  if not key:
    return None
  # An import keeps its names here, since TFDS's feature has no two equal ones.
  metadata = dict(builder.info.metadata or {})
  return metadata.get("source", {}).get("class_names") or list(feature(builder, key).names)


def captions(config: Config, builder: Source) -> Iterator[str]:
  """All captions of the train split; of scenes all words, in the order of their ids."""
  if isinstance(builder, Scenes):
    yield from WORDS
  elif config.data.text_key:
    examples = _Examples(config, builder, config.data.train_split)
    for i in range(len(examples)):
      yield from examples[i]["captions"]
  else:
    for name in class_names(config, builder):
      yield from _prompts(config, name)


def train_iterator(
  config: Config,
  builder: Source,
  tokenizer: Tokenizer,
  *,
  image_size: int,
  context_length: int,
  process_index: int = 0,
  process_count: int = 1,
) -> grain.DatasetIterator:
  """This process's share of every batch, without end.

  {"image": uint8 [b, image_size, image_size, 3], "text": int32 [b, context_length]}, with
  b = batch_size / process_count. Each epoch draws crop, flip and one of the captions anew.
  Of scenes it is only the number of each step; `to_devices` draws the batch.
  """
  if isinstance(builder, Scenes):
    builder.check_tokenizer(tokenizer)
    return Steps()
  check_split(builder, config.data.train_split)
  make = functools.partial(
    _train_batches,
    config,
    builder,
    _Tokenize(tokenizer, context_length),
    image_size,
    slice(process_index, None, process_count),
  )
  return _Batches(make, builder, config.data.train_split, config.data.workers, config.data.prefetch)


def _train_batches(
  config: Config,
  builder: tfds.core.DatasetBuilder,
  tokenize: "_Tokenize",
  image_size: int,
  share: slice,  # of the batches of all processes
  split: str,
) -> grain.MapDataset:
  """This process's share of the batches of a split, again and again."""
  examples = _Examples(config, builder, split)
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


def to_devices(
  config: Config, builder: Source, mesh: Mesh, *, image_size: int, context_length: int
) -> Any:
  """What brings the items of `train_iterator` to a mesh: the `put` of `prefetch_to_device`."""
  if not isinstance(builder, Scenes):
    return batch_sharding(mesh)
  return make_train_drawing(
    builder,
    mesh,
    seed=config.seed,
    batch_size=config.batch_size,
    image_size=image_size,
    context_length=context_length,
  )


def eval_batches(
  config: Config,
  builder: Source,
  split: str,
  *,
  image_size: int,
  batch_size: int,
) -> Iterator[dict[str, Any]]:
  """The split once, in its order; the last batch may be smaller.

  {"image": uint8 [b, image_size, image_size, 3], "captions": b lists of str,
  "label": int32 [b], -1 where unknown}.
  """
  if isinstance(builder, Scenes):
    yield from builder.eval_batches(split, image_size, batch_size)
    return
  batches = (
    grain.MapDataset.source(_Examples(config, builder, split))
    .map(CentreCrop(image_size, Limits.of(config.data)))
    .batch(batch_size, batch_fn=_stack)
    .to_iter_dataset(_threads(config.data.prefetch))
  )
  with contextlib.closing(iter(batches)) as iterator:
    yield from iterator


def prefetch_to_device(
  iterator: grain.DatasetIterator, put: Any, size: int
) -> Iterator[tuple[Any, dict[str, Any]]]:
  """Yields (batch on its devices, the state of `iterator` after it), prefetched by `size` batches.

  A thread fetches batches and copies them to devices. Its errors are raised here. Closing the
  generator ends the thread and closes `iterator`; workers that do not end in time are killed.

  Args:
    iterator: gives this process's share of each batch.
    put: the jax.sharding.Sharding of the global batch, or a function of the host's batch.
    size: batches ahead; 0: no thread.
  """
  if not callable(put):
    put = _ToSharding(put)
  on_device = _OnDevice(iterator, put)
  ahead = grain.experimental.ThreadPrefetchDatasetIterator(on_device, size)
  before = multiprocessing.active_children()
  try:
    for batch in ahead:
      yield batch, ahead.get_state()
  finally:
    # A worker that hangs would hold the thread, which waits for its batch.
    killing = threading.Timer(_PATIENCE, _kill_children, [before])
    killing.start()
    ahead.close()
    killing.cancel()


def _kill_children(but: Sequence[multiprocessing.process.BaseProcess]) -> None:
  for child in multiprocessing.active_children():
    if child not in but:
      child.kill()


def eval_splits(config: Config) -> list[str]:
  """The splits that an evaluation scores; there may be none."""
  return config.data.eval_split.split(",") if config.data.eval_split else []


def eval_folders(config: Config) -> list[WdsFolder]:
  """The folders that an evaluation scores besides.

  Raises:
    RunError: one cannot be scored, or has the name of another.
  """
  root = local_path(config.data.root, "data.root")
  folders = [open_folder(root / path, "data.eval_data") for path in config.data.eval_data]
  names = [folder.path.name for folder in folders]
  if len({*names, *eval_splits(config)}) < len(names) + len(eval_splits(config)):
    raise RunError(
      f"data.eval_data={config.data.eval_data!r}: the folders need names of their own, other than"
      f" those of data.eval_split={config.data.eval_split!r}: their scores have them."
    )
  for folder in folders:
    folder.shards(EVAL_SPLIT)
  return folders


def folder_batches(
  config: Config, folder: WdsFolder, *, image_size: int, batch_size: int
) -> Iterator[dict[str, Any]]:
  """The test split of a folder, as `eval_batches`, with the pixels that CLIP_benchmark sees."""
  limits = Limits.of(config.data)
  crop = CentreCrop(image_size, limits, decode=pictures.decode_plainly)
  return prepared(folder.examples(EVAL_SPLIT, limits), crop, batch_size)


def check_eval_splits(builder: Source, splits: Sequence[str]) -> None:
  """Checks each split; refuses a split without end, too, and two parts of one split."""
  for split in splits:
    try:
      check_split(builder, split)
    except ValueError as error:
      raise ValueError(f'{error} data.eval_split="" is no evaluation.') from error
    if isinstance(builder, Scenes) and not builder.size(split):
      raise ValueError(f"data.eval_split: {split!r} of {builder.full_name} has no end.")
  names = [split.partition("[")[0] for split in splits]
  if len(set(names)) < len(names):  # Scores are named by their split.
    raise ValueError(f"data.eval_split={','.join(splits)!r} has two parts of one split.")


def check_split(builder: Source, split: str) -> None:
  """Raises a ValueError if `split` is no split of the data set, or a wrong or empty part of one."""
  if isinstance(builder, Scenes):
    return builder.check_split(split)
  name = builder.info.full_name
  if split.partition("[")[0] not in builder.info.splits:  # "train[:90%]" is a split, too.
    there = ", ".join(builder.info.splits)
    raise ValueError(f"{name} has no split {split!r}: it has {there}.")
  try:
    is_empty = builder.info.splits[split].num_examples < 1
  except (ValueError, AssertionError, KeyError, NotImplementedError) as error:
    reason = str(error).partition("\n")[0].rstrip(".")
    raise ValueError(
      f"{name} has no split {split!r}: {reason}. A part is written as train[:90%] or train[100:]."
    ) from error
  if is_empty:
    raise ValueError(f"The part {split!r} of {name} has no example.")


class _Examples:
  """A split as a sequence of {"where", "image": bytes, "captions": list of str, "label": int}."""

  def __init__(self, config: Config, builder: tfds.core.DatasetBuilder, split: str):
    check_split(builder, split)
    self._config, self._split, self._folder = config, split, builder.data_dir
    self._names = class_names(config, builder)
    # Raw records: tfds takes longer to decode a record than ArrayRecord takes to read it.
    self._records = Records(builder, split)

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
        texts = _prompts(self._config, self._names[label]) if label >= 0 else []
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


def _prompts(config: Config, name: str) -> list[str]:
  return [template.replace("{}", name) for template in config.data.templates]


@dataclasses.dataclass(frozen=True)
class _Tokenize:
  """Makes a batch: stacks the images and tokenizes the captions."""

  tokenizer: Tokenizer
  context_length: int

  def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    return {
      "image": np.stack([example["image"] for example in examples]),
      "text": self.tokenizer([example["caption"] for example in examples], self.context_length),
    }


def _stack(examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
  return {
    "image": np.stack([example["image"] for example in examples]),
    "captions": [example["captions"] for example in examples],
    "label": np.array([example["label"] for example in examples], np.int32),
  }


def _threads(ahead: int) -> grain.ReadOptions:
  """Reads with threads of this process, one batch a thread, up to `ahead` batches ahead."""
  return grain.ReadOptions(num_threads=min(ahead, cores()), prefetch_buffer_size=ahead)


class _Batches(grain.DatasetIterator):
  """Iterates over an endless MapDataset of batches; its state is the number of batches given."""

  def __init__(
    self,
    make: Callable[[str], grain.MapDataset],  # of a split
    builder: tfds.core.DatasetBuilder,
    split: str,
    workers: int,
    ahead: int,
  ):
    super().__init__()
    self._given = 0
    # Before what may raise: grain closes what it deletes.
    self._iterator: grain.DatasetIterator | None = None
    self._make, self._builder, self._extent = make, builder, _extent(builder, split)
    self._batches, self._workers, self._ahead = make(split), workers, ahead

  def start_prefetch(self) -> None:
    if self._iterator is None:
      self._iterator = iter(self._from(self._given))
      self._iterator.start_prefetch()

  def _from(self, first: int) -> grain.IterDataset:
    batches = self._batches.slice(slice(first, None))
    if not self._workers:
      return batches.to_iter_dataset(_threads(self._ahead))
    if not flags.FLAGS.is_parsed():  # grain's workers read flags; absl's `app.run` parses them.
      flags.FLAGS.mark_as_parsed()
    # One thread in each worker is enough, since the workers run in parallel.
    return batches.to_iter_dataset(_threads(1)).mp_prefetch(
      grain.MultiprocessingOptions(
        num_workers=self._workers,
        per_worker_buffer_size=max(1, self._ahead // self._workers),
      ),
      worker_init_fn=_leave_the_accelerator,
    )

  def __next__(self) -> dict[str, np.ndarray]:
    self.start_prefetch()
    try:
      batch = next(self._iterator)
    except RuntimeError as error:
      code = re.search(r"Worker process was terminated .* exit code (-?\d+)", str(error))
      if not code:
        raise
      raise RunError(
        f"A worker process that loads data {_describe_end(int(code[1]), self._workers)} The same"
        " command continues."
      ) from error
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
    name, split = full_name(self._builder), before["split"]
    shards = _shards(self._builder, split.partition("[")[0])
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


def _describe_end(code: int, workers: int) -> str:
  """How a worker ended, and what would need less memory or less of /dev/shm, where batches pass."""
  if -code not in (signal.SIGKILL, signal.SIGBUS):
    return f"{describe_exit(code)}."
  room = shutil.disk_usage("/dev/shm").total / 1e6
  return (
    f"{describe_exit(code)}. Fewer data.workers (now {workers}) and a smaller data.prefetch take"
    f" less; /dev/shm has {room:,.0f} MB, and data.workers=0 takes nothing there."
  )


def _leave_the_accelerator(worker: int, workers: int) -> None:
  """Keeps JAX in a worker off the GPU."""
  jax.config.update("jax_platforms", "cpu")


@dataclasses.dataclass(frozen=True)
class _ToSharding:
  sharding: Any

  def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
    put = jax.make_array_from_process_local_data
    return {name: put(self.sharding, values) for name, values in batch.items()}


class _OnDevice(grain.DatasetIterator):
  """Applies `put` to each batch."""

  def __init__(self, iterator: grain.DatasetIterator, put: Callable):
    super().__init__(iterator)
    self._put = put

  def __next__(self) -> Any:
    return self._put(next(self._parent))

  def get_state(self) -> dict[str, Any]:
    return self._parent.get_state()

  def set_state(self, state: dict[str, Any]) -> None:
    self._parent.set_state(state)

  def close(self) -> None:
    self._parent.close()
