"""A run with recipes in turn has the bits of a run continued by hand, wherever it stops."""

import json
import signal
import time

import jax
import loop_case
import numpy as np
import orbax.checkpoint as ocp
import pytest
from pairwise import mainly
from test_step import SHALLOW
from test_stop import calling, measured, saved, send, stopped

from sbjax.models.clip import CLIP
from sbjax.models.transformer import BlockOptions
from sbjax.recipes import RECIPES, SIMULATED
from train import inference, loop
from train.config import OptimizerConfig
from train.evaluate import evaluate_checkpoint
from train.optimizer import make_optimizer
from train.run import Run
from train.step import make_init, make_train_step
from train.task import CLIPTask

SCHEDULE = {
  "model.recipe": "switchback until 0.5, full",
  "steps": 6,
  "eval_every": 1,
  "checkpoint_every": 0,
}
JIT_TRAIN_STEP, NEW_STATE = loop.jit_train_step, Run.new_state  # The fixture replaces them.
MESH = {"devices": 8, "mesh.data": 2, "mesh.fsdp": 4}


def rounds(run: Run) -> bool:
  return run.task.model.options.recipe.rounds


def recipe_step(run: Run):
  """A step of additions, whose sums depend on the order of the recipes."""
  return loop_case.adding_step(run, 1 if rounds(run) else 2)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
  return tmp_path_factory.mktemp("data")


def trainer(patch, data_dir, result=measured):
  """train(workdir, devices, **options): evaluations say whether their recipe rounds."""
  train = loop_case.trainer(patch, data_dir, result)
  patch.setattr(loop, "jit_train_step", recipe_step)
  patch.setattr(Run, "evaluate", lambda run, params: {"rounds": float(rounds(run))})
  return train


@pytest.fixture
def train(monkeypatch, data_dir):
  return trainer(monkeypatch, data_dir)


@pytest.fixture(scope="module")
def whole(data_dir, tmp_path_factory):
  """The folder and the records of a run on one device that nothing stops."""
  workdir = tmp_path_factory.mktemp("whole")
  with pytest.MonkeyPatch.context() as patch:
    return workdir, trainer(patch, data_dir)(workdir, **SCHEDULE)


def state(workdir) -> list[np.ndarray]:
  with ocp.StandardCheckpointer() as checkpointer:
    return jax.tree.leaves(checkpointer.restore(workdir / "checkpoints" / "6" / "state"))


def assert_same_state(one, other):
  for a, b in zip(state(one), state(other), strict=True):
    np.testing.assert_array_equal(a, b)


