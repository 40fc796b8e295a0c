"""The Triton kernel of Adam's step on coded moments agrees with the definition, also on a mesh.

Its powers have errors of some 2**-20, so a few codes are rounded the other way, and an exponent at
the edge of a sixteenth may be the one below.
"""

import functools
import importlib
import types

import jax
import jax.numpy as jnp
import mesh_case
import numpy as np
import pytest
import triton_case
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.collectives import moved
from sbjax import stable_adamw
from sbjax.ops import adam as expansion
from sbjax.ops.adam import Coded
from sbjax.ops.dither import positions
from sbjax.ops.registry import get_backend
from sbjax.optim.state_formats import E4M3_EXPANDED, compress_state

WEIGHTS = jnp.asarray([0.1, 0.02, 1e-6], jnp.float32)


def draw(shape, seed, binades):
  """Numbers of both signs, over some binades, at most 60, and a few zeros."""
  rng = np.random.default_rng(seed)
  x = rng.choice([-1, 1], shape) * np.exp2(rng.normal(0, binades, shape).clip(-30, 30))
  return jnp.asarray(np.where(rng.random(shape) < 0.05, 0, x), jnp.float32)


def first(shape, count=1):
  """The positions of the first numbers of groups [*shape, 128]."""
  return positions(count, (*shape, 128))[..., 0]


def operands(rows, binades, seed=0):
  """A gradient and two moments of some groups, and the groups' positions."""
  g, mu, nu = (draw((rows, 128), 3 * seed + i, binades) for i in range(3))
  return g, expansion.expand(mu), expansion.expand(jnp.abs(nu)), first((rows,), seed)


def both(*args, weights=WEIGHTS, **how):
  """The results of the interpreted kernel and of the definition."""
  kernel = triton_case.interpreted("triton.adam").adam_direction
  return kernel(weights, *args, **how), expansion.adam_direction(weights, *args)


def steps(coded):
  """Integers that number the values of e4m3 in order."""
  bits = np.asarray(coded.values).view(np.uint8).astype(np.int32)
  return np.where(bits < 128, bits, 128 - bits)


def new_moments(g, mu, nu, first, weights=WEIGHTS):
  """Before `without_dust`."""
  w1, w2, _ = weights
  mu, nu = expansion.contract(mu), expansion.contract(nu)
  return (1 - w1) * mu + w1 * g, (1 - w2) * nu + w2 * g**2


@pytest.mark.aot
@pytest.mark.parametrize("rows", [1, 16, 37])
@pytest.mark.parametrize("binades", [0.0, 1.0, 4.0, 8.0])
def test_the_kernel_equals_the_definition_to_rounding(rows, binades):
  args = operands(rows, binades, seed=rows)
  (direction, *coded), (expected, *same) = both(*args)
  m, n = new_moments(*args)
  size = jnp.abs(m) + jnp.abs(0.1 * args[0])  # The sum of both terms may cancel.
  assert (np.abs(direction - expected) <= 1e-4 * size / (jnp.sqrt(n) + WEIGHTS[2])).all()
  for ours, theirs in zip(coded, same, strict=True):
    np.testing.assert_allclose(ours.details[0], theirs.details[0], rtol=1e-4)
    alike = np.asarray(ours.details[1] == theirs.details[1])
    assert alike.mean() > 0.95
    apart = np.abs(steps(ours) - steps(theirs))[alike]
    assert apart.max() <= 1 and np.mean(apart > 0) < 1e-3


