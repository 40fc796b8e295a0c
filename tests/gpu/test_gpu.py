"""Tests that need an NVIDIA GPU: JAX_PLATFORMS=cuda,cpu python -m pytest tests/gpu/test_gpu.py

With SBJAX_ASSUME_CAPABILITY=80 a newer GPU runs an A100's kernels.
"""

import functools
import os
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import attention as attention_benchmark
from sbjax import RECIPES, Quantized, Spec, quantize, quantized_dot
from sbjax.attention import attention, cudnn_runs, length_for
from sbjax.ops import adam as expansion
from sbjax.ops.attention import HEAD_DIMS
from sbjax.ops.device import compute_capability, target
from sbjax.ops.dither import positions
from sbjax.ops.matmul import scaled_matmul
from sbjax.ops.registry import NAMES, get_backend
from sbjax.ops.rows import LayerNormParams, RMSNormParams
from sbjax.pallas.sm90 import scaled_matmul as scaled_matmul_sm90
from sbjax.quantize import E4M3, E5M2, FORMATS, INT8

pytestmark = pytest.mark.gpu

OUT_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
SCALINGS = ("tensorwise", "rowwise")

# The number of random shapes for the kernels, and their seed.
SHAPES, SEED = int(os.environ.get("SBJAX_SHAPES", 12)), int(os.environ.get("SBJAX_SEED", 0))


@pytest.fixture(params=[name for name in NAMES if name != "xla"])
def backend(request):
  return skip_without(request.param)


def skip_without(backend):
  try:
    return get_backend(backend)
  except NotImplementedError as reason:
    pytest.skip(str(reason))


def on_cpu(function, *args):
  """The function's result, compiled for the CPU: XLA's divisions on a GPU are not exact."""
  with jax.default_device(jax.devices("cpu")[0]):
    return jax.jit(function)(*jax.tree.map(np.asarray, args))


def some_shapes(n=SHAPES):
  """Random shapes: any M; N and K are multiples of 16, mostly of no larger power of two."""
  pick = random.Random(SEED)
  return [
    (pick.choice([pick.randint(1, 300), pick.randint(1, 5000)]),
     16 * pick.randint(1, 150), 16 * pick.randint(1, 150))
    for _ in range(n)
  ]  # fmt: skip


def skip_without_fp8():
  if compute_capability(target()) < FORMATS[E4M3].capability:
    pytest.skip(f"{target().device_kind} has no fp8.")


@pytest.fixture(params=["int8", "fp8"])
def formats(request):
  """Formats of operands."""
  if request.param == "fp8":
    skip_without_fp8()
  return {"int8": (INT8,), "fp8": (E4M3, E5M2)}[request.param]


@pytest.mark.parametrize("shape", some_shapes(), ids=str)
def test_kernels_multiply_as_the_definition_does(backend, formats, shape):
  check_products(backend.scaled_matmul, formats, shape)


@pytest.mark.parametrize("config", sorted(scaled_matmul_sm90.tile_configs(), key=str), ids=str)
@pytest.mark.parametrize("shape", [(259, 1280, 1280), (1000, 784, 3088)], ids=str)
def test_every_tuned_tile_config_multiplies_as_the_definition_does(config, formats, shape):
  skip_without("mosaic")
  # With only 4 SMs each computes several blocks.
  options = {"config": config, "num_sms": 4}
  check_products(functools.partial(scaled_matmul_sm90.scaled_matmul, **options), formats, shape)


def drawn_operand(numbers, rows, k, spec, exact):
  values = jnp.asarray(numbers.integers(-127, 128, (rows, k)).astype(spec.dtype))
  scale = scales(numbers, rows if spec.is_rowwise else 1, exact=exact)
  return Quantized(values, jnp.asarray(scale), spec)


def check_products(ours, formats, shape):
  """Compares a product of drawn formats, maybe with a bias and a residual, with XLA's."""
  m, n, k = shape
  pick, numbers = random.Random(f"{shape}{formats}"), np.random.default_rng(k)
  adds, out_dtype = pick.choice([False, True]), pick.choice(OUT_DTYPES)
  lhs, rhs = (
    drawn_operand(numbers, rows, k, Spec(pick.choice(formats), pick.choice(SCALINGS)), adds)
    for rows in (m, n)
  )
  added = {"bias": numbers.normal(size=n), "residual": 99 * numbers.normal(size=(m, n))}
  added = {name: jnp.asarray(a, out_dtype) for name, a in added.items() if adds}
  actual, expected = (
    np.asarray(jax.jit(multiply, static_argnums=2)(lhs, rhs, out_dtype, **added), np.float32)
    for multiply in (ours, scaled_matmul)
  )
  if formats == (INT8,):
    np.testing.assert_array_equal(actual, expected)
  else:
    # A tensor core keeps fewer bits of a float32 sum than float32 has.
    assert np.abs(actual - expected).max() <= 2**-7 * np.abs(expected).max()


