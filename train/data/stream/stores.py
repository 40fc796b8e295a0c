"""STUB"""
import os
from typing import NamedTuple

from train.data import tar_shards


class Unreadable(Exception): pass
class Version(NamedTuple):
  size: int
  tag: str
def expand(pattern, root=""): return tar_shards.expand(pattern, root)
def version(url): return Version(os.path.getsize(url), "")
