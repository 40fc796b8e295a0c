"""Rounding by chance: its mean is the number, and an average in few bits decays as in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pairwise import mainly

from benchmarks import averages
from sbjax.ops.adam import contract, expand, without_dust
from sbjax.ops.dither import halves_swapped, hashed, positions, round_by_chance
from sbjax.optim.stable_adamw import stable_adamw
from sbjax.optim.state_formats import FORMATS, compress_state
from sbjax.quantize import E4M3
from train.optimizer import STATES

pytestmark = pytest.mark.standard_promotion  # As optax needs.

DTYPES = {"e4m3": E4M3, "float16": jnp.dtype(jnp.float16), "bfloat16": jnp.dtype(jnp.bfloat16)}
CHANCES = jnp.arange(0, 2**32, 2**20, dtype=jnp.uint32)  # All parts of the interval alike.
CODED = [name for name in FORMATS if name not in ("FLOAT32", "BFLOAT16_PAIR")]


@functools.partial(jax.jit, static_argnums=2)
def rounded(x, chance, dtype):
  """Without the cast, which would round what is no value of the dtype."""
  return round_by_chance(x, chance, dtype)


def each_chance(x, dtype):
  """x [n] rounded by each chance, [n, chances]."""
  shape = (x.size, CHANCES.size)
  return np.asarray(
    rounded(jnp.broadcast_to(x[:, None], shape), jnp.broadcast_to(CHANCES, shape), dtype)
  )


@pytest.mark.parametrize("name", DTYPES)
def test_a_number_becomes_one_of_its_two_neighbours_and_in_the_mean_itself(name):
  dtype, info = DTYPES[name], jnp.finfo(DTYPES[name])
  rng = np.random.default_rng(0)
  binades = rng.uniform(max(info.minexp - info.nmant, -120), 8, 200)
  x = (rng.choice([-1, 1], 200) * np.exp2(binades)).astype(np.float32)
  found = each_chance(jnp.asarray(x), dtype)
  np.testing.assert_array_equal(found, found.astype(dtype).astype(np.float32))
  gap = np.exp2(np.maximum(np.floor(np.log2(np.abs(x))), info.minexp) - info.nmant)
  assert (np.abs(found - x[:, None]) < gap[:, None]).all()
  assert (np.abs(found.mean(1) - x) <= gap / CHANCES.size * 1.01).all()


@pytest.mark.parametrize("name", DTYPES)
def test_values_of_a_format_and_what_is_not_finite_stay(name):
  every = np.arange(256, dtype=np.uint8) if name == "e4m3" else np.arange(0, 2**16, 37, np.uint16)
  x = every.view(DTYPES[name]).astype(np.float32)
  x = np.where(np.abs(x) < np.finfo(np.float32).tiny, 0, x)  # Denormals are flushed on a CPU.
  for chance in (0, 1, 2**31, 2**32 - 1):
    found = rounded(x, jnp.full(x.shape, chance, jnp.uint32), DTYPES[name])
    np.testing.assert_array_equal(found, x)


def test_chances_are_even_over_numbers_and_over_steps():
  of_numbers = positions(jnp.int32(5), (1 << 16,))
  of_steps = jax.vmap(lambda t: positions(t, (3, 7))[1, 2])(jnp.arange(1 << 16))
  for chance in (hashed(of_numbers), hashed(of_steps)):
    for numbers in (chance, halves_swapped(chance)):
      counts = np.bincount(np.asarray(numbers >> 24), minlength=256)
      # Chi-square of 255 degrees of freedom, within five deviations.
      assert abs(((counts - 256.0) ** 2 / 256).sum() - 255) < 5 * np.sqrt(2 * 255)
      part = np.asarray(numbers >> 8, np.float64) / 2**24 - 0.5
      assert abs(12 * np.mean(part[1:] * part[:-1])) < 5 / np.sqrt(part.size)
    high, low = (np.asarray(c >> 8, np.float64) for c in (chance, halves_swapped(chance)))
    assert abs(np.corrcoef(high, low)[0, 1]) < 0.02


def test_layers_of_a_stack_have_the_chances_of_separate_layers():
  apart = positions(3, (16, 8), salt=1)
  np.testing.assert_array_equal(positions(3, (4, 16, 8), axes=1, salt=1)[2], apart)
  assert len(np.unique(positions(3, (4, 16, 8)))) == 4 * 16 * 8
  assert not np.any(np.asarray(apart) == np.asarray(positions(4, (16, 8), salt=1)))


@pytest.mark.parametrize("name", mainly(["coat"], ["bfloat16", "coat", "fp8_lm"]))
def test_a_mesh_rounds_to_the_same_bits(name):
  """Gradients and scales are powers of two, so that no sum depends on its order."""
  formats = {k: f for k, f in STATES[name].items() if k in ("mu", "nu")}
  optimizer = compress_state(optax.adam(0.01), min_size=1, **formats)
  mesh = Mesh(np.array(jax.devices()[:8]), ("fsdp",))
  split = NamedSharding(mesh, PartitionSpec("fsdp"))
  rng = np.random.default_rng(0)
  gradients = [jnp.asarray(np.exp2(rng.integers(-9, 0, (16, 128))), jnp.float32) for _ in range(3)]

  def trained(place):
    update, state = jax.jit(optimizer.update), jax.jit(optimizer.init)(place(gradients[0]))
    for g in gradients:
      _, state = update(place(g), state)
    return state

  def place(x):
    return jax.device_put(x, split)

  whole, sharded = trained(jnp.asarray), trained(place)
  jax.tree.map(np.testing.assert_array_equal, whole, sharded)


@pytest.mark.parametrize("name", CODED)
def test_an_average_without_gradients_decays_as_in_float32(name):
  """To the nearest number it would stand still; half of each group is not to decay."""
  form, steps, b = FORMATS[name], 2000, 0.999
  start = jnp.exp(jax.random.normal(jax.random.key(0), (64, 128)))
  still = jax.lax.broadcasted_iota(jnp.int32, start.shape, 1) % 2 == 0

  @jax.jit
  def averages():
    def step(coded, t):
      x = form.decode(coded)
      x = jnp.where(still, x, b * x)
      return form.encode(x, 0, None, hashed(positions(t, x.shape))), None

    return form.decode(jax.lax.scan(step, form.encode(start, 0), jnp.arange(steps))[0])

  found = np.asarray(averages())
  quiet = np.asarray(~still)
  assert np.mean(found[quiet]) / np.mean(start[quiet]) == pytest.approx(b**steps, rel=0.05)
  assert np.mean(found[~quiet]) / np.mean(start[~quiet]) == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("make", mainly([stable_adamw], [stable_adamw, optax.adamw]))
@pytest.mark.parametrize("name", mainly(["bfloat16", "coat"], ["bfloat16", "coat", "fp8_lm"]))
def test_rows_without_a_gradient_come_to_rest(name, make):
  formats = {k: f for k, f in STATES[name].items() if k in ("mu", "nu")}
  rate, shape = 1e-3, (32, 128)
  optimizer = compress_state(make(rate, b2=0.98, weight_decay=0.0), min_size=1, **formats)
  occurs = jax.lax.broadcasted_iota(jnp.int32, shape, 0) < 16

  @jax.jit
  def moved():
    def step(carry, t):
      params, state = carry
      g = jax.random.normal(jax.random.fold_in(jax.random.key(0), t), shape)
      updates, state = optimizer.update(jnp.where(occurs | (t < 100), g, 0.0), state, params)
      return (optax.apply_updates(params, updates), state), None

    params = jnp.zeros(shape)
    carry, _ = jax.lax.scan(step, (params, optimizer.init(params)), jnp.arange(300))
    return jax.lax.scan(step, carry, jnp.arange(300, 1000))[0][0] - carry[0]

  still = np.asarray(moved())[16:]
  assert np.abs(still).max() < 1e-3 * rate


def test_dust_is_dropped_from_the_first_moment_and_nothing_else():
  m = jnp.float32([1e-9, -1e-9, 1e-3, 0.0, np.nan, np.inf])
  n = jnp.float32([1.0, 1.0, 1.0, 0.0, 1.0, np.inf])
  found = np.asarray(without_dust(m, n))
  np.testing.assert_array_equal(found, [0, 0, np.float32(1e-3), 0, np.nan, np.inf])


@pytest.mark.parametrize("binades", [0.01, 1.0, 4.0, 12.0])
def test_a_group_of_any_width_keeps_its_mean(binades):
  """Over chances evenly apart, up to one of them. Rounded evenly after the power it is off."""
  x = jnp.exp2(binades * jax.random.normal(jax.random.key(0), (4, 128)))
  count = 1024
  chances = jnp.arange(count, dtype=jnp.uint32) * jnp.uint32(2**32 // count)
  drawn = jax.vmap(lambda c: contract(expand(x, jnp.full(x.shape, c))))(chances)
  step = np.ptp(drawn, axis=0)  # 0 where a number is within one chance of what e4m3 has.
  assert (step > 0).mean() > 0.9
  off = np.abs(np.mean(np.float64(drawn), axis=0) - x)
  assert (off <= 1.1 * step / count + 4e-6 * np.asarray(x))[step > 0].all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", averages.KINDS)
def test_a_moment_has_the_mean_over_time_of_float32(kind):
  """Which bfloat16 to the nearest has not at 0.999."""
  for moment, b in (("mu", averages.B1), ("nu", 0.95), ("nu", 0.999)):
    rows = averages.moments(kind, moment, b, rows=8)
    nearest = rows.pop("nearest")
    for name, row in rows.items():
      assert abs(row["bias"]) < 0.02 + 4 * row["standard_error"], name
      # Each rounding is off by half a step at most, which E4M3_EXPANDED has not one of.
      if kind in ("stationary", "sparse") and name != "E4M3_EXPANDED":
        step = {"BFLOAT16": 2**-7, "FLOAT16_SCALED": 2**-10, "E4M3_SCALED": 2**-3}[name]
        assert row["error"] < step / 2 / (1 - b**2) ** 0.5
    if b == 0.999:
      assert nearest["bias"] > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in averages.KINDS if kind.startswith("quiet")])
def test_without_a_gradient_nothing_drifts_in_10_000_steps(kind):
  for b2 in (0.95, 0.999):
    rows = averages.measure(kind, b2)
    for name in ("bfloat16", "coat", "fp8_lm"):
      assert rows[name]["quiet"] < 1e-3
      if b2 == 0.999:  # Where bfloat16 to the nearest stands still.
        assert rows[name]["distance"] < rows["bfloat16, nearest"]["distance"]
