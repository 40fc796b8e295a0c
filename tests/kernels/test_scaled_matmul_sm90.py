"""The Mosaic matmul has the definition's bits in int8 and no races; its tile configs fit Hopper."""

import dataclasses

import each_kernel
import jax
import jax.numpy as jnp
import mosaic_case
import numpy as np
import pytest
from mosaic_case import needs_interpreter
from pairwise import mainly, pairwise

from sbjax import E4M3, E5M2, INT8, Quantized, Spec, quantize, scaled_matmul
from sbjax.pallas.sm90 import scaled_matmul as sm90
from sbjax.quantize import format_of

SHARED_BYTES = 232_448  # What a block of threads may have on Hopper.

# Small blocks, so that a shape of a few hundred has several for each cluster.
SMALL = sm90.TileConfig(block_m=128, block_n=64, block_k=64, stages=2, cluster=None)


def interpreted(function, *args, config=None, **kwargs):
  """Runs a function of sm90 in Mosaic's interpreter, which detects races."""
  # So few SMs have several blocks each, also of large ones.
  is_large = config is not None and config.block_m * config.block_n > 128 * 64
  num_sms = 2 if is_large else 4
  return mosaic_case.interpreted(function, *args, config=config, num_sms=num_sms, **kwargs)


def operand(seed, rows, k, dtype=INT8, scaling="rowwise"):
  x = np.random.default_rng(seed).normal(size=(rows, k)).astype(np.float32)
  x[0] = 0
  return quantize(jnp.asarray(x), Spec(dtype, scaling))


def rounded(q):
  """With scales that are powers of two: a fused multiply-add of a product is then exact."""
  scale = jnp.exp2(jnp.round(jnp.log2(jnp.maximum(q.scale, 1e-3))))
  return dataclasses.replace(q, scale=scale)


def bias_and_residual(m, n, dtype):
  numbers = np.random.default_rng(2)
  return {
    "bias": jnp.asarray(numbers.normal(size=n), jnp.float32),
    "residual": jnp.asarray(numbers.normal(size=(m, n)) * 9, dtype),
  }


def is_valid(block, schedule, *_):
  try:
    sm90.TileConfig(block_m=block[0], block_n=block[1], schedule=schedule)
  except ValueError:
    return False
  return True


CASES = pairwise(
  [(64, 64), (128, 64), (128, 192), (192, 128), (128, 256)],
  ["cooperative_m", "cooperative_n", "pingpong"],
  [None, "m", "n"],
  [("m", 2), ("n", 16)],
  ["rowwise", "tensorwise"],
  ["rowwise", "tensorwise"],
  ["bfloat16", "float16", "float32"],
  [True, False],
  valid=is_valid,
)


@needs_interpreter
@pytest.mark.parametrize(
  ("block", "schedule", "cluster", "raster", "lhs_scaling", "rhs_scaling", "out_dtype", "adds"),
  mainly(CASES[:4], CASES),  # The first have most of the pairs.
  ids=str,
)
def test_int8_is_the_definition_bit_for_bit(
  block, schedule, cluster, raster, lhs_scaling, rhs_scaling, out_dtype, adds
):
  config = sm90.TileConfig(
    *(*block, schedule),
    block_k=64,
    stages=3 if schedule == "pingpong" else 2,
    cluster=cluster,
    raster_order=raster[0],
    raster_width=raster[1],
  )
  # Ragged rows; 16 is the largest power of two that divides K and N.
  m, n, k = 395, 208, 144
  lhs, rhs = operand(0, m, k, INT8, lhs_scaling), operand(1, n, k, INT8, rhs_scaling)
  options = {}
  if adds:
    lhs, rhs, options = rounded(lhs), rounded(rhs), bias_and_residual(m, n, out_dtype)
  y = interpreted(sm90.scaled_matmul, lhs, rhs, jnp.dtype(out_dtype), config=config, **options)
  assert y.dtype == out_dtype
  np.testing.assert_array_equal(y, scaled_matmul(lhs, rhs, jnp.dtype(out_dtype), **options))
  assert adds or (not y[0].any() and not y[:, 0].any())


@needs_interpreter
@pytest.mark.parametrize(
  ("block_n", "has_residual"),
  mainly([(64, False), (192, True)], [(64, False), (64, True), (192, False), (192, True)]),
)
def test_an_odd_number_of_epilogue_tiles_does_not_overwrite_buffers(block_n, has_residual):
  # One tile of 64 columns a block, or three; blocks of a warpgroup share two buffers.
  lhs, rhs = rounded(operand(0, 395, 64)), rounded(operand(1, 384, 64))
  config = dataclasses.replace(SMALL, block_n=block_n)
  options = bias_and_residual(395, 384, jnp.bfloat16) if has_residual else {}
  y = interpreted(sm90.scaled_matmul, lhs, rhs, jnp.bfloat16, config=config, **options)
  np.testing.assert_array_equal(y, scaled_matmul(lhs, rhs, jnp.bfloat16, **options))


