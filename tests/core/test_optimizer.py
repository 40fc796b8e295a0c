import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from pairwise import mainly

from sbjax.models.clip import CLIP
from sbjax.models.sizes import SIZES, TextConfig, VisionConfig
from sbjax.models.transformer import BlockOptions
from sbjax.optim.collage import descent_quality, summed_parameters
from sbjax.optim.stable_adamw import tensor_rms
from train.config import OptimizerConfig
from train.optimizer import (
  STATES,
  cast_matrices,
  decays,
  make_optimizer,
  make_schedule,
  matrix_dtype,
  stacked,
)

pytestmark = pytest.mark.standard_promotion  # As optax needs.

LAYERS = 3


def config(**changes):
  return dataclasses.replace(OptimizerConfig(learning_rate=0.1, warmup_steps=4), **changes)


def train(optimizer, params, gradients):
  @jax.jit
  def step(g, state, params):
    updates, state = optimizer.update(g, state, params)
    return optax.apply_updates(params, updates), state

  state = jax.jit(optimizer.init)(params)
  for g in gradients:
    params, state = step(g, state, params)
  return params, state


def random_like(params, seed):
  leaves, treedef = jax.tree.flatten(params)
  rng = np.random.default_rng(seed)
  return jax.tree.unflatten(
    treedef, [jnp.asarray(rng.normal(size=p.shape), jnp.float32) for p in leaves]
  )


def unstack(tree):
  """{"blocks": [layers, ...]} as {"block_0": ..., "block_1": ...}, at any depth."""
  if not isinstance(tree, dict):
    return tree
  layers = {
    f"block_{i}": jax.tree.map(lambda x, i=i: x[i], tree["blocks"])
    for i in range(LAYERS)
    if "blocks" in tree
  }
  return layers | {k: unstack(v) for k, v in tree.items() if k != "blocks"}


def clip_parameters(scan):
  """Shapes of a CLIP's parameters, with every option that adds parameters."""
  size = dataclasses.replace(
    SIZES["tiny"],
    vision=VisionConfig(image_size=8, patch_size=4, width=16, layers=LAYERS, heads=2),
    text=TextConfig(context_length=4, vocab_size=32, width=16, layers=LAYERS, heads=2, eot_id=1),
  )
  model = CLIP(size, BlockOptions(zero_init_layer_scale=True, qk_norm=True, scan=scan))
  return jax.eval_shape(
    model.init, jax.random.key(0), jnp.zeros((1, 8, 8, 3)), jnp.zeros((1, 4), jnp.int32)
  )["params"]


def names(tree):
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def assert_close(a, b):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), a, b)


def rates(steps, peak=2.0, **changes):
  """The rates of all steps, and of one more."""
  schedule = jax.jit(jax.vmap(make_schedule(config(**changes), peak, steps)))
  return np.asarray(schedule(jnp.arange(steps + 1)))


def test_the_rate_warms_up_to_its_peak_and_follows_a_cosine_to_zero():
  expected = [2 * (t + 1) / 4 for t in range(4)]
  expected += [1 + np.cos(np.pi * (t - 4) / 8) for t in range(4, 13)]
  np.testing.assert_allclose(rates(12), expected, atol=1e-6)


@pytest.mark.parametrize("warmup, steps", [(0, 3), (1, 3), (7, 100), (2000, 20_000)])
def test_the_cosine_has_the_bits_of_optax_s_two_parts(warmup, steps):
  parts = [optax.cosine_decay_schedule(2e-3, steps - warmup)]
  if warmup:
    parts.insert(0, optax.linear_schedule(2e-3 / warmup, 2e-3, warmup - 1))
  expected = jax.jit(jax.vmap(optax.join_schedules(parts, [warmup][: len(parts) - 1])))
  np.testing.assert_array_equal(
    rates(steps, 2e-3, warmup_steps=warmup), expected(jnp.arange(steps + 1))
  )


@pytest.mark.parametrize("schedule", ["cosine", "constant", "inverse_sqrt"])
@pytest.mark.parametrize("warmup, first", [(0, 1.0), (1, 1.0), (2, 0.5)])
def test_short_warm_ups_start_above_zero_and_reach_the_peak(schedule, warmup, first):
  cooldown = {} if schedule == "cosine" else {"cooldown_steps": 1}
  found = rates(5, 1.0, warmup_steps=warmup, schedule=schedule, **cooldown)
  assert found[0] == first
  assert found[max(warmup - 1, 0)] == 1
  assert found[5] == pytest.approx(0, abs=1e-6)