@pytest.mark.parametrize("k", [1024, 4096, 16384])
def test_fp8_sums_of_one_sign_lose_at_most_k_over_2_to_the_15(backend, k):
  skip_without_fp8()
  # A tensor core truncates each product below 2^-13 of the partial sum. Here all errors have one
  # sign: half of that on average, and partial sums are on average half of the total.
  lhs, rhs = (
    Quantized(jnp.abs(quantize(x, Spec(E4M3, "rowwise")).values.astype(jnp.float32)).astype(E4M3),
              jnp.ones((1, 1)), Spec(E4M3, "tensorwise"))
    for x in (jax.random.normal(key, (256, k)) for key in jax.random.split(jax.random.key(k)))
  )  # fmt: skip
  y = jax.jit(backend.scaled_matmul, static_argnums=2)(lhs, rhs, jnp.float32)
  exact = np.asarray(lhs.values, np.float64) @ np.asarray(rhs.values, np.float64).T
  lost = np.max(np.abs(y - exact) / exact)
  print(f"{k=}: {lost:.1%} of a sum")
  assert lost <= 2**-15 * k


def scales(numbers, rows, exact):
  """[rows, 1]; powers of two (`exact`) where a product and a sum might be rounded together.

  Small enough that sums are finite in float16.
  """
  drawn = numbers.uniform(0.5, 1, (rows, 1))
  return (np.exp2(np.round(8 * drawn - 13)) if exact else drawn / 16).astype(np.float32)


