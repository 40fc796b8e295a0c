"""Samples of a tar shard that is read forward only, from any position that was given before.

A sample is the consecutive members with one key, as img2dataset and webdataset write them. Folders
and files without a key between them do not count. One sample is in memory at a time, and of it only
what `sample.READ` names. So a few things differ from an import (tar_shards.py), which knows the
whole shard:

- An import joins the files of a key from anywhere. Here each run of them is a sample, which lacks
  the other files.
- A link leads to another file that is read of the same sample, or nowhere.
- A key whose files are there twice in a row is a duplicate, even if both times are complete.
- A global pax header counts for the next member only: who begins behind it never sees it.
"""

import bz2
import gzip
import lzma
import tarfile
from collections.abc import Iterator
from typing import BinaryIO

from train.data import tar_members, tar_shards
from train.data.sample import READ, Files, Unusable
from train.data.stream import stores
from train.data.tar_members import DamagedShard, Members, Name, Place, StrictTarInfo
from train.errors import RunError

_OPEN = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}
_MAGIC = {"gz": b"\x1f\x8b", "bz2": b"BZh", "xz": b"\xfd7zXZ"}
_LONGEST_MAGIC = 5
# Bytes that are decompressed at once. Always as many, so that a damaged shard has the same samples
# from wherever it is read.
_CHUNK = 2**14


def samples(
  url: str, start: int, max_bytes: int, packing: str = ""
) -> Iterator[tuple[int, str, Files]]:
  """Each sample with the position behind it, a byte of the archive.

  packing: how the archive is compressed: gz, bz2, xz. Then positions count what comes out, and all
    is decompressed from the beginning.

  Raises:
    DamagedShard: after the files before the damage, like `tar_shards.samples`.
  """
  damage: list[Exception] = []
  with stores.open_at(url, 0 if packing else start) as stored:
    head = b"" if packing or start else stored.read(_LONGEST_MAGIC)
    if packing:
      shard = _Forward(_OPEN[packing](stored), 0, chunk=_CHUNK)
    else:
      shard = _Forward(stored, start, ahead=head)
    run = _Run("", shard, max_bytes)
    with tar_shards.noted(damage, url, passing=(RunError, stores.Unreadable)):
      _check_name(head)
      shard.seek(start)
      for name, place, end in _members(shard):
        if name.key != run.key:
          yield from run.sample()
          run = _Run(name.key, shard, max_bytes)
        run.add(name, place, end)
    yield from run.sample()
  if damage:
    raise DamagedShard(f"{url}: {damage[0]}") from damage[0]


def _check_name(head: bytes) -> None:
  for packing, magic in _MAGIC.items():
    if head.startswith(magic):
      raise tarfile.ReadError(f"it is compressed: its name must end in .tar.{packing}")


def _members(shard: "_Forward") -> Iterator[tuple[Name, Place, int]]:
  """The members that belong to samples, each with the position behind it."""
  tar = tarfile.TarFile(fileobj=shard, tarinfo=StrictTarInfo)
  for member in tar_members.members_of(tar):
    tar.pax_headers.clear()
    name, place = tar_members.name_of(member.name), tar_members.place_of(member)
    if name.key and place is not None:
      yield name, place, tar.offset
  tar_members.check_end(tar)


class _Run:
  """Consecutive members with one key, and what they hold."""

  def __init__(self, key: str, shard: "_Forward", max_bytes: int):
    self.key, self._shard, self._max_bytes = key, shard, max_bytes
    self._members = Members(within="its sample", may_repeat=False)
    self._endings: set[str] = set()
    self._end = 0

  def add(self, name: Name, place: Place, end: int) -> None:
    self._members.add(name, self._read(name, place))
    self._endings.add(name.ending)
    self._end = end

  def _read(self, name: Name, place: Place) -> Place:
    if name.ending not in READ or name.ending in self._endings:  # Only a link can ask for it.
      return Place(held=Unusable("link to a file that is not read", name.path))
    if place.link or place.held is not None:
      return place
    if place.size > self._max_bytes:
      return Place(held=tar_members.too_large(self._max_bytes))
    self._shard.seek(place.start)
    content = self._shard.read(place.size)
    if len(content) < place.size:
      raise tarfile.ReadError("unexpected end of data")
    return Place(held=content)

  def sample(self) -> Iterator[tuple[int, str, Files]]:
    """The sample, if there is any member."""
    for key, places in self._members.samples():
      files = {e: self._members.behind_links(place).held for e, place in places.items()}
      # A damaged shard can end before the member does.
      yield min(self._end, self._shard.tell()), key, files


class _Forward:
  """What tarfile needs of a file, where that can only be read on."""

  def __init__(self, file: BinaryIO, position: int, ahead: bytes = b"", chunk: int | None = None):
    """
    Args:
      position: of the next byte.
      ahead: what was read of the file from there on.
      chunk: how many bytes are read at once; None: as many as are asked for.
    """
    self._file, self._position, self._ahead, self._chunk = file, position, ahead, chunk

  def tell(self) -> int:
    return self._position

  def read(self, size: int) -> bytes:
    """So many bytes, or fewer at the end of the file."""
    parts = []
    while size:
      self._ahead = self._ahead or self._file.read(self._chunk or size)
      if not self._ahead:
        break
      parts.append(self._ahead[:size])
      self._ahead = self._ahead[size:]
      self._position += len(parts[-1])
      size -= len(parts[-1])
    return parts[0] if len(parts) == 1 else b"".join(parts)

  def seek(self, position: int) -> None:
    """Reads on to a position, or to the end of the file."""
    assert position >= self._position
    while self._position < position and self.read(min(position - self._position, 2**20)):
      pass
