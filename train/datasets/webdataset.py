"""Imports tar shards once, as a TFDS data set that is read at random.

Each shard becomes one ArrayRecord file; several processes import in parallel. Images keep their
bytes. Samples that cannot be used are skipped, counted (`info.metadata["skipped"]`) and listed in
`skipped.jsonl` beside the records. TFDS writes to a temporary directory and renames it at the end,
so an interrupted import leaves no data set. The prepared data set does not need the shards.
"""

import collections
import concurrent.futures
import json
import multiprocessing
import os
import pathlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow_datasets as tfds
from tqdm import tqdm

from train.datasets import tar_shards
from train.datasets.pictures import DEFAULT_LIMITS, Limits

_BYTES_PER_PROCESS = 8 * 2**20  # Importing fewer bytes takes less time than starting a process.


class WebDataset(tfds.core.dataset_builder.FileReaderBuilder, skip_registration=True):
  """A data set imported from tar shards.

  Args:
    name: of the data set: lower case letters, digits, underscores.
    shards: pattern of the shards of each split (see `tar_shards.expand`).
    captions: whether samples need a caption; the feature "captions" then exists.
    labels: whether samples need a label; the feature "label" then exists.
    class_names: of the labels; if empty, the names are numbers up to the largest label. None: not
      known any more; only a data set that is prepared can be read.
    data_dir: where prepared data sets live.
    limits: samples beyond them are skipped.
  """

  VERSION = tfds.core.Version("1.0.0")
  url_infos = None  # Nothing is downloaded. TFDS's default imports a package it does not install.

  def __init__(
    self,
    *,
    name: str,
    shards: Mapping[str, str],
    captions: bool = True,
    labels: bool = False,
    class_names: Sequence[str] | None = (),
    data_dir: str | None = None,
    limits: Limits = DEFAULT_LIMITS,
  ):
    self.name, self._limits = name, limits
    self._captions, self._labels = captions, labels
    self.class_names = None if class_names is None else list(class_names)
    self._patterns = dict(shards)
    self._paths = {split: tar_shards.expand(pattern) for split, pattern in shards.items()}
    super().__init__(data_dir=data_dir, file_format=tfds.core.FileFormat.ARRAY_RECORD)

  def unmatched(self) -> list[str]:
    """The patterns that no shard matches."""
    return [self._patterns[split] for split, paths in self._paths.items() if not paths]

  def changed(self) -> list[str]:
    """The parts of the source that differ from those of the prepared data set.

    A split whose shards are gone is as it was, and so is a missing file of class names.
    """
    before, now = dict(self.info.metadata).get("source"), self._source()
    if before is None:
      raise ValueError("dataset_info.json or metadata.json is missing")
    for split, paths in self._paths.items():
      if not paths and split in before["shards"]:
        now["shards"][split] = before["shards"][split]
    if self.class_names is None:
      now["class_names"] = before["class_names"]
    return [key for key in now if before[key] != now[key]]

  def _source(self) -> dict:
    """The shards, features and class names of the import, recorded in `info.metadata`."""
    return {
      "shards": {
        split: [[os.path.basename(path), os.path.getsize(path)] for path in paths]
        for split, paths in self._paths.items()
      },
      "features": sorted(self.info.features),
      "class_names": self.class_names,
    }

  def _info(self) -> tfds.core.DatasetInfo:
    features = {"image": tfds.features.Image()}
    if self._captions:
      features["captions"] = tfds.features.Sequence(tfds.features.Text())
    if self._labels:
      features["label"] = tfds.features.ClassLabel(names=self.class_names or None)
    return tfds.core.DatasetInfo(
      builder=self,
      description="Imported from tar shards.",
      features=tfds.features.FeaturesDict(features),
      metadata=tfds.core.MetadataDict(),
    )

  def _download_and_prepare(self, dl_manager, download_config=None) -> None:
    num_classes = None
    if self._labels:
      num_classes = len(self.class_names) or self._limits.label + 1
    jobs = [
      _Job(
        split, path, str(self.data_path / f"part-{n}"), self._captions, num_classes, self._limits
      )
      for n, (split, path) in enumerate(
        (split, path) for split, paths in self._paths.items() for path in paths
      )
    ]
    parts = dict(zip(jobs, _run(jobs), strict=True))
    splits = []
    for split in self._paths:
      mine = {job: part for job, part in parts.items() if job.split == split}
      splits.append(self._finish_split(split, mine))
    self.info.set_splits(tfds.core.SplitDict(splits))
    if self._labels and not self.class_names:
      largest = max(part.largest_label for part in parts.values())
      self.info.features["label"].names = [str(i) for i in range(largest + 1)]
    unused = [line for part in parts.values() for line in part.unused]
    if unused:
      (pathlib.Path(self.data_path) / "skipped.jsonl").write_text("".join(unused))
    self.info.metadata.update(
      source=self._source(),
      skipped=dict(sum((part.skipped for part in parts.values()), collections.Counter())),
      damaged=[os.path.basename(job.path) for job, part in parts.items() if part.damaged],
    )

  def _finish_split(self, split: str, parts: "Mapping[_Job, _Part]") -> tfds.core.SplitInfo:
    """Gives the parts that are not empty their final names."""
    full = [(job, part) for job, part in parts.items() if part.count]
    if not full:
      reasons = sum((part.skipped for part in parts.values()), collections.Counter())
      damaged = sum(part.damaged for part in parts.values())
      raise ValueError(
        f"No usable sample in {self._patterns[split]!r}: {len(parts)} shard(s), {damaged} of them "
        f"damaged; skipped: {_listed(reasons) or 'none'}."
      )
    template = self._get_filename_template(split)
    for i, (job, _) in enumerate(full):
      os.rename(job.output, template.sharded_filepath(shard_index=i, num_shards=len(full)))
    return tfds.core.SplitInfo(
      name=split,
      shard_lengths=[part.count for _, part in full],
      num_bytes=sum(part.bytes for _, part in full),
      filename_template=template,
    )

  def summary(self) -> str:
    """One line about the imported, skipped and damaged data."""
    skipped, damaged = self.info.metadata["skipped"], self.info.metadata["damaged"]
    sizes = ", ".join(f"{info.num_examples:,} {name}" for name, info in self.info.splits.items())
    text = f"Imported {self.name}: {sizes}; skipped {sum(skipped.values()):,}"
    if skipped:
      text += f" ({_listed(skipped)})"
    if damaged:
      text += f"; damaged, kept up to the damage: {', '.join(damaged)}"
    if skipped or damaged:
      text += f"; listed in {self.data_path / 'skipped.jsonl'}"
    return text + "."

  def _as_dataset(self, *args, **kwargs):
    raise NotImplementedError("Read with `as_data_source`: tf.data reads no ArrayRecord.")


