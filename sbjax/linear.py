"""The three matmuls of a linear layer, each as a recipe says: what gradients are made of.

Nothing here is differentiable by itself: `quantized_dot` and `fused` put these together, each under
its own custom_vjp. Operands are rows [M, K], kernels [K, N].
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import reshard

from sbjax import fp4_ops
from sbjax.backends import Backend, get_backend
from sbjax.by_rows import by_rows
from sbjax.formats import INT8
from sbjax.matmul import MAX_INT8_CONTRACTION, full_dot, wide, with_added
from sbjax.partition import is_explicit
from sbjax.quantize import Quantized, Spec, as_floating, dequantize
from sbjax.recipes import Recipe, as_recipe
from sbjax.split_k_matmul import split_k_matmul


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NoMaster:
  """Stands for a master that is not there: the weight is frozen in 8 bits."""

  shape: tuple[int, ...]  # of w [K, N]
  dtype = jnp.dtype(jnp.float32)
  ndim = 2


class QuantizedWeight(NamedTuple):
  """A weight and its 8-bit forms for a recipe: quantized once for all its uses in a step.

  Its gradient is that of `master`; the rest is a constant that follows from it.
  """

  master: Any  # jax.Array w [K, N], or NoMaster
  fwd: Quantized | None  # w.T [N, K] as the forward pass takes it; None: not, or as dgrad.T
  dgrad: Quantized | None  # w [K, N] as the input gradient takes it, or None


def quantize_weight(
  w: jax.Array, recipe: Recipe | str, *, backend: str | None = None
) -> QuantizedWeight | jax.Array:
  """w [K, N] as `recipe` multiplies with it, to be used wherever w is; w itself for "full".

  For a kernel that is used more than once a step: rematerialised, or over several microbatches.

  >>> w = quantize_weight(jnp.ones((32, 16)), "switchback")
  >>> w.dgrad.values.dtype, quantized_dot(jnp.ones((4, 32)), w, "switchback").shape
  (dtype('int8'), (4, 16))
  """
  recipe, ops, w = as_recipe(recipe), get_backend(backend), as_kernel("w", w)
  if not recipe.rounds_w:
    return w
  constant = jax.lax.stop_gradient(w)
  fwd, dgrad = (pair and pair[1] for pair in (recipe.fwd, recipe.dgrad))
  if fwd is not None and fwd == dgrad and not fwd.is_rowwise:
    values, transposed = ops.quantize_both(constant, fwd)
    return QuantizedWeight(w, transposed, values)
  transposed = None if fwd is None else ops.quantize_transposed(constant, fwd)
  return QuantizedWeight(w, transposed, None if dgrad is None else ops.quantize(constant, dgrad))


def serving_weight(w: Quantized) -> QuantizedWeight:
  """A frozen kernel: only its 8 bits for the forward pass [N, K] are there.

  The gradient of the input comes from the same 8 bits; the kernel itself has none.
  """
  return QuantizedWeight(NoMaster(w.values.shape[::-1]), w, None)


def as_kernel(name: str, w) -> Any:
  """w as JAX's array; a ValueError unless it is floating point [K, N]."""
  if isinstance(w, NoMaster):
    return w
  w = as_floating(name, w)
  if w.ndim != 2:
    raise ValueError(f"{name} must be a kernel [K, N], not {w.shape}.")
  return w


def forward(ops: Backend, recipe: Recipe, x, w, bias, dtype, residual=None, multiplier=1.0):
  """`multiplier * x @ w + bias + residual` [M, N] in `dtype`.

  x may be quantized, w a QuantizedWeight.
  """
  if (fp4 := recipe.fp4) is not None:

    def multiply(x, w, bias, residual):
      total = times(fp4_ops.product(x, w, fp4), multiplier)
      return with_added(total, dtype, bias, residual)

    operands = x, master_weight(w), bias, residual
    return _as_dot(by_rows(multiply, operands, (True, False, False, True)))
  if recipe.fwd is None:
    y = times(full_dot(x, master_weight(w).astype(x.dtype), ((1,), (0,)), dtype), multiplier)
    y = y if bias is None else y + bias.astype(dtype)[None, :]
    return y if residual is None else residual + y
  x_spec, w_spec = recipe.fwd
  x_q = x if isinstance(x, Quantized) else ops.quantize(x, x_spec)
  w_q = w.fwd if isinstance(w, QuantizedWeight) else ops.quantize_transposed(w, w_spec)
  return _as_dot(_scaled_matmul(ops, x_q, times(w_q, multiplier), dtype, None, bias, residual))


