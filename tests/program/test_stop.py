"""Signals that announce an end: no finished step is lost, and a resumed run has the same bits."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import loop_case
import pytest
from pairwise import mainly

from train import loop
from train.checkpoint import Checkpointer
from train.due import Due
from train.parallel import stop
from train.run import Run

ROOT = Path(__file__).parents[2]
TIMINGS = {"step_seconds", "data_wait_seconds", "images_per_second"}
EVALUATING = {"eval_every": 2, "checkpoint_every": 0}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
  return tmp_path_factory.mktemp("data")


@pytest.fixture
def train(monkeypatch, data_dir):
  """train(workdir, **options) runs the loop on one device and returns its records."""
  return loop_case.trainer(monkeypatch, data_dir, measured)


@pytest.fixture(scope="module")
def whole(data_dir, tmp_path_factory):
  """The records of a run that nothing stops."""
  workdir = tmp_path_factory.mktemp("whole")
  with pytest.MonkeyPatch.context() as patch:
    return loop_case.trainer(patch, data_dir, measured)(workdir, **EVALUATING)


def measured(workdir):
  return [{k: v for k, v in r.items() if k not in TIMINGS} for r in loop_case.records(workdir)]


def saved(workdir):
  return sorted(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdecimal())


def send(*signums):
  for signum in signums:
    os.kill(os.getpid(), signum)
  time.sleep(0.05)
  deadline = time.monotonic() + 1
  while not stop.received() and time.monotonic() < deadline:
    time.sleep(0.01)  # Until the thread that waits for signals has it.


def calling(before, method):
  """The method, after `before()`."""

  def call(*args, **options):
    before()
    return method(*args, **options)

  return call


def at_step(number, do):
  """`loop_case.adding_step`, which calls `do` in that step of this start."""

  def make(run):
    step, calls = loop_case.adding_step(run), []

    def counting(state, batch):
      calls.append(0)
      if len(calls) == number:
        do()
      return step(state, batch)

    return counting

  return make


def stopped(train, workdir, **options):
  with pytest.raises(stop.Stopped) as raised:
    train(workdir, **options)
  return raised.value


TWICE = [2 * [signal.SIGTERM], [signal.SIGUSR1, signal.SIGTERM], 2 * [signal.SIGINT]]


@pytest.mark.parametrize("signums", mainly(TWICE[:1], [*([s] for s in stop.SIGNALS), *TWICE]))
def test_a_signal_in_a_step_saves_it_and_the_run_resumes_exactly(
  train, whole, tmp_path, monkeypatch, signums
):
  monkeypatch.setattr(loop, "jit_train_step", at_step(3, lambda: send(*signums)))
  error = stopped(train, tmp_path, **EVALUATING)
  first = signal.Signals(signums[0]).name
  assert str(error).startswith(f"Stopped by {first} after step 3; saved: step 3 in ")
  assert error.exit_code == 128 + signums[0] and saved(tmp_path) == [3]
  monkeypatch.setattr(loop, "jit_train_step", loop_case.adding_step)
  assert train(tmp_path, **EVALUATING) == whole


def test_a_due_evaluation_is_left_to_the_next_start(train, whole, tmp_path, monkeypatch):
  monkeypatch.setattr(loop, "jit_train_step", at_step(2, lambda: send(signal.SIGTERM)))
  evaluate = Run.evaluate
  monkeypatch.setattr(Run, "evaluate", lambda *_: pytest.fail("It was evaluated."))
  assert "after step 2; saved: step 2 in" in str(stopped(train, tmp_path, **EVALUATING))
  assert not any("eval/top1" in r for r in measured(tmp_path))
  monkeypatch.setattr(Run, "evaluate", evaluate)
  monkeypatch.setattr(loop, "jit_train_step", loop_case.adding_step)
  assert train(tmp_path, **EVALUATING) == whole


@pytest.mark.parametrize("step", [2, 4])
def test_a_signal_in_an_evaluation_ends_it_at_once(train, whole, tmp_path, monkeypatch, step):
  evaluate, calls = Run.evaluate, []

  def slow(run, params):
    calls.append(0)
    if len(calls) == step // 2:
      send(signal.SIGTERM)
      time.sleep(60)
    return evaluate(run, params)

  monkeypatch.setattr(Run, "evaluate", slow)
  began = time.monotonic()
  assert f"after step {step}; saved: step {step} in" in str(stopped(train, tmp_path, **EVALUATING))
  assert time.monotonic() - began < 50
  monkeypatch.setattr(Run, "evaluate", evaluate)
  assert train(tmp_path, **EVALUATING) == whole


# An evaluation that hears no signal for a while, as in XLA's compiler, and a save that takes 3 s.
DEAF = """
import ctypes
from pathlib import Path
from train.parallel import stop

def evaluate(run, params):
  signal.pthread_sigmask(signal.SIG_BLOCK, [stop._NUDGE])
  print("evaluating", flush=True)
  ctypes.CDLL(None).sleep(2)
  signal.pthread_sigmask(signal.SIG_UNBLOCK, [stop._NUDGE])
  return {"top1": 0.0}

