"""Backends are looked up by name, and a named backend is never swapped for another."""

import functools
import importlib
import importlib.util
import logging
import pathlib
import re
import types
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_case
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from benchmarks.absent_gpu import Device
from sbjax import (
  E4M3,
  INT8,
  Spec,
  attention,
  dequantize,
  pallas,
  quantize,
  quantized_dot,
  quantized_dot_general,
  scaled_matmul,
)
from sbjax.attention import fastest_backend, length_for
from sbjax.ops import adam as expansion
from sbjax.ops import device
from sbjax.ops import registry as backends
from sbjax.ops import rows as fused_ops
from sbjax.ops.matmul import check_operands
from sbjax.ops.registry import OPERATIONS, get_backend
from sbjax.ops.rows import LayerNormParams, RMSNormParams
from sbjax.ops.split_k import num_splits
from sbjax.quantize import FORMATS, Format

ROWWISE, TENSORWISE = Spec(INT8, "rowwise"), Spec(INT8, "tensorwise")


HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_limits = pytest.mark.skipif(not HAS_TRITON, reason="the extra `aot` is not installed")


@pytest.fixture
def installed(monkeypatch):
  """Pretends that all packages are installed; kernels are the definition and record their calls.

  Their limits are the kernels' own, where Triton is installed. Tests remove from `present` the
  packages that they need missing.
  """
  calls, found, present = [], {}, {"triton", "jax_triton"}

  def noting(kernel, operation):
    def run(*args, **kwargs):
      calls.append((operation, kernel))
      return getattr(get_backend("xla"), operation)(*args, **kwargs)

    return run

  for kernel in {kernel for row in OPERATIONS.values() for kernel in row.kernels}:
    found[kernel] = types.SimpleNamespace(**{name: noting(kernel, name) for name in OPERATIONS})
    if HAS_TRITON:
      real = vars(importlib.import_module(f"sbjax.pallas.{kernel}"))
      limits = {name: real[name] for name in ("unsupported", "is_slower") if name in real}
      vars(found[kernel]).update(limits)
    folder = kernel.partition(".")[0]
    found[folder] = importlib.import_module(f"sbjax.pallas.{folder}")

  monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in present else None)
  monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
  monkeypatch.setattr(backends, "_module", found.get)
  caches = backends._default_backend, backends._named_backend
  for cache in caches:
    cache.cache_clear()
  yield types.SimpleNamespace(present=present, calls=calls)
  for cache in caches:
    cache.cache_clear()


def test_xla_is_the_definition():
  backend = get_backend("xla")
  assert vars(backend).keys() == {"name", *OPERATIONS}
  assert backend.gelu_quantize is fused_ops.gelu_quantize


def test_none_chooses_an_existing_backend():
  assert get_backend(None) == get_backend(get_backend(None).name)


@pytest.mark.parametrize("name", ["mosaic", "triton"])
def test_a_backend_that_does_not_run_here_says_why(name):
  why = rf"{name}.*needs an NVIDIA GPU; JAX's default device is 'cpu'"
  with pytest.raises(NotImplementedError, match=why):
    get_backend(name)
  with pytest.raises(NotImplementedError, match=why):
    quantized_dot(jnp.ones((2, 4)), jnp.ones((4, 3)), "switchback", backend=name)
  with pytest.raises(NotImplementedError, match=why):
    nn.Dense(3, dot_general=quantized_dot_general("switchback", backend=name)).init(
      jax.random.key(0), jnp.ones((2, 4))
    )


