"""Runs every kernel on small ragged arrays, under a memory checker.

  XLA_PYTHON_CLIENT_ALLOCATOR=platform XLA_FLAGS=--xla_gpu_enable_command_buffer= \\
      compute-sanitizer --tool memcheck --target-processes all python -m tests.each_kernel

This allocator gives each array its own memory, so that the checker detects accesses beyond an
array. The checker crashes in CUDA graphs, which XLA calls command buffers.
"""

import functools

import jax
import jax.numpy as jnp

from sbjax.ops.adam import expand, in_groups
from sbjax.ops.device import compute_capability, target
from sbjax.ops.dither import positions
from sbjax.ops.registry import NAMES, Backend, get_backend
from sbjax.ops.rows import LayerNormParams, RMSNormParams
from sbjax.quantize import E4M3, FORMATS, INT8, Quantized, Spec


def main() -> None:
  has_fp8 = (compute_capability(target()) or 0) >= FORMATS[E4M3].capability
  for name in NAMES[1:]:
    try:
      ops = get_backend(name)
    except NotImplementedError as reason:
      print(f"{name}: not here: {reason}")
      continue
    for dtype in (INT8, E4M3) if has_fp8 else (INT8,):
      results = matmuls(ops, dtype), row_operations(ops, dtype), tile_configs(name, dtype)
      jax.block_until_ready(results)
    cases = ATTENTIONS + ([] if name == "mosaic" else ATTENTIONS_NOT_IN_MOSAIC)
    jax.block_until_ready((attentions(ops, cases), adam_step(ops) if has_fp8 else None))
    if name == "mosaic":
      jax.block_until_ready(several_heads())
    print(f"{name}: ran")


def tile_configs(name: str, dtype):
  """Runs `accumulate`, and `scaled_matmul` in every tile config of the table."""
  if name == "mosaic":
    from sbjax.pallas.sm90 import scaled_matmul as product

    # With few SMs, each SM computes several blocks.
    options = [{"config": config, "num_sms": 4} for config in product.tile_configs()]
  else:
    from sbjax.pallas.triton import scaled_matmul as product

    options = [{}, *({"config": config} for config in product.tile_configs())]
  spec = Spec(dtype, "tensorwise")
  lhs, rhs = (
    Quantized(jnp.ones((rows, 464), dtype), jnp.ones((1, 1)), spec) for rows in (333, 208)
  )
  run = functools.partial(
    product.scaled_matmul, lhs, rhs, jnp.bfloat16, residual=jnp.ones((333, 208), jnp.bfloat16)
  )
  return product.accumulate(lhs.values, rhs.values), [run(**option) for option in options]


def matmuls(ops: Backend, dtype):
  """Runs the quantizers, and matmuls for both scalings of w, also with bias and residual."""
  x = jax.random.normal(jax.random.key(0), (333, 464), jnp.bfloat16)
  w = jax.random.normal(jax.random.key(1), (464, 208))
  row, tensor = Spec(dtype, "rowwise"), Spec(dtype, "tensorwise")
  x_q, kernels = ops.quantize(x, row), [ops.quantize_transposed(w, s) for s in (row, tensor)]
  added = {"bias": jnp.ones(208), "residual": jnp.ones((333, 208), jnp.bfloat16)}
  options = [{}, {"bias": added["bias"]}, added]
  products = [ops.scaled_matmul(x_q, k, jnp.bfloat16, **o) for k in kernels for o in options]
  both = [ops.quantize_both(w, spec) for spec in (row.T, tensor)]
  return products, both, ops.quantize(w, tensor), ops.quantize(x, row, fold=jnp.ones(464))


def row_operations(ops: Backend, dtype):
  """Runs norms, GELU, gated units, their gradients, and sums over rows."""
  spec, norm = Spec(dtype, "rowwise"), LayerNormParams(jnp.ones(464), jnp.zeros(464))
  x, dy, dx = (jax.random.normal(key, (333, 464), jnp.bfloat16)
               for key in jax.random.split(jax.random.key(2), 3))  # fmt: skip
  norms = norm, RMSNormParams(norm.scale)
  forward = [ops.norm_quantize(x, norm, s) for s in (None, spec) for norm in norms]
  backward = [ops.norm_backward(x, norm, dy, d) for d in (None, dx) for norm in norms]
  sums = [ops.quantize_sum(parts, spec) for parts in ((dy,), (dy, dx, x))]
  fold = {"fold": jnp.ones(464)}
  folded = ops.quantize_sum((dy,), spec, **fold), ops.gelu_backward(x, dy, spec, **fold)
  saved = [ops.gelu_quantize(x, s, k)[1] for s, k in ((None, None), (spec, None), (spec, spec))]
  gelus = [ops.gelu_backward(h, dy, spec) for h in saved[1:]]
  units = [ops.glu_quantize(x, dx, s, k)[1] for s, k in ((None, None), (spec, None), (spec, spec))]
  glus = [ops.glu_backward(*hs, dy, spec, folds=(jnp.ones(464), None)) for hs in units[1:]]
  return forward, backward, sums, folded, gelus, glus


ATTENTIONS = [(257, 0, 80), (197, 0, 64), (77, 0, 104)]  # Tokens, padding, head size.
ATTENTIONS_NOT_IN_MOSAIC = [(77, 3, 104), (26, 0, 32)]


def attentions(ops: Backend, cases):
  """Runs attention and its gradient at lengths that no tile divides, and with padding."""
  results = []
  for length, padding, head_dim in cases:
    shape = (3, length + padding, 3, 2, head_dim)
    qkv = jax.random.normal(jax.random.key(length), shape, jnp.bfloat16)
    options = {"causal": bool(padding), "length": length}
    o, lse = ops.attention_forward(qkv, **options)
    results.append(ops.attention_backward(o, lse, o, qkv, **options))
  return results


def several_heads():
  """Runs Hopper's attention with several heads a thread block, one in another's place."""
  from sbjax.pallas.sm90.attention_backward import attention_backward
  from sbjax.pallas.sm90.attention_forward import attention_forward

  shapes = (77, 64), (129, 64), (197, 64), (257, 64), (129, 80), (257, 80)
  wide = (145, 88), (257, 104), (99, 128)
  results = []
  for length, head_dim in shapes + wide:
    key = jax.random.key(length + head_dim)
    qkv = jax.random.normal(key, (1, length, 3, 5, head_dim), jnp.bfloat16)
    options = {"causal": False, "length": length, "num_sms": 2}
    o, lse = attention_forward(qkv, **options)
    results.append(attention_backward(o, lse, o, qkv, **options))
  return results


def adam_step(ops: Backend):
  """Runs Adam's step on coded moments, with a number of groups that no block divides."""
  g = in_groups(jax.random.normal(jax.random.key(3), (33, 384)))
  weights = jnp.array([0.1, 0.02, 1e-6], jnp.float32)
  return ops.adam_direction(weights, g, expand(g), expand(g**2), positions(1, g.shape)[..., 0])


if __name__ == "__main__":
  main()