def slow(checkpointer, *args):
  time.sleep(3)
  save(checkpointer, *args)

with stop.listening():  # Before threads start.
  sys.path.insert(0, "tests")
  import loop_case
  from train import loop
  from train.checkpoint import Checkpointer
  from train.run import Run
  stop._PATIENCE, save = 0.5, Checkpointer.save
  loop_case.replace_model(setattr)
  Run.evaluate, Checkpointer.save = evaluate, slow
  config = loop_case.config("DATA", checkpoint_every=0, eval_every=2, steps=10**6)
  loop.train(config, Path("WORKDIR"))
"""


def test_an_evaluation_that_hears_no_signal_is_ended_with_its_step_saved(data_dir, tmp_path):
  process = program(DEAF.replace("DATA", str(data_dir)).replace("WORKDIR", str(tmp_path)))
  while process.stdout.readline() != "evaluating\n":
    assert process.poll() is None
  process.terminate()
  code, _, err = end(process)
  where = f"step 2 in {tmp_path / 'checkpoints'}"
  assert err == f"\nStopped by SIGTERM after step 2; saved: {where}. The same command continues.\n"
  assert code == 143 and saved(tmp_path) == [2] == [measured(tmp_path)[-1]["step"]]


def test_a_signal_in_a_wait_for_data_saves_the_last_step(train, whole, tmp_path, monkeypatch):
  prefetch = loop.prefetch_to_device

  def hanging(*args):
    for i, batch in enumerate(prefetch(*args)):
      if i == 2:
        send(signal.SIGUSR2)
        time.sleep(60)
      yield batch

  monkeypatch.setattr(loop, "prefetch_to_device", hanging)
  assert "after step 2; saved: step 2 in" in str(stopped(train, tmp_path, **EVALUATING))
  monkeypatch.setattr(loop, "prefetch_to_device", prefetch)
  assert train(tmp_path, **EVALUATING) == whole


def test_a_signal_in_a_save_ends_the_run_after_it(train, tmp_path, monkeypatch):
  monkeypatch.setattr(
    Checkpointer, "save", calling(lambda: send(signal.SIGUSR1, signal.SIGUSR1), Checkpointer.save)
  )
  assert "Stopped by SIGUSR1 after step 2; saved: step 2" in str(stopped(train, tmp_path))
  assert saved(tmp_path) == [2]


def test_a_signal_after_the_last_step_changes_nothing(train, tmp_path, monkeypatch):
  monkeypatch.setattr(loop, "write_report", lambda *_: send(signal.SIGTERM))
  train(tmp_path)
  assert (tmp_path / "result.json").exists() and saved(tmp_path) == [2, 4]


def sleeping():
  send(signal.SIGTERM)
  time.sleep(60)


@pytest.mark.parametrize("place", ["make_run", "the initial state", "remat", "the first step"])
def test_before_the_first_step_a_signal_ends_the_run_at_once(train, tmp_path, monkeypatch, place):
  if place == "make_run":
    monkeypatch.setattr(loop, "make_run", calling(sleeping, loop.make_run))
  elif place == "the initial state":
    monkeypatch.setattr(Run, "new_state", calling(sleeping, Run.new_state))
  elif place == "remat":
    monkeypatch.setattr(loop.memory, "choose_remat", calling(sleeping, loop.memory.choose_remat))
  else:
    monkeypatch.setattr(loop, "jit_train_step", at_step(1, sleeping))
  with pytest.raises(stop.Interrupted) as raised:
    train(tmp_path)
  message = "Stopped by SIGTERM. There is no checkpoint yet: the same command starts again."
  assert str(raised.value) == message and raised.value.exit_code == 143


def test_before_the_first_step_of_a_resume_the_message_names_the_checkpoint(
  train, tmp_path, monkeypatch
):
  train(tmp_path, steps=2)
  monkeypatch.setattr(loop, "jit_train_step", at_step(1, sleeping))
  with pytest.raises(stop.Interrupted, match=r"The newest checkpoint is step 2 in .* continues\."):
    train(tmp_path)


def test_the_file_stop_ends_a_run_and_is_removed(train, whole, tmp_path, monkeypatch):
  monkeypatch.setattr("train.due._LOOK_SECONDS", 0)
  monkeypatch.setattr(loop, "jit_train_step", at_step(3, (tmp_path / "stop").touch))
  error = stopped(train, tmp_path, **EVALUATING)
  assert f"Stopped by the file {tmp_path / 'stop'} after step 3" in str(error)
  assert error.exit_code == 130 and not (tmp_path / "stop").exists()
  monkeypatch.setattr(loop, "jit_train_step", loop_case.adding_step)
  assert train(tmp_path, **EVALUATING) == whole


def test_the_file_stop_is_not_forgotten_until_processes_agree(tmp_path):
  due = Due(loop_case.config(tmp_path), tmp_path, time.monotonic())
  (tmp_path / "stop").touch()
  reasons = [due._reason() for _ in range(3)]  # Several agree at the third, for example.
  assert reasons[0] and len(set(reasons)) == 1


def test_max_hours_end_a_run_that_may_go_on(train, tmp_path):
  error = stopped(train, tmp_path, max_hours=1e-9)
  assert "Stopped by max_hours=1e-09 after step 1; saved: step 1" in str(error)
  assert error.exit_code == 75
  # Each start takes a step: one that prepares data or compiles for longer gets on, too.
  assert "after step 2; saved: step 2" in str(stopped(train, tmp_path, max_hours=1e-9))


def test_checkpoint_minutes_save_by_the_clock(train, tmp_path):
  train(tmp_path, checkpoint_every=0, checkpoint_minutes=1e-9)
  assert saved(tmp_path) == [2, 3, 4]  # The newest three.


def program(code: str, *before: str, **options) -> subprocess.Popen:
  return subprocess.Popen(
    [*before, sys.executable, "-c", "import os, signal, subprocess, sys, threading, time\n" + code],
    cwd=ROOT,
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    start_new_session=True,
    **options,
  )


def end(process) -> tuple[int, str, str]:
  out, err = process.communicate(timeout=120)
  return process.returncode, out, err


def test_a_signal_to_the_group_leaves_the_children_alive():
  process = program("""
