"""Prepares what train/data/prepared.py reads: drawn, imported from shards, or already on disk."""

import contextlib
import dataclasses
import io
import os
import pathlib
import re
import sys
import tarfile
from collections.abc import Iterator

import tensorflow_datasets as tfds

from train.config import DataConfig
from train.data import collate, tar_shards
from train.data.classes import read_class_names
from train.data.decode import Limits
from train.data.machine import system_error
from train.data.shapes import Shapes
from train.data.webdataset import PARTS, WebDataset, next_version
from train.errors import RunError
from train.paths import local_path
from train.workdir import lock


def prepare(config: DataConfig) -> tfds.core.DatasetBuilder:
  """A builder to read the data set from. If the data set is missing, it is built first."""
  config = dataclasses.replace(config, data_dir=str(_data_dir(config)))
  if config.train_shards:
    builder = _imported(config)
  else:
    builder = _drawn(config) if config.name.partition("/")[0] == Shapes.name else _find(config)
    _check_features(builder, config)
  # Reads from disk like any other data set, so that workers need not know how it was made.
  with _explain_damage(config):
    return tfds.builder_from_directory(builder.data_dir)


def _imported(config: DataConfig) -> WebDataset:
  """The newest version of an import, which is made if there is none with all of the shards."""
  builder = _shards_builder(config)
  _check_features(builder, config)
  current = _is_current(builder, config)
  if not current and builder.data_path.exists() and not os.access(builder.data_dir, os.W_OK):
    print(f"{builder.data_dir} cannot be written to: further shards are not imported.", flush=True)
    current = True
  if current:
    splits = builder.info.splits.items()
    sizes = ", ".join(f"{split.num_examples:,} {name}" for name, split in splits)
    print(f"Imported before, {builder.info.full_name}: {sizes}.", flush=True)
  else:
    with _alone(builder) as alone:  # One process imports; the others then find its data set.
      builder = _shards_builder(config)
      if not _is_current(builder, config):
        _check_source(builder, config)
        base = None
        if builder.data_path.exists():
          base, builder = builder, _shards_builder(config, next_version(str(builder.version)))
        builder.plan(base, alone)
        _build(builder, alone)
  return builder


def _is_current(builder: WebDataset, config: DataConfig) -> bool:
  """Whether the data set has all shards.

  Raises:
    ValueError: it has others, or was imported with other options.
  """
  # The directory is renamed when it is complete, so a directory of this name is complete.
  if not builder.data_path.exists():
    return False
  another = f"Give this import another name, or delete {builder.data_dir} to import again."
  with _explain_damage(config):
    changed = builder.changed()
    if not changed:
      builder.leave_out_parts_of_shards()
      further = [shard for shards in builder.further().values() for shard in shards]
  if changed:
    raise ValueError(
      f"{config.name} was imported before with other {' and '.join(changed)}. {another}"
    )
  if further and builder.is_of_older_rules():
    raise ValueError(
      f"{config.name} was imported by an earlier version, which read captions by other rules: it"
      f" cannot go on with {further[0].name}. {another}"
    )
  return not further


def _drawn(config: DataConfig) -> Shapes:
  builder = _shapes_builder(config)
  if not builder.data_path.exists():
    with _alone(builder) as alone:
      if not builder.data_path.exists():
        _build(builder, alone)
  return builder


@contextlib.contextmanager
def _alone(builder: tfds.core.DatasetBuilder) -> Iterator[bool]:
  """Holds the data set's folder; False: there may be others, because it has no locks."""
  folder = pathlib.Path(builder.data_dir).parent
  folder.mkdir(parents=True, exist_ok=True)
  with lock(folder, wait=True) as alone:
    yield alone


def unreadable(what: str, folder: str, error: Exception | str) -> Exception:
  """The error of prepared data that cannot be read: because of the system, or damaged."""
  if isinstance(error, Exception) and (reason := system_error(error)):
    return RunError(
      f"{what} cannot be read: {reason}. That is an error of the system, not of the data in"
      f" {folder}."
    )
  reason = str(error).rstrip(".")
  return ValueError(
    f"{what} is damaged: {reason}. Copy {folder} again, or delete it to prepare the data again."
  )


