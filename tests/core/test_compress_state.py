"""Optimizers whose states are kept in few bits: updates, sizes, training."""

import functools
import timeit

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pairwise import mainly

from sbjax.models.clip import CLIP
from sbjax.models.sizes import SIZES
from sbjax.ops.adam import Coded
from sbjax.optim.stable_adamw import stable_adamw, tensor_rms
from sbjax.optim.state_formats import (
  BFLOAT16,
  BFLOAT16_PAIR,
  E4M3_EXPANDED,
  E4M3_SCALED,
  FLOAT32,
  compress_state,
  join_details,
)
from train.optimizer import STATES, stacked

pytestmark = pytest.mark.standard_promotion  # As optax needs.

COAT = {"mu": E4M3_EXPANDED, "nu": E4M3_EXPANDED}
OPTIMIZERS = {
  "stable_adamw": functools.partial(stable_adamw, weight_decay=0.1, stacked=stacked),
  "adamw": functools.partial(optax.adamw, weight_decay=0.1),
  "muon": functools.partial(
    optax.contrib.muon,
    muon_weight_dimension_numbers=lambda params: jax.tree.map(
      lambda p: optax.contrib.MuonDimensionNumbers(p.ndim - 2, p.ndim - 1) if p.ndim > 1 else None,
      params,
    ),
  ),
}


def tree(seed=0):
  """Parameters or gradients: a stack of three layers, a matrix, and small ones."""
  rng = np.random.default_rng(seed)
  shapes = {"blocks": {"w": (3, 64, 128), "b": (3, 128)}, "w": (64, 256), "b": (256,), "scale": ()}
  return jax.tree.map(
    lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32),
    shapes,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def train(optimizer, steps, params=None, state=None, first=0):
  """Parameters and state after some steps with random gradients, and the last updates."""
  params = tree(99) if params is None else params
  state = jax.jit(optimizer.init)(params) if state is None else state
  update = jax.jit(optimizer.update)
  for t in range(first, first + steps):
    updates, state = update(tree(t), state, params)
    params = optax.apply_updates(params, updates)
  return params, state, updates


def formats_of(name):
  """COAT's formats for the moments that an optimizer has."""
  return {"muon": {"mu": E4M3_EXPANDED}}.get(name, COAT)


def decoded(state):
  """The optimizer's own state."""

  def is_coded(x):
    return isinstance(x, Coded)

  return jax.tree.map(
    lambda x: E4M3_EXPANDED.decode(x) if is_coded(x) else x, join_details(state), is_leaf=is_coded
  )


@pytest.mark.parametrize("name", mainly(["stable_adamw", "muon"], OPTIMIZERS))
def test_an_update_is_the_optimizer_s_own_with_the_decoded_state(name):
  optimizer = OPTIMIZERS[name](0.01)
  coded = compress_state(optimizer, stacked=stacked, **formats_of(name))
  params, state, _ = train(coded, 3)
  updates, new = jax.jit(coded.update)(tree(7), state, params)
  expected, plain = jax.jit(optimizer.update)(tree(7), jax.jit(decoded)(state), params)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7), updates, expected
  )
  assert jax.tree.structure(jax.eval_shape(decoded, new)) == jax.tree.structure(plain)
  for _, mu in optax.tree.get_all_with_path(new, "mu"):
    stored = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(mu)}
    eight = {path for path, x in stored.items() if x.dtype.itemsize == 1}
    assert eight <= {"['blocks']['w']", "['w']"}


@pytest.mark.parametrize("name", mainly(["stable_adamw", "muon"], OPTIMIZERS))
@pytest.mark.parametrize("formats", mainly(["coat"], ["coat", "fp8_lm", "bfloat16"]))
def test_parameters_stay_near_those_of_float32_states(name, formats):
  optimizer = OPTIMIZERS[name](0.01)
  plain, *_ = train(optimizer, 20)
  named = {k: f for k, f in STATES[formats].items() if k in ("mu", "nu")}
  ours, *_ = train(compress_state(optimizer, stacked=stacked, **named), 20)
  for a, b, start in zip(*map(jax.tree.leaves, (ours, plain, tree(99))), strict=True):
    moved = np.linalg.norm(b - start)
    assert np.linalg.norm(a - b) < 0.08 * moved


def test_float32_is_the_optimizer_itself():
  optimizer = OPTIMIZERS["stable_adamw"](0.01)
  same = compress_state(optimizer, stacked=stacked, mu=FLOAT32, nu=FLOAT32)
  params, state, updates = train(same, 5)
  actual = params, state.inner_state, updates
  jax.tree.map(np.testing.assert_array_equal, train(optimizer, 5), actual)


