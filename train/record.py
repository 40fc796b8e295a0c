"""Records a run's metrics: metrics.jsonl, TensorBoard events, Weights & Biases, a progress line.

metrics.jsonl has one JSON object a line, with "step" and scalars by name. A resumed run first drops
the lines after its checkpoint, so its file is the same as without the interruption. Only the first
process writes.
"""

import json
import sys
from pathlib import Path

import jax
from tensorboardX import SummaryWriter
from tqdm import tqdm

from train.config import Config
from train.wandb_log import WandbLog


class Recorder:
  """Writes the scalars of each step to all outputs."""

  def __init__(self, workdir: Path, config: Config, start: int):
    self._writes = jax.process_index() == 0
    if not self._writes:
      return
    self._wandb = WandbLog(config, workdir) if config.wandb_project else None
    path = workdir / "metrics.jsonl"
    _drop_after(path, start)
    self._file = path.open("a", buffering=1)
    self._events = SummaryWriter(str(workdir / "tensorboard"), purge_step=start + 1)
    self._progress = tqdm(
      total=config.steps,
      initial=start,
      unit="step",
      dynamic_ncols=True,
      disable=None if sys.stderr.isatty() else True,
    )
    self._width = len(str(config.steps))
    self._steps = config.steps

  def advance(self, step: int) -> None:
    """Moves the progress line to `step`."""
    if self._writes:
      self._progress.update(step - self._progress.n)

  def write(self, step: int, scalars: dict[str, float]) -> None:
    """Records the scalars of `step`."""
    if not self._writes:
      return
    self._file.write(json.dumps({"step": step, **scalars}) + "\n")
    for name, value in scalars.items():
      self._events.add_scalar(name.replace("@", "_at_"), value, step)
    if self._wandb is not None:
      self._wandb.log(scalars, step=step)

  def say(self, step: int, text: str) -> None:
    """Prints a line above the progress line."""
    if self._writes:
      tqdm.write(f"step {step:>{self._width}}/{self._steps}  {text}", file=sys.stdout)
      sys.stdout.flush()

  def close(self) -> None:
    if self._writes:
      self._progress.close()
      self._file.close()
      self._events.close()
      if self._wandb is not None:
        self._wandb.finish()


def read_metrics(path: Path) -> list[dict]:
  """The records of a metrics.jsonl, without a last line that a kill cut short."""
  records = []
  for line in path.read_text().splitlines():
    try:
      records.append(json.loads(line))
    except json.JSONDecodeError:
      break
  return records


def _drop_after(path: Path, step: int) -> None:
  if path.is_file():
    records = [r for r in read_metrics(path) if r["step"] <= step]
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