@contextlib.contextmanager
def _explain_damage(config: DataConfig) -> Iterator[None]:
  """Names the data set and the cure if TFDS cannot read the files that describe it."""
  folder = _data_dir(config) / config.name
  try:
    yield
  except tfds.core.DatasetNotFoundError:
    raise
  except Exception as error:  # Broken JSON and missing files raise many kinds.
    of_a_shard = (
      isinstance(error, OSError)
      and error.filename
      and folder not in (pathlib.Path(os.fsdecode(error.filename)).parents)
    )
    if of_a_shard or isinstance(error, PermissionError) or not folder.exists():
      raise
    raise unreadable(f"The data set {config.name}", str(folder), error) from error


def _data_dir(config: DataConfig) -> pathlib.Path:
  return local_path(config.data_dir or tfds.core.constants.DATA_DIR, "data.data_dir", utf8=True)


def _shapes_builder(config: DataConfig) -> Shapes:
  _, _, size = config.name.partition("/")
  if size not in ("", *Shapes.builder_configs):
    known = ", ".join(f"shapes/{name}" for name in Shapes.builder_configs)
    raise ValueError(f"No data set data.name={config.name!r}: there are {known}.")
  with _explain_damage(config):
    return Shapes(
      config=size or None,
      data_dir=config.data_dir or None,
      file_format=tfds.core.FileFormat.ARRAY_RECORD,
    )


def _shards_builder(config: DataConfig, version: str = "") -> WebDataset:
  if not re.fullmatch("[a-z][a-z0-9_]*", config.name) or config.name == Shapes.name:
    raise ValueError(
      f"data.name={config.name!r} cannot name an import: lower case letters, digits and _ can, "
      f"except {Shapes.name}."
    )
  # Whole splits are imported: "train[:90%]" is read from "train".
  train, evaluated = (name.partition("[")[0] for name in (config.train_split, config.eval_split))
  if config.eval_shards and "," in config.eval_split:
    raise ValueError(
      f"data.eval_split={config.eval_split!r} must be one split, that of data.eval_shards."
    )
  if config.eval_shards and not evaluated:
    raise ValueError(
      'data.eval_split="" is no evaluation: data.eval_shards need a name for theirs.'
    )
  if config.eval_shards and evaluated == train:
    raise ValueError(f"data.eval_split={config.eval_split!r} is the train split already.")
  root = local_path(config.root, "data.root")
  shards = {train: config.train_shards}
  if config.eval_shards:
    shards[evaluated] = config.eval_shards
  class_names = []
  if config.class_names:
    try:
      class_names = read_class_names(root / config.class_names)
    except FileNotFoundError:
      class_names = None
  with _explain_damage(config):
    return WebDataset(
      name=config.name,
      root=str(root) if config.root else "",
      shards=shards,
      captions=bool(config.text_key),
      caption_key=config.caption_key,
      labels=bool(config.label_key),
      class_names=class_names,
      class_file=f"data.class_names={config.class_names!r}",
      data_dir=config.data_dir or None,
      limits=Limits.of(config),
      version=version,
    )


