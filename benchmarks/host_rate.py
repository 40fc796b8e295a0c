"""Images a second and a CPU-second of a loader, with all its threads and processes."""

import multiprocessing
import os
import pathlib
import time
from collections.abc import Callable


def rate(take: Callable, images: int, warm_up: int, batches: int) -> dict:
  """Calls `take` for `batches` batches of `images`, after `warm_up` that are not timed.

  `images_per_cpu_second` says what a core does that does nothing else. Other programs on the
  machine change it little; `images_per_second` is theirs as well.
  """
  began = time.perf_counter()
  for _ in range(warm_up):  # What was made while processes started
    take()
  started, cpu = time.perf_counter(), _cpu_seconds()
  for _ in range(batches):
    take()
  seconds, cpu = time.perf_counter() - started, _cpu_seconds() - cpu
  return {
    "start_seconds": round(started - began, 2),
    "images_per_second": round(batches * images / seconds),
    "images_per_cpu_second": round(batches * images / cpu),
  }


def _cpu_seconds() -> float:
  """Processor time of this process and of its living children, in Linux's ticks of 10 ms."""
  ticks = 0
  for child in multiprocessing.active_children():
    # The name, in parentheses, may hold spaces; user and system time are fields 14 and 15.
    fields = pathlib.Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    ticks += int(fields[11]) + int(fields[12])
  return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")