def test_the_rates_of_schedules_with_a_cool_down_are_their_formulas():
  n, warmup = np.arange(1, 42), np.minimum(np.arange(1, 42) / 4, 1)
  line = np.minimum(1, (41 - n) / 10)
  root = np.sqrt(4 / np.maximum(n, 4))
  for schedule, formula in ("constant", 2 * warmup), ("inverse_sqrt", 2 * warmup * root):
    np.testing.assert_allclose(rates(40, schedule=schedule), formula, rtol=1e-6)
    found = rates(40, schedule=schedule, cooldown_steps=10)
    np.testing.assert_allclose(found, formula * line, rtol=1e-6)


@pytest.mark.parametrize("schedule", ["constant", "inverse_sqrt"])
def test_runs_of_all_lengths_have_the_same_bits_before_they_cool_down(schedule):
  endless = rates(1000, schedule=schedule)
  for steps, cooldown in (40, 36), (40, 1), (1000, 300):
    found = rates(steps, schedule=schedule, cooldown_steps=cooldown)
    start = steps - cooldown
    np.testing.assert_array_equal(found[: start + 1], endless[: start + 1])
    assert np.all(found[start + 1 :] < endless[start + 1 : steps + 1]) and found[steps] == 0


@pytest.mark.parametrize("name", ["cosine", "constant", "inverse_sqrt"])
def test_the_optimizer_follows_the_schedule_it_returns(name):
  cooldown = {} if name == "cosine" else {"cooldown_steps": 3}
  c = config(weight_decay=0.0, schedule=name, **cooldown)
  optimizer, schedule = make_optimizer(c, steps=10)
  state, params = jax.jit(optimizer.init)(jnp.zeros(3)), jnp.zeros(3)
  update = jax.jit(optimizer.update)
  for t in range(10):
    updates, state = update(jnp.ones(3), state, params)
    np.testing.assert_allclose(updates, -schedule(t), rtol=1e-5)


@pytest.mark.parametrize("scan", [True, False])
def test_only_clip_s_matrices_are_decayed(scan):
  decayed = {name for name, yes in names(decays(clip_parameters(scan))).items() if yes}
  matrices = {
    *("image/patch_embedding/kernel", "image/positional_embedding", "image/proj"),
    *("text/token_embedding/embedding", "text/positional_embedding", "text/proj"),
  }
  blocks = ["blocks"] if scan else [f"block_{i}" for i in range(LAYERS)]
  assert decayed == matrices | {
    f"{tower}/{block}/{linear}/kernel"
    for tower in ("image", "text")
    for block in blocks
    for linear in ("qkv", "out", "fc1", "fc2")
  }


def test_parameters_of_a_scanned_clip_are_stacked_blocks():
  scanned = jax.tree.map(lambda p: np.empty(p.shape), clip_parameters(scan=True))
  apart = clip_parameters(scan=False)
  assert jax.tree.structure(unstack(scanned)) == jax.tree.structure(apart)
  jax.tree.map(lambda a, b: np.testing.assert_equal(a.shape, b.shape), unstack(scanned), apart)


@pytest.mark.parametrize("name", ["stable_adamw", "adamw", "muon"])
def test_stacked_blocks_train_like_separate_blocks(name):
  shapes = {
    "image": {
      "blocks": {"fc1": {"kernel": jnp.zeros((LAYERS, 4, 5)), "bias": jnp.zeros((LAYERS, 5))}},
      "proj": jnp.zeros((5, 3)),
    },
    "logit_scale": jnp.zeros(()),
  }
  params, *gradients = (random_like(shapes, seed) for seed in range(6))
  gradients = [jax.tree.map(lambda g, t=t: g * 3**t, g) for t, g in enumerate(gradients)]
  optimizer, _ = make_optimizer(config(name=name, clip_norm=1e3), steps=10)
  scanned, state = train(optimizer, params, gradients)
  apart, apart_state = train(optimizer, unstack(params), [unstack(g) for g in gradients])
  assert_close(unstack(scanned), apart)
  rms = tensor_rms(state, stacked)
  for tensor, expected in tensor_rms(apart_state).items():
    block = re.search(r"block_(\d)", tensor)
    actual = rms[tensor.replace(block[0], "blocks")][int(block[1])] if block else rms[tensor]
    assert_close(actual, expected)
  if name == "muon":  # Its kernels have no RMS.
    assert "image/blocks/fc1/bias" in rms and "image/blocks/fc1/kernel" not in rms
    return
  kernel = rms["image/blocks/fc1/kernel"]
  assert len(np.unique(kernel)) == LAYERS and max(kernel) > 1.2