def _check_source(builder: WebDataset, config: DataConfig) -> None:
  """Raises a ValueError if shards or class names are missing, or other files are named."""
  where = f"in data.root={config.root!r}"
  if not config.root:
    where = f"in {pathlib.Path.cwd()}, because data.root is empty"
  elif not local_path(config.root, "data.root").is_dir():
    where = f"because data.root={config.root!r} is no folder"
  else:
    os.listdir(local_path(config.root, "data.root"))  # A glob finds nothing where this raises.
  fields = {config.train_shards: "train_shards", config.eval_shards: "eval_shards"}
  for pattern in builder.patterns.values():
    paths = tar_shards.expand(pattern, builder.root)
    if not paths:
      raise ValueError(f"No shard matches {os.path.join(builder.root, pattern)!r} {where}.")
    for path in paths:
      _check_shard(path, f"data.{fields[pattern]}={pattern!r}")
    if absent := builder.absent(pattern):
      few = ", ".join(absent[:5]) + (f" and {len(absent) - 5:,} more" if len(absent) > 5 else "")
      raise ValueError(
        f"data.{fields[pattern]}={pattern!r} names what is missing {where}: {few}. Copy"
        f" {'it' if len(absent) == 1 else 'them'} there, or name only what is there; a glob such as"
        " *.tar takes what it finds."
      )
  if shared := builder.shared():
    more = f" and {len(shared) - 1:,} more" if len(shared) > 1 else ""
    raise ValueError(
      f"data.train_shards={config.train_shards!r} and data.eval_shards={config.eval_shards!r} both"
      f" name {shared[0]}{more}: an evaluation would score what was trained on. Name other shards,"
      " or parts of one split: data.train_split='train[:90%]', data.eval_split='train[90%:]'."
    )
  if builder.class_names is None:
    raise ValueError(f"No file data.class_names={config.class_names!r} {where}.")


def _check_shard(path: str, field: str) -> None:
  """Raises a ValueError for a folder, a table or an image in place of a shard."""
  if os.path.islink(path) and not os.path.exists(path):
    raise ValueError(f"{field} matches {path}, a link to {os.readlink(path)}, which is not there.")
  # What is no file, such as a pipe, could be waited for.
  if os.path.isfile(path) and (path.endswith(tar_shards.ENDINGS) or tarfile.is_tarfile(path)):
    return
  what = "a folder" if os.path.isdir(path) else "no tar archive"
  raise ValueError(
    f"{field} matches {path}, which is {what}: only tar shards ({', '.join(tar_shards.ENDINGS)})"
    " are read, no csv, parquet or folders of images. Pack images and their texts, such as"
    " 0001.jpg and 0001.txt, with: tar --sort=name -cf 00000.tar -C FOLDER ."
  )


def _find(config: DataConfig) -> tfds.core.DatasetBuilder:
  """A data set that TFDS has prepared, in this or another program."""
  data_dir = _data_dir(config)
  try:
    with _explain_damage(config):
      builder = tfds.core.read_only_builder.builder_from_files(config.name, data_dir=str(data_dir))
  except tfds.core.DatasetNotFoundError:
    folder = data_dir / config.name
    if any(folder.glob("*.*.*/*array_record*")):
      missing = "features.json or dataset_info.json is missing"
      raise unreadable(f"The data set {config.name}", str(folder), missing) from None
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


def _build(builder: tfds.core.DatasetBuilder, alone: bool) -> None:
  for left_by_a_killed_process in builder.data_path.parent.glob("incomplete.*"):
    if alone and left_by_a_killed_process.name != PARTS:
      left_by_a_killed_process.rmtree()
  if not sys.stderr.isatty():
    tfds.disable_progress_bar()
  print(f"Preparing {builder.info.full_name} in {builder.data_dir}", flush=True)
  try:
    if isinstance(builder, WebDataset):
      builder.build()
      print(builder.summary(), flush=True)
      return
    with contextlib.redirect_stdout(io.StringIO()):  # TFDS prints sizes that it does not know.
      builder.download_and_prepare()
  except RuntimeError as error:  # ArrayRecord raises these, for example if the disk is full.
    raise OSError(f"Could not prepare {builder.data_dir}: {error}") from error
  except OSError as error:
    error.filename = error.filename or builder.data_dir
    raise
  except MemoryError as error:
    raise RunError(
      f"Could not prepare {builder.data_dir}: there is no memory left. What is finished stays."
    ) from error


def _check_features(builder: tfds.core.DatasetBuilder, config: DataConfig) -> None:
  collate.check_captions(config)
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
