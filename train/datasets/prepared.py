"""Prepares the data set that a config names: drawn, imported from shards, or already on disk."""

import contextlib
import dataclasses
import io
import pathlib
import re
import sys
from collections.abc import Iterator

import tensorflow_datasets as tfds

from train.config import DataConfig
from train.datasets import scenes
from train.datasets.classes import read_class_names
from train.datasets.pictures import Limits
from train.datasets.scenes import Scenes
from train.datasets.shapes import Shapes
from train.datasets.webdataset import WebDataset
from train.paths import local_path
from train.workdir import lock

_DRAWN = (Shapes.name, scenes.NAME)


def prepare(config: DataConfig) -> tfds.core.DatasetBuilder | Scenes:
  """A builder to read the data set from. If the data set is missing, it is built first.

  Scenes are drawn and need no preparation.
  """
  drawn = scenes.find(config.name)
  if drawn is not None and not config.train_shards:
    if config.flip:
      raise ValueError("data.flip=True would mirror scenes, whose captions tell left from right.")
    return drawn
  config = dataclasses.replace(config, data_dir=str(_data_dir(config)))
  if config.train_shards:
    builder = _shards_builder(config)
  elif config.name.partition("/")[0] == Shapes.name:
    builder = _shapes_builder(config)
  else:
    builder = _find(config)
  _check_features(builder, config)
  # TFDS renames the directory when it is complete, so a directory of this name is complete.
  if not builder.data_path.exists():
    folder = pathlib.Path(builder.data_dir).parent
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder, wait=True):  # One process builds; the others then find the data set.
      if not builder.data_path.exists():
        _check_source(builder, config)
        _build(builder)
  elif isinstance(builder, WebDataset):
    with _explained(config):
      changed = builder.changed()
    if changed:
      raise ValueError(
        f"{config.name} was imported before with other {' and '.join(changed)}. Give this import "
        f"another name, or delete {builder.data_dir} to import again."
      )
  # Reads from disk like any other data set, so that workers need not know how it was made.
  with _explained(config):
    return tfds.builder_from_directory(builder.data_dir)


def damaged(what: str, folder: str, error: Exception | str) -> ValueError:
  """The error of prepared data that cannot be read."""
  reason = str(error).rstrip(".")
  return ValueError(
    f"{what} is damaged: {reason}. Copy {folder} again, or delete it to prepare the data again."
  )


@contextlib.contextmanager
def _explained(config: DataConfig) -> Iterator[None]:
  """Names the data set and the cure if TFDS cannot read the files that describe it."""
  folder = _data_dir(config) / config.name
  try:
    yield
  except tfds.core.DatasetNotFoundError:
    raise
  except Exception as error:  # Broken JSON and missing files raise many kinds.
    if isinstance(error, PermissionError) or not folder.exists():
      raise
    raise damaged(f"The data set {config.name}", str(folder), error) from error


def _data_dir(config: DataConfig) -> pathlib.Path:
  return local_path(config.data_dir or tfds.core.constants.DATA_DIR, "data.data_dir")


def _shapes_builder(config: DataConfig) -> Shapes:
  _, _, size = config.name.partition("/")
  if size not in ("", *Shapes.builder_configs):
    known = ", ".join(f"shapes/{name}" for name in Shapes.builder_configs)
    raise ValueError(f"No data set data.name={config.name!r}: there are {known}.")
  with _explained(config):
    return Shapes(
      config=size or None,
      data_dir=config.data_dir or None,
      file_format=tfds.core.FileFormat.ARRAY_RECORD,
    )


def _shards_builder(config: DataConfig) -> WebDataset:
  if not re.fullmatch("[a-z][a-z0-9_]*", config.name) or config.name in _DRAWN:
    raise ValueError(
      f"data.name={config.name!r} cannot name an import: lower case letters, digits and _ can, "
      f"except {' and '.join(_DRAWN)}."
    )
  # Whole splits are imported: "train[:90%]" is read from "train".
  train, evaluated = (name.partition("[")[0] for name in (config.train_split, config.eval_split))
  if config.eval_shards and "," in config.eval_split:
    raise ValueError(
      f"data.eval_split={config.eval_split!r} must be one split, that of data.eval_shards."
    )
  if config.eval_shards and evaluated == train:
    raise ValueError(f"data.eval_split={config.eval_split!r} is the train split already.")
  root = local_path(config.root, "data.root")
  shards = {train: str(root / config.train_shards)}
  if config.eval_shards:
    shards[evaluated] = str(root / config.eval_shards)
  class_names = []
  if config.class_names:
    try:
      class_names = read_class_names(root / config.class_names)
    except FileNotFoundError:
      class_names = None
  with _explained(config):
    return WebDataset(
      name=config.name,
      shards=shards,
      captions=bool(config.text_key),
      labels=bool(config.label_key),
      class_names=class_names,
      data_dir=config.data_dir or None,
      limits=Limits.of(config),
    )