@pytest.mark.aot
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("binades", [2.0, 12.0, 25.0])
def test_decoded_moments_are_within_a_step_of_e4m3(binades, seed):
  """At an edge of an exponent, too."""
  args = operands(24, binades, seed)
  (_, *coded), _ = both(*args)
  m, n = new_moments(*args)
  for moment, ours in zip((expansion.without_dust(m, n), n), coded, strict=True):
    decoded = expansion.contract(ours)
    np.testing.assert_array_equal(jnp.sign(decoded), jnp.sign(moment))
    top, exponent = (np.float64(d)[:, None] for d in ours.details)
    there, back = (448 * (np.abs(np.float64(x)) / top) ** exponent for x in (moment, decoded))
    step = np.maximum(2.0**-9, np.exp2(np.floor(np.log2(np.maximum(there, 1e-9)))) / 8)
    assert (np.abs(there - back) <= step * (1 + 3e-3)).all()


@pytest.mark.aot
def test_groups_of_zeros_stay_zero_and_the_first_step_is_the_sign():
  zeros = expansion.expand(jnp.zeros((5, 128)))
  g = draw((5, 128), 1, 0.0).at[2].set(0)
  (direction, mu, nu), _ = both(g, zeros, zeros, first((5,)), weights=jnp.asarray([1, 1, 1e-12]))
  np.testing.assert_allclose(direction, jnp.sign(g), rtol=1e-6)
  for coded in (mu, nu):
    assert not steps(coded)[2].any()
    assert [float(d[2]) for d in coded.details] == [0, 1]


@pytest.mark.aot
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_makes_its_group_nan_for_good(bad):
  g, mu, nu, where = operands(20, 2.0)
  g = g.at[:, ::3].set(0).at[7, 5].set(bad)
  mu, nu = (x._replace(values=x.values.at[:, ::3].set(0)) for x in (mu, nu))
  for _ in range(3):
    (direction, mu, nu), _ = both(g, mu, nu, where)
    g = g.at[7, 5].set(0)
    for coded in (mu, nu):
      is_nan = np.isnan(expansion.contract(coded))
      assert is_nan[7].all() and is_nan.sum() == 128 and np.isnan(coded.details[0][7])
  assert np.isnan(direction[7]).all() and np.isfinite(np.delete(direction, 7, 0)).all()


@pytest.mark.aot
def test_the_largest_of_a_group_is_exact():
  g, *moments, where = operands(8, 6.0)
  (_, *coded), _ = both(jnp.zeros_like(g), *moments, where, weights=jnp.asarray([0, 0, 1e-6]))
  for new, old in zip(coded, moments, strict=True):
    np.testing.assert_array_equal(new.details[0], old.details[0])
    np.testing.assert_array_equal(np.abs(steps(new)).max(-1), 126)  # 448


def shapes(*leading):
  struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
  details = struct(leading), struct(leading)
  coded = Coded(jax.ShapeDtypeStruct((*leading, 128), jnp.float8_e4m3fn), details)
  positions = jax.ShapeDtypeStruct(leading, jnp.uint32)
  return struct((3,)), struct((*leading, 128)), coded, coded, positions


@pytest.mark.aot
@pytest.mark.parametrize("capability", [89, 90])
def test_the_kernel_compiles_without_spills(monkeypatch, tmp_path, capability):
  kernel = triton_case.loaded("triton.adam").adam_direction
  (made,) = triton_case.compiled(monkeypatch, tmp_path, capability, kernel, *shapes(3, 37))
  assert made.spilled_bytes == 0
  assert made.shared_bytes <= triton_case.SHARED_BYTES[capability]
  assert made.count("lg2.approx.f32") > 0 and made.count("bra") == 0


@pytest.mark.aot
def test_it_says_what_it_does_not_support(monkeypatch):
  triton_case.loaded("triton.adam")
  with triton_case.chip(80), pytest.raises(NotImplementedError, match=r"no float8.*below .* 8\.9"):
    jax.eval_shape(get_backend("triton").adam_direction, *shapes(3, 2))
  narrow = operands(2, 1.0)
  narrow = jax.tree.map(lambda x: x[:, :64] if x.ndim > 1 else x, narrow)
  with triton_case.chip(90), pytest.raises(NotImplementedError, match="groups of 128, not 64"):
    get_backend("triton").adam_direction(WEIGHTS, *narrow)