from train.parallel import stop
with stop.listening():
  stop.defer()
  child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3)"])
  print("ready", flush=True)
  while not stop.received():
    time.sleep(0.01)
  print(stop.received(), child.wait())
""")
  assert process.stdout.readline() == "ready\n"
  os.killpg(process.pid, signal.SIGUSR1)
  assert end(process) == (0, f"{int(signal.SIGUSR1)} 0\n", "")


def test_a_program_that_cannot_answer_is_ended_with_the_message():
  process = program("""
from train.parallel import stop
stop._PATIENCE = 0.5
with stop.listening():
  signal.pthread_sigmask(signal.SIG_BLOCK, [stop._NUDGE])  # As if it were in C.
  print("ready", flush=True)
  time.sleep(60)
""")
  assert process.stdout.readline() == "ready\n"
  process.terminate()
  assert end(process) == (143, "", "\nStopped by SIGTERM. The same command starts again.\n")


def test_only_a_second_ctrl_c_ends_a_run_without_a_save():
  process = program("""
from train.parallel import stop
with stop.listening():
  stop.defer()
  print("ready", flush=True)
  while not stop.received():
    time.sleep(0.01)
  print("saving", flush=True)
  time.sleep(60)
""")
  assert process.stdout.readline() == "ready\n"
  for _ in range(2):  # At once: the terminal and a launcher both sent it.
    process.send_signal(signal.SIGINT)
  assert process.stdout.readline() == "saving\n"
  process.send_signal(signal.SIGTERM)
  time.sleep(1.5)
  assert process.poll() is None
  process.send_signal(signal.SIGINT)
  code, _, err = end(process)
  assert code == 130
  assert err == "\nInterrupted again: ended without a save. The same command starts again.\n"


def test_an_ignored_signal_stays_ignored():
  process = program(
    """
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from train.parallel import stop
with stop.listening():
  os.kill(os.getpid(), signal.SIGHUP)
  time.sleep(0.5)
  print(stop.received())
"""
  )
  assert end(process) == (0, "0\n", "")


def test_a_suspension_is_no_signal():
  code = """
import sys
from train.parallel import stop
with stop.listening():
  print("ready", flush=True)
  sys.stdin.read()
  print(stop.received())
"""
  process = subprocess.Popen(
    [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
  )
  assert process.stdout.readline() == "ready\n"
  for _ in range(3):
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.6)
    process.send_signal(signal.SIGCONT)
    time.sleep(0.1)
  out, _ = process.communicate(timeout=60)
  assert (process.returncode, out) == (0, "0\n")


def test_a_signal_in_a_destructor_is_not_lost():
  process = program("""
from train.parallel import stop
class Slow:
  def __del__(self):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
with stop.listening():
  slow = Slow()
  try:
    del slow
    time.sleep(30)
  except stop.Interrupted as error:
    print(error)
""")
  began = time.monotonic()
  assert end(process) == (0, "Stopped by SIGTERM. The same command starts again.\n", "")
  assert time.monotonic() - began < 25


def test_signals_are_as_before_after_the_block():
  before = [signal.getsignal(s) for s in stop.SIGNALS], signal.pthread_sigmask(signal.SIG_BLOCK, [])
  with stop.listening(), stop.listening():
    assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
  assert before == (
    [signal.getsignal(s) for s in stop.SIGNALS],
    signal.pthread_sigmask(signal.SIG_BLOCK, []),
  )
  assert not stop.received()


def test_a_signal_in_the_imports_is_one_message():
  process = subprocess.Popen(
    [sys.executable, "-X", "importtime", "-m", "train.main"],
    cwd=ROOT, text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
  )  # fmt: skip
  lines = []
  while not re.search(r"\| +numpy\b", lines[-1] if lines else ""):
    lines.append(process.stderr.readline())
    assert lines[-1], lines
  process.terminate()
  _, err = process.communicate(timeout=120)
  lines = [line for line in err.splitlines() if not line.startswith("import time:")]
  assert lines == ["", "Stopped by SIGTERM. The same command starts again."]
  assert process.returncode == 143