@needs_interpreter
@pytest.mark.parametrize("shape", [(1, 16, 16), (395, 272, 80)], ids=str)
def test_the_default_config_computes_small_and_ragged_shapes(shape):
  m, n, k = shape
  lhs, rhs = operand(0, m, k), operand(1, n, k)
  y = interpreted(sm90.scaled_matmul, lhs, rhs, jnp.bfloat16)
  np.testing.assert_array_equal(y, scaled_matmul(lhs, rhs, jnp.bfloat16))


@needs_interpreter
def test_a_bias_is_added_before_the_cast():
  lhs, rhs = rounded(operand(0, 72, 48)), rounded(operand(1, 80, 48, INT8, "tensorwise"))
  bias = jnp.asarray(np.random.default_rng(2).normal(size=80), jnp.bfloat16)
  y = interpreted(sm90.scaled_matmul, lhs, rhs, jnp.bfloat16, bias=bias, config=SMALL)
  np.testing.assert_array_equal(y, scaled_matmul(lhs, rhs, jnp.bfloat16, bias=bias))


@needs_interpreter
def test_a_product_and_a_bias_are_rounded_once_or_twice():
  lhs, rhs = operand(0, 72, 48), operand(1, 80, 48, INT8, "tensorwise")
  bias = jnp.asarray(np.random.default_rng(2).normal(size=80), jnp.bfloat16)
  y = interpreted(sm90.scaled_matmul, lhs, rhs, jnp.float32, bias=bias, config=SMALL)
  product = np.abs(scaled_matmul(lhs, rhs, jnp.float32))
  expected = scaled_matmul(lhs, rhs, jnp.float32, bias=bias)
  assert np.all(np.abs(y - expected) <= 2.0**-24 * product + 2.0**-23 * np.abs(expected))


@needs_interpreter
def test_a_nan_scale_makes_only_its_row_nan():
  lhs, rhs = operand(0, 72, 48), operand(1, 80, 48)
  lhs = dataclasses.replace(lhs, scale=lhs.scale.at[3].set(jnp.nan))
  rows = np.isnan(interpreted(sm90.scaled_matmul, lhs, rhs, jnp.bfloat16, config=SMALL))
  np.testing.assert_array_equal(rows, np.broadcast_to(np.arange(72)[:, None] == 3, (72, 80)))


@needs_interpreter
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=str)
def test_fp8_products_are_summed_in_float32(dtypes):
  lhs, rhs = operand(0, 72, 80, dtypes[0]), operand(1, 80, 80, dtypes[1], "tensorwise")
  a, b = (np.asarray(q.values).astype(np.float64) * np.asarray(q.scale) for q in (lhs, rhs))
  y = interpreted(sm90.scaled_matmul, lhs, rhs, jnp.float32, config=SMALL)
  assert np.all(np.abs(y - a @ b.T) <= 80 * 2.0**-24 * (np.abs(a) @ np.abs(b).T))


@needs_interpreter
def test_accumulate_is_exact_and_partial_sums_add_up():
  lhs, rhs = operand(0, 72, 96).values, operand(1, 80, 96).values
  expected = np.asarray(lhs, np.int32) @ np.asarray(rhs, np.int32).T
  parts = [
    interpreted(sm90.accumulate, lhs[:, p], rhs[:, p], config=SMALL)
    for p in (slice(0, 48), slice(48, 96))
  ]
  assert parts[0].dtype == np.int32
  np.testing.assert_array_equal(parts[0] + parts[1], expected)


@pytest.mark.parametrize("shape", [(0, 16, 32), (4, 16, 0)], ids=str)
def test_an_empty_sum_is_zero(shape):
  m, n, k = shape
  lhs = Quantized(jnp.zeros((m, k), jnp.int8), jnp.ones((m, 1)), Spec(INT8, "rowwise"))
  rhs = Quantized(jnp.zeros((n, k), jnp.int8), jnp.ones((n, 1)), Spec(INT8, "rowwise"))
  added = {"bias": jnp.ones(16), "residual": jnp.full((m, 16), 2, jnp.bfloat16)}
  y = sm90.scaled_matmul(lhs, rhs, jnp.bfloat16, **added)
  np.testing.assert_array_equal(y, np.full((m, 16), 3))


def shaped(rows, k, dtype=INT8):
  scale = jax.ShapeDtypeStruct((1, 1), jnp.float32)
  return Quantized(jax.ShapeDtypeStruct((rows, k), dtype), scale, Spec(dtype, "tensorwise"))


@pytest.mark.parametrize(
  ("lhs", "rhs", "why"),
  [
    (shaped(16, 32), shaped(16, 16), "agree in K: 32 and 16"),
    (shaped(16, 32), shaped(16, 32, E4M3), "int8 with float8_e4m3fn"),
    (shaped(16, 2**17 + 16), shaped(16, 2**17 + 16), "131088.*overflow"),
  ],
)
def test_the_definition_s_errors_are_raised(lhs, rhs, why):
  with pytest.raises(ValueError, match=why):
    jax.eval_shape(lambda lhs, rhs: sm90.scaled_matmul(lhs, rhs, jnp.bfloat16), lhs, rhs)


