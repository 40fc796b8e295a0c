"""Reads img2dataset/webdataset tar shards: their files, their samples, and errors in them.

Nothing is extracted to a path: a member's name is only the key of its sample.

The members of a sample (tar_members.py) may be anywhere in the shard: all headers are read first,
then the files of each sample.
"""

import contextlib
import glob
import io
import os
import re
import tarfile
from collections.abc import Iterator

from train.data import tar_members
from train.data.sample import IMAGES, Files, Unusable
from train.data.tar_members import ENDINGS, DamagedShard, Members, Name, Place, StrictTarInfo
from train.errors import RunError
from train.paths import local_path

_MAX_HELD = 2**26  # bytes of the texts that are held of a compressed shard


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
  with noted(damage, path), tarfile.open(path, tarinfo=StrictTarInfo) as tar:
    index = _Index(tar, max_bytes)
    with noted(damage, path):
      index.read_headers()
    for key, places in index.samples():
      files = {}
      for ending, place in places.items():
        with noted(damage, path):
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
    with tarfile.open(path, "r:", tarinfo=StrictTarInfo) as tar:
      size = 0
      for member in tar_members.members_of(tar):
        ending = tar_members.name_of(member.name).ending
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
def noted(
  damage: list[Exception], path: str, passing: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
  """Appends an error of a damaged shard to `damage`; others are raised, with the shard's path.

  passing: further errors that are raised.
  """
  try:
    yield
  except (MemoryError, *passing):
    raise
  except Exception as error:  # tarfile and the decompressors have many for broken data.
    if isinstance(error, OSError) and error.errno is not None:  # gzip.BadGzipFile has none.
      error.filename = error.filename or path
      raise
    damage.append(error)


class _Index:
  """The places of a shard's members, by the keys of their samples; the bytes stay in the file."""

  def __init__(self, tar: tarfile.TarFile, max_bytes: int):
    self._tar, self._max_bytes, self._members = tar, max_bytes, Members()
    self.samples = self._members.samples
    # Going back in a compressed file decompresses it again from its beginning.
    self._may_hold = 0 if isinstance(tar.fileobj, io.BufferedReader) else _MAX_HELD

  def read_headers(self) -> None:
    for member in tar_members.members_of(self._tar):
      if (place := tar_members.place_of(member)) is not None:
        self._add(tar_members.name_of(member.name), place, member.size)
    tar_members.check_end(self._tar)

  def _add(self, name: Name, place: Place, size: int) -> None:
    if name.ending in ("txt", "json", "cls") and not place.link and size <= self._may_hold:
      place = place._replace(held=self.content(place))
      self._may_hold -= size
    self._members.add(name, place)

  def content(self, place: Place) -> bytes | Unusable:
    place = self._members.behind_links(place)
    if place.held is not None:
      return place.held
    if place.size > self._max_bytes:
      return tar_members.too_large(self._max_bytes)
    self._tar.fileobj.seek(place.start)
    content = self._tar.fileobj.read(place.size)
    if len(content) < place.size:
      raise tarfile.ReadError("unexpected end of data")
    return content