STACKED = {"stack": 1, "w": 0, "columns": 0, "prime": 0, "b": 0}
SHARDED = {"stack": P(None, "fsdp"), "w": P("fsdp"), "columns": P(None, "fsdp")}


def coat():
  optimizer = stable_adamw(0.01, weight_decay=0.1, stacked=STACKED)
  return compress_state(optimizer, stacked=STACKED, mu=E4M3_EXPANDED, nu=E4M3_EXPANDED)


def tree(seed):
  """Gradients or parameters; 128 does not divide 130, and b stays float32."""
  rng = np.random.default_rng(seed)
  of = {"stack": (2, 64, 1024), "w": (8, 1024), "columns": (8, 1024), "prime": (64, 130), "b": (9,)}
  return {k: jnp.asarray(rng.normal(size=shape), jnp.float32) for k, shape in of.items()}


def trained(optimizer, update, place=lambda tree: tree):
  """The updates and the state after three steps."""
  params = place(tree(99))
  state = jax.jit(optimizer.init)(params)
  for t in range(3):
    updates, state = update(place(tree(t)), state, params)
  return updates, state


@pytest.fixture
def installed(monkeypatch):
  """Makes StableAdamW find a kernel: `installed(kernel)`."""

  def install(kernel):
    module = importlib.import_module("sbjax.optim.stable_adamw")
    unsupported = triton_case.loaded("triton.adam").unsupported
    monkeypatch.setattr(module, "has_kernel", lambda name, *args: not unsupported(None, *args))
    monkeypatch.setattr(module, "get_backend", lambda: types.SimpleNamespace(adam_direction=kernel))

  return install


@pytest.mark.aot
@pytest.mark.slow
def test_updates_by_the_kernel_are_those_of_the_definition(installed):
  optimizer, seen = coat(), []
  expected = trained(optimizer, jax.jit(optimizer.update))
  kernel = triton_case.interpreted("triton.adam").adam_direction

  def noting(weights, g, *rest):
    seen.append(g.shape)
    return kernel(weights, g, *rest)

  installed(noting)
  ours = trained(optimizer, optimizer.update)
  assert set(seen) == {(2, 64, 8, 128), (8, 8, 128)}
  assert jax.tree.structure(ours) == jax.tree.structure(expected)
  for a, b in zip(*map(jax.tree.leaves, (ours, expected)), strict=True):
    assert a.shape == b.shape and a.dtype == b.dtype
    a, b = np.float32(a), np.float32(b)
    assert np.mean(~np.isclose(a, b, rtol=1e-4, atol=1e-7)) < 0.01


@pytest.mark.slow
def test_on_a_mesh_each_device_updates_its_shard_and_nothing_is_gathered(installed):
  optimizer = coat()
  expected = trained(optimizer, jax.jit(optimizer.update))
  installed(mesh_case.on_shards().adam_direction)
  mesh = Mesh(np.array(jax.devices()[:8]), ("fsdp",))
  places = {k: NamedSharding(mesh, SHARDED.get(k, P())) for k in STACKED}
  update = jax.jit(optimizer.update)
  place = functools.partial(jax.device_put, device=places)
  ours = trained(optimizer, update, place)
  for key, sharding in places.items():
    for moment in (ours[1].inner_state[0].mu, ours[1].inner_state[0].nu):
      array = moment[key]
      assert array.sharding.is_equivalent_to(sharding, array.ndim)
  for a, b in zip(*map(jax.tree.leaves, (ours, expected)), strict=True):
    a, b = np.float32(a), np.float32(b)
    assert np.mean(~np.isclose(a, b, rtol=1e-4, atol=1e-7)) < 0.01
  hlo = update.lower(place(tree(0)), ours[1], place(tree(9))).compile().as_text()
  assert {kind for kind, _, _ in moved(hlo)} == {"all-reduce"}
  assert max(n for _, _, n in moved(hlo)) <= 2  # The sums of RMS.
