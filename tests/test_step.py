"""The training step on meshes of the eight virtual devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from sbjax.models import CLIP, SIZES
from sbjax.recipes import RECIPES
from train.config import MeshConfig, OptimizerConfig
from train.loss import LOSSES
from train.optimizer import make_optimizer
from train.sharding import batch_sharding, make_mesh, replicated, state_shardings
from train.step import make_init, make_train_step, tensor_names

BATCH = 16
# Of metrics, and of how far a tensor moved. Sums in another order turn some roundings to int8 the
# other way; which ones, each CPU has its own.
METRIC_TOLERANCE = {"full": 2e-4, "switchback": 2e-2}
UPDATE_TOLERANCE = {"full": 2e-4, "switchback": 0.15}
MICRO = dataclasses.replace(
  SIZES["tiny"],
  vision=dataclasses.replace(SIZES["tiny"].vision, layers=2),
  text=dataclasses.replace(SIZES["tiny"].text, layers=2, context_length=8, vocab_size=32),
)


@functools.cache
def compiled(data: int, fsdp: int, recipe: str, loss: str = "softmax"):
  """The step on a mesh, its state, and names for what it checks."""
  mesh = make_mesh(MeshConfig(data=data, fsdp=fsdp), jax.devices()[: data * fsdp])
  bias = {"init_logit_scale": 10.0, "init_logit_bias": -10.0} if loss == "siglip" else {}
  model = CLIP(MICRO, recipe=RECIPES[recipe], dtype=jnp.float32, scan=True, **bias)
  config = OptimizerConfig(learning_rate=1e-3, warmup_steps=1, eps=1e-3)
  optimizer, _ = make_optimizer(config, 10)
  init = make_init(model, optimizer, seed=0)
  abstract = jax.eval_shape(init)
  shardings = state_shardings(abstract, abstract.params, mesh)
  step = jax.jit(
    make_train_step(model, optimizer, LOSSES[loss], seed=0),
    in_shardings=(shardings, batch_sharding(mesh)),
    out_shardings=(shardings, replicated(mesh), replicated(mesh)),
  )
  state = jax.jit(init, out_shardings=shardings)()
  step = step.lower(state, batch(mesh)).compile()
  return step, state, mesh, tensor_names(state.params, MICRO)


def batch(mesh):
  rng = np.random.default_rng(0)
  size = MICRO.vision.image_size
  image = rng.integers(0, 256, (BATCH, size, size, 3), np.uint8)
  text = rng.integers(2, 32, (BATCH, MICRO.text.context_length)).astype(np.int32)
  text[:, -1] = MICRO.text.eot_id
  return jax.device_put({"image": image, "text": text}, batch_sharding(mesh))


@pytest.mark.parametrize("loss", ["softmax", "siglip"])
@pytest.mark.parametrize("recipe", ["full", "switchback"])
def test_eight_devices_take_the_step_of_one(recipe, loss):
  results = []
  for data, fsdp in ((1, 1), (2, 4)):
    step, state, mesh, _ = compiled(data, fsdp, recipe, loss)
    start = state.params
    for _ in range(2):
      state, metrics, finite = step(state, batch(mesh))
    assert np.asarray(finite).all()
    update = jax.tree.map(lambda new, old: np.asarray(new) - np.asarray(old), state.params, start)
    results.append((metrics, update))
  assert state.params["image"]["blocks"]["fc1"]["kernel"].sharding.spec[1] == "fsdp"
  (one, one_update), (many, many_update) = results
  for name, value in one.items():
    np.testing.assert_allclose(many[name], value, rtol=METRIC_TOLERANCE[recipe], err_msg=name)
  for a, b in zip(jax.tree.leaves(one_update), jax.tree.leaves(many_update), strict=True):
    assert np.linalg.norm(a - b) <= UPDATE_TOLERANCE[recipe] * np.linalg.norm(a)


def test_a_step_names_the_first_tensor_that_is_not_finite():
  step, state, mesh, names = compiled(1, 1, "switchback")
  broken = jax.tree_util.tree_map_with_path(
    lambda path, x: (
      x.at[1, 0].set(jnp.nan)
      if jax.tree_util.keystr(path, simple=True, separator="/") == "image/blocks/qkv/bias"
      else x
    ),
    state.params,
  )
  for params, first in (
    (state.params, None),
    (broken, "parameter image/blocks/qkv/bias"),
  ):
    _, _, finite = step(state._replace(params=params), batch(mesh))
    finite = np.asarray(finite)
    assert len(finite) == len(names)
    assert (None if finite.all() else names[int(np.argmin(finite))]) == first
  wrong = [name for name, ok in zip(names, finite, strict=True) if not ok]
  assert "output of image block 0" not in wrong
  assert {"output of image block 1", "image features", "loss"} <= set(wrong)
  assert isinstance(state.params["logit_scale"].sharding, NamedSharding)
