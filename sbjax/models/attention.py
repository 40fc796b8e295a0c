"""Softmax attention through JAX: cuDNN's flash attention where it runs, XLA's elsewhere."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from sbjax.device import compute_capability, target


def attention(q_BLHD, k_BLHD, v_BLHD, *, causal: bool, length: int | None = None) -> jax.Array:
  """Softmax attention in the operands' dtype, with logits in float32.

  On an NVIDIA GPU the number of tokens must be one that `length_for` returns.

  length: the number of tokens before the padding. No token attends to padding, and padding gets no
    gradient. The outputs of padding are undefined.
  """
  batch, padded_length, _, head_dim = q_BLHD.shape
  dtype, lengths = q_BLHD.dtype, None
  if length is not None and length < padded_length:
    # cuDNN leaves gradients of padded tokens undefined; we zero them.
    qkv: Any = [_without_gradient(x, length) for x in (q_BLHD, k_BLHD, v_BLHD)]
    q_BLHD, k_BLHD, v_BLHD = qkv
    # For keys only: with a length for queries too, cuDNN leaves the outputs of padding undefined.
    lengths = None if causal else jnp.full((batch,), length, jnp.int32)
  attend: Any = functools.partial(
    jax.nn.dot_product_attention, is_causal=causal, key_value_seq_lengths=lengths
  )
  if cudnn_runs(dtype, head_dim):
    return attend(q_BLHD, k_BLHD, v_BLHD, implementation="cudnn")
  # XLA's attention has float32 logits in 16 bits too, but its backward pass multiplies them with
  # 16-bit operands, which strict promotion forbids. On a CPU all float32 was measured as fast.
  qkv = (x.astype(jnp.float32) for x in (q_BLHD, k_BLHD, v_BLHD))
  return attend(*qkv).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _without_gradient(x_BLHD, length):
  """x; tokens from `length` on get no gradient."""
  return x_BLHD


def _without_gradient_bwd(length, _, dx_BLHD):
  # XLA writes these zeros in place; a mask would read and write all tokens once more.
  zeros = jnp.zeros_like(dx_BLHD[:, length:])
  return (jax.lax.dynamic_update_slice_in_dim(dx_BLHD, zeros, length, axis=1),)


_without_gradient.defvjp(lambda x, length: (x, None), _without_gradient_bwd)


def length_for(length: int, dtype: jnp.dtype, head_dim: int) -> int:
  """The number of tokens to pad to: JAX trains with cuDNN's attention only for even numbers.

  A class token makes the number odd. Padding once before the blocks costs less than in each block.
  """
  return length + length % 2 if cudnn_runs(dtype, head_dim) else length


def cudnn_runs(dtype: jnp.dtype, head_dim: int) -> bool:
  """Whether cuDNN's flash attention supports this: 16 bits, on an NVIDIA GPU from Ampere on.

  JAX does not fall back: it raises where cuDNN cannot run, and lowers it only for CUDA.
  """
  ampere = (compute_capability(target()) or 0) >= 80
  return ampere and dtype in (jnp.bfloat16, jnp.float16) and head_dim % 8 == 0 and head_dim <= 128
