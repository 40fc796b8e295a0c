"""Labelled or captioned data to evaluate on, as CLIP_benchmark keeps it.

A folder `wds_<name>` holds shards of each split and the files that a zero-shot evaluation needs
(https://github.com/LAION-AI/CLIP_benchmark, `build_wds_dataset`):

    classnames.txt                          a class a line, in the order of the labels
    zeroshot_classification_templates.txt   a prompt a line, with {c} for the name of the class
    dataset_type.txt                        "retrieval"; without it: classification
    test/nshards.txt test/0.tar test/1.tar  samples of an image and its cls, or its txt with a
                                            caption a line
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from train.datasets import sample, tar_shards
from train.datasets.pictures import DEFAULT_LIMITS, Limits
from train.errors import RunError

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
    shards = (path for ending in ("tar.gz", "tar") for path in folder.glob(f"*.{ending}"))
    found = {path.name.partition(".")[0]: path for path in shards}
    counted = folder / "nshards.txt"
    if counted.is_file():
      text = counted.read_text().strip()
      if not text.isdecimal():
        raise RunError(f"{counted} holds {text!r}: it should hold the number of shards.")
      wanted = [str(i) for i in range(int(text))]
    else:
      wanted = sorted(found, key=lambda stem: (len(stem), stem))
    missing = [stem for stem in wanted if stem not in found]
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
        yield self._example(f"{shard}: {key}", files)

  def _example(self, where: str, files: sample.Files) -> dict[str, Any]:
    label, captions = -1, []
    try:
      image = sample.image(files)
      if self.task == RETRIEVAL:
        captions, _ = sample.captions(files)
      else:
        label = sample.label(files)
    except sample.Unusable as error:
      wanted = sample.wanted(self.task == RETRIEVAL, self.task == CLASSIFICATION)
      raise RunError(f"{where} must have {wanted}: {error}.") from error
    if self.task == CLASSIFICATION and not 0 <= label < len(self.class_names):
      raise RunError(
        f"{where} has the label {label}: it should be a number below {len(self.class_names)}, the"
        f" number of lines of {self.path / _CLASSES}."
      )
    return {"where": where, "image": image, "captions": captions, "label": label}


def open_folder(path: str | Path) -> WdsFolder:
  """The data set in a folder.

  Raises:
    RunError: a file is missing or holds something else; the message says what it should hold.
  """
  path = Path(path).expanduser().absolute()
  if not path.is_dir():
    raise RunError(f"{path} is no folder: --data needs folders as CLIP_benchmark keeps them.")
  kind = path / "dataset_type.txt"
  kind = kind.read_text().strip().lower() if kind.is_file() else "classification"
  if kind == "retrieval":
    return WdsFolder(path, RETRIEVAL, [], [])
  if kind != "classification":
    raise RunError(
      f"{path / 'dataset_type.txt'} holds {kind!r}: only 'classification' and 'retrieval' can be"
      " evaluated."
    )
  templates = [line.replace("{c}", "{}") for line in _lines(path / _TEMPLATES)]
  for line in templates:
    if "{}" not in line:
      raise RunError(f"{path / _TEMPLATES}: {line!r} has no {{c}}, where the class name goes.")
  return WdsFolder(path, CLASSIFICATION, _lines(path / _CLASSES), templates)


def _lines(path: Path) -> list[str]:
  try:
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
  except FileNotFoundError:
    raise RunError(f"{path} is missing: it should hold {_HOLDS[path.name]}.") from None
  while lines and not lines[-1]:
    lines.pop()
  if not lines:
    raise RunError(f"{path} is empty: it should hold {_HOLDS[path.name]}.")
  return lines
