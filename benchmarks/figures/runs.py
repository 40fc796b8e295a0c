"""Trains arms in processes, several on each GPU, and keeps a row for each that ended.

A row has the scores, those of earlier evaluations, the losses in means of some steps, the spikes
of runs that logged each step, and statistics of watched tensors. A run that stops because a tensor
is not finite has `diverged`, its last step. Runs that were interrupted continue from their
checkpoints.
"""

import dataclasses
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.figures import photos
from benchmarks.figures.analysis import at_change
from benchmarks.figures.arms import Arm, change_of, config_of, served, tiny_config
from train.config import Config
from train.record import read_metrics
from train.spikes import Rules, find_spikes
from train.workdir import write_json

_RULES = Rules()
_POINTS = 200  # of a curve in a row
_RECORDS = 24  # of watched tensors in a row
_TRACE = (-100, 200)  # steps around a change of the data
_TRACED = ("loss", "skipped_updates", "rms/", "gradient_max_abs/", "max_abs_feature/image")
_SPIKES, _SPIKE_TRACE = 2, (-30, 60)  # spikes by themselves of a run in a row; steps around each
_PATIENCE = 120  # seconds for a last checkpoint
_TRAIN = [sys.executable, "-m", "benchmarks.figures.runs"]


def train_all(
  arms: Sequence[Arm],
  folder: Path,
  gpus: Sequence[int],
  at_once: int,
  seconds: float,
  data: Path | None = None,
  expected: Callable[[Arm], float] = lambda arm: 0.0,
) -> Iterator[dict]:
  """Trains arms, and yields the row of each as it ends.

  Closing the iterator, or an exception where it is read, stops the runs as the end of the time
  does: with a checkpoint each.

  Args:
    folder: of the runs, a folder each.
    gpus: their numbers.
    at_once: processes that share a GPU, so that one trains while another starts or is scored.
    seconds: after these no run is started, and those that train are stopped, with a checkpoint.
    data: the folder of the shards, for arms on photos.
    expected: the seconds of a run. One that would not end in time is not started.
  """
  waiting, rows, stop = list(arms), queue.SimpleQueue(), threading.Event()
  choosing, deadline = threading.Lock(), time.monotonic() + seconds

  def next_arm() -> Arm | None:
    with choosing:
      left = deadline - time.monotonic()
      found = next((arm for arm in waiting if expected(arm) < left), None)
      if found:
        waiting.remove(found)
      return found

  def work(gpu: int):
    try:
      while not stop.is_set() and (arm := next_arm()):
        rows.put(_in_process(arm, folder, gpu, at_once, deadline, stop, data))
    finally:  # Also after an error, which the thread prints.
      rows.put(None)

  workers = [threading.Thread(target=work, args=(gpu,)) for gpu in gpus for _ in range(at_once)]
  started = []
  try:
    for worker in workers:
      worker.start()
      started.append(worker)
    for _ in workers:
      while (row := rows.get()) is not None:
        yield row
  finally:
    stop.set()
    for worker in started:
      worker.join()


