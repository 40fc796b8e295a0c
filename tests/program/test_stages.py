"""A run with images of several sizes in turn: each stage has the batches of a run of its size."""

import dataclasses
import json
import shutil
import signal

import jax
import loop_case
import numpy as np
import pytest
from processes_case import ends, start_two
from test_schedule import (
  JIT_TRAIN_STEP,
  MESH,
  NEW_STATE,
  assert_same_state,
  at_step,
)
from test_step import SHALLOW
from test_stop import measured, saved, send, stopped
from test_stream_training import options, shards  # noqa: F401 (a fixture)

from sbjax.models.clip import CLIP
from train import inference, loop
from train.config import OptimizerConfig
from train.export import export
from train.optimizer import make_optimizer
from train.run import Run, make_run
from train.step import make_init, make_train_step
from train.task import CLIPTask, model_flops

STAGES = "16px drop 0.5 until 0.5, 24px until 0.67, 32px drop 0.25"
STAGED = {"model.stages": STAGES, "steps": 6, "checkpoint_every": 0}
SIZES = [16, 16, 16, 24, 32, 32]  # of steps 1 to 6
DROPOUTS = [0.5, 0.5, 0.5, 0, 0.25, 0.25]
ADDING = loop_case.adding_step


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
  return tmp_path_factory.mktemp("data")


@pytest.fixture
def train(monkeypatch, data_dir):
  """train(workdir, devices, **options): its steps are sums, their losses those of a batch."""
  return loop_case.trainer(monkeypatch, data_dir, measured)


@pytest.fixture(scope="module")
def whole(data_dir, tmp_path_factory):
  """The folder and the records of a run on one device that nothing stops."""
  workdir = tmp_path_factory.mktemp("whole")
  with pytest.MonkeyPatch.context() as patch:
    return workdir, loop_case.trainer(patch, data_dir, measured)(workdir, **STAGED)


def column(records, name):
  return [r[name] for r in records if name in r]


SCENES = {
  "data.name": "scenes/small",
  "data.tokenizer": "words",
  "data.label_key": "",
  "data.eval_split": "",
}


@pytest.mark.parametrize(
  ("data", "sizes"),
  [
    ("prepared", {16, 24, 32}),
    ("stream", {24}),
    pytest.param("scenes", {24}, marks=pytest.mark.slow),
  ],
)
def test_each_stage_has_the_batches_of_a_run_of_its_size(train, shards, tmp_path, data, sizes):  # noqa: F811
  fields = {"prepared": {}, "scenes": SCENES, "stream": options(shards / "*.tar")}[data]
  losses = column(train(tmp_path / "run", **STAGED, **fields), "loss")
  assert len({*losses}) == 6
  for size in sizes:
    plain = {**fields, "model.image_size": size, "steps": 6}
    found = column(train(tmp_path / str(size), **plain), "loss")
    steps = [i for i in range(6) if SIZES[i] == size]
    assert [losses[i] for i in steps] == [found[i] for i in steps]