def _scaled_matmul(ops, lhs, rhs, dtype, out_sharding=None, bias=None, residual=None) -> jax.Array:
  """`ops.scaled_matmul` in one equation: int32 sums are nothing to save for the backward pass."""

  def multiply(lhs, rhs, bias, residual):
    return ops.scaled_matmul(
      lhs, rhs, dtype, out_sharding=out_sharding, bias=bias, residual=residual
    )

  lhs_rows = Quantized(True, lhs.spec.is_rowwise, lhs.spec)  # pyright: ignore[reportArgumentType]
  return by_rows(multiply, (lhs, rhs, bias, residual), (lhs_rows, False, False, True))


def _as_dot(y: jax.Array) -> jax.Array:
  """y as a product with the number 1, which XLA drops.

  Policies such as `jax.checkpoint_policies.dots_saveable` save what a `dot_general` returns.
  """
  return full_dot(y, np.ones((), y.dtype), ((), ()), y.dtype)


def most_rows(*recipes: Recipe) -> int | None:
  """`by_rows`'s `most` for layers of these recipes.

  Examples keep their own y and dx; so none of their scales may be shared by rows. The gradient of
  a weight that they share is one product over all of their rows, and so are its scales.
  """
  specs = [pair[0] for recipe in recipes for pair in (recipe.fwd, recipe.dgrad) if pair]
  if any(not spec.is_rowwise and spec.takes_absmax for spec in specs):
    return 0
  sums_int8 = any(recipe.wgrad and recipe.wgrad[0].dtype == INT8 for recipe in recipes)
  return MAX_INT8_CONTRACTION if sums_int8 else None


def times(x, multiplier: float) -> Any:
  """x times a constant, rounded once. Of a Quantized it is the scale: the epilogue multiplies."""
  if multiplier == 1:
    return x
  if isinstance(x, Quantized):
    return dataclasses.replace(x, scale=x.scale * multiplier)
  return (wide(x) * multiplier).astype(x.dtype)


def split_columns(ops: Backend, recipe: Recipe, w, bias, num_outputs: int) -> list[tuple]:
  """(w, bias) of so many equal parts of the output, for `forward`; quantized as the whole is."""
  if num_outputs == 1:
    return [(w, bias)]
  if recipe.fwd is not None and not isinstance(w, QuantizedWeight):
    w = QuantizedWeight(w, ops.quantize_transposed(w, recipe.fwd[1]), None)
  size = master_weight(w).shape[1] // num_outputs
  cuts = [slice(i * size, (i + 1) * size) for i in range(num_outputs)]
  if recipe.fwd is None:
    kernels = [master_weight(w)[:, cut] for cut in cuts]
  else:
    kernels = [_columns_of(w, cut) for cut in cuts]
  return [
    (kernel, None if bias is None else bias[cut]) for kernel, cut in zip(kernels, cuts, strict=True)
  ]


def _columns_of(w: QuantizedWeight, columns: slice) -> QuantizedWeight:
  """w with those columns of its 8-bit form for the forward pass."""
  q = w.fwd
  assert q is not None  # The forward pass is quantized.
  scale = q.scale[columns] if q.spec.is_rowwise else q.scale
  return w._replace(fwd=Quantized(q.values[columns], scale, q.spec))


def saved_weight(w):
  """The part of w that is saved for the backward pass; of a QuantizedWeight only the 8 bits."""
  if not isinstance(w, QuantizedWeight) or _is_frozen(w):
    return w
  like = w.master if w.dgrad is None else jnp.zeros((0,), w.master.dtype)
  return QuantizedWeight(like, None, w.dgrad)


def _is_frozen(w) -> bool:
  return isinstance(master_weight(w), NoMaster)


def output_grad_spec(recipe: Recipe, w) -> Spec | None:
  """How dy is rounded before `dgrad`; None: not, or there, once it has the scales of a frozen w."""
  if recipe.dgrad is None or (_is_frozen(w) and not _shares_scale(recipe, w)):
    return None
  return recipe.dgrad[0]


def _shares_scale(recipe: Recipe, w: QuantizedWeight) -> bool:
  """Whether the 8 bits of a frozen w for the forward pass, transposed, are those for `dgrad`."""
  assert recipe.dgrad is not None and w.fwd is not None
  spec = w.fwd.spec
  return not spec.is_rowwise and (recipe.dgrad[1].dtype == INT8) == (spec.dtype == INT8)


def quantize_output_grad(ops: Backend, recipe: Recipe, dys, bias, w):
  """dy [M, N], of parts `dys`; dy as `dgrad` takes it; and the gradient of bias [N] or None."""
  spec = output_grad_spec(recipe, w)
  if bias is not None and spec is not None:
    dy, dy_q, summed = ops.quantize_sum(dys, spec)
    return dy, dy_q, cotangent_like(bias, summed)
  dy = jnp.concatenate(dys, axis=1)
  d_bias = None
  if bias is not None:
    d_bias = cotangent_like(bias, jnp.sum(dy.astype(jnp.float32), axis=0))
  return dy, dy, d_bias


