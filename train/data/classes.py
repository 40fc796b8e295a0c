"""Names of classes and labels, which count them from 0: one rule for imports and evaluation."""

from collections.abc import Mapping
from pathlib import Path

from train.data.text_files import read_lines
from train.errors import RunError


def read_class_names(path: Path) -> list[str]:
  """The name of each class, a line each. Two classes may have one name, as ImageNet's do.

  Raises:
    RunError: a line is empty, which would move the names after it, or is not UTF-8.
    FileNotFoundError: there is no such file.
  """
  if path.exists() and not path.is_file():  # A pipe could be read once.
    raise RunError(f"{path} is no file: it should hold the name of a class on each line.")
  names = read_lines(path)
  if "" in names:
    raise RunError(
      f"{path}, line {names.index('') + 1} is empty: each line should hold the name of a class, in"
      " the order of the labels."
    )
  if not names:
    raise RunError(f"{path} is empty: it should hold the name of a class on each line.")
  return names


def check_labels(counts: Mapping[int, int], classes: int, where: str, names: object) -> None:
  """Raises a RunError if a label has no name.

  Args:
    counts: how many samples have each label.
    classes: how many names there are.
    where: the samples, such as a shard.
    names: the file of the names.
  """
  beyond = sorted(label for label in counts if label >= classes)
  if not beyond:
    return
  if beyond == [classes] and not counts.get(0):
    raise RunError(
      f"{where}: no sample has label 0, {counts[classes]:,} have label {classes}, and {names} has"
      f" {classes} names: labels count from 0 here, and these from 1. Subtract 1 from each."
    )
  raise RunError(
    f"{where}: {sum(counts[label] for label in beyond):,} samples have a label beyond the {classes}"
    f" names of {names}, such as {beyond[0]}: labels are 0 to {classes - 1}."
  )
