"""Gradients exchanged in few bits: the mean of numpy within the bounds of theory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from pairwise import mainly

from benchmarks.collectives import collectives
from sbjax import quantized_pmean
from sbjax.distributed.exchange import EXCHANGES, quantized_psum, quantized_psum_scatter
from sbjax.distributed.fsdp import gather

N, TILE = 8, 512
SHORT = [name for name in EXCHANGES if name != "float32"]
IN_TILES = ["e4m3", "int8"]
SIZE = 3 * 64 * 1024 + 77


def mesh(*sizes):
  names = ("data", "fsdp")[: len(sizes)]
  devices = jax.devices()[: int(np.prod(sizes))]
  return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def on_devices(function, sizes=(N,)):
  """`function(this device's tree, axes)` for trees with a leading axis of devices, jitted."""
  on = mesh(*sizes)
  axes = on.axis_names if len(sizes) > 1 else "data"

  def local(tree):
    return jax.tree.map(lambda y: y[None], function(jax.tree.map(lambda x: x[0], tree), axes))

  specs = {"in_specs": P(on.axis_names), "out_specs": P(on.axis_names), "check_vma": False}
  return jax.jit(jax.shard_map(local, mesh=on, **specs))


def heavy_tails(size=SIZE, seed=0, n=N):
  """Student's t with 3 degrees of freedom, times factors that change from row to row."""
  rng = np.random.default_rng(seed)
  rows = np.exp(rng.normal(size=-(-size // 64))).repeat(64)[:size]
  return (rng.standard_t(3, size=(n, size)) * rows).astype(np.float32)


def in_tiles(x):
  """The largest magnitude in each value's tile; x [n, size] is padded as a part of its own."""
  padded = np.pad(np.abs(x), ((0, 0), (0, -x.shape[1] % TILE)))
  absmax = padded.reshape(len(x), -1, TILE).max(-1).repeat(TILE, axis=1)
  return absmax[:, : x.shape[1]]


def half_step(x, form):
  """The largest error of rounding x [n, size] once."""
  if form == "bfloat16":
    return 2.0**-8 * np.abs(x)
  if form == "int8":
    return in_tiles(x) / 254
  return np.maximum(2.0**-4 * np.abs(x), 2.0**-10 / 448 * in_tiles(x))


def snr(got, expected):
  """Decibels."""
  error = np.float64(got) - expected
  return 10 * np.log10(np.sum(expected**2) / np.sum(error**2))


@functools.cache
def mean(form, size=SIZE):
  return np.asarray(on_devices(lambda g, axes: quantized_pmean(g, axes, format=form))(
    heavy_tails(size)
  ))  # fmt: skip


@pytest.mark.parametrize("form", SHORT)
def test_each_value_is_the_mean_within_two_half_steps(form):
  x = np.float64(heavy_tails())
  expected, got = x.mean(0), mean(form)[0]
  first = half_step(x, form).mean(0)
  # Each device's sums are a part; tiles never cross parts, which are multiples of a tile.
  second = half_step(np.abs(expected)[None] + first, form)[0]
  assert np.all(np.abs(got - expected) <= 1.001 * (first + second))


@pytest.mark.parametrize(("form", "decibels"), [("bfloat16", 50), ("e4m3", 27), ("int8", 27)])
def test_the_mean_of_heavy_tails_has_few_errors(form, decibels):
  assert snr(mean(form)[0], np.float64(heavy_tails()).mean(0)) >= decibels


def test_int8_needs_its_tiles():
  one_scale = 2**15  # A part of each device.
  x = heavy_tails(N * one_scale)
  sums = {
    tile: on_devices(lambda g, a, t=tile: quantized_pmean(g, a, format="int8", tile=t))(x)
    for tile in (TILE, one_scale)
  }
  expected = np.float64(x).mean(0)
  small, large = (snr(np.asarray(sums[tile])[0], expected) for tile in (TILE, one_scale))
  assert small > large + 6


@pytest.mark.parametrize("form", EXCHANGES)
def test_all_devices_end_with_the_same_bits(form):
  got = mean(form).view(np.int32)
  assert (got == got[:1]).all()


@pytest.mark.parametrize("form", SHORT)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_on_one_device_is_not_finite_on_any(form, bad):
  x = heavy_tails(16 * TILE * N)
  x[5, 3 * TILE + 7] = bad
  got = np.asarray(on_devices(lambda g, a: quantized_psum(g, a, format=form))(x))
  tile = slice(3 * TILE, 4 * TILE) if form in IN_TILES else slice(3 * TILE + 7, 3 * TILE + 8)
  assert not np.isfinite(got[:, tile]).any()
  assert np.isfinite(np.delete(got, np.r_[tile], axis=1)).all()


@pytest.mark.parametrize("form", SHORT)
def test_a_sum_that_overflows_is_not_finite(form):
  x = np.full((N, TILE * N), 3e38, np.float32)
  got = on_devices(lambda g, a: quantized_psum(g, a, format=form))(x)
  assert not np.isfinite(np.asarray(got)).any()


@pytest.mark.parametrize("form", SHORT)
def test_a_power_of_two_passes_through_and_zeros_stay_zeros(form):
  x = heavy_tails()
  x[:, : 2 * TILE] = 0
  run = on_devices(lambda g, a: quantized_pmean(g, a, format=form))
  got = np.asarray(run(x))
  np.testing.assert_array_equal(np.asarray(run(x * np.float32(2**20))), got * 2.0**20)
  assert not got[:, : 2 * TILE].any()


@pytest.mark.parametrize("form", EXCHANGES)
def test_a_tree_keeps_its_shapes_and_dtypes(form):
  rng = np.random.default_rng(1)
  shapes = {"odd": (67, 129), "part": (N * TILE,), "small": (3, 5), "scalar": (), "none": (0, 4)}
  tree = {k: rng.normal(size=(N, *s)).astype(np.float32) for k, s in shapes.items()}
  tree |= {"half": jnp.asarray(tree["odd"], jnp.bfloat16), "tuple": (tree["part"],)}
  got = on_devices(lambda g, a: quantized_pmean(g, a, format=form))(tree)
  assert jax.tree.structure(got) == jax.tree.structure(tree)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(tree), strict=True):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    expected = np.float64(b).mean(0)
    tolerance = 1e-6 if expected.size < 4096 or form == "float32" else 0.05
    tolerance = 0.05 if a.dtype == jnp.bfloat16 else tolerance
    error = np.linalg.norm(np.float64(a) - expected)
    assert error <= tolerance * np.sqrt(N) * np.linalg.norm(expected)


def test_an_empty_tree_stays_empty():
  assert quantized_pmean_of({}) == {}


def quantized_pmean_of(tree, **options):
  return on_devices(lambda _, axes: quantized_pmean(tree, axes, **options))(np.zeros(N))


@pytest.mark.parametrize("form", EXCHANGES)
def test_one_device_gets_its_own_bits_without_a_collective(form):
  x = heavy_tails(n=1)
  run = on_devices(
    lambda g, a: (
      quantized_pmean(g, a, format=form),
      quantized_psum_scatter(g, a, format=form),
    ),
    (1,),
  )
  assert collectives(run.lower(x).compile().as_text()) == {}
  for got in run(x):
    np.testing.assert_array_equal(np.asarray(got).view(np.int32), x.view(np.int32))


@pytest.mark.parametrize(
  ("form", "most"),
  mainly(
    [("bfloat16", 4.01), ("e4m3", 2.05)], [("bfloat16", 4.01), ("e4m3", 2.05), ("int8", 2.05)]
  ),
)
def test_a_tree_moves_few_bytes_in_few_collectives(form, most):
  tree = {f"{i}": jnp.zeros((N, 16384 + 64 * i)) for i in range(16)} | {"bias": jnp.zeros((N, 99))}
  run = on_devices(lambda g, a: quantized_pmean(g, a, format=form))
  found = collectives(run.lower(tree).compile().as_text())
  assert set(found) == {"all-to-all", "all-gather", "all-reduce"}
  assert found["all-reduce"] == {"f32": [pytest.approx(99 * 4e-6, abs=1e-3), 1]}
  text = run.lower(tree).as_text()
  assert [text.count(f'"stablehlo.{op}"') for op in ("all_to_all", "all_gather")] == [1, 1]
  count = sum(x[0].size for x in jax.tree.leaves(tree))
  moved = sum(mb for kind in found.values() for mb, _ in kind.values()) * 1e6
  assert moved <= most * (count + N * TILE * 16)  # Padding: less than a tile a part and leaf.
  assert most > 2.5 or moved <= 2.5 * count


def test_large_leaves_get_messages_of_their_own(monkeypatch):
  monkeypatch.setattr("sbjax.distributed.exchange._BUCKET", 3 * 8192)
  tree = [jnp.ones((N, size)) for size in (8192, 8192, 8192, 65536, 8192)]
  run = on_devices(quantized_pmean)
  assert run.lower(tree).as_text().count('"stablehlo.all_to_all"') == 3
  for got in run(tree):
    np.testing.assert_allclose(got, 1, rtol=1e-6)  # 448 in e4m3, and a scale of 1 / 448.


@pytest.mark.parametrize("form", EXCHANGES)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_scattered_sum_is_each_device_s_part(form, axis):
  x = heavy_tails(64 * 192).reshape(N, 16 * 4, 192)
  run = on_devices(lambda g, a: quantized_psum_scatter(g, a, axis=axis, format=form))
  got = np.concatenate(np.asarray(run(x)), axis=axis)
  expected = np.float64(x).sum(0)
  least = {"float32": 120, "bfloat16": 52, "e4m3": 30, "int8": 29}[form]
  assert got.shape == expected.shape and snr(got, expected) > least


@pytest.mark.parametrize("form", EXCHANGES)
def test_sums_are_float32(form):
  x = np.ones((N, N * TILE * 2), np.float32)
  x[0] = 2**14
  got = np.asarray(on_devices(lambda g, a: quantized_psum_scatter(g, a, format=form))(x))
  np.testing.assert_allclose(got, 2**14 + 7, rtol=2e-6)  # bfloat16 would have 16,384 or 16,512.


@pytest.mark.parametrize("size", [4096 - 1, 2 * 4096 - 1])
def test_a_leaf_with_less_than_a_tile_a_device_is_summed_in_float32(size):
  x, options = heavy_tails(size), {"tile": 1024, "min_size": 0}
  got = np.asarray(on_devices(lambda g, a: quantized_pmean(g, a, **options))(x))[0]
  np.testing.assert_allclose(got, x.mean(0), rtol=1e-4, atol=1e-5)


def test_a_small_sum_is_scattered_in_float32():
  x = heavy_tails(64).reshape(N, 16, 4)
  got = on_devices(quantized_psum_scatter)(x)
  np.testing.assert_allclose(np.concatenate(np.asarray(got)), x.sum(0), rtol=1e-5, atol=1e-6)


def test_a_scattered_nan_reaches_its_device():
  x = heavy_tails(N * TILE * 4)
  x[2, 5] = np.nan
  got = np.asarray(on_devices(quantized_psum_scatter)(x))
  assert np.isnan(got[0, :TILE]).all() and np.isfinite(got[1:]).all()


def test_several_axes_are_one_group_of_devices():
  x = heavy_tails()
  got = on_devices(lambda g, a: quantized_pmean(g, a, format="int8"), (2, 4))(x)
  np.testing.assert_array_equal(np.asarray(got), mean("int8"))


@pytest.mark.parametrize("form", SHORT)
def test_gather_exchanges_its_gradient(form):
  x, weights = heavy_tails(64 * 256)[0].reshape(64, 256), heavy_tails(64 * 256, seed=3)
  weights = weights.reshape(N, 64, 256)

  def local(x, weights):
    def loss(x):
      whole = gather(x, "fsdp", reduce_axes=("data",), gradient_exchange=form)
      return jnp.sum(whole * weights[0])

    return jax.grad(loss)(x)

  specs = {"in_specs": (P("fsdp"), P(("data", "fsdp"))), "out_specs": P("fsdp")}
  got = jax.jit(jax.shard_map(local, mesh=mesh(2, 4), check_vma=False, **specs))(x, weights)
  assert snr(got, np.float64(weights).sum(0)) > {"bfloat16": 50}.get(form, 25)


@pytest.mark.parametrize(
  ("tree", "options", "message"),
  [
    (np.zeros(4, np.int32), {}, "must be floating point, not int32"),
    ({"w": np.zeros(4, np.complex64)}, {}, r"\['w'\] must be floating point, not complex64"),
    ({"w": 1.0}, {}, r"\['w'\] must be an array, not a float"),
    (np.zeros(4, np.float32), {"format": "e5m2"}, "'e5m2' is no format of a gradient exchange"),
    (np.zeros(4, np.float32), {"format": jnp.int8}, "is no format of a gradient exchange"),
    (np.zeros(4, np.float32), {"tile": 0}, "tile=0 must be a whole number, at least 1"),
    (np.zeros(4, np.float32), {"min_size": -1}, "min_size=-1 must be a whole number"),
  ],
)
def test_a_wrong_argument_is_named(tree, options, message):
  with pytest.raises(ValueError, match=message):
    quantized_pmean_of(tree, **options)


def test_an_axis_that_no_shard_map_has_is_named():
  with pytest.raises(ValueError, match="'model' is no mesh axis here"):
    quantized_pmean(jnp.ones(3), "model")


@pytest.mark.parametrize(("shape", "axis"), [((12, 8), 0), ((8, 8), 2), ((8,), -1)])
def test_an_axis_that_cannot_be_scattered_is_named(shape, axis):
  with pytest.raises(ValueError, match=f"axis={axis} must be an axis of x .* 8 devices divide"):
    on_devices(lambda _, a: quantized_psum_scatter(jnp.ones(shape), a, axis=axis))(np.zeros(N))


def test_both_a_dtype_and_an_exchange_are_refused():
  with pytest.raises(ValueError, match="leave gradient_dtype at float32, not bfloat16"):
    gather(jnp.ones(8), None, gradient_dtype=jnp.bfloat16, gradient_exchange="int8")


def test_an_exchange_has_no_derivative():
  run = on_devices(lambda g, a: jax.grad(lambda g: jnp.sum(quantized_psum(g, a)))(g))
  with pytest.raises(ValueError, match="apply it to the result of"):
    run(heavy_tails())
