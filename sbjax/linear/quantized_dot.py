"""`y = x @ w` whose three matmuls are rounded as a recipe says.

Gradients pass straight through the rounding: the backward pass is the two matmuls of a linear
layer, each with its own quantization (Wortsman et al. 2023, https://arxiv.org/abs/2304.13013,
Algorithm 1 and its variants). First the three matmuls, which `fused` puts together otherwise;
operands are rows [M, K], kernels [K, N]. Then the custom_vjp of all three.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import reshard

from sbjax.linear.weight import (
  LoRAWeight,
  NoMaster,
  QuantizedWeight,
  as_kernel,
  base_weight,
  cotangent,
  is_frozen,
  master_weight,
  quantize_weight,
  saved_weight,
  without_gradient,
)
from sbjax.ops.by_rows import by_rows
from sbjax.ops.matmul import at_least_float32, check_residual, full_dot, with_added
from sbjax.ops.partition import as_rows, from_rows, is_explicit, vary_alike
from sbjax.ops.registry import Backend, get_backend
from sbjax.ops.split_k import split_k_matmul
from sbjax.quantize import Quantized, Spec, as_floating, dequantize, share_accumulator
from sbjax.recipes import Recipe, as_recipe

# What `jax.checkpoint` policies can keep: products, and the 8-bit operands the backward reuses.
DOT_NAME = "sbjax_dot"
RESIDUAL_NAME = "sbjax_residual"


def forward(
  ops: Backend, recipe: Recipe, x, w, bias, dtype, residual=None, multiplier=1.0, unrounded=None
):
  """`multiplier * x @ w + bias + residual` [M, N] in `dtype`.

  x may be quantized, w a QuantizedWeight or a LoRAWeight. An adapter takes x `unrounded`; None: x.
  """
  if isinstance(w, LoRAWeight):
    x_full = x if unrounded is None else unrounded
    x_full = dequantize(x_full, dtype) if isinstance(x_full, Quantized) else x_full
    added = full_dot(_low_rank(x_full, w.a), w.b.astype(x_full.dtype), ((1,), (0,)), dtype)
    added = times(added, multiplier)
    residual = added if residual is None else residual + added
    return forward(ops, recipe, x, w.base, bias, dtype, residual, multiplier)
  if (simulated := recipe.simulated) is not None:

    def multiply(x, w, bias, residual):
      total = times(simulated.fwd(x, w), multiplier)
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


def _low_rank(x, a) -> jax.Array:
  """`x @ a` [M, r] in x's dtype."""
  return full_dot(x, a.astype(x.dtype), ((1,), (0,)), x.dtype)


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
  limits = [recipe.wgrad[0].format.most_terms for recipe in recipes if recipe.wgrad]
  return min((limit for limit in limits if limit is not None), default=None)


def times(x, multiplier: float) -> Any:
  """x times a constant, rounded once. Of a Quantized it is the scale: the epilogue multiplies."""
  if multiplier == 1:
    return x
  if isinstance(x, Quantized):
    return dataclasses.replace(x, scale=x.scale * multiplier)
  return (at_least_float32(x) * multiplier).astype(x.dtype)


def dgrad_weight(ops: Backend, recipe: Recipe, w, dtype) -> Any:
  """w [K, N], a `saved_weight`, as `dgrad` takes it: in 8 bits, or in dy's dtype; no adapter."""
  w = base_weight(w)
  if is_frozen(w):  # It has the 8 bits of the forward pass, which are not rounded again.
    if recipe.dgrad is not None and share_accumulator(recipe.dgrad[0], w.fwd.spec):
      return w.fwd.T
    return dequantize(w.fwd, dtype).T
  if recipe.dgrad is not None:
    return w.dgrad if isinstance(w, QuantizedWeight) else ops.quantize(w, recipe.dgrad[1])
  w, simulated = master_weight(w), recipe.simulated
  return simulated.rounded_weight(w, dtype) if simulated else w.astype(dtype)


