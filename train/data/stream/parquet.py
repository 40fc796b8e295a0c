"""Samples of a parquet file whose rows hold the images, as img2dataset and Hugging Face write it.

A column has the name of an ending (`jpg`, `txt`, `json`, `cls`), or is `image` (bytes, or a struct
with `bytes`), `caption`, or `key`. Positions count rows. One row group is in memory at a time.
"""

import io
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from train.data import tar_members, tar_shards
from train.data.sample import IMAGES, READ, Files, Unusable
from train.data.stream import stores
from train.data.stream.loose_files import caption_line
from train.data.tar_members import DamagedShard
from train.errors import RunError

_ROWS = 64  # that are decoded at once
_GAP = 2**20  # bytes that are read and dropped, for a store takes longer to be asked again


def samples(url: str, start: int, max_bytes: int) -> Iterator[tuple[int, str, Files]]:
  """Each sample with the position behind it. Rows that img2dataset could not download are none.

  Raises:
    RunError: pyarrow is not installed, or no column holds images.
    DamagedShard: after the rows before the damage.
  """
  damage: list[Exception] = []
  with tar_shards.noted(damage, url, passing=(RunError, stores.Unreadable)):
    for number, row in _rows(url, start):
      if row.get("status") in (None, b"success"):
        yield number + 1, _key(row.get("key"), number), _files(row, max_bytes)
  if damage:
    raise DamagedShard(f"{url}: {damage[0]}") from damage[0]


def _rows(url: str, start: int) -> Iterator[tuple[int, dict[str, Any]]]:
  """The rows from `start` on, with their numbers."""
  try:
    import pyarrow.parquet as pq
  except ImportError as error:
    raise RunError(f"{url} needs pyarrow: pip install 'sbjax[parquet]'.") from error
  with io.BufferedReader(_Seekable(url)) as stored:
    file = pq.ParquetFile(stored, page_checksum_verification=True)
    columns = _columns(url, file.schema_arrow.names)
    first = 0
    for group in range(file.num_row_groups):
      count = file.metadata.row_group(group).num_rows
      if first + count > start:
        batches = file.iter_batches(_ROWS, [group], columns, use_threads=False)
        number = first
        for batch in batches:
          for i in range(max(0, start - number), len(batch)):
            yield number + i, {name: _value(batch[name][i]) for name in columns}
          number += len(batch)
      first += count


def _columns(url: str, names: list[str]) -> list[str]:
  if not {"image", *IMAGES} & set(names):
    raise RunError(
      f"{url} has no column with images (image, {', '.join(IMAGES)}), but"
      f" {', '.join(names[:20])}. img2dataset downloads the images of a list of urls."
    )
  return [name for name in names if name in (*READ, "image", "caption", "key", "status")]


def _value(scalar) -> Any:
  """A text as its bytes, for they may be no UTF-8."""
  if scalar.is_valid and hasattr(scalar, "as_buffer"):
    return scalar.as_buffer().to_pybytes()
  value = scalar.as_py()
  return value.encode() if isinstance(value, str) else value


def _key(value: Any, number: int) -> str:
  if isinstance(value, bytes):
    return value.decode("utf-8", "replace")
  return str(number if value is None else value)


def _files(row: dict[str, Any], max_bytes: int) -> Files:
  files = {ending: _file(row.get(ending), max_bytes) for ending in READ}
  files["jpg"] = files["jpg"] or _file(row.get("image"), max_bytes)
  caption = _file(row.get("caption"), max_bytes)
  if isinstance(caption, bytes):
    caption = caption_line(caption.decode("utf-8", "surrogateescape"))
  files["txt"] = files["txt"] or caption
  return {ending: file for ending, file in files.items() if file is not None}


def _file(value: Any, max_bytes: int) -> bytes | Unusable | None:
  if isinstance(value, dict):
    value = value.get("bytes")
  if isinstance(value, int):
    value = str(value).encode()
  if value is None or isinstance(value, bytes):
    return tar_members.too_large(max_bytes) if len(value or b"") > max_bytes else value
  return Unusable("column of another type", type(value).__name__)


class _Seekable(io.RawIOBase):
  """A stored file that is opened again where it is read next, unless that is a little ahead."""

  def __init__(self, url: str):
    self._url, self._size = url, stores.version(url).size
    self._position = self._at = 0
    self._stored: BinaryIO | None = None
    if self._size < 0:
      raise RunError(f"{url} is parquet, whose end is read first, and its server says no size.")

  def readable(self) -> bool:
    return True

  def seekable(self) -> bool:
    return True

  def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
    base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
    self._position = base + offset
    return self._position

  def readinto(self, buffer) -> int:
    if not 0 <= self._position - self._at <= _GAP:
      self._close_stored()
    if self._stored is None:
      self._stored, self._at = stores.open_at(self._url, self._position), self._position
    self._stored.read(self._position - self._at)
    found = self._stored.read(len(buffer))
    buffer[: len(found)] = found
    self._position = self._at = self._position + len(found)
    return len(found)

  def close(self) -> None:
    self._close_stored()
    super().close()

  def _close_stored(self) -> None:
    if self._stored is not None:
      self._stored.close()
      self._stored = None
