"""Two processes of one device each train as one process does; only the first writes."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from pairwise import mainly
from processes_case import ends, start_two

from configs import quickstart
from train.loop import train

pytestmark = pytest.mark.standard_promotion  # As optax needs.

TIMINGS = {"step_seconds", "data_wait_seconds", "images_per_second", "mfu", "peak_gigabytes"}

# A whole run, then its last step again from the first checkpoint, through the command line.
TWICE = """
import pathlib, shutil, sys
import jax
from jax.experimental import multihost_utils
from train import cli, memory
from train.loop import train

def twice(config, workdir):
  memory.bytes_limit = lambda: (1e12, 1.0)[jax.process_index()]
  train(config, workdir)
  multihost_utils.sync_global_devices("the first run is over")
  if jax.process_index() == 0:
    shutil.rmtree(workdir / "checkpoints" / "2")
    shutil.copy(workdir / "metrics.jsonl", workdir / "first.jsonl")
  multihost_utils.sync_global_devices("its last checkpoint is gone")
  train(config, workdir)

cli.run(twice)
"""


def flags(config) -> list[str]:
  """A config as flags over the quickstart, whose tuples stay."""
  fields = {}
  for name, value in config.to_dict().items():
    fields |= (
      {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
    )
  return [f"--config.{k}={v}" for k, v in fields.items() if not isinstance(v, tuple)]


def measured(path):
  records = map(json.loads, path.read_text().splitlines())
  return [{k: v for k, v in r.items() if k not in TIMINGS} for r in records]


def test_a_missing_process_is_named_in_one_message(tmp_path):
  program = (
    "from train import cli; from train.parallel import processes; processes.PATIENCE = 2;"
    "cli.run(print)"
  )
  config = ["--config=configs/quickstart.py", f"--workdir={tmp_path}", "--distributed"]
  first, second = start_two(str(tmp_path / "compiled"), "-c", program, *config)
  second.kill()
  _, err = first.communicate(timeout=180)
  second.communicate()
  assert first.returncode == 1
  assert "Of 2 processes 1 came in time" in err and "index 1 (JAX_PROCESS_ID" in err
  assert "Traceback" not in err and "stack trace" not in err


# The second process works for ever, or raises an error, while the first waits for it in XLA.
TOGETHER = """
import jax, sys, time
from jax.experimental import multihost_utils
from train import cli
from train.parallel import peers
from train.errors import RunError

def job(config, workdir):
  print("together", flush=True)
  if jax.process_index() == {other}:
    {does}
  peers._GRACE = 0.5  # This process ends while the other one still does.
  multihost_utils.sync_global_devices("both are there")

cli.run(job)
"""


@pytest.mark.slow
def test_when_a_process_is_killed_the_other_ends_and_names_it(tmp_path):
  program = TOGETHER.format(other=1, does="time.sleep(600)")
  config = ["--config=configs/quickstart.py", f"--workdir={tmp_path}", "--distributed"]
  started = start_two(str(tmp_path / "compiled"), "-c", program, *config)
  for process in started:
    assert "together\n" in process.stdout  # XLA's own lines come before.
  started[1].kill()
  code, err = ends(started)[0]
  assert code == 75 and "stack trace" not in err
  assert "\nProcess 1 of 2 ended without a message: it was killed" in err


@pytest.mark.parametrize("other", mainly([0], [0, 1]))
def test_an_error_of_one_process_ends_the_other_with_its_message(tmp_path, other):
  program = TOGETHER.format(other=other, does="raise RunError('No room.')")
  config = ["--config=configs/quickstart.py", f"--workdir={tmp_path}", "--distributed"]
  codes, errors = zip(
    *ends(start_two(str(tmp_path / "compiled"), "-c", program, *config)), strict=True
  )
  assert codes[other] == 1 and errors[other].endswith("\nNo room.\n")
  assert codes[1 - other] == 1  # The same command would fail again.
  assert f"\nProcess {other} of 2 ended: No room." in errors[1 - other]
  assert "stack trace" not in errors[0] + errors[1]


def test_processes_with_two_configs_end_at_once_and_name_the_field(tmp_path):
  config = ["--config=configs/quickstart.py", f"--workdir={tmp_path}", "--distributed"]
  rates = [[f"--config.optimizer.learning_rate={rate}"] for rate in ("1e-3", "1e-4")]
  program = "from train import cli; cli.run(print)"
  started = start_two(str(tmp_path / "compiled"), "-c", program, *config, each=rates)
  for code, err in ends(started):
    assert code == 1 and "Traceback" not in err
    assert "config.optimizer.learning_rate: 0.001 in process 0; 0.0001 in process 1" in err


# Two checkpoints of an array that is split over two processes, and what happens at the second.
SAVES = """
import jax, numpy as np, resource, time
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from train import cli
from train.checkpoint import Checkpointer

def job(config, workdir):
  place = NamedSharding(Mesh(np.array(jax.devices()), "d"), PartitionSpec("d"))
  def state(step):
    whole = np.random.default_rng(step).normal(size=(2, 5000)).astype(np.float32)
    return {{"x": jax.make_array_from_callback(whole.shape, place, lambda i: whole[i])}}
  checkpointer = Checkpointer(workdir, keep=2)
  checkpointer.save(1, state(1), {{"at": 1}})
  checkpointer.wait()
  if jax.process_index() == {other}:
    {fails}
  checkpointer.save(2, state(2), {{"at": 2}})
{then}

