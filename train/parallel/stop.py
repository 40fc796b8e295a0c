"""Signals that announce an end: SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 and Ctrl-C.

A cluster sends them to the program or to its whole process group, once or several times. Every
thread blocks them, and children inherit that: they reach data workers, compilers and loggers, too,
and must not take these from a run that has to save. One thread waits for them. What it does depends
on what an end would lose:

- Nothing, before the first step: it raises `Interrupted` in the main thread. If the main thread
  does not answer (XLA compiles for minutes), it ends the process.
- Steps, from `defer()` on: nothing. The training loop asks `received()` after each step, and saves.

Only a second Ctrl-C, a second later, ends a run without a save.

This file is the first that a program imports, so it imports little.
"""

import contextlib
import multiprocessing.resource_tracker
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from train.errors import RunError
from train.parallel.watchdog import end_process, write

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
_NUDGE = signal.SIGRTMIN + 5  # Runs a Python handler in the main thread, also while that waits.
_TICK = 0.25  # seconds between two looks of the thread
_PATIENCE = 5.0  # seconds for the main thread to answer
_UNWINDING = 20.0  # seconds for it to end what it was in; Slurm and Kubernetes kill after 30
_IMPATIENCE = 1.0  # A Ctrl-C comes twice at once if it is sent to the group and forwarded, too.


class Interrupted(KeyboardInterrupt):
  """A signal ends this process, and no step is lost."""

  def __init__(self, signum: int, state: str):
    super().__init__(f"Stopped by {signal.Signals(signum).name}. {state}")
    self.exit_code = 128 + signum


class Stopped(RunError):
  """All processes of a run stop after the same step, with their state saved."""

  def __init__(self, message: str, exit_code: int):
    super().__init__(message)
    self.exit_code = exit_code


@contextlib.contextmanager
def listening() -> Iterator[None]:
  """Takes the signals within the block; an inner block changes nothing, nor one in a thread.

  A signal that was ignored before (nohup ignores SIGHUP) stays so.
  """
  global _listener
  _listener.raising = True
  if _listener.started or threading.current_thread() is not threading.main_thread():
    yield
    return
  _listener = _Listener()
  _listener.start()
  try:
    yield
  finally:
    _listener.close()
    _listener = _Listener()


@contextlib.contextmanager
def importing() -> Iterator[None]:
  """As `listening`; until an inner block listens, a signal ends the process at once.

  Modules that are half imported turn an exception into others.
  """
  with listening():
    _listener.raising = False
    yield


def received() -> int:
  """The number of the first signal so far; 0: none."""
  return _listener.signum


def interrupted() -> Interrupted:
  """The error for the signal that was received."""
  return _listener.interrupted()


def received_soon(seconds: float = 0.3) -> int:
  """As `received`, after an error: a signal that ended a child comes at the same time. Defers."""
  defer()
  deadline = time.monotonic() + seconds
  while _listener.started and not _listener.signum and time.monotonic() < deadline:
    time.sleep(0.01)
  return _listener.signum


def defer() -> None:
  """From now on an end would lose steps: a signal only sets what `received` returns."""
  _listener.deferring = True


@contextlib.contextmanager
def interruptible(save: Callable[[], object] | None = None) -> Iterator[None]:
  """A wait that a signal ends by `Interrupted`, although the rest is deferred.

  save: is called in a thread if the main thread does not answer (XLA compiles), and raises what
    the process then ends with.
  """
  before = _listener.deferring, _listener.may_end
  try:
    _listener.deferring, _listener.may_end = False, False
    if _listener.signum:
      raise _listener.interrupted()
    _listener.save = save
    yield
  finally:
    _listener.save = None
    _listener.deferring, _listener.may_end = before if not _listener.signum else (True, False)
    if _listener.signum and not _listener.answers("main"):
      threading.Event().wait()  # Until the process ends: what is being saved must not change.


