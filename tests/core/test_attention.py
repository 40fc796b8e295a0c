"""sbjax.attention is softmax attention, whoever computes it and however it is split."""

import functools
import importlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_case
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_case import backend_by, make_mesh, put

from sbjax import attention
from sbjax.ops.attention import attention_backward, attention_forward

module = importlib.import_module("sbjax.attention")


def draw(batch=2, length=7, heads=3, head_dim=16, dtype="float32", seed=0):
  """qkv [B, L, 3, H, D] and do [B, L, H, D], normal."""
  shape = (batch, length, 4, heads, head_dim)
  x = jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32)).astype(dtype)
  return x[:, :, :3], x[:, :, 3]


def split(qkv):
  return [qkv[:, :, i] for i in range(3)]


def value_and_gradients(function, do, *arrays):
  @jax.jit
  def run(do, *arrays):
    y, vjp = jax.vjp(function, *arrays)
    return y, vjp(do)

  return run(do, *arrays)


def by_jax(q, k, v, causal):
  return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="xla")


def assert_near(actual, expected):
  near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-6)
  jax.tree.map(near, actual, expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_values_and_gradients_are_those_of_jax(causal, packed):
  qkv, do = draw()
  arrays = (qkv,) if packed else split(qkv)
  y, gradients = value_and_gradients(functools.partial(attention, causal=causal), do, *arrays)
  expected = value_and_gradients(functools.partial(by_jax, causal=causal), do, *split(qkv))
  assert_near(
    (y, split(gradients[0]) if packed else list(gradients)), (expected[0], [*expected[1]])
  )


def test_16_bits_are_rounded_once():
  qkv, do = draw(dtype="bfloat16")
  wide = [x.astype(jnp.float32) for x in split(qkv)]
  y, gradients = value_and_gradients(attention, do, *split(qkv))
  expected, wide_gradients = value_and_gradients(attention, do.astype(jnp.float32), *wide)
  np.testing.assert_array_equal(y, expected.astype(jnp.bfloat16))
  for a, b in zip(gradients, wide_gradients, strict=True):
    assert a.dtype == jnp.bfloat16
    # The backward pass reads the output in 16 bits.
    assert np.linalg.norm(a.astype(jnp.float32) - b) < 2**-7 * np.linalg.norm(b)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_changes_nothing_and_gets_no_gradient(causal):
  qkv, do = draw(length=8)
  qkv = qkv.at[:, 6, 1:].set(jnp.nan)
  y, (gradient,) = value_and_gradients(
    functools.partial(attention, causal=causal, length=5), do, qkv
  )
  expected = value_and_gradients(functools.partial(attention, causal=causal), do[:, :5], qkv[:, :5])
  assert_near((y[:, :5], gradient[:, :5]), (expected[0], expected[1][0]))
  assert not gradient[:, 5:].any()


def test_a_nan_reaches_the_rows_that_see_it():
  q, k, v = split(draw()[0])
  rows = attention(q.at[0, 2, 0, 0].set(jnp.nan), k, v)
  assert np.isnan(rows[0, 2, 0]).all() and np.isnan(rows).sum() == rows.shape[-1]
  heads = attention(q, k.at[0, 2, 0, 0].set(jnp.nan), v)
  assert np.isnan(heads[0, :, 0]).all() and np.isnan(heads).sum() == heads[0, :, 0].size


def test_vmap_maps_over_further_examples():
  qkv, _ = draw(batch=4)
  expected = attention(qkv)
  by_one = jax.jit(jax.vmap(attention))(qkv.reshape(2, 2, *qkv.shape[1:]))
  assert_near(by_one.reshape(expected.shape), expected)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_devices_compute_their_examples_and_heads(monkeypatch, kind, packed):
  mesh, seen = make_mesh(kind), set()

  def noting(definition, *arrays, **options):
    seen.add(arrays[-1].shape)
    return definition(*arrays, **options)

  kernels = types.SimpleNamespace(
    attention_forward=functools.partial(noting, attention_forward),
    attention_backward=functools.partial(noting, attention_backward),
  )
  backend = backend_by(kernels)
  monkeypatch.setattr(module, "get_backend", lambda name: backend)
  qkv, do = (a.astype(jnp.bfloat16) for a in draw(batch=4, heads=8, head_dim=32))
  specs = P("data", None, None, "fsdp"), P("data", None, "fsdp")
  arrays = [do, qkv] if packed else [do, *split(qkv)]
  run = functools.partial(value_and_gradients, functools.partial(attention, backend="triton"))
  expected = run(*arrays)
  seen.clear()
  with jax.set_mesh(mesh):
    y, gradients = jax.jit(run)(
      *put(mesh, [specs[1], *[specs[a.ndim == 4] for a in arrays[1:]]], *arrays)
    )
  assert (2, 7, 3 if packed else 1, 2, 32) in seen
  assert y.sharding.is_equivalent_to(NamedSharding(mesh, specs[1]), y.ndim)
  assert_near((y, gradients), expected)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (lambda q: (q,), r"must be \[B, L, 3, H, D\], not \(2, 7, 3, 16\)"),
    (lambda q: (q, q), r"not \(2, 7, 3, 16\), \(2, 7, 3, 16\), None"),
    (lambda q: (q, q, q[:, :5]), r"k and v both \[B, S, K, D\], .*, \(2, 5, 3, 16\)"),
    (lambda q: (q, q[:, :, :2], q[:, :, :2]), r"where K divides H, not .*\(2, 7, 2, 16\)"),
    (lambda q: (q, q[:1], q[:1]), r"where K divides H, not .*\(1, 7, 3, 16\)"),
    (lambda q: (q, q[..., :8], q[..., :8]), r"where K divides H, not .*\(2, 7, 3, 8\)"),
    (lambda q: (q, q[:, :0], q[:, :0]), r"where K divides H, not .*\(2, 0, 3, 16\)"),
    (lambda q: (q, q, q.astype(jnp.bfloat16)), "one dtype, not float32, float32, bfloat16"),
  ],
)
def test_wrong_arrays_are_named(arguments, message):
  with pytest.raises(ValueError, match=message):
    attention(*arguments(draw()[1]))


