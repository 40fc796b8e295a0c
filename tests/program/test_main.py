"""The training program as users start it: it runs, resumes after a kill, and reports errors."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from conftest import QUICK

from configs import quickstart
from train.errors import RunError
from train.loop import train

pytestmark = pytest.mark.standard_promotion  # As optax needs.

ROOT = Path(__file__).parents[2]
TIMINGS = {"step_seconds", "data_wait_seconds", "images_per_second", "mfu", "peak_gigabytes"}
SMALL = {
  "data.name": "shapes/tiny",
  "batch_size": 16,
  "steps": 12,
  "optimizer.warmup_steps": 2,
  "model.image_size": 32,
  "model.context_length": 16,
  "model.scan": True,  # One block of each tower to trace; .ci/run trains the quickstart unrolled.
  "log_every": 1,
  "eval_every": 6,
  "eval_batch_size": 96,
  "checkpoint_every": 3,
  "checkpoint_keep": 2,
}


class Program:
  """Starts the program on small data with a shared compilation cache."""

  def __init__(self, shared: Path):
    self.data_dir = shared / "data"
    self.environment = {
      **os.environ,
      "JAX_PLATFORMS": "cpu",
      "XLA_FLAGS": f"--xla_force_host_platform_device_count=2 {QUICK}",
      "JAX_COMPILATION_CACHE_DIR": str(shared / "compiled"),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

  def start(self, workdir, module="train.main", **options) -> subprocess.Popen:
    options = {**SMALL, "data.data_dir": self.data_dir, **options}
    command = [sys.executable, "-m", module, "--config=configs/quickstart.py"]
    command += [f"--config.{name}={value}" for name, value in options.items()]
    return subprocess.Popen(
      [*command, f"--workdir={workdir}"],
      cwd=ROOT,
      env=self.environment,
      text=True,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
    )

  def config(self, **options):
    config = quickstart.get_config()
    for name, value in {**SMALL, "data.data_dir": str(self.data_dir), **options}.items():
      *groups, field = name.split(".")
      setattr(functools.reduce(getattr, groups, config), field, value)
    return config

  def run(self, workdir, **options) -> tuple[int, str, str]:
    process = self.start(workdir, **options)
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err

  def run_until(self, step, signum, workdir, **options) -> tuple[int, str, str]:
    """Sends the signal once metrics.jsonl holds that step."""
    process = self.start(workdir, **options)
    for _ in range(3000):
      if records(workdir) and records(workdir)[-1]["step"] >= step:
        break
      assert process.poll() is None, process.communicate()
      time.sleep(0.05)
    process.send_signal(signum)
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def program(tmp_path_factory):
  return Program(tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="module")
def whole(program, tmp_path_factory):
  """The workdir and output of an uninterrupted run."""
  workdir = tmp_path_factory.mktemp("whole")
  code, out, err = program.run(workdir)
  assert code == 0, err
  return workdir, out


def records(workdir) -> list[dict]:
  path = Path(workdir) / "metrics.jsonl"
  lines = path.read_text().splitlines(keepends=True) if path.exists() else []
  return [json.loads(line) for line in lines if line.endswith("\n")]


def measured(workdir) -> list[dict]:
  return [{k: v for k, v in r.items() if k not in TIMINGS} for r in records(workdir)]


def arrays(workdir, step) -> list[np.ndarray]:
  import jax

  with ocp.StandardCheckpointer() as checkpointer:
    state = checkpointer.restore(Path(workdir) / "checkpoints" / str(step) / "state")
  return jax.tree.leaves(state)


def assert_same_run(workdir, whole):
  assert measured(workdir) == measured(whole)
  for a, b in zip(arrays(workdir, 12), arrays(whole, 12), strict=True):
    np.testing.assert_array_equal(a, b)


def test_a_run_writes_its_metrics_checkpoints_and_report(whole):
  workdir, out = whole
  left = {path.name for path in workdir.iterdir()}
  assert left >= {
    "metrics.jsonl", "config.json", "tokenizer.json", "result.json", "report.png", "tensorboard",
    "checkpoints",
  }  # fmt: skip
  assert list((workdir / "tensorboard").iterdir())
  assert sorted(p.name for p in (workdir / "checkpoints").iterdir()) == ["12", "9"]
  steps = [r["step"] for r in records(workdir) if "loss" in r]
  assert steps == list(range(1, 13))
  assert set(records(workdir)[0]) == {
    "step", "loss", "accuracy", "learning_rate", "images_per_second", "step_seconds",
    "data_wait_seconds", "gradient_norm", "parameter_norm", "logit_scale",
    "rms/image/patch_embedding/kernel",
    *(f"mean_abs_feature/image_block_{i}" for i in range(3)),
    *(f"mean_abs_feature/text_block_{i}" for i in range(2)),
  }  # fmt: skip
  result = json.loads((workdir / "result.json").read_text())
  assert result["step"] == 12
  assert result["eval"]["zero_shot_top1"] == records(workdir)[-1]["eval/zero_shot_top1"]
  assert "step 12/12" in out and "images/s" in out and "left" in out


def test_a_killed_run_resumes_exactly(program, whole, tmp_path):
  code, _, _ = program.run_until(7, signal.SIGKILL, tmp_path)
  assert code == -signal.SIGKILL
  code, out, err = program.run(tmp_path)
  assert code == 0, err
  assert "Continuing after step" in out
  assert_same_run(tmp_path, whole[0])


@pytest.fixture(scope="module")
def stopped(program, tmp_path_factory):
  """A workdir, and the step after which SIGTERM stopped the run."""
  workdir = tmp_path_factory.mktemp("stopped")
  code, _, err = program.run_until(4, signal.SIGTERM, workdir, checkpoint_every=0)
  assert code == 128 + signal.SIGTERM
  assert "Stopped by SIGTERM after step" in err
  assert "Traceback" not in err
  return workdir, int(err.split("after step ")[1].split(";")[0])


@pytest.mark.slow
def test_sigterm_saves_a_checkpoint_and_the_run_resumes_exactly(program, whole, stopped, tmp_path):
  workdir, step = stopped
  assert records(workdir)[-1]["step"] == step
  shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
  code, out, err = program.run(tmp_path)
  assert code == 0, err
  assert f"Continuing after step {step}" in out
  assert_same_run(tmp_path, whole[0])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["stable_adamw", "muon"])
def test_a_run_in_microbatches_resumes_exactly(program, tmp_path, optimizer):
  options = {"accumulate": 2, "model.patch_dropout": 0.5, "eval_every": 0}
  options["optimizer.name"] = optimizer
  code, _, err = program.run(tmp_path, **options)
  assert code == 0, err
  whole = measured(tmp_path), arrays(tmp_path, 12)
  shutil.rmtree(tmp_path / "checkpoints" / "12")
  code, out, err = program.run(tmp_path, **options)
  assert code == 0, err
  assert "Continuing after step 9" in out
  assert measured(tmp_path) == whole[0]
  for a, b in zip(arrays(tmp_path, 12), whole[1], strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_separate_evaluation_equals_the_run_s_evaluation(program, whole):
  workdir, _ = whole
  code, out, err = program.run(workdir, module="train.evaluate")
  assert code == 0, err
  scores = json.loads((workdir / "evaluation-shapes-tiny-1.0.0-test.json").read_text())
  assert scores.pop("step") == 12
  assert scores == json.loads((workdir / "result.json").read_text())["eval"]
  assert "zero_shot_top1" in out


@pytest.mark.slow
def test_a_diverging_run_names_the_step_the_tensor_and_the_last_good_checkpoint(program, tmp_path):
  options = {"optimizer.learning_rate": 1e15, "optimizer.warmup_steps": 0}
  code, _, err = program.run(tmp_path, **options, checkpoint_every=1, **{"optimizer.eps": 1e-30})
  assert code == 1
  assert "Traceback" not in err
  step = int(err.split("Step ")[1].split(":")[0])
  good = sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir())
  assert "is not finite" in err
  assert step > 1 and good[-1] == step - 1
  assert f"step {step - 1} in {tmp_path / 'checkpoints'}" in err


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"model.recipe": "switchbak"}, "Unknown recipe 'switchbak'; known: full, switchback"),
    ({"model.remat": "full"}, "remat='full' must be 'none', 'block' (once called 'full'"),
    ({"model.size": "Q/9"}, "model.size='Q/9': 'Q/9' is no model: known are tiny"),
    ({"model.backend": "mosaic"}, "backend='mosaic' needs an NVIDIA GPU"),
    ({"data.name": "cifar10"}, "No data set data.name='cifar10'"),
    ({"data.name": "mine", "data.train_shards": "no-*.tar"}, "No shard matches 'no-*.tar'"),
    ({"data.eval_split": "validation"}, "'validation': it has"),
    ({"batch_size": 15}, "batch_size=15 must be a multiple of 8 devices"),
    (
      {"accumulate": 3},
      "batch_size=16 must be a multiple of 8 devices x accumulate=3, which is 24",
    ),
    ({"accumulate": 0}, "accumulate=0 must be at least 1"),
    ({"loss": "hinge"}, "loss='hinge' is none of softmax, siglip"),
    ({"mesh.fsdp": 3}, "does not make 8 devices"),
    ({"steps": 0}, "steps=0 must be at least 1"),
    ({"wandb_project": "mine"}, "pip install wandb"),
  ],
  ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_wrong_value_is_named_with_what_would_be_right(program, tmp_path, options, message):
  with pytest.raises((ValueError, NotImplementedError, RunError), match=re.escape(message)):
    train(program.config(**options), tmp_path)


def test_a_user_error_is_one_message(program, tmp_path):  # test_cli.py has wrong flags.
  code, _, err = program.run(tmp_path, **{"data.name": "cifar10"})
  assert code == 1
  assert "No data set data.name='cifar10'" in err
  assert "Traceback" not in err


def test_another_config_does_not_continue_a_run(program, whole):
  workdir, _ = whole
  before = (workdir / "config.json").read_text()
  with pytest.raises(RunError, match=r"\(optimizer.b2: 0.98 -> 0.5\)"):
    train(program.config(**{"optimizer.b2": 0.5, "log_every": 5}), workdir)
  assert (workdir / "config.json").read_text() == before


@pytest.mark.slow
def test_a_full_disk_is_one_message_and_loses_nothing(program, whole, stopped, tmp_path):
  shutil.copytree(stopped[0], tmp_path, dirs_exist_ok=True)
  metrics, kept = tmp_path / "metrics.jsonl", tmp_path / "kept"
  metrics.rename(kept)
  metrics.symlink_to("/dev/full")
  code, _, err = program.run(tmp_path)
  assert code == 1
  assert "No space left on device" in err and "Traceback" not in err
  metrics.unlink()
  kept.rename(metrics)
  code, _, err = program.run(tmp_path)
  assert code == 0, err
  assert_same_run(tmp_path, whole[0])


FAILING_SAVE = """
import resource
import jax.numpy as jnp
from train import cli
from train.checkpoint import Checkpointer

def save(config, workdir):
  resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
  checkpointer = Checkpointer(workdir, 1)
  checkpointer.save(1, {f"{i}": jnp.full((64, 64), i) for i in range(200)}, {})
  checkpointer.wait()

cli.run(save)
"""


@pytest.mark.slow
def test_a_save_that_fails_in_many_threads_is_one_message(tmp_path):
  run = subprocess.run(
    [sys.executable, "-c", FAILING_SAVE, "--config=configs/quickstart.py", f"--workdir={tmp_path}"],
    cwd=ROOT,
    text=True,
    capture_output=True,
    timeout=300,
  )
  assert run.returncode == 1
  assert run.stderr.startswith(f"\nCould not write a checkpoint to {tmp_path}: "), run.stderr
  assert run.stderr.count("\n") == 2