def test_an_abstract_device_has_the_compute_capability_of_a_local_device_of_its_kind(monkeypatch):
  """JAX makes meshes of devices without a compute capability."""
  here = Device("NVIDIA H200", 132, "gpu", "9.0")
  monkeypatch.setattr(jax, "devices", lambda platform: [here])
  for kind, expected in (("NVIDIA H200", 90), ("NVIDIA A100", None)):
    bare = AbstractDevice(kind, 132, "gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=bare)):
      assert device.compute_capability(device.target()) == expected


ROWS, ONE_SCALE = jnp.ones((3, 32)), quantize(jnp.ones((3, 32)), TENSORWISE)
LONG = jnp.ones((2, 12288))  # 8,192 is the longest.
NORM, LONG_NORM = (LayerNormParams(jnp.ones(k), jnp.zeros(k)) for k in (32, 12288))
OPERANDS = {(n, k): quantize(jnp.ones((n, k)), ROWWISE) for n, k in ((16, 24), (24, 32), (16, 32))}


@needs_limits
@pytest.mark.parametrize(
  ("operation", "args", "reason"),
  [
    ("gelu_backward", (ONE_SCALE, ROWS, ROWWISE), "one scale a row, not one"),
    ("gelu_quantize", (ROWS, None, TENSORWISE), "one scale a row, not one"),
    ("gelu_quantize", (LONG, ROWWISE), "at most 8,192.*not 12,288"),
    ("gelu_quantize", (ROWS, ROWWISE, TENSORWISE), "one scale a row, not one"),
    ("glu_quantize", (ROWS, ROWS, TENSORWISE), "one scale a row, not one"),
    ("glu_quantize", (ROWS, ROWS, ROWWISE, TENSORWISE), "one scale a row, not one"),
    ("glu_quantize", (LONG, LONG, ROWWISE), "at most 8,192.*not 12,288"),
    ("glu_backward", (ROWS, ROWS, ROWS, TENSORWISE), "one scale a row, not one"),
    ("glu_backward", (ONE_SCALE, ONE_SCALE, ROWS, ROWWISE), "one scale a row, not one"),
    ("norm_quantize", (ROWS, RMSNormParams(jnp.ones(32)), TENSORWISE), "one scale a row, not one"),
    ("norm_quantize", (ROWS, NORM, TENSORWISE), "one scale a row, not one"),
    ("norm_quantize", (LONG, LONG_NORM, None), "at most 8,192.*not 12,288"),
    ("norm_backward", (LONG, LONG_NORM, LONG, None), "at most 8,192.*not 12,288"),
    ("scaled_matmul", (OPERANDS[16, 24],) * 2 + ("float32",), "multiples of 16, not 24 and 16"),
    ("scaled_matmul", (OPERANDS[24, 32],) * 2 + ("float32",), "multiples of 16, not 32 and 24"),
  ],
)
def test_unsupported_operands_raise_for_a_named_backend_and_go_to_xla_for_none(
  installed, caplog, operation, args, reason
):
  message = f"'mosaic': .*{operation} .*{reason}.*backend=None"
  with triton_case.chip(90), pytest.raises(NotImplementedError, match=message):
    getattr(get_backend("mosaic"), operation)(*args)
  with triton_case.chip(90), caplog.at_level("DEBUG", logger="sbjax"):
    result = getattr(get_backend(None), operation)(*args)
  assert f"{operation} goes to XLA" in caplog.text
  expected = OPERATIONS[operation].definition(*args)
  jax.tree.map(np.testing.assert_array_equal, result, expected)
  assert installed.calls == []


def test_xla_s_inexact_int8_products_warn_once_on_a_gpu(monkeypatch):
  lhs, fp8 = quantize(ROWS, ROWWISE), quantize(ROWS, Spec(E4M3, "rowwise"))
  backends.warn_of_inexact_int8.cache_clear()
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  multiply = get_backend("xla").scaled_matmul
  multiply(lhs, lhs, jnp.float32)  # The flag is set in tests/conftest.py.
  backends.warn_of_inexact_int8.cache_clear()
  monkeypatch.delenv("XLA_FLAGS")
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    multiply(fp8, fp8, jnp.float32)
  with pytest.warns(UserWarning, match="twice the sum"):
    multiply(lhs, lhs, jnp.float32)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    multiply(lhs, lhs, jnp.float32)


def test_a_format_that_the_gpu_lacks_goes_to_xla_and_is_logged(installed, caplog):
  e4m3 = Spec(E4M3, "rowwise")
  with triton_case.chip(80), caplog.at_level("DEBUG", logger="sbjax"):
    get_backend(None).quantize(ROWS, e4m3)
  assert "quantize goes to XLA; the kernel takes no float8_e4m3fn below" in caplog.text
  assert installed.calls == []


def test_a_new_format_is_a_value_that_kernels_refuse_until_they_name_it(installed, monkeypatch):
  int4 = jnp.dtype(jnp.int4)
  made = Format(int4, 7.0, FORMATS[INT8].accumulator, 80, has_nan=False, most_terms=2**25)
  monkeypatch.setitem(FORMATS, int4, made)
  spec = Spec("int4", "rowwise")
  q = quantize(draw(16, 32), spec)
  assert q.values.dtype == int4 and abs(q.values.astype(int)).max() == 7
  with triton_case.chip(80), pytest.raises(NotImplementedError, match="quantize takes no int4;"):
    get_backend("triton").quantize(draw(16, 32), spec)
  own, other = (jax.ShapeDtypeStruct((1, 2**17 + 1), dtype) for dtype in (int4, INT8))
  check_operands(own, own)
  with pytest.raises(ValueError, match="at most 131072"):
    check_operands(own, other)
  y = on_a_cpu(lambda q: get_backend(None).scaled_matmul(q, q, jnp.float32), q)
  np.testing.assert_allclose(y, dequantize(q) @ dequantize(q).T, rtol=1e-5, atol=1e-5)
  assert installed.calls == []
  for kernel in OPERATIONS["quantize"].kernels:
    monkeypatch.setattr(backends._module(kernel), "TAKES", (INT8, int4), raising=False)
  with triton_case.chip(80):
    jax.eval_shape(lambda x: get_backend("triton").quantize(x, spec), draw(16, 32))
  assert installed.calls == [("quantize", "triton.quantize")]


def test_an_unknown_backend_error_lists_the_known_ones():
  with pytest.raises(ValueError, match=r"'cuda'.*'xla'.*None chooses"):
    get_backend("cuda")
  with pytest.raises(ValueError, match=r"'cuda'.*'xla'"):
    quantized_dot(jnp.ones((2, 4)), jnp.ones((4, 3)), "full", backend="cuda")


@pytest.mark.parametrize(
  ("capability", "expected"),
  [
    *((90, "mosaic"), (80, "triton"), (89, "triton"), (75, "xla")),
    *((100, "triton"), (103, "triton"), (120, "triton")),  # Blackwell.
  ],
)
def test_none_chooses_the_best_backend_for_each_compute_capability(installed, capability, expected):
  with triton_case.chip(capability):
    assert get_backend(None).name == expected
    assert get_backend(expected).name == expected


@pytest.mark.parametrize(
  ("kind", "platform", "capability"),
  [
    ("TPU v5 lite", "tpu", ""),
    ("AMD Instinct MI300X", "gpu", "gfx942"),
    ("Apple M2", "mps", ""),
    ("cpu", "cpu", ""),
  ],
)
def test_none_leaves_all_to_xla_on_other_chips(installed, kind, platform, capability):
  with absent(kind, platform, capability):
    assert get_backend(None) is get_backend("xla")
    assert fastest_backend(jnp.dtype("bfloat16"), 257, 64) == "xla"
    assert length_for(257, jnp.dtype("bfloat16"), 64) == 257
    assert num_splits(2**16, 1280, 5120) == 1
    with pytest.raises(NotImplementedError, match=f"needs an NVIDIA GPU;.*'{platform}'"):
      get_backend("triton")


@pytest.mark.parametrize(
  ("kind", "platform", "capability"), [("NVIDIA B300", "gpu", "10.3"), ("TPU7x", "tpu", "")]
)
def test_int8_on_a_chip_without_it_warns_once_and_names_fp8(installed, kind, platform, capability):
  backends._warn_of_slow_int8.cache_clear()
  lhs, fp8 = quantize(ROWS, ROWWISE), quantize(ROWS, Spec(E4M3, "rowwise"))
  with absent(kind, platform, capability):
    default = get_backend(None)

    def multiply(chosen, q):
      jax.eval_shape(lambda q: chosen.scaled_matmul(q, q, jnp.float32), q)

    multiply(default, fp8)  # Warnings are errors.
    multiply(get_backend("xla"), lhs)
    with pytest.warns(UserWarning, match=f"{kind} has .*recipe 'fp8_switchback'"):
      multiply(default, lhs)
    multiply(default, lhs)


@needs_limits
def test_triton_multiplies_no_int8_on_a_b300(installed):
  lhs = OPERANDS[16, 32]
  why = r"scaled_matmul takes no int8 on a chip with 0\.15 int8 POP/s.*; backend=None"
  with absent("NVIDIA B300", "gpu", "10.3"), pytest.raises(NotImplementedError, match=why):
    get_backend("triton").scaled_matmul(lhs, lhs, "float32")


def absent(kind, platform, capability):
  device = Device(kind, None, platform, capability)
  return use_abstract_mesh(AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device))


