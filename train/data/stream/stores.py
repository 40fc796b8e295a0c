"""Stands in for the stores until they are merged: local files."""

import os
from typing import BinaryIO, NamedTuple


class Unreadable(Exception):
  """A shard stays unreadable."""


class Version(NamedTuple):
  size: int
  tag: str


def version(url: str) -> Version:
  return Version(os.stat(url).st_size, "")


def open_at(url: str, start: int = 0) -> BinaryIO:
  file = open(url, "rb")  # noqa: SIM115
  file.seek(start)
  return file


def expand(pattern: str, root: str = "") -> list[str]:
  from train.data import tar_shards

  return tar_shards.expand(pattern, root)