def cotangent_like(array, gradient):
  """The gradient of an array in its dtype and, in explicit mode, split as it is."""
  return split_as(jax.typeof(array).sharding, gradient.astype(array.dtype))


def split_as(sharding, gradient):
  """The gradient with that sharding, which counts in explicit mode."""
  return reshard(gradient, sharding) if is_explicit() and not sharding.mesh.empty else gradient


def dgrad(ops: Backend, recipe: Recipe, dy, w, dtype, out_sharding, multiplier=1.0):
  """`multiplier * dy @ w.T` [M, K] in `dtype`.

  dy may be quantized already, w is its `saved_weight`.
  """
  if _is_frozen(w):
    return _frozen_dgrad(ops, recipe, dy, w, dtype, out_sharding, multiplier)
  if recipe.dgrad is None:
    w = master_weight(w)
    w = fp4_ops.rounded_weight(w, dy.dtype) if recipe.fp4 else w.astype(dy.dtype)
    return times(full_dot(dy, w, ((1,), (1,)), dtype, out_sharding), multiplier)
  dy_spec, w_spec = recipe.dgrad
  dy_q = dy if isinstance(dy, Quantized) else ops.quantize(dy, dy_spec)
  w_q = w.dgrad if isinstance(w, QuantizedWeight) else ops.quantize(w, w_spec)
  return _scaled_matmul(ops, dy_q, times(w_q, multiplier), dtype, out_sharding)


def _frozen_dgrad(ops: Backend, recipe: Recipe, dy, w, dtype, out_sharding, multiplier):
  """`dgrad` by the 8 bits [N, K] of the forward pass, which are not rounded again."""
  w_q = w.fwd
  if recipe.dgrad is None or (recipe.dgrad[0].dtype == INT8) != (w_q.spec.dtype == INT8):
    kernel = dequantize(w_q, dy.dtype)
    return times(full_dot(dy, kernel, ((1,), (0,)), dtype, out_sharding), multiplier)
  if _shares_scale(recipe, w):
    dy_q = dy if isinstance(dy, Quantized) else ops.quantize(dy, recipe.dgrad[0])
    return _scaled_matmul(ops, dy_q, times(w_q.T, multiplier), dtype, out_sharding)
  # The scale of an output is summed over here, so dy takes it before it is rounded.
  dy_q = ops.quantize(wide(dy) * w_q.scale.T, recipe.dgrad[0])
  ones = Quantized(w_q.values.T, jnp.ones((1, 1)), Spec(w_q.spec.dtype, "tensorwise"))
  return _scaled_matmul(ops, dy_q, times(ones, multiplier), dtype, out_sharding)


def wgrad(ops: Backend, recipe: Recipe, x, dy, w, multiplier=1.0):
  """`multiplier * x.T @ dy` [K, N] in the dtype of w, its `saved_weight`; None if w is frozen."""
  if _is_frozen(w):
    return None
  values = (
    w.dgrad.values if isinstance(w, QuantizedWeight) and w.dgrad is not None else master_weight(w)
  )
  dtype, sharding = master_weight(w).dtype, jax.typeof(values).sharding
  if recipe.fp4 is not None:
    dw = split_k_matmul(fp4_ops.rounded_rows(x, recipe.fp4), dy, jnp.float32, sharding)
    return (dw * multiplier * fp4_ops.slope(values, recipe.fp4)).astype(dtype)
  if recipe.wgrad is None:
    return times(split_k_matmul(x, dy, dtype, sharding), multiplier)
  x_spec, dy_spec = recipe.wgrad
  x_q, dy_q = ops.quantize_transposed(x, x_spec), ops.quantize_transposed(dy, dy_spec)
  return ops.scaled_matmul(x_q, times(dy_q, multiplier), dtype, out_sharding=sharding)


def gradients(arrays, *recipes: Recipe):
  """The results of a backward pass; an error where these are differentiated again."""
  rounds = any(recipe.rounds for recipe in recipes)
  return _differentiated_once(arrays) if rounds else arrays


@jax.custom_jvp
def _differentiated_once(arrays):
  return arrays


@_differentiated_once.defjvp
def _differentiated_twice(primals, tangents):
  raise NotImplementedError(
    "Gradients of gradients are not defined for a recipe that rounds: rounding has no second"
    " derivative. Use recipe 'full' for layers that are differentiated twice."
  )


def master_weight(w) -> Any:
  return w.master if isinstance(w, QuantizedWeight) else w


def cotangent(w, dw):
  """The gradient of w in the form of w; of a QuantizedWeight's 8 bits there is none."""
  return QuantizedWeight(dw, None, None) if isinstance(w, QuantizedWeight) else dw
