"""Traces some steps for TensorBoard or XProf: `--config.profile_steps=first:last`.

pip install xprof tensorboard && tensorboard --logdir runs/mine/profile
"""

import contextlib
from pathlib import Path

import jax


class Tracer:
  """Writes a trace of `steps` (first, last) to `directory`; None traces nothing.

  A run that starts or ends between them traces only its own steps. Of several processes only the
  first traces, but all of them finish their steps before and after the trace.
  """

  def __init__(self, directory: Path, steps: tuple[int, int] | None):
    self._directory, self._writes = directory, jax.process_index() == 0
    self._first, self._last = steps or (1, 0)
    self._traces = False

  def starts(self, step: int) -> bool:
    """Whether the trace starts with this step; earlier steps must then be finished first."""
    return not self._traces and self._first <= step <= self._last

  def start(self) -> None:
    self._traces = True
    if self._writes:
      jax.profiler.start_trace(self._directory)

  def step(self, step: int) -> contextlib.AbstractContextManager:
    """A context for the call of a step, which puts its number into the trace."""
    return jax.profiler.StepTraceAnnotation("train", step_num=step)

  def ends(self, step: int) -> bool:
    """Whether the trace ends with this step."""
    return self._traces and step >= self._last

  def close(self) -> None:
    """Ends and writes the trace if it is running."""
    was_on, self._traces = self._traces, False
    if was_on and self._writes:
      jax.profiler.stop_trace()