@pytest.mark.parametrize("shape", [(LAYERS, 16, 48), (LAYERS, 64, 16), (16, 16)])
def test_muon_s_updates_of_kernels_are_orthogonal_and_as_large_as_adam_s(shape):
  where = "blocks" if len(shape) == 3 else "block_0"
  shapes = {"image": {where: {"fc2": {"kernel": jnp.zeros(shape)}}}, "proj": jnp.zeros((5, 3))}
  params, *gradients = (random_like(shapes, seed) for seed in range(4))
  flat = config(name="muon", schedule="constant", warmup_steps=0, weight_decay=0.0)
  with_decay = dataclasses.replace(flat, weight_decay=0.5)
  last, found = params, {}
  for c in flat, with_decay:
    optimizer, _ = make_optimizer(c, steps=10)
    state, update = jax.jit(optimizer.init)(params), jax.jit(optimizer.update)
    for g in gradients:
      found[c.weight_decay], state = update(g, state, params)
  kernel = found[0.0]["image"][where]["fc2"]["kernel"]
  singular = np.linalg.svd(kernel, compute_uv=False) / (0.1 * 0.2 * max(shape[-2:]) ** 0.5)
  assert singular.min() > 0.6 and singular.max() < 1.25
  assert np.sqrt(np.mean(kernel**2)) == pytest.approx(0.1 * 0.2, rel=0.2)
  jax.tree.map(
    lambda a, b, p: np.testing.assert_allclose(b, a - 0.1 * 0.5 * p, atol=1e-6),
    *(found[0.0]["image"], found[0.5]["image"], last["image"]),
  )


def test_muon_trains_all_but_kernels_of_blocks_as_stable_adamw():
  params = jax.tree.map(lambda p: jnp.ones(p.shape), clip_parameters(scan=True))
  gradients = [random_like(params, seed) for seed in range(3)]
  found, state = train(make_optimizer(config(name="muon"), 10)[0], params, gradients)
  plain, _ = train(make_optimizer(config(), 10)[0], params, gradients)
  same = {name for name, p in names(found).items() if np.array_equal(p, names(plain)[name])}
  kernels = {
    f"{tower}/blocks/{linear}/kernel"
    for tower in ("image", "text")
    for linear in ("qkv", "out", "fc1", "fc2")
  }
  assert names(params).keys() - same == kernels
  assert tensor_rms(state, stacked).keys() == same


def test_adamw_equals_optax_s_and_has_tensor_rms():
  params, *gradients = (random_like({"w": jnp.ones((5, 4)), "b": jnp.ones(4)}, s) for s in range(9))
  c = config(name="adamw", b1=0.8, b2=0.95, eps=1e-3, weight_decay=0.1, clip_norm=2.0)
  optimizer, schedule = make_optimizer(c, steps=20)
  theirs = optax.chain(
    optax.clip_by_global_norm(2.0),
    optax.adamw(schedule, c.b1, c.b2, c.eps, weight_decay=c.weight_decay, mask=decays),
  )
  ours, state = train(optimizer, params, gradients)
  expected, _ = train(theirs, params, gradients)
  assert_close(ours, expected)
  assert set(tensor_rms(state)) == {"w", "b"}


def test_gradients_are_clipped_by_their_global_norm():
  params = {"a": jnp.zeros(3), "b": jnp.zeros(4)}
  small, large = (jax.tree.map(lambda p, s=s: p + s, params) for s in (1e-3, 1e3))
  clipped, state = train(make_optimizer(config(clip_norm=1.0), 10)[0], params, [small, large])
  norm = np.sqrt(7.0)
  scaled = jax.tree.map(lambda p: p + 1 / norm, params)
  expected, expected_state = train(make_optimizer(config(), 10)[0], params, [small, scaled])
  np.testing.assert_allclose(tensor_rms(state)["a"], tensor_rms(expected_state)["a"], rtol=1e-5)
  assert_close(clipped, expected)


