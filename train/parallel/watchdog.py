"""Ends a program that waits too long, and prints what it waited for, so that no run hangs forever.

A thread measures how long the training loop waits. It does not need the main thread, which may hang
inside XLA or NCCL: it writes to stderr and exits by `os._exit`. It counts its own ticks instead of
reading the clock, so time while the program is suspended or the machine sleeps does not count.
"""

import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

# EX_TEMPFAIL of sysexits.h: trying again may help.
EXIT_CODE = 75
PATIENCE = 5.0  # seconds for the workdir to name the last good checkpoint
_FRAMES = 8  # how many of a thread's innermost calls are printed


class _Wait:
  """One wait: its reason, its limit in seconds and the config's field for it, the ticks so far."""

  def __init__(self, what: str, seconds: float, field: str):
    self.what, self.seconds, self.field, self.ticks = what, seconds, field, 0


class Watchdog:
  """Watches inside a `with`; the last call of `waits_for` or `pauses_for` gives the reason.

  Args:
    step_seconds, pause_seconds: step_timeout_seconds and pause_timeout_seconds of a Config.
    process, processes: this process's index, and the number of processes.
    last_good: names the checkpoint to continue from; it is called on another thread and may hang.
    tick: seconds between two checks.
    linger: seconds that process 0 of several waits before it exits. JAX ends the others when it
      exits, and they have to print their messages first.
  """

  def __init__(
    self,
    step_seconds: float,
    pause_seconds: float,
    process: int,
    processes: int,
    last_good: Callable[[], str],
    *,
    tick: float = 1.0,
    linger: float = 10.0,
  ):
    self._name = f"Process {process} of {processes} (pid {os.getpid()})"
    self._step_seconds, self._pause_seconds = step_seconds, pause_seconds
    self._last_good, self._tick = last_good, tick
    self._linger = linger if process == 0 and processes > 1 else 0.0
    self._wait = _Wait("", 0, "")
    self._over = threading.Event()
    self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

  def __enter__(self):
    self._thread.start()
    return self

  def __exit__(self, *_):
    self._over.set()

  def waits_for(self, what: str, *, first: bool = False) -> None:
    """Starts a wait for `what`, part of a step; the first step has three times the limit."""
    self._wait = _Wait(what, self._step_seconds * (3 if first else 1), "step_timeout_seconds")

  def pauses_for(self, what: str) -> None:
    """Starts a wait for `what`, between steps."""
    self._wait = _Wait(what, self._pause_seconds, "pause_timeout_seconds")

  @property
  def what(self) -> str:
    """What the program waits for."""
    return self._wait.what

  def _run(self) -> None:
    while not self._over.wait(self._tick):
      wait = self._wait
      wait.ticks += 1
      if 0 < wait.seconds <= wait.ticks * self._tick and wait is self._wait:
        self._end(wait)

  def _end(self, wait: _Wait) -> None:
    write(
      f"\n{self._name} waited {wait.seconds:g} s for {wait.what}, and ends itself. The limit is"
      f" --config.{wait.field}; 0 is none. Its threads, innermost call last:\n"
      f"{describe_threads(without=self._thread)}"
    )
    # In a thread, since the file system may hang.
    answers = []
    looking = threading.Thread(target=lambda: answers.append(self._last_good()), daemon=True)
    looking.start()
    looking.join(PATIENCE)
    good = answers[0] if answers else "not known: the workdir does not answer"
    write(f"{self._name}: the last good checkpoint is {good}. The same command continues.\n")
    end_process(self._linger)


def describe_threads(without: threading.Thread | None = None) -> str:
  """The innermost calls of each thread, the main thread first; equal stacks are one entry."""
  names = {thread.ident: thread.name for thread in threading.enumerate()}
  stacks: dict[tuple[str, ...], list[str]] = {}
  main = threading.main_thread().ident
  for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
    if without is None or ident != without.ident:
      stacks.setdefault(_calls(frame), []).append(names.get(ident, f"thread {ident}"))
  lines = []
  for calls, threads in stacks.items():
    threads.sort()
    others = f" and {len(threads) - 1} more like it" if len(threads) > 1 else ""
    lines += [f"  {threads[0]}{others}", *(f"    {call}" for call in calls)]
  return "\n".join(lines) + "\n"


def _calls(frame) -> tuple[str, ...]:
  frames = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
  calls = [f"{_short(call.filename)}:{call.lineno} {call.name}" for call in reversed(frames)]
  return (("...",) if len(calls) > _FRAMES else ()) + tuple(calls[-_FRAMES:])


def _short(filename: str) -> str:
  """A path relative to sys.path: train/loop.py, jax/_src/array.py."""
  path = Path(filename)
  for root in map(Path, sorted(filter(None, sys.path), key=len, reverse=True)):
    if path.is_relative_to(root):
      return str(path.relative_to(root))
  return "/".join(path.parts[-2:])


def write(text: str) -> None:
  """Writes to stderr without the main thread, which may hang."""
  os.write(sys.__stderr__.fileno(), text.encode(errors="replace"))


def end_process(linger: float, code: int = EXIT_CODE) -> None:
  """Ends this process from any thread, after `linger` seconds."""
  for child in multiprocessing.active_children():  # Data workers would outlive this process.
    child.kill()
  time.sleep(linger)
  os._exit(code)