def _in_process(
  arm: Arm,
  folder: Path,
  gpu: int,
  at_once: int,
  deadline: float,
  stop: threading.Event,
  data: Path | None,
) -> dict:
  """Trains an arm in a process of its own; its row, or one with `error`."""
  workdir = folder / re.sub(r"[^\w.=-]+", "_", arm.name)
  workdir.mkdir(parents=True, exist_ok=True)
  environment = os.environ | {
    "CUDA_VISIBLE_DEVICES": str(gpu),
    "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / at_once:.3f}",
  }
  arguments = [json.dumps(arm), str(workdir), *([str(data)] if data else [])]
  started = time.monotonic()
  with (workdir / "log.txt").open("a") as log:
    # In a session of its own: a second signal, such as a terminal's, would end it before it saved.
    how = {"stdout": log, "stderr": log, "env": environment, "start_new_session": True}
    process = subprocess.Popen([*_TRAIN, *arguments], **how)
    while process.poll() is None:
      if stop.wait(0.2) or time.monotonic() > deadline:
        process.terminate()  # The run saves a checkpoint.
        try:
          process.wait(timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
          process.kill()
  row = read_row(arm, workdir)
  return row | {"minutes": round((time.monotonic() - started) / 60, 2)}


def train_one(arm: Arm, workdir: Path, make_config=config_of, data: Path | None = None) -> None:
  """Trains an arm in this process, and writes end.json, if only that it diverged.

  data: the folder of the shards, for an arm on photos. Their import is beside `workdir`.
  """
  from train.errors import RunError
  from train.parallel import xla_flags  # JAX starts with the first of these imports.

  xla_flags.set_flags()
  from train.loop import train

  config = make_config(arm)
  if data and arm.size in photos.CONFIGS:
    photos.place(config, data, workdir.parent)
  try:
    result = train(config, workdir)
  except RunError as error:
    diverged = re.match(r"Step (\d+): .*not finite", str(error))
    if not diverged:
      raise
    result = {"diverged": int(diverged[1]), "why": str(error).partition("; the loss")[0]}
  else:
    scores = {name: served_scores(config, workdir, name) for name in served(arm)}
    result |= {"served": scores} if scores else {}
  write_json(workdir / "end.json", result)


def served_scores(config: Config, workdir: Path, recipe: str) -> dict[str, float]:
  """The scores of a run's newest checkpoint, computed with another recipe."""
  from train.evaluate import evaluate_checkpoint

  config = dataclasses.replace(config, model=dataclasses.replace(config.model, recipe=recipe))
  return evaluate_checkpoint(config, workdir)


def read_row(arm: Arm, workdir: Path) -> dict:
  """The row of a run from its folder; with `error` if it did not end."""
  row = {"name": arm.name, "size": arm.size, "changes": dict(arm.changes), "seed": arm.seed}
  path = workdir / "end.json"
  if not path.is_file():
    log = workdir / "log.txt"
    return row | {"error": log.read_text()[-300:] if log.is_file() else "no end.json"}
  end = json.loads(path.read_text())
  metrics = read_metrics(workdir / "metrics.jsonl")
  records = [r for r in metrics if "loss" in r]
  names = ("diverged", "why")
  scores = {"scores": end["eval"]} if "eval" in end else {name: end[name] for name in names}
  keys = ("device", "jax", "images_per_second", "served")
  kept = {key: end[key] for key in keys if end.get(key)}
  if not records:  # It diverged before a step was logged.
    return row | scores | {"steps": 0, "curve": []}
  change, spikes = change_of(arm), spikes_of(records)
  around = {"trace": trace(records, change, _TRACE)} if change else watched(records)
  around |= spike_traces(records, spikes, change)
  return row | scores | evaluations(metrics) | curve(records) | spikes | around | kept


def evaluations(metrics: Sequence[dict]) -> dict:
  """The zero-shot accuracy of each evaluation, if there were several, with its step."""
  found = {}  # A resumed run may have repeated one.
  for record in metrics:
    top1 = {k.removeprefix("eval/"): v for k, v in record.items() if k.endswith("zero_shot_top1")}
    found |= {record["step"]: {"step": record["step"], **top1}} if top1 else {}
  return {"evaluations": list(found.values())} if len(found) > 1 else {}


def curve(records: Sequence[dict]) -> dict:
  """Steps and losses in means of equal parts, and the mean of the last tenth."""
  steps, losses = np.array([r["step"] for r in records]), np.array([r["loss"] for r in records])
  parts = np.array_split(np.arange(len(steps)), min(_POINTS, len(steps)))
  return {
    "steps": int(steps[-1]),
    "curve": [[int(steps[p[-1]]), float(f"{losses[p].mean():.5g}")] for p in parts],
    "last_loss": float(losses[-max(1, len(losses) // 10) :].mean()),
  }


def spikes_of(records: Sequence[dict], rules: Rules = _RULES) -> dict:
  """Loss spikes and RMS spikes of a run that logged each step, for each RMS; else nothing."""
  steps = np.array([r["step"] for r in records])
  names = sorted(name for name in records[0] if name.startswith("rms/"))
  loss, found = np.array([r["loss"] for r in records]), {}
  for name in names:
    rms = np.array([r[name] for r in records])
    try:
      one = find_spikes(steps, loss, rms, rules)
    except ValueError:  # Not each step is logged, or too few.
      return {}
    found[name] = {
      key: value.tolist() if isinstance(value, np.ndarray) else value
      for key, value in one._asdict().items()
    }
  return {"spikes": found} if found else {}


def spike_traces(records: Sequence[dict], found: dict, change: int | None) -> dict:
  """Loss and RMS around the first loss spikes that no change of the data brought."""
  spikes = next(iter(found.get("spikes", {}).values()), {"loss": ()})  # The same losses for each.
  steps = [step for step in spikes["loss"] if not at_change(step, change)][:_SPIKES]
  traces = [trace(records, step, _SPIKE_TRACE, ("loss", "rms/")) for step in steps]
  together = [{"spike": step, **one} for step, one in zip(steps, traces, strict=True)]
  return {"spike_traces": together} if steps else {}


def trace(
  records: Sequence[dict],
  middle: int,
  around: tuple[int, int],
  kinds: tuple[str, ...] = _TRACED,
) -> dict[str, list]:
  """Columns of the steps around one, with four digits, whose names begin with one of `kinds`."""
  chosen = [r for r in records if around[0] <= r["step"] - middle < around[1]]
  names = [name for name in records[-1] if name.startswith(kinds)]
  columns = {name: [float(f"{r[name]:.4g}") for r in chosen] for name in names}
  return {"step": [r["step"] for r in chosen], **columns}


def watched(records: Sequence[dict]) -> dict:
  """Some records of watched tensors and of the features of blocks."""
  kinds = ("gradient_mean_abs/", "gradient_max_abs/", "mean_abs_feature/", "max_abs_feature/")
  if not any(name.startswith("gradient_max_abs/") for name in records[-1]):
    return {}
  places = np.linspace(0, len(records) - 1, min(_RECORDS, len(records))).astype(int)
  return {
    "watched": [
      {"step": r["step"]} | {k: float(f"{v:.4g}") for k, v in r.items() if k.startswith(kinds)}
      for r in (records[i] for i in places)
    ]
  }


def main() -> None:
  """Trains the arm that is the first argument, as JSON, in the folder that is the second.

  For an arm on photos the third is the folder of the shards.
  """
  size, changes, seed = json.loads(sys.argv[1])
  pairs = ((path, tuple(v) if isinstance(v, list) else v) for path, v in changes)
  arm = Arm(size, tuple(pairs), seed)
  workdir, *data = map(Path, sys.argv[2:])
  train_one(arm, workdir, tiny_config if size == "tiny" else config_of, *data)


if __name__ == "__main__":
  main()
