"""Two processes whose clocks, signals and looks for the file `stop` differ end after one step."""

import json
import re

import loop_case
import pytest
from processes_case import start_two

pytestmark = pytest.mark.slow

# Each process trains these runs, and prints what came of each: a line of JSON.
PROGRAM = """
import ctypes, json, os, signal, sys, time
from pathlib import Path
sys.path.insert(0, "tests")
import jax
import loop_case
from train import cli, due, loop
from train.parallel import stop
from train.checkpoint import Checkpointer
from train.due import Due
from train.run import Run

real_evaluate = Run.evaluate
loop_case.replace_model(setattr)
due._LOOK_SECONDS = 0.0

def job(config, workdir):
  process = jax.process_index()
  at = {"step": 0, "batches": 0, "saves": [], "seconds": 0.0}
  save, minutes = Checkpointer.save, Due._minutes

  def saving(checkpointer, step, state, data):
    at["saves"].append(step)
    save(checkpointer, step, state, data)

  def stepping(do):
    def make(run):
      step = loop_case.adding_step(run)
      def counting(state, batch):
        at["step"] += 1
        do(at["step"])
        return step(state, batch)
      return counting
    return make

  def report(name, do=lambda step: None, **options):
    at.update(step=0, batches=0, saves=[], seconds=0.0)
    loop.jit_train_step = stepping(do)
    made = loop_case.config(workdir / "data", checkpoint_every=0, **{"steps": 6, **options})
    folder = workdir / name.partition(" ")[0]
    ended, raised = {"error": "", "code": 0}, None
    try:
      loop.train(made, folder)
    except stop.Stopped as error:
      ended = {"error": str(error).partition(";")[0], "code": error.exit_code}
      at["seconds"] += time.monotonic()
      raised = error
    print(json.dumps({"name": name, **at, **ended}), flush=True)
    return raised

  Checkpointer.save = saving
  report("whole")
  # Process 0 looks for the file.
  report("file", lambda step: step == 3 and process == 0 and (workdir / "file" / "stop").touch())
  report("file again")
  # Steps of a few milliseconds: they do not agree after each.
  def touch(step):
    if step == 50 and process == 0:
      (workdir / "fast" / "stop").touch()
      at["seconds"] = -time.monotonic()
  report("fast", touch, steps=10**5, log_every=10**5)
  # An hour is over in process 1 only.
  loop.Due = lambda config, folder, began: Due(config, folder, began - 4000 * process)
  report("hours", max_hours=1.0)
  loop.Due = Due
  # So are the minutes, at one step.
  Due._minutes = lambda self: 2.0 * (process == 1 and at["step"] == 3)
  report("minutes", checkpoint_minutes=1.0)
  Due._minutes = minutes

  def evaluate(run, params):
    for _ in range(300):
      run.between_batches()
      at["batches"] += 1
      if at["batches"] == 3 and process == 1:
        os.kill(os.getpid(), signal.SIGTERM)
      time.sleep(0.1)
    return {"top1": 0.0}

  Run.evaluate = evaluate
  report("evaluation", eval_every=2, log_every=1000)

  # XLA compiles for two minutes, in which Python's main thread would hear no signal.
  def compile(lowered):
    at["seconds"] = -time.monotonic()
    if process == 1:
      os.kill(os.getpid(), signal.SIGTERM)
    ctypes.CDLL(None).sleep(120)

  def evaluate(run, params):
    jax.stages.Lowered.compile = compile
    return real_evaluate(run, params)

  Run.evaluate = evaluate
  stop._listener.signum = 0  # That of the run before.
  raise report("compilation", eval_every=2, log_every=1000)

cli.run(job)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
  """{name of a run: what each process reports of it}, and the folder of the runs."""
  folder = tmp_path_factory.mktemp("together")
  started = start_two(
    str(folder / "compiled"),
    "-c",
    PROGRAM,
    "--config=configs/quickstart.py",
    f"--workdir={folder}",
    "--distributed",
  )
  said = [process.communicate(timeout=400) for process in started]
  assert [process.returncode for process in started] == [143, 143], said  # The last run's.
  reports = [
    [json.loads(line) for line in out.splitlines() if line.startswith('{"name"')] for out, _ in said
  ]
  return {a["name"]: [a, b] for a, b in zip(*reports, strict=True)}, folder


def both(ended, name):
  """What the processes report of a run, which is the same but for times."""
  reports = [{k: v for k, v in each.items() if k != "seconds"} for each in ended[0][name]]
  assert reports[0] == reports[1]
  return reports[0]


def test_the_file_that_one_process_sees_ends_both_and_the_run_goes_on_exactly(ended):
  whole, folder = both(ended, "whole"), ended[1]
  assert (whole["saves"], whole["code"]) == ([6], 0)
  stopped = both(ended, "file")
  assert stopped["error"] == f"Stopped by the file {folder / 'file' / 'stop'} after step 3"
  assert (stopped["saves"], stopped["code"]) == ([3], 130)
  assert not (folder / "file" / "stop").exists()
  assert both(ended, "file again")["saves"] == [6]
  assert measured(folder / "file") == measured(folder / "whole")


def test_fast_steps_agree_within_seconds(ended):
  stopped = both(ended, "fast")
  assert stopped["code"] == 130 and stopped["saves"] == [stopped["step"]]
  assert stopped["step"] > 51
  assert ended[0]["fast"][0]["seconds"] < 60  # 100,000 steps take many minutes.


def test_the_process_whose_hours_are_over_first_ends_both(ended):
  stopped = both(ended, "hours")
  assert stopped["error"] == "Stopped by max_hours=1 after step 1"
  assert (stopped["saves"], stopped["code"]) == ([1], 75)


def test_the_process_whose_minutes_are_over_first_makes_both_save(ended):
  assert both(ended, "minutes")["saves"] == [3, 6]


def test_a_signal_to_one_process_ends_an_evaluation_of_both_at_the_next_batch(ended):
  stopped = both(ended, "evaluation")
  assert stopped["error"] == "Stopped by SIGTERM after step 2"
  assert (stopped["batches"], stopped["saves"], stopped["code"]) == (3, [2], 143)


def test_a_signal_to_one_process_ends_both_before_an_evaluation_is_compiled(ended):
  stopped = both(ended, "compilation")
  assert stopped["error"] == "Stopped by SIGTERM after step 2"
  assert (stopped["saves"], stopped["code"]) == ([2], 143)
  assert max(each["seconds"] for each in ended[0]["compilation"]) < 60


def measured(folder):
  """The records but for times."""
  return [
    {k: v for k, v in record.items() if not re.search("seconds|per_second", k)}
    for record in loop_case.records(folder)
  ]
