"""A trace of some steps, for TensorBoard or XProf: `--config.profile_steps=first:last`.

pip install xprof tensorboard && tensorboard --logdir runs/mine/profile
"""

import contextlib
from pathlib import Path

import jax


class Tracer:
  """Traces the steps `first` to `last` into `directory`; `steps` None: none.

  A run that starts, or ends, between them traces those that it takes. Of several processes the
  first writes; all of them stop before and after, so that none is ahead.
  """

  def __init__(self, directory: Path, steps: tuple[int, int] | None):
    self._directory, self._writes = directory, jax.process_index() == 0
    self._first, self._last = steps or (1, 0)
    self._traces = False

  def starts(self, step: int) -> bool:
    """Whether the trace starts with this step, so that those before have to be over."""
    return not self._traces and self._first <= step <= self._last

  def start(self) -> None:
    """Starts the trace."""
    self._traces = True
    if self._writes:
      jax.profiler.start_trace(self._directory)

  def step(self, step: int) -> contextlib.AbstractContextManager:
    """Around the call of a step: gives it its number in the trace."""
    return jax.profiler.StepTraceAnnotation("train", step_num=step)

  def ends(self, step: int) -> bool:
    """Whether the trace ends with this step."""
    return self._traces and step >= self._last

  def close(self) -> None:
    """Writes the trace, if there is one that is not written."""
    was_on, self._traces = self._traces, False
    if was_on and self._writes:
      jax.profiler.stop_trace()