def test_none_falls_back_to_triton_where_jax_is_too_old_for_mosaic(installed, monkeypatch):
  monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
  with triton_case.chip(90):
    with pytest.raises(
      NotImplementedError, match=r"'mosaic' needs jax >= 0\.11 \(Python >= 3\.12\)"
    ):
      get_backend("mosaic")
    assert get_backend(None).name == "triton"


@pytest.mark.parametrize("missing", ["triton", "jax_triton"])
def test_a_missing_package_is_named_in_the_error_and_in_the_fallback_warning(installed, missing):
  installed.present.remove(missing)
  why = rf"'(mosaic|triton)' needs {missing}: pip install 'sbjax\[cuda\]'"
  for name, capability in (("mosaic", 90), ("triton", 80)):
    with triton_case.chip(capability):
      with pytest.raises(NotImplementedError, match=why):
        get_backend(name)
      with pytest.warns(UserWarning, match=rf"left to XLA, and slow: .*{why}"):
        assert get_backend(None).name == "xla"


@pytest.mark.parametrize(
  ("name", "capability", "why"),
  [
    ("mosaic", 80, r"needs compute capability 9\.0 \(H100, H200\); this is NVIDIA"),
    ("mosaic", 100, r"needs compute capability 9\.0 \(H100, H200\); this is NVIDIA"),
    ("triton", 75, r"needs compute capability 8\.0 \(A100\) or newer; this is NVIDIA"),
  ],
)
def test_a_backend_refuses_an_unsupported_compute_capability(installed, name, capability, why):
  with triton_case.chip(capability), pytest.raises(NotImplementedError, match=f"'{name}' {why}"):
    get_backend(name)


