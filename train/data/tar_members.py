"""Members of a tar shard: which sample they belong to, what links name, which headers are broken.

A sample is the members with one key, the path up to the first dot of the file name: `0001.jpg`,
`0001.txt`, `0001.json`. A link is the file that it names.
"""

import os
import tarfile
from collections.abc import Iterator
from typing import NamedTuple

from train.data.sample import READ, Unusable

ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_MAX_HEADER = 2**20  # bytes of a long name or of pax records
_MAX_LINKS = 8  # from link to link


class DamagedShard(Exception):
  """A shard ends before its end mark, is not a tar archive, or has a wrong checksum."""


class Name(NamedTuple):
  """What the path of a file says of its sample."""

  path: str
  key: str  # "" of files that macOS adds, such as `._0001.jpg`
  ending: str  # all after the first dot, in lower case


def name_of(path: str) -> Name:
  path = os.path.normpath(path)
  folder, file = os.path.split(path)
  stem, _, ending = file.partition(".")
  return Name(path, os.path.join(folder, stem) if stem else "", ending.lower())


class Place(NamedTuple):
  """Where the content of a member is."""

  start: int = 0
  size: int = 0
  link: str = ""  # the name of the member whose content it is
  held: bytes | Unusable | None = None  # the content itself, or why there is none


def place_of(member: tarfile.TarInfo) -> Place | None:
  """None for folders and devices."""
  if member.issym():
    folder = os.path.dirname(os.path.normpath(member.name))
    return Place(link=os.path.normpath(os.path.join(folder, member.linkname)))
  if member.islnk():
    return Place(link=os.path.normpath(member.linkname))
  if member.issparse():
    return Place(held=Unusable("sparse file in the shard"))
  return Place(member.offset_data, member.size) if member.isfile() else None


class Members:
  """The places of members, by their names and by the keys of their samples."""

  def __init__(self, within: str = "the shard", may_repeat: bool = True):
    """
    Args:
      within: where links may lead, in words.
      may_repeat: whether a key may occur again, if each time it has the same files.
    """
    self._within, self._may_repeat = within, may_repeat
    self._by_name: dict[str, Place] = {}
    self._by_key: dict[str, list[tuple[str, Place]]] = {}

  def add(self, name: Name, place: Place) -> None:
    self._by_name[name.path] = place
    if name.key:
      read = place if name.ending in READ else Place(held=b"")
      self._by_key.setdefault(name.key, []).append((name.ending, read))

  def samples(self) -> Iterator[tuple[str, dict[str, Place]]]:
    """Each key with its files, by their endings."""
    for key, members in self._by_key.items():
      parts: list[dict[str, Place]] = [{}]
      for ending, place in members:
        if ending in parts[-1]:
          parts.append({})
        parts[-1][ending] = place
      refused = len(parts) > 1 and not self._may_repeat
      if refused or any(part.keys() != parts[0].keys() for part in parts):
        twice = duplicate(key, next(iter(parts[1])))
        parts = [dict.fromkeys(parts[0], Place(held=twice))]
      for part in parts:
        yield key, part

  def behind_links(self, place: Place) -> Place:
    for _ in range(_MAX_LINKS):
      if place.link:
        missing = Place(held=Unusable(f"link to no file of {self._within}", place.link))
        place = self._by_name.get(place.link, missing)
    return Place(held=Unusable("link to a link to a link")) if place.link else place


def duplicate(key: str, ending: str) -> Unusable:
  return Unusable("duplicate key", f"several files {os.path.basename(key)}.{ending}")


def too_large(max_bytes: int) -> Unusable:
  return Unusable(f"file larger than data.max_member_bytes={max_bytes}")


def members_of(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
  """The members of an archive that is read with `StrictTarInfo`; only one is in memory."""
  for member in tar:
    tar.members.clear()  # tarfile keeps them all.
    if member.size < 0:  # Pax records can say so.
      raise tarfile.ReadError(f"{member.name} has {member.size} bytes")
    yield member


def check_end(tar: tarfile.TarFile) -> None:
  """Reads what follows the end mark, and raises for more than zeros."""
  while rest := tar.fileobj.read(2**20):  # gzip's checksum is at its end.
    if rest.strip(b"\0"):
      raise tarfile.ReadError("more data after the end mark, such as a second archive")


class StrictTarInfo(tarfile.TarInfo):
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
