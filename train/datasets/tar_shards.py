"""Reads img2dataset/webdataset tar shards: their files, their samples, and errors in them.

Nothing is extracted to a path: a member's name is only the key of its sample.

A sample is a run of neighbouring members with one key, the path up to the first dot of the file
name: `0001.jpg`, `0001.txt`, `0001.json`. Image: jpg, jpeg, png or webp. Captions: from the json
(`captions` or `caption`, a text or a list), else the txt. Label: cls, an integer.
"""

import glob
import itertools
import json
import os
import re
import tarfile
import warnings
from collections.abc import Iterator

from train.datasets import pictures
from train.datasets.pictures import Limits
from train.errors import RunError

_IMAGES = ("jpg", "jpeg", "png", "webp")
_READ = (*_IMAGES, "txt", "json", "cls")
_MAX_HEADER = 2**20  # bytes of a long name or of pax records


class Unusable(Exception):
  """A sample cannot be used. Samples with the same problem have the same message."""


class DamagedShard(Exception):
  """A shard ends before its end mark, is not a tar archive, or has a wrong checksum."""


def expand(pattern: str) -> list[str]:
  """The sorted files that match a pattern with globs and `{000..099}` or `{a,b}` braces."""
  return sorted({path for part in _expand_braces(pattern) for path in glob.glob(part)})


def _expand_braces(pattern: str) -> list[str]:
  braces = re.search(r"\{([^{}]*)\}", pattern)
  if braces is None:
    return [pattern]
  if numbers := re.fullmatch(r"(\d+)\.\.(\d+)", braces[1]):
    first, last = numbers.groups()
    options = [str(i).zfill(len(first)) for i in range(int(first), int(last) + 1)]
  else:
    options = braces[1].split(",")
  parts = (pattern[: braces.start()] + option + pattern[braces.end() :] for option in options)
  return [path for part in parts for path in _expand_braces(part)]


def samples(path: str, max_bytes: int) -> Iterator[tuple[str, dict[str, bytes | None]]]:
  """The samples of a shard, each its key and {extension: content}.

  The content of a member of more than `max_bytes` is None. Of a damaged shard, yields the members
  before the damage, then raises DamagedShard.
  """
  damage: list[Exception] = []
  members = _whole_members(path, max_bytes, damage)
  for key, group in itertools.groupby(members, key=lambda member: member[0]):
    yield key, {extension: content for _, extension, content in group}
  if damage:
    raise DamagedShard(f"{path}: {damage[0]}") from damage[0]


def checked_samples(path: str, max_bytes: int) -> Iterator[tuple[str, dict[str, bytes | None]]]:
  """`samples`; a damaged shard is a RunError that says what to do."""
  try:
    yield from samples(path, max_bytes)
  except DamagedShard as error:
    reason = str(error).partition("\n")[0]
    raise RunError(f"{reason} The shard is damaged: copy it again.") from error


def _whole_members(
  path: str, max_bytes: int, damage: list[Exception]
) -> Iterator[tuple[str, str, bytes | None]]:
  """Yields (key, extension, content) of each file; appends the error that ends a damaged shard."""
  try:
    with tarfile.open(path, tarinfo=_StrictTarInfo) as tar:
      yield from _members(tar, max_bytes)
      while tar.fileobj.read(2**20):  # tarfile stops at the end mark; gzip's checksum is after it.
        pass
  except Exception as error:  # tarfile and the decompressors have many for broken data.
    if isinstance(error, OSError) and error.errno is not None:
      raise  # An error of the disk, not of the shard. (gzip.BadGzipFile has no errno.)
    damage.append(error)


class _StrictTarInfo(tarfile.TarInfo):
  """Raises for a broken header or a missing end mark, which tarfile treats as the end.

  Also raises for a size that tarfile would follow backwards, or read into memory.
  """

  def _proc_member(self, archive):  # Private, but the same in all versions; `frombuf` is not.
    if self.size < 0 or (self.type in b"LKxgX" and self.size > _MAX_HEADER):
      raise tarfile.InvalidHeaderError(f"a header has {self.size} bytes")
    return super()._proc_member(archive)

  @classmethod
  def fromtarfile(cls, tar):
    try:
      return super().fromtarfile(tar)
    except tarfile.EOFHeaderError:
      raise
    except tarfile.HeaderError as error:
      raise tarfile.ReadError(str(error)) from error


def _members(tar: tarfile.TarFile, max_bytes: int) -> Iterator[tuple[str, str, bytes | None]]:
  for member in tar:
    if member.size < 0:  # Pax records can say so.
      raise tarfile.ReadError(f"{member.name} has {member.size} bytes")
    folder, name = os.path.split(member.name)
    stem, _, extension = name.partition(".")
    # Names without a stem are files that macOS adds, such as `._0001.jpg`.
    if member.isfile() and stem:
      content: bytes | None = b""
      if extension.lower() in _READ:
        content = tar.extractfile(member).read() if member.size <= max_bytes else None
      yield os.path.join(folder, stem), extension.lower(), content


def example(
  sample: dict[str, bytes | None],
  *,
  with_captions: bool,
  num_classes: int | None,
  limits: Limits,
) -> dict:
  """{"image": unchanged bytes, "captions": list of str, "label": int}; the latter two if wanted.

  num_classes: labels are less; None leaves out the label.

  Raises:
    Unusable: the sample cannot be used, and why.
  """
  if None in sample.values():
    raise Unusable(f"file larger than data.max_member_bytes={limits.member_bytes}")
  fields = {"image": _image(sample, limits)}
  if with_captions:
    fields["captions"] = _captions(sample)
  if num_classes is not None:
    fields["label"] = _label(sample, num_classes)
  return fields


def _image(sample: dict[str, bytes], limits: Limits) -> bytes:
  content = next((sample[extension] for extension in _IMAGES if extension in sample), None)
  if content is None:
    raise Unusable("no image")
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")  # Pillow warns of odd metadata, which does not matter here.
      pictures.decode(content, limits)
  except pictures.BeyondLimits as error:
    raise Unusable(f"image with {error}") from error
  except Exception as error:  # Each of Pillow's decoders has its own errors.
    raise Unusable("undecodable image") from error
  return content


def _captions(sample: dict[str, bytes]) -> list[str]:
  try:
    fields = json.loads(sample.get("json", b"{}").decode("utf-8"))
    texts = (
      fields.get("captions") or fields.get("caption") or sample.get("txt", b"").decode("utf-8")
    )
  except (ValueError, RecursionError, AttributeError) as error:
    raise Unusable("unreadable text") from error
  texts = [texts] if isinstance(texts, str) else texts
  if not isinstance(texts, list) or not all(isinstance(caption, str) for caption in texts):
    raise Unusable("unreadable text")
  texts = [caption.strip() for caption in texts if caption.strip()]
  if not texts:
    raise Unusable("no caption")
  if any("\ud800" <= character <= "\udfff" for caption in texts for character in caption):
    raise Unusable("unreadable text")  # JSON can escape half a character, which UTF-8 lacks.
  return texts


def _label(sample: dict[str, bytes], num_classes: int) -> int:
  if "cls" not in sample:
    raise Unusable("no label")
  try:
    label = int(sample["cls"])
  except ValueError as error:
    raise Unusable("unreadable label") from error
  if not 0 <= label < num_classes:
    raise Unusable("label out of range")
  return label