@pytest.mark.parametrize(
  "reading",
  [
    {"data.prefetch": 0},
    pytest.param({"data.workers": 2}, marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_how_batches_are_loaded_changes_none(train, whole, tmp_path, reading):
  assert train(tmp_path, **STAGED, **reading) == whole[1]


@pytest.mark.parametrize(
  ("number", "before", "after"), [(2, MESH, {}), (3, {}, MESH), (5, MESH, {})]
)
def test_a_run_that_stops_in_any_stage_resumes_exactly_on_another_mesh(
  train, whole, tmp_path, monkeypatch, number, before, after
):
  stopping = at_step(number, lambda: send(signal.SIGTERM), ADDING)
  monkeypatch.setattr(loop, "jit_train_step", stopping)
  stopped(train, tmp_path, **before, **STAGED)
  monkeypatch.setattr(loop, "jit_train_step", ADDING)
  assert train(tmp_path, **after, **STAGED) == whole[1]
  assert_same_state(tmp_path, whole[0])


def test_a_stream_resumes_in_any_stage(train, shards, tmp_path, monkeypatch):  # noqa: F811
  fields = options(shards / "*.tar") | STAGED
  losses = column(train(tmp_path / "whole", **fields), "loss")
  for number in (2, 4):  # Within a stage, and at the end of one.
    stopping = at_step(number, lambda: send(signal.SIGTERM), ADDING)
    monkeypatch.setattr(loop, "jit_train_step", stopping)
    stopped(train, tmp_path / "parts", **fields)
  monkeypatch.setattr(loop, "jit_train_step", ADDING)
  assert column(train(tmp_path / "parts", **fields), "loss") == losses


def test_recipes_and_images_in_turn_go_together(train, tmp_path, monkeypatch):
  opened, compiled = [], []
  iterator, compile_step = loop._iterator, loop.memory.compile_step

  def opening(run, *args):
    opened.append(run.task.train_sizes["image_size"])
    return iterator(run, *args)

  def compiling(run, step):
    if hasattr(step, "lower"):
      compiled.append((run.task.train_sizes["image_size"], run.task.model.options.recipe.rounds))
    return compile_step(run, step)

  monkeypatch.setattr(loop, "_iterator", opening)
  monkeypatch.setattr(loop.memory, "compile_step", compiling)
  both = {**STAGED, "model.recipe": "switchback until 5, full", "checkpoint_keep": 9}
  records = train(tmp_path, **both)
  assert column(records, "stage") == [1, 1, 1, 2, 3, 4] and saved(tmp_path) == [3, 4, 5, 6]
  assert column(records, "image_size") == SIZES
  assert column(records, "patch_dropout") == DROPOUTS
  assert opened == [16, 24, 32]  # A recipe changes no batch.
  assert compiled == [(24, True), (32, True), (32, False)]  # The first step compiles as it runs.


def test_what_a_run_says_names_its_stages(train, whole, tmp_path, capsys):
  train(tmp_path, **STAGED)
  said = capsys.readouterr().out
  assert f"recipe full, images {STAGES}, shapes/tiny" in said
  assert "step 3/6  24 px, patch dropout 0, recipe full from here, waited" in said
  assert "step 4/6  32 px, patch dropout 0.25, recipe full from here" in said
  stages = json.loads((whole[0] / "result.json").read_text())["stages"]
  assert all(stage.pop("images_per_second") > 0 for stage in stages)
  assert stages == [
    {"steps": [1, 3], "recipe": "full", "image_size": 16, "patch_dropout": 0.5},
    {"steps": [4, 4], "recipe": "full", "image_size": 24, "patch_dropout": 0},
    {"steps": [5, 6], "recipe": "full", "image_size": 32, "patch_dropout": 0.25},
  ]


def test_another_number_of_steps_says_where_the_stages_end(train, tmp_path, capsys):
  both = {**STAGED, "model.recipe": "switchback until 4, full"}  # 4 is an end of images, too.
  train(tmp_path, **both)
  train(tmp_path, **{**both, "steps": 12})
  said = capsys.readouterr().out
  ends = "16px drop 0.5 after step 6 (3), 24px after step 8 (4)"
  assert f"The stages end elsewhere, too, with those of steps=6 in brackets: {ends}." in said
  assert "Step 6 had 32px drop 0.25; step 7 has 24px." in said
  assert "The recipes end elsewhere" not in said


def test_the_share_of_the_peak_is_of_the_images_of_the_step(train, tmp_path, monkeypatch):
  monkeypatch.setitem(loop.BF16_PEAK, jax.devices()[0].device_kind, 1e12)
  train(tmp_path, **STAGED, **{"model.text_groups": 1})
  records = [r for r in loop_case.records(tmp_path) if "mfu" in r]
  config = inference.load(tmp_path).task.model.config
  for record, size, dropout in zip(records, SIZES, DROPOUTS, strict=True):
    vision = dataclasses.replace(config.vision, image_size=size)
    flops = model_flops(dataclasses.replace(config, vision=vision), 8, dropout)
    assert record["mfu"] * record["step_seconds"] * 1e12 == pytest.approx(flops)


def test_scores_embeddings_and_exports_have_the_model_s_own_size(
  train, tmp_path, monkeypatch, data_dir
):
  stopping = at_step(2, lambda: send(signal.SIGTERM), ADDING)
  monkeypatch.setattr(loop, "jit_train_step", stopping)
  stopped(train, tmp_path, **STAGED)
  run = make_run(loop_case.config(data_dir, **STAGED), tmp_path, read_only=True)
  first = run.at(1)
  assert first.task.train_sizes["image_size"] == 16
  assert next(first._eval_batches("test"))["image"].shape[1:] == (32, 32, 3)
  assert first.task._encoders(run.mesh) is run.task._encoders(run.mesh)  # Compiled once.
  assert inference.load(tmp_path).image_size == 32
  pytest.importorskip("safetensors", reason="needs the `interop` extra")
  out = export(tmp_path, "open_clip")
  vision = json.loads((out / "open_clip_config.json").read_text())["model_cfg"]["vision_cfg"]
  assert vision["image_size"] == 32


@pytest.mark.standard_promotion  # As optax needs.
def test_no_stage_changes_what_the_state_holds():
  task = CLIPTask(CLIP(SHALLOW))
  optimizer, _ = make_optimizer(OptimizerConfig(warmup_steps=1), 10)
  state = jax.eval_shape(make_init(task, optimizer, seed=0))
  size, patch = SHALLOW.vision.image_size, SHALLOW.vision.patch_size
  for side in (patch, size):
    staged = task.with_images(side, 0.5)
    step = make_train_step(staged, optimizer, seed=0)
    assert jax.eval_shape(step, state, staged.abstract_batch(8))[0] == state


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_a_clip_resumes_in_a_stage_with_the_same_bits_and_eight_devices_agree(
  train, tmp_path, monkeypatch
):
  made = {}  # Each stage is compiled once a mesh.

  def make(run):
    key = (run.mesh.size, run.task.train_sizes["image_size"])
    return made.setdefault(key, JIT_TRAIN_STEP(run))

  fields = {**STAGED, "optimizer.warmup_steps": 2}
  monkeypatch.setattr(Run, "new_state", NEW_STATE)
  monkeypatch.setattr(loop, "jit_train_step", make)
  train(tmp_path / "whole", **MESH, **fields)
  monkeypatch.setattr(loop, "jit_train_step", at_step(3, lambda: send(signal.SIGTERM), make))
  stopped(train, tmp_path / "parts", **MESH, **fields)
  monkeypatch.setattr(loop, "jit_train_step", make)
  train(tmp_path / "parts", **MESH, **fields, compile_ahead=False)
  assert_same_state(tmp_path / "parts", tmp_path / "whole")
  one = column(train(tmp_path / "one", **fields), "loss")
  np.testing.assert_allclose(one, column(measured(tmp_path / "whole"), "loss"), rtol=1e-3)


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_two_processes_change_their_images_together_and_one_goes_on(
  train,
  shards,  # noqa: F811
  tmp_path,
  monkeypatch,
):
  fields = {
    "model.stages": "16px drop 0.5 until 3, 32px drop 0.5",
    "optimizer.warmup_steps": 2,
    "checkpoint_every": 0,
    **options(shards / "*.tar"),
  }
  monkeypatch.setattr(Run, "new_state", NEW_STATE)
  monkeypatch.setattr(loop, "jit_train_step", JIT_TRAIN_STEP)
  alone = column(train(tmp_path / "alone", devices=2, **fields), "loss")
  both = tmp_path / "both"
  flags = {"config": "configs/quickstart.py", "workdir": both}
  flags |= {f"config.{k}": v for k, v in {**loop_case.SMALL, **fields}.items()}
  arguments = ("-m", "train.main", *(f"--{k}={v}" for k, v in flags.items()), "--distributed")
  for code, err in ends(start_two(str(tmp_path / "compiled"), *arguments), 600):
    assert code == 0, err
  np.testing.assert_allclose(column(measured(both), "loss"), alone, rtol=1e-4)
  shutil.rmtree(both / "checkpoints" / "4")
  (both / "result.json").unlink()
  found = column(train(both, devices=2, **fields), "loss")
  np.testing.assert_allclose(found, alone, rtol=1e-4)
