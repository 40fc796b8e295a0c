"""Records a run: metrics.jsonl, TensorBoard events, Weights & Biases, traces, a progress line.

metrics.jsonl has one JSON object a line, with "step" and scalars by name. A resumed run first drops
the lines after its checkpoint, so its file is the same as without the interruption. Only the first
process writes.

Everything is on disk when `write` returns, and a failed write is raised there.
"""

import contextlib
import hashlib
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c
from tqdm import tqdm

from train.config import Config
from train.errors import RunError
from train.parallel import stop
from train.parallel.processes import largest_of_all
from train.workdir import replace_text


class Recorder:
  """Writes the scalars of each step to all outputs."""

  def __init__(self, workdir: Path, config: Config, start: int):
    self._writes = jax.process_index() == 0
    self.scores: dict[int, dict[str, float]] = {}  # of evaluated steps up to `start`
    if not self._writes:
      return
    self._workdir = workdir
    self._wandb = WandbLog(config, workdir) if config.wandb_project else None
    path = workdir / "metrics.jsonl"
    with self._explain_failed_write():
      _drop_after(path, start)
      self.scores = _scores(path)
      self._events = _Events(workdir / "tensorboard", start)
      self._file = path.open("a", buffering=1)
    self._progress = tqdm(
      total=config.steps,
      initial=start,
      unit="step",
      dynamic_ncols=True,
      disable=None if sys.stderr.isatty() else True,
    )
    self._width = len(str(config.steps))
    self._steps = config.steps

  def has_scores(self, start: int) -> bool:
    """Whether the step that the run goes on from was evaluated; the answer of the first process."""
    return bool(largest_of_all(start in self.scores)[0])

  def advance(self, step: int) -> None:
    """Moves the progress line to `step`."""
    if self._writes:
      self._progress.update(step - self._progress.n)

  def write(self, step: int, scalars: dict[str, float]) -> None:
    """Records the scalars of `step`."""
    if not self._writes:
      return
    with self._explain_failed_write():
      self._file.write(json.dumps({"step": step, **scalars}) + "\n")
      self._events.write(step, scalars)
    if self._wandb is not None:
      self._wandb.log(scalars, step=step)

  def say(self, step: int, text: str) -> None:
    """Prints a line above the progress line."""
    if self._writes:
      tqdm.write(f"step {step:>{self._width}}/{self._steps}  {text}", file=sys.stdout)
      sys.stdout.flush()

  def close(self) -> None:
    if not self._writes:
      return
    self._progress.close()
    if self._wandb is not None:
      self._wandb.finish()
    with self._explain_failed_write(), contextlib.closing(self._events), self._file:
      pass  # Both are closed, even if the disk is full.

  @contextlib.contextmanager
  def _explain_failed_write(self) -> Iterator[None]:
    try:
      yield
    except OSError as error:
      raise RunError(
        f"Could not write to {self._workdir}: {error.strerror}. The same command continues from the"
        " last checkpoint, as soon as it can write there."
      ) from error


class _Events:
  """A TensorBoard event file. tensorboardX's own writer is a thread, which a full disk ends."""

  def __init__(self, directory: Path, start: int):
    directory.mkdir(exist_ok=True)
    name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.{start}"
    self._file = (directory / name).open("ab")
    self._put(file_version="brain.Event:2")
    # TensorBoard hides the later steps of older files.
    self._put(step=start + 1, session_log=SessionLog(status=SessionLog.START))

  def write(self, step: int, scalars: dict[str, float]) -> None:
    values = [Summary.Value(tag=n.replace("@", "_at_"), simple_value=v) for n, v in scalars.items()]
    self._put(step=step, summary=Summary(value=values))

  def close(self) -> None:
    self._file.close()

  def _put(self, **fields) -> None:
    data = Event(wall_time=time.time(), **fields).SerializeToString()
    for part in (struct.pack("<Q", len(data)), data):
      self._file.write(part + struct.pack("<I", masked_crc32c(part)))
    self._file.flush()


def read_metrics(path: Path) -> list[dict]:
  """The records of a metrics.jsonl, without lines that are damaged or cut short."""
  return [record for record in map(_record, path.read_bytes().splitlines()) if record]


def is_patch_embedding_rms(name: str) -> bool:
  """Whether a metric is the RMS that spikes before the loss (the paper's 3.4)."""
  return name.startswith("rms/") and name.endswith("patch_embedding/kernel")


def _scores(path: Path) -> dict[int, dict[str, float]]:
  """The scores of each evaluated step, by their names."""
  scores = {}
  for record in read_metrics(path) if path.is_file() else []:
    found = {n.removeprefix("eval/"): x for n, x in record.items() if n.startswith("eval/")}
    if found:
      scores[record["step"]] = found
  return scores


def _drop_after(path: Path, step: int) -> None:
  """Removes the records after `step`, a line that a kill cut short, and damaged lines."""
  if not path.is_file():
    return
  lines = path.read_bytes().splitlines(keepends=True)
  records = [_record(line) for line in lines]
  damaged = [line for line, r in zip(lines, records, strict=True) if r is None]
  if whole := sum(line.endswith(b"\n") for line in damaged):
    print(f"{path}: {whole} damaged lines are left out.", file=sys.stderr)
  kept = [r for r in records if r and r["step"] <= step]
  replace_text(path, "".join(json.dumps(r) + "\n" for r in kept))


def _record(line: bytes) -> dict | None:
  """The record of a line; None if it is none."""
  try:
    record = json.loads(line)
  except (ValueError, RecursionError):
    return None
  return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


class Tracer:
  """Writes a trace of `steps` (first, last) to `directory`; None traces nothing.

  To look at it: pip install xprof tensorboard && tensorboard --logdir runs/mine/profile

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


_SECONDS = 30  # that a run waits for W&B's server, at its start and at its end


class WandbLog:
  """A run's log at Weights & Biases. The first failure is printed, and ends the log only.

  Without a network or an account the run goes on without it.
  """

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
