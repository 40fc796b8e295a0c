"""Softmax attention and its gradient: the definition.

q, k and v are either one array [B, L, 3, H, D], as a projection makes them, or three arrays
[B, L, 1, H, D]. Letters: B batch, L tokens, H heads, D the size of a head.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from sbjax.ops.operation import Operation

HEAD_DIMS = (32, 64, 72, 80, 88, 96, 104, 128)  # That the kernels take.


def attention_forward(*qkv: jax.Array, causal: bool, length: int) -> tuple[jax.Array, jax.Array]:
  """softmax(q k^T / sqrt(D)) v, and the logarithm of each softmax's denominator.

  Args:
    qkv: [B, L, 3, H, D], or three of [B, L, 1, H, D].
    causal: whether a token attends to itself and earlier tokens only.
    length: no token attends to tokens from there on.

  Returns:
    o [B, L, H, D] in qkv's dtype; lse [B, H, L] in float32. Logits and sums are float32.
  """
  q, k, v = _unpadded(qkv, length)
  logits = _logits(q, k, causal)
  lse = jax.nn.logsumexp(logits, axis=-1)
  o = jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(logits - lse[..., None]), v)
  return o.astype(qkv[0].dtype), lse


def attention_backward(
  o: jax.Array, lse: jax.Array, do: jax.Array, *qkv: jax.Array, causal: bool, length: int
) -> tuple[jax.Array, ...]:
  """The gradients of qkv, in their shapes and dtype; zeros for tokens from `length` on.

  Args:
    o, lse: the results of `attention_forward`.
    do: [B, L, H, D], the gradient of o.
  """
  q, k, v = _unpadded(qkv, length)
  q, o, do = (x[:, :length].astype(jnp.float32) for x in (q, o, do))
  p = jnp.exp(_logits(q, k, causal) - lse[:, :, :length, None])
  delta = jnp.einsum("bqhd,bqhd->bhq", o, do)
  dp = jnp.einsum("bqhd,bkhd->bhqk", do, v)
  ds = p * (dp - delta[..., None]) * q.shape[-1] ** -0.5
  gradients = (
    jnp.einsum("bhqk,bkhd->bqhd", ds, k),
    jnp.einsum("bhqk,bqhd->bkhd", ds, q),
    jnp.einsum("bhqk,bqhd->bkhd", p, do),
  )
  padding = ((0, 0), (0, qkv[0].shape[1] - length), (0, 0), (0, 0))
  gradients = [jnp.pad(gradient, padding) for gradient in gradients]
  dtype = qkv[0].dtype
  if len(qkv) == 1:
    return (jnp.stack(gradients, axis=2).astype(dtype),)
  return tuple(gradient[:, :, None].astype(dtype) for gradient in gradients)


def split_qkv(qkv: Sequence[jax.Array]) -> list[jax.Array]:
  """q, k and v, each [B, L, H, D], of one array or three."""
  return [qkv[0][:, :, i] for i in range(3)] if len(qkv) == 1 else [x[:, :, 0] for x in qkv]


def _unpadded(qkv, length):
  """q, and k and v without their padding, whose values count for nothing: 0 * NaN is NaN."""
  q, k, v = (x.astype(jnp.float32) for x in split_qkv(qkv))
  return q, k[:, :length], v[:, :length]


def _logits(q, k, causal):
  logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
  if not causal:
    return logits
  query, key = (jax.lax.broadcasted_iota(jnp.int32, logits.shape[2:], i) for i in range(2))
  return jnp.where((key <= query)[None, None], logits, -jnp.inf)


OPERATIONS = {
  "attention_forward": Operation(
    attention_forward,
    "b..h. -> b.h. bh.",
    kernels=("sm90.attention_forward", "triton.attention_short"),
    static=("causal", "length"),
  ),
  "attention_backward": Operation(
    attention_backward,
    "b.h. bh. b.h. b..h. -> b..h.",
    kernels=("sm90.attention_backward", "triton.attention_short"),
    static=("causal", "length"),
  ),
}
