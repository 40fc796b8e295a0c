"""Runs that train adapters beside a base in 8 bits, `config.lora`."""

import functools
import json
import math

import jax
import loop_case
import numpy as np
import pytest
from clip_case import clip, drawn
from clip_case import compiled as jit
from test_step import MICRO, batch

from sbjax.interop import weights as convert
from sbjax.interop.config_files import to_open_clip
from sbjax.interop.serving import size_of
from sbjax.interop.weights import state_dict
from sbjax.linear.lora import add_lora
from sbjax.linear.weight import LoRAWeight
from sbjax.models import CLIP, SIZES, BlockOptions
from sbjax.quantize import Quantized, dequantize
from train import export, loop
from train.config import Config, LoraConfig, MeshConfig, ModelConfig, OptimizerConfig
from train.inference import load
from train.loop import jit_train_step
from train.optimizer import make_optimizer
from train.parallel.sharding import batch_sharding, make_mesh, replicated, state_shardings
from train.run import Run, make_run
from train.step import initial_state, make_train_step, tensor_names
from train.task import CLIPTask

pytestmark = pytest.mark.standard_promotion  # As optax needs.

NEW_STATE = Run.new_state
EVALUATE = Run.evaluate
LORA = LoraConfig(rank=4, alpha=8.0)


def moved(params):
  """Adapters whose b is not 0."""
  rng = np.random.default_rng(1)
  return jax.tree.map(
    lambda x: x + np.float32(0.1) * rng.standard_normal(x.shape, np.float32), params
  )


def a_task(recipe="switchback", scan=True):
  return CLIPTask(clip(MICRO, recipe=recipe, scan=scan), lora=LORA)


def a_step(task, devices=1, accumulate=1):
  """The step on a mesh, and a state whose adapters have moved."""
  optimizer, _ = make_optimizer(OptimizerConfig(learning_rate=1e-2, warmup_steps=1), 10)
  mesh = make_mesh(MeshConfig(data=devices), jax.devices()[:devices])
  values = drawn(jax.eval_shape(task.init, jax.random.key(0)))
  values["logit_scale"] = np.float32(np.log(10))
  state = initial_state(task, optimizer, 0, values)
  state = state._replace(params=moved(state.params))
  shardings = state_shardings(state, state.params, mesh)
  step = make_train_step(task, optimizer, 0, accumulate, mesh=mesh)
  step = jit(
    step,
    in_shardings=(shardings, batch_sharding(mesh)),
    out_shardings=(shardings, replicated(mesh), replicated(mesh)),
  )
  return step, jax.device_put(state, shardings), mesh


@functools.cache
def after_a_step(devices=1, accumulate=1):
  step, state, mesh = a_step(a_task(), devices, accumulate)
  return jax.device_get((state, *step(state, batch(mesh))))


def test_a_step_moves_adapters_only():
  before, after, metrics, finite = after_a_step()
  assert finite.all() and np.isfinite(metrics["loss"])
  assert len(finite) == len(tensor_names(before.params, a_task()))
  jax.tree.map(np.testing.assert_array_equal, after.frozen, before.frozen)
  jax.tree.map(
    lambda x, y: np.testing.assert_equal(np.any(x != y), True), after.params, before.params
  )
  adapters = sum(x.size for x in jax.tree.leaves(before.params))
  moments = sum(x.size for x in jax.tree.leaves(before.opt_state) if x.ndim > 1)
  assert moments == 2 * adapters
  assert {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(before.params)} == {
    "a",
    "b",
  }


@pytest.mark.parametrize(
  ("devices", "accumulate"), [(8, 1), pytest.param(1, 4, marks=pytest.mark.slow)]
)
def test_a_step_on_a_mesh_or_in_microbatches_is_that_of_one_device(devices, accumulate):
  (_, one, expected, _), (_, other, metrics, _) = after_a_step(), after_a_step(devices, accumulate)
  for name in ("loss", "gradient_norm", "parameter_norm"):
    np.testing.assert_allclose(metrics[name], expected[name], rtol=2e-2)
  moments = (jax.tree.leaves(state.opt_state) for state in (one, other))
  for mine, theirs in zip(*moments, strict=True):
    assert np.linalg.norm(mine - theirs) <= 0.1 * np.linalg.norm(theirs)


