"""What users see of a run's progress and end: honest speeds, scores, paths, 'already finished'."""

import json
import time
from types import SimpleNamespace

import jax
import loop_case
import numpy as np
import pytest

from train import loop, optimizer
from train.config import OptimizerConfig
from train.run import Run


@pytest.fixture
def train(monkeypatch, tmp_path):
  return loop_case.trainer(monkeypatch, tmp_path / "data")


def test_a_run_reports_at_each_evaluation_and_ends_with_scores_and_paths(
  train, tmp_path, monkeypatch, capfd
):
  titles = []
  monkeypatch.setattr(loop, "write_report", lambda workdir, title, samples: titles.append(title))
  workdir = tmp_path / "run"
  result = train(workdir, eval_every=2)
  assert [title.splitlines()[1] for title in titles] == ["step 2: top1 0.000", "step 4: top1 0.000"]
  out = capfd.readouterr().out
  assert "\nFinished after step 4: top1 0.000\n" in out
  assert out.endswith(f"  checkpoint  {workdir / 'checkpoints' / '4'}\n")

  def times():
    return {path: path.stat().st_mtime_ns for path in workdir.rglob("*") if path.name != ".lock"}

  before = times()
  monkeypatch.setattr(loop, "_train", lambda *_: pytest.fail("It started again."))
  assert train(workdir, eval_every=2) == result
  assert "Already finished after step 4: top1 0.000\n  report" in capfd.readouterr().out
  assert times() == before


def test_a_finished_run_goes_on_to_more_steps(train, tmp_path):
  workdir = tmp_path / "run"
  train(workdir, steps=2)
  assert train(workdir, steps=3)["step"] == 3


class Clock:
  """A device whose steps take a second each, on a simulated clock."""

  def __init__(self, monkeypatch, asynchronous):
    self.now, self._asynchronous, self._queue_ends = 0.0, asynchronous, 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: self.now)

  def step(self):
    end = self._queue_ends = max(self._queue_ends, self.now) + 1
    if not self._asynchronous:
      self.now = end
    return Finite(self, end)


class Finite:
  def __init__(self, clock, end):
    self._clock, self._end = clock, end

  def is_ready(self):
    return self._clock.now >= self._end

  def __array__(self, *args, **kwargs):
    self._clock.now = max(self._clock.now, self._end)
    return np.ones(1, bool)


@pytest.mark.parametrize("log_every", [1, 4])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_each_step_s_time_is_that_of_the_device(monkeypatch, asynchronous, log_every):
  clock, written, asked = Clock(monkeypatch, asynchronous), {}, []
  monkeypatch.setattr(loop, "tensor_names", lambda *_: ["w"])
  config = loop_case.config("")
  config.steps, config.log_every = 9, log_every
  run = SimpleNamespace(
    config=config,
    mesh=SimpleNamespace(size=1),
    schedule=lambda step: asked.append(step) or 0.0,
    task=SimpleNamespace(flops=lambda batch_size: 0, text_groups=()),
  )
  recorder = SimpleNamespace(
    advance=lambda step: None, say=lambda *_: None, write=lambda step, x: written.update({step: x})
  )
  meter = loop._Meter(run, SimpleNamespace(params=None), recorder)
  for step in range(4, 10):
    clock.now += 0.25  # The wait for data, which an asynchronous device spends computing.
    meter.push(step, {"loss": np.float32(0)}, clock.step(), 0.25, {}, True)
    if step in (6, 9):
      meter.flush()
      clock.now += 100  # An evaluation.
      meter.restart_clock(step)
  assert list(written) == ([4, 5, 6, 7, 8, 9] if log_every == 1 else [4, 8, 9])
  for step, record in written.items():
    assert 0.75 <= record["step_seconds"] <= 1.5, step
    assert record["data_wait_seconds"] <= record["step_seconds"], step
  assert len(asked) <= 1  # The schedule runs on the device, which the host would wait for.


def test_logged_steps_do_not_ask_the_device_for_a_learning_rate_each():
  """It would compute each after the step that it is in, and the host would wait."""
  config = OptimizerConfig(warmup_steps=100)
  schedule, calls = optimizer.make_schedule(config, 1e-3, steps=2500), []

  def counted(step):
    jax.debug.callback(calls.append, step)
    return schedule(step)

  rate, steps = optimizer.learning_rates(counted), (1, 2, 100, 101, 1000, 1001, 2000, 2001, 2500)
  found, expected = [rate(step) for step in steps], [float(schedule(step - 1)) for step in steps]
  np.testing.assert_allclose(found, expected, rtol=1e-6, atol=2e-9)
  jax.effects_barrier()
  assert len(calls) == len(set(map(int, calls))) == 3000


def test_samples_are_images_of_the_split_with_their_nearest_captions(tmp_path, monkeypatch):
  asked = {}

  def samples(params, mesh, tokenize, batch, batch_size):
    asked.update(batch, tokens=tokenize(["a dog"]))
    return ["samples"]

  config = loop_case.config(tmp_path / "data", eval_batch_size=24)
  run = loop.make_run(config, tmp_path)
  run = run._replace(task=SimpleNamespace(samples=samples, example_sizes=run.task.example_sizes))
  assert Run.samples(run, None) == ["samples"]
  assert asked["image"].shape == (24, 32, 32, 3) and asked["tokens"].shape == (1, 16)
  assert json.dumps(asked["captions"])
