"""The interface of a data set, and the formats that implement it.

A new format is a file with a class of these methods and a function that opens it, and a line in
`_FORMATS`. An evaluation also reads folders as CLIP_benchmark has them (train/data/wds_folder.py).
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import grain
from jax.sharding import Mesh

from train.config import Config
from train.data import prepared
from train.data.scenes import scenes
from train.data.stream import source as stream
from train.data.tokenizer import Tokenizer
from train.data.wds_folder import EVAL_SPLIT, WdsFolder, open_folder
from train.errors import RunError
from train.paths import local_path


class Source(Protocol):
  """The data set of a run, as its config reads it."""

  @property
  def full_name(self) -> str:
    """The name of the data set, with its version if it has one."""

  @property
  def class_names(self) -> list[str] | None:
    """Names of the classes in label order; None if the config names no label."""

  def identity(self) -> dict[str, object]:
    """What tells it from another data set of its name, in words; it takes no time."""

  def size(self, split: str) -> int | None:
    """How many examples a split has, or a part of one; None: it has no end.

    Raises:
      ValueError: there is no such split, or part.
    """

  def captions(self) -> Iterator[str]:
    """All captions of the train split, or all words of them: a tokenizer is made of these."""

  def train_iterator(
    self,
    tokenizer: Tokenizer,
    *,
    image_size: int,
    context_length: int,
    process_index: int = 0,
    process_count: int = 1,
    workdir: Path | None = None,
  ) -> grain.DatasetIterator:
    """This process's items, one for each step, without end, for `to_devices`.

    Its state is small and JSON. A process may have a part of it, which
    `train.data.stream.batches.merged` joins. Each epoch
    draws crop, flip and one of the captions anew.

    workdir: for a list of samples that cannot be used, if a run finds them as it reads.
    """

  def to_devices(
    self, mesh: Mesh, *, image_size: int, context_length: int
  ) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A function from an item of `train_iterator` to the batch of all processes, on a mesh.

    {"image": uint8 [B, image_size, image_size, 3], "text": int32 [B, context_length]}.
    """

  def eval_batches(
    self, split: str, *, image_size: int, batch_size: int
  ) -> Iterator[dict[str, Any]]:
    """The split once, in its order; the last batch may be smaller.

    {"image": uint8 [b, image_size, image_size, 3], "captions": b lists of str,
    "label": int32 [b], -1 where unknown}.
    """


# From a config to its Source, or to None if it names a data set of another format. The last one
# takes all that are left.
_FORMATS: tuple[Callable[[Config], Source | None], ...] = (
  scenes.open_scenes,
  stream.open_streamed,
  prepared.open_prepared,
)


def open_source(config: Config) -> Source:
  """The data set of a config; it is prepared first if it is missing.

  Raises:
    ValueError, RunError: there is none, or it is damaged.
  """
  return next(source for opens in _FORMATS if (source := opens(config)) is not None)


def check_split(source: Source, split: str) -> None:
  """Raises a ValueError if `split` is no split of the data set, or a wrong or empty part of one."""
  if source.size(split) == 0:
    raise ValueError(f"The part {split!r} of {source.full_name} has no example.")


def check_eval_splits(source: Source, splits: list[str]) -> None:
  """Checks each split; refuses a split without end, too, and two parts of one split."""
  for split in splits:
    try:
      check_split(source, split)
    except ValueError as error:
      raise ValueError(f'{error} data.eval_split="" is no evaluation.') from error
    if source.size(split) is None:
      raise ValueError(f"data.eval_split: {split!r} of {source.full_name} has no end.")
  names = [split.partition("[")[0] for split in splits]
  if len(set(names)) < len(names):  # Scores are named by their split.
    raise ValueError(f"data.eval_split={','.join(splits)!r} has two parts of one split.")


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
