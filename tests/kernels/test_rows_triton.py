"""The Triton kernels of norms, GELU and GLU agree with the definition, and compile for GPUs.

Their sums over a row and their GELU have errors of a few float32 roundings. So at most one 8-bit
value in a hundred is rounded the other way and differs by one step.
"""

import math
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import triton_case
from pairwise import mainly

from sbjax import E4M3, E5M2, INT8, Spec, quantize
from sbjax.ops import rows as fused_ops
from sbjax.ops.rows import ACTIVATIONS, LayerNormParams, RMSNormParams

pytestmark = pytest.mark.aot

SPECS = {
  "none": None,
  "int8": Spec(INT8, "rowwise"),
  "e4m3": Spec(E4M3, "rowwise"),
  "e5m2": Spec(E5M2, "rowwise"),
}
INT8_ROW = SPECS["int8"]


def _norm(x):
  """Parameters for rows like x's."""
  draw = np.random.default_rng(x.shape[1]).normal
  scale, bias = (jnp.asarray(draw(size=x.shape[1]).astype(np.float32)) for _ in range(2))
  return LayerNormParams(1 + scale / 4, bias / 4)


def _rms(x):
  return RMSNormParams(_norm(x).scale)


# f has the functions: it is sbjax.ops.rows or an interpreted module of kernels.
OPERATIONS = {
  "norm_quantize": lambda f, x, dy, spec, **how: f.norm_quantize(x, _norm(x), spec, **how),
  "norm_backward": lambda f, x, dy, spec, **how: f.norm_backward(x, _norm(x), dy, None, **how),
  "norm_backward, dx": lambda f, x, dy, spec, **how: f.norm_backward(
    x, _norm(x), dy, dy[:, ::-1], **how
  ),
  "norm_quantize, rms": lambda f, x, dy, spec, **how: f.norm_quantize(x, _rms(x), spec, **how),
  "norm_backward, rms": lambda f, x, dy, spec, **how: f.norm_backward(
    x, _rms(x), dy, dy[:, ::-1], **how
  ),
  "glu_quantize": lambda f, x, dy, spec, **how: f.glu_quantize(x, dy, spec, **how),
  "glu_quantize, keep": lambda f, x, dy, spec, **how: f.glu_quantize(x, dy, spec, INT8_ROW, **how),
  "glu_backward": lambda f, x, dy, spec, **how: f.glu_backward(x, dy[:, ::-1], dy, spec, **how),
  "glu_backward, kept": lambda f, x, dy, spec, **how: f.glu_backward(
    *(quantize(h, spec or INT8_ROW) for h in (x, dy[:, ::-1])), dy, spec, **how
  ),
  "glu_backward, folds": lambda f, x, dy, spec, **how: f.glu_backward(
    x, dy[:, ::-1], dy, spec, folds=(_norm(x).scale, None), activation="gelu", **how
  ),
  "gelu_quantize": lambda f, x, dy, spec, **how: f.gelu_quantize(x, spec, **how),
  "gelu_quantize, keep": lambda f, x, dy, spec, **how: f.gelu_quantize(x, spec, INT8_ROW, **how),
  "gelu_backward": lambda f, x, dy, spec, **how: f.gelu_backward(x, dy, spec, **how),
  "gelu_backward, kept": lambda f, x, dy, spec, **how: f.gelu_backward(
    quantize(x, spec or INT8_ROW), dy, spec, **how
  ),
  "gelu_backward, fold": lambda f, x, dy, spec, **how: f.gelu_backward(
    x, dy, spec, fold=_norm(x).scale, **how
  ),
  "quantize_sum": lambda f, x, dy, spec, **how: f.quantize_sum((dy,), spec, **how),
  "quantize_sum, fold": lambda f, x, dy, spec, **how: f.quantize_sum(
    (dy,), spec, fold=_norm(dy).scale, **how
  ),
  "quantize_sum, parts": lambda f, x, dy, spec, **how: f.quantize_sum(
    (dy, x, dy[:, ::-1]), spec, **how
  ),
}
FORMATS = [
  (operation, fmt)
  for operation in OPERATIONS
  for fmt in SPECS
  if not (operation.startswith("quantize_sum") and fmt == "none")
  and not (operation.startswith("norm_backward") and fmt != "none")  # It has no spec.
]
DTYPES = ["float32", "bfloat16", "float16"]


def interpreted(operation):
  return triton_case.interpreted(f"triton.{file_of(operation)}")


def file_of(operation):
  return next(
    name for name in ("norm", "gelu", "glu", "quantize_sum") if operation.startswith(name)
  )


