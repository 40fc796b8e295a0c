import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization, struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sbjax.optim.stable_adamw import scale_by_stable_adam, stable_adamw, tensor_rms

pytestmark = pytest.mark.standard_promotion  # As optax needs.

B1, B2, EPS, DECAY = 0.9, 0.95, 1e-6, 0.1


def debiased(b, t):
  """The paper's beta_hat at step t, from 1."""
  return b * (1 - b ** (t - 1)) / (1 - b**t)


def reference(gradients, params, rates, decayed, decay_with, b2_at=lambda t: debiased(B2, t)):
  """Algorithm 2 for one tensor in numpy float64; the parameter and the RMS after each step."""
  p = np.float64(params)
  v, u = np.zeros_like(p), np.zeros_like(p)
  history = []
  for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
    g = np.float64(g)
    b1, b2 = debiased(B1, t), b2_at(t)
    v = b1 * v + (1 - b1) * g
    u = b2 * u + (1 - b2) * g**2
    rms = np.sqrt(np.mean(g**2 / np.maximum(u, EPS**2)))
    eta = rate / max(1, rms)
    decay = (eta if decay_with == "clipped" else rate) * DECAY * decayed
    p = p - decay * p - eta * v / (np.sqrt(u) + EPS)
    history.append((p, rms))
  return history


def random_gradients(shape, steps, seed=0):
  """Gradients whose magnitude sometimes changes a hundredfold, so that RMS exceeds 1 and 2."""
  rng = np.random.default_rng(seed)
  sizes = np.exp(rng.choice([0.0, 2.0, 4.6], size=steps, p=[0.7, 0.2, 0.1]))
  return [np.float32(size * rng.normal(size=shape)) for size in sizes]


def train(tx, params, gradients):
  """The parameters and the state after each of `gradients`, a list of trees."""
  state = init(tx, params)
  for g in gradients:
    params, state = step(tx, g, state, params)
    yield params, state


@functools.partial(jax.jit, static_argnums=0)
def init(tx, params):
  return tx.init(params)


@functools.partial(jax.jit, static_argnums=0)
def step(tx, g, state, params):
  updates, state = tx.update(g, state, params)
  return optax.apply_updates(params, updates), state


def trees(leaves):
  """A dict of lists as a list of dicts."""
  return [dict(zip(leaves, values, strict=True)) for values in zip(*leaves.values(), strict=True)]


@pytest.mark.parametrize("decay_with", ["clipped", "plain"])
def test_fifty_steps_equal_the_algorithm_in_numpy(decay_with):
  steps = 50
  schedule = optax.cosine_decay_schedule(0.02, steps)
  rates = [float(schedule(t)) for t in range(steps)]
  rng = np.random.default_rng(1)
  params = {
    "scalar": jnp.float32(0.7),
    "matrix": jnp.asarray(rng.normal(size=(8, 5)), jnp.float32),
    "not_decayed": jnp.asarray(rng.normal(size=(6,)), jnp.float32),
    "no_gradient": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32),
  }
  gradients = {k: random_gradients(p.shape, steps, len(k)) for k, p in params.items()}
  gradients["no_gradient"] = [np.zeros((3, 2), np.float32)] * steps
  mask = {k: k != "not_decayed" for k in params}
  tx = stable_adamw(schedule, B1, B2, EPS, None, DECAY, mask, decay_with=decay_with)

  expected = {k: reference(gradients[k], params[k], rates, mask[k], decay_with) for k in params}
  for t, (got, state) in enumerate(train(tx, params, trees(gradients))):
    for k, rms in tensor_rms(state).items():
      np.testing.assert_allclose(got[k], expected[k][t][0], rtol=2e-5, atol=1e-6, err_msg=k)
      np.testing.assert_allclose(rms, expected[k][t][1], rtol=1e-5, err_msg=k)
  assert max(rms for _, rms in expected["matrix"]) > 2  # The update was clipped.
  assert {rms for _, rms in expected["no_gradient"]} == {0}


def test_bfloat16_is_computed_in_float32_and_rounded_once():
  gradients = [jnp.asarray(g, jnp.bfloat16) for g in random_gradients((64,), 50)]
  params = jnp.linspace(-2, 2, 64).astype(jnp.bfloat16)
  tx = stable_adamw(1.0, B1, B2, EPS, jnp.float32, DECAY)
  state, update = tx.init(params), jax.jit(tx.update)
  before = np.zeros(64)
  for g, (p, rms) in zip(
    gradients, reference(gradients, before, [1.0] * 50, False, "clipped"), strict=True
  ):
    updates, state = update(g, state, params)
    assert updates.dtype == jnp.bfloat16
    np.testing.assert_allclose(state[0].rms, rms, rtol=1e-5)
    expected = p - before - DECAY * np.float64(params) / max(1, rms)
    np.testing.assert_allclose(np.float64(updates), expected, rtol=2**-8, atol=1e-5)  # Half a step.
    before = p


