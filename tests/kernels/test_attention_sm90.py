"""Hopper's attention is near the definition's, has no races, and compiles."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import each_kernel
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_case
from jax.sharding import AbstractMesh, AxisType, use_abstract_mesh
from jax.sharding import PartitionSpec as P
from mosaic_case import interpreted, needs_interpreter
from pairwise import mainly

from benchmarks.absent_gpu import Device
from sbjax.attention import attention
from sbjax.ops import attention as attention_ops

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def sm90():
  """The backward pass."""
  return triton_case.loaded("sm90.attention_backward")


@pytest.fixture
def forward():
  return triton_case.loaded("sm90.attention_forward")


def draw(batch, tokens, heads, dtype="bfloat16", packed=False, head_dim=64):
  """qkv and do, normal."""
  shape = (batch, tokens, 4, heads, head_dim)
  x = np.random.default_rng(tokens).normal(size=shape).astype(np.float32)
  x = jnp.asarray(x).astype(dtype)
  return (x[:, :, :3],) if packed else tuple(x[:, :, i : i + 1] for i in range(3)), x[:, :, 3]


def gradients(sm90, qkv, do, causal=False, num_sms=1, **config):
  """The kernel's, in a config or its default one, and the definition's, of arrays of q, k, v."""
  options = {"causal": causal, "length": do.shape[1]}
  saved = *attention_ops.attention_forward(*qkv, **options), do, *qkv
  expected = attention_ops.attention_backward(*saved, **options)
  options |= {"config": sm90.Config(**config) if config else None, "num_sms": num_sms}
  actual = interpreted(sm90.attention_backward, *saved, **options)
  for a, b in zip(actual, expected, strict=True):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
  return [_wide(actual), _wide(expected)]


def _wide(qkv):
  return np.concatenate([np.asarray(x).astype(np.float64) for x in qkv], axis=2)


def outputs(forward, qkv, causal=False, num_sms=1):
  """The kernel's o and lse, and the definition's."""
  options = {"causal": causal, "length": qkv[0].shape[1]}
  expected = attention_ops.attention_forward(*qkv, **options)
  actual = interpreted(forward.attention_forward, *qkv, num_sms=num_sms, **options)
  for a, b in zip(actual, expected, strict=True):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
  return [[np.asarray(x).astype(np.float64) for x in pair] for pair in (actual, expected)]


def assert_output_is_near(actual, expected):
  """o has a rounding of probabilities and its own; lse has none."""
  (o, lse), (expected_o, expected_lse) = actual, expected
  error = np.linalg.norm(o - expected_o, axis=3) / np.linalg.norm(expected_o, axis=3)
  assert np.all(error < 2**-7)
  np.testing.assert_allclose(lse, expected_lse, rtol=2**-20, atol=2**-20)


@needs_interpreter
@pytest.mark.parametrize(
  ("tokens", "head_dim", "packed", "causal", "dtype"),
  [
    # With the last key apart, and without; two heads' keys in shared memory, and one's.
    (129, 64, True, True, "bfloat16"),
    (197, 64, False, False, "float16"),
    (257, 104, True, False, "bfloat16"),
    *mainly(
      [],
      [
        (257, 80, True, True, "bfloat16"),
        (256, 64, False, True, "bfloat16"),
        (256, 72, True, False, "bfloat16"),
        (145, 128, False, False, "bfloat16"),
        (161, 112, True, False, "float16"),
        (81, 96, False, False, "bfloat16"),
      ],
    ),
  ],
)
def test_outputs_are_near_the_definition_s(forward, tokens, head_dim, packed, causal, dtype):
  # Two thread blocks: the first one has two heads, and three with five heads.
  (qkv, _) = draw(1, tokens, 5 if head_dim == 64 else 3, dtype, packed, head_dim)
  assert_output_is_near(*outputs(forward, qkv, causal, num_sms=2))


def assert_near(actual, expected):
  """Each tile of queries or keys, in norm: a rounding of probabilities, and of results."""
  for first in range(0, actual.shape[1], 64):
    a, b = (x[:, first : first + 64] for x in (actual, expected))
    error = np.linalg.norm(a - b, axis=(1, 4)) / np.linalg.norm(b, axis=(1, 4))
    assert np.all(error < 2**-7), (first, error)


@needs_interpreter
@pytest.mark.parametrize(
  ("tokens", "packed", "causal", "dtype", "config"),
  [
    (77, True, True, "bfloat16", {"stages": 3}),
    (197, True, False, "bfloat16", {}),
    *mainly(
      [],
      [
        (129, False, False, "bfloat16", {"stages": 3, "kv_stages": 2}),
        (129, True, True, "float16", {"ds_buffers": 1}),
        (256, False, False, "float16", {}),
        (257, True, False, "bfloat16", {}),
        (257, False, True, "bfloat16", {"ds_buffers": 1}),
      ],
    ),
  ],
)
def test_gradients_are_near_the_definition_s(sm90, tokens, packed, causal, dtype, config):
  # Three heads, one after the other: the third takes the first one's buffers.
  case = draw(1, tokens, 3, dtype, packed)
  assert_near(*gradients(sm90, *case, causal, **config))


@needs_interpreter
@pytest.mark.parametrize(
  ("tokens", "head_dim", "packed", "causal", "config"),
  [
    # A second block of 32 columns.
    (77, 96, False, True, {}),
    # Two kernels, the second of which writes dQ into the same array.
    (257, 104, True, False, {}),
    *mainly(
      [],
      [
        # Two parts of the keys: the second adds to dQ.
        (257, 80, True, True, {}),
        # Two parts of the keys in shared memory, and dQ in an array of its own.
        (145, 88, True, True, {}),
        # A second block of 16 columns, and of 64 that a head of 104 does not fill.
        (129, 80, True, False, {"kv_stages": 2}),
        (129, 104, False, True, {}),
        (129, 128, False, False, {}),
        (99, 88, True, True, {"kv_stages": 2}),
        (197, 80, False, True, {}),
        # Four places for three tiles, and five.
        (145, 80, True, False, {}),
        (145, 72, False, True, {"stages": 3}),
        (256, 72, True, False, {}),
        (145, 112, False, True, {}),
        (145, 88, False, True, {"kv_stages": 1, "memory_registers": 104}),
        (257, 96, False, True, {}),
        # A last tile of keys with 5 rows, and columns that fill two blocks.
        (197, 96, True, False, {}),
        (197, 128, False, True, {}),
        (257, 128, True, False, {}),
      ],
    ),
  ],
)
def test_wide_heads_gradients_are_near_the_definition_s(
  sm90, tokens, head_dim, packed, causal, config
):
  # Two thread blocks: the first one has two heads.
  case = draw(1, tokens, 3, packed=packed, head_dim=head_dim)
  assert_near(*gradients(sm90, *case, causal, num_sms=2, **config))


@pytest.mark.parametrize(
  "wrong", [{"stages": 1}, {"kv_stages": 3}, {"ds_buffers": 0}, {"memory_registers": 64}]
)
def test_a_config_that_would_hang_is_refused(sm90, wrong):
  (name,) = wrong
  with pytest.raises(ValueError, match=rf"{name}={wrong[name]}\b.*: .*{name}"):
    sm90.Config(**wrong)


@needs_interpreter
def test_nan_stays_in_its_head(sm90):
  (q, k, v), do = draw(2, 129, 2)
  actual, expected = gradients(sm90, (q, k.at[0, 128, 0, 1].set(jnp.nan), v), do)
  is_nan = np.isnan(actual).all(axis=(1, 2, 4))
  np.testing.assert_array_equal(is_nan, [[False, True], [False, False]])
  assert_near(np.delete(actual, 1, axis=3), np.delete(expected, 1, axis=3))
  assert_near(actual[1:], expected[1:])


@needs_interpreter
@pytest.mark.slow
def test_nan_stays_in_its_head_s_output(forward):
  # In the key of a class token, which is apart.
  (q, k, v), _ = draw(1, 129, 2)
  (o, lse), (expected_o, expected_lse) = outputs(forward, (q, k.at[0, 128, 0, 1].set(jnp.nan), v))
  assert np.isnan(o[:, :, 1]).all() and np.isnan(lse[:, 1]).all()
  first = (o[:, :, :1], lse[:, :1]), (expected_o[:, :, :1], expected_lse[:, :1])
  assert_output_is_near(*first)


@needs_interpreter
@pytest.mark.slow
def test_large_negative_logits_give_no_nan(sm90, forward):
  (q, k, v), do = draw(1, 197, 1)
  q, k = jnp.abs(q) * 32, -jnp.abs(k) * 32
  assert_output_is_near(*outputs(forward, (q, k, v)))
  actual, expected = gradients(sm90, (q, k, v), do)
  assert np.isfinite(actual).all()
  # Most probabilities are zero, so the gradients of q and k are differences of equal numbers.
  for i in range(3):
    largest = np.max(np.abs(expected[:, :, i]))
    assert np.max(np.abs(actual[:, :, i] - expected[:, :, i])) <= 2**-6 * largest


@pytest.mark.parametrize(
  ("tokens", "head_dim", "length", "why"),
  [
    (64, 64, 64, "takes 65 to 257 tokens, not 64"),
    (258, 64, 258, "takes 65 to 257 tokens, not 258"),
    (257, 32, 257, "takes heads of 64 to 128, multiples of 8, not 32"),
    (99, 76, 99, "takes heads of 64 to 128, multiples of 8, not 76"),
    (257, 64, 254, "takes no padding, here 3 tokens of it"),
    (257, 64, 257, None),
    (77, 120, 77, None),
  ],
)
def test_both_passes_say_what_they_do_not_support(sm90, forward, tokens, head_dim, length, why):
  x, options = jax.ShapeDtypeStruct((1, tokens, 1, 1, head_dim), jnp.bfloat16), {"causal": False}
  assert forward.unsupported(None, x, x, x, length=length, **options) == why
  assert sm90.unsupported(None, x, None, x, x, x, x, length=length, **options) == why


@pytest.mark.parametrize("tokens", [65, 80, 81, 128, 129, 192, 193, 256, 257])
def test_few_tokens_and_some_wide_heads_are_left_to_triton(sm90, forward, tokens):
  def slower(kernel, *arrays):
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    sizes = (64, 80, 88, 96, 104, 128)
    x = {d: shape((1, tokens, 1, 1, d)) for d in sizes}
    return {d for d in sizes if kernel.is_slower(*arrays, x[d], causal=False, length=tokens)}

  few, wide = {64, 80, 88}, {80, 88, 96, 104, 128}
  expected = few if tokens < 129 else wide if 192 < tokens < 257 else set()
  assert slower(forward) == expected
  assert slower(sm90, None, None, None) == ({104, 128} if tokens <= 80 else set())


@needs_interpreter
def test_each_kernel_gives_thread_blocks_several_heads(sm90, monkeypatch):
  blocks = []
  kernel = sm90.persistent_kernel

  def watched(*args, **options):
    blocks.append(options["blocks"])
    return kernel(*args, **options)

  monkeypatch.setattr(sm90, "persistent_kernel", watched)
  gradients = jax.eval_shape(each_kernel.several_heads)
  assert blocks == [2] * len(gradients)
  assert all(x.shape[3] > 2 * 2 for (x,) in gradients)


@needs_interpreter
@pytest.mark.aot
@pytest.mark.parametrize("cases", mainly(["mainly"], ["mainly", "slow"]))
def test_it_compiles_for_hopper_with_few_registers_spilled(sm90, tmp_path, cases):
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
    "MOSAIC_GPU_DUMP_TO": str(tmp_path),
    "MOSAIC_GPU_DUMP_PTXAS": "1",
  }
  command = [sys.executable, "-m", "tests.aot.attention", tmp_path, cases]
  run = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
  assert run.returncode == 0, run.stderr[-5000:]
  compiled = json.loads(run.stdout.splitlines()[-1])
  assert compiled
  for name, case in compiled.items():
    assert case["targets"] == ["mosaic_gpu_v2"] and not case["copies"], name
    # Wide heads in two parts of keys have a kernel of their own for dQ.
    apart = ("bigG/14", "96", "88", "104, whole tiles", "128", "128, causal")
    assert case["kernels"] == (2 if name in apart else 1), name
    assert not case["is_serialized"], name  # wgmma's that wait for one another.
    # Bytes. Gradients of 128 columns take most registers; the forward pass takes few, but for 256
    # logits a row beside a wide head.
    forward = 48 if "SO400M" in name else 16
    few = 320 if "128" in name else forward if "forward" in name else 192
    assert case["spilled"] and max(case["spilled"]) <= few, name


@needs_interpreter
# 104 columns have a kernel of their own for dQ.
@pytest.mark.parametrize(("head_dim", "spec", "kernels"), [(104, P("data"), 3), (64, P(), 2)])
def test_gradients_lower_where_types_say_what_varies_over_devices(sm90, head_dim, spec, kernels):
  device = Device("NVIDIA H200", 132, "gpu", "9.0")
  mesh = AbstractMesh((2,), ("data",), (AxisType.Auto,), abstract_device=device)
  qkv = jax.ShapeDtypeStruct((2, 257, 3, 1, head_dim), jnp.bfloat16)
  gradient = jax.grad(lambda qkv: jnp.sum(attention(qkv, backend="mosaic"), dtype=jnp.float32))
  run = jax.shard_map(gradient, mesh=mesh, in_specs=spec, out_specs=spec)
  with use_abstract_mesh(mesh):
    text = jax.jit(run).trace(qkv).lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("custom_call @mosaic_gpu_v2") == kernels