def continue_by_hand(train, workdir, recipe, make=recipe_step, **options):
  """Takes three steps of switchback, and the rest of a run's with another recipe."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(loop, "jit_train_step", at_step(3, lambda: send(signal.SIGTERM), make))
    stopped(train, workdir, **{**SCHEDULE, "model.recipe": "switchback"}, **options)
  path = workdir / "config.json"
  config = json.loads(path.read_text())
  config["model"]["recipe"] = recipe
  path.write_text(json.dumps(config))
  train(workdir, **{**SCHEDULE, "model.recipe": recipe}, **options)


@pytest.mark.parametrize("mesh", [{}, MESH], ids=["one", "eight"])
def test_a_schedule_has_the_bits_of_its_recipes_in_turn(train, whole, tmp_path, mesh):
  continue_by_hand(train, tmp_path / "hand", "full", **mesh)
  assert_same_state(tmp_path / "hand", whole[0])
  train(tmp_path / "plain", **mesh, **{**SCHEDULE, "model.recipe": "switchback"})
  with pytest.raises(AssertionError):
    assert_same_state(tmp_path / "plain", whole[0])


def at_step(number, do, make=recipe_step):
  """The steps of `make`, which call `do` in that step of the run."""

  def calling(run):
    step = make(run)

    def call(state, batch):
      if not isinstance(state.step, jax.core.Tracer) and int(state.step) == number - 1:
        do()
      return step(state, batch)

    return call

  return calling


ALL_RECIPES = [*RECIPES, *SIMULATED, "fp8_cscale:3"]


@pytest.mark.standard_promotion  # As optax needs.
@pytest.mark.parametrize("recipe", mainly(["fp8_static", "switchback_cm"], ALL_RECIPES))
def test_no_recipe_changes_what_the_state_holds(recipe):
  task = CLIPTask(CLIP(SHALLOW, BlockOptions(recipe=recipe)))
  optimizer, _ = make_optimizer(OptimizerConfig(warmup_steps=1), 10)
  state = jax.eval_shape(make_init(task.with_recipe("full"), optimizer, seed=0))
  step = make_train_step(task, optimizer, seed=0)
  assert jax.eval_shape(step, state, task.abstract_batch(8))[0] == state


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_a_clip_on_eight_devices_has_the_bits_of_its_recipes_in_turn(train, tmp_path, monkeypatch):
  made = {}  # Each recipe is compiled once.

  def make(run):
    return made.setdefault(rounds(run), JIT_TRAIN_STEP(run))

  monkeypatch.setattr(Run, "new_state", NEW_STATE)
  monkeypatch.setattr(loop, "jit_train_step", make)
  continue_by_hand(train, tmp_path / "hand", "full", make, **MESH)
  monkeypatch.setattr(loop, "jit_train_step", at_step(5, lambda: send(signal.SIGTERM), make))
  stopped(train, tmp_path / "run", **MESH, **SCHEDULE)
  monkeypatch.setattr(loop, "jit_train_step", make)
  train(tmp_path / "run", **MESH, **SCHEDULE)
  assert len(made) == 2
  assert_same_state(tmp_path / "run", tmp_path / "hand")
  train(tmp_path / "plain", **MESH, **{**SCHEDULE, "model.recipe": "switchback"})
  with pytest.raises(AssertionError):
    assert_same_state(tmp_path / "plain", tmp_path / "hand")


@pytest.mark.parametrize(("number", "mesh"), [(2, MESH), (3, {}), (5, MESH), (5, {})])
def test_a_run_that_stops_in_any_stage_resumes_exactly(
  train, whole, tmp_path, monkeypatch, number, mesh
):
  monkeypatch.setattr(loop, "jit_train_step", at_step(number, lambda: send(signal.SIGTERM)))
  error = stopped(train, tmp_path, **mesh, **SCHEDULE)
  assert f"after step {number}; saved: step {number} in" in str(error)
  monkeypatch.setattr(loop, "jit_train_step", recipe_step)
  assert train(tmp_path, **mesh, **SCHEDULE) == whole[1]
  assert_same_state(tmp_path, whole[0])


def test_the_last_step_of_each_stage_is_saved(whole):
  assert saved(whole[0]) == [3, 6]


def test_metrics_and_evaluations_are_of_the_stage_of_their_step(train, whole, tmp_path):
  records = whole[1]
  assert [r["stage"] for r in records if "stage" in r] == [1, 1, 1, 2, 2, 2]
  assert [r["eval/rounds"] for r in records if "eval/rounds" in r] == [1, 1, 1, 0, 0, 0]
  plain = train(tmp_path, **{**SCHEDULE, "model.recipe": "switchback"})
  assert not any("stage" in r for r in plain)


def test_a_checkpoint_is_evaluated_and_loaded_with_the_recipe_of_its_step(
  train, tmp_path, monkeypatch, data_dir
):
  monkeypatch.setattr(loop, "jit_train_step", at_step(3, lambda: send(signal.SIGTERM)))
  stopped(train, tmp_path, **SCHEDULE)
  assert scores_and_rounding(data_dir, tmp_path) == ({"rounds": 1.0}, True)
  monkeypatch.setattr(loop, "jit_train_step", recipe_step)
  train(tmp_path, **SCHEDULE)
  assert scores_and_rounding(data_dir, tmp_path) == ({"rounds": 0.0}, False)


def scores_and_rounding(data_dir, workdir):
  """What train.evaluate says of a run, and whether the model of train.inference rounds."""
  model = inference.load(workdir)
  scores = evaluate_checkpoint(loop_case.config(data_dir, **SCHEDULE), workdir)
  return scores, model.task.model.options.recipe.rounds


def test_a_stage_that_cannot_be_computed_ends_the_run_before_its_first_step(
  train, tmp_path, monkeypatch
):
  def refusing(run):
    step = recipe_step(run)

    def refuse(state, batch):
      raise NotImplementedError("no such kernel")

    return step if rounds(run) else refuse

  monkeypatch.setattr(loop, "jit_train_step", refusing)
  with pytest.raises(NotImplementedError, match="no such kernel"):
    train(tmp_path, **SCHEDULE)
  assert not loop_case.records(tmp_path) and not saved(tmp_path)


def test_another_number_of_steps_says_where_the_recipes_end(train, tmp_path, capsys):
  train(tmp_path, **SCHEDULE)
  records = train(tmp_path, **{**SCHEDULE, "steps": 16})
  said = capsys.readouterr().out
  assert "with those of steps=6 in brackets: switchback after step 8 (3)." in said
  assert "Step 6 had full; step 7 has switchback." in said
  stages = [r["stage"] for r in records if "stage" in r]
  assert stages == [1, 1, 1, 2, 2, 2, 1, 1, *[2] * 8]


def test_steps_that_move_no_end_of_a_recipe_say_nothing_of_it(train, tmp_path, capsys):
  schedule = {**SCHEDULE, "model.recipe": "switchback until 2, full"}
  train(tmp_path, **{**schedule, "steps": 3})
  train(tmp_path, **{**schedule, "steps": 4})
  said = capsys.readouterr().out
  assert "steps=3 -> 4 changes the schedule" in said and "The recipes end" not in said


def test_a_later_compilation_is_a_wait_like_the_first_and_no_time_of_a_step(
  train, tmp_path, monkeypatch
):
  said = []

  class Listening(loop.Watchdog):
    def waits_for(self, what, *, first=False):
      said.append((what, first))

  monkeypatch.setattr(loop, "Watchdog", Listening)
  slow = calling(lambda: time.sleep(4), loop.memory.compile_step)
  monkeypatch.setattr(loop.memory, "compile_step", slow)
  train(tmp_path, **SCHEDULE)
  assert ("the step with recipe full to be compiled", True) in said
  (record,) = [r for r in loop_case.records(tmp_path) if r["step"] == 4 and "loss" in r]
  assert record["step_seconds"] < 4
