"""The training loop on small data, around a step of additions: cheap, and exact on any mesh."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from configs import quickstart
from train import loop
from train.parallel.sharding import batch_sharding, replicated
from train.run import Run
from train.step import tensor_names

SMALL = {
  "data.name": "shapes/tiny",
  "model.recipe": "full",
  "model.image_size": 32,
  "model.context_length": 16,
  "model.scan": True,
  "batch_size": 8,
  "steps": 4,
  "optimizer.warmup_steps": 0,
  "log_every": 1,
  "eval_every": 0,
  "checkpoint_every": 2,
}


def config(data_dir, **options):
  made = quickstart.get_config()
  for name, value in {**SMALL, "data.data_dir": str(data_dir), **options}.items():
    *groups, field = name.split(".")
    setattr(functools.reduce(getattr, groups, made), field, value)
  return made


def adding_step(run: Run, factor: int = 1):
  """Adds a function of the batch, in sixty-fourths, to all floats of the state, times a factor."""
  shardings = jax.tree.map(lambda x: x.sharding, run.abstract_state)
  names = tensor_names(run.abstract_state.params, run.task)

  def step(state, batch):
    total = batch["image"].astype(jnp.int32).sum() + batch["text"].sum()
    part = (total % 64).astype(jnp.float32) / 64
    added = jax.tree.map(
      lambda x: factor * x + part.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x,
      state,
    )
    metrics = {"loss": total.astype(jnp.float32)}
    return added._replace(step=state.step + 1), metrics, jnp.ones(len(names), bool)

  everywhere = replicated(run.mesh)
  return jax.jit(
    step,
    in_shardings=(shardings, batch_sharding(run.mesh)),
    out_shardings=(shardings, everywhere, everywhere),
  )


def zeros(run: Run):
  """A state of zeros in place of an initialized one."""
  return jax.tree.map(
    lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding), run.abstract_state
  )


def replace_model(patch, step=adding_step) -> None:
  """Keeps the loop but removes the model's work, by `patch(object, name, value)`."""
  patch(loop, "jit_train_step", step)
  patch(Run, "evaluate", lambda run, params: {"top1": 0.0})
  patch(Run, "samples", lambda run, params: [])
  patch(loop, "write_report", lambda workdir, title, samples: None)
  patch(Run, "new_state", zeros)


def trainer(monkeypatch, data_dir, result=None):
  """train(workdir, devices, **options): the loop without the model's work.

  It returns the scores of the loop, or `result(workdir)`.
  """
  replace_model(monkeypatch.setattr)
  all_devices = jax.devices()

  def train(workdir, devices=1, **options):
    monkeypatch.setattr(jax, "devices", lambda *_: all_devices[:devices])
    scores = loop.train(config(data_dir, **options), workdir)
    return result(workdir) if result else scores

  return train


def standing_step(run: Run):
  """Counts a step and leaves the parameters as they are."""
  finite = jnp.ones(len(tensor_names(run.abstract_state.params, run.task)), bool)
  return lambda state, batch: (state._replace(step=state.step + 1), {"loss": finite.sum()}, finite)


def untrained_run(folder: Path) -> Path:
  """The folder with a run of two steps, on two devices, with the parameters of its start."""
  init = Run.new_state
  with pytest.MonkeyPatch.context() as patch:
    train = trainer(patch, folder / "data")
    patch.setattr(loop, "jit_train_step", standing_step)
    patch.setattr(Run, "new_state", init)
    train(folder, devices=2, steps=2, **{"mesh.fsdp": 2, "model.backend": "xla"})
  return folder


def records(workdir) -> list[dict]:
  return [json.loads(line) for line in (Path(workdir) / "metrics.jsonl").read_text().splitlines()]
