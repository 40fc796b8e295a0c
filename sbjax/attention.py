"""Softmax attention: by cuDNN, by kernels for CLIP's lengths, or by XLA."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from sbjax.ops.attention import split_qkv
from sbjax.ops.attention_by_jax import attention_by_jax, cudnn_lacks, cudnn_runs
from sbjax.ops.by_rows import by_rows
from sbjax.ops.device import compute_capability, target
from sbjax.ops.partition import vary_alike
from sbjax.ops.registry import get_backend, runs

# For checkpoint policies: the output of a kernel, and the logarithms of its softmaxes' sums.
ATTENTION_NAME = "sbjax_attention"
BACKENDS = ("xla", "cudnn", "mosaic", "triton")
# By head size, the tokens up to which our kernels are faster than cuDNN's.
_LONGEST = {32: 512, 64: 512, 72: 257, 80: 512, 88: 257, 96: 257, 104: 80, 128: 129}


def attention(
  q: jax.Array,
  k: jax.Array | None = None,
  v: jax.Array | None = None,
  *,
  causal: bool = False,
  length: int | None = None,
  mask: jax.Array | None = None,
  bias: jax.Array | None = None,
  query_seq_lengths: jax.Array | None = None,
  key_value_seq_lengths: jax.Array | None = None,
  backend: str | None = None,
) -> jax.Array:
  """softmax(q k^T / sqrt(D) + bias) v for each head; logits and sums are float32.

  The arguments mean what they mean in `jax.nn.dot_product_attention`, which computes all calls but
  those of one length and one number of heads without mask, bias and lengths.

  >>> import jax.numpy as jnp
  >>> qkv = jnp.ones((2, 5, 3, 4, 8))  # Batch, tokens, q k v, heads, head size.
  >>> attention(qkv).shape
  (2, 5, 4, 8)

  Args:
    q: [B, L, H, D], or [B, L, 3, H, D] with q, k and v, as one projection makes them. Its gradient
      then is one such array. "mosaic" and "triton" take it without a copy.
    k, v: [B, S, K, D] in q's dtype, or None. S may differ from L. K divides H: a head of k and v
      serves H / K heads of q in a row (grouped queries, Ainslie et al. 2023,
      https://arxiv.org/abs/2305.13245; K = 1: multi-query attention). On meshes of explicit axes,
      the devices that split H must divide a K above 1: `jax.nn` reshapes no other way.
    causal: whether the i-th token of q attends to the first i + 1 tokens of k only.
    length: the number of tokens before the padding; None: L. No token attends to padding, and
      padding gets no gradient. Its outputs are undefined. k and v must be as long as q.
    mask: bool, broadcastable to [B, H, L, S]: True where a token of q attends to a token of k. A
      token that attends to none has a finite output without meaning; "xla" gives the mean of v.
    bias: broadcastable to [B, H, L, S], added to the logits in float32. It gets a gradient.
    query_seq_lengths, key_value_seq_lengths: int [B], how many tokens of each example come before
      the padding of q, and of k and v. Padding counts for nothing, whatever it holds, and gets no
      gradient. The outputs of q's padding are 0.
    backend: "xla" computes in float32. "cudnn" takes 16 bits, and D up to 128. "triton" takes 16
      bits, and D in `sbjax.ops.attention.HEAD_DIMS`. "mosaic" (H100, H200) takes 16 bits, 65 to 257
      tokens without padding, and D from 64 to 128. Grouped queries, k of another length, mask, bias
      and lengths of examples are for "xla", and "cudnn" where L and S are even, without a bias, and
      if L = S or not causal. None takes the fastest for each pass; on an NVIDIA GPU the number of
      tokens must then be one that `length_for` returns, unless the call is one of these.

  Returns:
    [B, L, H, D] in q's dtype.

  Raises:
    ValueError: shapes, dtypes, `length` or `backend` are wrong.
    NotImplementedError: the backend does not run here, or not with these shapes.
  """
  qkv = _arrays(q, k, v)
  padded_length = qkv[0].shape[1]
  if length is not None and not 1 <= length <= padded_length:
    raise ValueError(f"length={length} must be from 1 to the {padded_length} tokens of q.")
  if backend not in (None, *BACKENDS):
    raise ValueError(f"Unknown backend {backend!r}; there are {', '.join(map(repr, BACKENDS))}.")
  added = {
    "mask": mask,
    "bias": bias,
    "query_seq_lengths": query_seq_lengths,
    "key_value_seq_lengths": key_value_seq_lengths,
  }
  if qkv[0].shape != qkv[-1].shape or any(x is not None for x in added.values()):
    options = {"causal": causal, "length": length, "backend": backend}
    return attention_by_jax(*split_qkv(qkv), **added, **options)
  length = padded_length if length is None else length
  dtype, head_dim = qkv[0].dtype, qkv[0].shape[-1]
  name = fastest_backend(dtype, length, head_dim) if backend is None else backend
  if name == "cudnn":
    if (reason := cudnn_lacks(dtype, head_dim)) is not None:
      raise NotImplementedError(reason)
    return _by_cudnn(split_qkv(qkv), causal, length)
  if backend is None and name in ("mosaic", "triton"):
    name = None  # Each pass by the faster kernel.
  layer = functools.partial(_by_operations, name, causal, length)
  qkv = vary_alike(*qkv)
  return by_rows(layer, qkv, (True,) * len(qkv))  # Examples are its rows.


def _arrays(q, k, v) -> tuple[jax.Array, ...]:
  """One array [B, L, 3, H, D], or [B, L, 1, H, D] and two [B, S, 1, K, D]."""
  if k is None and v is None:
    if q.ndim != 5 or q.shape[2] != 3:
      raise ValueError(f"q without k and v must be [B, L, 3, H, D], not {q.shape}.")
    return (q,)
  shapes = [None if x is None else x.shape for x in (q, k, v)]
  if k is None or v is None or not q.ndim == k.ndim == 4 or k.shape != v.shape or not _fit(q, k):
    raise ValueError(
      "q must be [B, L, H, D] and k and v both [B, S, K, D], where K divides H,"
      f" not {', '.join(map(str, shapes))}."
    )
  if not q.dtype == k.dtype == v.dtype:
    raise ValueError(f"q, k and v must have one dtype, not {q.dtype}, {k.dtype}, {v.dtype}.")
  return tuple(x[:, :, None] for x in (q, k, v))


def _fit(q, k) -> bool:
  """Whether q [B, L, H, D] and k [B, S, K, D] share B and D, and K divides H."""
  heads, kv_heads = q.shape[2], k.shape[2]
  same = q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3] and k.shape[1] > 0
  return same and kv_heads > 0 and heads % kv_heads == 0


def fastest_backend(dtype, length: int, head_dim: int) -> str:
  for name in ("mosaic", "triton"):
    if _beats_cudnn(name, dtype, length, head_dim) and runs(name):
      return name
  return "cudnn" if cudnn_runs(dtype, head_dim) else "xla"


def _beats_cudnn(name: str, dtype, length: int, head_dim: int) -> bool:
  """Whether a forward and backward pass is faster than cuDNN's, by benchmarks/attention.py."""
  if compute_capability(target()) != 90 or dtype not in (jnp.bfloat16, jnp.float16):
    return False
  in_mosaic_only = head_dim in (104, 128) and 129 <= length <= 257
  return length <= _LONGEST.get(head_dim, 0) or (name == "mosaic" and in_mosaic_only)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _by_operations(backend, causal, length, *qkv):
  return _by_operations_fwd(backend, causal, length, *qkv)[0]


def _by_operations_fwd(backend, causal, length, *qkv):
  o, lse = get_backend(backend).attention_forward(*qkv, causal=causal, length=length)
  o, lse = checkpoint_name(o, ATTENTION_NAME), checkpoint_name(lse, ATTENTION_NAME)
  return o, (o, lse, qkv)


def _by_operations_bwd(backend, causal, length, saved, do):
  o, lse, qkv = saved
  return get_backend(backend).attention_backward(o, lse, do, *qkv, causal=causal, length=length)


_by_operations.defvjp(_by_operations_fwd, _by_operations_bwd)


def _by_cudnn(qkv: Any, causal, length):
  """Attention of q, k and v [B, L, H, D]."""
  batch, padded_length = qkv[0].shape[:2]
  lengths = None
  if length < padded_length:
    # cuDNN leaves gradients of padded tokens undefined; we zero them.
    qkv = tuple(_without_gradient(x, length) for x in qkv)
    # For keys only: with a length for queries too, cuDNN leaves the outputs of padding undefined.
    lengths = None if causal else jnp.full((batch,), length, jnp.int32)
  return jax.nn.dot_product_attention(
    *qkv, is_causal=causal, key_value_seq_lengths=lengths, implementation="cudnn"
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _without_gradient(x_BLHD, length):
  """x; tokens from `length` on get no gradient."""
  return x_BLHD


def _without_gradient_bwd(length, _, dx_BLHD):
  # XLA writes these zeros in place; a mask would read and write all tokens once more.
  zeros = jnp.zeros_like(dx_BLHD[:, length:])
  return (jax.lax.dynamic_update_slice_in_dim(dx_BLHD, zeros, length, axis=1),)


_without_gradient.defvjp(lambda x, length: (x, None), _without_gradient_bwd)


def length_for(length: int, dtype: jnp.dtype, head_dim: int, backend: str | None = None) -> int:
  """The number of tokens to pad to: JAX trains with cuDNN's attention only for even numbers."""
  name = fastest_backend(dtype, length, head_dim) if backend is None else backend
  return length + length % 2 if name == "cudnn" else length