@pytest.mark.parametrize("decay_with", ["clipped", "plain"])
def test_decay_with_reaches_stable_adamw(decay_with):
  params, small, large = (random_like({"w": jnp.ones((5, 4))}, seed) for seed in range(3))
  large = jax.tree.map(lambda g: 100 * g, large)
  optimizer, schedule = make_optimizer(config(decay_with=decay_with), 10)
  still, _ = make_optimizer(config(weight_decay=0.0), 10)
  state, still_state = optimizer.init(params), still.init(params)
  for t, g in enumerate((small, large)):
    updates, state = optimizer.update(g, state, params)
    without, still_state = still.update(g, still_state, params)
    rms = tensor_rms(state)["w"] if decay_with == "clipped" else 1
    np.testing.assert_allclose(
      updates["w"] - without["w"],
      -schedule(t) * 0.2 * params["w"] / np.maximum(1, rms),
      atol=1e-6,
    )
  assert tensor_rms(state)["w"] > 1.2


@pytest.mark.parametrize("name", ["stable_adamw", "adamw"])
def test_b2_power_weighs_the_newest_square_by_a_power_of_the_step(name):
  params, *gradients = (random_like({"w": jnp.ones((5, 4))}, seed) for seed in range(9))
  optimizer, _ = make_optimizer(config(name=name, b2_power=0.5), 20)
  nu, state, step = np.zeros((5, 4)), optimizer.init(params), jax.jit(optimizer.update)
  for t, g in enumerate(gradients, start=1):
    _, state = step(g, state, params)
    nu += t**-0.5 * (np.float64(g["w"]) ** 2 - nu)
    np.testing.assert_allclose(optax.tree.get(state, "nu")["w"], nu, rtol=1e-5)


@pytest.mark.parametrize("states", mainly(["coat"], ["float32", "coat", "collage_plus"]))
def test_b2_power_continues_with_the_same_bits_from_a_saved_state(states):
  shapes = {"w": jnp.ones((64, 128)), "b": jnp.ones(128)}
  params, *gradients = (random_like(shapes, seed) for seed in range(7))
  params = cast_matrices(params, matrix_dtype(states))
  make = functools.partial(make_optimizer, config(states=states, b2_power=0.65), 20)
  whole, whole_state = train(make()[0], params, gradients)
  half, state = train(make()[0], params, gradients[:3])
  state = serialization.from_bytes(make()[0].init(params), serialization.to_bytes(state))
  step = jax.jit(make()[0].update)  # As another process makes it.
  for g in gradients[3:]:
    updates, state = step(g, state, half)
    half = optax.apply_updates(half, updates)
  jax.tree.map(np.testing.assert_array_equal, (half, state), (whole, whole_state))


@pytest.mark.parametrize("states", mainly(["float32", "coat", "collage_plus"], STATES))
@pytest.mark.parametrize("name", mainly(["stable_adamw"], ["stable_adamw", "adamw", "muon"]))
def test_every_choice_of_states_trains_like_float32_and_has_tensor_rms(name, states):
  shapes = {"blocks": {"w": jnp.ones((LAYERS, 64, 128))}, "proj": jnp.ones((64, 128))}
  params, *gradients = (random_like(shapes, seed) for seed in range(9))
  plain, _ = train(make_optimizer(config(name=name), 20)[0], params, gradients)
  optimizer, _ = make_optimizer(config(name=name, states=states, clip_norm=1e3), 20)
  ours, state = train(optimizer, cast_matrices(params, matrix_dtype(states)), gradients)
  assert set(tensor_rms(state, stacked)) == {"blocks/w", "proj"}
  for a, b, start in zip(*map(jax.tree.leaves, (ours, plain, params)), strict=True):
    assert np.linalg.norm(a - b) < 0.05 * np.linalg.norm(b - start)


def test_collage_measures_what_is_left_after_rates_clipping_and_freezing():
  """Rates of one in 1,000 make steps that bfloat16 cannot hold; a pair of them can."""
  shapes = {"a": jnp.ones((64, 128)), "b": jnp.ones((64, 128))}
  params, *gradients = (cast_matrices(random_like(shapes, s), jnp.bfloat16) for s in range(5))
  c = config(states="collage_light", measure_edq=True, clip_norm=1.0, loss_scale="fixed")
  c.initial_loss_scale, c.learning_rate_scale = 1.0, ("a=0.001",)
  optimizer, _ = make_optimizer(c, 20, freeze=("b",))
  ours, state = train(optimizer, params, gradients)
  np.testing.assert_array_equal(ours["b"], params["b"])
  assert np.mean(np.asarray(ours["a"] == params["a"])) > 0.5
  moved = summed_parameters(ours, state)["a"] - params["a"].astype(jnp.float32)
  assert np.mean(np.asarray(moved != 0)) > 0.99 and np.abs(moved).max() < 1e-3
  found = descent_quality(state)
  assert found["edq"] == pytest.approx(1, abs=0.1) and found["lost"] < 0.05


