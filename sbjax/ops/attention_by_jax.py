"""Attention that our kernels do not take: grouped queries, cross lengths, masks, biases, lengths.

`jax.nn.dot_product_attention` is its definition, in float32. Letters: B batch, L tokens of q, S
tokens of k and v, H heads of q, K heads of k and v, D the size of a head.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from sbjax.ops.device import compute_capability, target


def attention_by_jax(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array | None,
  bias: jax.Array | None,
  query_seq_lengths: jax.Array | None,
  key_value_seq_lengths: jax.Array | None,
  causal: bool,
  length: int | None,
  backend: str | None,
) -> jax.Array:
  """`sbjax.attention` of q [B, L, H, D] with k and v [B, S, K, D].

  A mask of causality reaches from the first tokens of q and k: the i-th token of q attends to the
  first i + 1 tokens of k.
  """
  batch, tokens = q.shape[:2]
  logits = (batch, q.shape[2], tokens, k.shape[1])
  mask, bias = _broadcastable("mask", mask, logits), _broadcastable("bias", bias, logits)
  query_lengths = _of_examples("query_seq_lengths", query_seq_lengths, batch)
  key_lengths = _of_examples("key_value_seq_lengths", key_value_seq_lengths, batch)
  if length is not None:
    if k.shape[1] != tokens or query_lengths is not None or key_lengths is not None:
      raise ValueError(
        f"length={length} is for k as long as q, without query_seq_lengths and"
        " key_value_seq_lengths, which say the same for each example."
      )
    query_lengths = key_lengths = jnp.full((batch,), length, jnp.int32)
  implementation = _implementation(backend, q, k, mask, bias, causal)
  # 0 * NaN is NaN, and cuDNN leaves the gradients of padding undefined. It does not get the lengths
  # of q: with them it leaves the outputs of padding undefined, too.
  q, k, v = _zeroed(q, query_lengths), _zeroed(k, key_lengths), _zeroed(v, key_lengths)
  dtype = q.dtype
  if implementation == "xla":
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    bias = None if bias is None else bias.astype(jnp.float32)
  elif mask is not None:  # cuDNN takes whole masks of tokens.
    mask = jnp.broadcast_to(mask, (*mask.shape[:2], *logits[2:]))
  y = jax.nn.dot_product_attention(
    q,
    k,
    v,
    bias,
    mask,
    is_causal=causal,
    key_value_seq_lengths=key_lengths,
    implementation=implementation,
  )
  return _zeroed(y, query_lengths).astype(dtype)


def _broadcastable(name, x, shape):
  """x [1 or B, 1 or H, 1 or L, 1 or S]."""
  if x is None:
    return None
  fits = x.ndim <= 4 and all(n in (1, m) for n, m in zip(x.shape[::-1], shape[::-1], strict=False))
  if not fits:
    raise ValueError(f"{name} must be broadcastable to [B, H, L, S] = {shape}, not {x.shape}.")
  if name == "mask" and x.dtype != bool:
    raise ValueError(f"mask must be bool, not {x.dtype}; bias is added to the logits.")
  if name == "bias" and not jnp.issubdtype(x.dtype, jnp.floating):
    raise ValueError(f"bias must be floating, not {x.dtype}; mask is bool.")
  return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _of_examples(name, lengths, batch):
  if lengths is None:
    return None
  if lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
    raise ValueError(f"{name} must be integers {(batch,)}, not {lengths.dtype} {lengths.shape}.")
  return lengths.astype(jnp.int32)


def _zeroed(x, lengths):
  """x [B, L, ...]; 0 for the tokens of each example from its length on."""
  if lengths is None:
    return x
  token = jax.lax.broadcasted_iota(jnp.int32, (1, x.shape[1], 1, 1), 1)
  return jnp.where(token < lengths[:, None, None, None], x, jnp.zeros((), x.dtype))


def _implementation(backend, q, k, mask, bias, causal) -> Literal["xla", "cudnn"]:
  """That of `jax.nn`: the named one, or the faster one that takes this."""
  if backend in ("mosaic", "triton"):
    raise NotImplementedError(
      f"backend={backend!r} takes q, k and v of one length and one number of heads, without mask,"
      f" bias and lengths of examples, not {_given(q, k, mask, bias)}; 'cudnn' and 'xla' take more."
    )
  reason = _cudnn_declines(q, k, mask, bias, causal)
  if backend == "cudnn" and reason is not None:
    raise NotImplementedError(reason)
  return "xla" if backend == "xla" or reason is not None else "cudnn"


def _given(q, k, mask, bias) -> str:
  if mask is not None or bias is not None:
    return "a mask" if bias is None else "a bias"
  if q.shape != k.shape:
    return f"q {q.shape} with k {k.shape}"
  return "lengths of examples"


def _cudnn_declines(q, k, mask, bias, causal) -> str | None:
  lengths = q.shape[1], k.shape[1]
  lacks = cudnn_lacks(q.dtype, q.shape[-1])
  if lacks is not None:
    return lacks
  if bias is not None:
    return "backend='cudnn' takes no bias here; 'xla' does."
  if lengths[0] % 2 or lengths[1] % 2:  # JAX refuses the gradient.
    return (
      "backend='cudnn' needs even numbers of tokens of q and k, with padding if need be, not"
      f" {lengths[0]} and {lengths[1]}; 'xla' takes all."
    )
  if causal and lengths[0] != lengths[1]:
    return (
      "backend='cudnn' takes causal attention only for q and k of one length, not"
      f" {lengths[0]} and {lengths[1]}; 'xla' takes all."
    )
  return None


def cudnn_lacks(dtype: jnp.dtype, head_dim: int) -> str | None:
  """Why cuDNN's flash attention does not run: it takes 16 bits, on an NVIDIA GPU from Ampere on."""
  if cudnn_runs(dtype, head_dim):
    return None
  return (
    "backend='cudnn' needs an NVIDIA GPU from Ampere on, 16 bits, and heads of a multiple of 8"
    f" up to 128, not {dtype.name} and {head_dim}."
  )


def cudnn_runs(dtype: jnp.dtype, head_dim: int) -> bool:
  """Whether cuDNN's flash attention supports this: 16 bits, on an NVIDIA GPU from Ampere on.

  JAX does not fall back: it raises where cuDNN cannot run, and lowers it only for CUDA.
  """
  ampere = (compute_capability(target()) or 0) >= 80
  return ampere and dtype in (jnp.bfloat16, jnp.float16) and head_dim % 8 == 0 and head_dim <= 128
