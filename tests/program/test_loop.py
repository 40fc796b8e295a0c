"""The loop around a step: traces, limits, memory, other meshes. test_step.py tests steps."""

import errno
import gzip
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import loop_case
import numpy as np
import orbax.checkpoint as ocp
import pytest
from shards_case import image_bytes, write_shard

from train import cli, loop
from train.config import Config, ModelConfig, marked
from train.errors import RunError
from train.fields import MAY_CHANGE
from train.parallel import processes
from train.parallel.watchdog import EXIT_CODE
from train.run import Run, check_continues
from train.task import CLIPTask

ROOT = Path(__file__).parents[2]
EVALUATE = Run.evaluate  # The fixture replaces it.
HANGING = """
import pathlib, sys, threading, time
import loop_case
from train import loop

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

def hanging_source(iterator, put, size, whole=loop.prefetch_to_device):
  for i, batch in enumerate(whole(iterator, put, size)):
    yield batch if i < 2 else hang()

loop_case.replace_model(setattr)
loop.prefetch_to_device = hanging_source
loop.Watchdog = Impatient
loop.train(loop_case.config(sys.argv[1]), workdir)
"""


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
  return tmp_path_factory.mktemp("data")


@pytest.fixture
def train(monkeypatch, data_dir):
  """train(workdir, devices, **options) runs the loop and returns its records."""
  return loop_case.trainer(monkeypatch, data_dir, loop_case.records)


def final_state(workdir, step=4) -> list[np.ndarray]:
  with ocp.StandardCheckpointer() as checkpointer:
    return jax.tree.leaves(checkpointer.restore(workdir / "checkpoints" / str(step) / "state"))


@pytest.fixture(scope="module")
def whole(data_dir, tmp_path_factory):
  """The workdir of an uninterrupted run on one device."""
  workdir = tmp_path_factory.mktemp("whole")
  with pytest.MonkeyPatch.context() as patch:
    loop_case.trainer(patch, data_dir)(workdir)
  return workdir


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_trace_has_the_steps_of_profile_steps(train, tmp_path):
  train(tmp_path, profile_steps="2:3")
  assert list((tmp_path / "profile").rglob("*.xplane.pb"))
  assert steps_of_trace(tmp_path) == [2, 3]


@pytest.mark.slow
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
  monkeypatch.setattr(processes.multihost_utils, "process_allgather", allgather)
  assert processes.largest_of_all(0.25, 3.0) == [0.5, 3.0]
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
    ("the checkpoint of step 3", "pause"),
    ("the evaluation after step 3", "pause"),
    ("the last checkpoint", "pause"),
  ]


@pytest.mark.slow
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


def test_a_failed_first_try_does_not_block_the_workdir(train, whole, tmp_path, monkeypatch):
  def failing(run):
    raise RunError("no step")

  with monkeypatch.context() as patch:
    patch.setattr(loop, "jit_train_step", failing)
    with pytest.raises(RunError, match="no step"):
      train(tmp_path, batch_size=16, **{"data.tokenizer_vocab_size": 600})
  train(tmp_path)
  for there, here in zip(final_state(tmp_path), final_state(whole), strict=True):
    np.testing.assert_array_equal(there, here)
  assert (tmp_path / "tokenizer.json").read_text() == (whole / "tokenizer.json").read_text()


def test_the_help_marks_each_field_that_may_change():
  starred = re.findall(r"^  (\w+)\* ", cli.describe_fields(), flags=re.MULTILINE)
  assert sorted(starred) == sorted(path.rpartition(".")[2] for path in marked(MAY_CHANGE))


def test_nan_in_a_config_equals_itself(tmp_path):
  config = Config(model=ModelConfig(size="tiny"))
  config.optimizer.clip_norm = float("nan")
  saved(tmp_path, config)
  check_continues(config, tmp_path)


def saved(workdir, config, step=1, **fields):
  """A workdir as a run with `config` leaves it after `step`."""
  (workdir / "checkpoints" / str(step)).mkdir(parents=True)
  (workdir / "config.json").write_text(json.dumps({**config.to_dict(), **fields}))


def test_a_field_missing_in_an_old_config_counts_as_its_default(tmp_path):
  config = Config(model=ModelConfig(size="tiny"))
  old = config.to_dict()
  del old["model"]["qk_norm"], old["optimizer"]
  saved(tmp_path, config)
  (tmp_path / "config.json").write_text(json.dumps(old))
  check_continues(config, tmp_path)
  config.optimizer.b2 = 0.5
  with pytest.raises(RunError, match=r"\(optimizer.b2: 0.98 -> 0.5\)"):
    check_continues(config, tmp_path)


