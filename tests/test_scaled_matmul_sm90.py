"""The Mosaic matmul gives the definition's bits in int8, without a race; its configs fit Hopper."""

import dataclasses

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import each_kernel
from sbjax import E4M3, E5M2, INT8, Quantized, Spec, quantize, scaled_matmul
from sbjax.formats import accumulator_dtype
from sbjax.pallas import scaled_matmul_sm90 as sm90

SHARED_BYTES = 232_448  # What a block of threads may have on Hopper.

needs_interpreter = pytest.mark.skipif(
  jax.__version_info__ < (0, 11), reason="Mosaic's interpreter needs jax >= 0.11 (Python >= 3.12)"
)

# Blocks as small as they get: a shape of a few hundred has many, and work to share among clusters.
SMALL = sm90.Config(block_m=128, block_n=64, block_k=64, stages=2, cluster=None)
CONFIGS = {
  "split m": SMALL,
  "split n": dataclasses.replace(SMALL, split="n"),
  "cluster m": dataclasses.replace(SMALL, cluster="m", minor="m", width=2),
  "cluster n": dataclasses.replace(SMALL, cluster="n"),
  "in turns": dataclasses.replace(SMALL, split=None, stages=3),
  "in turns, cluster m": dataclasses.replace(SMALL, split=None, cluster="m"),
  "wide, in turns": dataclasses.replace(SMALL, split=None, block_n=192, cluster="n"),
  "tall, in turns": dataclasses.replace(SMALL, split=None, block_m=192, block_n=128, cluster="n"),
  "wide": dataclasses.replace(SMALL, split="n", block_n=256, stages=3, cluster="m"),
  "smallest": dataclasses.replace(SMALL, block_m=64, split="n", cluster="m"),
  "default": None,
}


def interpreted(function, *args, config=None, **kwargs):
  """A function of sm90 in Mosaic's interpreter, which watches for races."""
  from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

  # Large blocks are few: fewer multiprocessors have several of them.
  is_large = config is not None and config.block_m * config.block_n > 128 * 64
  multiprocessors = 2 if is_large else 4
  interpret = plgpu.InterpretGPUParams(detect_races=True)
  options = {"config": config, "multiprocessors": multiprocessors, "interpret": interpret}
  y = function(*args, **options, **kwargs)
  y = np.asarray(y)
  assert not gpu_callbacks.get_races().races_found
  return y


def operand(seed, rows, k, dtype=INT8, scaling="rowwise"):
  x = np.random.default_rng(seed).normal(size=(rows, k)).astype(np.float32)
  x[0] = 0
  return quantize(jnp.asarray(x), Spec(dtype, scaling))


@needs_interpreter
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_each_way_to_cut_the_work_gives_the_definition_s_bits(config):
  # Ragged rows, K and N in sixteens alone, and several blocks for each of the clusters.
  lhs, rhs = operand(0, 395, 144), operand(1, 208, 144)
  y = interpreted(sm90.scaled_matmul, lhs, rhs, jnp.bfloat16, config=config)
  np.testing.assert_array_equal(y, scaled_matmul(lhs, rhs, jnp.bfloat16))
  assert not y[0].any() and not y[:, 0].any()


@needs_interpreter
@pytest.mark.parametrize("block_n", [64, 192])
def test_an_odd_number_of_pieces_waits_for_the_block_before(block_n):
  # Pieces are 64 columns wide where N allows; blocks follow one another in the same two buffers.
  lhs, rhs = operand(0, 395, 64), operand(1, 384, 64)
  config = dataclasses.replace(SMALL, block_n=block_n)
  y = interpreted(sm90.scaled_matmul, lhs, rhs, jnp.bfloat16, config=config)
  np.testing.assert_array_equal(y, scaled_matmul(lhs, rhs, jnp.bfloat16))


@needs_interpreter
@pytest.mark.parametrize("config", ["split m", "wide, in turns"])
@pytest.mark.parametrize("lhs_scaling", ["rowwise", "tensorwise"])
@pytest.mark.parametrize(
  ("rhs_scaling", "out_dtype"), [("rowwise", jnp.float32), ("tensorwise", jnp.float16)]
)
def test_a_scale_is_a_row_s_or_the_tensor_s_on_either_side(
  config, lhs_scaling, rhs_scaling, out_dtype
):
  lhs, rhs = operand(0, 72, 48, INT8, lhs_scaling), operand(1, 80, 48, INT8, rhs_scaling)
  y = interpreted(sm90.scaled_matmul, lhs, rhs, out_dtype, config=CONFIGS[config])
  assert y.dtype == out_dtype
  np.testing.assert_array_equal(y, scaled_matmul(lhs, rhs, out_dtype))


