"""The next stage's step is compiled beside the steps of the one before, and changes none."""

import re
import signal
import subprocess
import sys
import threading
import time

import loop_case
import pytest
from test_schedule import SCHEDULE, at_step, data_dir, recipe_step, train, whole  # noqa: F401
from test_stop import ROOT, calling, saved, send, stopped

from train import loop
from train.parallel import ahead
from train.parallel.ahead import Ahead

IN_TIME = 120  # seconds


def in_thread() -> bool:
  return threading.current_thread().name == ahead.NAME


def compiling(monkeypatch, do):
  """Calls `do()` before each compilation of a later stage's step."""
  monkeypatch.setattr(loop.memory, "compile_step", calling(do, loop.memory.compile_step))


def waited(said: str) -> float:
  return float(re.search(r"recipe full from here, waited (.*) s for its step", said)[1])


@pytest.mark.parametrize("beside", [True, False])
def test_a_change_waits_for_a_slow_compilation_only_if_none_is_beside_the_steps(
  train,  # noqa: F811
  whole,  # noqa: F811
  tmp_path,
  monkeypatch,
  capsys,
  beside,
):
  started, ended = threading.Event(), threading.Event()

  def slow():
    started.set()
    time.sleep(0 if ended.is_set() else 3)  # A compiled step comes along, too.
    ended.set()

  def third_step():
    assert ended.wait(IN_TIME) if beside else not started.is_set()

  compiling(monkeypatch, slow)
  monkeypatch.setattr(loop, "jit_train_step", at_step(3, third_step))
  assert train(tmp_path, **SCHEDULE, compile_ahead=beside) == whole[1]
  assert (waited(capsys.readouterr().out) < 3) == beside


def test_an_error_beside_a_stage_harms_no_step_and_is_gone_if_it_was_of_that_moment(
  train,  # noqa: F811
  whole,  # noqa: F811
  tmp_path,
  monkeypatch,
):
  failed = []

  def fails():
    if in_thread():
      failed.append(True)
      raise RuntimeError("out of memory")

  compiling(monkeypatch, fails)
  assert train(tmp_path, **SCHEDULE) == whole[1]
  assert failed


def test_an_error_that_stays_is_raised_when_its_stage_begins(train, tmp_path, monkeypatch):  # noqa: F811
  def fails():
    raise NotImplementedError("no such kernel")

  compiling(monkeypatch, fails)
  with pytest.raises(NotImplementedError, match="no such kernel"):
    train(tmp_path, **SCHEDULE)
  assert saved(tmp_path) == [3]
  steps = [r["step"] for r in loop_case.records(tmp_path) if "loss" in r]
  assert steps == [1, 2, 3]


@pytest.mark.parametrize("place", ["beside a step", "at the change"])
def test_a_signal_during_the_compilation_ends_the_run_at_once(
  train,  # noqa: F811
  whole,  # noqa: F811
  tmp_path,
  monkeypatch,
  place,
):
  over, terminate = threading.Event(), lambda: send(signal.SIGTERM)
  with monkeypatch.context() as patch:
    compiling(patch, lambda: over.wait(IN_TIME))
    if place == "beside a step":
      patch.setattr(loop, "jit_train_step", at_step(3, terminate))
    else:
      patch.setattr(Ahead, "step", calling(terminate, Ahead.step))
    error = stopped(train, tmp_path, **SCHEDULE)
    assert ahead.is_compiling()
    over.set()
  assert "after step 3; saved: step 3 in" in str(error) and saved(tmp_path) == [3]
  assert train(tmp_path, **SCHEDULE) == whole[1]


# A run with a step that XLA, as it seems, compiles for long, and a third step that ends it.
PROGRAM = """
import ctypes, os, signal, sys
sys.path[:0] = ["tests", "tests/program"]
import jax, loop_case, test_schedule
from train import cli, loop

def third_step():
  if sys.argv[0] == "signal":
    os.kill(os.getpid(), signal.SIGTERM)
  else:
    raise RuntimeError("third step")

loop_case.replace_model(setattr, test_schedule.at_step(3, third_step))
jax.stages.Lowered.compile = lambda lowered: ctypes.CDLL(None).sleep(3000)
how = sys.argv.pop(1)
sys.argv[0] = how
cli.run(lambda config, folder: loop.train(
  loop_case.config(folder / "data", **test_schedule.SCHEDULE | {"eval_every": 0}), folder))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code", "said"), [
  ("signal", 143, "Stopped by SIGTERM after step"), ("error", 1, "RuntimeError: third step"),
])  # fmt: skip
def test_no_program_waits_at_its_end_for_a_step_that_is_compiled(tmp_path, how, code, said):
  flags = ["--config=configs/quickstart.py", f"--workdir={tmp_path}"]
  command = [sys.executable, "-c", PROGRAM, how, *flags]
  ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
  assert ended.returncode == code and said in ended.stderr
