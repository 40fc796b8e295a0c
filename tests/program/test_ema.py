"""A run with an average of its parameters: it is scored, saved, resumed, loaded and exported."""

import argparse
import json

import jax
import jax.numpy as jnp
import loop_case
import numpy as np
import optax
import pytest

from sbjax.interop.weights import load_weights
from sbjax.optim.averaged import average_of
from train import evaluate, export, loop
from train.errors import RunError
from train.inference import load
from train.run import Run, make_run
from train.step import TrainState, tensor_names

pytestmark = pytest.mark.standard_promotion  # As optax needs.

DECAY, STEPS = 0.75, 5
OPTIONS = {"optimizer.ema": DECAY, "optimizer.schedule": "constant"}
OPTIONS |= {"eval_every": 1, "checkpoint_every": 1, "model.backend": "xla"}


def updating_step(run):
  """The optimizer's update, by gradients that are a function of the batch."""
  finite = jnp.ones(len(tensor_names(run.abstract_state.params, run.task)), bool)

  def step(state, batch):
    mean = jnp.mean(batch["image"].astype(jnp.float32))
    gradients = jax.tree.map(lambda p: jnp.cos(mean + p), state.params)
    updates, opt_state = run.optimizer.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(state.step + 1, params, opt_state), {"loss": mean}, finite

  return jax.jit(step, donate_argnums=0)


def mean_score(run, params):
  return {"top1": float(np.asarray(params["text"]["proj"]).mean(dtype=np.float64))}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A folder of data, and a function of a folder and options that trains a run there."""
  data, init = tmp_path_factory.mktemp("data"), Run.new_state
  with pytest.MonkeyPatch.context() as patch:
    train = loop_case.trainer(patch, data)
    patch.setattr(loop, "jit_train_step", updating_step)
    patch.setattr(Run, "new_state", init)
    patch.setattr(Run, "evaluate", mean_score)
    yield data, lambda folder, **options: train(folder, **OPTIONS | options)


@pytest.fixture(scope="module")
def whole(trained, tmp_path_factory):
  folder = tmp_path_factory.mktemp("whole")
  trained[1](folder, steps=STEPS)
  return folder


def state(trained, folder):
  run = make_run(loop_case.config(trained[0], steps=STEPS, **OPTIONS), folder, read_only=True)
  return run.restore().state


def scores(folder, name):
  return [r[name] for r in loop_case.records(folder) if name in r]


def test_the_score_of_the_average_is_beside_that_of_the_parameters(trained, whole):
  raw, averages = scores(whole, "eval/top1"), scores(whole, "eval/ema/top1")
  assert len(raw) == STEPS and np.ptp(raw) > 1e-4
  for n, average in enumerate(averages, start=1):  # A mean is linear.
    weights = DECAY ** np.arange(n)[::-1] * (1 - DECAY) / (1 - DECAY**n)
    np.testing.assert_allclose(average, weights @ raw[:n], rtol=1e-5, atol=1e-8)


@pytest.mark.slow
def test_an_interrupted_run_has_the_bits_of_a_whole_one(trained, whole, tmp_path):
  trained[1](tmp_path, steps=2)
  with pytest.raises(RunError, match=r"optimizer.ema: 0.75 -> 0.5"):
    trained[1](tmp_path, steps=STEPS, **{"optimizer.ema": 0.5})
  trained[1](tmp_path, steps=STEPS)
  for name in ("loss", "eval/top1", "eval/ema/top1"):
    assert scores(tmp_path, name) == scores(whole, name)
  for a, b in zip(*(jax.tree.leaves(state(trained, f)) for f in (tmp_path, whole)), strict=True):
    np.testing.assert_array_equal(a, b)


def test_the_average_can_be_loaded_and_exported(trained, whole, tmp_path):
  pytest.importorskip("safetensors")
  newest = state(trained, whole)
  average = average_of(newest.opt_state)
  for options, expected in ({}, newest.params), ({"ema": True}, average):
    model = load(whole, **options)
    export.export(whole, "open_clip", tmp_path, **options)
    path = tmp_path / "open_clip_model.safetensors"
    exported = load_weights(path, model.task.model.config)
    for params in (model.params, exported):
      jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_a_missing_average_or_step_is_named(whole, tmp_path):
  with pytest.raises(SystemExit, match=r"has no checkpoint of step 9: it has 3, 4, 5"):
    export.main([f"--workdir={whole}", "--format=hf", "--step=9"])
  (tmp_path / "b32.pt").touch()
  with pytest.raises(RunError, match=r"b32.pt holds weights and no run: leave --ema and"):
    load(tmp_path / "b32.pt", ema=True, size="tiny")
  (tmp_path / "checkpoints").mkdir()
  config = json.loads((whole / "config.json").read_text())
  config["optimizer"]["ema"] = 0.0
  (tmp_path / "config.json").write_text(json.dumps(config))
  with pytest.raises(RunError, match=r"has no average, as its optimizer.ema is 0: leave --ema out"):
    load(tmp_path, ema=True)


def test_flags_choose_the_average_and_the_step(whole):
  parser = argparse.ArgumentParser()
  evaluate.add_model_arguments(parser)
  options = parser.parse_args([f"--checkpoint={whole}", "--ema", "--step=3"])
  model = evaluate.load_model(options)
  assert model.step == 3
  assert mean_score(None, model.params)["top1"] == scores(whole, "eval/ema/top1")[2]
