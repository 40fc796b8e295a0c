"""The training step whose devices exchange gradients in few bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clip_case import clip, compiled
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec as P
from test_step import SHALLOW, batch, make_state

from benchmarks.collectives import collectives
from sbjax.distributed.exchange import EXCHANGES
from sbjax.models.transformer import BlockOptions
from train.config import Config, MeshConfig, ModelConfig, OptimizerConfig
from train.optimizer import make_optimizer
from train.parallel.gather import gather_parameters
from train.parallel.sharding import batch_sharding, make_mesh, parameter_axes, path_name, replicated
from train.step import make_train_step
from train.task import CLIPTask

pytestmark = pytest.mark.standard_promotion  # As optax needs.

# Of a tensor's gradient, over its norm. On one axis a sum is rounded once or twice. Over fsdp and
# then data it is rounded three times, and the gradients of a few images nearly cancel.
TOLERANCE = {(8, 1): 0.06, (1, 8): 0.06, (2, 4): 0.09, (2, 2, 2): 0.09}


def make_step(data, fsdp, accumulate=1, optimizer=None, **options):
  """(step, state, mesh) of a CLIP in float32."""
  mesh = make_mesh(MeshConfig(data=data, fsdp=fsdp), jax.devices()[: data * fsdp])
  task = CLIPTask(clip(SHALLOW, recipe="full"))
  optimizer = optax.trace(0.0) if optimizer is None else optimizer
  state, shardings = make_state(task, optimizer, mesh)
  step = compiled(
    make_train_step(task, optimizer, 0, accumulate, mesh=mesh, **options),
    in_shardings=(shardings, batch_sharding(mesh)),
    out_shardings=(shardings, replicated(mesh), replicated(mesh)),
  )
  return step, state, mesh


@functools.cache
def gradients(data, fsdp, accumulate=1, **options):
  """The gradients of a step, by their paths."""
  step, state, mesh = make_step(data, fsdp, accumulate, **options)
  state, _, finite = step(state, batch(mesh))
  assert np.asarray(finite).all()
  leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(state.opt_state.trace))
  return {path_name(path): leaf for path, leaf in leaves}


@pytest.mark.parametrize(
  ("form", "ways"),  # Devices over data, devices over fsdp, microbatches.
  [("e4m3", (8, 1)), ("int8", (1, 8)), ("e4m3", (2, 4)), ("bfloat16", (2, 2, 2))],
)
@pytest.mark.slow
def test_exchanged_gradients_are_near_those_of_float32(form, ways):
  got, expected = gradients(*ways, gradient_exchange=form), gradients(8, 1)
  changed = 0
  for name, want in expected.items():
    error = np.linalg.norm(got[name] - want) / np.linalg.norm(want)
    if "fsdp" not in parameter_axes(name):  # Biases, norms and scalars travel in float32.
      assert error <= 1e-4, name
    else:
      assert error <= (0.01 if form == "bfloat16" else TOLERANCE[ways]), name
      changed += bool(error > 1e-3)
  assert changed >= 8


def test_stacked_biases_travel_in_float32():
  mesh = make_mesh(MeshConfig(data=8), jax.devices())
  path = ("image", "blocks", "mlp", "fc1", "bias")
  weights = np.random.default_rng(0).standard_t(3, size=(8, 4, 4096)).astype(np.float32)

  def gradient(x, weights):
    def loss(x):
      variables = gather_parameters(
        unflatten_dict({path: x}), BlockOptions(), mesh, gradient_exchange="int8"
      )
      return jnp.sum(flatten_dict(variables["params"])[path] * weights[0])

    return jax.grad(loss)(x)

  specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
  got = jax.jit(jax.shard_map(gradient, mesh=mesh, **specs))(jnp.zeros((4, 4096)), weights)
  np.testing.assert_allclose(got, weights.sum(0), rtol=1e-4, atol=1e-4)


def moved(**options):
  step, state, mesh = make_step(8, 1, **options)
  return collectives(step.lower(state, batch(mesh)).compile().as_text()), state.params


@pytest.mark.slow
def test_a_step_in_8_bits_moves_few_bytes():
  found, params = moved(gradient_exchange="e4m3")
  plain, _ = moved()
  leaves = jax.tree_util.tree_leaves_with_path(params)
  size = {path_name(path): x.size for path, x in leaves}
  sent = [n for name, n in size.items() if "fsdp" in parameter_axes(name) and n >= 4096]
  eight_bits = sum(found[kind]["u8"][0] for kind in ("all-to-all", "all-gather")) * 1e6
  assert eight_bits <= 2.02 * sum(sent) + 2.02 * 4096 * len(sent)
  assert "u8" not in str(plain) and "all-to-all" not in plain
  fewer = (plain["all-reduce"]["f32"][0] - found["all-reduce"]["f32"][0]) * 1e6
  assert fewer == pytest.approx(4 * sum(sent), abs=4096)


def test_float32_leaves_the_compiled_step_unchanged():
  texts = []
  for options in ({}, {"gradient_exchange": "float32"}):
    step, state, mesh = make_step(8, 1, **options)
    texts.append(step.lower(state, batch(mesh)).as_text())
  assert texts[0] == texts[1]


@pytest.mark.slow
def test_losses_of_a_run_in_e4m3_are_near_those_of_float32():
  losses = {}
  for form in ("float32", "e4m3"):
    config = OptimizerConfig(learning_rate=2e-3, warmup_steps=2)
    optimizer, _ = make_optimizer(config, 40)
    step, state, mesh = make_step(8, 1, optimizer=optimizer, gradient_exchange=form)
    examples, values = batch(mesh), []
    for _ in range(40):
      state, metrics, _ = step(state, examples)
      values.append(float(metrics["loss"]))
    losses[form] = np.asarray(values)
  assert losses["float32"][-1] < 0.5 * losses["float32"][0]
  np.testing.assert_allclose(losses["e4m3"], losses["float32"], rtol=0.05, atol=0.02)
  assert not np.array_equal(losses["e4m3"], losses["float32"])


@pytest.mark.parametrize("form", EXCHANGES)
def test_a_config_takes_each_format(form):
  Config(model=ModelConfig(size="tiny"), mesh=MeshConfig(gradient_exchange=form)).check()


def test_a_config_with_a_dtype_and_an_exchange_is_refused():
  mesh = MeshConfig(gradient_dtype="bfloat16", gradient_exchange="e4m3")
  with pytest.raises(ValueError, match=r"mesh.gradient_exchange='e4m3' sums in float32"):
    Config(model=ModelConfig(size="tiny"), mesh=mesh).check()