def test_tensor_rms_is_that_of_the_optimizer():
  _, state, _ = train(compress_state(OPTIMIZERS["stable_adamw"](0.01), stacked=stacked, **COAT), 2)
  rms = tensor_rms(state, stacked)
  assert rms.keys() == {"blocks/w", "blocks/b", "w", "b", "scale"}
  assert rms["blocks/w"].shape == (3,) and rms["w"].shape == ()


def test_it_works_with_masks_missing_leaves_and_no_parameters():
  inner = stable_adamw(0.01, weight_decay=0.0, stacked=stacked)
  optimizer = optax.masked(
    compress_state(inner, stacked=stacked, **COAT),
    lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
  )
  params = tree() | {"none": None}
  updates, state = jax.jit(optimizer.update)(params, jax.jit(optimizer.init)(params))
  np.testing.assert_allclose(np.abs(updates["blocks"]["w"]), 0.01, rtol=0.1)
  np.testing.assert_array_equal(updates["b"], params["b"])
  assert updates["none"] is None
  assert set(tensor_rms(state, stacked)) == {"blocks/w", "blocks/b", "w"}


def test_tensors_below_min_size_stay_float32_by_layer():
  for min_size, coded in ((0, {"w", "b"}), (129, {"w"}), (64 * 128, {"w"}), (64 * 128 + 1, set())):
    optimizer = compress_state(
      stable_adamw(0.1, stacked=stacked), min_size=min_size, stacked=stacked, mu=BFLOAT16
    )
    adam = jax.eval_shape(optimizer.init, tree()).inner_state[0]
    blocks = adam.mu["blocks"]
    assert {k for k, x in blocks.items() if x.dtype == jnp.bfloat16} == coded
    assert {x.dtype for x in jax.tree.leaves(adam.nu)} == {jnp.dtype(jnp.float32)}


def test_a_leaf_that_coding_would_not_shrink_stays_as_it_is():
  params = {"prime": jnp.ones((64, 257)), "narrow": jnp.ones((64, 128), jnp.bfloat16)}
  make = functools.partial(compress_state, optax.adam(1.0))
  state = jax.eval_shape(make(mu=E4M3_EXPANDED, nu=BFLOAT16_PAIR).init, params)
  adam = state.inner_state[0]
  assert adam.mu["prime"].dtype == jnp.float32 and adam.mu["narrow"].dtype.itemsize == 1
  assert adam.nu["prime"].dtype == jnp.float32 and adam.nu["narrow"].dtype == jnp.bfloat16
  assert len(state.details) == 1


@pytest.mark.parametrize("size", ["B/16", "bigG/14"])
def test_both_moments_of_a_clip_take_at_most_2_19_bytes_a_parameter(size):
  config = SIZES[size]
  side, length = config.vision.image_size, config.text.context_length
  params = jax.eval_shape(
    CLIP(config).init,
    jax.random.key(0),
    jnp.zeros((1, side, side, 3)),
    jnp.zeros((1, length), jnp.int32),
  )["params"]
  optimizer = compress_state(stable_adamw(0.1, stacked=stacked), stacked=stacked, **COAT)
  state = jax.eval_shape(optimizer.init, params)
  held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
  count = sum(x.size for x in jax.tree.leaves(params))
  assert held <= 2.19 * count


def test_init_does_not_encode_its_zeros_while_it_compiles():
  lowered = jax.jit(compress_state(optax.adam(1e-3), **COAT).init).lower(jnp.zeros((2048, 4096)))
  assert timeit.timeit(lowered.compile, number=1) < 20


@pytest.mark.slow
def test_a_donated_state_is_reused():
  optimizer = compress_state(OPTIMIZERS["stable_adamw"](0.01), stacked=stacked, **COAT)
  params = tree()
  state = jax.jit(optimizer.init)(params)
  step = jax.jit(lambda g, s, p: optimizer.update(g, s, p), donate_argnums=1)
  compiled = step.lower(params, state, params).compile()
  held = sum(x.nbytes for x in jax.tree.leaves(state))
  unread = state.inner_state[0].rms.nbytes
  assert compiled.memory_analysis().alias_size_in_bytes == held - unread
  for t in range(3):
    adam = state.inner_state[0]
    before = jax.tree.leaves((adam.mu, adam.nu, state.details))
    _, state = step(tree(t), state, params)
    assert all(x.is_deleted() for x in before)


