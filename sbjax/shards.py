"""The operations of a backend by its kernels, each on its shard of what is sharded."""

import functools

import jax

from sbjax.matmul import apply_scales, check_operands
from sbjax.partition import is_explicit, over_shards
from sbjax.quantize import (
  Quantized,
  check_quantizable,
  factor_and_scale,
  largest,
  round_to,
)


def scaled_matmul(product, lhs, rhs, out_dtype, out_sharding=None, *, bias=None, residual=None):
  """scaled_matmul by the kernels in `product`; K split over devices is summed before it is scaled.

  `out_sharding` counts in JAX's explicit mode; else the result is split as the operands are.
  """
  check_operands(lhs.values, rhs.values)
  added = {"bias": (bias, ("n",)), "residual": (residual, ("m", "n"))}
  added = {name: given for name, given in added.items() if given[0] is not None}
  lhs_spec, rhs_spec = lhs.spec, rhs.spec

  def local(run, split, lhs, rhs, lhs_scale, rhs_scale, *arrays):
    parts = dict(zip(added, arrays, strict=True))
    if "k" not in split:
      operands = Quantized(lhs, lhs_scale, lhs_spec), Quantized(rhs, rhs_scale, rhs_spec)
      return (run(product.scaled_matmul, *operands, out_dtype, **parts),)
    total = jax.lax.psum(run(product.accumulate, lhs, rhs), split["k"])
    return (apply_scales(total, lhs_scale, rhs_scale, out_dtype, **parts),)

  m, n = ("m" if lhs_spec.is_rowwise else None), ("n" if rhs_spec.is_rowwise else None)
  operands = [lhs.values, rhs.values, lhs.scale, rhs.scale, *(a for a, _ in added.values())]
  inputs = [("m", "k"), ("n", "k"), (m, None), (n, None), *(names for _, names in added.values())]
  (y,) = over_shards(local, operands, inputs, [("m", "n")], sixteens="nk")
  return jax.sharding.reshard(y, out_sharding) if out_sharding is not None and is_explicit() else y


def quantize(kernels, form, x, spec):
  """A quantizer by the Triton kernels; a scale that devices share takes the maximum over them."""
  check_quantizable(x)
  per_row = spec.is_rowwise
  shared = ("k" if form == "quantize" else "m") if per_row else "mk"

  def local(run, split, x):
    over = [axis for name in shared for axis in split.get(name, ())]
    if not over:
      found = run(getattr(kernels, form), x, spec)
      return tuple(jax.tree.leaves(found))
    absmax = run(kernels.absmax, x, {"k": 1, "m": 0, "mk": None}[shared])
    absmax = jax.lax.pmax(absmax, tuple(over))
    scale = factor_and_scale(absmax, spec)[1]
    turn = {"quantize": False, "quantize_transposed": True, "quantize_both": "both"}[form]
    values = run(kernels.cast_scaled, x, absmax, spec, transpose=turn)
    if form == "quantize_both":
      return values[0], scale, values[1], scale
    return values, scale.T if form == "quantize_transposed" else scale

  straight = [("m", "k"), ("m" if per_row else None, None)]
  turned = [("k", "m"), ("k" if per_row else None, None)]
  outputs = {
    "quantize": straight, "quantize_transposed": turned, "quantize_both": [*straight, *turned]
  }[form]  # fmt: skip
  found = over_shards(local, [x], [("m", "k")], outputs)
  if form == "quantize_both":
    values, scale, transposed, transposed_scale = found
    return Quantized(values, scale, spec), Quantized(transposed, transposed_scale, spec)
  values, scale = found
  return Quantized(values, scale, spec)


def by_rows(operation, definition, *arrays, splits_rows=False):
  """An operation of sbjax.fused_ops: [M, K] is split by rows, as it comes; [K] counts for all rows.

  A result [K] is a sum over rows, and goes on over the devices that have the others. K is that of
  the first array; of what is wider, made of several, rows stay whole. Where rows may be split too,
  XLA computes the definition on the parts, and scales take the maximum over them.

  Args:
    operation, definition: what runs on a shard, and what has the same results.
    arrays: pytrees of arrays.
    splits_rows: whether `definition` takes parts of rows, and `quantize=`.
  """
  leaves, structure = jax.tree.flatten(arrays)
  results, result_structure = jax.tree.flatten(jax.eval_shape(definition, *arrays))
  k, width = ("k" if splits_rows else None), leaves[0].shape[1]

  def local(run, split, *leaves):
    arrays = jax.tree.unflatten(structure, leaves)
    if "k" in split:
      quantize = functools.partial(_quantize_parts, split["k"])
      found = jax.tree.leaves(definition(*arrays, quantize=quantize))
    else:
      found = jax.tree.leaves(run(operation, *arrays))
    over = split.get("m", ())
    return tuple(jax.lax.psum(a, over) if over and a.ndim == 1 else a for a in found)

  def names(array):
    if array.ndim == 1:
      return (k,)
    return "m", (k if array.shape[1] == width else None)

  found = over_shards(local, leaves, [names(a) for a in leaves], [names(a) for a in results])
  return jax.tree.unflatten(result_structure, found)


def _quantize_parts(axes, x, spec):
  """Row-wise `quantize` of rows that are split over mesh axes."""
  return round_to(x, jax.lax.pmax(largest(x, spec), axes), spec)
