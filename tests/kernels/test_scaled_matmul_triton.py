"""The Triton matmul has the definition's bits in int8, and compiles for sm_80, sm_89 and sm_90."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_case
from pairwise import mainly, pairwise

from sbjax import E4M3, E5M2, INT8, Quantized, Spec, quantize, scaled_matmul
from sbjax.pallas.triton.call import compute_capability

pytestmark = pytest.mark.aot


@pytest.fixture
def kernels():
  return triton_case.interpreted("triton.scaled_matmul")


@pytest.fixture
def small(kernels):
  return kernels.TileConfig(
    block_m=16, block_n=16, block_k=32, num_stages=1, num_warps=1, group_m=2
  )


def operand(seed, rows, k, dtype=INT8, scaling="rowwise"):
  x = np.random.default_rng(seed).normal(size=(rows, k)).astype(np.float32)
  return quantize(jnp.asarray(x), Spec(dtype, scaling))


@pytest.mark.parametrize(
  ("lhs_scaling", "rhs_scaling", "out_dtype"),
  pairwise(
    ["rowwise", "tensorwise"], ["rowwise", "tensorwise"], [jnp.float32, jnp.bfloat16, jnp.float16]
  ),
)
def test_int8_is_the_definition_bit_for_bit(kernels, small, lhs_scaling, rhs_scaling, out_dtype):
  lhs, rhs = operand(0, 40, 64, INT8, lhs_scaling), operand(1, 48, 64, INT8, rhs_scaling)
  y = kernels.scaled_matmul(lhs, rhs, out_dtype, config=small)
  assert y.dtype == out_dtype
  np.testing.assert_array_equal(y, scaled_matmul(lhs, rhs, out_dtype))


@pytest.mark.parametrize("shape", [(1, 16, 32), (16, 16, 16), (33, 48, 80), (100, 80, 48)], ids=str)
def test_ragged_rows_and_k_are_masked(kernels, small, shape):
  m, n, k = shape
  lhs, rhs = operand(0, m, k), operand(1, n, k)
  np.testing.assert_array_equal(
    kernels.scaled_matmul(lhs, rhs, jnp.float32, config=small),
    scaled_matmul(lhs, rhs, jnp.float32),
  )


def test_every_config_of_the_rule_computes_the_same(kernels):
  for m in (48, 65):
    for capability in (80, 89, 90):
      lhs, rhs = operand(0, m, 80), operand(1, 48, 80)
      config = kernels.by_rule(m, 48, capability)
      np.testing.assert_array_equal(
        kernels.scaled_matmul(lhs, rhs, jnp.float32, config=config),
        scaled_matmul(lhs, rhs, jnp.float32),
      )


@pytest.mark.parametrize("capability", [80, 89, 90])
def test_the_rule_s_block_k_is_at_least_the_tensor_core_s(kernels, capability):
  shapes = [(m, n) for m in (1, 64, 65, 1000, 65536) for n in (16, 768, 5120)]
  assert min(kernels.by_rule(*shape, capability).block_k for shape in shapes) >= 32


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=str)
def test_fp8_products_are_summed_in_float32(kernels, small, dtypes):
  lhs, rhs = operand(0, 20, 80, dtypes[0]), operand(1, 16, 80, dtypes[1])
  a, b = (np.asarray(q.values).astype(np.float64) * np.asarray(q.scale) for q in (lhs, rhs))
  y = kernels.scaled_matmul(lhs, rhs, jnp.float32, config=small)
  assert np.all(np.abs(y - a @ b.T) <= 80 * 2.0**-24 * (np.abs(a) @ np.abs(b).T))


@pytest.mark.parametrize("has_residual", [False, True])
def test_a_bias_and_a_residual_are_added_in_float32(kernels, small, has_residual):
  lhs, rhs = operand(0, 20, 64), operand(1, 32, 64)
  # Scales that are powers of two: a fused multiply-add would give the same.
  lhs, rhs = (
    dataclasses.replace(q, scale=jnp.exp2(jnp.round(jnp.log2(q.scale)))) for q in (lhs, rhs)
  )
  bias = jnp.asarray(np.random.default_rng(2).normal(size=32).astype(np.float32))
  for dtype in (jnp.float32, jnp.bfloat16):
    options = {"bias": bias.astype(dtype)}
    if has_residual:
      residual = np.random.default_rng(3).normal(size=(20, 32))
      options["residual"] = jnp.asarray(residual, jnp.bfloat16)
    np.testing.assert_array_equal(
      kernels.scaled_matmul(lhs, rhs, jnp.bfloat16, config=small, **options),
      scaled_matmul(lhs, rhs, jnp.bfloat16, **options),
    )


def test_accumulate_is_exact_and_partial_sums_add_up(kernels, small):
  lhs, rhs = operand(0, 20, 96), operand(1, 32, 96)
  total = kernels.accumulate(lhs.values, rhs.values, config=small)
  assert total.dtype == jnp.int32
  expected = np.asarray(lhs.values, np.int32) @ np.asarray(rhs.values, np.int32).T
  np.testing.assert_array_equal(total, expected)
  parts = [
    kernels.accumulate(lhs.values[:, p], rhs.values[:, p], config=small)
    for p in (slice(0, 48), slice(48, 96))
  ]
  np.testing.assert_array_equal(parts[0] + parts[1], expected)


def test_a_nan_scale_makes_only_its_row_nan(kernels, small):
  lhs, rhs = operand(0, 20, 32), operand(1, 16, 32)
  lhs = dataclasses.replace(lhs, scale=lhs.scale.at[3].set(jnp.nan))
  rows = np.isnan(kernels.scaled_matmul(lhs, rhs, jnp.bfloat16, config=small))
  np.testing.assert_array_equal(rows, np.broadcast_to(np.arange(20)[:, None] == 3, (20, 16)))


@pytest.mark.parametrize("shape", [(0, 16, 32), (4, 16, 0)], ids=str)
def test_an_empty_sum_is_zero(kernels, shape):
  m, n, k = shape
  lhs = Quantized(jnp.zeros((m, k), jnp.int8), jnp.ones((m, 1)), Spec(INT8, "rowwise"))
  rhs = Quantized(jnp.zeros((n, k), jnp.int8), jnp.ones((n, 1)), Spec(INT8, "rowwise"))
  added = {"bias": jnp.ones(16), "residual": jnp.full((m, 16), 2, jnp.bfloat16)}
  y = kernels.scaled_matmul(lhs, rhs, jnp.bfloat16, **added)
  np.testing.assert_array_equal(y, np.full((m, 16), 3))


def test_the_definition_s_errors_are_raised(kernels):
  with pytest.raises(ValueError, match="agree in K: 32 and 16"):
    kernels.scaled_matmul(operand(0, 16, 32), operand(1, 16, 16), jnp.float32)
  with pytest.raises(ValueError, match="int8 with float8_e4m3fn"):
    kernels.scaled_matmul(operand(0, 16, 32), operand(1, 16, 32, E4M3), jnp.float32)
  long = jax.ShapeDtypeStruct((16, 2**17 + 16), jnp.int8)
  with pytest.raises(ValueError, match=r"131088.*overflow.*131072"):
    kernels.accumulate(long, long)


MMA = {
  80: r"mma\.sync\.\S*s32\.s8\.s8",
  89: r"mma\.sync\.\S*s32\.s8\.s8",
  90: r"wgmma\S*k32\.s32\.s8\.s8",
}


@pytest.mark.parametrize(
  "shape", [(65536, 5120, 1280), (1000, 512, 1680), (50, 768, 3072)], ids=str
)
@pytest.mark.parametrize("capability", mainly([80], [80, 89, 90]))
def test_int8_compiles_to_the_tensor_core_without_spills(monkeypatch, tmp_path, capability, shape):
  (m, n, k), t = shape, triton_case.loaded("triton.scaled_matmul")
  lhs, rhs = (
    Quantized(
      jax.ShapeDtypeStruct((r, k), jnp.int8),
      jax.ShapeDtypeStruct((r if scaling == "rowwise" else 1, 1), jnp.float32),
      Spec(INT8, scaling),
    )
    for r, scaling in ((m, "rowwise"), (n, "tensorwise"))
  )
  added = jax.ShapeDtypeStruct((n,), jnp.float32), jax.ShapeDtypeStruct((m, n), jnp.bfloat16)

  def both(lhs, rhs, bias, residual):
    y = t.scaled_matmul(lhs, rhs, jnp.bfloat16, bias=bias, residual=residual)
    return y, t.accumulate(lhs.values, rhs.values)

  kernels = triton_case.compiled(monkeypatch, tmp_path, capability, both, lhs, rhs, *added)
  assert len(kernels) == 2
  for kernel in kernels:
    assert kernel.count(MMA[capability]) > 0
    assert kernel.count(r"cp\.async\.\S*shared\.global") > 0
    assert kernel.spilled_bytes == 0
    assert kernel.shared_bytes <= triton_case.SHARED_BYTES[capability]
    assert kernel.count(r"fma\.") == 0  # Products and sums are rounded separately.


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize("capability", mainly([89], [89, 90]))
def test_fp8_compiles_to_the_tensor_core_without_spills(monkeypatch, tmp_path, capability, dtypes):
  t = triton_case.loaded("triton.scaled_matmul")
  lhs, rhs = (
    Quantized(
      jax.ShapeDtypeStruct((4096, 1024), dtype),
      jax.ShapeDtypeStruct((1, 1), jnp.float32),
      Spec(dtype, "tensorwise"),
    )
    for dtype in dtypes
  )
  (kernel,) = triton_case.compiled(
    monkeypatch, tmp_path, capability, lambda a, b: t.scaled_matmul(a, b, jnp.bfloat16), lhs, rhs
  )
  names = {E4M3: "e4m3", E5M2: "e5m2"}
  assert kernel.count(rf"mma\S*f32\.{names[dtypes[0]]}\.{names[dtypes[1]]}") > 0
  assert kernel.spilled_bytes == 0
  assert kernel.shared_bytes <= triton_case.SHARED_BYTES[capability]


@pytest.mark.parametrize("capability", [80, 89, 90])
def test_an_abstract_device_gives_the_compute_capability(capability):
  with triton_case.chip(capability):
    assert compute_capability() == capability