def output_grad_rounding(recipe: Recipe, w) -> tuple[Spec | None, jax.Array | None]:
  """The Spec of dy for `dgrad` with w, its `dgrad_weight`, and the fold [N]; or None for each.

  dgrad sums over outputs, so w's scale of an output multiplies dy before dy is rounded.
  """
  if not isinstance(w, Quantized):
    return None, None
  assert recipe.dgrad is not None
  return recipe.dgrad[0], w.scale[0] if w.spec.is_columnwise else None


def quantize_output_grad(ops: Backend, recipe: Recipe, dys, bias, w):
  """dy [M, N], of parts `dys`; dy as `dgrad` takes it; and the gradient of bias [N] or None.

  w is its `dgrad_weight`.
  """
  spec, fold = output_grad_rounding(recipe, w)
  if bias is not None and spec is not None:
    dy, dy_q, summed = ops.quantize_sum(dys, spec, fold=fold)
    return dy, dy_q, cotangent_like(bias, summed)
  dy = jnp.concatenate(dys, axis=1)
  return dy, dy, bias_gradient(bias, dy)


def bias_gradient(bias, dy):
  """The gradient of bias [N] or None, of that of the output [M, N]."""
  return None if bias is None else cotangent_like(bias, jnp.sum(dy.astype(jnp.float32), axis=0))


def cotangent_like(array, gradient):
  """The gradient of an array in its dtype and, in explicit mode, split as it is."""
  return split_as(jax.typeof(array).sharding, gradient.astype(array.dtype))


def split_as(sharding, gradient):
  """The gradient with that sharding, which counts in explicit mode."""
  return reshard(gradient, sharding) if is_explicit() and not sharding.mesh.empty else gradient


def adapter_input_gradient(dy, w, dtype, multiplier=1.0) -> jax.Array | None:
  """`multiplier * dy @ (a @ b).T` [M, K] of w's adapter, for `input_gradient` to add; or None."""
  if not isinstance(w, LoRAWeight):
    return None
  du = _low_rank(dy, w.b.T)
  return times(full_dot(du, w.a.astype(dy.dtype), ((1,), (1,)), dtype), multiplier)


def input_gradient(
  ops: Backend, recipe: Recipe, dy, w, dtype, out_sharding, multiplier=1.0, added=None
):
  """`multiplier * dy @ w.T + added` [M, K] in `dtype`.

  dy may be quantized already, w is its `dgrad_weight`.
  """
  if not isinstance(w, Quantized):
    dx = times(full_dot(dy, w, ((1,), (1,)), dtype, out_sharding), multiplier)
    return dx if added is None else dx + added
  if not isinstance(dy, Quantized):
    spec, fold = output_grad_rounding(recipe, w)
    dy = ops.quantize(dy, spec, fold=fold)
  if w.spec.is_columnwise:  # dy has its scales.
    w = Quantized(w.values, jnp.ones((1, 1), jnp.float32), Spec(w.spec.dtype, "static"))
  return _scaled_matmul(ops, dy, times(w, multiplier), dtype, out_sharding, residual=added)


def weight_gradient(ops: Backend, recipe: Recipe, x, dy, w, multiplier=1.0):
  """`multiplier * x.T @ dy` [K, N] in the dtype of w, its `saved_weight`; None if w is frozen.

  Of a LoRAWeight those of a and b.
  """
  if isinstance(w, LoRAWeight):
    operands = (w.a, x, _low_rank(dy, w.b.T)), (w.b, _low_rank(x, w.a), dy)
    da, db = (
      times(split_k_matmul(lhs, rhs, own.dtype, jax.typeof(own).sharding), multiplier)
      for own, lhs, rhs in operands
    )
    return LoRAWeight(None, da, db)
  if is_frozen(w):
    return None
  values = (
    w.dgrad.values if isinstance(w, QuantizedWeight) and w.dgrad is not None else master_weight(w)
  )
  dtype, sharding = master_weight(w).dtype, jax.typeof(values).sharding
  if recipe.simulated is not None:
    return (recipe.simulated.wgrad(x, dy, values, sharding) * multiplier).astype(dtype)
  if recipe.wgrad is None:
    return times(split_k_matmul(x, dy, dtype, sharding), multiplier)
  x_spec, dy_spec = recipe.wgrad
  x_q, dy_q = ops.quantize_transposed(x, x_spec), ops.quantize_transposed(dy, dy_spec)
  return ops.scaled_matmul(x_q, times(dy_q, multiplier), dtype, out_sharding=sharding)


