"""Operations in 8 bits, a layer's and an optimizer's: definitions, kernels, and how they are split.

A row of OPERATIONS is an operation. Its definition is plain jnp. A backend may have a kernel of the
same name, for the arguments that the row's limit allows. On a mesh each device runs the kernel on
its shards.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sbjax.ops import adam as expansion
from sbjax.ops import attention as attention_ops
from sbjax.ops import rows as fused_ops
from sbjax.ops.matmul import apply_scales, scaled_matmul
from sbjax.ops.partition import Names, arrays_of, is_explicit, partitioned
from sbjax.quantize import INT8, Quantized, Spec, factor_and_scale, quantize

OUT_DTYPES = ("bfloat16", "float16", "float32")


class Operation(NamedTuple):
  """One operation, whoever computes it.

  definition: in plain jnp. Definitions that quantize take `quantize=`, so that absmax can be
    reduced over devices.
  axes: "operands -> results", the names of each array's axes in turn: m, n, k, or "." for an axis
    that is never split. The last entry serves all further arrays; a vector has its last axis.
  mosaic, triton: the modules of sbjax.pallas with a kernel of the operation's name.
  limit: says why the kernels do not support these arguments, or None.
  """

  definition: Callable
  axes: str
  mosaic: str
  triton: str
  limit: Callable[..., str | None]


def unsupported_reason(name: str, has_fp8: bool, args, options) -> str | None:
  """Why no kernel of the operation supports these arguments, or None."""
  leaves = jax.tree.leaves((args, options), is_leaf=_is_spec)
  dtypes = [leaf.dtype for leaf in leaves if hasattr(leaf, "dtype")]
  if jnp.float64 in dtypes:
    return "takes at most 32 bits, not float64"
  fp8 = [dtype.name for dtype in dtypes if dtype.itemsize == 1 and dtype != INT8]
  if fp8 and not has_fp8:
    return f"takes only int8, not {fp8[0]}, below compute capability 8.9"
  return OPERATIONS[name].limit(*args, **options)


def on_shards(name: str, kernels: Mapping[str, Any], *args, out_sharding=None, **options):
  """The operation by its kernel; on a mesh each device computes on its shards.

  A mesh axis may split K of a matmul, or values that share a scale. Then devices first add up
  their sums of products, or take the maximum of their absmax.

  Args:
    kernels: for each operation a module with a kernel of that name.
    out_sharding: of the result, in JAX's explicit mode; else it is split as the operands are.
  """
  operation = OPERATIONS[name]
  arrays, call = arrays_of(args, options)
  shapes = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)
  results = jax.eval_shape(functools.partial(call, operation.definition), *shapes)
  results, structure = jax.tree.flatten(results)
  inputs, outputs = _names(operation.axes, arrays, results)
  reduced = _reduced(inputs, jax.tree.unflatten(structure, outputs))

  def local(run, split, *arrays):
    over = tuple(axis for axis_name in reduced for axis in split.get(axis_name, ()))
    if not over:
      compute = functools.partial(run, getattr(kernels[name], name))
    elif name == "scaled_matmul":
      compute = functools.partial(_multiply_parts, run, kernels[name], over)
    else:
      quantize = functools.partial(_quantize_parts, run, kernels["quantize"], over)
      compute = functools.partial(operation.definition, quantize=quantize)
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
  sides = [
    [_entry(entries.split(), i, array.ndim) for i, array in enumerate(side)]
    for entries, side in zip(axes.split("->"), (arrays, results), strict=True)
  ]
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


def _entry(entries: list[str], i: int, ndim: int) -> str:
  return entries[min(i, len(entries) - 1)][-ndim:]


def _reduced(inputs: Sequence[Names], results) -> list[str]:
  """The names over which the operation sums products, or shares a scale.

  results: with names in place of arrays.
  """
  names = {name for axes in inputs for name in axes if name is not None}
  reduced = names - set(jax.tree.leaves(results))
  for node in jax.tree.leaves(results, is_leaf=lambda a: isinstance(a, Quantized)):
    if isinstance(node, Quantized) and node.spec.takes_absmax:
      reduced |= set(node.values[1:] if node.spec.is_rowwise else node.values)
  return sorted(reduced & names)


def _multiply_parts(run, kernels, over, lhs, rhs, out_dtype, *, bias=None, residual=None):
  """`scaled_matmul` where devices have parts of K: the sums are added up before they are scaled."""
  total = jax.lax.psum(run(kernels.accumulate, lhs.values, rhs.values), over)
  return apply_scales(total, lhs.scale, rhs.scale, out_dtype, bias, residual)


def _quantize_parts(run, kernels, over, x, spec) -> Quantized:
  """`quantize` where values that share a scale are on several devices."""
  absmax = jax.lax.pmax(run(kernels.absmax, x, 1 if spec.is_rowwise else None), over)
  values = run(kernels.cast_scaled, x, absmax, spec)
  return Quantized(values, factor_and_scale(absmax, spec)[1], spec)


def _quantize(x, spec, *, quantize=quantize):
  return quantize(x, spec)


def _quantize_transposed(x, spec, *, quantize=quantize):
  return quantize(x.T, spec)


def _quantize_both(x, spec, *, quantize=quantize):
  values = quantize(x, spec)
  return values, values.T


def _no_limit(*args, **options):
  return None


def _multiples_of_16(lhs, rhs, out_dtype, **options):
  (n, k), dtype = rhs.values.shape, jnp.dtype(out_dtype).name
  if k % 16 or n % 16:
    return f"takes K and N that are multiples of 16, not {k} and {n}"
  return None if dtype in OUT_DTYPES else f"gives {', '.join(OUT_DTYPES)}, not {dtype}"


def _rows_in_registers(*args, **options):
  specs = [a for a in jax.tree.leaves(args, is_leaf=_is_spec) if _is_spec(a)]
  specs += [a.spec for a in args if isinstance(a, Quantized)]
  width, most = jax.tree.leaves(args)[0].shape[1], fused_ops.MAX_WIDTH_IN_REGISTERS
  if not all(spec.is_rowwise for spec in specs):
    return "takes one scale a row, not one for all rows"
  if width > most:
    return f"takes rows of at most {most:,}, which stay in registers, not {width:,}"
  return None


def _attention_heads(*arrays, **options):
  head_dim, dtype = arrays[-1].shape[-1], arrays[-1].dtype
  if dtype not in (jnp.bfloat16, jnp.float16):
    return f"takes bfloat16 and float16, not {dtype.name}"
  if head_dim not in attention_ops.HEAD_DIMS:
    return f"takes heads of {', '.join(map(str, attention_ops.HEAD_DIMS))}, not {head_dim}"
  return None


def _whole_groups(weights, g, mu, nu, first):
  del weights, mu, nu, first
  if g.shape[-1] != expansion.GROUP:
    return f"takes groups of {expansion.GROUP}, not {g.shape[-1]}"
  return f"takes at most 5 axes, not {g.ndim - 1}" if g.ndim > 6 else None


def _is_spec(leaf) -> bool:
  return isinstance(leaf, Spec)


def _in_triton(
  definition: Callable, axes: str, module: str, limit: Callable[..., str | None] = _no_limit
) -> Operation:
  """Both backends have the Triton kernel."""
  return Operation(definition, axes, module, module, limit)


_CODED = "abcdk. abcdk abcdk"  # Groups, and their details.

OPERATIONS = {
  "quantize": _in_triton(_quantize, "mk -> mk", "triton.quantize"),
  "quantize_transposed": _in_triton(_quantize_transposed, "mk -> km", "triton.quantize"),
  "quantize_both": _in_triton(_quantize_both, "mk -> mk mk km", "triton.quantize"),
  "scaled_matmul": Operation(
    scaled_matmul,
    "mk m. nk n. mn -> mn",
    mosaic="sm90.scaled_matmul",
    triton="triton.scaled_matmul",
    limit=_multiples_of_16,
  ),
  "norm_quantize": _in_triton(
    fused_ops.norm_quantize, "m. -> m.", "triton.norm", _rows_in_registers
  ),
  "norm_backward": _in_triton(
    fused_ops.norm_backward, "m. -> m.", "triton.norm", _rows_in_registers
  ),
  "gelu_quantize": _in_triton(
    fused_ops.gelu_quantize, "mk -> mk", "triton.gelu", _rows_in_registers
  ),
  "gelu_backward": _in_triton(
    fused_ops.gelu_backward, "mk -> mk", "triton.gelu", _rows_in_registers
  ),
  "quantize_sum": _in_triton(fused_ops.quantize_sum, "mk -> mk", "triton.gelu"),
  "attention_forward": Operation(
    attention_ops.attention_forward,
    "b..h. -> b.h. bh.",
    mosaic="sm90.attention_forward",
    triton="triton.attention_short",
    limit=_attention_heads,
  ),
  "attention_backward": Operation(
    attention_ops.attention_backward,
    "b.h. bh. b.h. b..h. -> b..h.",
    mosaic="sm90.attention_backward",
    triton="triton.attention_short",
    limit=_attention_heads,
  ),
  "adam_direction": _in_triton(
    expansion.adam_direction,
    f". abcdk. {_CODED} {_CODED} abcdk -> abcdk. {_CODED} {_CODED}",
    "triton.adam",
    _whole_groups,
  ),
}
