"""What worker processes that load data have in common, whatever they load."""

import contextlib
import re
import shutil
import signal
from collections.abc import Iterator

import grain
import jax
from absl import flags

from train.data.machine import describe_exit
from train.errors import RunError


def in_workers(dataset: grain.IterDataset, workers: int, each: int) -> grain.IterDataset:
  """The dataset from worker processes, each of which holds so many elements ready."""
  if not flags.FLAGS.is_parsed():  # grain's workers read flags; absl's `app.run` parses them.
    flags.FLAGS.mark_as_parsed()
  options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=max(1, each))
  return dataset.mp_prefetch(options, worker_init_fn=_leave_the_accelerator)


def _leave_the_accelerator(worker: int, workers: int) -> None:
  """Keeps JAX in a worker off the GPU."""
  del worker, workers
  jax.config.update("jax_platforms", "cpu")


@contextlib.contextmanager
def worker_died(workers: int) -> Iterator[None]:
  """Says how a worker ended, in place of grain's error."""
  try:
    yield
  except RuntimeError as error:
    code = re.search(r"Worker process was terminated .* exit code (-?\d+)", str(error))
    if not code:
      raise
    raise RunError(
      f"A worker process that loads data {_describe_end(int(code[1]), workers)} The same command"
      " continues."
    ) from error


def _describe_end(code: int, workers: int) -> str:
  """How a worker ended, and what would need less memory or less of /dev/shm, where batches pass."""
  if -code not in (signal.SIGKILL, signal.SIGBUS):
    return f"{describe_exit(code)}."
  room = shutil.disk_usage("/dev/shm").total / 1e6
  return (
    f"{describe_exit(code)}. Fewer data.workers (now {workers}) and a smaller data.prefetch take"
    f" less; /dev/shm has {room:,.0f} MB, and data.workers=0 takes nothing there."
  )