@pytest.mark.parametrize(
  ("capability", "expected"), [(90, "'mosaic'"), (75, "'xla'"), (80, "'triton'")]
)
def test_the_default_backend_is_logged_once_at_debug_level(installed, caplog, capability, expected):
  caplog.set_level(logging.DEBUG, logger="sbjax")
  with triton_case.chip(capability):
    get_backend(None), get_backend(None)
  (record,) = caplog.records
  assert record.levelname == "DEBUG" and expected in record.getMessage()


def draw(rows, k):
  return jnp.asarray(np.random.default_rng(rows).normal(size=(rows, k)).astype(np.float32))


def on_a_cpu(function, *arguments, capability=80):
  """Traces for a GPU, then compiles and runs on the CPU."""
  with triton_case.chip(capability):
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cpu",))
  return lowered.compile()(*arguments)


@needs_limits
@pytest.mark.parametrize(
  ("k", "n", "dtype"), [(24, 16, "float32"), (32, 8, "float32"), (32, 16, "float64")]
)
def test_none_computes_unsupported_products_by_the_definition(installed, k, n, dtype):
  lhs, rhs = quantize(draw(4, k), ROWWISE), quantize(draw(n, k), TENSORWISE)
  with jax.enable_x64(True):
    y = on_a_cpu(lambda lhs, rhs: get_backend(None).scaled_matmul(lhs, rhs, dtype), lhs, rhs)
    np.testing.assert_array_equal(y, scaled_matmul(lhs, rhs, dtype))
  assert not installed.calls


def test_none_quantizes_float64_by_the_definition(installed):
  def run(x):
    chosen = get_backend(None)
    q, q_transposed = chosen.quantize(x, ROWWISE), chosen.quantize_transposed(x, ROWWISE)
    return q, q_transposed, *chosen.quantize_both(x, TENSORWISE)

  with jax.enable_x64(True):
    x = draw(4, 32).astype(jnp.float64)
    actual = on_a_cpu(run, x)
  q = quantize(x, TENSORWISE)
  expected = quantize(x, ROWWISE), quantize(x.T, ROWWISE), q, q.T
  jax.tree.map(np.testing.assert_array_equal, actual, expected)
  assert not installed.calls


def test_none_computes_fp8_by_the_definition_on_a_gpu_without_fp8(installed):
  spec = Spec(E4M3, "tensorwise")

  def run(x):
    q, q_transposed = get_backend(None).quantize_both(x, spec)
    return q_transposed, get_backend(None).scaled_matmul(q, q, jnp.float32)

  for capability, is_definition in ((80, True), (89, False)):
    with triton_case.chip(capability):
      jax.eval_shape(run, jax.ShapeDtypeStruct((16, 32), jnp.float32))
    assert (not installed.calls) == is_definition


