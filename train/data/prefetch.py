"""Batches on their devices ahead of the step that takes them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import grain


def prefetch_to_device(
  iterator: grain.DatasetIterator, put: Callable[[Any], Any], size: int
) -> Iterator[tuple[Any, dict[str, Any]]]:
  """Yields (batch on its devices, the state of `iterator` after it), prefetched by `size` batches.

  A thread fetches batches and copies them to devices. Its errors are raised here. Closing the
  generator ends the thread and closes `iterator`.

  Args:
    iterator: gives this process's item of each batch.
    put: from an item to the batch on its devices: `to_devices` of a Source.
    size: batches ahead; 0: no thread.
  """
  ahead = grain.experimental.ThreadPrefetchDatasetIterator(_OnDevice(iterator, put), size)
  with contextlib.closing(ahead):
    for batch in ahead:
      yield batch, ahead.get_state()


class _OnDevice(grain.DatasetIterator):
  """Applies `put` to each batch."""

  def __init__(self, iterator: grain.DatasetIterator, put: Callable):
    super().__init__(iterator)
    self._put = put

  def __next__(self) -> Any:
    return self._put(next(self._parent))

  def get_state(self) -> dict[str, Any]:
    return self._parent.get_state()

  def set_state(self, state: dict[str, Any]) -> None:
    self._parent.set_state(state)

  def close(self) -> None:
    self._parent.close()
