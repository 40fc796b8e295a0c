"""Batches on their devices ahead of the step that takes them."""

import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain

_PATIENCE = 5.0  # Seconds for workers to end.


def prefetch_to_device(
  iterator: grain.DatasetIterator, put: Callable[[Any], Any], size: int
) -> Iterator[tuple[Any, dict[str, Any]]]:
  """Yields (batch on its devices, the state of `iterator` after it), prefetched by `size` batches.

  A thread fetches batches and copies them to devices. Its errors are raised here. Closing the
  generator ends the thread and closes `iterator`; workers that do not end in time are killed.

  Args:
    iterator: gives this process's item of each batch.
    put: from an item to the batch on its devices: `to_devices` of a Source.
    size: batches ahead; 0: no thread.
  """
  ahead = grain.experimental.ThreadPrefetchDatasetIterator(_OnDevice(iterator, put), size)
  before = multiprocessing.active_children()
  try:
    for batch in ahead:
      yield batch, ahead.get_state()
  finally:
    # A worker that hangs would hold the thread, which waits for its batch.
    killing = threading.Timer(_PATIENCE, _kill_children, [before])
    killing.start()
    ahead.close()
    killing.cancel()


def _kill_children(but: Sequence[multiprocessing.process.BaseProcess]) -> None:
  for child in multiprocessing.active_children():
    if child not in but:
      child.kill()


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