def power(c):
  """AdaFactor's schedule `1 - t^-c`, of the number of updates before step t."""
  return lambda count: 1 - (count + 1.0) ** -c


@pytest.mark.parametrize("c", [0.45, 0.65, 0.8])
def test_a_schedule_of_b2_is_used_without_debiasing(c):
  steps = 50
  gradients = random_gradients((8, 5), steps)
  params = jnp.asarray(np.random.default_rng(6).normal(size=(8, 5)), jnp.float32)
  tx = stable_adamw(0.02, B1, power(c), EPS, weight_decay=DECAY)
  rates = [0.02] * steps
  expected = reference(gradients, params, rates, True, "clipped", lambda t: 1 - t**-c)
  for (got, state), (p, rms) in zip(train(tx, params, gradients), expected, strict=True):
    np.testing.assert_allclose(got, p, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(state[0].rms, rms, rtol=1e-5)
  assert max(rms for _, rms in expected) > 1.5  # The update was clipped.


def test_a_number_is_the_schedule_of_its_debiased_values():
  gradients, params = random_gradients((6, 4), 30), jnp.ones((6, 4))
  number = stable_adamw(0.1, b2=B2, weight_decay=DECAY)
  schedule = stable_adamw(0.1, b2=lambda n: debiased(B2, n + 1.0), weight_decay=DECAY)
  for (a, _), (b, _) in zip(
    train(number, params, gradients), train(schedule, params, gradients), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_the_second_moment_of_a_number_has_the_bits_of_the_debiased_average():
  nu, tx = jnp.zeros((6, 4)), scale_by_stable_adam(b2=B2)
  state = tx.init(nu)
  for t, g in enumerate(map(jnp.asarray, random_gradients((6, 4), 20)), start=1):
    _, state = tx.update(g, state)
    b = jnp.float32(B2)
    weight = (1 - b) / -jnp.expm1(jnp.float32(t) * jnp.log(b))
    nu = (1 - weight) * nu + weight * g**2
    np.testing.assert_array_equal(state.nu, nu)


def test_an_injected_schedule_of_b2_is_static():
  gradients, params = random_gradients((3, 2), 5), jnp.ones((3, 2))
  make = optax.inject_hyperparams(stable_adamw, static_args=("b2",))
  *_, (a, _) = train(make(0.1, b2=power(0.5)), params, gradients)
  *_, (b, _) = train(stable_adamw(0.1, b2=power(0.5)), params, gradients)
  np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("mu_dtype", [None, jnp.bfloat16, jnp.float32])
def test_mu_has_mu_dtype_or_the_parameter_s_and_nu_is_float32(mu_dtype):
  params = {"wide": jnp.ones(3), "narrow": jnp.ones(3, jnp.bfloat16)}
  *_, (_, state) = train(scale_by_stable_adam(mu_dtype=mu_dtype), params, [params] * 2)
  assert {k: m.dtype for k, m in state.mu.items()} == {
    "wide": mu_dtype or jnp.float32,
    "narrow": mu_dtype or jnp.bfloat16,
  }
  assert {n.dtype for n in jax.tree.leaves((state.nu, state.rms))} == {np.dtype("float32")}
  # Dtypes equal those of the initial state, so that a scan can carry it.
  start = scale_by_stable_adam(mu_dtype=mu_dtype).init(params)
  assert jax.tree.map(jnp.result_type, state) == jax.tree.map(jnp.result_type, start)


@pytest.mark.parametrize("decay_with", ["clipped", "plain"])
def test_without_clipping_it_equals_adamw(decay_with):
  # Gradients shrink: the second moment always exceeds their squares, so RMS stays below 1.
  shrinking = [g / 1.1**t for t, g in enumerate([random_gradients((16, 4), 1)[0]] * 50)]
  growing = random_gradients((16, 4), 50)
  params = jnp.asarray(np.random.default_rng(2).normal(size=(16, 4)), jnp.float32)
  adamw = optax.adamw(0.01, B1, B2, EPS, weight_decay=DECAY)
  for gradients, threshold in [(shrinking, 1.0), (growing, np.inf)]:
    ours = stable_adamw(
      0.01, B1, B2, EPS, None, DECAY, decay_with=decay_with, clip_threshold=threshold
    )
    for (got, _), (expected, _) in zip(
      train(ours, params, gradients), train(adamw, params, gradients), strict=True
    ):
      np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("b2", [0.5, 0.9, 0.99, 0.999])
def test_rms_is_one_at_the_first_step_and_bounded_by_b2_ever_after(b2):
  gradients = [1e4**t * np.ones(4, np.float32) for t in (0, 0, 0, 0, 1, 2)]
  rms = [
    float(state.rms[0]) for _, state in train(scale_by_stable_adam(b2=b2), jnp.zeros(4), gradients)
  ]
  assert rms[0] == pytest.approx(1, abs=1e-6)
  assert max(rms) <= (1 - b2) ** -0.5 * (1 + 1e-5)
  assert max(rms) > 1.2


def test_scaling_gradients_by_a_power_of_two_keeps_the_updates():
  gradients = random_gradients((7, 3), 10)
  tx = stable_adamw(0.1, eps=1e-30, weight_decay=0.0)
  updates = [
    [p for p, _ in train(tx, jnp.zeros((7, 3)), [scale * g for g in gradients])]
    for scale in (np.float32(1), np.float32(2**20), np.float32(2**-20))
  ]
  np.testing.assert_array_equal(updates[1], updates[0])
  np.testing.assert_array_equal(updates[2], updates[0])


def test_a_spike_after_small_gradients_moves_less_than_with_adam():
  rng = np.random.default_rng(3)
  gradients = [np.float32(s * rng.normal(size=256)) for s in [1e-3] * 100 + [1.0]]

  def last_move(tx):
    *_, (before, _), (after, state) = train(tx, jnp.zeros(256), gradients)
    return np.sqrt(np.mean((after - before) ** 2)), state

  ours, state = last_move(stable_adamw(1.0, b1=0.0, weight_decay=0.0))
  adam, _ = last_move(optax.adam(1.0, b1=0.0, b2=0.99, eps=1e-6))
  rms = float(tensor_rms(state)[""])
  assert 5 < rms < 10
  assert ours <= 1 + 1e-5  # The root mean square of an update is never above the rate.
  assert adam / ours == pytest.approx(rms, rel=1e-3)


def test_stacked_layers_are_updated_as_separate_tensors():
  layers = [random_gradients((4, 3), 30, seed) for seed in range(3)]
  params = jnp.asarray(np.random.default_rng(4).normal(size=(3, 4, 3)), jnp.float32)
  apart = {str(i): g for i, g in enumerate(layers)}
  for stacked in (1, {"w": 1}, lambda tree: jax.tree.map(lambda p: p.ndim - 2, tree)):
    one = stable_adamw(0.1, weight_decay=DECAY, stacked=stacked)
    many = stable_adamw(0.1, weight_decay=DECAY)
    for (a, a_state), (b, b_state) in zip(
      train(one, {"w": params}, [{"w": np.stack(g)} for g in zip(*layers, strict=True)]),
      train(many, {str(i): params[i] for i in range(3)}, trees(apart)),
      strict=True,
    ):
      np.testing.assert_allclose(a["w"], list(b.values()), rtol=1e-6)
      rms = tensor_rms(a_state, stacked)["w"]
      np.testing.assert_allclose(rms, list(tensor_rms(b_state).values()), rtol=1e-6)
  assert len(np.unique(rms)) == 3


def test_sharded_tensors_have_the_rms_of_the_whole_tensor():
  mesh = Mesh(np.array(jax.devices()[:8]), ("fsdp",))
  gradients = random_gradients((16, 4), 10)
  params = jnp.asarray(np.random.default_rng(5).normal(size=(16, 4)), jnp.float32)
  tx = stable_adamw(0.1, weight_decay=DECAY)
  rows = NamedSharding(mesh, PartitionSpec("fsdp"))
  sharded = train(tx, jax.device_put(params, rows), [jax.device_put(g, rows) for g in gradients])
  for (a, a_state), (b, b_state) in zip(sharded, train(tx, params, gradients), strict=True):
    assert a.sharding.is_equivalent_to(rows, 2)
    np.testing.assert_allclose(a, b, rtol=1e-5)
    np.testing.assert_allclose(a_state[0].rms, b_state[0].rms, rtol=1e-6)


def test_injected_hyperparameters_are_used():
  params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
  gradients = [{"w": g, "b": g[0]} for g in random_gradients((3, 2), 5)]

  def mask(tree):
    return jax.tree.map(lambda p: p.ndim > 1, tree)

  make = optax.inject_hyperparams(stable_adamw, static_args=("mask",))
  tx = make(optax.linear_schedule(0.1, 0.2, 5), weight_decay=DECAY, mask=mask)
  plain = stable_adamw(optax.linear_schedule(0.1, 0.2, 5), weight_decay=DECAY, mask=mask)
  *_, (a, state) = train(tx, params, gradients)
  *_, (b, _) = train(plain, params, gradients)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), a, b)
  assert state.hyperparams["learning_rate"] == pytest.approx(0.18)
  assert set(tensor_rms(state)) == {"w", "b"}