def test_gradients_are_those_of_the_joined_model():
  """By the definition: adapters in floats beside dequantized kernels, without rounding."""
  task = a_task("full")
  step, state, mesh = a_step(task)
  _, metrics, _ = step(state, batch(mesh))

  def loss(params):
    merged = jax.tree.map(
      lambda w: w.base + w.a @ w.b if isinstance(w, LoRAWeight) else w,
      add_lora(state.frozen, params, LORA.alpha),
      is_leaf=lambda w: isinstance(w, LoRAWeight),
    )
    out = task.apply({"params": merged}, batch(mesh), jax.random.key(0), 0)
    return task.loss(out, ())[0]

  gradient = jit(jax.grad(loss))(state.params)
  norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(gradient)))
  np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-3)


@pytest.mark.parametrize("recipe", ["switchback", "*/fc1=full, *=switchback_q", "full"])
def test_the_base_is_in_the_8_bits_of_its_recipe(recipe):
  task = a_task(recipe)
  values = drawn(jax.eval_shape(task.init, jax.random.key(0)))
  _, frozen = task.split(values, jax.random.key(0))
  blocks = frozen["image"]["blocks"]
  kinds = {name: isinstance(blocks[name]["kernel"], Quantized) for name in ("qkv", "fc1", "fc2")}
  assert kinds == {
    "qkv": recipe != "full", "fc1": recipe == "switchback", "fc2": recipe != "full"
  }  # fmt: skip
  if recipe != "full":
    first = jax.tree.map(lambda x: x[0], blocks["qkv"]["kernel"])
    w = np.asarray(values["image"]["blocks"]["qkv"]["kernel"][0])
    step = np.broadcast_to(np.asarray(first.scale), first.values.shape).T
    assert np.all(np.abs(dequantize(first).T - w) <= 0.51 * step)


# ---- Runs


@pytest.fixture
def run_lora(tmp_path, monkeypatch):
  """A function that trains adapters on random weights of a file: (workdir, devices, **options)."""
  everywhere = jax.devices()
  loop_case.replace_model(monkeypatch.setattr, jit_train_step)
  monkeypatch.setattr(Run, "new_state", NEW_STATE)
  fixed = {"model.backend": "xla", "model.remat": "none", "model.recipe": "switchback"}
  monkeypatch.setattr(jax, "devices", lambda *_: everywhere[:1])
  plain = make_run(loop_case.config(tmp_path / "data", steps=1, **fixed), tmp_path)
  model = plain.task.model.config
  weights = state_dict(drawn(plain.abstract_state.params), model)
  monkeypatch.setattr(convert, "read_file", lambda path: weights)
  folder = tmp_path / "init"
  folder.mkdir()
  (folder / "open_clip_model.safetensors").touch()
  described = json.dumps({"model_cfg": to_open_clip(model)})
  (folder / "open_clip_config.json").write_text(described)
  fixed |= {"init": str(folder), "lora.rank": 2, "lora.targets": (".*/(qkv|fc2)/kernel",)}

  def config(**options):
    return loop_case.config(tmp_path / "data", **{**fixed, **options})

  def train(workdir, devices=1, **options):
    monkeypatch.setattr(jax, "devices", lambda *_: everywhere[:devices])
    return loop.train(config(**options), tmp_path / workdir)

  train.config, train.folder = config, tmp_path
  return train


