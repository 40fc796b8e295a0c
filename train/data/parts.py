"""Imports tar shards by parts: a part is a record file of some shards, and a json of what they had.

A part is complete when its json is there. Whatever ends an import, the complete parts stay, and the
next import of the same shards with the same options takes them. A split has at most `_MOST` parts
of one import, so that a reader can hold all of their files open.
"""

import collections
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow_datasets as tfds

from train.data import sample, tar_shards
from train.data.classes import check_labels
from train.data.decode import Limits
from train.data.sample import Unusable, Wanted
from train.workdir import replace_text

_MOST = 256
_ENDINGS = 50  # different ones that are counted by name
RULES = 2  # How samples are read; parts that were read by other rules are read again.


class Shard(NamedTuple):
  name: str  # relative to data.root
  path: str
  size: int
  time: int  # of its last change, in nanoseconds


class Options(NamedTuple):
  """What an import takes from a sample: `sample.Wanted`, the names of classes, and limits."""

  captions: bool
  caption_key: str
  num_classes: int | None  # Labels are less; None: labels are left out.
  class_names: str  # the file of their names; "": numbers, and a larger label is out of range
  limits: Limits
  trains: bool  # whether the split is the one to train on


class Job(NamedTuple):
  """The shards of a part."""

  split: str
  shards: tuple[Shard, ...]
  options: Options
  output: str

  def __str__(self) -> str:
    return self.shards[0].path + (f" and {n} more" if (n := len(self.shards) - 1) else "")

  def key(self) -> list:
    """What must be the same for a part to be the same."""
    shards = [(shard.name, shard.size, shard.time) for shard in self.shards]
    return json.loads(json.dumps([RULES, self.split, self.options, shards]))


@dataclasses.dataclass
class Found:
  """What shards had."""

  count: int = 0  # samples written
  bytes: int = 0  # of the record file
  captions: int = 0
  unlabelled: int = 0  # of the samples written
  uncaptioned: int = 0
  sources: collections.Counter = dataclasses.field(default_factory=collections.Counter)
  labels: collections.Counter = dataclasses.field(default_factory=collections.Counter)
  skipped: collections.Counter = dataclasses.field(default_factory=collections.Counter)
  endings: collections.Counter = dataclasses.field(default_factory=collections.Counter)
  damaged: list[str] = dataclasses.field(default_factory=list)  # shards
  unused: list[dict] = dataclasses.field(default_factory=list)  # samples, for skipped.jsonl

  def __add__(self, other: "Found") -> "Found":
    fields = (field.name for field in dataclasses.fields(self))
    return Found(**{name: getattr(self, name) + getattr(other, name) for name in fields})


def total(found: Sequence[Found]) -> Found:
  return functools.reduce(Found.__add__, found, Found())


class Step(NamedTuple):
  """What was done since the last report."""

  shards: int = 0
  images: int = 0
  skipped: int = 0
  bytes: int = 0