@pytest.mark.parametrize("formats", mainly(["coat"], ["coat", "fp8_lm"]))
def test_a_regression_is_learned_as_with_float32_states(formats):
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(512, 64)), jnp.float32)
  y = jnp.tanh(x @ jnp.asarray(rng.normal(size=(64, 64)) / 8, jnp.float32))
  start = {k: jnp.asarray(rng.normal(size=(64, 64)) / 8, jnp.float32) for k in ("a", "b")}

  def loss(params):
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)

  def learned(optimizer):
    def step(carry, _):
      params, state = carry
      value, gradients = jax.value_and_grad(loss)(params)
      updates, state = optimizer.update(gradients, state, params)
      return (optax.apply_updates(params, updates), state), value

    return jax.jit(lambda: jax.lax.scan(step, (start, optimizer.init(start)), length=300)[1])()

  inner = stable_adamw(3e-3, b2=0.98, weight_decay=0.0)
  plain, ours = learned(inner), learned(compress_state(inner, **STATES[formats]))
  assert plain[-1] < plain[0] / 20
  assert abs(ours[-1] / plain[-1] - 1) < 0.05


@pytest.mark.slow
def test_a_state_that_is_sharded_gives_the_same_numbers():
  mesh = Mesh(np.array(jax.devices()[:8]), ("fsdp",))
  rows = {"blocks": {"w": PartitionSpec(None, "fsdp"), "b": PartitionSpec()}}
  rows |= {"w": PartitionSpec("fsdp"), "b": PartitionSpec(), "scale": PartitionSpec()}
  place = functools.partial(jax.tree.map, lambda x, s: jax.device_put(x, NamedSharding(mesh, s)))
  optimizer = compress_state(OPTIMIZERS["stable_adamw"](0.01), stacked=stacked, **COAT)
  params, init = tree(99), jax.jit(optimizer.init)
  state, sharded = init(params), init(place(params, rows))
  update = jax.jit(optimizer.update)
  for t in range(2):
    _, state = update(tree(t), state, params)
    _, sharded = update(place(tree(t), rows), sharded, place(params, rows))
  moment = sharded.inner_state[0].nu["w"]
  assert moment.sharding.is_equivalent_to(NamedSharding(mesh, rows["w"]), 2)
  for a, b in zip(*map(jax.tree.leaves, map(jax.jit(decoded), (sharded, state))), strict=True):
    np.testing.assert_allclose(a, b, rtol=0.2, atol=1e-5)  # A step of e4m3.
    assert np.mean(np.asarray(a) == np.asarray(b)) > 0.95 or a.ndim < 2


def test_a_nan_gradient_stays_nan():
  optimizer = compress_state(optax.adam(0.1), **COAT)
  ones = np.ones((64, 128), np.float32)
  gradients = {"w": ones.copy()}
  gradients["w"][5, 7] = np.nan
  update = jax.jit(optimizer.update)
  _, state = update(gradients, jax.jit(optimizer.init)(gradients))
  for _ in range(3):
    updates, state = update({"w": ones}, state)
  updates = np.asarray(updates["w"])
  assert np.isnan(updates[5]).all() and np.isfinite(updates[6]).all()


def test_errors_name_the_right_value():
  with pytest.raises(ValueError, match=r"nu='coat' is no Format: .*E4M3_EXPANDED"):
    compress_state(optax.adam(0.1), nu="coat")
  with pytest.raises(ValueError, match=r"No state .* 'v': count, mu, nu"):
    compress_state(optax.adam(0.1), v=BFLOAT16).init(tree())


def test_scales_of_a_whole_tensor_beside_a_shard_of_it_are_refused():
  mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  optimizer, params = compress_state(stable_adamw(0.1), **COAT), jnp.ones((64, 256))
  state, rows = optimizer.init(params), PartitionSpec("d")
  specs = optax.tree_map_params(
    optimizer, lambda _: rows, state, transform_non_params=lambda _: PartitionSpec()
  )
  update = jax.shard_map(optimizer.update, mesh=mesh, in_specs=(rows, specs), out_specs=rows)
  with pytest.raises(ValueError, match=r"Scales \(64, 2\) of groups do not fit .* split both"):
    jax.eval_shape(update, params, state)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_share_the_scale_of_their_tensor(check_vma):
  mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  optimizer = compress_state(optax.adam(0.1), mu=E4M3_SCALED)
  g = jnp.outer(jnp.exp2(jnp.arange(64.0)), jnp.ones(256))

  def scale(g):
    state = optimizer.update(g, optimizer.init(jnp.zeros_like(g)))[1]
    return jax.tree.leaves(state.details)[0]

  rows, whole = PartitionSpec("d"), PartitionSpec()
  split = jax.shard_map(scale, mesh=mesh, in_specs=rows, out_specs=whole, check_vma=check_vma)
  np.testing.assert_array_equal(jax.jit(split)(g), jax.jit(scale)(g))
