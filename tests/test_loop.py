"""The loop around a step: traces, limits, memory, other meshes. tests/test_step.py tests steps."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import loop_case
import numpy as np
import orbax.checkpoint as ocp
import pytest

from train import loop
from train.config import Config, ModelConfig
from train.errors import RunError
from train.task import CLIPTask
from train.watchdog import EXIT_CODE

ROOT = Path(__file__).parents[1]
HANGING = """
import pathlib, sys, threading, time
import loop_case
from train import data, loop

workdir = pathlib.Path(sys.argv[2])

class Impatient(loop.Watchdog):
  def __init__(self, *args):
    super().__init__(*args)
    Impatient.watchdog = self

def hang():
  while not (workdir / "checkpoints" / "2").exists():
    time.sleep(0.1)
  Impatient.watchdog._wait.ticks = 10**6  # Simulates a wait beyond the limit.
  threading.Event().wait()

def hanging_source(iterator, put, size, whole=data.prefetch_to_device):
  for i, batch in enumerate(whole(iterator, put, size)):
    yield batch if i < 2 else hang()

loop_case.replace_model(setattr)
data.prefetch_to_device = hanging_source
loop.Watchdog = Impatient
loop.train(loop_case.config(sys.argv[1]), workdir)
"""


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
  return tmp_path_factory.mktemp("data")


@pytest.fixture
def train(monkeypatch, data_dir):
  """train(workdir, devices, **options) runs the loop and returns its records."""
  loop_case.replace_model(monkeypatch.setattr)
  all_devices = jax.devices()

  def run(workdir, devices=1, **options):
    monkeypatch.setattr(jax, "devices", lambda *_: all_devices[:devices])
    loop.train(loop_case.config(data_dir, **options), workdir)
    return loop_case.records(workdir)

  return run


def final_state(workdir, step=4) -> list[np.ndarray]:
  with ocp.StandardCheckpointer() as checkpointer:
    return jax.tree.leaves(checkpointer.restore(workdir / "checkpoints" / str(step) / "state"))


@pytest.fixture(scope="module")
def whole(data_dir, tmp_path_factory):
  """The workdir of an uninterrupted run on one device."""
  workdir = tmp_path_factory.mktemp("whole")
  with pytest.MonkeyPatch.context() as patch:
    loop_case.replace_model(patch.setattr)
    one = jax.devices()[:1]
    patch.setattr(jax, "devices", lambda *_: one)
    loop.train(loop_case.config(data_dir), workdir)
  return workdir


def test_a_run_continued_on_other_meshes_is_bit_equal(train, whole, tmp_path, capfd):
  train(tmp_path, 2, steps=1, **{"mesh.data": 2})
  train(tmp_path, 2, steps=2, **{"mesh.data": 1, "mesh.fsdp": 2})
  train(tmp_path, 1, steps=3)
  records = train(tmp_path, 8, steps=4, **{"mesh.data": 2, "mesh.fsdp": 4})
  assert re.findall(r"after step (\d) of", capfd.readouterr().out) == ["1", "2", "3"]
  # The loss is a sum over the batch: equal losses mean equal batches in the same order.
  losses = [r["loss"] for r in records if "loss" in r]
  assert losses == [r["loss"] for r in loop_case.records(whole) if "loss" in r]
  for there, here in zip(final_state(tmp_path), final_state(whole), strict=True):
    np.testing.assert_array_equal(there, here)


def steps_of_trace(workdir) -> list[int]:
  (path,) = (workdir / "profile").rglob("*.trace.json.gz")
  events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
  numbers = (event.get("args", {}).get("step_num") for event in events)
  return sorted(int(number) for number in numbers if number is not None)


def test_a_trace_has_the_steps_of_profile_steps(train, tmp_path):
  train(tmp_path, profile_steps="2:3")
  assert list((tmp_path / "profile").rglob("*.xplane.pb"))
  assert steps_of_trace(tmp_path) == [2, 3]


def test_a_run_resumed_within_profile_steps_traces_the_remaining_steps(train, tmp_path):
  train(tmp_path, steps=2)
  train(tmp_path, profile_steps="1:3")
  assert steps_of_trace(tmp_path) == [3]


def test_no_trace_is_written_by_default(whole):
  assert not (whole / "profile").exists()


@pytest.mark.parametrize("steps", ["5", "9:3", "0:2", "2:30", "a:b", "1:2:3", "-1:2"])
def test_invalid_profile_steps_are_refused_with_the_right_form(steps):
  config = Config(model=ModelConfig(size="tiny"), steps=20, profile_steps=steps)
  with pytest.raises(ValueError, match=re.escape(f"profile_steps={steps!r} must be 'first:last'")):
    config.check()


@pytest.mark.parametrize("field", ["step_timeout_seconds", "pause_timeout_seconds"])
def test_a_negative_timeout_is_refused(field):
  config = Config(model=ModelConfig(size="tiny"), **{field: -1})
  with pytest.raises(ValueError, match=f"{field}=-1 must be 0"):
    config.check()


def test_mfu_and_memory_are_recorded_where_they_are_known(train, whole, tmp_path, monkeypatch):
  assert not {"mfu", "peak_gigabytes"} & set(loop_case.records(whole)[0])
  chip = SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 5 * 10**9})
  idle = SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 10**9})
  monkeypatch.setattr(jax, "local_devices", lambda: [idle, chip])
  monkeypatch.setitem(loop.BF16_PEAK, "cpu", 1e12)
  monkeypatch.setattr(CLIPTask, "flops", lambda task, batch_size: 1e9)
  record = train(tmp_path, devices=2)[1]
  assert record["peak_gigabytes"] == 5
  assert record["mfu"] == pytest.approx(1e9 / record["step_seconds"] / 2e12)
  assert record["images_per_second"] == pytest.approx(8 / record["step_seconds"])


def test_the_wait_for_data_is_part_of_a_step_s_time(whole):
  records = [r for r in loop_case.records(whole) if "loss" in r]
  assert all(0 <= r["data_wait_seconds"] <= r["step_seconds"] for r in records)


def test_the_wait_for_data_is_the_longest_of_all_processes(monkeypatch):
  gathered = []

  def allgather(values):
    gathered.append(values)
    return np.stack([values, np.array([0.5, 1.0], np.float32)])

  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(loop.multihost_utils, "process_allgather", allgather)
  assert loop._largest_of_all_processes(0.25, 3.0) == [0.5, 3.0]
  assert len(gathered) == 1


def test_the_loop_announces_each_wait_to_the_watchdog(train, tmp_path, monkeypatch):
  said = []

  class Listening(loop.Watchdog):
    def waits_for(self, what, *, first=False):
      said.append((what, "first" if first else "step"))

    def pauses_for(self, what):
      said.append((what, "pause"))

  monkeypatch.setattr(loop, "Watchdog", Listening)
  train(tmp_path, steps=3)
  assert said[:4] == [
    ("the checkpoint to continue from", "pause"),
    ("the initial state", "first"),
    ("the batch of step 1", "first"),
    ("step 1 to be compiled and started", "first"),
  ]
  last = said.index(("the batch of step 3", "step"))
  assert said[last + 1 :] == [
    ("step 3 to be compiled and started", "step"),
    ("the result of step 2", "step"),
    ("all processes to end step 3", "step"),
    ("the result of step 3", "step"),
    ("the evaluation after step 3", "pause"),
    ("the checkpoint of step 3", "pause"),
    ("the last checkpoint", "pause"),
  ]


def test_a_run_with_hanging_data_ends_with_a_message(data_dir, whole, tmp_path):
  environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
  run = subprocess.run(
    [sys.executable, "-c", HANGING, data_dir, tmp_path],
    cwd=ROOT,
    env=environment,
    text=True,
    capture_output=True,
    timeout=300,
  )
  assert run.returncode == EXIT_CODE, run.stderr
  assert re.search(r"Process 0 of 1 \(pid \d+\) waited 600 s for the batch of step 3", run.stderr)
  assert re.search(r"  MainThread\n(    .*\n)*    <string>:\d+ hang\n", run.stderr)
  assert f"the last good checkpoint is step 2 in {tmp_path / 'checkpoints'}" in run.stderr


def test_out_of_memory_is_one_message(train, tmp_path, monkeypatch):
  def too_large(run):
    def step(state, batch):
      return jnp.zeros(1 << 45).block_until_ready()

    return step

  monkeypatch.setattr(loop, "jit_train_step", too_large)
  with pytest.raises(RunError) as raised:
    train(tmp_path)
  message = str(raised.value)
  assert "Out of memory on a device (cpu), at step 1 to be compiled and started" in message
  assert "140,737.5 GB were asked for" in message
  assert "--config.accumulate=2" in message