def run(operation, x, dy, spec, **how):
  """The results of the kernel and of the definition."""
  function = OPERATIONS[operation]
  actual = function(interpreted(operation), x, dy, spec, **how)
  return actual, function(fused_ops, x, dy, spec)


def draw(m, k, dtype="float32"):
  """Normals x and dy [m, k]; the rows differ in scale up to 16 times."""
  x, dy = np.random.default_rng(m * k).normal(size=(2, m, k))
  size = np.exp2(np.arange(m) % 5)[:, None]
  return (jnp.asarray(a.astype(np.float32)).astype(dtype) for a in (x * size / 2 + 0.25, dy * size))


def assert_near(actual, expected, operation):
  """Floats differ by a relative error of their row's largest; 8-bit values rarely, by a step."""
  error = 2e-6 if operation.startswith("norm") else 2e-5
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape and a.dtype == b.dtype
    finite = np.isfinite(b.astype(np.float32))
    np.testing.assert_array_equal(np.isfinite(a.astype(np.float32)), finite)
    a, b = np.where(finite, a, a.dtype.type(0)), np.where(finite, b, b.dtype.type(0))
    if a.dtype.itemsize == 1:
      assert np.sum(a != b) <= max(1, a.size // 100)
      assert np.max(np.abs(_steps(a) - _steps(b)), initial=0) <= 1
    else:
      step = float(jnp.finfo(a.dtype).eps)
      a, b = a.astype(np.float64), b.astype(np.float64)
      largest = np.max(np.abs(b), axis=-1, keepdims=True, initial=0)
      assert np.all(np.abs(a - b) <= step * np.abs(b) + error * largest)


def _steps(values):
  """Integers that number the values of an 8-bit format in order."""
  if values.dtype == np.int8:
    return values.astype(np.int32)
  bits = values.view(np.uint8).astype(np.int32)
  return np.where(bits < 128, bits, 128 - bits)


def assert_same(actual, expected):
  for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


# The interpreter is slow, so grids here and below are pairwise.
@pytest.mark.parametrize(
  ("operation", "fmt", "dtype"),
  [
    (operation, fmt, dtype)
    for i, (operation, fmt) in enumerate(FORMATS)
    for j, dtype in enumerate(DTYPES)
    if operation.startswith("norm_backward") or (i - j) % 3 == 0
  ],
)
def test_rows_are_near_the_definition_s(operation, fmt, dtype):
  x, dy = draw(5, 208, dtype)
  assert_near(*run(operation, x, dy, SPECS[fmt]), operation)


@pytest.mark.parametrize(
  ("k", "config"),
  mainly([(31, (4, 1))], [(1, (2, 2)), (31, (4, 1)), (257, (2, 2)), (1000, (4, 1))]),
  ids=str,
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_ragged_rows_are_near_the_definition_s(operation, k, config):
  x, dy = draw(5, k)
  config_rows, warps = config
  config = interpreted(operation).Config(rows=config_rows, warps=warps, vector=4)
  assert_near(*run(operation, x, dy, INT8_ROW, config=config), operation)


@pytest.mark.parametrize("fmt", ["int8", "e4m3", "e5m2"])
def test_the_saved_input_of_gelu_is_quantized_bit_for_bit(fmt):
  x, _ = draw(5, 257, "bfloat16")
  kernels, spec = interpreted("gelu"), SPECS[fmt]
  assert_same(kernels.gelu_quantize(x, INT8_ROW, spec)[1], quantize(x, spec))
  assert kernels.gelu_quantize(x, spec)[1] is x


@pytest.mark.parametrize(
  ("count", "k", "fmt"),
  [
    (count, k, ["int8", "e4m3", "e5m2"][(i + j) % 3])
    for i, count in enumerate([1, 2, 3])
    for j, k in enumerate([16, 208, 257])
  ],
)
def test_parts_are_concatenated_and_quantized_bit_for_bit(count, k, fmt):
  _, whole = draw(5, count * k, "bfloat16")
  whole = whole.at[1].set(0.0).at[3, :k].set(0.0)
  parts, kernels = tuple(jnp.split(whole, count, axis=1)), interpreted("quantize_sum")
  config = kernels.Config(rows=2, warps=1, vector=8)
  dy, dy_q, _ = kernels.quantize_sum(parts, SPECS[fmt], config=config)
  assert_same((dy, dy_q), (whole, quantize(whole, SPECS[fmt])))
  assert count > 1 or dy is parts[0]


SUMMING = [o for o in OPERATIONS if ("backward" in o and "glu" not in o) or "sum" in o]


@pytest.mark.parametrize("operation", SUMMING)
def test_columns_are_summed_over_all_programs(operation):
  # Sums of integers are exact in any order. The norm of x is 1 or -1, GELU's slope 1 or 0.
  dy = np.random.default_rng(0).integers(-9, 9, (23, 48)).astype(np.float32)
  sign = np.where(np.arange(48) % 2 == 0, np.float32(1), np.float32(-1))
  x = jnp.asarray(np.tile(sign * 2**20, (23, 1)))
  config = interpreted(operation).Config(rows=4, warps=1, vector=4)
  actual, _ = run(operation, x, jnp.asarray(dy), INT8_ROW, config=config)
  total = np.sum(dy, axis=0)
  expected = {
    "norm_backward": [sign * total, total],  # Of the scale, of the bias.
    "norm_backward, rms": [sign * total],
    "gelu_backward": [(sign > 0) * total],
    "quantize_sum": [total],
    "quantize_sum, fold": [total],
    "quantize_sum, parts": [np.concatenate([total, 23 * 2**20 * sign, total[::-1]])],
  }
  expected = expected.get(operation) or expected[operation.split(",")[0]]
  sums = [a for a in jax.tree.leaves(actual) if a.ndim == 1]
  jax.tree.map(np.testing.assert_array_equal, sums, expected)


@pytest.mark.parametrize("fmt", ["int8", "e4m3"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_zeros_stay_zeros(operation, fmt):
  x, dy = (a.at[1].set(0.0) for a in draw(3, 80))
  actual, expected = run(operation, x, dy, SPECS[fmt])
  assert_near(actual, expected, operation)
  if not operation.startswith("norm") or "rms" in operation:  # Layer norm adds a bias.
    for a in jax.tree.leaves(actual):
      assert a.ndim == 1 or not np.any(a[1])


@pytest.mark.parametrize(
  ("bits", "place"),  # A NaN, inf, -inf.
  [(0x7FC000FF, "x"), (0x7FC000FF, "dy"), (0x7F800000, "x"), (0xFF800000, "dy")],
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_nan_or_infinity_reaches_only_its_row_and_columns(operation, place, bits):
  x, dy = map(np.array, draw(4, 80))
  (x if place == "x" else dy).view(np.uint32)[2, 33] = bits
  actual, expected = run(operation, jnp.asarray(x), jnp.asarray(dy), INT8_ROW)
  assert_near(actual, expected, operation)
  takes_one = {"norm_quantize": "x", "norm_quantize, rms": "x", "quantize_sum": "dy"}
  takes_one |= {"gelu_quantize": "x", "gelu_quantize, keep": "x", "quantize_sum, fold": "dy"}
  row = 2 if place in takes_one.get(operation, ["x", "dy"]) else None
  scales = [np.isnan(a[:, 0]) for a in jax.tree.leaves(actual) if a.shape == (4, 1)]
  if operation == "glu_quantize, keep":  # A scale each of the unit, of gate, and of up.
    assert not scales.pop(2 if place == "x" else 1).any()
  for found in scales:
    np.testing.assert_array_equal(found, np.arange(4) == row)


@pytest.mark.parametrize("shape", [(0, 32), (3, 0)], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_empty_arrays_give_empty_results(operation, shape):
  actual, expected = run(operation, jnp.zeros(shape), jnp.zeros(shape), INT8_ROW)
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize(
  "operation", ["norm_quantize", "gelu_quantize", "gelu_backward, kept", "glu_backward, kept"]
)
def test_fp8_is_rounded_once_where_the_cast_truncates_to_float16_first(monkeypatch, operation, fmt):
  (x, dy), spec = draw(3, 1000), SPECS[fmt]
  on_90, _ = run(operation, x, dy, spec)
  triton_case.cast_by_way_of_float16(monkeypatch)
  monkeypatch.setattr(interpreted(operation), "compute_capability", lambda: 89)
  assert_same(jax.tree.leaves(run(operation, x, dy, spec)[0]), jax.tree.leaves(on_90))


@pytest.fixture(scope="module")
def normal_distribution():
  """All finite bfloat16 h [m, k], with GELU and its derivative in float64."""
  h = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
  h = h[np.isfinite(h.astype(np.float32))].reshape(-1, 4080)
  exact = h.astype(np.float64)
  cdf = np.vectorize(math.erfc)(exact * -math.sqrt(0.5)) / 2
  pdf = np.exp(exact**2 / -2) / math.sqrt(2 * math.pi)
  return h, exact * cdf, cdf + exact * pdf


# Results below this may be flushed to zero, as GPUs do with exp(-h**2 / 2).
SMALLEST = 2.0**-126


def test_gelu_of_every_bfloat16_is_the_exact_value_rounded(normal_distribution):
  h, exact, _ = normal_distribution
  g, _ = interpreted("gelu").gelu_quantize(jnp.asarray(h), None)
  error = np.abs(np.asarray(g).astype(np.float64) - exact)
  _, exponent = np.frexp(np.maximum(np.abs(exact), SMALLEST))
  error /= np.exp2(exponent - 8.0)  # In units of the last of 8 bits.
  assert np.max(error) < 0.505
  assert np.sum(error > 0.5) <= 140  # Of 65,280; 132 with numpy's exp2 on x86.


def test_the_relative_error_of_tiny_gelu_is_bounded(normal_distribution):
  h, exact, _ = normal_distribution
  g, _ = interpreted("gelu").gelu_quantize(jnp.asarray(h.astype(np.float32)), None)
  error = np.abs(np.asarray(g).astype(np.float64) - exact)
  assert np.all(error <= np.where(np.abs(exact) < SMALLEST, SMALLEST, 1.8e-5 * np.abs(exact)))


@pytest.mark.slow
def test_the_error_of_the_derivative_of_gelu_is_bounded(normal_distribution):
  h, _, slope = normal_distribution
  h, ones = jnp.asarray(h.astype(np.float32)), jnp.ones(h.shape)
  dh, _, _, g = interpreted("gelu").gelu_backward(h, ones, None)
  error = np.abs(np.asarray(dh).astype(np.float64) - slope)
  assert np.max(error) < 7.2e-6
  tiny = np.maximum(np.abs(slope), SMALLEST)
  assert np.all((error < 2.7e-5 * tiny)[np.asarray(h) < -1])
  np.testing.assert_array_equal(g, interpreted("gelu").gelu_quantize(h, None)[0])


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_approximations_of_gelu_are_near_the_definition_s(activation, kept):
  x, dy = draw(5, 257, "float32" if kept else "bfloat16")
  kernels, how = interpreted("gelu"), {"activation": activation}
  actual, expected = (
    f.gelu_quantize(x, INT8_ROW, INT8_ROW if kept else None, **how) for f in (kernels, fused_ops)
  )
  assert_near(actual, expected, "gelu")
  h = expected[1]
  assert_near(*(f.gelu_backward(h, dy, INT8_ROW, **how) for f in (kernels, fused_ops)), "gelu")


@pytest.mark.parametrize("fmt", ["int8", "e4m3", "e5m2"])
def test_the_saved_inputs_of_a_gated_unit_are_quantized_bit_for_bit(fmt):
  (gate, up), kernels, spec = draw(5, 257, "bfloat16"), interpreted("glu"), SPECS[fmt]
  assert_same(
    kernels.glu_quantize(gate, up, INT8_ROW, spec)[1], (quantize(gate, spec), quantize(up, spec))
  )
  kept = kernels.glu_quantize(gate, up, spec)[1]
  assert kept[0] is gate and kept[1] is up


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_units_of_every_activation_are_near_the_definition_s(activation, kept):
  (gate, up), (dg, _) = draw(5, 257, "bfloat16"), draw(5, 257, "bfloat16")
  kernels, how, keep = interpreted("glu"), {"activation": activation}, INT8_ROW if kept else None
  actual, expected = (f.glu_quantize(gate, up, INT8_ROW, keep, **how) for f in (kernels, fused_ops))
  assert_near(actual, expected, "glu")
  hs = expected[1]
  assert_near(*(f.glu_backward(*hs, dg, INT8_ROW, **how) for f in (kernels, fused_ops)), "glu")


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
@pytest.mark.slow
def test_approximations_of_gelu_of_every_bfloat16_are_near_the_definition_s(
  normal_distribution, activation
):
  h = jnp.asarray(normal_distribution[0].astype(np.float32))
  results = []
  for f in (interpreted("gelu"), fused_ops):
    dh, _, _, g = f.gelu_backward(h, jnp.ones(h.shape), None, activation=activation)
    results.append((np.asarray(g, np.float64), np.asarray(dh, np.float64)))
  (g, dh), (expected, slope) = results
  # A sigmoid below SMALLEST may be flushed to zero before its product with |h|, which is below 128.
  assert np.all(np.abs(g - expected) <= 1e-5 * np.abs(expected) + 128 * SMALLEST)
  assert np.max(np.abs(dh - slope)) < 1e-6


@pytest.mark.parametrize("of", [_norm, _rms])
def test_a_norm_s_epsilon_is_the_definition_s(of):
  (x, dy), norm = draw(5, 208), of(jnp.zeros((1, 208)))
  kernels, how = interpreted("norm"), {"epsilon": 0.5}
  actual, expected = (
    (f.norm_quantize(x, norm, None, **how), f.norm_backward(x, norm, dy, None, **how))
    for f in (kernels, fused_ops)
  )
  assert_near(actual, expected, "norm")


@pytest.mark.parametrize(
  ("parts", "spec"),
  [(3, INT8_ROW), (1, Spec(INT8, "tensorwise"))],
  ids=["wide rows", "one scale"],
)
def test_a_gradient_whose_rows_no_kernel_holds_is_quantized_by_the_quantizer(
  monkeypatch, parts, spec
):
  kernels, quantizers = interpreted("quantize_sum"), triton_case.interpreted("triton.quantize")
  dys, calls = tuple(i + jnp.ones((2, 4096)) for i in range(parts)), []

  def noting(x, spec):
    calls.append(x.shape)
    return quantizers.quantize(x, spec)

  monkeypatch.setattr(kernels, "quantize", noting)
  assert_same(kernels.quantize_sum(dys, spec), fused_ops.quantize_sum(dys, spec))
  assert calls == [(2, 4096 * parts)]


WIDTHS = {"norm": (512, 768, 1024, 1280, 1664), "gelu": (2048, 3072, 4096, 5120, 6656, 8192)}
# Loads of a row in the code of a program (prologue and loop), of bfloat16, 8 bits and float32.
LOADED = {
  "norm_quantize": (2, 0, 2),
  "norm_backward": (3, 0, 2),
  "norm_backward, dx": (4, 0, 2),
  "norm_quantize, rms": (2, 0, 1),
  "norm_backward, rms": (4, 0, 1),
  "glu_quantize": (2, 0, 0),
  "glu_quantize, keep": (2, 0, 0),
  "glu_backward": (3, 0, 0),
  "glu_backward, kept": (1, 2, 0),
  "glu_backward, folds": (3, 0, 1),
  "gelu_quantize": (1, 0, 0),
  "gelu_quantize, keep": (1, 0, 0),
  "gelu_backward": (4, 0, 0),
  "gelu_backward, kept": (2, 2, 0),
  "gelu_backward, fold": (4, 0, 1),
  "quantize_sum": (2, 0, 0),
  "quantize_sum, fold": (2, 0, 1),
  "quantize_sum, parts": (2, 0, 0),
}


@pytest.mark.parametrize(
  ("capability", "fmt"), mainly([(90, "int8")], [(80, "int8"), (89, "e4m3"), (90, "int8")])
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_clip_s_rows_stay_in_registers_and_load_16_bytes_at_a_time(
  monkeypatch, tmp_path, capability, fmt, operation
):
  family = file_of(operation)
  module, function = triton_case.loaded(f"triton.{file_of(operation)}"), OPERATIONS[operation]
  parts = 3 if "parts" in operation else 1
  for k in WIDTHS["norm" if family == "norm" or parts == 3 else "gelu"]:
    x = jax.ShapeDtypeStruct((65536, k), jnp.bfloat16)
    (kernel,) = triton_case.compiled(
      *(monkeypatch, tmp_path / str(k), capability),
      *(lambda x, dy: function(module, x, dy, SPECS[fmt]), x, x),
    )
    assert kernel.spilled_bytes == 0
    assert kernel.shared_bytes <= triton_case.SHARED_BYTES[capability]
    assert kernel.count(r"div\.full") == 0
    if "lu" not in operation:  # GELU, GLU.
      assert kernel.count(r"max\.f32") == 0  # It would drop a NaN; max.NaN does not.
    threads = int(re.search(r"\.reqntid (\d+)", kernel.ptx)[1])
    halves, bytes_, floats = LOADED[operation]
    # The last load of a row may be narrower.
    whole = parts * (k // (threads * 8))
    wide = kernel.count(r"ld\.global\.v4")
    assert wide >= whole * (halves + 2 * floats)
    narrow = {8: "v2", 4: "b32", 2: "b16", 1: "b8"}
    read = sum(size * kernel.count(rf"ld\.global\.{kind}") for size, kind in narrow.items())
    scale = 0 if not bytes_ else 8 if family == "glu" else 4  # A gated unit has two inputs.
    assert 16 * wide + read - scale == parts * k * (2 * halves + bytes_ + 4 * floats) // threads
