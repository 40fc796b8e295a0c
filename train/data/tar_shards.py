"""Reads img2dataset/webdataset tar shards: their files, their samples, and errors in them.

Nothing is extracted to a path: a member's name is only the key of its sample.

A sample is the members with one key, the path up to the first dot of the file name: `0001.jpg`,
`0001.txt`, `0001.json`. They may be anywhere in the shard: all headers are read first, then the
files of each sample. A link is the file that it names.
"""

import contextlib
import glob
import io
import os
import re
import tarfile
from collections.abc import Iterator
from typing import NamedTuple

from train.data.sample import IMAGES, READ, Files, Unusable
from train.errors import RunError
from train.paths import local_path

ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_MAX_HEADER = 2**20  # bytes of a long name or of pax records
_MAX_HELD = 2**26  # bytes of the texts that are held of a compressed shard
_MAX_LINKS = 8  # from link to link


class DamagedShard(Exception):
  """A shard ends before its end mark, is not a tar archive, or has a wrong checksum."""


def expand(pattern: str, root: str = "") -> list[str]:
  """The sorted files that a pattern names: globs, `{000..099}` or `{a,b}` braces, joined by `::`.

  It is relative to `root`, whose name is no pattern.
  """
  return sorted({path for part in expand_braces(pattern) for path in _matches(part, root)})


def missing(pattern: str, root: str = "") -> list[str]:
  """What a pattern names in braces or between `::` that is not there, under none of `ENDINGS`."""
  found: dict[str, str] = {}
  for part in expand_braces(pattern):
    stem = part.removesuffix(next((e for e in ENDINGS[::-1] if part.endswith(e)), ""))
    if any(map(os.path.exists, _matches(part, root))):  # A link may lead nowhere.
      found[stem] = ""
    else:
      found.setdefault(stem, part)
  return [part for part in found.values() if part]


def _matches(part: str, root: str) -> list[str]:
  part = str(local_path(part, "shards"))
  whole = os.path.join(root, part)
  if os.path.lexists(whole):  # Its brackets and stars are letters.
    return [whole]
  return [os.path.join(root, name) for name in glob.glob(part, root_dir=root or None)]


def expand_braces(pattern: str) -> list[str]:
  if "::" in pattern:
    return [path for part in pattern.split("::") for path in expand_braces(part)]
  braces = re.search(r"\{([^{}]*)\}", pattern)
  if braces is None:
    return [pattern]
  if numbers := re.fullmatch(r"(\d+)\.\.(\d+)", braces[1]):
    first, last = numbers.groups()
    options = [str(i).zfill(len(first)) for i in range(int(first), int(last) + 1)]
  else:
    options = braces[1].split(",")
  parts = (pattern[: braces.start()] + option + pattern[braces.end() :] for option in options)
  return [path for part in parts for path in expand_braces(part)]


def samples(path: str, max_bytes: int) -> Iterator[tuple[str, Files]]:
  """The samples of a shard, each its key and files, in the order of their first files.

  The content of a file of more than `max_bytes`, or whose place is not clear, is Unusable. Of a
  damaged shard, yields the files before the damage, then raises DamagedShard.

  Raises:
    OSError, MemoryError: of the system, not of the shard.
  """
  damage: list[Exception] = []
  with _noted(damage, path), tarfile.open(path, tarinfo=_StrictTarInfo) as tar:
    index = _Index(tar, max_bytes)
    with _noted(damage, path):
      index.read_headers()
    for key, places in index.samples():
      files = {}
      for ending, place in places.items():
        with _noted(damage, path):
          files[ending] = index.content(place)
      if files:
        yield key, files
  if damage:
    raise DamagedShard(f"{path}: {damage[0]}") from damage[0]


def has_end(path: str) -> bool:
  """Whether a shard ends as an archive does, if it is not compressed."""
  if not path.endswith(".tar"):
    return True
  with open(path, "rb") as file:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 2 * tarfile.BLOCKSIZE))
    return file.read() == bytes(2 * tarfile.BLOCKSIZE)


def share_of_images(path: str) -> float:
  """The share of a shard's bytes that are images; 1 if only reading all of it could tell."""
  try:
    with tarfile.open(path, "r:", tarinfo=_StrictTarInfo) as tar:
      size = 0
      for member in tar:
        tar.members.clear()
        ending = os.path.basename(member.name).partition(".")[2].lower()
        size += member.size * (member.isfile() and ending in IMAGES)
      return size / max(1, os.path.getsize(path))
  except tarfile.TarError:  # Compressed or damaged, which the import says.
    return 1.0


