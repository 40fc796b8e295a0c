"""Labelled or captioned data to evaluate on, as CLIP_benchmark keeps it.

A folder `wds_<name>` holds shards of each split and the files that a zero-shot evaluation needs
(https://github.com/LAION-AI/CLIP_benchmark, `build_wds_dataset`):

    classnames.txt                          a class a line, in the order of the labels
    zeroshot_classification_templates.txt   a prompt a line, with {c} for the name of the class
    dataset_type.txt                        "retrieval"; without it: classification
    test/nshards.txt test/0.tar test/1.tar  samples of an image and its cls, or its txt with a
                                            caption a line
"""

import collections
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from train.data import decode, sample, tar_shards
from train.data.augment import CentreCrop, Squash
from train.data.classes import check_labels, read_class_names
from train.data.decode import DEFAULT_LIMITS, Limits
from train.data.eval_batches import decoded
from train.data.text_files import read_lines
from train.errors import RunError
from train.paths import local_path

EVAL_SPLIT = "test"
CLASSIFICATION, RETRIEVAL = "zeroshot_classification", "zeroshot_retrieval"
_CLASSES, _TEMPLATES = "classnames.txt", "zeroshot_classification_templates.txt"
_HOLDS = {
  _CLASSES: "the name of a class on each line, in the order of the labels",
  _TEMPLATES: 'a prompt on each line, such as "a photo of a {c}."',
}


class WdsFolder(NamedTuple):
  path: Path
  task: str  # CLASSIFICATION or RETRIEVAL
  class_names: list[str]  # [] for retrieval
  templates: list[str]  # likewise; with {} for the name of the class

  @property
  def name(self) -> str:
    """As CLIP_benchmark names it: "wds/cifar10"."""
    name = self.path.name
    return f"wds/{name.removeprefix('wds_')}" if name.startswith("wds_") else name

  def shards(self, split: str) -> list[Path]:
    """The shards of a split in their order.

    Raises:
      RunError: there is none, or nshards.txt names more.
    """
    folder = self.path / split
    found = {}
    for path in [*folder.glob("*.tar"), *folder.glob("*.tar.gz")]:
      stem = path.name.partition(".")[0]
      if stem in found:
        raise RunError(f"{found[stem]} and {path.name} are both there: remove one of them.")
      found[stem] = path
    counted = folder / "nshards.txt"
    numbers = sorted(int(stem) for stem in found if stem.isdecimal())
    if counted.is_file():
      text = "".join(read_lines(counted))
      if not text.isdecimal():
        raise RunError(f"{counted} holds {text!r}: it should hold the number of shards.")
      wanted = [str(i) for i in range(int(text))]
    elif len(numbers) == len(found):
      wanted = [str(i) for i in range(max(numbers, default=-1) + 1)]
    else:
      wanted = sorted(found, key=lambda stem: (len(stem), stem))
    missing = [stem for stem in wanted if stem not in found]
    if extra := sorted(found.keys() - wanted, key=lambda stem: (len(stem), stem)):
      raise RunError(
        f"{found[extra[0]]} is one of {len(found)} shards, and {counted} says that there are"
        f" {len(wanted)}: correct it, or remove {len(extra)} of them."
      )
    if missing or not wanted:
      splits = sorted(path.parent.name for path in self.path.glob("*/*0.tar*"))
      raise RunError(
        f"{folder / (missing or ['0'])[0]}.tar is missing: it should hold samples of the split"
        f" {split!r}. {self.path} has {', '.join(splits) or 'no split'}."
      )
    return [found[stem] for stem in wanted]

  def examples(self, split: str, limits: Limits = DEFAULT_LIMITS) -> Iterator[dict[str, Any]]:
    """{"where", "image": bytes, "captions": texts or [], "label": int or -1}, in their order.

    Raises:
      RunError: a sample or a shard is damaged. None is left out: the score would be another.
    """
    for shard in self.shards(split):
      for key, files in tar_shards.checked_samples(str(shard), limits.member_bytes):
        example = self._example(f"{shard}: {key}", files, limits)
        if self.task == CLASSIFICATION and example["label"] >= len(self.class_names):
          self._refuse_labels(split, limits)
        yield example

  def batches(
    self,
    split: str,
    crop: CentreCrop | Squash,
    batch_size: int,
    limits: Limits = DEFAULT_LIMITS,
  ) -> Iterator[dict[str, Any]]:
    """The examples in batches (eval_batches.py), with the pixels that CLIP_benchmark sees."""
    crop = dataclasses.replace(crop, limits=limits, decode=decode.plainly)
    return decoded(self.examples(split, limits), crop, batch_size)

  def _example(self, where: str, files: sample.Files, limits: Limits) -> dict[str, Any]:
    label, captions = -1, []
    try:
      image = sample.image(files)
      if self.task == RETRIEVAL:
        captions, _ = sample.captions(files)
      else:
        label = sample.label(files)
        if label < 0:
          raise sample.Unusable("label out of range", str(label))
    except sample.Unusable as error:
      wanted = sample.wanted(self.task == RETRIEVAL, self.task == CLASSIFICATION)
      reason = str(error).replace("data.max_", f"{limits.given_by}max_")
      raise RunError(f"{where} must have {wanted}: {reason}.") from error
    return {"where": where, "image": image, "captions": captions, "label": label}

  def _refuse_labels(self, split: str, limits: Limits) -> None:
    """Raises the RunError of a split with a label beyond the names; counts all labels for it."""
    counts = collections.Counter(
      self._example(f"{shard}: {key}", files, limits)["label"]
      for shard in self.shards(split)
      for key, files in tar_shards.checked_samples(str(shard), limits.member_bytes)
    )
    check_labels(counts, len(self.class_names), self.path / split, self.path / _CLASSES)


def open_folder(path: str | Path, what: str = "--data") -> WdsFolder:
  """The data set in a folder, which the flag or field `what` names.

  Raises:
    RunError: a file is missing or holds something else; the message says what it should hold.
  """
  path = local_path(path, what).absolute()
  if not path.is_dir():
    raise RunError(f"{path} is no folder: {what} needs folders as CLIP_benchmark keeps them.")
  kind = path / "dataset_type.txt"
  kind = "".join(read_lines(kind)).lower() if kind.is_file() else "classification"
  if kind == "retrieval":
    return WdsFolder(path, RETRIEVAL, [], [])
  if kind != "classification":
    raise RunError(
      f"{path / 'dataset_type.txt'} holds {kind!r}: only 'classification' and 'retrieval' can be"
      " evaluated."
    )
  for name, holds in _HOLDS.items():
    if not (path / name).is_file():
      raise RunError(f"{path / name} is missing: it should hold {holds}.")
  templates = [line.replace("{c}", "{}") for line in read_lines(path / _TEMPLATES) if line]
  if not templates:
    raise RunError(f"{path / _TEMPLATES} is empty: it should hold {_HOLDS[_TEMPLATES]}.")
  for line in templates:
    if "{}" not in line:
      raise RunError(f"{path / _TEMPLATES}: {line!r} has no {{c}}, where the class name goes.")
  return WdsFolder(path, CLASSIFICATION, read_class_names(path / _CLASSES), templates)
