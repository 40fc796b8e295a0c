"""Names and bytes of shards where they lie: on a disk, or in a store, through fsspec.

fsspec's clients have the protocols of stores, and find credentials as they always do: in variables,
in files, and in fsspec's own configuration. A file of a store is read ahead (ahead.py), and asked
for again if the store fails (failures.py).
"""

import asyncio
import contextlib
import fnmatch
import functools
import glob
import io
import os
import re
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

import fsspec

from train.data import tar_shards
from train.data.stream import failures
from train.data.stream.ahead import Ahead
from train.data.stream.failures import Unreadable
from train.data.stream.versions import Version
from train.errors import RunError
from train.paths import local_path

_BUFFER = 2**17  # bytes: a reader of headers asks for 512
# The extra that a scheme needs, with the package that it adds.
_EXTRAS = {
  "s3": ("s3", "s3fs"),
  "gs": ("gs", "gcsfs"),
  "gcs": ("gs", "gcsfs"),
  "hf": ("hf", "huggingface_hub"),
  "http": ("http", "aiohttp"),
  "https": ("http", "aiohttp"),
}
# What an extra's stores call a content. HTTP's mirrors behind one name have ETags of their own.
_TAGS = {"s3": "ETag", "gs": "generation", "hf": "blob_id"}


def expand(pattern: str, root: str = "") -> list[str]:
  """The sorted names that a pattern gives: paths, and URLs of s3, gs, http, https and hf.

  Parts are joined by `::`. A part has braces (`{000..999}`, `{a,b}`) and is then a glob, a name
  (which no listing is read for), or `@` and the name of a file with one name a line. A path is
  relative to `root`, whose name is no pattern, and in such a file to the file's folder.

  Raises:
    RunError: a part gives no name, or cannot be listed.
  """
  names: set[str] = set()
  for part in pattern.split("::"):
    found = _names(tar_shards.expand_braces(part), root)
    if not found:
      raise RunError(f"No shard matches {_placed(part, root)!r}.")
    names |= found
  return sorted(names)