@needs_interpreter
@pytest.mark.parametrize("shape", [(1, 16, 16), (129, 272, 80)], ids=str)
def test_what_is_less_than_a_block_is_computed_as_it_is(shape):
  m, n, k = shape
  lhs, rhs = operand(0, m, k), operand(1, n, k)
  y = interpreted(sm90.scaled_matmul, lhs, rhs, jnp.bfloat16)
  np.testing.assert_array_equal(y, scaled_matmul(lhs, rhs, jnp.bfloat16))


@needs_interpreter
def test_a_bias_is_added_before_the_cast():
  lhs, rhs = operand(0, 72, 48), operand(1, 80, 48, INT8, "tensorwise")
  # Powers of two: the product is exact, and a fused multiply-add gives the same.
  rounded = [
    dataclasses.replace(q, scale=jnp.exp2(jnp.round(jnp.log2(q.scale)))) for q in (lhs, rhs)
  ]
  bias = jnp.asarray(np.random.default_rng(2).normal(size=80), jnp.bfloat16)
  y = interpreted(sm90.scaled_matmul, *rounded, jnp.bfloat16, bias=bias, config=SMALL)
  np.testing.assert_array_equal(y, scaled_matmul(*rounded, jnp.bfloat16, bias=bias))
  # Else the product may be rounded before the sum or not.
  y = interpreted(sm90.scaled_matmul, lhs, rhs, jnp.float32, bias=bias, config=SMALL)
  product = np.abs(scaled_matmul(lhs, rhs, jnp.float32))
  expected = scaled_matmul(lhs, rhs, jnp.float32, bias=bias)
  assert np.all(np.abs(y - expected) <= 2.0**-24 * product + 2.0**-23 * np.abs(expected))


@needs_interpreter
@pytest.mark.parametrize(
  ("config", "n", "out_dtype"),
  [
    *(("split m", n, jnp.bfloat16) for n in (192, 208)),  # 1 and 4 pieces a block.
    ("three pieces", 384, jnp.bfloat16),
    *((name, 208, jnp.bfloat16) for name in ("cluster m", "smallest", "default")),
    *((name, 208, jnp.bfloat16) for name in ("in turns", "in turns, cluster m")),
    *(("wide, in turns", n, jnp.bfloat16) for n in (384, 208)),
    ("tall, in turns", 208, jnp.bfloat16),
    *((name, 208, jnp.float32) for name in ("cluster n", "wide")),
  ],
)
def test_an_addend_comes_in_where_the_result_goes_out(config, n, out_dtype):
  # Ragged rows; blocks follow one another in the same two buffers.
  lhs, rhs = (
    dataclasses.replace(q, scale=jnp.exp2(jnp.round(jnp.log2(jnp.maximum(q.scale, 1e-3)))))
    for q in (operand(0, 395, 144), operand(1, n, 144))
  )
  numbers = np.random.default_rng(2)
  options = {
    "bias": jnp.asarray(numbers.normal(size=n), jnp.float32),
    "residual": jnp.asarray(numbers.normal(size=(395, n)) * 9, out_dtype),
  }
  config = (CONFIGS | {"three pieces": dataclasses.replace(SMALL, block_n=192)})[config]
  y = interpreted(sm90.scaled_matmul, lhs, rhs, out_dtype, config=config, **options)
  np.testing.assert_array_equal(y, scaled_matmul(lhs, rhs, out_dtype, **options))


@needs_interpreter
def test_a_nan_scale_makes_its_row_nan_and_no_other():
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
def test_the_sums_alone_are_exact_and_add_up_over_parts_of_k():
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
  ("lhs", "rhs", "out_dtype", "error", "why"),
  [
    (shaped(16, 24), shaped(16, 24), "bfloat16", NotImplementedError, "multiples of 16.*k=24"),
    (shaped(16, 32), shaped(8, 32), "bfloat16", NotImplementedError, "multiples of 16.*n=8"),
    (shaped(16, 32), shaped(16, 32), "float64", NotImplementedError, "float32, not float64"),
    (shaped(16, 32), shaped(16, 16), "bfloat16", ValueError, "agree in K: 32 and 16"),
    (shaped(16, 32), shaped(16, 32, E4M3), "bfloat16", ValueError, "int8 with float8_e4m3fn"),
    (shaped(16, 2**17 + 16), shaped(16, 2**17 + 16), "bfloat16", ValueError, "131088.*overflow"),
  ],
)
def test_what_it_does_not_take_it_says(lhs, rhs, out_dtype, error, why):
  with pytest.raises(error, match=why):
    jax.eval_shape(lambda lhs, rhs: sm90.scaled_matmul(lhs, rhs, out_dtype), lhs, rhs)