def test_injected_hyperparameters_of_64_bits_keep_the_state_s_dtypes():
  with jax.enable_x64(True):
    optimizer = optax.inject_hyperparams(stable_adamw)(1e-3)
    params = {"w": jnp.ones(3, jnp.float64)}
    state = jax.eval_shape(optimizer.init, params)
    _, after = jax.eval_shape(optimizer.update, params, state, params)
  assert [x.dtype for x in jax.tree.leaves(after)] == [x.dtype for x in jax.tree.leaves(state)]


def test_a_tensor_without_numbers_has_no_rms_to_alarm():
  params = {"w": jnp.ones(3), "empty": jnp.zeros((0, 3))}
  optimizer = stable_adamw(1e-3)
  updates, state = jax.jit(optimizer.update)(params, init(optimizer, params), params)
  assert tensor_rms(state) == {"w": 1.0, "empty": 0.0} and updates["empty"].shape == (0, 3)


def test_the_weight_decay_may_follow_a_schedule():
  params = jnp.ones(4)
  schedule = optax.linear_schedule(0.0, 1.0, 4)
  zeros = [np.zeros(4, np.float32)] * 5
  values = [float(p[0]) for p, _ in train(stable_adamw(0.1, weight_decay=schedule), params, zeros)]
  np.testing.assert_allclose(
    values, np.cumprod([1 - 0.1 * float(schedule(t)) for t in range(5)]), rtol=1e-6
  )