cli.run(job)
"""


@pytest.mark.parametrize("other", mainly([1], [0, 1]))
def test_a_part_that_cannot_be_written_ends_all_in_seconds_with_the_reason(tmp_path, other):
  program = SAVES.format(
    other=other,
    fails="resource.setrlimit(resource.RLIMIT_FSIZE, (4096, -1))",
    then="""
  for _ in range(600):  # Steps go on, as in training.
    checkpointer.check()
    time.sleep(0.1)
""",
  )
  config = ["--config=configs/quickstart.py", f"--workdir={tmp_path / 'run'}", "--distributed"]
  started = start_two(str(tmp_path / "compiled"), "-c", program, *config)
  codes, errors = zip(*ends(started), strict=True)
  assert codes == (1, 1), errors
  assert "Could not write a checkpoint to" in errors[other]
  assert "File too large" in errors[other] and "step 1 in" in errors[other]
  assert f"\nProcess {other} of 2 ended: Could not write a checkpoint" in errors[1 - other]
  assert [path.name for path in (tmp_path / "run").iterdir() if path.name.isdecimal()] == ["1"]


@pytest.mark.parametrize("other", mainly([1], [0, 1]))
def test_all_fall_back_if_one_cannot_read_its_part(tmp_path, other):
  program = SAVES.format(
    other=other,
    fails="""
    whole = checkpointer._handler.restore
    def restore(directory, **arguments):
      if directory.name == "2":
        raise OSError("Stale file handle")
      return whole(directory, **arguments)
    checkpointer._handler.restore = restore
""",
    then="""
  checkpointer.wait()
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state(1))
  restored = checkpointer.restore(like).state["x"].addressable_data(0)
  np.testing.assert_array_equal(restored, state(1)["x"].addressable_data(0))
  checkpointer.close()
""",
  )
  config = ["--config=configs/quickstart.py", f"--workdir={tmp_path / 'run'}", "--distributed"]
  for code, err in ends(start_two(str(tmp_path / "compiled"), "-c", program, *config)):
    assert code == 0, err
    assert "step 2 cannot be read: OSError: Stale file handle" in err
    assert "Falling back to the checkpoint of step 1" in err
  assert sorted(p.name for p in (tmp_path / "run").iterdir() if "1" in p.name or "2" in p.name) == [
    "1",
    "damaged-2",
  ]


@pytest.mark.slow
def test_two_processes_train_as_one_and_resume_exactly(tmp_path, monkeypatch):
  config = quickstart.get_config()
  config = dataclasses.replace(
    config,
    model=dataclasses.replace(
      config.model,
      recipe="full",
      image_size=32,
      context_length=16,
      scan=True,
      patch_dropout=0.5,  # Dropped patches depend on an image's place in the batch.
    ),
    data=dataclasses.replace(config.data, name="shapes/tiny", data_dir=str(tmp_path / "data")),
    optimizer=dataclasses.replace(config.optimizer, warmup_steps=1),
    mesh=dataclasses.replace(config.mesh, fsdp=2),  # Kernels are split over the processes.
    batch_size=16,
    steps=2,
    log_every=1,
    eval_every=0,
    eval_batch_size=96,
    checkpoint_every=1,
  )
  alone, both = tmp_path / "alone", tmp_path / "both"
  two = jax.devices()[:2]
  monkeypatch.setattr(jax, "devices", lambda *_: two)
  train(config, alone)
  processes = start_two(
    str(tmp_path / "compiled"),
    "-c",
    TWICE,
    "--config=configs/quickstart.py",
    "--distributed",
    f"--workdir={both}",
    *flags(config),
  )
  try:
    (out, err), (second_out, second_err) = (p.communicate(timeout=600) for p in processes)
  finally:
    for process in processes:
      process.kill()
  assert [p.returncode for p in processes] == [0, 0], err + second_err
  assert "step 2/2" in out and "step" not in second_out
  assert "Continuing after step 1 of 2" in out
  # Process 0 alone would have room for "none".
  assert re.findall(r"remat=\w+(?:, as before)?", out) == ["remat=block", "remat=block, as before"]
  assert sorted(p.name for p in (both / "checkpoints").iterdir()) == ["1", "2"]
  assert {p.name for p in both.iterdir()} == {p.name for p in alone.iterdir()} | {
    "first.jsonl",
    "remat.json",
  }
  assert measured(both / "metrics.jsonl") == measured(both / "first.jsonl")
  pairs = zip(measured(both / "metrics.jsonl"), measured(alone / "metrics.jsonl"), strict=True)
  for together, one in pairs:
    assert set(together) == set(one)
    if "loss" in one:
      np.testing.assert_allclose(together["loss"], one["loss"], rtol=1e-4)
  # Rates are of the whole batch, not of a process's share; both wait for the slower one's data.
  for record in map(json.loads, (both / "metrics.jsonl").read_text().splitlines()):
    if "loss" in record:
      np.testing.assert_allclose(record["images_per_second"] * record["step_seconds"], 16)
      assert record["data_wait_seconds"] > 0
