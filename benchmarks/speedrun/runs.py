"""One run of an entry: it trains in a process of its own, and another scores its weights.

Seconds are those of the steps: each program logs the mean of the steps since its last line, with
the waits for data. What it takes to start, to compile, to save and to score is left out.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.speedrun.data import WDS
from benchmarks.speedrun.tracks import Entry, Track
from sbjax.interop.config_files import OPEN_CLIP_FILE, to_open_clip
from sbjax.models.sizes import CLIPConfig
from train import cli
from train.config import Config, ModelConfig
from train.data.tokenizer import make_tokenizer
from train.record import read_metrics
from train.task import make_task

_BASE = "configs/clip_vit_b32.py"
_TRAINERS = {"sbjax": "train.main", "flax": "benchmarks.speedrun.flax"}
_SCORES = f"{WDS}_zeroshot_classification.json"


class Logged(NamedTuple):
  """The mean seconds of the steps up to a step, since the last one, and of their waits for data."""

  step: int
  seconds: float
  waiting: float


class Failed(RuntimeError):
  """A program ended with an error; its last lines."""


def run(track: Track, entry: Entry, data: Path, workdir: Path, seed: int, seconds: float) -> dict:
  """Trains and scores: {"seed", "steps", "batch_size", "seconds", "waiting", "acc1"}.

  waiting: those of the seconds in which the loop waited for its loader. A GPU may still work then.

  Args:
    data: the folder that data.py has written.
    workdir: of this run; one of ours that was interrupted continues, open_clip's fails.
    seconds: more than these, all told, end the training.

  Raises:
    Failed: a program ended with an error, or the time is over.
  """
  steps = entry.steps or track.steps
  train = _open_clip if entry.program == "open_clip" else _ours
  weights, logged = train(track, entry, data, workdir, seed, steps, seconds)
  acc1 = _score(weights, data, workdir)
  took, waiting = seconds_of(logged)
  found = {"seconds": round(took, 2), "waiting": round(waiting, 2), "acc1": round(acc1, 5)}
  return {"seed": seed, "steps": steps, "batch_size": track.batch_size} | found


def _ours(track, entry, data, workdir, seed, steps, seconds) -> tuple[Path, list[Logged]]:
  """The folder with the checkpoint, and what was logged."""
  fixed = {
    "data.name": "speedrun",
    "data.root": data,
    "data.train_shards": "train-*.tar",
    "data.eval_shards": "",
    "data.eval_split": "",
    "model.image_size": track.image_size,
    "model.patch_dropout": 0,
    "batch_size": track.batch_size,
    "steps": steps,
    "eval_every": 0,
    "checkpoint_every": 0,
    "seed": seed,
  }
  flags = [f"{name}={value}" for name, value in fixed.items()]
  flags = [f"--config.{flag}" for flag in (*flags, *track.changes, *entry.changes)]
  command = [_TRAINERS[entry.program], f"--config={_BASE}", f"--workdir={workdir}", *flags]
  _call(command, workdir, seconds)
  records = [r for r in read_metrics(workdir / "metrics.jsonl") if "loss" in r]
  return workdir, [Logged(r["step"], r["step_seconds"], r["data_wait_seconds"]) for r in records]


def _open_clip(track, entry, data, workdir, seed, steps, seconds) -> tuple[Path, list[Logged]]:
  """The file of the weights, and what was logged."""
  workdir.mkdir(parents=True, exist_ok=True)
  model = workdir / "speedrun.json"
  model.write_text(json.dumps(to_open_clip(model_of(track))))
  ours = track.values
  flags = {
    "model": model.stem,
    "train-data": f"{data}/train-{{0000..{track.shards - 1:04}}}.tar",
    "train-num-samples": steps * track.batch_size,
    "epochs": 1,
    "batch-size": track.batch_size,
    "precision": "amp_bf16",
    "workers": ours["data.workers"],
    "lr": ours["optimizer.learning_rate"],
    "warmup": ours["optimizer.warmup_steps"],
    "beta1": 0.9,
    "beta2": 0.98,
    "eps": 1e-6,
    "wd": 0.2,
    "seed": seed,
    "log-every-n-steps": ours["log_every"],
    "logs": workdir,
    "name": "run",
  }
  values = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
  switches = ["--dataset-resampled", "--torchcompile", *entry.changes]
  _call(["benchmarks.speedrun.open_clip", str(model), *values, *switches], workdir, seconds)
  found = workdir / "run" / "checkpoints"
  (found / OPEN_CLIP_FILE).write_text(json.dumps({"model_cfg": json.loads(model.read_text())}))
  logged = (workdir / "run" / "out.log").read_text()
  return found / "epoch_1.pt", open_clip_steps(logged, track.batch_size)


def open_clip_steps(log: str, batch_size: int) -> list[Logged]:
  """What the lines of open_clip's log say."""
  line = r"\[ *(\d+)/\d+ \(\d+%\)\] Data \(t\): ([\d.]+) Batch \(t\): ([\d.]+),"
  found = re.findall(line, log)
  return [Logged(int(n) // batch_size, float(took), float(data)) for n, data, took in found]


def seconds_of(logged: Sequence[Logged]) -> tuple[float, float]:
  """The seconds of all steps, and those of them in which they waited for data.

  The first line has a compilation in it: its steps count as those of the second.

  >>> seconds_of([Logged(1, 60.0, 3.0), Logged(11, 0.5, 0.25), Logged(21, 0.25, 0.0)])
  (8.0, 2.75)
  """
  steps, *means = np.array(logged).T
  for mean in means:
    mean[0] = mean[1]
  took, waiting = (float(np.diff(steps, prepend=0) @ mean) for mean in means)
  return took, waiting


def model_of(track: Track) -> CLIPConfig:
  """The architecture that the trainer makes of a track's changes, with CLIP's vocabulary."""
  config = Config(model=ModelConfig(size="", image_size=track.image_size))
  cli.override(config, {name: [value] for name, value in track.values.items()})
  return make_task(config).with_tokenizer(make_tokenizer("clip", None, 0)).model.config


def _score(weights: Path, data: Path, workdir: Path) -> float:
  command = ["train.evaluate", f"--checkpoint={weights}", "--dtype=float32"]
  if weights.is_file():  # of open_clip; its config is beside it
    command.append(f"--model={weights.parent}")
  _call([*command, f"--out={workdir}", f"--data={data / WDS}"], workdir, 600)
  return json.loads((workdir / _SCORES).read_text())["metrics"]["acc1"]


def _call(command: Sequence[str], workdir: Path, seconds: float) -> None:
  workdir.mkdir(parents=True, exist_ok=True)
  log = workdir / "log.txt"
  environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
  with log.open("a") as file:
    how = {"stdout": file, "stderr": file, "env": environment, "timeout": seconds}
    try:
      subprocess.run([sys.executable, "-m", *command], check=True, **how)
    except subprocess.TimeoutExpired:
      raise Failed(f"{command[0]} took more than {seconds:.0f} s") from None
    except subprocess.CalledProcessError:
      raise Failed(f"{command[0]}: {log.read_text().strip()[-300:]}") from None
