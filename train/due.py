"""What is due after a step: an evaluation, a checkpoint, the end of the run.

Signals, clocks and a file named "stop" in the workdir differ between processes, so several agree on
them: about every two seconds, since an agreement waits for the device, and at each batch of an
evaluation, which waits for it anyway. While XLA compiles an evaluation, they agree each second.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

import jax

from train.config import Config
from train.parallel import agreement, stop
from train.parallel.processes import largest_of_all
from train.parallel.watchdog import EXIT_CODE

_AGREE_SECONDS = 2.0
_LOOK_SECONDS = 1.0  # between two looks for the file, which may be on a network
# Reasons to end besides signals, whose numbers are less.
_HOURS, _FILE = 1000, 1001


class Next(NamedTuple):
  evaluate: bool
  save: bool
  end: int  # the number of a reason; 0: the run goes on


class Abandoned(Exception):
  """An evaluation ends before its last batch, since the run does."""


class Due:
  """Decides after each step what follows. All processes ask at the same points.

  hours_since: the time.monotonic() from which max_hours counts.
  """

  def __init__(self, config: Config, workdir: Path, hours_since: float):
    self._config, self._file = config, workdir / "stop"
    self._since, self._saved, self._looked = hours_since, time.monotonic(), 0.0
    self._found = False  # the file
    self._agree = _Agreement(config.log_every)
    self._ends = {stage.last for stage in config.stages()}
    self.end = 0  # the reason to end that all know of

  def after(self, step: int) -> Next:
    config = self._config
    end, minutes = self._agree(self._reason(), self._minutes())
    self.end = int(end)
    # The step of the next stage is compiled with nothing to lose.
    save = step in self._ends or self.end > 0 or _is_multiple(step, config.checkpoint_every)
    save = save or 0 < config.checkpoint_minutes <= minutes
    evaluate = self.evaluates_after(step)
    save = save or (evaluate and config.checkpoint_best != "")
    if save:
      self._saved = time.monotonic()
    return Next(evaluate, save, self.end)

  def evaluates_after(self, step: int) -> bool:
    return step == self._config.steps or _is_multiple(step, self._config.eval_every)

  @contextlib.contextmanager
  def abandoning(self, end: Callable[[int], NoReturn]) -> Iterator[None]:
    """An evaluation within the block raises `Abandoned` when the run is to end.

    One process leaves it at once, several by `look`.

    end: saves, and raises `stop.Stopped`; called in another thread, with a reason, where XLA
      compiles or something else does not hear a signal.
    """
    try:
      with interruptible(lambda: end(stop.received())):
        yield
    except stop.Interrupted as error:
      self.end = stop.received()
      raise Abandoned from error

  def look(self, build: Callable[[], object] | None = None) -> None:
    """Raises `Abandoned` if the run is to end; called for each batch of an evaluation.

    build: compiles what the batch needs. Several processes do so here, in a thread, and agree
      meanwhile; an error is left to the computation of the batch.
    """
    if build and jax.process_count() > 1:
      self._look_while(build)
    self._abandon_for(int(largest_of_all(self._reason())[0]))

  def _look_while(self, build: Callable[[], object]) -> None:
    def run():
      with contextlib.suppress(Exception):
        build()

    thread = threading.Thread(target=run, name="compiler", daemon=True)
    thread.start()
    busy = True
    while busy:
      thread.join(_LOOK_SECONDS)
      # Not on the devices, where the compiler may measure.
      mine = self._reason(), thread.is_alive()
      reasons, busy = zip(*agreement.gather("the compiled evaluation", mine), strict=True)
      self._abandon_for(max(reasons))
      busy = any(busy)

  def _abandon_for(self, reason: int) -> None:
    self.end = reason
    if reason:
      raise Abandoned

  def describe(self, reason: int) -> str:
    if reason == _HOURS:
      return f"max_hours={self._config.max_hours:g}"
    return f"the file {self._file}" if reason == _FILE else signal.Signals(reason).name

  def exit_code(self, reason: int) -> int:
    """128 + the signal; 75, try again, for max_hours; as Ctrl-C for the file, which is removed."""
    if reason == _FILE and jax.process_index() == 0:
      self._file.unlink(missing_ok=True)
    return EXIT_CODE if reason == _HOURS else 128 + (signal.SIGINT if reason == _FILE else reason)

  def _reason(self) -> int:
    if signum := stop.received():
      return signum
    now = time.monotonic()
    if 0 < self._config.max_hours * 3600 <= now - self._since:
      return _HOURS
    if jax.process_index() == 0 and now - self._looked > _LOOK_SECONDS:
      self._looked, self._found = now, self._file.exists()
    return _FILE if self._found else 0

  def _minutes(self) -> float:
    return (time.monotonic() - self._saved) / 60


def interruptible(save: Callable[[], object] | None = None) -> contextlib.AbstractContextManager:
  """`stop.interruptible`, where no other process would wait for this one."""
  return stop.interruptible(save) if jax.process_count() == 1 else contextlib.nullcontext()


def _is_multiple(step: int, every: int) -> bool:
  return every > 0 and step % every == 0


class _Agreement:
  """The largest of each number over all processes, or zeros between two agreements."""

  def __init__(self, at_most: int):
    self._every, self._at_most = 1, at_most
    self._calls, self._since = 0, time.perf_counter()

  def __call__(self, *numbers: float) -> list[float]:
    if jax.process_count() == 1:
      return list(numbers)
    self._calls += 1
    if self._calls < self._every:
      return [0.0] * len(numbers)
    seconds = (time.perf_counter() - self._since) / self._calls
    *agreed, seconds = largest_of_all(*numbers, seconds)
    # All compute the same from the same.
    self._every = min(max(1, int(_AGREE_SECONDS / max(seconds, 1e-6))), self._at_most)
    self._calls, self._since = 0, time.perf_counter()
    return agreed