def test_it_composes_with_multi_transform_masks_and_missing_leaves():
  params = {"a": jnp.ones((2, 2)), "b": {"c": jnp.ones(3), "frozen": jnp.ones(3)}, "none": None}
  labels = {"a": "x", "b": {"c": "y", "frozen": "z"}, "none": "x"}
  tx = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.multi_transform(
      {
        "x": stable_adamw(0.1, stacked=1, mask={"a": True, "b": False, "none": False}),
        "y": stable_adamw(0.2, stacked=lambda tree: jax.tree.map(lambda p: 0, tree)),
        "z": optax.set_to_zero(),
      },
      labels,
    ),
  )
  stacked = {"a": 1, "b": 0, "none": 0}
  gradients = jax.tree.map(jnp.ones_like, params)
  state = jax.jit(tx.init)(params)
  updates, state = jax.jit(tx.update)(gradients, state, params, value=1.0)
  np.testing.assert_allclose(updates["a"], -0.1, rtol=1e-3)
  np.testing.assert_allclose(updates["b"]["c"], -0.2, rtol=1e-3)
  np.testing.assert_array_equal(updates["b"]["frozen"], 0)
  assert updates["none"] is None
  assert {k: v.shape for k, v in tensor_rms(state, stacked).items()} == {"a": (2,), "b/c": ()}
  assert tensor_rms(optax.adamw(1.0).init(params)) == {}


def test_a_none_gradient_gives_a_none_update():
  params = {"a": jnp.ones(2), "b": jnp.ones(2)}
  tx = stable_adamw(0.1)
  updates, _ = jax.jit(tx.update)({"a": jnp.ones(2), "b": None}, init(tx, params), params)
  assert updates["b"] is None


def test_the_state_survives_serialization():
  params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
  tx = stable_adamw(0.1)
  *_, (_, state) = train(tx, params, [params] * 3)
  restored = serialization.from_bytes(tx.init(params), serialization.to_bytes(state))
  jax.tree.map(np.testing.assert_array_equal, restored, state)
  assert jax.tree.structure(restored) == jax.tree.structure(state)


