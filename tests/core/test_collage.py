"""Parameters in bfloat16 with their residuals train like float32, and EDQ measures what is lost."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax_case import bitwise
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pairwise import mainly

from sbjax.optim.collage import (
  CompensatedState,
  compensated,
  descent_quality,
  split_parameters,
  summed_parameters,
)
from sbjax.optim.loss_scale import fixed_loss_scale
from sbjax.optim.stable_adamw import stable_adamw, tensor_rms
from sbjax.optim.state_formats import BFLOAT16, BFLOAT16_PAIR, compress_state

pytestmark = pytest.mark.standard_promotion  # As optax needs.

LIGHT = {"mu": BFLOAT16, "nu": BFLOAT16}
PLUS = {"mu": BFLOAT16, "nu": BFLOAT16_PAIR}
RATE, DECAY, SCALE = 1e-4, 0.1, 0.05
RESIDUALS = [None, True, "exact"]


def draw(shape, seed, scale=1.0):
  return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


@functools.cache
def parameters(dtype=jnp.bfloat16):
  """A matrix in bfloat16, or rounded to it, and a bias in float32."""
  w = jnp.asarray(draw((64, 96), 0, SCALE)).astype(jnp.bfloat16).astype(dtype)
  return {"w": w, "b": jnp.asarray(draw((96,), 1))}


@functools.cache
def gradients(step):
  """A gradient that stays, and noise."""
  return jax.tree.map(
    lambda p: jnp.asarray(draw(p.shape, 2) + draw(p.shape, 3 + step)), parameters(jnp.float32)
  )


def train(optimizer, params, steps, state=None, first=0):
  """The parameters and the state after steps."""
  state = optimizer.init(params) if state is None else state
  update = bitwise(optimizer.update)
  for t in range(first, first + steps):
    updates, state = update(gradients(t), state, params)
    params = optax.apply_updates(params, updates)
  return params, state


def step(optimizer, params, gradients, state=None):
  """(new parameters, state) after one update."""
  state = optimizer.init(params) if state is None else state
  updates, state = jax.jit(optimizer.update)(gradients, state, params)
  return optax.apply_updates(params, updates), state


def assert_equal(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True):
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def adamw(b2=0.95):
  return optax.adamw(RATE, b2=b2, weight_decay=DECAY)


def adamw_in_float64(b2, steps, b1=0.9, eps=1e-8):
  """w after steps of AdamW (Loshchilov and Hutter 2019), in numpy."""
  p = np.float64(parameters()["w"])
  m = v = np.zeros_like(p)
  for t in range(1, steps + 1):
    g = np.float64(gradients(t - 1)["w"])
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
    direction = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
    p = p - RATE * (direction + DECAY * p)
  return p


def distance(b2, residual, steps=400, **formats):
  """How far w is from float64's, over how far float64's moved."""
  inner = compress_state(adamw(b2), min_size=0, **formats)
  params, state = train(compensated(inner, residual), parameters(), steps)
  ours, exact = summed_parameters(params, state)["w"], adamw_in_float64(b2, steps)
  return np.linalg.norm(ours - exact) / np.linalg.norm(exact - np.float64(parameters()["w"]))


# From float64 over the movement, measured and rounded up; a float32 AdamW is 2e-6 away.
DISTANCES = {
  ("light", 0.95): 0.0015,
  ("light", 0.999): 0.006,  # The second moment stands still in bfloat16.
  ("plus", 0.95): 0.0015,
  ("plus", 0.999): 0.0015,
}


@pytest.mark.parametrize(("name", "b2"), mainly([("light", 0.95), ("plus", 0.999)], DISTANCES))
def test_a_bfloat16_pair_trains_like_float64(name, b2):
  formats = LIGHT if name == "light" else PLUS
  assert distance(b2, True, **formats) < DISTANCES[name, b2]


def test_without_a_residual_most_of_the_movement_is_lost():
  assert distance(0.95, None, **LIGHT) > 0.5


def test_exact_parameters_equal_float32_training_bit_for_bit():
  optimizer = stable_adamw(RATE, b2=0.95, weight_decay=DECAY)
  plain, plain_state = train(optimizer, parameters(jnp.float32), 40)
  ours, state = train(compensated(optimizer, "exact"), parameters(), 40)
  assert_equal(summed_parameters(ours, state), plain)
  assert_equal(state.inner, plain_state)
  assert ours["w"].dtype == jnp.bfloat16 and state.residual["w"].dtype == jnp.int16


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("residual", RESIDUALS)
def test_applied_updates_give_the_rounded_total_and_the_residual_is_the_rest(residual, seed):
  """The reference is numpy with bfloat16 of ml_dtypes. Updates are far smaller to far larger."""
  rng = np.random.default_rng(seed)
  size = 4096
  old = np.float32(rng.normal(size=size) * np.exp2(rng.uniform(-30, 30, size)))
  old = old.astype(ml_dtypes.bfloat16)
  d = np.float32(rng.normal(size=size) * np.exp2(rng.uniform(-40, 40, size)))
  optimizer = compensated(optax.identity(), residual)
  new, state = step(optimizer, jnp.asarray(old), jnp.asarray(d))
  total = old.astype(np.float32) + d
  high = total.astype(ml_dtypes.bfloat16)
  rest = total - high.astype(np.float32)
  if residual == "exact":  # Of two nearest bfloat16 it may take the other one.
    ties = (total.view(np.int32) & 0xFFFF) == 0x8000
    np.testing.assert_array_equal(new[~ties], high[~ties])
    assert_equal(summed_parameters(new, state), total)
    return
  np.testing.assert_array_equal(new, high)
  if residual is None:
    assert state.residual is None
  else:
    np.testing.assert_array_equal(state.residual, rest.astype(ml_dtypes.bfloat16))


def test_a_bfloat16_and_an_int16_hold_every_normal_float32():
  bits = np.random.default_rng(0).integers(0, 2**32, 2_000_000, dtype=np.uint32)
  bits[:4] = 0x3F808000, 0x3F818000, 0xBF808000, 0x7F7F7FFF  # Ties; the largest that stays finite.
  x = bits.view(np.float32)
  x = x[np.isfinite(x) & (np.abs(x) >= np.finfo(np.float32).tiny) & (np.abs(x) < 3.38e38)]
  params = jnp.zeros(x.shape, jnp.bfloat16)
  new, state = step(compensated(optax.identity(), "exact"), params, jnp.asarray(x))
  assert state.residual.dtype == jnp.int16
  np.testing.assert_array_equal(np.asarray(summed_parameters(new, state)), x)


def test_a_pair_holds_16_bits():
  x = jnp.asarray(draw((100_000,), 0))
  new, state = step(compensated(optax.identity()), jnp.zeros(x.shape, jnp.bfloat16), x)
  error = np.abs(np.float64(summed_parameters(new, state)) - np.float64(x))
  assert (error <= 2.0**-17 * np.abs(x)).all() and error.max() > 0


@pytest.mark.parametrize(("residual", "bits"), [(True, 16), ("exact", 24), (None, 8)])
def test_split_parameters_keep_what_a_cast_loses(residual, bits):
  w = jnp.float32([1 + 2**-8, -3 - 3 * 2**-7, *np.random.default_rng(0).normal(size=4096)])  # Ties.
  values = {"w": w, "b": w[2:]}
  params = {**values, "w": w.astype(jnp.bfloat16)}
  optimizer = optax.masked(compensated(optax.sgd(1e-3), residual), {"w": True, "b": True})
  new, state = split_parameters(values, params, optimizer.init(params))
  assert {k: p.dtype for k, p in new.items()} == {k: p.dtype for k, p in params.items()}
  summed = jax.tree.map(np.float64, summed_parameters(new, state))
  np.testing.assert_array_equal(summed["b"], values["b"])
  np.testing.assert_allclose(summed["w"], np.float64(w), rtol=0 if bits == 24 else 2.0**-bits)


@pytest.mark.parametrize("residual", RESIDUALS)
def test_rounding_stays_within_a_jitted_loop(residual):
  """XLA may drop a cast to bfloat16 and back, which would keep what must be lost."""
  optimizer, params = compensated(optax.sgd(1e-3), residual), jnp.ones(8, jnp.bfloat16)

  def five(params, state):
    for _ in range(5):
      updates, state = optimizer.update(jnp.ones(8), state, params)
      params = optax.apply_updates(params, updates)
    return params, state

  apart = params, optimizer.init(params)
  for _ in range(5):
    apart = step(optimizer, apart[0], jnp.ones(8), apart[1])
  assert_equal(jax.jit(five)(params, optimizer.init(params)), apart)
  assert bool(np.all(apart[0] == 1)) == (residual is None)


def edq_in_numpy(d, before, after):
  d, change = np.float64(d), np.float64(after) - np.float64(before)
  return np.sum(d * change) / np.sum(d * d), np.mean((d != 0) & (change == 0))


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0])
def test_edq_and_lost_equal_numpy_s(residual, size):
  params = jnp.asarray(draw((64, 128), 0)).astype(jnp.bfloat16)
  d = jnp.asarray(draw((64, 128), 1, size)).at[:8].set(0)
  optimizer = compensated(optax.identity(), residual, measure=True)
  new, state = step(optimizer, params, d)
  found = descent_quality((state, optax.EmptyState()))
  edq, lost = edq_in_numpy(d, params, summed_parameters(new, state))
  np.testing.assert_allclose(found["edq"], edq, rtol=1e-4)
  np.testing.assert_allclose(found["lost"], lost, rtol=1e-6)


def test_edq_is_one_where_nothing_is_lost_and_falls_without_a_residual():
  """Steps of 1e-4 at weights of 0.05, whose rounding step is 1e-4 or 2e-4."""
  edq = {}
  for residual in RESIDUALS:
    _, state = train(compensated(adamw(), residual, measure=True), parameters(), 20)
    edq[residual] = float(descent_quality(state)["edq"])
  assert edq["exact"] == pytest.approx(1, abs=1e-4)
  assert edq[True] == pytest.approx(1, abs=1e-2)
  assert edq[None] < 0.8


def test_before_the_first_update_and_with_an_update_of_zeros_nothing_is_lost():
  optimizer, params = compensated(optax.sgd(0.1), None, measure=True), parameters()
  state = optimizer.init(params)
  assert descent_quality(state) == {"edq": 1, "lost": 0}
  _, state = step(optimizer, params, jax.tree.map(jnp.zeros_like, params), state)
  assert descent_quality(state) == {"edq": 1, "lost": 0}


def test_descent_quality_is_empty_unless_measured_and_of_one_optimizer():
  params = parameters()
  assert descent_quality(compensated(adamw()).init(params)) == {}
  assert descent_quality(adamw().init(params)) == {}
  one = compensated(adamw(), measure=True)
  labels = {"w": "a", "b": "a"}
  inside = optax.chain(optax.masked(optax.multi_transform({"a": one}, labels), True))
  assert descent_quality(inside.init(params)).keys() == {"edq", "lost"}
  with pytest.raises(ValueError, match="2 optimizers measure EDQ; only one may"):
    descent_quality((one.init(params), one.init(params)))


@pytest.mark.parametrize("residual", RESIDUALS)
def test_float32_parameters_train_as_without(residual):
  params, state = train(compensated(adamw(), residual), parameters(), 5)
  plain, _ = train(adamw(), parameters(jnp.float32), 5)
  np.testing.assert_array_equal(params["b"], plain["b"])
  assert residual is None or not np.any(state.residual["b"])


def test_the_inner_optimizer_sees_float32_sums_and_gradients():
  seen = []

  def update(updates, state, params):
    seen.append((updates, params))
    return jax.tree.map(jnp.zeros_like, updates), state

  spy = optax.GradientTransformation(lambda params: seen.append(params) or (), update)
  optimizer, params = compensated(spy), {"w": jnp.ones(2, jnp.bfloat16)}
  state = optimizer.init(params)._replace(residual={"w": jnp.full(2, 2.0**-12, jnp.bfloat16)})
  optimizer.update(params, state, params)
  start, (gradient, value) = seen
  assert {x["w"].dtype for x in (start, gradient, value)} == {jnp.dtype(jnp.float32)}
  np.testing.assert_array_equal(value["w"], 1 + 2.0**-12)


def test_compress_state_works_inside_and_outside():
  inside = compensated(compress_state(adamw(), min_size=0, **PLUS))
  outside = compress_state(compensated(adamw()), min_size=0, **PLUS)
  (ours, state), (theirs, other) = (train(o, parameters(), 4) for o in (inside, outside))
  assert_equal(ours, theirs)
  assert_equal(state._replace(inner=state.inner.inner_state), other.inner_state)


def test_a_choice_of_collage_takes_8_or_10_bytes_with_the_parameters():
  params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
  for formats, expected in ((LIGHT, 8), (PLUS, 10), ({}, 12)):
    optimizer = compensated(compress_state(stable_adamw(RATE), **formats))
    leaves = jax.tree.leaves((params, optimizer.init(params)))
    held = sum(x.nbytes for x in leaves if x.ndim > 1)
    assert held == expected * 64 * 128


def test_clipping_and_rms_are_those_of_the_inner_optimizer():
  inner = optax.chain(optax.clip_by_global_norm(0.1), stable_adamw(RATE, weight_decay=DECAY))
  ours, state = train(compensated(inner, "exact"), parameters(), 4)
  plain, expected = train(inner, parameters(jnp.float32), 4)
  np.testing.assert_array_equal(ours["b"], plain["b"])
  assert tensor_rms(state) == tensor_rms(expected) and set(tensor_rms(state)) == {"w", "b"}


@pytest.mark.parametrize("residual", RESIDUALS)
def test_masked_parameters_stay_as_they_are(residual):
  params = parameters() | {"still": jnp.ones((4, 4), jnp.bfloat16)}
  mask = {"w": True, "b": True, "still": False}
  inner = compensated(adamw(), residual, measure=True)
  freeze = optax.masked(optax.set_to_zero(), jax.tree.map(lambda yes: not yes, mask))
  optimizer = optax.chain(optax.masked(inner, mask), freeze)
  new, state = step(optimizer, params, jax.tree.map(jnp.ones_like, params))
  apart, own = step(inner, parameters(), jax.tree.map(jnp.ones_like, parameters()))
  assert_equal(new, apart | {"still": params["still"]})
  assert_equal(descent_quality(state), descent_quality(own))
  summed = summed_parameters(new, state)
  assert_equal({k: summed[k] for k in ("w", "b")}, summed_parameters(apart, own))


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_loss_scale_skips_a_tensor_with_its_residual(residual, value):
  optimizer = fixed_loss_scale(compensated(adamw(), residual), 1.0)
  params, before = train(optimizer, parameters(), 3)
  bad = gradients(3) | {"w": gradients(3)["w"].at[1, 2].set(value)}
  after, state = step(optimizer, params, bad, before)
  np.testing.assert_array_equal(after["w"], params["w"])
  if residual:
    assert_equal(state.inner_state.residual["w"], before.inner_state.residual["w"])
  assert np.any(after["b"] != params["b"]) and state.skipped == 1
  again, _ = step(optimizer, after, gradients(4), state)
  assert np.isfinite(np.float32(again["w"])).all()


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_visible(residual, bad):
  optimizer = compensated(optax.sgd(1.0), residual, measure=True)
  params, state = step(optimizer, jnp.ones(8, jnp.bfloat16), jnp.ones(8).at[3].set(bad))
  for _ in range(2):
    finite = np.isfinite(np.float32(params))
    assert not finite[3] and finite.sum() == 7
    assert not np.isfinite(descent_quality(state)["edq"])
    assert not np.isfinite(summed_parameters(params, state)[3])
    params, state = step(optimizer, params, jnp.ones(8), state)


def test_a_nan_with_any_bits_stays_nan():
  bits = np.uint32([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC08000, 0xFF80FFFF])
  x = jnp.asarray(bits.view(np.float32))
  params, state = step(compensated(optax.identity(), "exact"), jnp.zeros(5, jnp.bfloat16), x)
  assert np.isnan(np.float32(params)).all() and not np.any(state.residual)


@pytest.mark.parametrize("residual", mainly([True], RESIDUALS))
def test_a_sharded_state_has_the_same_bits(residual):
  mesh = Mesh(np.array(jax.devices()[:8]), ("fsdp",))
  specs = {"w": PartitionSpec("fsdp"), "b": PartitionSpec()}
  place = functools.partial(jax.tree.map, lambda x, s: jax.device_put(x, NamedSharding(mesh, s)))
  optimizer = compensated(compress_state(adamw(), min_size=0, **LIGHT), residual)
  params = parameters()
  state, split = optimizer.init(params), jax.jit(optimizer.init)(place(params, specs))
  split_params = place(params, specs)
  for t in range(3):
    params, state = step(optimizer, params, gradients(t), state)
    split_params, split = step(optimizer, split_params, place(gradients(t), specs), split)
  assert_equal((split_params, split), (params, state))
  if residual is not None:
    assert split.residual["w"].sharding.is_equivalent_to(NamedSharding(mesh, specs["w"]), 2)


def test_a_run_goes_on_with_the_same_bits():
  optimizer = compensated(compress_state(adamw(), min_size=0, **PLUS), measure=True)
  whole = train(optimizer, parameters(), 6)
  params, state = jax.device_get(train(optimizer, parameters(), 3))
  assert_equal(train(optimizer, params, 3, state, first=3), whole)


def test_a_donated_state_is_updated_in_place():
  optimizer = compensated(compress_state(stable_adamw(RATE), min_size=0, **LIGHT))
  params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
  state = optimizer.init(params)
  assert isinstance(state, CompensatedState)

  def update(gradients, state, params):
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  compiled = jax.jit(update, donate_argnums=(1, 2)).lower(params, state, params).compile()
  in_place = compiled.memory_analysis().alias_size_in_bytes
  assert in_place >= 8 * 64 * 128


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: compensated(adamw(), False), "residual=False must be True, 'exact' or None"),
    (lambda: compensated(adamw(), "int16"), "residual='int16' must be True"),
    (lambda: compensated(adamw()).init(parameters(jnp.float32)),
     r"bfloat16 parameters wanted and float32 given: cast them, .*astype\(jnp.bfloat16\)"),
    (lambda: compensated(adamw(), None).init(parameters(jnp.float32)), "wanted and float32 given"),
    (lambda: compensated(adamw()).init(parameters(jnp.float16)),
     "Parameters are float16: compensated takes bfloat16, and float32"),
    (lambda: compensated(adamw()).init({"n": jnp.arange(3)}), "a parameter must be floating point"),
    (lambda: compensated(adamw()).update(parameters(), compensated(adamw()).init(parameters())),
     r"compensated needs the parameters: update\(gradients, state, params\)"),
  ],
)  # fmt: skip
def test_errors_name_the_value_and_what_would_be_right(call, message):
  with pytest.raises(ValueError, match=message):
    call()


def test_quality_is_that_of_all_shards():
  """Of a matrix that is split, and a vector that each device has."""
  mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  optimizer = compensated(optax.sgd(1e-4), None, measure=True)
  params = {"w": jnp.exp2(jnp.arange(8.0)).astype(jnp.bfloat16), "b": jnp.ones(3, jnp.bfloat16)}
  gradients = {"w": jnp.exp2(jnp.arange(16.0, 0, -2)), "b": jnp.full(3, 20.0)}

  def quality(g, params):
    return descent_quality(optimizer.update(g, optimizer.init(params), params)[1])

  specs = {"w": jax.sharding.PartitionSpec("d"), "b": jax.sharding.PartitionSpec()}
  split = jax.shard_map(
    quality, mesh=mesh, in_specs=(specs, specs), out_specs=jax.sharding.PartitionSpec()
  )
  expected = quality(gradients, params)
  assert 0.1 < expected["lost"] < 0.9
  for name, value in jax.jit(split)(gradients, params).items():
    np.testing.assert_allclose(value, expected[name], rtol=1e-6)
