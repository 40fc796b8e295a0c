"""The Triton quantizers have the definition's bits, and compile for sm_80, sm_89 and sm_90."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_case
from pairwise import pairwise

from sbjax import E4M3, E5M2, INT8, Spec, quantize

pytestmark = pytest.mark.aot

FORMATS = {"int8": INT8, "e4m3": E4M3, "e5m2": E5M2}
INT8_ROW, INT8_TENSOR = Spec(INT8, "rowwise"), Spec(INT8, "tensorwise")


@pytest.fixture
def kernels():
  return triton_case.interpreted("triton.quantize")


def normal(rows, k, dtype="float32"):
  """Normals [rows, k]; the rows differ in scale up to 64 times."""
  x = np.random.default_rng(rows * k).normal(size=(rows, k)) * np.exp2(np.arange(rows) % 7)[:, None]
  return jnp.asarray(x.astype(np.float32)).astype(dtype)


def assert_same(actual, expected):
  assert actual.values.dtype == expected.values.dtype
  np.testing.assert_array_equal(
    np.asarray(actual.values).view(np.uint8), np.asarray(expected.values).view(np.uint8)
  )
  np.testing.assert_array_equal(actual.scale, expected.scale)


@pytest.mark.parametrize(
  ("fmt", "scaling", "dtype"),
  pairwise(
    FORMATS,
    ["rowwise", "columnwise", "tensorwise", "tensorwise_pow2", "static"],
    ["float32", "bfloat16", "float16"],
  ),
)
def test_values_and_scales_are_the_definition_s_bit_for_bit(kernels, fmt, scaling, dtype):
  x, spec = normal(5, 40, dtype) * 30, Spec(FORMATS[fmt], scaling)
  assert_same(kernels.quantize(x, spec), quantize(x, spec))


@pytest.mark.parametrize(
  ("k", "block_rows"), [(1, 1), (1, 2), (3, 1), (80, 2), (208, 1), (257, 2), (1000, 1), (1000, 2)]
)
def test_ragged_rows_are_the_definition_s(kernels, k, block_rows):
  x = normal(3, k)
  config = kernels.Config(rows=block_rows, warps=1, vector=4)
  assert_same(kernels.quantize(x, INT8_ROW, config=config), quantize(x, INT8_ROW))


@pytest.mark.parametrize(
  ("k", "spec"), [(1, INT8_ROW), (257, INT8_ROW), (40, INT8_TENSOR)], ids=str
)
def test_a_fold_multiplies_x_before_it_is_rounded(kernels, k, spec):
  x, fold = normal(3, k, "bfloat16").at[1].set(0.0), jnp.exp2(3 * normal(1, k)[0])
  expected = quantize(x.astype(jnp.float32) * fold[None], spec)
  assert_same(kernels.quantize(x, spec, fold=fold), expected)


@pytest.mark.parametrize("k", [768, 1024, 1280, 1664, 4096, 5120, 6656, 8192])
def test_pieces_of_clip_s_widths_have_no_idle_lanes(kernels, k):
  assert sum(lanes for _, lanes in kernels.pieces(k)) == k


def test_pieces_cover_a_row_without_overlap(kernels):
  for k in range(1, 300):
    pieces = kernels.pieces(k)
    ends = [first + lanes for first, lanes in pieces]
    assert len(pieces) <= 4
    assert [first for first, _ in pieces] == [0, *ends[:-1]]
    assert pieces[-1][0] < k <= ends[-1]


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise", "tensorwise_pow2", "static"])
@pytest.mark.parametrize("bits", [0x7FC000FF, 0x7F800000, 0xFF800000])  # A NaN, +-inf.
def test_a_nan_or_infinity_makes_only_its_own_scale_nan(kernels, bits, scaling):
  x, spec = np.array(normal(4, 40)), Spec(INT8, scaling)
  x.view(np.uint32)[2, 33] = bits
  x = jnp.asarray(x)
  q = kernels.quantize(x, spec)
  expected = np.arange(4)[:, None] == 2 if scaling == "rowwise" else [[True]]
  np.testing.assert_array_equal(np.isnan(q.scale), expected)
  assert_same(q, quantize(x, spec))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise", "tensorwise_pow2"])
def test_zeros_stay_zeros(kernels, fmt, scaling):
  x, spec = normal(3, 24).at[1].set(0.0), Spec(FORMATS[fmt], scaling)
  assert_same(kernels.quantize(x, spec), quantize(x, spec))
  assert_same(kernels.quantize(0 * x, spec), quantize(0 * x, spec))


@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 1e-36, 3e38])
def test_extreme_magnitudes_are_the_definition_s(kernels, magnitude):
  x = jnp.asarray((np.linspace(-1, 1, 24).reshape(2, 12) * magnitude).astype(np.float32))
  q, a = kernels.quantize(x, INT8_ROW), np.asarray(x)
  largest = np.max(np.abs(a), axis=1, keepdims=True)
  with np.errstate(over="ignore"):
    factor = np.minimum(np.float32(127) / largest, np.finfo(np.float32).max)
  np.testing.assert_array_equal(q.values, np.rint(a * factor).astype(np.int8))
  np.testing.assert_array_equal(q.scale, largest * np.float32(1 / 127))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 448.1, 57345.0, 3e38])
def test_powers_of_two_are_the_definition_s(kernels, fmt, magnitude):
  x = jnp.asarray((np.linspace(-1, 1, 24).reshape(2, 12) * magnitude).astype(np.float32))
  spec = Spec(FORMATS[fmt], "tensorwise_pow2")
  actual, expected = kernels.quantize(x, spec), quantize(x, spec)
  np.testing.assert_array_equal(actual.scale, expected.scale)
  if magnitude > 1e-37:  # XLA flushes smaller numbers on a CPU.
    assert_same(actual, expected)


@pytest.mark.parametrize("exponent", [-5, 0, 9])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_a_static_scale_saturates_and_keeps_what_is_not_finite(kernels, fmt, exponent):
  x = (300 * normal(3, 40)).at[1, 2].set(jnp.nan).at[2, 3].set(-jnp.inf).at[0, 0].set(3e38)
  spec = Spec(FORMATS[fmt], "static", exponent)
  (q, transposed), expected = kernels.quantize_both(x, spec), quantize(x, spec)
  for actual in (q, kernels.quantize(x, spec), transposed.T):
    np.testing.assert_array_equal(
      np.asarray(actual.values, np.float32), np.asarray(expected.values, np.float32)
    )
    assert actual.scale == 2.0**-exponent
  assert np.sum(np.isnan(np.asarray(q.values, np.float32))) == 2


def test_a_static_scale_reads_no_maximum(kernels, monkeypatch):
  monkeypatch.setattr(kernels, "absmax", None)
  kernels.quantize(normal(3, 40), Spec(E4M3, "static"))
  with pytest.raises(TypeError):
    kernels.quantize(normal(3, 40), Spec(INT8, "static"))


def test_halves_round_to_even(kernels):
  x = jnp.array([[0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5, 126.5, 127.0]])
  for scaling in ("static", "rowwise"):  # The factor is 127 / 127.
    values = kernels.quantize(x, Spec(INT8, scaling)).values
    np.testing.assert_array_equal(values, [[0, 2, 2, 4, 0, -2, -2, 126, 127]])


def test_rows_too_long_for_registers_take_two_passes(kernels, monkeypatch):
  monkeypatch.setattr(kernels, "ONE_PASS_WIDTH", 32)
  x = normal(3, 40).at[1, 7].set(np.inf)
  assert_same(kernels.quantize(x, INT8_ROW), quantize(x, INT8_ROW))


@pytest.mark.parametrize("shape", [(70, 130), (3, 1100)], ids=str)
@pytest.mark.parametrize("axis", [0, 1, None])
def test_absmax_is_the_largest_magnitude_and_infinite_for_nan(kernels, shape, axis):
  x = normal(*shape, "bfloat16").at[1, 2].set(jnp.nan)
  expected = np.abs(np.where(np.isnan(x), np.inf, np.asarray(x, np.float32)))
  largest = kernels.absmax(x, axis)
  assert largest.dtype == jnp.float32
  np.testing.assert_array_equal(largest, np.max(expected, axis=axis, keepdims=True))


@pytest.mark.parametrize("shape", [(70, 40), (3, 130), (3, 1)], ids=str)
@pytest.mark.parametrize("scaling", ["rowwise", "columnwise", "tensorwise", "static"])
def test_quantize_transposed_is_quantize_of_the_transpose(kernels, shape, scaling):
  x, spec = normal(*shape).at[1, 2].set(jnp.nan), Spec(INT8, scaling)
  assert_same(kernels.quantize_transposed(x, spec), quantize(x.T, spec))


@pytest.mark.parametrize("scaling", ["columnwise", "tensorwise", "tensorwise_pow2", "static"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_quantize_both_is_quantize_of_x_and_of_its_transpose(kernels, fmt, scaling):
  x, spec = normal(70, 40, "bfloat16"), Spec(FORMATS[fmt], scaling)
  q, transposed = kernels.quantize_both(x, spec)
  assert_same(q, quantize(x, spec))
  assert_same(transposed, quantize(x.T, spec.T))


@pytest.mark.parametrize("most", [600, 599])
def test_columns_of_several_partial_maxima_have_their_scales(kernels, monkeypatch, most):
  monkeypatch.setattr(kernels, "MANY_ROWS", most)  # The cast reduces them, or XLA.
  x = normal(600, 130).at[599, 2].set(1e4).at[300, 7].set(jnp.nan).at[:, 9].set(0.0)
  assert_same(kernels.quantize_transposed(x, INT8_ROW), quantize(x.T, INT8_ROW))


@pytest.mark.parametrize("shape", [(70, 1), (1, 40), (1, 1)], ids=str)
@pytest.mark.parametrize("transpose", [False, True, "both"])
def test_cast_scaled_multiplies_saturates_and_rounds(kernels, shape, transpose):
  # Smaller than some of x, which saturates.
  x, absmax = normal(70, 40), jnp.exp2(normal(*shape))
  factor = np.float32(127) / np.asarray(absmax)
  expected = np.rint(np.clip(np.asarray(x) * factor, -127, 127)).astype(np.int8)
  values = kernels.cast_scaled(x, absmax, Spec(INT8, "rowwise"), transpose=transpose)
  if transpose == "both":
    np.testing.assert_array_equal(values[0], expected)
    np.testing.assert_array_equal(values[1], expected.T)
  else:
    np.testing.assert_array_equal(values, expected.T if transpose else expected)


@pytest.mark.parametrize("shape", [(0, 32), (3, 0)], ids=str)
@pytest.mark.parametrize("spec", [INT8_ROW, INT8_TENSOR], ids=str)
def test_empty_arrays_quantize_to_empty_arrays(kernels, spec, shape):
  x = jnp.zeros(shape)
  assert_same(kernels.quantize(x, spec), quantize(x, spec))
  assert_same(kernels.quantize_transposed(x, spec), quantize(x.T, spec))


def test_the_definition_s_errors_are_raised(kernels):
  with pytest.raises(ValueError, match="floating point"):
    kernels.quantize(jnp.ones((2, 16), jnp.int32), INT8_ROW)


CASES = {
  "rowwise": lambda q, x: q.quantize(x, INT8_ROW),
  "tensorwise": lambda q, x: q.quantize(x, INT8_TENSOR),
  "transposed": lambda q, x: q.quantize_transposed(x, INT8_ROW),
  "both": lambda q, x: q.quantize_both(x, INT8_TENSOR),
  "both, columnwise": lambda q, x: q.quantize_both(x, Spec(INT8, "columnwise")),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_int8_compiles_without_spills_and_moves_16_bytes_at_a_time(
  monkeypatch, tmp_path, capability, case
):
  q = triton_case.loaded("triton.quantize")
  shape = (128 * (1 + list(CASES).index(case)), 1280)
  x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  kernels = triton_case.compiled(monkeypatch, tmp_path, capability, lambda x: CASES[case](q, x), x)
  assert len(kernels) == (1 if case == "rowwise" else 2)
  for kernel in kernels:
    assert kernel.spilled_bytes == 0
    assert kernel.shared_bytes <= triton_case.SHARED_BYTES[capability]
    assert kernel.count(r"ld\.global\.v4") > 0
    # The cast of columns reads its few partial maxima, float32 from the cache, 8 bytes at a time.
    narrow = kernel.count(r"ld\.global\.(v2|b16|b8)")
    assert narrow == (case == "both, columnwise" and ".entry _cast_kernel" in kernel.ptx)
    assert kernel.count(r"fma\.") == 0  # Products and sums are rounded separately.
    assert kernel.count(r"max\.f(16|32)") == 0  # It would drop a NaN; max.NaN does not.
  stores = sum(kernel.count(r"st\.global\.v4") for kernel in kernels)
  assert stores > 0 or case == "rowwise"  # Its threads store the 8 values they load: 8 bytes.


@pytest.mark.parametrize("k", [768, 1280, 1664, 5120, 16384])
def test_a_row_is_read_once_16_bytes_at_a_time(monkeypatch, tmp_path, k):
  q = triton_case.loaded("triton.quantize")
  x = jax.ShapeDtypeStruct((4096, k), jnp.bfloat16)
  (kernel,) = triton_case.compiled(monkeypatch, tmp_path, 90, lambda x: q.quantize(x, INT8_ROW), x)
  config = q.config_for(4096, k, 2)
  read = 16 * kernel.count(r"ld\.global\.v4") + 8 * kernel.count(r"ld\.global\.v2")
  assert kernel.spilled_bytes == 0
  assert kernel.count(r"div\.rn\.f32") == config.rows and kernel.count(r"div\.full") == 0
  assert read * 32 * config.warps == 2 * k * config.rows


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize(("capability", "source"), [(89, "f16x2"), (90, "f32")])
def test_fp8_is_cast_by_the_instruction_that_saturates(
  monkeypatch, tmp_path, capability, source, fmt
):
  q = triton_case.loaded("triton.quantize")
  x = jax.ShapeDtypeStruct((96, 1280), jnp.bfloat16)
  (kernel,) = triton_case.compiled(
    monkeypatch, tmp_path, capability, lambda x: q.quantize(x, Spec(FORMATS[fmt], "rowwise")), x
  )
  assert kernel.count(rf"cvt\.rn\.satfinite\.{fmt}x2\.{source}") == 1280 // 2 // 32


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_fp8_is_rounded_once_where_the_cast_truncates_to_float16_first(
  kernels, monkeypatch, fmt, scaling
):
  triton_case.cast_by_way_of_float16(monkeypatch)
  monkeypatch.setattr(kernels, "compute_capability", lambda: 89)
  # Halfway points between values of the format, their next larger neighbours, and zeros.
  grid = np.arange(0, 64, dtype=np.uint8).view(FORMATS[fmt]).astype(np.float32)
  halfway = (grid[1:] + grid[:-1]) / 2
  x = np.concatenate([halfway, np.nextafter(halfway, np.float32(np.inf)), grid, [-0.0]])
  largest = 448 if fmt == "e4m3" else 57344
  x = jnp.asarray(np.concatenate([x, -x, [largest]]).astype(np.float32)[None])
  spec = Spec(FORMATS[fmt], scaling)
  assert_same(kernels.quantize(x, spec), quantize(x, spec))


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_a_missing_gpu_is_a_clear_error():
  q = triton_case.loaded("triton.quantize")
  with pytest.raises(NotImplementedError, match=r"on NVIDIA GPUs; .* is .cpu"):
    q.quantize(jnp.ones((2, 16)), INT8_ROW)


def test_importing_the_wrapper_imports_neither_triton_nor_jax_triton():
  program = (
    "import sys, sbjax.pallas.triton.call, sbjax;"
    "assert not {'triton', 'jax_triton', 'torch'} & set(sys.modules)"
  )
  subprocess.run([sys.executable, "-c", program], check=True)