def test_a_nan_gradient_reaches_the_update_and_the_rms():
  gradient = jnp.asarray([1.0, np.nan, 1.0])
  tx = scale_by_stable_adam()
  updates, state = jax.jit(tx.update)(gradient, init(tx, gradient))
  assert np.isnan(updates).all() and np.isnan(state.rms).all()


def test_errors_name_the_right_value():
  with pytest.raises(ValueError, match=r"'paper'.*'clipped' or 'plain'"):
    stable_adamw(0.1, decay_with="paper")
  with pytest.raises(ValueError, match=r"b2=1.0 must be .* below 1 in float32, or a schedule"):
    stable_adamw(0.1, b2=1.0)
  with pytest.raises(ValueError, match=r"b2=0.99999999 must be .* below 1 in float32"):
    stable_adamw(0.1, b2=0.99999999)
  with pytest.raises(
    ValueError, match=r"b1=<function .* must be a number, from 0 to below 1 in float32\."
  ):
    stable_adamw(0.1, b1=power(0.5))
  tx = stable_adamw(0.1, mask=lambda tree: jax.tree.map(lambda p: p.ndim > 1, tree))
  with pytest.raises(ValueError, match="needs the parameters"):
    tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


def on_four(function, *arrays, **options):
  """The results of a function of shards of rows; a device's arrays are beside the others'."""
  mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  rows = PartitionSpec("d")
  run = jax.shard_map(function, mesh=mesh, in_specs=rows, out_specs=rows, **options)
  return jax.jit(run)(*arrays)


def spiked():
  """Gradients of two steps; the second has a spike in the first of four shards."""
  first = jnp.ones((8, 4))
  return first, first.at[:2].set(50.0)


def second_update(optimizer, first, second):
  params = jnp.zeros_like(first)
  _, state = optimizer.update(first, optimizer.init(params), params)
  updates, state = optimizer.update(second, state, params)
  return updates, state[0].rms


alone = jax.jit(functools.partial(second_update, stable_adamw(1.0)))


@pytest.mark.parametrize(
  ("axis_name", "check_vma"), [(None, True), (None, False), ("d", True), (("d",), False)]
)
def test_shards_have_the_rms_of_the_whole_tensor(axis_name, check_vma):
  optimizer = stable_adamw(1.0, axis_name=axis_name)
  whole, rms = alone(*spiked())

  def update(*gradients):
    updates, rms = second_update(optimizer, *gradients)
    return updates, jax.lax.pcast(rms, "d", to="varying") if check_vma else rms

  shards, each = on_four(update, *spiked(), check_vma=check_vma)
  assert rms[0] > 1.1
  np.testing.assert_allclose(shards, whole, rtol=1e-6)
  np.testing.assert_allclose(each, np.repeat(rms, 4), rtol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_device_s_own_tensors_have_an_rms_each_with_no_axis_name(check_vma):
  optimizer = stable_adamw(1.0, axis_name=())
  updates, rms = on_four(
    functools.partial(second_update, optimizer), *spiked(), check_vma=check_vma
  )
  for i, (a, b) in enumerate(zip(*(np.split(g, 4) for g in spiked()), strict=True)):
    expected, own = alone(a, b)
    np.testing.assert_allclose(np.split(updates, 4)[i], expected, rtol=1e-6)
    np.testing.assert_allclose(rms[i], own[0], rtol=1e-6)


def test_an_axis_name_outside_a_shard_map_is_refused():
  optimizer, params = stable_adamw(0.1, axis_name="d"), jnp.ones(2)
  with pytest.raises(ValueError, match=r"'d' is no mesh axis here; .* within a jax.shard_map"):
    optimizer.update(params, optimizer.init(params), params)


def test_tensor_rms_wants_the_optimizer_s_own_stacked():
  params = {"w": jnp.ones((3, 2))}
  state = stable_adamw(0.1, stacked=1).init(params)
  assert tensor_rms(state, 1)["w"].shape == (3,)
  with pytest.raises(ValueError, match=r"each of 3 tensors, and stacked=None makes 1 .* own"):
    tensor_rms(state)


@struct.dataclass
class CallableAxes:
  w: int

  def __call__(self, x):
    raise AssertionError("A tree was called.")


def test_a_tree_of_axes_may_be_callable():
  params = CallableAxes(jnp.ones((3, 2)))
  state = stable_adamw(0.1, stacked=CallableAxes(1)).init(params)
  assert state[0].rms.shape == (3,)


def test_a_state_without_tensors_has_no_array_that_orbax_refuses():
  assert min(x.size for x in jax.tree.leaves(stable_adamw(0.1).init({}))) == 1
