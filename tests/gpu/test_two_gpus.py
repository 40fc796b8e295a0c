"""Tests that need two GPUs: JAX_PLATFORMS=cuda,cpu python -m pytest tests/gpu/test_two_gpus.py"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks.step import draw
from sbjax import quantized_dot
from sbjax.linear.fused import layer_norm_mlp
from sbjax.models.clip import CLIP
from sbjax.models.sizes import SIZES
from sbjax.models.transformer import BlockOptions
from sbjax.ops.rows import LayerNormParams
from train.config import MeshConfig, OptimizerConfig
from train.optimizer import make_optimizer
from train.parallel.sharding import batch_sharding, make_mesh, state_shardings
from train.step import make_init, make_train_step
from train.task import CLIPTask

pytestmark = [
  pytest.mark.gpu,
  pytest.mark.skipif("jax.device_count() < 2", reason="one NVIDIA GPU"),
]
STEPS = 3


def losses(mesh_config: MeshConfig | None, by: str) -> list[float]:
  """Losses of some steps of a ViT-B/32 with small images and two layers a tower."""
  size = SIZES["B/32"]
  vision = dataclasses.replace(size.vision, layers=2, image_size=64)
  size = dataclasses.replace(size, vision=vision, text=dataclasses.replace(size.text, layers=2))
  optimizer, _ = make_optimizer(OptimizerConfig(warmup_steps=1), 10)
  mesh = mesh_config and make_mesh(mesh_config)
  placed = batch_sharding(mesh) if mesh and by == "jit" else None
  task = CLIPTask(CLIP(size, BlockOptions(unroll=0, activation_sharding=placed)))
  init, make_batch = make_init(task, optimizer, 0), functools.partial(draw, size, 256)
  step = make_train_step(task, optimizer, 0, mesh=mesh if by == "shard_map" else None)
  options = {}
  if mesh:
    state = jax.eval_shape(init)
    shardings, rows = state_shardings(state, state.params, mesh), batch_sharding(mesh)
    init = jax.jit(init, out_shardings=shardings)
    make_batch = jax.jit(make_batch, out_shardings=rows)
    options = {"in_shardings": (shardings, rows), "out_shardings": (shardings, None, None)}
  step, state, batch, losses_of_steps = jax.jit(step, **options), init(), make_batch(), []
  for _ in range(STEPS):
    state, metrics, _ = step(state, batch)
    losses_of_steps.append(float(metrics["loss"]))
  return losses_of_steps


@pytest.fixture(scope="module")
def on_one():
  with jax.numpy_dtype_promotion("standard"):  # optax mixes integer steps with floating rates.
    return losses(None, "jit")


@pytest.mark.parametrize("by", ["shard_map", "jit"])
@pytest.mark.parametrize("mesh", [MeshConfig(data=2, fsdp=1), MeshConfig(data=1, fsdp=2)], ids=str)
def test_steps_on_two_gpus_equal_those_on_one(on_one, mesh, by):
  with jax.numpy_dtype_promotion("standard"):
    on_two = losses(mesh, by)
  np.testing.assert_allclose(on_two, on_one, rtol=1e-3)
  assert on_one[-1] < on_one[0]


@pytest.mark.parametrize("recipe", ["full", "switchback", "switchback_m", "fp8_switchback"])
def test_a_checked_shard_map_gives_the_gradients_of_one_gpu(recipe):
  keys = jax.random.split(jax.random.key(0), 4)
  x = jax.random.normal(keys[0], (512, 256), jnp.bfloat16)
  w, w2 = (jax.random.normal(key, shape) / 16 for key, shape in zip(
    keys[1:], [(256, 1024), (1024, 256)], strict=False))  # fmt: skip
  learned = {"w": w, "w2": w2, "scale": jnp.ones(256), "bias": jnp.zeros(256)}

  def gradients(p, x):
    def forward(p, x):
      y = quantized_dot(x, p["w"], recipe)
      return layer_norm_mlp(
        x, LayerNormParams(p["scale"], p["bias"]), p["w"], None, p["w2"], None, recipe
      ), y

    y, backward = jax.vjp(forward, p, x)
    return backward(jax.tree.map(jnp.sin, y))

  mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  specs = (P(), P("data"))
  actual = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=specs))(learned, x)
  for a, b in zip(*map(jax.tree.leaves, (actual, jax.jit(gradients)(learned, x))), strict=True):
    a, b = np.float64(a), np.float64(b)
    assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(b)
