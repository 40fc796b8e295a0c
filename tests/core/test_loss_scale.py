"""Loss scales divide gradients exactly, and skip just what is not finite."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pairwise import mainly

from sbjax.optim.loss_scale import dynamic_loss_scale, fixed_loss_scale, loss_scale, skipped_updates
from sbjax.optim.stable_adamw import stable_adamw, tensor_rms
from sbjax.optim.state_formats import (
  BFLOAT16_PAIR,
  E4M3_EXPANDED,
  E4M3_SCALED,
  compress_state,
  join_details,
)

pytestmark = pytest.mark.standard_promotion  # As optax needs.

SCALE = 65_536.0
STACKED = {"a": 0, "blocks": 1, "s": 0}
adamw = functools.partial(stable_adamw, 1e-2, b2=0.95, weight_decay=0.1, stacked=STACKED)


def draw(seed=0):
  rng = np.random.default_rng(seed)
  shapes = {"a": (3, 4), "blocks": (2, 3, 4), "s": ()}
  return {k: jnp.asarray(rng.normal(size=s).astype(np.float32)) for k, s in shapes.items()}


def scaled(tree):
  return jax.tree.map(lambda x: x * SCALE, tree)


def run(optimizer, params, *gradients):
  """The parameters after updates, and the last state."""
  state, update = jax.jit(optimizer.init)(params), jax.jit(optimizer.update)
  for g in gradients:
    updates, state = update(g, state, params)
    params = optax.apply_updates(params, updates)
  return params, state


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_near(a, b):
  """Equal but for XLA's choice of fused multiply-adds."""
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), a, b)


@pytest.mark.parametrize("scale", [fixed_loss_scale, dynamic_loss_scale])
def test_finite_gradients_give_the_inner_optimizer_s_updates(scale):
  options = {"stacked": STACKED} if scale is fixed_loss_scale else {}
  gradients = [draw(seed) for seed in (1, 2, 3)]
  expected, inner = run(adamw(), draw(), *gradients)
  actual, state = run(scale(adamw(), **options), draw(), *map(scaled, gradients))
  assert_equal(actual, expected)
  assert_equal(state.inner_state, inner)
  assert (loss_scale(state), skipped_updates(state), state.finite_steps) == (SCALE, 0, 3)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_the_fixed_scale_skips_a_tensor_alone(value):
  """Also one of a stack of layers. Others are updated as if its gradient were 0."""
  first, second = draw(1), draw(2)
  bad = second | {"a": second["a"].at[1, 1].set(value), "blocks": second["blocks"].at[0].set(value)}
  zeroed = second | {"a": 0 * second["a"], "blocks": second["blocks"].at[0].set(0)}
  clipped = optax.chain(optax.clip_by_global_norm(1.0), adamw())
  before, old = run(clipped, draw(), first)
  after, new = run(clipped, draw(), first, zeroed)
  actual, state = run(
    fixed_loss_scale(clipped, stacked=STACKED), draw(), *map(scaled, (first, bad))
  )

  def expected(new, old):
    return {"a": old["a"], "blocks": jnp.stack([old["blocks"][0], new["blocks"][1]]), "s": new["s"]}

  assert_near(actual, expected(after, before))
  adam, inner, earlier = state.inner_state[1][0], new[1][0], old[1][0]
  for name in ("mu", "nu"):
    assert_near(getattr(adam, name), expected(getattr(inner, name), getattr(earlier, name)))
  rms = tensor_rms(adam, STACKED)
  assert (rms["a"], rms["blocks"][0]) == (0, 0)
  assert_near((rms["blocks"][1], rms["s"]), (inner.rms[2], inner.rms[3]))
  assert adam.count == 2
  assert (skipped_updates(state), state.finite_steps) == (2, 0)


@pytest.mark.parametrize("params", [jnp.ones(3), jnp.ones(()), {"x": jnp.ones(())}])
def test_parameters_may_be_one_array(params):
  optimizer = fixed_loss_scale(optax.adam(0.1), 1.0)
  gradients = jax.tree.map(jnp.ones_like, params)
  infinite = jax.tree.map(lambda x: x * jnp.inf, gradients)
  actual, state = run(optimizer, params, gradients, infinite)
  expected, old = run(optax.adam(0.1), params, gradients)
  assert_equal(actual, expected)
  assert_equal(state.inner_state[0].mu, old[0].mu)
  assert state.inner_state[0].count == 2