def checked_samples(path: str, max_bytes: int) -> Iterator[tuple[str, Files]]:
  """`samples`; a damaged shard is a RunError that says what to do."""
  try:
    yield from samples(path, max_bytes)
  except DamagedShard as error:
    reason = str(error).partition("\n")[0]
    raise RunError(f"{reason} The shard is damaged: copy it again.") from error


@contextlib.contextmanager
def _noted(damage: list[Exception], path: str) -> Iterator[None]:
  """Appends an error of a damaged shard to `damage`; others are raised, with the shard's path."""
  try:
    yield
  except MemoryError:
    raise
  except Exception as error:  # tarfile and the decompressors have many for broken data.
    if isinstance(error, OSError) and error.errno is not None:  # gzip.BadGzipFile has none.
      error.filename = error.filename or path
      raise
    damage.append(error)


class _Place(NamedTuple):
  """Where the content of a member is."""

  start: int = 0
  size: int = 0
  link: str = ""  # the name of the member whose content it is
  held: bytes | Unusable | None = None  # the content itself, or why there is none


class _Index:
  """The places of a shard's members, by the keys of their samples; the bytes stay in the file."""

  def __init__(self, tar: tarfile.TarFile, max_bytes: int):
    self._tar, self._max_bytes = tar, max_bytes
    self._by_name: dict[str, _Place] = {}
    self._by_key: dict[str, list[tuple[str, _Place]]] = {}
    # Going back in a compressed file decompresses it again from its beginning.
    self._may_hold = 0 if isinstance(tar.fileobj, io.BufferedReader) else _MAX_HELD

  def read_headers(self) -> None:
    for member in self._tar:
      self._tar.members.clear()  # tarfile keeps them all.
      if member.size < 0:  # Pax records can say so.
        raise tarfile.ReadError(f"{member.name} has {member.size} bytes")
      self._add(member)
    while rest := self._tar.fileobj.read(2**20):  # gzip's checksum is at its end.
      if rest.strip(b"\0"):
        raise tarfile.ReadError("more data after the end mark, such as a second archive")

  def _add(self, member: tarfile.TarInfo) -> None:
    name = os.path.normpath(member.name)
    folder, file = os.path.split(name)
    stem, _, ending = file.partition(".")
    if member.issym():
      place = _Place(link=os.path.normpath(os.path.join(folder, member.linkname)))
    elif member.islnk():
      place = _Place(link=os.path.normpath(member.linkname))
    elif member.issparse():
      place = _Place(held=Unusable("sparse file in the shard"))
    elif member.isfile():
      place = _Place(member.offset_data, member.size)
    else:
      return
    ending = ending.lower()
    if ending in ("txt", "json", "cls") and not place.link and member.size <= self._may_hold:
      place = place._replace(held=self.content(place))
      self._may_hold -= member.size
    self._by_name[name] = place
    if stem:  # Names without a stem are files that macOS adds, such as `._0001.jpg`.
      if ending not in READ:
        place = _Place(held=b"")
      self._by_key.setdefault(os.path.join(folder, stem), []).append((ending, place))

  def samples(self) -> Iterator[tuple[str, dict[str, _Place]]]:
    """Each key with its files. A key may occur again, if each time it has the same files."""
    for key, members in self._by_key.items():
      parts: list[dict[str, _Place]] = [{}]
      for ending, place in members:
        if ending in parts[-1]:
          parts.append({})
        parts[-1][ending] = place
      if any(part.keys() != parts[0].keys() for part in parts):
        twice = next(ending for ending in parts[0] | parts[-1] if ending in parts[0])
        reason = Unusable("duplicate key", f"several files {os.path.basename(key)}.{twice}")
        parts = [dict.fromkeys(parts[0], _Place(held=reason))]
      for part in parts:
        yield key, part

  def content(self, place: _Place) -> bytes | Unusable:
    for _ in range(_MAX_LINKS):
      if place.link:
        missing = _Place(held=Unusable("link to no file of the shard", place.link))
        place = self._by_name.get(place.link, missing)
    if place.link:
      return Unusable("link to a link to a link")
    if place.held is not None:
      return place.held
    if place.size > self._max_bytes:
      return Unusable(f"file larger than data.max_member_bytes={self._max_bytes}")
    self._tar.fileobj.seek(place.start)
    content = self._tar.fileobj.read(place.size)
    if len(content) < place.size:
      raise tarfile.ReadError("unexpected end of data")
    return content


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
