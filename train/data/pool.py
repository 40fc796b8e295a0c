"""Processes for long jobs, such as an import's. No signal to the job's group takes them down.

A job's time limit or Ctrl-C reaches the whole process group. The program itself decides what a
signal means: its processes block all of them, and end when it ends them or is killed.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, resource_tracker
from multiprocessing.reduction import ForkingPickler
from typing import Any

from train.data.machine import describe_exit
from train.errors import RunError
from train.parallel.stop import SIGNALS


def run(
  work: Callable[[Any, Callable], Any],
  jobs: Sequence[Any],
  processes: int,
  heard: Callable[[Any], None],
) -> Iterator[tuple[Any, Any]]:
  """Yields each job and its result `work(job, report)`, in the order in which they end.

  Closing the generator kills the processes.

  Args:
    work: a module's function; it may call `report` with what `heard` should get.
    processes: at most so many; 1: this process works.
    heard: is called with each report, and with None about every second.

  Raises:
    RunError: a process died; the message says how.
    Exception: what `work` raised.
  """
  if min(processes, len(jobs)) <= 1:
    for job in jobs:
      yield job, work(job, heard)
    return
  waiting, busy = list(reversed(jobs)), {}
  started = _start(work, min(processes, len(jobs)))
  try:
    for channel in started:
      busy[channel] = waiting.pop()
      channel.send(busy[channel])
    while busy:
      for channel in connection.wait(list(busy), timeout=1):
        try:
          kind, value = channel.recv()
        except (EOFError, ConnectionError) as error:
          raise _died(started[channel], busy[channel]) from error
        if kind == "failed":
          raise value
        if kind == "report":
          heard(value)
          continue
        yield busy.pop(channel), value
        if waiting:
          busy[channel] = waiting.pop()
          channel.send(busy[channel])
      heard(None)
  finally:
    for process in started.values():
      process.kill()
    for process in started.values():
      process.join()


def _died(process, job: Any) -> RunError:
  process.join(10)  # Its end of the channel is closed before it has ended.
  code = process.exitcode
  how = "closed its channel" if code is None else describe_exit(code)
  return RunError(
    f"A process that worked on {job} {how}. What is finished stays, and the same command continues."
  )


def _start(work: Callable, count: int) -> dict[connection.Connection, Any]:
  """Processes with all signals blocked, by the channels to them."""
  context = multiprocessing.get_context("spawn")  # A fork of JAX's threads may hang.
  started, program = {}, sys.modules["__main__"]
  before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
  try:
    resource_tracker.ensure_running()  # Unblocks two of them, when it starts.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    # A process would import the program again, with JAX: for seconds, and its memory.
    sys.modules["__main__"] = types.ModuleType("__main__")
    for _ in range(count):
      ours, theirs = context.Pipe()
      with theirs:
        process = context.Process(target=_serve, args=(theirs, work), daemon=True)
        process.start()
        started[ours] = process
    return started
  except BaseException:
    for process in started.values():
      process.kill()
    raise
  finally:
    sys.modules["__main__"] = program
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(channel: connection.Connection, work: Callable) -> None:
  threading.Thread(target=_end_with_parent, daemon=True).start()
  with contextlib.suppress(EOFError, ConnectionError):
    while True:
      job = channel.recv()
      try:
        answer = "done", work(job, lambda message: channel.send(("report", message)))
      except Exception as error:
        answer = "failed", _portable(error)
      channel.send(answer)


def _end_with_parent() -> None:
  """Ends this process when the program is killed: it may wait for a file for ever."""
  multiprocessing.parent_process().join()
  os._exit(1)


def _portable(error: Exception) -> Exception:
  with contextlib.suppress(Exception):
    return ForkingPickler.loads(ForkingPickler.dumps(error))
  return RuntimeError(f"{type(error).__name__}: {error}")