def test_parameters_may_be_shaped_like_the_optimizer_s_state():
  """A tuple of as many arrays as a chain has states, and the labels of `multi_transform`."""
  gradients = (jnp.ones(2), jnp.ones(3))
  bad = gradients[0], gradients[1] * jnp.inf
  _, old = run(optax.adam(0.1), gradients, gradients)
  _, state = run(fixed_loss_scale(optax.adam(0.1), 1.0), gradients, gradients, bad)
  for name in ("mu", "nu"):
    moments = getattr(state.inner_state[0], name)
    assert_equal(moments[1], getattr(old[0], name)[1])
    assert np.all(moments[0] != getattr(old[0], name)[0])
  labels = {"a": "a", "b": "b"}
  each = optax.multi_transform({name: optax.adam(0.1) for name in labels}, labels)
  params = dict(zip(labels, gradients, strict=True))
  bad = params | {"b": bad[1]}
  _, state = run(fixed_loss_scale(each, 1.0), params, params, bad)
  inner = state.inner_state.inner_states
  assert [inner[name].inner_state[0].count for name in labels] == [2, 2]


def test_the_state_can_be_donated():
  optimizer, params = fixed_loss_scale(optax.sgd(1.0), 1.0), jnp.ones(2)
  state = optimizer.init(params)
  jax.jit(optimizer.update, donate_argnums=1)(params, state)


def test_a_step_keeps_the_state_s_dtypes():
  with jax.enable_x64(True):
    optimizer, params = fixed_loss_scale(optax.sgd(1.0), 1.0), jnp.ones(2, jnp.float32)
    state = optimizer.init(params)
    _, after = optimizer.update(params, state, params)
  assert [x.dtype for x in jax.tree.leaves(after)] == [x.dtype for x in jax.tree.leaves(state)]


def test_masked_parameters_stay_masked():
  mask = {"a": True, "blocks": False, "s": True}
  optimizer = fixed_loss_scale(optax.masked(optax.adam(0.1), mask), 1.0)
  bad = {"a": jnp.full((3, 4), jnp.inf), "blocks": jnp.zeros((2, 3, 4)), "s": jnp.float32(1)}
  after, state = run(optimizer, draw(), bad)
  assert_equal((after["a"], after["blocks"]), (draw()["a"], draw()["blocks"]))
  assert after["s"] != draw()["s"]
  assert_equal(state.inner_state.inner_state[0].mu["a"], jnp.zeros((3, 4)))


@pytest.mark.parametrize(
  "form", mainly([E4M3_EXPANDED], [E4M3_EXPANDED, E4M3_SCALED, BFLOAT16_PAIR])
)
def test_moments_in_8_bits_stay_as_they_are(form):
  inner = compress_state(adamw(), min_size=1, stacked=STACKED, mu=form, nu=form)
  optimizer = fixed_loss_scale(inner, 1.0, stacked=STACKED)
  _, before = run(optimizer, draw(), draw(1))
  bad = draw(2)
  bad |= {"a": bad["a"].at[0].set(jnp.nan), "blocks": bad["blocks"].at[1, 0].set(jnp.inf)}
  _, after = run(optimizer, draw(), draw(1), bad)
  for name in ("mu", "nu"):
    new, old = (getattr(join_details(state.inner_state)[0], name) for state in (after, before))
    assert_equal(new["a"], old["a"])
    for x, y in zip(*map(jax.tree.leaves, (new["blocks"], old["blocks"])), strict=True):
      np.testing.assert_array_equal(x[1], y[1])
    values, were = (jax.tree.leaves(x["blocks"])[0] for x in (new, old))
    assert np.any(values[0] != were[0])


def test_the_dynamic_scale_skips_a_step_and_adapts():
  optimizer = dynamic_loss_scale(adamw(), 8.0, factor=4.0, interval=2)
  gradients, params = draw(1), draw()
  bad = gradients | {"s": jnp.float32(jnp.nan)}
  state, seen = optimizer.init(params), []
  update = jax.jit(optimizer.update)
  for g in (gradients, bad, gradients, gradients, gradients, bad, bad):
    updates, new = update(g, state, params)
    if g is bad:
      assert_equal(new.inner_state, state.inner_state)
      assert not any(np.any(np.asarray(u)) for u in jax.tree.leaves(updates))
    state = new
    seen.append((float(loss_scale(state)), int(skipped_updates(state))))
  assert seen == [(8, 0), (2, 1), (2, 1), (8, 1), (8, 1), (2, 2), (1, 3)]


