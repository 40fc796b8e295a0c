"""The records of a split, read at random; few of their files are open at a time.

TFDS's own source keeps every file open that was ever read, in each process that loads data.
"""

import bisect
import collections
import itertools
import threading

import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordReader

from train.data.machine import open_files


class Records:
  """A split, or a part of one, as a sequence of bytes. Threads may share it."""

  def __init__(self, builder: tfds.core.DatasetBuilder, split: str):
    files = builder.info.splits[split].file_instructions
    self._files = [(file.filename, file.skip) for file in files]
    self._ends = list(itertools.accumulate(file.take for file in files))
    self._open_nothing()

  def _open_nothing(self) -> None:
    self._readers: collections.OrderedDict[int, ArrayRecordReader] = collections.OrderedDict()
    self._lock = threading.Lock()
    # The other three quarters are for other splits, libraries and sockets.
    self._most = max(1, open_files() // 4)

  def __len__(self) -> int:
    return self._ends[-1] if self._ends else 0

  def __getitem__(self, index: int) -> bytes:
    if not 0 <= index < len(self):
      raise IndexError(f"record {index} of {len(self)}")
    number = bisect.bisect_right(self._ends, index)
    first = self._ends[number - 1] if number else 0
    return self._reader(number).read([self._files[number][1] + index - first])[0]

  def _reader(self, number: int) -> ArrayRecordReader:
    with self._lock:
      reader = self._readers.pop(number, None)
      if reader is None:
        # The one that was read longest ago closes when no thread reads from it any more.
        if len(self._readers) >= self._most:
          self._readers.popitem(last=False)
        name, _ = self._files[number]
        # Without reading ahead, which costs more than it gives at random.
        options = {"options": "readahead_buffer_size:0", "file_reader_buffer_size": 2**15}
        reader = ArrayRecordReader(name, **options)
      self._readers[number] = reader
      return reader

  def __getstate__(self) -> dict:
    return {"_files": self._files, "_ends": self._ends}

  def __setstate__(self, state: dict) -> None:
    self.__dict__.update(state)
    self._open_nothing()
