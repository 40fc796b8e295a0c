"""The rate of a data loader in images a second and images a CPU-second."""

import multiprocessing
import os
import pathlib
import time
from collections.abc import Callable


def rate(take: Callable, images: int, warm_up: int, batches: int) -> dict:
  """Times `batches` calls of `take`, which makes `images` each, after `warm_up` untimed calls.

  `images_per_cpu_second` is the rate of one fully used core, counting all threads and processes.
  Other programs on the machine change it little, but they slow down `images_per_second`.
  """
  began = time.perf_counter()
  for _ in range(warm_up):  # Takes the batches that were made while processes started.
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