def every_operation(chosen, x, w, tokens=4, head_dim=32):
  w_q, w_q_transposed = chosen.quantize_both(w, TENSORWISE)
  del w_q
  chosen.quantize_transposed(w, ROWWISE)
  norm = LayerNormParams(jnp.ones(32), jnp.zeros(32))
  chosen.norm_quantize(x, norm, None)
  chosen.norm_backward(x, norm, x, None)
  chosen.gelu_quantize(x, ROWWISE, None)
  chosen.gelu_backward(quantize(x, ROWWISE), x, ROWWISE)
  chosen.glu_quantize(x, x, ROWWISE, None)
  chosen.glu_backward(x, x, x, ROWWISE)
  chosen.quantize_sum((x,), ROWWISE)
  qkv = jnp.ones((1, tokens, 3, 2, head_dim), jnp.bfloat16)
  o, lse = chosen.attention_forward(qkv, causal=True, length=tokens)
  chosen.attention_backward(o, lse, o, qkv, causal=True, length=tokens)
  moment = expansion.expand(jnp.ones((2, 128)))
  chosen.adam_direction(jnp.ones(3), jnp.ones((2, 128)), moment, moment, jnp.zeros(2, jnp.uint32))
  return chosen.scaled_matmul(chosen.quantize(x, ROWWISE), w_q_transposed, jnp.float32)


@pytest.mark.parametrize("name", ["mosaic", "triton"])
def test_a_named_backend_has_one_kernel_for_each_operation(installed, name):
  with triton_case.chip(90):
    run = functools.partial(every_operation, get_backend(name), tokens=129, head_dim=64)
    jax.eval_shape(run, draw(4, 32), draw(32, 16))
  first = 0 if name == "mosaic" else -1
  assert dict(installed.calls) == {op: row.kernels[first] for op, row in OPERATIONS.items()}
  assert len(installed.calls) == len(OPERATIONS)


def attend(tokens, head_dim, padding=0, dtype="bfloat16", backend=None):
  """Traces attention and its gradient for an H200."""
  attend = functools.partial(attention, length=tokens, backend=backend)
  qkv = jnp.ones((1, tokens + padding, 3, 2, head_dim), dtype)
  with triton_case.chip(90):
    jax.eval_shape(lambda x: jax.vjp(attend, x)[1](attend(x)), qkv)


@needs_limits
@pytest.mark.parametrize(
  ("tokens", "head_dim", "padding", "dtype", "why"),
  [
    (64, 64, 0, "bfloat16", "65 to 257 tokens, not 64"),
    (258, 64, 0, "bfloat16", "65 to 257 tokens, not 258"),
    (257, 32, 0, "bfloat16", "heads of 64 to 128"),
    (254, 64, 3, "bfloat16", "no padding"),
    (257, 64, 0, "float32", "bfloat16 and float16, not float32"),
  ],
)
def test_mosaic_refuses_attention_that_triton_may_take(
  installed, tokens, head_dim, padding, dtype, why
):
  message = f"backend='mosaic': .*attention_forward takes {why}.*; backend=None chooses another"
  with pytest.raises(NotImplementedError, match=message):
    attend(tokens, head_dim, padding, dtype, "mosaic")
  assert not installed.calls


@needs_limits
@pytest.mark.parametrize(
  ("tokens", "head_dim", "padding", "passes"),
  [
    (257, 64, 0, "sm90 sm90"),  # L/14
    (257, 80, 0, "sm90 sm90"),  # H/14
    (197, 64, 0, "sm90 sm90"),  # B/16
    (145, 104, 0, "sm90 sm90"),
    (77, 64, 0, "triton sm90"),  # Texts.
    (197, 80, 0, "triton sm90"),
    (80, 104, 0, "sm90 triton"),
    (50, 64, 0, "triton triton"),  # B/32
    (512, 64, 0, "triton triton"),
    (257, 64, 7, "triton triton"),
    (257, 32, 0, "triton triton"),
  ],
)
def test_none_takes_each_pass_of_attention_by_the_faster_kernel(
  installed, tokens, head_dim, padding, passes
):
  attend(tokens, head_dim, padding)
  found = {operation: kernel.partition(".")[0] for operation, kernel in installed.calls}
  assert " ".join(found[f"attention_{way}"] for way in ("forward", "backward")) == passes


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_kernels_of_an_operation_are_functions_of_its_name(operation):
  for kernel in OPERATIONS[operation].kernels:
    text = pathlib.Path(pallas.__path__[0], *kernel.split(".")).with_suffix(".py").read_text()
    assert re.search(rf"^def {operation}\(", text, re.MULTILINE), kernel


def test_kernels_chosen_for_a_gpu_still_compute_on_a_cpu(installed):
  x, w = draw(4, 32), draw(32, 16)
  y = on_a_cpu(lambda *a: every_operation(get_backend(None), *a), x, w, capability=89)
  assert sorted(operation for operation, _ in installed.calls) == sorted(OPERATIONS)
  expected = scaled_matmul(quantize(x, ROWWISE), quantize(w, TENSORWISE).T, jnp.float32)
  np.testing.assert_array_equal(y, expected)