def version(url: str) -> Version:
  """The version of a file, asked of its store now.

  Raises:
    Unreadable: it is not there, or its store fails.
    RunError: its bucket is not there, the store refuses us, or an extra is not installed.
  """
  if not is_remote(url):
    with _local_failures(url):
      status = os.stat(url)
    # In whole seconds, for disks of a network round what a client has just written.
    changed = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(status.st_mtime_ns // 10**9))
    return Version(status.st_size, f"changed {changed} UTC")
  fs, path = _store(url)
  extra, _ = _EXTRAS[url.partition("://")[0]]
  # huggingface_hub would list the folder, and then take all versions from that.
  options = {"refresh": True, "expand_info": True} if extra == "hf" else {}
  try:
    info = _info(url, fs, path, **options)
  except Unreadable as error:
    if failures.is_absence(error):
      _check_bucket(url, fs, path)
    raise
  size = -1 if info.get("size") is None else int(info["size"])
  tag = _TAGS.get(extra, "")
  return Version(size, f"{tag} {info[tag]}" if info.get(tag) else "")


def open_at(url: str, start: int = 0) -> BinaryIO:
  """The bytes of a file from `start` on: read(n), tell() and close(), forward only.

  Raises as `version` does, also when it is read.
  """
  if is_remote(url):
    raw = Ahead(url, *_store(url), version(url).size, start)
    return io.BufferedReader(raw, _BUFFER)
  with _local_failures(url):
    raw = _Local(url)
    raw.seek(start)
  return io.BufferedReader(raw, _BUFFER)


def files_in(folder: str) -> list[str]:
  """The files of a folder, without those of folders in it. Raises as `version` does."""
  if not is_remote(folder):
    with _local_failures(folder), os.scandir(folder) as entries:
      return [entry.path for entry in entries if entry.is_file()]
  fs, path = _store(folder)
  try:
    names = _entries(folder, fs, path.rstrip("/"))
  except Unreadable as error:
    if failures.is_absence(error):
      _check_bucket(folder, fs, path)
    raise
  return [fs.unstrip_protocol(name) for name, is_file in names.items() if is_file]


def is_remote(name: str) -> bool:
  """Whether a name is a URL, not a path."""
  return re.match(r"(?i)[a-z][a-z0-9+.-]+://", name) is not None


def _names(parts: list[str], root: str) -> set[str]:
  """The names that parts without braces give."""
  names: set[str] = set()
  local = []  # A disk is asked for one of these: a mistake in the pattern misses all.
  for part in parts:
    if part.startswith("@"):
      names.update(_lines(_placed(part[1:], root)))
    elif is_remote(part):
      names.update(_listed(part) if _is_glob(part, part) else [part])
    elif glob.has_magic(part):
      names.update(tar_shards.expand(part, root))
    else:
      local.append(_placed(part, root))
  return names | set(local) if any(map(os.path.exists, local)) else names


def _placed(name: str, folder: str) -> str:
  if is_remote(name):
    return name
  path = str(local_path(name, "shards"))
  return f"{folder}/{path}" if is_remote(folder) else os.path.join(folder, path)


def _lines(name: str) -> list[str]:
  try:
    with open_at(name) as file:
      lines = [os.fsdecode(line).strip() for line in file.read().splitlines()]
  except Unreadable as error:
    raise RunError(f"A list of shards cannot be read. {error}") from error
  return [_placed(line, os.path.dirname(name)) for line in lines if line]


def _is_glob(part: str, url: str) -> bool:
  letters = "*[" if url.startswith("http") else "*?["  # http://host/name?query
  return any(letter in part for letter in letters)


def _listed(pattern: str) -> list[str]:
  """What a glob of a store names, folder by folder, as `glob.glob` does.

  fsspec's own glob takes a folder whose listing failed for an empty one.
  """
  fs, path = _store(pattern)
  parts = path.split("/")
  fixed = next(i for i, part in enumerate(parts) if _is_glob(part, pattern))
  found = ["/".join(parts[:fixed])]
  for part in parts[fixed:]:
    found = [name for folder in found for name in _matches(pattern, fs, folder, part)]
  if not found:
    _check_bucket(pattern, fs, path)
  return [fs.unstrip_protocol(name) for name in found]


def _matches(pattern: str, fs: Any, folder: str, part: str) -> list[str]:
  try:
    names = _entries(pattern, fs, folder)
  except Unreadable as error:
    if failures.is_absence(error):
      return []
    raise RunError(f"Shards cannot be listed. {error}") from error
  if not _is_glob("?", pattern):
    part = part.replace("?", "[?]")
  found = []
  for name in names:
    last = name.rpartition("/")[2]
    hidden = last.startswith(".") and not part.startswith(".")
    if not hidden and fnmatch.fnmatchcase(last, part):
      found.append(name)
  return found


def _entries(url: str, fs: Any, folder: str) -> dict[str, bool]:
  """The names in a folder of a store, each with whether it is a file."""
  entries = failures.ask(url, functools.partial(_call, fs, "ls", folder, detail=True))
  names = {entry["name"].rstrip("/"): entry["type"] == "file" for entry in entries}
  return {name: is_file for name, is_file in names.items() if name.rpartition("/")[0] == folder}


def _store(url: str) -> tuple[Any, str]:
  """fsspec's file system of a URL, and the path in it."""
  scheme = url.partition("://")[0]
  if scheme not in _EXTRAS:
    raise RunError(f"{url}: shards are read from paths and from URLs of {', '.join(_EXTRAS)}.")
  extra, package = _EXTRAS[scheme]
  try:
    options = _options(extra)
    configured = fsspec.config.conf.get(scheme, {})  # the user's
    options = {key: value for key, value in options.items() if key not in configured}
    return fsspec.url_to_fs(url, **options)
  except ImportError as error:
    raise RunError(
      f"{url} needs {package}, which is not installed: pip install 'sbjax[{extra}]'."
    ) from error


def _options(extra: str) -> dict[str, Any]:
  if extra == "hf":
    return {}
  if extra != "http":
    return {"use_listings_cache": False}  # It takes memory, and hides that a shard changed.
  import aiohttp

  # aiohttp ends each response after five minutes, and asks for compressed ones.
  timeout = aiohttp.ClientTimeout(
    total=None, sock_connect=failures.TIMEOUT, sock_read=failures.TIMEOUT
  )
  return {"client_kwargs": {"timeout": timeout}, "headers": {"Accept-Encoding": "identity"}}


async def _call(fs: Any, method: str, path: str, **options) -> Any:
  if fs.async_impl:
    return await getattr(fs, f"_{method}")(path, **options)
  return await asyncio.to_thread(getattr(fs, method), path, **options)


def _info(url: str, fs: Any, path: str, **options) -> dict[str, Any]:
  return failures.ask(url, lambda: failures.in_time(_call(fs, "info", path, **options)))


def _check_bucket(url: str, fs: Any, path: str) -> None:
  """Raises a RunError if the bucket of an absent file, or its repository, is not there itself."""
  scheme = url.partition("://")[0]
  if _EXTRAS[scheme][0] == "http":
    return
  depth = 1 if scheme != "hf" else 3 if path.startswith(("datasets/", "spaces/")) else 2
  bucket = "/".join(path.split("/")[:depth])
  try:
    _info(url, fs, bucket)
  except Unreadable as error:
    if failures.is_absence(error):
      raise RunError(f"{url}: {scheme}://{bucket} is not there.") from error


class _Local(io.FileIO):
  """A file of this machine."""

  def readinto(self, buffer):
    with _local_failures(self.name):
      return super().readinto(buffer)


@contextlib.contextmanager
def _local_failures(path: str) -> Iterator[None]:
  try:
    yield
  except PermissionError as error:
    raise RunError(f"{path}: no permission to read it.") from error
  except OSError as error:
    raise Unreadable(f"{path}: {error.strerror or error}, tried once") from error
