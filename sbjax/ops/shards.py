"""An operation on a mesh by its kernel: which sums and maxima devices share on split axes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from sbjax.ops.matmul import apply_scales
from sbjax.ops.partition import Names, arrays_of, is_explicit, partitioned
from sbjax.quantize import Quantized, factor_and_scale


def on_shards(
  name: str,
  definition: Callable,
  axes: str,
  kernel: Any,
  quantizer: Any,
  *args,
  out_sharding=None,
  **options,
):
  """The operation of that name by its kernel; on a mesh each device computes on its shards.

  A mesh axis may split K of a matmul, or values that share a scale. Then devices first add up
  their sums of products, or take the maximum of their absmax.

  Args:
    axes: those of `sbjax.ops.operation.Operation`.
    kernel: the module with a function of the operation's name; that of a matmul has `accumulate`.
    quantizer: the module of "quantize", with `absmax` and `cast_scaled`.
    out_sharding: of the result, in JAX's explicit mode; else it is split as the operands are.
  """
  arrays, call = arrays_of(args, options)
  shapes = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)
  results = jax.eval_shape(functools.partial(call, definition), *shapes)
  results, structure = jax.tree.flatten(results)
  inputs, outputs = _names(axes, arrays, results)
  reduced = _reduced(inputs, jax.tree.unflatten(structure, outputs))

  def local(run, split, *arrays):
    over = tuple(axis for axis_name in reduced for axis in split.get(axis_name, ()))
    if not over:
      compute = functools.partial(run, getattr(kernel, name))
    elif name == "scaled_matmul":
      compute = functools.partial(_multiply_parts, run, kernel, over)
    else:
      quantize = functools.partial(_quantize_parts, run, quantizer, over)
      compute = functools.partial(definition, quantize=quantize)
    rows, leaves = split.get("m", ()), jax.tree.leaves(call(compute, *arrays))
    # Vectors are sums over rows.
    return tuple(jax.lax.psum(a, rows) if rows and a.ndim == 1 else a for a in leaves)

  # Shards of N and K are multiples of 16, as the kernels need them.
  multiple_of_16 = ("n", "k") if name == "scaled_matmul" else ()
  leaves = partitioned(local, arrays, inputs, outputs, multiple_of_16)
  result = jax.tree.unflatten(structure, leaves)
  if out_sharding is None or not is_explicit():
    return result
  return jax.sharding.reshard(result, out_sharding)


def _names(axes: str, arrays: Sequence, results: Sequence) -> tuple[list[Names], list[Names]]:
  """The names of the axes of operands and results, by `Operation.axes`; None is never split.

  An axis of another size than the first of its name gets None: a scale's 1. Where that is a
  result's, and not 1, the operands side by side make the result: nothing of that name is split.
  """
  sides = []
  for text, side in zip(axes.split("->"), (arrays, results), strict=True):
    entries = text.split()
    last = len(entries) - 1
    sides.append([entries[min(i, last)][-array.ndim :] for i, array in enumerate(side)])
  sizes: dict[str, int] = {}
  for names, array in zip(sides[0], arrays, strict=True):
    for name, size in zip(names, array.shape, strict=True):
      sizes.setdefault(name, size)
  for names, array in zip(sides[1], results, strict=True):
    for name, size in zip(names, array.shape, strict=True):
      if size not in (1, sizes[name]):
        sizes[name] = -1

  def split(names, array) -> Names:
    pairs = zip(names, array.shape, strict=True)
    return tuple(name if name != "." and size == sizes[name] else None for name, size in pairs)

  inputs, outputs = (
    [split(names, array) for names, array in zip(side, of_side, strict=True)]
    for side, of_side in zip(sides, (arrays, results), strict=True)
  )
  return inputs, outputs


def _reduced(inputs: Sequence[Names], results) -> list[str]:
  """The names over which the operation sums products, or shares a scale.

  results: with names in place of arrays.
  """
  names = {name for axes in inputs for name in axes if name is not None}
  reduced = names - set(jax.tree.leaves(results))
  for node in jax.tree.leaves(results, is_leaf=lambda a: isinstance(a, Quantized)):
    if isinstance(node, Quantized) and node.spec.takes_absmax:
      axis = node.spec.axis
      reduced |= set(node.values if axis is None else [node.values[axis]])
  return sorted(reduced & names)


def _multiply_parts(run, kernel, over, lhs, rhs, out_dtype, *, bias=None, residual=None):
  """`scaled_matmul` where devices have parts of K: the sums are added up before they are scaled."""
  total = jax.lax.psum(run(kernel.accumulate, lhs.values, rhs.values), over)
  return apply_scales(total, lhs.scale, rhs.scale, out_dtype, bias, residual)


def _quantize_parts(run, quantizer, over, x, spec) -> Quantized:
  """`quantize` where values that share a scale are on several devices."""
  absmax = jax.lax.pmax(run(quantizer.absmax, x, spec.axis), over)
  values = run(quantizer.cast_scaled, x, absmax, spec)
  return Quantized(values, factor_and_scale(absmax, spec)[1], spec)