@pytest.mark.slow
def test_a_run_of_adapters_resumes_exactly_is_loaded_and_exported(run_lora, monkeypatch, capsys):
  run_lora("whole", steps=3, checkpoint_every=0)
  assert "0.0 M trainable and" in capsys.readouterr().out
  for steps in (1, 3):
    run_lora("parts", steps=steps, checkpoint_every=0)
  states = []
  for name in ("whole", "parts"):
    run = make_run(run_lora.config(steps=3), run_lora.folder / name, read_only=True)
    states.append(jax.device_get(run.restore().state))
  jax.tree.map(np.testing.assert_array_equal, *states)
  assert any(np.any(x) for p, x in jax.tree_util.tree_leaves_with_path(states[0].params)
             if p[-1].key == "b")  # fmt: skip

  workdir = run_lora.folder / "parts"
  model = load(workdir)
  adapted = model.embed_texts(["a red circle"])
  exported = {}
  monkeypatch.setattr(
    export, "write_file", lambda contents, path: exported.update(contents) or path.touch()
  )
  export.export(workdir, "open_clip")
  assert all(x.dtype == np.float32 for x in exported.values())
  served = load(workdir, int8=True)
  assert size_of(served.params) < 0.5 * sum(x.nbytes for x in exported.values())
  assert np.sum(adapted * served.embed_texts(["a red circle"])) > 0.995
  scores = EVALUATE(run, run.task.joined(states[0].params, states[0].frozen))
  assert all(np.isfinite(x) for x in scores.values()) and scores


@pytest.mark.slow
def test_a_run_of_adapters_trains_and_is_evaluated_on_two_devices(run_lora, monkeypatch):
  monkeypatch.setattr(Run, "evaluate", EVALUATE)
  result = run_lora("two", devices=2, steps=1, **{"optimizer.ema": 0.9})
  assert 0 < result["parameters"]["trainable"] < 0.1 * result["parameters"]["frozen"]
  assert np.isfinite(result["loss"]) and any(name.startswith("ema/") for name in result["eval"])


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"init": ""}, "lora.rank=4 adapts trained weights, and init is not set"),
    ({"freeze": ("image/.*",)}, r"freeze=\('image/\.\*',\) must be \(\) with lora.rank=4"),
    ({"recipe": "switchback until 0.5, full"}, "must be one recipe with lora.rank=4"),
    ({"mesh": MeshConfig(fsdp=2)}, "mesh.fsdp=2 must be 1 with lora.rank=4"),
    ({"lora": LoraConfig(rank=-1)}, r"lora.rank=-1 must be 0 \(all parameters learn\) or more"),
    ({"lora": LoraConfig(rank=4, alpha=0.0)}, "lora.alpha=0.0 must be more than 0"),
  ],
)
def test_what_does_not_go_with_adapters_is_named(fields, message):
  fields = {"init": "weights", "lora": LORA, **fields}
  model = ModelConfig(size="tiny", recipe=fields.pop("recipe", "switchback"))
  with pytest.raises(ValueError, match=message):
    Config(model=model, **fields).check()


@pytest.mark.parametrize(
  ("lora", "message"),
  [
    (
      LoraConfig(rank=4, targets=("image/proj",)),
      "lora.targets: the pattern 'image/proj' matches",
    ),
    (LoraConfig(rank=4, targets=(".*/patch_embedding/kernel",)), "matches no kernel"),
    (LoraConfig(rank=1000), r"lora\.rank=1000 must be from 1 to \d+ for "),
  ],
)
def test_adapters_that_fit_no_kernel_are_named(lora, message):
  task = a_task()._replace(lora=lora)
  values = jax.eval_shape(task.init, jax.random.key(0))
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(task.split, values, jax.random.key(0))


def state_bytes(lora) -> int:
  task = CLIPTask(CLIP(SIZES["L/14"], BlockOptions(recipe="switchback")), lora=lora)
  optimizer, _ = make_optimizer(OptimizerConfig(warmup_steps=1), 10)
  values = jax.eval_shape(task.init, jax.random.key(0))
  state = jax.eval_shape(lambda x: initial_state(task, optimizer, 0, x), values)
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))


def test_the_training_state_of_a_vit_l_14_takes_a_tenth():
  adapted, whole = state_bytes(LoraConfig(rank=8)), state_bytes(None)
  assert whole == pytest.approx(5.13e9, rel=0.01)
  assert adapted < 0.1 * whole
