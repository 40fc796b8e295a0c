"""Shards of a server are those of a disk, in each format and from each position."""

import pyarrow
import pyarrow.parquet
import pytest
from shards_case import pairs, write_shard
from store_case import Ranges, Unsized, Whole, serving

from train.data.sample import Unusable
from train.data.stream import formats
from train.errors import RunError


@pytest.fixture
def folder(tmp_path):
  files = [*pairs(40)]
  write_shard(tmp_path / "a.tar", files)
  write_shard(tmp_path / "a.tar.xz", files, "w:xz")
  images, texts = ([content for _, content in files[i::2]] for i in (0, 1))
  table = pyarrow.table({"jpg": images, "url": [bytes(9000)] * 40, "txt": texts})
  pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=9, compression="none")
  for i, image in enumerate(images[:3]):
    (tmp_path / f"{i}.jpg").write_bytes(image)
  rows = [f"{i}.jpg,a {i}" for i in range(5)]
  (tmp_path / "a.csv").write_text("\n".join(["filepath,title", *rows]))
  return tmp_path


def read(url, start=0):
  return [
    (position, key, {e: c.reason if isinstance(c, Unusable) else c for e, c in files.items()})
    for position, key, files in formats.samples(str(url), start, 2**20)
  ]


@pytest.mark.parametrize("handler", [Ranges, Whole])
@pytest.mark.parametrize("name", ["a.tar", "a.tar.xz", "a.parquet", "a.csv"])
def test_a_shard_of_a_server_has_the_samples_of_the_file(folder, handler, name):
  samples = read(folder / name)
  with serving(handler, folder=folder) as server:
    assert read(f"{server.url}/{name}") == samples
    assert read(f"{server.url}/{name}", samples[2][0]) == samples[3:]
  assert len(samples) == (5 if name == "a.csv" else 40)


def test_parquet_needs_a_server_that_says_its_size(folder):
  with (
    serving(Unsized, folder=folder) as server,
    pytest.raises(RunError, match="whose end is read first, and its server says no size"),
  ):
    read(f"{server.url}/a.parquet")