def test_wrong_options_are_named():
  qkv, _ = draw()
  for length in (0, 8):
    with pytest.raises(ValueError, match=f"length={length} must be from 1 to the 7 tokens"):
      attention(qkv, length=length)
  with pytest.raises(
    ValueError, match="Unknown backend 'flash'; there are 'xla', 'cudnn', 'mosaic'"
  ):
    attention(qkv, backend="flash")
  for backend in ("cudnn", "mosaic", "triton"):
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
      attention(qkv, backend=backend)


@pytest.mark.parametrize(
  ("capability", "dtype", "length", "head_dim", "names"),
  [
    (90, "bfloat16", 257, 64, ("mosaic", "triton", "cudnn")),
    (90, "float16", 512, 80, ("mosaic", "triton", "cudnn")),
    (90, "bfloat16", 197, 96, ("mosaic", "triton", "cudnn")),
    (90, "bfloat16", 129, 104, ("mosaic", "cudnn")),
    (90, "bfloat16", 129, 128, ("mosaic", "triton", "cudnn")),
    (90, "bfloat16", 257, 88, ("mosaic", "triton", "cudnn")),
    (90, "bfloat16", 258, 88, ("cudnn",)),
    (90, "bfloat16", 99, 104, ("cudnn",)),
    (90, "bfloat16", 513, 64, ("cudnn",)),
    (90, "bfloat16", 257, 104, ("mosaic", "cudnn")),
    (90, "bfloat16", 197, 104, ("mosaic", "cudnn")),
    (90, "bfloat16", 257, 128, ("mosaic", "cudnn")),
    (90, "bfloat16", 258, 128, ("cudnn",)),
    (90, "bfloat16", 256, 72, ("mosaic", "triton", "cudnn")),
    (90, "bfloat16", 258, 72, ("cudnn",)),
    (90, "bfloat16", 77, 40, ("cudnn",)),
    (90, "float32", 257, 64, ("xla",)),
    (80, "bfloat16", 257, 64, ("cudnn",)),
  ],
)
def test_the_default_backend_is_the_fastest_that_runs(
  monkeypatch, capability, dtype, length, head_dim, names
):
  dtype, running = jnp.dtype(dtype), {"mosaic", "triton"}
  monkeypatch.setattr(module, "runs", lambda name: name in running)
  with triton_case.chip(capability):
    for name in names:
      assert module.fastest_backend(dtype, length, head_dim) == name
      # Only cuDNN needs an even number.
      assert module.length_for(length, dtype, head_dim) == length + (name == "cudnn") * length % 2
      running.discard(name)


@pytest.mark.parametrize(
  ("shape", "dtype", "reason"),
  [
    ((1, 257, 1, 16, 80), "float32", "takes bfloat16 and float16, not float32"),
    ((1, 257, 1, 16, 40), "bfloat16", "takes heads of 32, .*, not 40"),
    ((1, 257, 1, 16, 80), "bfloat16", None),
    ((1, 1025, 1, 16, 128), "float16", None),
  ],
)
def test_triton_s_limits_are_said(shape, dtype, reason):
  kernel = triton_case.loaded("triton.attention_short")
  x = jax.ShapeDtypeStruct(shape, dtype)
  said = kernel.unsupported(None, x, x, x, causal=False, length=shape[1])
  assert (said is None) if reason is None else re.fullmatch(reason, said)
