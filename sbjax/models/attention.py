"""Softmax attention through JAX: cuDNN's flash attention where it runs, XLA's elsewhere."""

import jax
import jax.numpy as jnp


def attention(q_BLHD, k_BLHD, v_BLHD, *, causal: bool) -> jax.Array:
  """Softmax attention in the operands' dtype, its logits in float32."""
  batch, length, _, head_dim = q_BLHD.shape
  dtype = q_BLHD.dtype
  if not cudnn_runs(dtype, head_dim):
    # In 16 bits XLA's has float32 logits too, but its backward pass multiplies them with 16-bit
    # operands, which strict promotion forbids; measured on a CPU, all float32 is as fast.
    qkv = (x.astype(jnp.float32) for x in (q_BLHD, k_BLHD, v_BLHD))
    return jax.nn.dot_product_attention(*qkv, is_causal=causal).astype(dtype)
  lengths = None
  if length % 2:
    # JAX trains with even lengths alone, and a class token makes them odd: one more, masked out.
    padding = ((0, 0), (0, 1), (0, 0), (0, 0))
    q_BLHD, k_BLHD, v_BLHD = (jnp.pad(x, padding) for x in (q_BLHD, k_BLHD, v_BLHD))
    lengths = jnp.full((batch,), length, jnp.int32)
  y_BLHD = jax.nn.dot_product_attention(
    q_BLHD,
    k_BLHD,
    v_BLHD,
    is_causal=causal,
    query_seq_lengths=lengths,
    key_value_seq_lengths=lengths,
    implementation="cudnn",
  )
  return y_BLHD[:, :length]


def cudnn_runs(dtype: jnp.dtype, head_dim: int) -> bool:
  """Whether cuDNN's flash attention takes this: 16 bits, on an NVIDIA GPU from Ampere on.

  JAX raises where cuDNN cannot run instead of falling back, and lowers it for CUDA alone, so we
  ask first.
  """
  device = jax.devices()[0]
  capability = getattr(device, "compute_capability", "")  # "9.0"; ROCm's is "gfx90a".
  ampere = capability.replace(".", "").isdigit() and float(capability) >= 8
  return ampere and dtype in (jnp.bfloat16, jnp.float16) and head_dim % 8 == 0 and head_dim <= 128