@pytest.mark.parametrize("form", ["quantize", "quantize_transposed", "quantize_both"])
@pytest.mark.parametrize("shape", some_shapes(4), ids=str)
def test_kernels_quantize_as_the_definition_does(backend, form, formats, shape):
  rows, k = shape[0], shape[2]
  x = jax.random.normal(jax.random.key(k), (rows, k), jnp.bfloat16).at[rows // 2].set(0)
  scalings = ("rowwise", "columnwise", "tensorwise") if formats == (INT8,) else ("tensorwise",)
  for spec in (Spec(formats[-1], scaling) for scaling in scalings):
    actual = jax.jit(getattr(backend, form), static_argnums=1)(x, spec)
    expected = on_cpu(lambda x: getattr(get_backend("xla"), form)(x, spec), x)  # noqa: B023
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("binades", [1.0, 8.0])
def test_adam_s_step_on_coded_moments_is_the_definition_s_to_rounding(backend, binades):
  skip_without_fp8()  # The moments' codes.
  sizes = jax.random.normal(jax.random.key(0), (3, 3, 1001, 6, 128))
  signs = jnp.sign(jax.random.normal(jax.random.key(1), sizes.shape))
  g, mu, nu = jnp.exp2(binades * sizes.clip(-3, 3)) * signs
  operands = jnp.asarray([0.1, 0.02, 1e-6]), g, expansion.expand(mu), expansion.expand(jnp.abs(nu))
  operands += (positions(7, g.shape)[..., 0],)
  direction, *coded = jax.jit(backend.adam_direction)(*operands)
  expected, *same = on_cpu(expansion.adam_direction, *operands)
  # Both terms of a new moment may cancel.
  assert np.mean(~np.isclose(direction, expected, rtol=1e-3)) < 1e-3
  for a, b in zip(coded, same, strict=True):
    alike = np.asarray(a.details[1]) == np.asarray(b.details[1])
    np.testing.assert_allclose(a.details[0], b.details[0], rtol=1e-3)
    assert alike.mean() > 0.95
    assert_rounded_alike(np.asarray(a.values)[alike], np.asarray(b.values)[alike], "codes")


def row_operations(x, dy, dx, norm, formats):
  """The operations of sbjax.ops.rows on these operands: {name: (function, arrays)}."""
  fold = jnp.exp2(norm.scale)
  if formats != (INT8,):
    e5m2, folds = Spec(E5M2, "rowwise"), (None, fold)
    return {
      "gelu back e5m2": (lambda ops, h, dg: ops.gelu_backward(h, dg, e5m2), (x, dy)),
      "glu back e5m2": (lambda ops, *a: ops.glu_backward(*a, e5m2, folds=folds), (x, dx, dy)),
    }
  int8 = Spec(INT8, "rowwise")
  kept, rms = quantize(x, int8), RMSNormParams(norm.scale)
  return {
    "norm": (lambda ops, x, norm: ops.norm_quantize(x, norm, None), (x, norm)),
    "norm int8": (lambda ops, x, norm: ops.norm_quantize(x, norm, int8), (x, norm)),
    "norm back": (lambda ops, *a: ops.norm_backward(*a, None), (x, norm, dy)),
    "norm back, residual": (lambda ops, *a: ops.norm_backward(*a), (x, norm, dy, dx)),
    "rms int8": (lambda ops, x, norm: ops.norm_quantize(x, norm, int8), (x, rms)),
    "rms back, residual": (lambda ops, *a: ops.norm_backward(*a), (x, rms, dy, dx)),
    "glu": (lambda ops, *hs: ops.glu_quantize(*hs, None, None), (x, dx)),
    "glu int8": (lambda ops, *hs: ops.glu_quantize(*hs, int8, int8), (x, dx)),
    "glu back": (lambda ops, *a: ops.glu_backward(*a, None), (x, dx, dy)),
    "glu back int8": (lambda ops, *a: ops.glu_backward(*a, int8), (kept, quantize(dx, int8), dy)),
    "glu back, folds": (
      lambda ops, *a: ops.glu_backward(*a, int8, folds=(None, fold)),
      (x, dx, dy),
    ),
    "gelu": (lambda ops, x: ops.gelu_quantize(x, None, None), (x,)),
    "gelu int8": (lambda ops, x: ops.gelu_quantize(x, int8, int8), (x,)),
    "gelu back": (lambda ops, h, dg: ops.gelu_backward(h, dg, None), (x, dy)),
    "gelu back int8": (lambda ops, h, dg: ops.gelu_backward(h, dg, int8), (kept, dy)),
    "gelu back, fold": (lambda ops, *a: ops.gelu_backward(*a, int8, fold=fold), (x, dy)),
    "quantize, fold": (lambda ops, dy: ops.quantize(dy, int8, fold=fold), (dy,)),
    "sum, fold": (lambda ops, *dys: ops.quantize_sum(dys, int8, fold=fold), (dy,)),
    "sum": (lambda ops, *dys: ops.quantize_sum(dys, int8), (dy,)),
    "sum of parts": (lambda ops, *dys: ops.quantize_sum(dys, int8), (dy, x, dx)),
  }


@pytest.mark.parametrize("shape", some_shapes(4), ids=str)
def test_fused_row_kernels_equal_the_definition_to_rounding(backend, formats, shape):
  rows, k = shape[0], shape[2]
  keys = jax.random.split(jax.random.key(k), 5)
  x, dy, dx = (jax.random.normal(key, (rows, k), jnp.bfloat16) for key in keys[:3])
  x, dy = x.at[rows // 2].set(0), dy.at[rows // 3].set(0)
  norm = LayerNormParams(*(1 + jax.random.normal(key, (k,)) / 4 for key in keys[3:]))
  for name, (operation, arrays) in row_operations(x, dy, dx, norm, formats).items():
    actual = jax.jit(functools.partial(operation, backend))(*arrays)
    expected = on_cpu(functools.partial(operation, get_backend("xla")), *arrays)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
      assert_rounded_alike(np.asarray(a), np.asarray(b), name)


def assert_rounded_alike(a, b, name):
  """8-bit values may differ by a step where the order of a sum changes a rounding."""
  if a.dtype.itemsize == 1:
    steps = np.abs(a.view(np.int8).astype(int) - b.view(np.int8).astype(int))
    assert steps.max() <= 1 and np.mean(steps > 0) < 0.01, name
  else:
    a, b = a.astype(np.float64), b.astype(np.float64)
    error = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)
    assert error < (1e-5 if name.startswith("sum") else 1e-3), (name, a.shape, error)


def test_only_rows_with_nan_or_infinity_become_nan(backend):
  x = jax.random.normal(jax.random.key(0), (64, 256), jnp.bfloat16)
  x = x.at[3, 200].set(jnp.nan).at[40, 0].set(jnp.inf).at[7].set(0)
  w = quantize(jax.random.normal(jax.random.key(1), (48, 256)), Spec(INT8, "tensorwise"))
  y = backend.scaled_matmul(backend.quantize(x, Spec(INT8, "rowwise")), w, jnp.bfloat16)
  assert set(np.flatnonzero(np.isnan(y).any(1))) == {3, 40} and np.isnan(y[3]).all()
  assert not y[7].any()


def test_the_longest_int8_sum_is_exact(backend):
  k = 2**17
  full = Quantized(jnp.full((16, k), 127, jnp.int8), jnp.ones((1, 1)), Spec(INT8, "tensorwise"))
  y = backend.scaled_matmul(full, full, jnp.float32)
  assert (y == np.float32(127 * 127 * k)).all()


@pytest.mark.parametrize(
  "recipe", ["switchback", "switchback_m", "switchback_q", "switchback_c", "llm_int8"]
)
def test_int8_matmuls_are_the_same_bits_on_a_gpu_and_a_cpu(recipe):
  x = jax.random.normal(jax.random.key(0), (96, 256), jnp.float32)
  w = jax.random.normal(jax.random.key(1), (256, 160), jnp.float32)

  @jax.jit
  def y_and_dx(x, w):
    y, vjp = jax.vjp(functools.partial(quantized_dot, recipe=RECIPES[recipe]), x, w)
    return y, vjp(y)[0]

  results = []
  for platform in ("cpu", "cuda"):
    device = jax.devices(platform)[0]
    results.append(y_and_dx(*jax.device_put((x, w), device)))
  for on_cpu, on_gpu in zip(*results, strict=True):
    np.testing.assert_array_equal(on_cpu, on_gpu)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [77, 98, 99, 257])