def _check_source(builder: tfds.core.DatasetBuilder, config: DataConfig) -> None:
  """Raises a ValueError if the shards or class names of an import are missing."""
  if not isinstance(builder, WebDataset):
    return
  where = f"in data.root={config.root!r}"
  if not config.root:
    where = f"in {pathlib.Path.cwd()}, because data.root is empty"
  elif not local_path(config.root, "data.root").is_dir():
    where = f"because data.root={config.root!r} is no folder"
  for pattern in builder.unmatched():
    raise ValueError(f"No shard matches {pattern!r} {where}.")
  if builder.class_names is None:
    raise ValueError(f"No file data.class_names={config.class_names!r} {where}.")


def _find(config: DataConfig) -> tfds.core.DatasetBuilder:
  """A data set that TFDS has prepared, in this or another program."""
  data_dir = _data_dir(config)
  try:
    with _explained(config):
      builder = tfds.core.read_only_builder.builder_from_files(config.name, data_dir=str(data_dir))
  except tfds.core.DatasetNotFoundError:
    folder = data_dir / config.name
    if any(folder.glob("*.*.*/*array_record*")):
      missing = "features.json or dataset_info.json is missing"
      raise damaged(f"The data set {config.name}", str(folder), missing) from None
    names = sorted(path.name for path in data_dir.glob("*") if any(path.rglob("features.json")))
    raise ValueError(
      f"No data set data.name={config.name!r} in {data_dir}: found {', '.join(names) or 'none'}. "
      'Prepare it with TFDS (file_format="array_record"), name shards to import '
      "(data.train_shards), or take the built-in shapes or scenes."
    ) from None
  if builder.info.file_format != tfds.core.FileFormat.ARRAY_RECORD:
    raise ValueError(
      f"{builder.data_dir} is in the format {builder.info.file_format.value}, which cannot be read "
      'at random: prepare it again with download_and_prepare(file_format="array_record").'
    )
  return builder


def _build(builder: tfds.core.DatasetBuilder) -> None:
  for left_by_a_killed_process in builder.data_path.parent.glob("incomplete.*"):
    left_by_a_killed_process.rmtree()
  if not sys.stderr.isatty():
    tfds.disable_progress_bar()
  print(f"Preparing {builder.info.full_name} in {builder.data_dir}", flush=True)
  try:
    with contextlib.redirect_stdout(io.StringIO()):  # TFDS prints sizes that it does not know.
      builder.download_and_prepare()
  except RuntimeError as error:  # ArrayRecord raises these, for example if the disk is full.
    raise OSError(f"Could not prepare {builder.data_dir}: {error}") from error
  if isinstance(builder, WebDataset):
    print(builder.summary(), flush=True)


def _check_features(builder: tfds.core.DatasetBuilder, config: DataConfig) -> None:
  if not (config.text_key or config.label_key):
    raise ValueError("Captions come from data.text_key or data.label_key: one of them must be set.")
  wanted = {"image_key": tfds.features.Image, "text_key": tfds.features.Text}
  wanted["label_key"] = tfds.features.ClassLabel
  for field, kind in wanted.items():
    key = getattr(config, field)
    if not key:
      continue
    actual = feature(builder, key)
    if isinstance(actual, tfds.features.Sequence) and kind is tfds.features.Text:
      actual = actual.feature
    if not isinstance(actual, kind):
      there = ", ".join(f"{name} ({type(f).__name__})" for name, f in builder.info.features.items())
      raise ValueError(
        f"data.{field}={key!r} is no {kind.__name__} feature of {builder.info.full_name}: it has "
        f"{there}."
      )


def feature(builder: tfds.core.DatasetBuilder, key: str):
  """The feature of a key, or None; "captions/text" is the text in each of the captions."""
  features = builder.info.features
  for name in key.split("/"):
    if isinstance(features, tfds.features.Sequence):
      features = features.feature
    if not isinstance(features, tfds.features.FeaturesDict) or name not in features:
      return None
    features = features[name]
  return features
