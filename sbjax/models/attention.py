"""Softmax attention through JAX: cuDNN's flash attention where it runs, XLA's elsewhere."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from sbjax.device import compute_capability, target


def attention(q_BLHD, k_BLHD, v_BLHD, *, causal: bool, length: int | None = None) -> jax.Array:
  """Softmax attention in the operands' dtype, its logits in float32.

  On an NVIDIA GPU there must be `length_for` of them.

  length: how many tokens count. Those after them are padding: nothing attends to them, no gradient
    comes from them, and what they attend to means nothing.
  """
  batch, padded_length, _, head_dim = q_BLHD.shape
  dtype, lengths = q_BLHD.dtype, None
  if length is not None and length < padded_length:
    # What is computed for keys that nothing attends to is nobody's promise.
    qkv: Any = [_without_gradient(x, length) for x in (q_BLHD, k_BLHD, v_BLHD)]
    q_BLHD, k_BLHD, v_BLHD = qkv
    # Not the queries' too: their outputs would be nobody's promise either.
    lengths = None if causal else jnp.full((batch,), length, jnp.int32)
  attend: Any = functools.partial(
    jax.nn.dot_product_attention, is_causal=causal, key_value_seq_lengths=lengths
  )
  if cudnn_runs(dtype, head_dim):
    return attend(q_BLHD, k_BLHD, v_BLHD, implementation="cudnn")
  # In 16 bits XLA's has float32 logits too, but its backward pass multiplies them with 16-bit
  # operands, which strict promotion forbids; measured on a CPU, all float32 is as fast.
  qkv = (x.astype(jnp.float32) for x in (q_BLHD, k_BLHD, v_BLHD))
  return attend(*qkv).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _without_gradient(x_BLHD, length):
  """x, to whose tokens from `length` on no gradient comes."""
  return x_BLHD


def _without_gradient_bwd(length, _, dx_BLHD):
  # XLA writes these where they are; a mask would have all tokens read and written once more.
  nothing = jnp.zeros_like(dx_BLHD[:, length:])
  return (jax.lax.dynamic_update_slice_in_dim(dx_BLHD, nothing, length, axis=1),)


_without_gradient.defvjp(lambda x, length: (x, None), _without_gradient_bwd)


def length_for(length: int, dtype: jnp.dtype, head_dim: int) -> int:
  """The number of tokens to fill up to: JAX trains with cuDNN's attention for even numbers alone.

  A class token makes them odd. To fill up once before the blocks costs less than in each of them.
  """
  return length + length % 2 if cudnn_runs(dtype, head_dim) else length


def cudnn_runs(dtype: jnp.dtype, head_dim: int) -> bool:
  """Whether cuDNN's flash attention takes this: 16 bits, on an NVIDIA GPU from Ampere on.

  JAX raises where cuDNN cannot run instead of falling back, and lowers it for CUDA alone, so we
  ask first.
  """
  ampere = (compute_capability(target()) or 0) >= 80
  return ampere and dtype in (jnp.bfloat16, jnp.float16) and head_dim % 8 == 0 and head_dim <= 128
