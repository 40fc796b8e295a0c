"""The average of the parameters over the steps, in the training program's optimizers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clip_case import MICRO

from sbjax.models.clip import CLIP
from sbjax.optim.averaged import average_of, averaged
from sbjax.optim.collage import summed_parameters
from train.config import MeshConfig, OptimizerConfig
from train.optimizer import cast_matrices, make_optimizer, matrix_dtype
from train.parallel.sharding import make_mesh, state_shardings
from train.step import make_init
from train.task import CLIPTask

pytestmark = pytest.mark.standard_promotion  # As optax needs.

STEPS, DECAY = 6, 0.8
make = functools.partial(OptimizerConfig, learning_rate=0.1, warmup_steps=1)


def random(seed):
  rng = np.random.default_rng(seed)
  return {name: jnp.float32(rng.normal(size=(64, 128))) for name in ("w", "v")}


def train(config):
  """The parameters after each step, and the last state."""
  optimizer, _ = make_optimizer(config, 20)
  params = cast_matrices(random(0), matrix_dtype(config.states))
  state, step, after = optimizer.init(params), jax.jit(optimizer.update), []
  for seed in range(1, STEPS + 1):
    updates, state = step(random(seed), state, params)
    params = optax.apply_updates(params, updates)
    after.append(summed_parameters(params, state))
  return after, state


@pytest.mark.parametrize(
  "options",
  [{}, {"states": "collage_plus"}, {"loss_scale": "dynamic", "initial_loss_scale": 1.0}],
  ids=str,
)
def test_the_average_is_its_formula_and_training_stays_as_it_is(options):
  plain, _ = train(make(**options))
  after, state = train(make(**options, ema=DECAY))
  jax.tree.map(np.testing.assert_array_equal, after, plain)
  weights = DECAY ** np.arange(STEPS - 1, -1, -1) * (1 - DECAY) / (1 - DECAY**STEPS)
  assert np.sum(weights) == pytest.approx(1)
  average = average_of(state)
  for name in average:
    formula = sum(w * np.float64(p[name]) for w, p in zip(weights, after, strict=True))
    assert average[name].dtype == jnp.float32
    np.testing.assert_allclose(average[name], formula, rtol=1e-5, atol=1e-6)


def test_after_the_first_step_the_average_is_the_parameters():
  optimizer = averaged(optax.sgd(0.1), 0.99999)
  updates, state = optimizer.update(random(1), optimizer.init(random(0)), random(0))
  params = optax.apply_updates(random(0), updates)
  for average, p in zip(*map(jax.tree.leaves, (average_of(state), params)), strict=True):
    np.testing.assert_allclose(average, p, rtol=1e-6)


def test_the_average_is_split_like_the_parameters():
  mesh = make_mesh(MeshConfig(data=2, fsdp=4))
  optimizer, _ = make_optimizer(make(ema=DECAY), 10)
  task = CLIPTask(CLIP(dataclasses.replace(MICRO, embed_dim=32)))
  state = jax.eval_shape(make_init(task, optimizer, 0))
  shardings = state_shardings(state, state.params, mesh)
  assert average_of(shardings.opt_state) == shardings.params
  assert sum("fsdp" in x.spec for x in jax.tree.leaves(shardings.params)) > 10


def test_without_an_average_a_state_is_that_of_earlier_versions():
  params = random(0)
  states = [make_optimizer(make(ema=decay), 10)[0].init(params) for decay in (0.0, DECAY)]
  assert average_of(states[0]) is None
  assert jax.tree.structure(states[0]) == jax.tree.structure(states[1].inner)


def test_bad_input_is_named():
  for decay in (1.0, -0.1, float("nan"), 1 - 1e-9):
    with pytest.raises(ValueError, match=f"{decay=} must be from 0 to below 1 in float32"):
      averaged(optax.sgd(0.1), decay)
  optimizer = optax.chain(*(averaged(optax.sgd(0.1), DECAY) for _ in range(2)))
  state = optimizer.init(random(0))
  with pytest.raises(ValueError, match="2 optimizers keep an average; only one, the outermost"):
    average_of(state)
  with pytest.raises(ValueError, match="averaged needs the parameters"):
    optimizer.update(random(1), state)
