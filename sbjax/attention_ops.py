"""Softmax attention and its gradient: the definition.

q, k and v are either one array [B, L, 3, H, D], as a projection makes them, or three arrays
[B, L, 1, H, D]. Letters: B batch, L tokens, H heads, D the size of a head.
"""

import jax
import jax.numpy as jnp

# The kernels' limits: of a head's size, and of its keys and values in shared memory.
HEAD_DIMS = (32, 64, 80, 88, 96, 104, 128)
MAX_LENGTH = 512


def attention_forward(*qkv: jax.Array, causal: bool, length: int) -> tuple[jax.Array, jax.Array]:
  """softmax(q k^T / sqrt(D)) v, and the logarithm of each softmax's denominator.

  Args:
    qkv: [B, L, 3, H, D], or three of [B, L, 1, H, D].
    causal: whether a token attends to itself and earlier tokens only.
    length: no token attends to tokens from there on.

  Returns:
    o [B, L, H, D] in qkv's dtype; lse [B, H, L] in float32. Logits and sums are float32.
  """
  q, k, v = _split(qkv)
  logits = _logits(q, k, causal, length)
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
  q, k, v = _split(qkv)
  o, do = o[:, :length].astype(jnp.float32), do[:, :length].astype(jnp.float32)
  q = q[:, :length]
  p = jnp.exp(_logits(q, k, causal, length) - lse[:, :, :length, None])
  delta = jnp.einsum("bqhd,bqhd->bhq", o, do)
  dp = jnp.einsum("bqhd,bkhd->bhqk", do, v)
  ds = p * (dp - delta[..., None]) * q.shape[-1] ** -0.5
  gradients = (
    jnp.pad(jnp.einsum("bhqk,bkhd->bqhd", ds, k), _at_end(k.shape[1] - length)),
    jnp.einsum("bhqk,bqhd->bkhd", ds, q),
    jnp.einsum("bhqk,bqhd->bkhd", p, do),
  )
  dtype = qkv[0].dtype
  if len(qkv) == 1:
    return (jnp.stack(gradients, axis=2).astype(dtype),)
  return tuple(gradient[:, :, None].astype(dtype) for gradient in gradients)


def longest(head_dim: int, capability: int) -> int:
  """The largest number of tokens that the kernels take on a device of this compute capability.

  Below 9.0 the tensor cores' operands are in registers, which a longer head would spill.
  """
  return min(MAX_LENGTH, 49_152 // head_dim) if capability >= 90 else 128


def _split(qkv):
  arrays = [qkv[0][:, :, i] for i in range(3)] if len(qkv) == 1 else [x[:, :, 0] for x in qkv]
  return [x.astype(jnp.float32) for x in arrays]


def _logits(q, k, causal, length):
  logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
  query, key = (jax.lax.broadcasted_iota(jnp.int32, logits.shape[2:], i) for i in range(2))
  seen = (key < length) & (key <= query) if causal else key < length
  return jnp.where(seen[None, None], logits, -jnp.inf)


def _at_end(n):
  return ((0, 0), (0, n), (0, 0), (0, 0))