def plan(
  split: str, shards: Sequence[Shard], options: Options, folder: Path
) -> tuple[list[Job], list[Job]]:
  """The jobs whose parts `folder` has, and those to do; together they are all shards once."""
  here = {tuple(shard[:1] + shard[2:]): shard for shard in shards}
  kept = []
  for path in sorted(folder.glob("part-*.json")):
    key, _ = _read(path) or (None, None)
    names = [tuple(shard) for shard in key[3]] if key and key[1] == split else []
    if names and all(name in here for name in names):
      job = Job(split, tuple(here[name] for name in names), options, str(path.with_suffix("")))
      if job.key() == key and not {s for j in kept for s in j.shards} & set(job.shards):
        kept.append(job)
  done = {shard for job in kept for shard in job.shards}
  # Shards that begin in the same of _MOST equal pieces share a part.
  piece = sum(shard.size for shard in shards) // _MOST + 1
  begins = itertools.accumulate((shard.size for shard in shards), initial=0)
  pieces = [(shard, begin // piece) for shard, begin in zip(shards, begins, strict=False)]
  runs = itertools.groupby(pieces, key=lambda p: (p[0] in done, p[1]))
  todo = []
  for (is_done, _), run in runs:
    if is_done:
      continue
    job = Job(split, tuple(shard for shard, _ in run), options, "")
    name = hashlib.sha256(json.dumps(job.key()).encode()).hexdigest()[:16]
    todo.append(job._replace(output=str(folder / f"part-{name}")))
  return kept, todo


def _read(path: Path) -> tuple[Any, Found] | None:
  """The key and the findings of a part; None if it is not complete."""
  try:
    values = json.loads(path.read_bytes())
    if path.with_suffix("").stat().st_size != values["found"]["bytes"]:
      return None
  except (OSError, ValueError, KeyError, TypeError):
    return None
  counters = ("sources", "labels", "skipped", "endings")
  found = {k: collections.Counter(v) if k in counters else v for k, v in values["found"].items()}
  return values["key"], Found(**found)


def found(job: Job) -> Found:
  """What the complete part of a job had."""
  _, values = _read(Path(f"{job.output}.json"))
  return values


def write(job: Job, report: Callable[[Step], None]) -> None:
  """Writes the part of a job, one sample at a time."""
  writing = Path(job.output).with_name(f"writing-{Path(job.output).name}")
  values = Found()
  records = _records(job, values, _Reports(report))
  tfds.core.ExampleWriter(tfds.core.FileFormat.ARRAY_RECORD).write(str(writing), records)
  with writing.open("rb+") as file:
    os.fsync(file.fileno())  # Before the json, which says that it is there.
  writing.replace(job.output)
  values.bytes = os.path.getsize(job.output)
  # Texts of strangers can have halves of characters, which UTF-8 lacks; ASCII escapes them.
  text = json.dumps({"key": job.key(), "found": vars(values)})
  replace_text(Path(f"{job.output}.json"), text)


def _records(job: Job, values: Found, reports: "_Reports") -> Iterator[tuple[int, bytes]]:
  features = _features(job.options)
  for shard in job.shards:
    reports.begin(shard)
    try:
      for name, files in tar_shards.samples(shard.path, job.options.limits.member_bytes):
        example = _example(job, shard, name, files, values)
        reports.sample(files, example is not None)
        if example is not None:
          yield values.count, features.serialize_example(example)
          values.count += 1
    except tar_shards.DamagedShard as error:
      values.damaged.append(shard.name)
      _leave_out(job, shard, None, f"damaged: {error.__cause__}", values)
    if job.options.class_names:
      labels = {int(label): count for label, count in values.labels.items()}
      check_labels(labels, job.options.num_classes, shard.path, job.options.class_names)
    reports.end()


def _example(job: Job, shard: Shard, name: str, files: sample.Files, values: Found) -> dict | None:
  """What is written of a sample; None if it cannot be used, which is noted in `values`."""
  try:
    return _read_sample(files, job.options, values)
  except MemoryError:
    raise
  except Unusable as error:
    reason, detail = error.reason, error.detail
  except Exception as error:  # No sample ends an import.
    if isinstance(error, OSError) and error.errno is not None:
      raise
    reason, detail = f"unusable ({type(error).__name__})", ""
  for ending in files if reason.startswith("no ") else ():
    known = ending in values.endings or len(values.endings) < _ENDINGS
    values.endings[ending if known else "others"] += 1
  values.skipped[reason] += 1
  _leave_out(job, shard, name, reason, values, detail)
  return None


def _read_sample(files: sample.Files, options: Options, values: Found) -> dict:
  example = {"image": sample.image(files)}
  sample.check_image(example["image"], options.limits)
  wanted = Wanted(options.captions, options.caption_key, options.num_classes, options.trains)
  try:
    texts = sample.texts(files, wanted)
  except Unusable as error:
    if error.reason == sample.OUT_OF_RANGE:
      values.labels[error.detail] += 1
    raise
  if options.captions:
    example["captions"] = texts.captions
  if texts.label is not None:
    example["label"] = texts.label
    if texts.label >= 0:
      values.labels[str(texts.label)] += 1  # JSON has no other keys.
  if texts.source:
    values.sources[texts.source] += 1
    values.captions += len(texts.captions)
  values.uncaptioned += example.get("captions") == []
  values.unlabelled += example.get("label") == -1
  return example


def _features(options: Options) -> tfds.features.FeaturesDict:
  features = {"image": tfds.features.Image()}
  if options.captions:
    features["captions"] = tfds.features.Sequence(tfds.features.Text())
  if options.num_classes is not None:
    # ClassLabel stores its values like this, but has to know the number of classes.
    features["label"] = tfds.features.Scalar(np.int64)
  return tfds.features.FeaturesDict(features)


def _leave_out(job, shard, name: str | None, reason: str, values: Found, detail: str = "") -> None:
  line = {"split": job.split, "shard": shard.name, "sample": name, "reason": reason}
  values.unused.append({**line, "detail": detail} if detail else line)


class _Reports:
  """Reports about once a second what was done."""

  def __init__(self, report: Callable[[Step], None]):
    self._report, self._next, self._step, self._left = report, time.monotonic() + 1, Step(), 0

  def begin(self, shard: Shard) -> None:
    self._left = shard.size

  def sample(self, files: sample.Files, used: bool) -> None:
    size = sum(len(content) for content in files.values() if isinstance(content, bytes))
    self._add(Step(0, used, not used, min(size, self._left)))

  def end(self) -> None:
    self._add(Step(1, 0, 0, self._left), now=True)

  def _add(self, step: Step, now: bool = False) -> None:
    self._left -= step.bytes
    self._step = Step(*map(sum, zip(self._step, step, strict=True)))
    if now or time.monotonic() >= self._next:
      self._report(self._step)
      self._next, self._step = time.monotonic() + 1, Step()


class Progress:
  """Prints a line about an import soon, and then each minute: to a terminal or a file."""

  _TIMES = (2, 10, 30, 60)  # seconds; then each minute

  def __init__(self, shards: int, size: int):
    self._shards, self._bytes, self._done = shards, size, Step()
    self._start, self._lines = time.monotonic(), 0

  def __call__(self, step: Step | None) -> None:
    if step is not None:
      self._done = Step(*map(sum, zip(self._done, step, strict=True)))
    seconds, n = time.monotonic() - self._start, self._lines
    last = len(self._TIMES) - 1
    if seconds < (self._TIMES[n] if n <= last else self._TIMES[last] * (n - last + 1)):
      return
    self._lines += 1
    done = self._done
    text = (
      f"Importing: {done.shards:,} of {self._shards:,} shards, {done.images:,} images"
      f" ({done.images / seconds:,.0f}/s), skipped {done.skipped:,}"
    )
    if done.bytes:
      text += f"; about {_words(seconds * (self._bytes - done.bytes) / done.bytes)} left"
    print(f"{text}.", flush=True)


def _words(seconds: float) -> str:
  for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
    if seconds >= 2 * size:
      return f"{seconds / size:.0f} {unit}"
  return f"{seconds:.0f} seconds"