def test_an_overflow_does_not_raise_a_scale_below_one():
  optimizer = dynamic_loss_scale(optax.sgd(0.1), 0.5)
  _, state = run(optimizer, jnp.ones(2), jnp.full(2, jnp.inf))
  assert loss_scale(state) == 0.5


def test_the_dynamic_scale_stays_finite():
  optimizer = dynamic_loss_scale(optax.sgd(0.1), 2.0**126, interval=1)
  _, state = run(optimizer, jnp.ones(2), jnp.ones(2))
  assert loss_scale(state) == 2.0**126


def test_gradients_below_float16_s_least_number_survive():
  """The loss of a product in float16; its gradient is about 1e-9, and the least number is 6e-8."""

  def gradient(scale):
    def loss(w):
      y = (jnp.ones((4, 8), jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32)
      return jnp.sum(y) * 1e-9 * scale

    return jax.grad(loss)(jnp.ones((8, 8), jnp.float32))

  optimizer = fixed_loss_scale(optax.sgd(1.0))
  updates, _ = optimizer.update(gradient(SCALE), optimizer.init(jnp.ones((8, 8))))
  assert not np.any(gradient(1.0))
  np.testing.assert_allclose(updates, -4e-9, rtol=2**-10)


def test_gradients_of_16_bits_are_divided_in_float32():
  optimizer = fixed_loss_scale(optax.sgd(1.0))
  gradients = jnp.ones(3, jnp.float16)
  updates, _ = optimizer.update(gradients, optimizer.init(gradients))
  np.testing.assert_array_equal(updates, -1 / SCALE)


def test_states_without_a_scale_or_with_two():
  assert loss_scale(adamw().init(draw())) is None
  assert skipped_updates(optax.adam(1).init(draw())) is None
  outer = optax.chain(fixed_loss_scale(adamw()), optax.scale(1.0))
  assert loss_scale(outer.init(draw())) == SCALE
  twice = optax.chain(fixed_loss_scale(optax.sgd(1)), dynamic_loss_scale(optax.sgd(1)))
  with pytest.raises(ValueError, match="2 optimizers scale the loss; only one"):
    loss_scale(twice.init(draw()))


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: fixed_loss_scale(optax.sgd(1), 0), "scale=0 must be a finite number above 0"),
    (lambda: fixed_loss_scale(optax.sgd(1), np.nan), "scale=nan must be a finite number above 0"),
    (lambda: dynamic_loss_scale(optax.sgd(1), np.inf), "initial=inf must be"),
    (lambda: dynamic_loss_scale(optax.sgd(1), factor=1.0), "factor=1.0 must be .* above 1"),
    (lambda: dynamic_loss_scale(optax.sgd(1), interval=0), "interval=0 must be .* above 0"),
    (lambda: fixed_loss_scale(optax.sgd(1), 1e39), r"scale=1e\+39 must be .* float32"),
    (lambda: fixed_loss_scale(optax.sgd(1), 10**400), "must be .* above 0 in float32"),
    (lambda: fixed_loss_scale(optax.sgd(1), 1e-50), "scale=1e-50 must be .* above 0"),
    (lambda: fixed_loss_scale(optax.sgd(1), "auto"), re.escape("scale='auto' must be")),
  ],
)
def test_wrong_values_are_named(make, message):
  with pytest.raises(ValueError, match=message):
    make()


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("scale", [fixed_loss_scale, dynamic_loss_scale])
def test_all_shards_of_a_tensor_are_skipped_together(scale, check_vma):
  mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  optimizer, rows = scale(optax.sgd(1.0), 8.0), jax.sharding.PartitionSpec("d")

  def update(g):
    updates, state = optimizer.update(g, optimizer.init(g))
    return updates, state.skipped

  split = jax.shard_map(
    update,
    mesh=mesh,
    in_specs=rows,
    out_specs=(rows, jax.sharding.PartitionSpec()),
    check_vma=check_vma,
  )
  updates, skipped = jax.jit(split)(jnp.ones(8).at[0].set(jnp.inf))
  np.testing.assert_array_equal(updates, 0)
  assert skipped == 1


def test_no_tensors_at_all_are_finite():
  optimizer = dynamic_loss_scale(optax.sgd(1.0))
  assert optimizer.update({}, optimizer.init({}))[1].finite_steps == 1
