"""What only an NVIDIA GPU can show: JAX_PLATFORMS=cuda,cpu python -m pytest tests/test_gpu.py"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbjax import RECIPES, quantized_dot
from sbjax.models import attention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("recipe", ["switchback", "switchback_m", "switchback_q", "llm_int8"])
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
  assert attention.cudnn_runs(q.dtype, 64)

  @jax.jit
  def reference(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal)

  @jax.jit
  def ours(q, k, v):
    return attention.attention(q, k, v, causal=causal)

  y, vjp = jax.vjp(ours, q, k, v)
  wide = [x.astype(jnp.float32) for x in (q, k, v)]
  expected_y, expected_vjp = jax.vjp(reference, *wide)
  found = (y, *vjp(dy))
  for a, b in zip(found, (expected_y, *expected_vjp(dy.astype(jnp.float32))), strict=True):
    error = np.linalg.norm(a.astype(jnp.float32) - b) / np.linalg.norm(b)
    assert error < 2**-6, error