def test_a_field_that_is_gone_is_ignored_and_named(tmp_path, capsys):
  config = Config(model=ModelConfig(size="tiny"))
  saved(tmp_path, config, model={**config.to_dict()["model"], "fused": True})
  check_continues(config, tmp_path)
  assert "model.fused=True" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [b"{", b"\xff\xfe", b"", b"[]", b"[" * 100_000])
def test_a_damaged_config_json_is_named_with_the_cure(tmp_path, damage):
  config = Config(model=ModelConfig(size="tiny"))
  saved(tmp_path, config)
  (tmp_path / "config.json").write_bytes(damage)
  with pytest.raises(RunError, match=f"{tmp_path / 'config.json'} is damaged: .* delete that file"):
    check_continues(config, tmp_path)


def test_a_damaged_tokenizer_json_is_named_with_the_cure(train, tmp_path):
  train(tmp_path, steps=2)
  whole = (tmp_path / "tokenizer.json").read_text()
  (tmp_path / "tokenizer.json").write_text(whole[:-5])
  with pytest.raises(RunError, match=r"tokenizer.json is not a .* Delete it"):
    train(tmp_path)
  (tmp_path / "tokenizer.json").unlink()
  train(tmp_path)
  assert (tmp_path / "tokenizer.json").read_text() == whole


def test_another_tokenizer_json_than_the_run_s_is_named_with_the_cure(train, tmp_path):
  train(tmp_path, steps=2)
  path = tmp_path / "tokenizer.json"
  whole = path.read_text()
  content = json.loads(whole)
  ids = content["model"]["vocab"]
  ids["a"], ids["b"] = ids["b"], ids["a"]
  path.write_text(json.dumps(content))
  with pytest.raises(RunError, match=r"tokenizer.json is not the one .* Delete it"):
    train(tmp_path)
  path.unlink()
  train(tmp_path)
  assert path.read_text() == whole


def test_fewer_steps_than_a_run_has_taken_are_refused_and_change_nothing(train, tmp_path):
  train(tmp_path, steps=4)
  before = [(tmp_path / name).read_text() for name in ("config.json", "result.json")]
  with pytest.raises(RunError, match="holds a run after step 4, and steps=2 is before it"):
    train(tmp_path, steps=2)
  assert before == [(tmp_path / name).read_text() for name in ("config.json", "result.json")]


def test_more_steps_of_a_run_say_how_the_learning_rate_changes(train, tmp_path, capsys):
  train(tmp_path, steps=4)
  assert "changes the schedule" not in capsys.readouterr().out
  records = train(tmp_path, steps=8)
  said = capsys.readouterr().out
  rates = {r["step"]: r["learning_rate"] for r in records if "learning_rate" in r}
  assert "steps=4 -> 8 changes the schedule: the learning rate falls to 0 at step 8" in said
  assert f"Step 4 had {rates[4]:.3g}; step 5 has {rates[5]:.3g}, where steps=4 gives 0." in said
  assert rates[5] > rates[4]


def test_a_constant_run_cools_down_from_a_checkpoint_and_says_so(train, tmp_path, capsys):
  constant = {"optimizer.schedule": "constant", "steps": 8}
  train(tmp_path, **constant | {"steps": 4})
  train(tmp_path, **constant)
  assert "the learning rate has no cool-down now" in capsys.readouterr().out
  records = train(tmp_path, **constant | {"steps": 12, "optimizer.cooldown_steps": 4})
  said = capsys.readouterr().out
  rates = {r["step"]: r["learning_rate"] for r in records if "learning_rate" in r}
  peak = rates[1]
  assert [rates[step] / peak for step in range(8, 13)] == pytest.approx([1, 1, 0.75, 0.5, 0.25])
  assert (
    "steps=8 -> 12, optimizer.cooldown_steps=0 -> 4 changes the schedule: the learning rate falls"
    f" to 0 from step 8 to 12 now. Step 8 had {peak:.3g}; step 9 has {peak:.3g}, where steps=8,"
    f" optimizer.cooldown_steps=0 gives {peak:.3g}." in said
  )


def test_a_run_without_a_split_to_evaluate_is_not_evaluated(data_dir, tmp_path, capsys, train):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(Run, "evaluate", EVALUATE)
    records = train(tmp_path, **{"data.eval_split": "", "eval_every": 2})
  assert not [name for r in records for name in r if name.startswith("eval/")]
  assert "Finished after step 4: not evaluated" in capsys.readouterr().out
  assert json.loads((tmp_path / "result.json").read_text())["eval"] == {}


def checkpoints(workdir) -> list[int]:
  return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())