def describe_by(describe: Callable[[], str]) -> None:
  """Sets what `Interrupted` says of the work: what is saved, and how it goes on."""
  _listener.describe = describe


class _Listener:
  """Waits for signals in a thread of its own."""

  def __init__(self):
    self.signum = 0
    self.deferring = self.started = False
    self.raising = True  # in the main thread
    self.may_end = True  # without an answer of the main thread
    self.describe = lambda: "The same command starts again."
    self.save: Callable[[], object] | None = None  # See `interruptible`.
    self._answer = {}  # {"by": the thread that answers the signal}
    self._over = False
    self._waited = 0.0  # since the signal; ticks, so that a suspended program has its time, too
    self._since = 0.0

  def start(self) -> None:
    self.started = True
    self._signals = [s for s in SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
    self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
    # It lives as long as the program, and its start unblocks SIGINT and SIGTERM.
    multiprocessing.resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
    # For threads that are older than this one, and do not block them.
    self._handlers = {s: signal.signal(s, self._handle) for s in self._signals}
    self._handlers[_NUDGE] = signal.signal(_NUDGE, self._handle)
    self._unraisable, sys.unraisablehook = sys.unraisablehook, self._unraisablehook
    self._thread = threading.Thread(target=self._run, name="signals", daemon=True)
    self._thread.start()

  def close(self) -> None:
    self._over = True
    signal.pthread_kill(self._thread.ident, _NUDGE)
    self._thread.join()
    sys.unraisablehook = self._unraisable
    for signum, handler in self._handlers.items():
      signal.signal(signum, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

  def interrupted(self) -> Interrupted:
    self.answers("main")
    return Interrupted(self.signum, self.describe())

  def answers(self, thread: str) -> bool:
    """Whether this thread is the one that answers the signal: the first that asks."""
    return self._answer.setdefault("by", thread) == thread  # CPython does it in one piece.

  def _run(self) -> None:
    signals = {*self._signals, _NUDGE}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    while not self._over:
      taken = signal.sigtimedwait(signals, _TICK)
      if taken is None:
        self._waited += _TICK
      elif taken.si_signo in self._signals:  # Python returns any number after a SIGCONT.
        self._take(taken.si_signo)
      if self.signum and not self.deferring and not self._over:
        self._press()

  def _take(self, signum: int) -> None:
    now = time.monotonic()
    if signum == self.signum == signal.SIGINT and now - self._since > _IMPATIENCE:
      self._end(f"Interrupted again: ended without a save. {self.describe()}")
    if not self.signum:
      self.signum, self._since, self._waited = signum, now, 0.0

  def _press(self) -> None:
    """Raises in the main thread what nobody has answered yet; later ends the process, or saves."""
    if self.raising and not self._answer:
      signal.pthread_kill(threading.main_thread().ident, _NUDGE)
    if self._waited <= (_UNWINDING if self._answer else _PATIENCE) and self.raising:
      return
    if self.may_end:
      self._end(str(Interrupted(self.signum, self.describe())))
    elif (save := self.save) and not self._answer and self.answers("saver"):
      threading.Thread(target=self._save, args=[save], name="saver", daemon=True).start()

  def _save(self, save: Callable[[], object]) -> None:
    try:
      save()
    except Stopped as stopped:
      self._end(str(stopped), stopped.exit_code)
    except Exception as error:
      self._end(str(error), 1)

  def _end(self, message: str, code: int = 0) -> None:
    write(f"\n{message}\n")
    end_process(0, code or 128 + self.signum)

  def _handle(self, signum, _frame) -> None:
    if signum != _NUDGE:
      self._take(signum)
    if self.signum and self.raising and not self.deferring and not self._answer:
      raise self.interrupted()

  def _unraisablehook(self, unraisable) -> None:
    # It was raised in a destructor, which cannot pass it on.
    if isinstance(unraisable.exc_value, Interrupted):
      self._answer.clear()
    else:
      self._unraisable(unraisable)


_listener = _Listener()