def shared_bytes(config):
  """Slices of the operands, two buffers of output for each warpgroup, and barriers."""
  slices = config.stages * config.block_k * (config.block_m + config.block_n)
  return slices + 2 * 2 * 64 * 128 + 8 * (3 * config.stages + 2 * 2)


def check(config):
  """The constraints of a TileConfig, except that it lowers."""
  assert config.schedule in ("pingpong", "cooperative_m", "cooperative_n")
  assert config.raster_order in ("m", "n") and config.cluster in ("m", "n", None)
  tile_m, tile_n = config.warpgroup_tile
  assert tile_m % 64 == 0 and tile_n % 32 == 0 and tile_n <= 256
  assert tile_m * tile_n <= 128 * 192  # A warpgroup's accumulators: 192 registers a thread.
  assert config.block_k % 32 == 0 and config.raster_width >= 1
  assert config.stages >= 2
  assert shared_bytes(config) <= SHARED_BYTES


def test_every_shape_gets_a_config_that_fits():
  for m in (1, 64, 1000, 4096, 65536, 131072):
    for n in (16, 48, 768, 1280, 5120, 16384):
      for k in (16, 80, 1280, 131072):
        check(sm90.config_for(m, n, k, "NVIDIA H100 PCIe", 114))


def test_a_tuned_shape_gets_its_row_and_another_m_the_nearest(monkeypatch):
  rows = [
    {"device": "NVIDIA H200", "m": m, "n": 768, "k": 768, "config": {"raster_width": 1 + m // 1024}}
    for m in (32768, 8192)
  ]
  monkeypatch.setattr(sm90, "_shipped", lambda: rows)

  def width(m, n=768, k=768, device_kind="NVIDIA H200"):
    return sm90.config_for(m, n, k, device_kind, 132).raster_width

  assert (width(8192), width(32768)) == (9, 33)
  assert (width(4096), width(15000), width(16384), width(17000), width(10**6)) == (9, 9, 9, 33, 33)
  # The rule has 8 and 16. A row for more than twice as many rows may leave SMs idle.
  other_device = width(8192, device_kind="NVIDIA H100")
  assert (width(8192, n=1536), width(8192, k=1536), other_device, width(4000)) == (16, 8, 8, 16)


def test_few_rows_get_the_row_that_was_tuned_for_as_many_blocks(monkeypatch):
  config = {"block_m": 128, "raster_width": 3}
  rows = [{"device": "NVIDIA H200", "m": 256, "n": 768, "k": 768, "config": config}]
  monkeypatch.setattr(sm90, "_shipped", lambda: rows)
  widths = {
    m: sm90.config_for(m, 768, 768, "NVIDIA H200", 132).raster_width
    for m in (1, 128, 129, 200, 256, 257, 512, 4096, 65536)
  }
  assert [m for m, width in widths.items() if width == 3] == [129, 200, 256]


@pytest.mark.parametrize("n", [768, 1280])
def test_the_rule_makes_small_blocks_of_few_rows_and_large_ones_of_many(n):
  configs = [sm90.config_for(m, n, n, "another", 132) for m in (64, 1024, 65536)]
  blocks = [config.block_m * config.block_n for config in configs]
  assert blocks == sorted(blocks) and blocks[0] == 128 * 64 and blocks[-1] == 128 * 192


def test_the_rule_takes_pingpong_at_many_rows_if_64_divides_n():
  schedules = {
    (m, n): sm90.config_for(m, n, 1280, "another", 132).schedule
    for m in (1024, 65536)
    for n in (5120, 5136, 5152)
  }
  assert [size for size, schedule in schedules.items() if schedule == "pingpong"] == [(65536, 5120)]


def test_a_shape_is_tuned_once():
  keys = [(row["device"], row["m"], row["n"], row["k"]) for row in sm90._shipped()]
  assert len(keys) == len(set(keys))


def test_every_tuned_row_is_a_config_that_fits_its_device():
  for row in sm90._shipped():
    assert row["device"].startswith("NVIDIA H") and row["n"] % 16 == row["k"] % 16 == 0
    config = sm90.TileConfig(**row["config"])
    check(config)
    assert sm90.config_for(row["m"], row["n"], row["k"], row["device"], 132) == config


@needs_interpreter
@pytest.mark.parametrize("dtype", [INT8, E4M3])
def test_each_kernel_runs_accumulate_and_every_tile_config(dtype):
  sums, products = jax.eval_shape(lambda: each_kernel.tile_configs("mosaic", dtype))
  assert (sums.shape, sums.dtype) == ((333, 208), format_of(dtype).accumulator)
  assert len(products) == len(sm90.tile_configs()) > 0
  assert {y.shape for y in products} == {(333, 208)}
