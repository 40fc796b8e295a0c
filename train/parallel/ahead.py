"""A step is compiled in a thread while the steps before it run.

XLA compiles without Python's lock. On a GPU it measures kernels, and locks the device meanwhile: a
step that is started then waits for the measurement.
"""

import contextlib
import threading
from collections.abc import Callable

NAME = "compiler of the next stage"


class Ahead:
  """Steps that a thread compiles for later; `step` asks for one.

  Whoever asks does what it would do without the thread, and finds what is compiled by then. So an
  error in the thread ends no run: `step` compiles that one again, with nothing beside it.

  Python waits for the thread at its end: it could crash while XLA compiles.

  Args:
    make: from a Run to its compiled step.
    search: calls the function that it gets, in place of `make`, with each Run to compile.
  """

  def __init__(self, make: Callable, search: Callable[[Callable], object]):
    self._make, self._search, self._made = make, search, {}
    self._thread = threading.Thread(target=self._run, name=NAME)
    self._thread.start()

  def _run(self) -> None:
    with contextlib.suppress(Exception):
      self._search(self._keep)

  def _keep(self, run) -> Callable:
    return self._made.setdefault(run.config.model.remat, self._make(run))

  def step(self, run) -> Callable:
    """The step of a run; waits for the thread as long as it may come to it."""
    policy = run.config.model.remat
    while policy not in self._made and self._thread.is_alive():
      self._thread.join(0.05)  # Short: a signal is heard between two.
    return self._made[policy] if policy in self._made else self._make(run)


def is_compiling() -> bool:
  return any(thread.name == NAME for thread in threading.enumerate())