def forbid_second_derivatives(arrays, *recipes: Recipe):
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


def quantized_dot(
  x: jax.Array,
  w: jax.Array | QuantizedWeight,
  recipe: Recipe | str,
  *,
  bias: jax.Array | None = None,
  residual: jax.Array | None = None,
  multiplier: float = 1.0,
  backend: str | None = None,
) -> jax.Array:
  """`multiplier * x @ w + bias + residual` [..., N] in x's dtype; x [..., K], w [K, N], bias [N].

  Differentiable once, in x, w, bias and residual; dx has x's dtype. w may be wider than x (a
  float32 master copy beside bfloat16 activations): it is quantized as it is, and dw is the float32
  accumulator of x.T @ dy in w's dtype, never rounded to x's. Bias and residual are added to a
  quantized product in float32, and the sum is rounded once; the bias's gradient is summed in
  float32. Within `jax.shard_map` operands are a device's own, and so is a scale that tokens share:
  one scale for all of x, and the scales of a weight gradient in 8 bits.

  Args:
    w: an array, or what `quantize_weight` made of one for the same recipe. A kernel that is frozen
      in 8 bits has no gradient, and nothing of x is saved for it; with an adapter of low rank
      (`sbjax.linear.lora`) the adapter has one.
    recipe: a `Recipe` or the name of one in RECIPES.
    residual: [..., N] in x's dtype, the input of a residual connection; added.
    multiplier: a constant that multiplies all three products, in their epilogue where they are in 8
      bits: neither w nor dy is rounded after it. For weights of unit variance it is K**-0.5.
    backend: "xla", ...; None chooses.

  Raises:
    ValueError: operands that are Quantized, no arrays, or not floating point of 16 bits or more;
      sizes that do not match; an unknown recipe or backend; a multiplier that is no finite number.
    NotImplementedError: the named backend cannot compute this.

  >>> x, w = jnp.ones((4, 32), jnp.bfloat16), jnp.ones((32, 16))
  >>> dw = jax.grad(lambda w: quantized_dot(x, w, "switchback").sum().astype(jnp.float32))(w)
  >>> dw.shape, dw.dtype
  ((32, 16), dtype('float32'))
  """
  recipe = as_recipe(recipe)
  x = as_tokens(x)
  w = prepared("w", w, x.shape, recipe, backend)
  bias = as_bias("bias", bias, w)
  residual = None if residual is None else as_floating("residual", residual)
  check_residual(residual, (*x.shape[:-1], master_weight(w).shape[1]), x.dtype)
  residual = None if residual is None else as_rows(residual)
  multiplier = as_multiplier(multiplier)

  def dot(x, w, bias, residual):
    shardings = [None if a is None else jax.typeof(a).sharding for a in (x, residual)]
    return _dot((recipe, backend, x.dtype, multiplier, *shardings), x, w, bias, residual)

  operands = vary_alike(as_rows(x), w, bias, residual)
  y = by_rows(dot, operands, (True, False, False, True), most_rows(recipe))
  return named_dot(y, x)


def as_multiplier(multiplier) -> float:
  """The multiplier as a float; a ValueError unless it is a finite number other than 0."""
  is_number = isinstance(multiplier, int | float | np.number) and not isinstance(multiplier, bool)
  if not is_number or not math.isfinite(multiplier) or multiplier == 0:
    raise ValueError(
      f"multiplier={multiplier!r} must be a finite number other than 0, such as K ** -0.5."
    )
  return float(multiplier)


def as_tokens(x) -> jax.Array:
  """x as JAX's array; a ValueError unless it is floating point [..., K]."""
  x = as_floating("x", x)
  if x.ndim == 0:
    raise ValueError("x must be [..., K], not a scalar.")
  return x


def named_dot(y: jax.Array, x: jax.Array) -> jax.Array:
  """Restores x's leading axes and names y for checkpoint policies."""
  return checkpoint_name(from_rows(y, x), DOT_NAME)