def test_cudnn_attention_is_xla_attention_to_bf16_rounding(length, causal):
  keys = jax.random.split(jax.random.key(0), 4)
  q, k, v, dy = (jax.random.normal(key, (4, length, 8, 64), jnp.bfloat16) for key in keys)
  assert cudnn_runs(q.dtype, 64)

  @jax.jit
  def reference(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal)

  @jax.jit
  def ours(q, k, v):
    more = length_for(length, q.dtype, 64) - length
    padded = (jnp.pad(a, ((0, 0), (0, more), (0, 0), (0, 0))) for a in (q, k, v))
    return attention(*padded, causal=causal, length=length)[:, :length]

  more = length_for(length, q.dtype, 64) - length
  padded = [jnp.pad(a, ((0, 0), (0, more), (0, 0), (0, 0))) for a in (q, k, v)]
  whole, whole_vjp = jax.vjp(functools.partial(attention, causal=causal, length=length), *padded)
  assert np.isfinite(whole.astype(jnp.float32)).all()
  assert not any(dx[:, length:].any() for dx in whole_vjp(jnp.ones_like(whole)))
  y, vjp = jax.vjp(ours, q, k, v)
  wide = [x.astype(jnp.float32) for x in (q, k, v)]
  expected_y, expected_vjp = jax.vjp(reference, *wide)
  actual = (y, *vjp(dy))
  for a, b in zip(actual, (expected_y, *expected_vjp(dy.astype(jnp.float32))), strict=True):
    error = np.linalg.norm(a.astype(jnp.float32) - b) / np.linalg.norm(b)
    assert error < 2**-6, error


@pytest.mark.parametrize("kind", ["none", "mask", "lengths"])
@pytest.mark.parametrize(("kv_heads", "kv_length", "causal"), [(8, 98, True), (2, 130, False)])
def test_cudnn_s_grouped_queries_masks_and_lengths_are_xla_s(kind, kv_heads, kv_length, causal):
  keys = jax.random.split(jax.random.key(0), 4)
  sizes = ((98, 8), (kv_length, kv_heads), (kv_length, kv_heads), (98, 8))
  q, k, v, dy = (
    jax.random.normal(key, (4, *size, 64), jnp.bfloat16)
    for key, size in zip(keys, sizes, strict=True)
  )
  mask = jax.random.bernoulli(keys[0], 0.7, (4, 1, 1, kv_length)).at[..., 0].set(True)
  lengths = {
    "query_seq_lengths": jnp.array([98, 50, 1, 77]),
    "key_value_seq_lengths": jnp.array([kv_length, 33, 98, 2]),
  }
  options = {"none": {}, "mask": {"mask": mask}, "lengths": lengths}[kind]

  @functools.partial(jax.jit, static_argnums=0)
  def run(backend, q, k, v, dy):
    y, vjp = jax.vjp(
      functools.partial(attention, causal=causal, backend=backend, **options), q, k, v
    )
    return y, *vjp(dy)

  for a, b in zip(run("cudnn", q, k, v, dy), run("xla", q, k, v, dy), strict=True):
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    assert np.linalg.norm(a - b) < 2**-6 * np.linalg.norm(b)