def test_matrices_of_collage_are_bfloat16_and_its_vectors_float32():
  params = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), clip_parameters(scan=True))
  for states in STATES:
    cast = names(cast_matrices(params, matrix_dtype(states)))
    narrow = {name for name, p in cast.items() if p.dtype == jnp.bfloat16}
    matrices = {name for name, yes in names(decays(params)).items() if yes}
    assert narrow == (matrices if states.startswith("collage") else set())
    assert {p.dtype.name for name, p in cast.items() if name not in narrow} == {"float32"}


@pytest.mark.parametrize("states", ["coat", "fp8_lm", "bfloat16"])
def test_moments_of_the_token_embedding_stay_float32_unless_the_config_says_otherwise(states):
  params = {
    "text": {"token_embedding": {"embedding": jnp.ones((64, 128))}, "w": jnp.ones((64, 128))}
  }
  for patterns, wide in ((None, {"token_embedding"}), ((), set()), (("text/w",), {"w"})):
    c = (
      config(states=states) if patterns is None else config(states=states, float32_moments=patterns)
    )
    state = jax.eval_shape(make_optimizer(c, 20)[0].init, params)
    for moment in ("mu", "nu"):
      ((_, of_text),) = optax.tree.get_all_with_path(state, moment)
      found = {k for k, x in of_text["text"].items() if jax.tree.leaves(x)[0].dtype == jnp.float32}
      assert found == wide


def test_8_bit_states_train_stacked_layers_like_separate_layers():
  shapes = {"image": {"blocks": {"w": jnp.ones((LAYERS, 64, 128)), "b": jnp.ones((LAYERS, 128))}}}
  params, *gradients = (random_like(shapes, seed) for seed in range(6))
  optimizer, _ = make_optimizer(config(states="fp8_lm"), 10)
  scanned, _ = train(optimizer, params, gradients)
  apart, _ = train(optimizer, unstack(params), [unstack(g) for g in gradients])
  for a, b in zip(*map(jax.tree.leaves, (unstack(scanned), apart)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-3)
    # A last bit that XLA rounds otherwise may send a moment to its other neighbour.
    assert np.mean(~np.isclose(a, b, rtol=1e-5, atol=1e-6)) < 1e-3


def test_only_modules_named_blocks_are_stacked():
  tree = {"blocks": {"x": 0, "y": {"z": 0}}, "block_0": {"x": 0}, "blocks_0": 0, "my_blocks": 0}
  assert stacked(tree) == {
    "blocks": {"x": 1, "y": {"z": 1}},
    "block_0": {"x": 0},
    "blocks_0": 0,
    "my_blocks": 0,
  }


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"name": "sgd"}, r"optimizer.name='sgd' is none of stable_adamw, adamw"),
    ({"schedule": "linear"}, r"schedule='linear' is none of cosine, constant, inverse_sqrt"),
    ({"cooldown_steps": 2}, r"optimizer.cooldown_steps=2 must be 0 with .*schedule='cosine'"),
    (
      {"schedule": "constant", "cooldown_steps": 7},
      r"cooldown_steps=7 must be at most 6, .* \(steps=10, optimizer.warmup_steps=4\)",
    ),
    ({"loss_scale": "fast"}, r"optimizer.loss_scale='fast' is none of none, fixed, dynamic"),
    ({"states": "int8"}, r"optimizer.states='int8' is none of float32, bfloat16, coat, fp8_lm"),
    (
      {"measure_edq": True},
      r"needs optimizer.states .* collage_light, collage_plus, not 'float32'",
    ),
    ({"decay_with": "eta"}, r"decay_with='eta'.*'clipped' or 'plain'"),
    ({"warmup_steps": 10}, r"warmup_steps=10 must be in \[0, steps=10\)"),
    ({"warmup_steps": -1}, r"warmup_steps=-1 must be"),
  ],
)
def test_errors_name_the_value_and_what_would_be_right(changes, message):
  with pytest.raises(ValueError, match=message):
    make_optimizer(config(**changes), steps=10)


def test_muon_is_refused_with_munit_s_factors():
  with pytest.raises(ValueError, match="'unit' takes 'stable_adamw' or 'adamw'"):
    make_optimizer(config(name="muon"), steps=10, parametrization="unit")