def prepared(name: str, w, x_shape, recipe: Recipe, backend: str | None) -> Any:
  """w, checked against x; in 8 bits if the backward is to find those that the forward took."""
  get_backend(backend)
  if isinstance(w, LoRAWeight):
    base = prepared(name, w.base, x_shape, recipe, backend)
    return LoRAWeight(base, *_checked_adapter(name, w))
  array = as_kernel(name, master_weight(w))
  if x_shape[-1] != array.shape[0]:
    raise ValueError(f"x [..., K] and {name} [K, N] must agree in K: {x_shape} and {array.shape}.")
  if isinstance(w, QuantizedWeight):
    if recipe.shares_w and w.fwd is None and w.dgrad is not None:
      w = w._replace(fwd=w.dgrad.T)
    _check_made_for(name, w, recipe)
    if is_frozen(w):
      assert w.fwd is not None
      scale = without_gradient(name, w.fwd.scale)
      w = w._replace(fwd=dataclasses.replace(w.fwd, scale=scale))
  else:
    w = array
  if recipe.saved == "quantized" and not isinstance(w, QuantizedWeight):
    return quantize_weight(w, recipe, backend=backend)
  return w


def _checked_adapter(name: str, w: LoRAWeight) -> tuple[jax.Array, jax.Array]:
  """a and b as JAX's arrays; a ValueError unless `a @ b` fits the base."""
  a, b = as_floating(f"{name}.a", w.a), as_floating(f"{name}.b", w.b)
  (k, n), rank = master_weight(w).shape, a.shape[-1]
  if a.shape != (k, rank) or b.shape != (rank, n):
    raise ValueError(f"{name} {(k, n)} needs a [{k}, r] and b [r, {n}], not {a.shape}, {b.shape}.")
  return a, b


def _check_made_for(name: str, kernel: QuantizedWeight, recipe: Recipe) -> None:
  for matmul in ("fwd",) if isinstance(kernel.master, NoMaster) else ("fwd", "dgrad"):
    pair, found = getattr(recipe, matmul), getattr(kernel, matmul)
    if (pair and pair[1]) != (found and found.spec):
      raise ValueError(
        f"{name} was quantized for another recipe: its {matmul} is not what {recipe} takes."
        " Use quantize_weight with the same recipe."
      )


def as_bias(name: str, bias, w) -> jax.Array | None:
  """bias as JAX's array, or None; a ValueError unless it fits the columns of w."""
  if bias is None:
    return None
  bias = as_floating(name, bias)
  if bias.shape != master_weight(w).shape[1:]:
    raise ValueError(f"{name} must be {master_weight(w).shape[1:]}, not {bias.shape}.")
  return bias


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(how, *operands):
  return _dot_fwd(how, *operands)[0]


def _dot_fwd(how, x, w, bias, residual):
  recipe, backend, dtype, multiplier, *_ = how
  ops = get_backend(backend)
  x_q = x if recipe.fwd is None else ops.quantize(x, recipe.fwd[0])
  y = forward(ops, recipe, x_q, w, bias, dtype, residual, multiplier, unrounded=x)
  w = saved_weight(w)
  if is_frozen(w) and not isinstance(w, LoRAWeight):  # Only a weight gradient takes x.
    x = None
  elif recipe.saved == "quantized":
    x, w = checkpoint_name((x_q, w), RESIDUAL_NAME)
  return y, (x, w, bias)


def _dot_bwd(how, saved, dy):
  recipe, backend, dtype, multiplier, x_sharding, residual_sharding = how
  ops = get_backend(backend)
  x, w, bias = saved
  x = dequantize(x, dtype) if isinstance(x, Quantized) else x
  d_residual = None if residual_sharding is None else split_as(residual_sharding, dy)
  w_q = dgrad_weight(ops, recipe, w, dy.dtype)
  dy, dy_q, d_bias = quantize_output_grad(ops, recipe, (dy,), bias, w_q)
  added = adapter_input_gradient(dy, w, dtype, multiplier)
  dx = input_gradient(ops, recipe, dy_q, w_q, dtype, x_sharding, multiplier, added)
  dw = weight_gradient(ops, recipe, x, dy, w, multiplier)
  return forbid_second_derivatives((dx, cotangent(w, dw), d_bias, d_residual), recipe)


_dot.defvjp(_dot_fwd, _dot_bwd)