def test_the_best_checkpoint_stays_and_is_named_though_the_run_was_interrupted(
  train, tmp_path, monkeypatch, capsys
):
  scores = {2: 0.1, 3: 0.9, 4: 0.3, 6: 0.2, 8: 0.2}
  options = {"checkpoint_best": "top1", "checkpoint_every": 4, "checkpoint_keep": 1}
  options |= {"eval_every": 2, "checkpoint_keep_every": 4}
  monkeypatch.setattr(Run, "evaluate_state", lambda _, state: {"top1": scores[int(state.step)]})
  train(tmp_path, steps=3, **options)
  assert checkpoints(tmp_path) == [3]
  records = train(tmp_path, steps=8, **options)
  assert checkpoints(tmp_path) == [3, 4, 8]  # 2 and 6 had a checkpoint, too.
  assert [r["step"] for r in records if "eval/top1" in r] == [2, 3, 4, 6, 8]
  assert json.loads((tmp_path / "result.json").read_text())["best_step"] == 3
  assert f"\n  the best    {tmp_path / 'checkpoints' / '3'}\n" in capsys.readouterr().out


def test_a_score_that_no_evaluation_has_is_named_after_a_save(train, tmp_path):
  options = {"eval_every": 2, "checkpoint_every": 0}
  with pytest.raises(RunError, match=r"='top5' is no score of step 2: choose one of top1\."):
    train(tmp_path, **options, checkpoint_best="top5")
  assert checkpoints(tmp_path) == [2]
  records = train(tmp_path, **options, checkpoint_best="top1")
  assert [r["step"] for r in records if "eval/top1" in r] == [2, 4]
  assert checkpoints(tmp_path) == [2, 4]


def test_folders_of_clip_benchmark_are_scored_beside_a_split(train, tmp_path):
  root = tmp_path / "root"
  for name, ending in (("wds_classes", "cls"), ("wds_texts", "txt")):
    (root / name / "test").mkdir(parents=True)
    members = [
      (f"{i}.{kind}", content)
      for i in range(3)
      for kind, content in (("png", image_bytes("png")), (ending, str(i).encode()))
    ]
    write_shard(root / name / "test" / "0.tar", members)
  (root / "wds_classes" / "classnames.txt").write_text("0\n1\n2\n")
  (root / "wds_classes" / "zeroshot_classification_templates.txt").write_text("a {c}\n")
  (root / "wds_texts" / "dataset_type.txt").write_text("retrieval")
  folders = {"data.root": str(root), "data.eval_data": ("wds_classes", "wds_texts")}
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(Run, "evaluate", EVALUATE)
    records = train(tmp_path / "run", **{"data.eval_split": "", "eval_every": 2, **folders})
    scored = {r["step"]: r for r in records if "eval/wds_classes/zero_shot_top1" in r}
    assert set(scored) == {2, 4}
    assert scored[4]["eval/wds_texts/text_to_image_recall@10"] == 1  # Of three.
    (root / "wds_texts" / "dataset_type.txt").write_text("multilabel")
    with pytest.raises(RunError, match="holds 'multilabel'"):
      train(tmp_path / "other", steps=4, **folders)
    (root / "wds_texts" / "dataset_type.txt").write_text("retrieval")
    with pytest.raises(RunError, match="the folders need names of their own"):
      train(tmp_path / "other", **folders | {"data.eval_data": ("wds_texts", "./wds_texts")})


def test_a_second_run_in_a_workdir_is_refused_and_changes_nothing(train, tmp_path):
  code = "import pathlib, sys; from train.workdir import lock; w = pathlib.Path(sys.argv[1])\n"
  code += "with lock(w): print('held', flush=True); sys.stdin.read()"
  environment = {**os.environ, "PYTHONPATH": str(ROOT)}
  holder = subprocess.Popen(
    [sys.executable, "-c", code, tmp_path],
    env=environment,
    text=True,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  )
  with holder:
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(RunError, match=f"{tmp_path} is in use by process {holder.pid} on "):
      train(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    holder.kill()
  train(tmp_path)  # Its death freed the workdir.


def test_a_file_system_without_locks_is_named_and_used(train, tmp_path, monkeypatch, capsys):
  def refuse(*_):
    raise OSError(errno.ENOTSUP, "Operation not supported")

  monkeypatch.setattr("fcntl.flock", refuse)
  train(tmp_path)
  assert f"{tmp_path} cannot be locked: " in capsys.readouterr().err


def test_deleted_metrics_do_not_stop_a_finished_run(train, tmp_path):
  train(tmp_path)
  (tmp_path / "metrics.jsonl").unlink()
  (tmp_path / "result.json").unlink()
  train(tmp_path)
  assert json.loads((tmp_path / "result.json").read_text())["step"] == 4


def test_a_clock_that_jumps_back_changes_no_duration(train, tmp_path, monkeypatch):
  clock = itertools.count(10**9, -3600)
  monkeypatch.setattr(time, "time", lambda: float(next(clock)))
  records = train(tmp_path)
  assert all(r["step_seconds"] > 0 for r in records if "loss" in r)
  assert json.loads((tmp_path / "result.json").read_text())["seconds"] >= 0
