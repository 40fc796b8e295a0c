"""Samples of a shard, from a position on, whatever its format."""

import os
from collections.abc import Iterator

from train.data.sample import Files
from train.data.stream import loose_files, parquet, tar_stream
from train.errors import RunError

_ENDINGS = {
  ".tar": "tar",
  ".tar.gz": "tar.gz",
  ".tgz": "tar.gz",
  ".tar.bz2": "tar.bz2",
  ".tar.xz": "tar.xz",
  ".parquet": "parquet",
  ".csv": "csv",
  ".tsv": "csv",
}


def kind(url: str) -> str:
  """The format of a shard by its name: tar, tar.gz, tar.bz2, tar.xz, parquet, csv, folder.

  Raises:
    RunError: it has none of the endings.
  """
  name = loose_files.without_query(url).lower()
  if name.endswith("/") or ("://" not in url and os.path.isdir(url)):
    return "folder"
  for ending, found in _ENDINGS.items():
    if name.endswith(ending):
      return found
  raise RunError(
    f"{url} is no shard that can be read: its name must end in {', '.join(_ENDINGS)}, or in / if it"
    " is a folder of pairs such as a.jpg and a.txt."
  )


def samples(
  url: str,
  start: int,
  max_bytes: int,
  image_key: str = "filepath",
  caption_key: str = "title",
) -> Iterator[tuple[int, str, Files]]:
  """The samples of a shard, each its key and files with the position behind it.

  Args:
    start: a position that was given before, or 0: what follows is what followed then.
    max_bytes: of a file; the content of a larger one is Unusable.
    image_key, caption_key: columns of a csv.

  Raises:
    DamagedShard: after the samples before the damage.
    RunError, stores.Unreadable: the shard cannot be read.
  """
  match kind(url):
    case "parquet":
      return parquet.samples(url, start, max_bytes)
    case "csv":
      return loose_files.rows(url, start, max_bytes, image_key, caption_key)
    case "folder":
      return loose_files.pairs(url, start, max_bytes)
    case tar:
      return tar_stream.samples(url, start, max_bytes, tar.removeprefix("tar").removeprefix("."))