def kernels_errors(backend, shape, causal, dtype=jnp.bfloat16):
  """Errors in norm, relative to float64, of the output and the gradients of q, k and v."""
  _, length, _, head_dim = shape
  qkvd = [x.astype(dtype) for x in attention_benchmark.draw(*shape)]
  more = length_for(length, jnp.dtype(dtype), head_dim, backend) - length
  padded = [jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))) for x in qkvd]
  run = functools.partial(attention, causal=causal, length=length, backend=backend)
  results = jax.jit(functools.partial(attention_benchmark.value_and_gradients, run))(*padded)
  exact = attention_benchmark.reference(qkvd, causal)
  return [attention_benchmark.error(x[:, :length], e) for x, e in zip(results, exact, strict=True)]


@pytest.fixture(params=["mosaic", "triton"])
def kernels(request):
  """The name of a backend with kernels."""
  skip_without(request.param)
  return request.param


@pytest.mark.parametrize("case", attention_benchmark.CASES)
def test_attention_is_as_exact_as_cudnn(kernels, case):
  _, length, heads, head_dim, causal = attention_benchmark.CASES[case]
  shape = (2, length, heads, head_dim)
  if not attention_benchmark.supports(functools.partial(attention, backend=kernels), shape):
    pytest.skip(f"backend={kernels!r} refuses this shape.")
  ours, cudnn = (kernels_errors(name, shape, causal) for name in (kernels, "cudnn"))
  # The same data; the order of sums and of roundings differs.
  assert all(a <= 1.05 * b for a, b in zip(ours, cudnn, strict=True)), (ours, cudnn)


@pytest.mark.parametrize("seed", range(SEED, SEED + SHAPES))
def test_attention_of_drawn_shapes(kernels, seed):
  pick = random.Random(seed)
  # Not one token: the gradients of q and k are zero then, and errors are relative.
  head_dims, tokens, heads = HEAD_DIMS, (2, 600), (1, 5)
  if kernels == "mosaic":  # Its own kernel's, and several heads for an SM.
    head_dims, tokens, heads = (64, 64, *HEAD_DIMS[1:]), (65, 257), (1, 200)
  head_dim, causal = pick.choice(head_dims), pick.random() < 0.5
  shape = (pick.randint(1, 3), pick.randint(*tokens), pick.randint(*heads), head_dim)
  dtype = pick.choice([jnp.bfloat16, jnp.float16])
  errors = kernels_errors(kernels, shape, causal, dtype)
  assert max(errors) < 2 * jnp.finfo(dtype).eps, (shape, causal, errors)


CUDNN_NAN = pytest.mark.xfail(reason="cuDNN's gradients are NaN there (pytorch#196678)")


@pytest.mark.parametrize(
  ("backend", "length"),
  [
    *((pytest.param("cudnn", length, marks=CUDNN_NAN)) for length in (64, 192, 320)),
    *(("triton", length) for length in (64, 192, 320)),
    *(("mosaic", length) for length in (66, 192, 257)),
  ],
)
def test_attention_of_large_negative_logits_is_finite(backend, length):
  if backend != "cudnn":
    skip_without(backend)
  q, k, v, do = attention_benchmark.draw(2, length, 4, 64)
  q, k = jnp.abs(q) * 32, -jnp.abs(k) * 32
  run = functools.partial(attention, backend=backend)
  results = jax.jit(functools.partial(attention_benchmark.value_and_gradients, run))(q, k, v, do)
  assert all(np.isfinite(x.astype(jnp.float32)).all() for x in results)


@pytest.mark.parametrize("head_dim", [64, 72, 80, 104])
def test_attention_is_the_same_each_time_and_packed(kernels, head_dim):
  q, k, v, do = attention_benchmark.draw(4, 257, 40, head_dim)
  attend = functools.partial(attention, backend=kernels)
  run = jax.jit(functools.partial(attention_benchmark.value_and_gradients, attend))
  first, second = run(q, k, v, do), run(q, k, v, do)
  o, vjp = jax.vjp(attend, jnp.stack([q, k, v], axis=2))
  packed = (o, *(vjp(do)[0][:, :, i] for i in range(3)))
  for a, b, c in zip(first, second, packed, strict=True):
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(a, c)