class _Job(NamedTuple):
  split: str
  path: str
  output: str
  captions: bool
  num_classes: int | None
  limits: Limits


class _Part(NamedTuple):
  count: int  # examples written
  bytes: int
  skipped: collections.Counter
  damaged: bool
  largest_label: int
  unused: list[str]  # lines for skipped.jsonl


def _run(jobs: Sequence[_Job]) -> list[_Part]:
  """The parts of the jobs, in their order, made by at most one process a core."""
  worthwhile = 1 + sum(os.path.getsize(job.path) for job in jobs) // _BYTES_PER_PROCESS
  workers = min(len(jobs), os.cpu_count() or 1, worthwhile)
  with tqdm(total=len(jobs), desc="Importing", unit="shard", disable=None) as progress:
    if workers == 1:
      return list(_shown(map(_import_shard, jobs), progress))
    # spawn, because a fork of a process with JAX's threads may hang.
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(
      workers, mp_context=context, initializer=_end_with_parent
    )
    with pool:
      futures = [pool.submit(_import_shard, job) for job in jobs]
      try:
        for _ in _shown((f.result() for f in concurrent.futures.as_completed(futures)), progress):
          pass
      except BaseException:
        pool.shutdown(cancel_futures=True)
        raise
      return [future.result() for future in futures]


def _shown(parts: Iterable[_Part], progress: tqdm) -> Iterator[_Part]:
  images = skipped = 0
  for part in parts:
    images, skipped = images + part.count, skipped + part.skipped.total()
    progress.set_postfix(images=images, skipped=skipped)
    progress.update()
    yield part


def _end_with_parent() -> None:
  """Ends this worker when the program is killed; it would wait for work for ever."""

  def wait():
    multiprocessing.parent_process().join()
    os._exit(1)

  threading.Thread(target=wait, daemon=True).start()


def _import_shard(job: _Job) -> _Part:
  """Writes the usable samples of a shard to `job.output`, one at a time."""
  count, largest, damaged, skipped, unused = 0, -1, False, collections.Counter(), []
  features = {"image": tfds.features.Image()}
  if job.captions:
    features["captions"] = tfds.features.Sequence(tfds.features.Text())
  if job.num_classes is not None:
    # ClassLabel stores its values like this, but has to know the number of classes.
    features["label"] = tfds.features.Scalar(np.int64)
  features = tfds.features.FeaturesDict(features)

  def leave_out(name: str | None, reason: str) -> None:
    line = {"split": job.split, "shard": os.path.basename(job.path), "sample": name}
    unused.append(json.dumps({**line, "reason": reason}) + "\n")

  def records() -> Iterator[tuple[int, bytes]]:
    nonlocal count, largest, damaged
    try:
      for name, sample in tar_shards.samples(job.path, job.limits.member_bytes):
        try:
          example = tar_shards.example(
            sample,
            with_captions=job.captions,
            num_classes=job.num_classes,
            limits=job.limits,
          )
          record = features.serialize_example(example)
        except Exception as error:  # No sample ends an import.
          known = isinstance(error, tar_shards.Unusable)
          reason = str(error) if known else f"unusable ({type(error).__name__})"
          skipped[reason] += 1
          leave_out(name, reason)
        else:
          yield count, record
          count, largest = count + 1, max(largest, example.get("label", -1))
    except tar_shards.DamagedShard as error:
      damaged = True
      leave_out(None, f"damaged: {error.__cause__}")

  tfds.core.ExampleWriter(tfds.core.FileFormat.ARRAY_RECORD).write(job.output, records())
  return _Part(count, pathlib.Path(job.output).stat().st_size, skipped, damaged, largest, unused)


def _listed(counts: Mapping[str, int]) -> str:
  return ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items()))
