"""Weights & Biases beside a run: without a network or an account the run goes on without it."""

import hashlib
import sys
import threading
from pathlib import Path

from train import stop
from train.config import Config
from train.errors import RunError

_SECONDS = 30  # that a run waits for the server, at its start and at its end


class WandbLog:
  """A run's log at Weights & Biases. The first failure is printed, and ends the log only."""

  def __init__(self, config: Config, workdir: Path):
    try:
      import wandb
    except ImportError as error:
      raise RunError(
        f"wandb_project={config.wandb_project!r} needs Weights & Biases: pip install wandb,"
        ' or leave it "".'
      ) from error
    self._run = None
    self._run = self._try(
      wandb.init,
      project=config.wandb_project,
      id=_id(workdir),
      name=workdir.resolve().name,
      dir=str(workdir),
      resume="allow",
      config=config.to_dict(),
      settings=wandb.Settings(init_timeout=_SECONDS),
    )

  def log(self, scalars: dict[str, float], step: int) -> None:
    if self._run is not None:
      self._try(self._run.log, scalars, step=step)

  def finish(self) -> None:
    """Waits a while for the last uploads, and leaves the rest to W&B's own process."""
    if self._run is not None:
      uploads = threading.Thread(target=self._try, args=(self._run.finish,), daemon=True)
      uploads.start()
      uploads.join(_SECONDS if not stop.received() else 3)

  def _try(self, call, *args, **options):
    try:
      return call(*args, **options)
    except Exception as error:  # wandb has errors of its own, and those of its network libraries.
      self._run = None
      print(
        f"The run goes on without Weights & Biases: {type(error).__name__}: {error}."
        " WANDB_MODE=offline writes to the workdir, and `wandb sync` uploads that later.",
        file=sys.stderr,
      )


def _id(workdir: Path) -> str:
  """The folder's own: a project may have two runs named seed0. A moved run starts a new log."""
  path = workdir.resolve()
  return f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
