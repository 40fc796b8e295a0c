"""The training step, compiled for several absent GPUs."""

import dataclasses
import importlib
import re

import jax
import optax
import pytest

from benchmarks.collectives import moved
from sbjax.models import CLIP, SIZES, BlockOptions
from train.config import OptimizerConfig
from train.optimizer import make_optimizer
from train.parallel.sharding import batch_sharding, replicated, state_shardings
from train.step import make_init, make_train_step
from train.task import CLIPTask

MESHES = {"data=2": (2, 1), "fsdp=2": (1, 2), "data=2 fsdp=2": (2, 2)}
BATCH, LAYERS = 128, 1  # With BATCH images a device an activation is larger than any weight.
SIZE = SIZES["tiny"]


def steps(mesh_for) -> dict:
  """What a step moves between devices and copies on each mesh, and the kernels that it lowers.

  mesh_for: a context manager from sizes and names of axes to a mesh of absent devices.
  """
  results = {}
  with pytest.MonkeyPatch.context() as patch:
    # cuDNN is not here to compile its attention.
    patch.setattr(importlib.import_module("sbjax.attention"), "cudnn_runs", lambda *_: False)
    for name, sizes in MESHES.items():
      text = _hlo(mesh_for, sizes, LAYERS, compiled=True)
      results[name] = sorted(moved(text))
      results[f"{name}: copied"] = re.findall(r"= (f32\[\d+,\d+,\d+\])\S* copy\(", text)
    for layers in (LAYERS, LAYERS + 1):
      text = _hlo(mesh_for, (2, 1), layers, compiled=False)
      results[f"{layers} layers"] = text.count("@mosaic_gpu") + text.count("@triton_kernel_call")
    state = jax.eval_shape(make_init(_task(LAYERS), optax.identity(), 0))
    results["parameters"] = sum(x.size for x in jax.tree.leaves(state.params))
  return results


def _task(layers: int) -> CLIPTask:
  vision = dataclasses.replace(SIZE.vision, layers=layers)
  text = dataclasses.replace(SIZE.text, layers=layers)
  size = dataclasses.replace(SIZE, vision=vision, text=text)
  return CLIPTask(CLIP(size, BlockOptions(recipe="switchback", unroll=0)))


def _hlo(mesh_for, sizes, layers: int, *, compiled: bool) -> str:
  """The text of the step on a mesh, lowered or compiled."""
  step = lowered(mesh_for, sizes, _task(layers), BATCH)
  return step.compile().as_text() if compiled else step.as_text()


def lowered(mesh_for, sizes, task: CLIPTask, images: int):
  """The step on a mesh, with so many images a device."""
  optimizer, _ = make_optimizer(OptimizerConfig(warmup_steps=1), 10)
  with mesh_for(sizes, ("data", "fsdp")) as mesh:
    state = jax.eval_shape(make_init(task, optimizer, 0))
    shardings = state_shardings(state, state.params, mesh)
    rows, everywhere = batch_sharding(mesh), replicated(mesh)
    mesh_here = jax.sharding.get_abstract_mesh()  # It knows the kind of device.
    step = jax.jit(
      make_train_step(task, optimizer, 0, mesh=mesh_here),
      in_shardings=(shardings, {"image": rows, "text": rows}),
      out_shardings=(shardings, everywhere, everywhere),
      donate_argnums=0,
    )
    return step.lower(state, task.abstract_batch(images * mesh.size))