def shared_bytes(config):
  """The slices on their way, two buffers of output a warpgroup, and the barriers."""
  slices = config.stages * config.block_k * (config.block_m + config.block_n)
  return slices + 2 * 2 * 64 * 128 + 8 * (3 * config.stages + 2 * 2)


def check(config):
  """The laws of a Config, but that it lowers."""
  assert config.split in ("m", "n", None) and config.minor in ("m", "n")
  assert config.cluster in ("m", "n", None)
  part_m, part_n = config.warpgroup
  assert part_m % 64 == 0 and part_n % 32 == 0 and part_n <= 256
  assert part_m * part_n <= 128 * 192  # A warpgroup's accumulators: 192 registers a thread.
  assert config.block_k % 32 == 0 and config.width >= 1
  assert config.stages >= 2
  assert shared_bytes(config) <= SHARED_BYTES


def test_any_shape_gets_a_config_that_fits():
  for m in (1, 64, 1000, 4096, 65536, 131072):
    for n in (16, 48, 768, 1280, 5120, 16384):
      for k in (16, 80, 1280, 131072):
        check(sm90.config_for(m, n, k, "NVIDIA H100 PCIe", 114))


def test_a_tuned_shape_gets_its_row_and_another_m_the_nearest(monkeypatch):
  rows = [
    {"chip": "NVIDIA H200", "m": m, "n": 768, "k": 768, "config": {"width": 1 + m // 1024}}
    for m in (32768, 8192)
  ]
  monkeypatch.setattr(sm90, "_tuned", lambda: rows)

  def width(m, n=768, k=768, chip="NVIDIA H200"):
    return sm90.config_for(m, n, k, chip, 132).width

  assert (width(8192), width(32768)) == (9, 33)
  assert (width(4096), width(15000), width(16384), width(17000), width(10**6)) == (9, 9, 9, 33, 33)
  # A rule's own are 8 and 16; blocks that suit twice the rows may leave multiprocessors idle.
  others = (width(8192, n=1536), width(8192, k=1536), width(8192, chip="NVIDIA H100"), width(4000))
  assert others == (16, 8, 8, 16)


def test_few_rows_get_the_row_that_was_tuned_for_as_many_blocks(monkeypatch):
  config = {"block_m": 128, "width": 3}
  rows = [{"chip": "NVIDIA H200", "m": 256, "n": 768, "k": 768, "config": config}]
  monkeypatch.setattr(sm90, "_tuned", lambda: rows)
  found = {
    m: sm90.config_for(m, 768, 768, "NVIDIA H200", 132).width
    for m in (1, 128, 129, 200, 256, 257, 512, 4096, 65536)
  }
  assert [m for m, width in found.items() if width == 3] == [129, 200, 256]


@pytest.mark.parametrize("n", [768, 1280])
def test_the_rule_cuts_few_rows_small_and_many_large(n):
  sizes = [sm90.config_for(m, n, n, "another", 132) for m in (64, 1024, 65536)]
  blocks = [config.block_m * config.block_n for config in sizes]
  assert blocks == sorted(blocks) and blocks[0] == 128 * 64 and blocks[-1] == 128 * 192


def test_the_rule_lets_warpgroups_take_turns_at_many_rows_where_stores_are_whole():
  takes_turns = {
    (m, n): sm90.config_for(m, n, 1280, "another", 132).split is None
    for m in (1024, 65536)
    for n in (5120, 5136, 5152)
  }
  assert [size for size, turns in takes_turns.items() if turns] == [(65536, 5120)]


def test_a_shape_is_tuned_once():
  keys = [(row["chip"], row["m"], row["n"], row["k"]) for row in sm90._tuned()]
  assert len(keys) == len(set(keys))


def test_every_tuned_row_is_a_config_that_fits_the_chip_it_names():
  for row in sm90._tuned():
    assert row["chip"].startswith("NVIDIA H") and row["n"] % 16 == row["k"] % 16 == 0
    config = sm90.Config(**row["config"])
    check(config)
    assert sm90.config_for(row["m"], row["n"], row["k"], row["chip"], 132) == config


@needs_interpreter
@pytest.mark.parametrize("dtype", [INT8, E4M3])
def test_a_memory_checker_sees_each_cut_and_the_sums_alone(dtype):
  sums, products = jax.eval_shape(lambda: each_kernel.cuts("mosaic", dtype))
  assert (sums.shape, sums.dtype) == ((333, 208), accumulator_dtype(dtype))
  assert len(products) == len(sm90.tuned_configs()) > 0
  assert {y.shape for y in products} == {(333, 208)}
