"""Imports tar shards once, as a TFDS data set that is read at random.

Images keep their bytes. Samples that cannot be used are skipped, counted (`info.metadata`) and
listed in `skipped.jsonl` beside the records. The import goes by parts (`train/data/parts.py`)
in `incomplete.import`; at the end their record files get their names in a folder that is renamed,
so a folder of a version is complete. It does not need the shards. Further shards make a new
version, whose first files are links to those of the version before, which stays.
"""

import collections
import contextlib
import errno
import json
import os
import re
import shutil
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import tensorflow_datasets as tfds

from train.data import parts, pool, sample, tar_shards
from train.data.decode import DEFAULT_LIMITS, Limits
from train.data.machine import cores
from train.data.parts import Found, Options, Shard
from train.errors import RunError

_BYTES_PER_PROCESS = 8 * 2**20  # Importing fewer bytes takes less time than starting a process.
PARTS = "incomplete.import"  # the folder of parts, beside the versions
_FIRST_VERSION = "1.0.0"
_SAMPLED = 2**13  # bytes of a shard's start, middle and end in its checksum


class WebDataset(tfds.core.dataset_builder.FileReaderBuilder, skip_registration=True):
  """A data set imported from tar shards: its newest version.

  Args:
    name: of the data set: lower case letters, digits, underscores.
    root: the folder of the shards; "": the current one.
    shards: pattern of the shards of each split (see `tar_shards.expand`); the first is trained on.
    captions: whether samples need a caption; the feature "captions" then exists. With `labels` they
      need no label, and to evaluate either is enough.
    caption_key: of captions in json files (see `sample.captions`).
    labels: whether samples need a label; the feature "label" then exists.
    class_names: of the labels; if empty, the names are numbers up to the largest label. None: not
      known any more; only a data set that is prepared can be read.
    class_file: where they are from, for messages.
    data_dir: where prepared data sets live.
    limits: samples beyond them are skipped.
  """

  url_infos = None  # Nothing is downloaded. TFDS's default imports a package it does not install.

  def __init__(
    self,
    *,
    name: str,
    shards: Mapping[str, str],
    root: str = "",
    captions: bool = True,
    caption_key: str = "",
    labels: bool = False,
    class_names: Sequence[str] | None = (),
    class_file: str = "the class names",
    data_dir: str | None = None,
    limits: Limits = DEFAULT_LIMITS,
    version: str = "",
  ):
    self.name, self.limits = name, limits
    self._captions, self._labels, self._caption_key = captions, labels, caption_key
    self.class_names = None if class_names is None else list(class_names)
    self._class_file = class_file
    self.patterns, self.root = dict(shards), root
    self.paths = {split: tar_shards.expand(pattern, root) for split, pattern in shards.items()}
    self._seen: dict[str, list[Shard]] = {}
    folder = Path(data_dir or tfds.core.constants.DATA_DIR, name)
    self.VERSION = tfds.core.Version(version or newest(folder) or _FIRST_VERSION)
    super().__init__(data_dir=data_dir, file_format=tfds.core.FileFormat.ARRAY_RECORD)

  def _info(self) -> tfds.core.DatasetInfo:
    features = {"image": tfds.features.Image()}
    if self._captions:
      features["captions"] = tfds.features.Sequence(tfds.features.Text())
    if self._labels:
      names = self.class_names or None
      if names and len(set(names)) < len(names):  # TFDS refuses those; `class_names` has them.
        features["label"] = tfds.features.ClassLabel(num_classes=len(names))
      else:
        features["label"] = tfds.features.ClassLabel(names=names)
    return tfds.core.DatasetInfo(
      builder=self,
      description="Imported from tar shards.",
      features=tfds.features.FeaturesDict(features),
      metadata=tfds.core.MetadataDict(),
    )

  def changed(self) -> list[str]:
    """The parts of the source that differ from those of the prepared data set.

    A split whose shards are all gone is as it was, and so is a missing file of class names. Further
    shards are no difference (see `further`).
    """
    before, now = self._before(), self._source()
    if self.class_names is None:
      now["class_names"] = before["class_names"]
    differs = [key for key in now if before.get(key, now[key]) != now[key]]
    for split in self.paths:
      gone, more = self._compared(split)
      if gone and self._shards(split):
        differs.insert(0, f"shards (without {_few(gone)}{'; with ' * bool(more)}{_few(more)})")
    return differs

  def further(self) -> dict[str, list[Shard]]:
    """The shards of each split that the prepared data set does not have."""
    return {split: self._compared(split)[1] for split in self.paths}

  def shared(self) -> list[str]:
    """The names of shards that are in two splits."""
    owners = collections.Counter(
      (shard.name, shard.size) for split in self.paths for shard in self._shards(split)
    )
    return [name for (name, _), count in owners.items() if count > 1]

  def absent(self, pattern: str) -> list[str]:
    """What the pattern names that is not there, and not in the prepared data set either."""
    absent = tar_shards.missing(pattern, self.root)
    if not self.data_path.exists():
      return absent
    before = {entry[0] for shards in self._before()["shards"].values() for entry in shards}
    names = before | {os.path.basename(name) for name in before}
    return [name for name in absent if name not in names and os.path.basename(name) not in names]

  def leave_out_parts_of_shards(self) -> None:
    """Leaves out further shards that have no end yet, because they are still being copied."""
    for split, shards in self.further().items():
      for shard in shards:
        if not tar_shards.has_end(shard.path):
          print(f"{shard.path} has no end yet, and is left out until it has.", flush=True)
          self._shards(split).remove(shard)

  def is_of_older_rules(self) -> bool:
    """Whether the prepared data set was read by the rules of an earlier version of this file."""
    return self._before().get("rules") != parts.RULES

  def _compared(self, split: str) -> tuple[list[str], list[Shard]]:
    """The prepared data set's shards that are not there, and those that it does not have."""
    before = self._before()["shards"].get(split, [])
    gone, more = _difference(before, self._shards(split), lambda name: name)
    if len(gone) < len(before):
      return gone, more
    # Older imports know no folders; and shards may have moved with their folders.
    return _difference(before, self._shards(split), os.path.basename)

  def _before(self) -> dict:
    source = dict(self.info.metadata).get("source")
    if source is None:
      raise ValueError("dataset_info.json or metadata.json is missing")
    return source

  def _source(self) -> dict:
    """What the import is made of, besides shards; recorded in `info.metadata`."""
    return {
      "features": sorted(self.info.features),
      "class_names": self.class_names,
      "caption_key": self._caption_key,
    }

  def _shards(self, split: str) -> list[Shard]:
    """The shards of a split that are there. A file with two names counts once."""
    if split in self._seen:  # There may be many, on a slow disk.
      return self._seen[split]
    found = {}
    for path in self.paths[split]:
      try:
        stat = os.stat(path)
      except FileNotFoundError:  # deleted, or a link to nothing
        continue
      name = os.path.relpath(path, self.root or None)
      name = os.path.abspath(path) if name.startswith("..") else name
      shard = Shard(name, path, stat.st_size, stat.st_mtime_ns)
      found.setdefault((stat.st_dev, stat.st_ino), shard)
    self._seen[split] = list(found.values())
    return self._seen[split]

  def plan(self, base: "WebDataset | None", alone: bool = True) -> None:
    """Finds what is to do, and compares its size with the disk's before anything is written.

    Args:
      base: the version whose records this one continues.
      alone: whether no other process imports it at the same time.

    Raises:
      RunError: the disk has less space than the import needs.
    """
    shards = base.further() if base else {split: self._shards(split) for split in self.paths}
    num_classes = None
    if self._labels:
      num_classes = len(self.class_names) or self.limits.label + 1
    names = self._class_file if self.class_names else ""
    # Without locks each process makes its own parts, and the first one gives them the name.
    own = "" if alone else f".{socket.gethostname()}-{os.getpid()}"
    self._folder = folder = Path(self.data_path).parent / f"{PARTS}{own}"
    train = next(iter(self.paths))
    self._base, self._kept, self._todo = base, [], []
    for split, mine in shards.items():
      options = Options(
        self._captions, self._caption_key, num_classes, names, self.limits, split == train
      )
      kept, todo = parts.plan(split, mine, options, folder)
      self._kept += kept
      self._todo += todo
    ours = {path for job in self._kept for path in (job.output, f"{job.output}.json")}
    for path in folder.glob("*"):
      if str(path) not in ours:  # left by a killed process, or made with other options
        path.unlink()
    needed = sum(self._needed(split) for split in shards)
    free = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
    if needed > free:
      raise RunError(
        f"The import of {self.name} needs about {_bytes(needed)} in {folder.parent}, where"
        f" {_bytes(free)} are free: free some space, or set data.data_dir to a larger disk."
      )

  def _needed(self, split: str) -> int:
    """The bytes of the images to import, estimated by the first shard."""
    shards = [shard for job in self._todo if job.split == split for shard in job.shards]
    if not shards:
      return 0
    return int(sum(shard.size for shard in shards) * tar_shards.share_of_images(shards[0].path))

  def build(self) -> None:
    """Imports what `plan` has found. Whatever ends it, the complete parts stay."""
    folder = self._folder
    folder.mkdir(parents=True, exist_ok=True)
    shards = sum(len(job.shards) for job in self._todo)
    size = sum(shard.size for job in self._todo for shard in job.shards)
    processes = min(cores(), len(self._todo), 1 + size // _BYTES_PER_PROCESS)
    kept = sum(len(job.shards) for job in self._kept)
    print(
      f"Importing {_count(shards, 'shard')} ({_bytes(size)}) in {_count(processes, 'process')}"
      + (f"; {_count(kept, 'shard')} of an earlier try are kept." if kept else "."),
      flush=True,
    )
    done = pool.run(parts.write, self._todo, processes, parts.Progress(shards, size))
    with contextlib.closing(done):
      for _ in done:
        pass
    self._finish()
    shutil.rmtree(folder)

  def _finish(self) -> None:
    """Gives the parts that are not empty their names, in a folder that is then renamed."""
    final = self._folder.with_name(self._folder.name.replace(PARTS, "incomplete.final"))
    shutil.rmtree(final, ignore_errors=True)
    final.mkdir()
    found, splits = {}, []
    jobs = sorted(self._kept + self._todo, key=lambda job: job.shards[0].path)
    for split in dict.fromkeys([*(self._base.info.splits if self._base else ()), *self.paths]):
      mine = [(job, parts.found(job)) for job in jobs if job.split == split]
      found[split] = parts.total([values for _, values in mine])
      splits.append(self._finish_split(split, mine, found[split], final))
    self.info.set_splits(tfds.core.SplitDict(splits))
    self._describe(found, final)
    self.info.write_to_directory(final)
    try:
      final.rename(self.data_path)
    except OSError:
      if not Path(self.data_path).exists():
        raise
      shutil.rmtree(final)  # Another process, which no lock kept out, was first.

  def _finish_split(
    self, split: str, mine: Sequence, found: Found, final: Path
  ) -> tfds.core.SplitInfo:
    before = self._base.info.splits.get(split) if self._base else None
    files = list(map(Path, before.filepaths)) if before else []
    lengths = list(before.shard_lengths) if before else []
    size = before.num_bytes if before else 0
    full = [(Path(job.output), values) for job, values in mine if values.count]
    if not full and not files:
      raise ValueError(self._nothing(split, found))
    template = self._get_filename_template(split)
    count = len(files) + len(full)
    for i, path in enumerate([*files, *(path for path, _ in full)]):
      name = template.sharded_filepath(shard_index=i, num_shards=count).name
      _link(path, final / name, move=i >= len(files))
    return tfds.core.SplitInfo(
      name=split,
      shard_lengths=lengths + [values.count for _, values in full],
      num_bytes=size + sum(values.bytes for _, values in full),
      filename_template=template,
    )

  def _nothing(self, split: str, found: Found) -> str:
    """Why there is no usable sample."""
    shards = len(self._shards(split))
    text = (
      f"No usable sample in {self.patterns[split]!r}: {shards} shard(s), {len(found.damaged)} of"
      f" them damaged; skipped: {_listed(found.skipped) or 'none'}."
    )
    if found.endings:
      wanted = sample.wanted(self._captions, self._labels)
      text += (
        f" Their files end in {_endings(found.endings)}, after the first dot of the name; a sample"
        f" must have {wanted}."
      )
    return text

  def _describe(self, found: Mapping[str, Found], final: Path) -> None:
    """Records what was found in `info.metadata`, with that of the version before."""
    before = dict(self._base.info.metadata) if self._base else {}
    source = before.get("source", {"shards": {}})
    shards = {
      split: source["shards"].get(split, [])
      + [
        [shard.name, shard.size, shard.time, _checksum(shard.path)]
        for shard in sorted(
          (s for job in (*self._kept, *self._todo) if job.split == split for s in job.shards),
          key=lambda shard: shard.path,
        )
      ]
      for split in found
    }
    everything = parts.total(list(found.values()))
    skipped = collections.Counter(before.get("skipped", {})) + everything.skipped
    samples = {
      split: values.count + values.skipped.total() + before.get("samples", {}).get(split, 0)
      for split, values in found.items()
    }
    labels = collections.Counter(before.get("labels", {})) + everything.labels
    if self._labels and not labels:
      raise RunError(
        f"No sample of {', '.join(map(repr, self.patterns.values()))} has a label (cls): set"
        ' data.label_key="" to train on captions alone.'
      )
    if self._labels and not self.class_names:
      used = [int(label) for label in labels if 0 <= int(label) <= self.limits.label]
      self.info.features["label"].names = [str(i) for i in range(max(used) + 1)]
    lines = [json.dumps(line) + "\n" for line in everything.unused]
    if self._base and (listed := Path(self._base.data_path) / "skipped.jsonl").exists():
      lines.insert(0, listed.read_text())
    if lines:
      (final / "skipped.jsonl").write_text("".join(lines))
    self.info.metadata.update(
      source={**self._source(), "rules": parts.RULES, "shards": shards},
      samples=samples,
      captions=before.get("captions", 0) + everything.captions,
      caption_sources=dict(
        collections.Counter(before.get("caption_sources", {})) + everything.sources
      ),
      labels=dict(labels),
      uncaptioned=before.get("uncaptioned", 0) + everything.uncaptioned,
      unlabelled=before.get("unlabelled", 0) + everything.unlabelled,
      skipped=dict(skipped),
      endings=dict(everything.endings),
      damaged=before.get("damaged", []) + everything.damaged,
    )

  def summary(self) -> str:
    """One line about the imported, skipped and damaged data, of how much was there."""
    data = dict(self.info.metadata)
    sizes = ", ".join(
      f"{info.num_examples:,} {name} (of {_count(data['samples'][name], 'sample')} in"
      f" {_count(len(data['source']['shards'][name]), 'shard')})"
      for name, info in self.info.splits.items()
    )
    text = f"Imported {self.name}: {sizes}"
    if data["captions"]:
      sources = data["caption_sources"]
      text += f"; {_count(data['captions'], 'caption')}, from {_sources(sources)}"
    if self._labels:
      classes = len(self.info.features["label"].names)
      used = sum(0 <= int(label) < classes for label in data["labels"])
      text += f"; {used:,} of {_count(classes, 'class')} have samples"
    for what in ("uncaptioned", "unlabelled"):
      if data.get(what):
        text += f"; {_count(data[what], f'{what} sample')}"
    text += f"; skipped {sum(data['skipped'].values()):,}"
    if data["skipped"]:
      text += f" ({_listed(data['skipped'])})"
    if data["endings"]:
      text += f"; the files of incomplete samples end in {_endings(data['endings'])}"
    if data["damaged"]:
      text += f"; damaged, kept up to the damage: {', '.join(data['damaged'])}"
    if data["skipped"] or data["damaged"]:
      text += f"; listed in {self.data_path / 'skipped.jsonl'}"
    return text + "."

  def _download_and_prepare(self, *args, **kwargs):
    raise NotImplementedError("Import with `plan` and `build`.")

  def _as_dataset(self, *args, **kwargs):
    raise NotImplementedError("Read with `as_data_source`: tf.data reads no ArrayRecord.")


def newest(folder: Path) -> str:
  """The newest version of an import in its folder; "" if there is none."""
  found = [path.name for path in folder.glob("*.*.*") if re.fullmatch(r"\d+\.\d+\.\d+", path.name)]
  return max(found, key=lambda name: [int(n) for n in name.split(".")], default="")


def next_version(version: str) -> str:
  head, _, last = version.rpartition(".")
  return f"{head}.{int(last) + 1}"


def _difference(
  before: Sequence[list], shards: Sequence[Shard], key: Callable[[str], str]
) -> tuple[list[str], list[Shard]]:
  """The entries of `before` that are none of the shards, and the shards that are none of these."""
  left = collections.defaultdict(list)
  for entry in before:
    left[key(entry[0]), entry[1]].append(entry)
  more = []
  for shard in shards:
    entries = left[key(shard.name), shard.size]
    match = next((entry for entry in entries if _is_same(shard, *entry[2:])), None)
    if match is None:
      more.append(shard)
    else:
      entries.remove(match)
  return [entry[0] for entries in left.values() for entry in entries], more


def _is_same(shard: Shard, time: int | None = None, checksum: int | None = None) -> bool:
  """Whether a shard of this name and size is the one with this time or else checksum."""
  return time in (None, shard.time) or checksum == _checksum(shard.path)


def _checksum(path: str) -> int:
  """Of the start, the middle and the end of a shard."""
  checksum, size = 0, os.path.getsize(path)
  with open(path, "rb") as file:
    for start in (0, size // 2, max(size - _SAMPLED, 0)):
      file.seek(start)
      checksum = zlib.crc32(file.read(_SAMPLED), checksum)
  return checksum


def _link(source: Path, target: Path, move: bool) -> None:
  """A further name for a file; where the file system has none: the file, moved or copied."""
  try:
    os.link(source, target)
  except OSError as error:
    if error.errno in (errno.ENOENT, errno.ENOSPC, errno.EIO):
      raise
    if move:
      os.rename(source, target)
    else:
      shutil.copyfile(source, target)


def _listed(counts: Mapping[str, int]) -> str:
  return ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items()))


def _sources(counts: Mapping[str, int]) -> str:
  if len(counts) == 1:
    return next(iter(counts))
  return ", ".join(f"{source} ({_count(n, 'sample')})" for source, n in sorted(counts.items()))


def _endings(counts: Mapping[str, int]) -> str:
  most = collections.Counter(counts).most_common(6)
  return ", ".join(f".{ending} ({count:,})" for ending, count in most) or "nothing"


def _few(names: Sequence) -> str:
  names = [name.name if isinstance(name, Shard) else name for name in names]
  return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


def _count(number: int, noun: str) -> str:
  plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
  return f"{number:,} {noun if number == 1 else plural}"


def _bytes(number: float) -> str:
  return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"
