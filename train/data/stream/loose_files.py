"""Images that are files of their own: rows of a csv that name them, and pairs in a folder.

Positions count rows, or samples in the order of their keys. A file that cannot be read is Unusable;
it ends nothing.
"""

import csv
import io
import posixpath
import re
from collections.abc import Iterator

from train.data import tar_members
from train.data.sample import IMAGES, READ, Files, Unusable
from train.data.stream import stores
from train.data.tar_members import DamagedShard
from train.errors import RunError

_LONGEST_LINE = 2**20  # characters of a csv


def rows(
  url: str, start: int, max_bytes: int, image_key: str, caption_key: str
) -> Iterator[tuple[int, str, Files]]:
  """The rows of a csv or tsv, as open_clip has them: the path or url of an image, and a caption.

  A path is relative to the csv's folder, and is the key of its sample. Tabs separate columns if the
  header has one, else commas. Rows before `start` are read, but not their images.

  Raises:
    RunError: a column is missing.
    DamagedShard: there is no next row, as after a quote that nothing closes.
  """
  # Bytes that are no UTF-8 become halves of characters, which `caption_line` makes bytes again.
  text = io.TextIOWrapper(stores.open_at(url), "utf-8-sig", "surrogateescape", newline="")
  with text:
    header = text.readline(_LONGEST_LINE)
    delimiter = "\t" if "\t" in header else ","
    columns, *_ = [*csv.reader([header], delimiter=delimiter), []]
    _check_columns(url, columns, image_key, caption_key)
    reader = csv.reader(_lines(text), delimiter=delimiter)
    try:
      for position, row in enumerate(filter(None, reader), 1):  # Without empty lines.
        if position > start:
          cells = dict(zip(columns, row, strict=False))
          path, caption = cells.get(image_key, ""), cells.get(caption_key, "")
          image = content(beside(url, path), max_bytes) if path else Unusable("row without a path")
          yield position, path, {_image_ending(path): image, "txt": caption_line(caption)}
    except csv.Error as error:
      raise DamagedShard(f"{url}: line {reader.line_num + 1}: {error}") from error


def _lines(text: io.TextIOWrapper) -> Iterator[str]:
  while line := text.readline(_LONGEST_LINE):
    if len(line) == _LONGEST_LINE:
      raise csv.Error(f"a line has more than {_LONGEST_LINE - 1} characters")
    yield line


def _check_columns(url: str, columns: list[str], image_key: str, caption_key: str) -> None:
  for field, key in (("image_key", image_key), ("caption_key", caption_key)):
    if key not in columns:
      raise RunError(
        f"{url} has no column {key!r}: set data.{field} to one of its columns,"
        f" {', '.join(map(repr, columns[:20])) or 'of which it has none'}."
      )


def caption_line(caption: str) -> bytes:
  """The txt with one caption."""
  return re.sub(r"[\r\n]+", " ", caption).encode("utf-8", "surrogateescape")


def _image_ending(path: str) -> str:
  ending = posixpath.splitext(without_query(path))[1][1:].lower()
  return ending if ending in IMAGES else IMAGES[0]


def beside(url: str, path: str) -> str:
  """What `path` names in the folder of `url`."""
  if "://" in path:
    return path
  return posixpath.join(posixpath.dirname(without_query(url)), path)


def without_query(url: str) -> str:
  """The url without what an HTTP server takes after a question mark."""
  return re.sub(r"^(https?://[^?#]*).*", r"\1", url)


def pairs(url: str, start: int, max_bytes: int) -> Iterator[tuple[int, str, Files]]:
  """The files of a folder, grouped as in a tar shard: `a.jpg`, `a.txt`. Folders in it are not read.

  The names are read from the beginning.
  """
  by_key: dict[str, list[tuple[str, str]]] = {}
  for path in stores.files_in(url):
    _, key, ending = tar_members.name_of(posixpath.basename(path))
    if key:
      by_key.setdefault(key, []).append((ending, path))
  for position, key in enumerate(sorted(by_key)[start:], start + 1):
    files: dict[str, bytes | Unusable] = {}
    for ending, path in sorted(by_key[key]):
      if ending in files:
        files = dict.fromkeys(files, tar_members.duplicate(key, ending))
        break
      files[ending] = content(path, max_bytes) if ending in READ else b""
    yield position, key, files


def content(url: str, max_bytes: int) -> bytes | Unusable:
  """What a file holds, or why it cannot be used.

  Raises:
    RunError: an extra is not installed, which other files need, too.
  """
  try:
    with stores.open_at(url) as stored:
      found = stored.read(max_bytes + 1)
  except (RunError, stores.Unreadable, ValueError) as error:  # ValueError: a null byte in the path.
    if isinstance(error.__cause__, ImportError):
      raise
    return Unusable("file that cannot be read", str(error))
  return found if len(found) <= max_bytes else tar_members.too_large(max_bytes)
