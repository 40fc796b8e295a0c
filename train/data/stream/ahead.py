"""A file of a store, read ahead in chunks.

While a chunk of CHUNK bytes is read, the next AHEAD are on their way, each asked for again if it
fails. So an open file takes at most (AHEAD + 2) * CHUNK bytes, whatever its size: those, the one
that is read, and a client's copy of one that becomes complete. There is no thread of ours.

Most stores send ranges. A server that sends whole files only is read in order, from the beginning;
what comes before the wanted bytes is dropped.
"""

import asyncio
import collections
import functools
import io
from concurrent.futures import Future
from typing import Any

from train.data.stream import failures

CHUNK = 2**22
AHEAD = 2


class Ahead(io.RawIOBase):
  """The bytes of a file of `size` bytes (-1: unknown) from `start` on."""

  def __init__(self, url: str, fs: Any, path: str, size: int, start: int):
    self._coming: collections.deque[Future[bytes]] = collections.deque()
    self._url, self._fs, self._path, self._size = url, fs, path, size
    self._at = start  # of the next byte that is read
    self._asked = start  # up to here
    self._chunk = memoryview(b"")
    self._source = _InOrder(fs, path, size) if size < 0 else _Ranges(fs, path, size)
    self._ask()

  def readable(self):
    return True

  def tell(self):
    return self._at

  def readinto(self, buffer):
    if not self._chunk:
      try:
        self._chunk = memoryview(self._next_chunk())
      except BaseException:  # What comes next would not follow what was read.
        self.close()
        raise
    part = self._chunk[: len(buffer)]
    buffer[: len(part)] = part
    self._chunk = self._chunk[len(part) :]
    self._at += len(part)
    return len(part)

  def close(self):
    if not self.closed:
      self._forget()
      failures.submit(self._source.close())
    super().close()

  def _next_chunk(self) -> bytes:
    if not self._coming:
      return b""
    try:
      chunk = self._coming.popleft().result()
    except failures.NoRanges:
      self._forget()
      self._source, self._asked = _InOrder(self._fs, self._path, self._size), self._at
      self._ask()
      return self._next_chunk()
    if len(chunk) < CHUNK:
      self._size = self._asked  # if it was unknown
    self._ask()
    return chunk

  def _ask(self) -> None:
    while len(self._coming) < self._source.ahead and not 0 <= self._size <= self._asked:
      end = self._asked + CHUNK if self._size < 0 else min(self._asked + CHUNK, self._size)
      fetch = functools.partial(_complete, self._source, self._asked, end, self._size >= 0)
      self._coming.append(failures.submit(failures.retried(self._url, fetch)))
      self._asked = end

  def _forget(self) -> None:
    for chunk in self._coming:
      chunk.cancel()
    self._coming.clear()


async def _complete(source: "_Ranges | _InOrder", start: int, end: int, whole: bool) -> bytes:
  chunk = await source.fetch(start, end)
  if whole and len(chunk) != end - start:
    raise OSError(f"{len(chunk)} bytes came instead of {end - start} from byte {start} on")
  return chunk


class _Ranges:
  """A file whose store sends any range of it."""

  ahead = AHEAD

  def __init__(self, fs: Any, path: str, size: int):
    self._fs, self._path, self._size = fs, path, size
    # fsspec's HTTP file alone notices that a server ignores the range, before it reads the rest.
    self._http = (
      fs.open(path, size=size, cache_type="none") if size and "http" in fs.protocol else None
    )

  async def fetch(self, start: int, end: int) -> bytes:
    if self._http:
      try:
        return await failures.in_time(self._http.async_fetch_range(start, end))
      except ValueError as error:
        raise failures.NoRanges from error
    if self._fs.async_impl:
      return await failures.in_time(self._fs._cat_file(self._path, start=start, end=end))
    return await asyncio.to_thread(self._read, start, end)

  def _read(self, start: int, end: int) -> bytes:
    with self._fs.open(self._path, "rb", size=self._size, cache_type="none") as file:
      file.seek(start)
      return file.read(end - start)

  async def close(self) -> None:
    pass


class _InOrder:
  """A file whose server sends all of it."""

  ahead = 1

  def __init__(self, fs: Any, path: str, size: int):
    self._fs, self._path, self._size = fs, path, size
    self._file, self._at = None, 0

  async def fetch(self, start: int, end: int) -> bytes:
    """These bytes, if `start` is where the last fetch ended without another request."""
    pieces = []
    try:
      if self._file is None or self._at > start:
        await self.close()
        self._file = await self._fs.open_async(self._path, size=self._size)
      while self._at < end:
        wanted = (start if self._at < start else end) - self._at
        piece = await failures.in_time(self._file.read(min(wanted, 2**20)))
        if not piece:
          break
        if self._at >= start:
          pieces.append(piece)
        self._at += len(piece)
    except BaseException:
      await self.close()
      raise
    return b"".join(pieces)

  async def close(self) -> None:
    file, self._file, self._at = self._file, None, 0
    if file is not None:
      await file.close()
