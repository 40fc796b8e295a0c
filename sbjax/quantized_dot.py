"""`y = x @ w` whose three matmuls are rounded as a recipe says.

Gradients pass straight through the rounding: the backward pass is the two matmuls of a linear
layer, each with its own quantization (Wortsman et al. 2023, https://arxiv.org/abs/2304.13013,
Algorithm 1 and its variants).
"""

import functools
import math

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from sbjax import linear
from sbjax.backends import get_backend
from sbjax.by_rows import by_rows
from sbjax.linear import QuantizedWeight
from sbjax.matmul import check_residual
from sbjax.partition import merge_splits, reshape, splits_of, unmerge_splits, vary_alike
from sbjax.quantize import Quantized, as_floating, dequantize
from sbjax.recipes import Recipe, as_recipe

# What `jax.checkpoint` policies can keep: products, and the 8-bit operands the backward reuses.
DOT_NAME = "sbjax_dot"
RESIDUAL_NAME = "sbjax_residual"


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
    w: an array, or what `quantize_weight` made of one for the same recipe.
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
  check_residual(residual, (*x.shape[:-1], linear.master_weight(w).shape[1]), x.dtype)
  residual = None if residual is None else as_rows(residual)
  multiplier = as_multiplier(multiplier)

  def dot(x, w, bias, residual):
    residual_sharding = None if residual is None else jax.typeof(residual).sharding
    return _dot(recipe, backend, x.dtype, residual_sharding, multiplier, x, w, bias, residual)

  operands = vary_alike(as_rows(x), w, bias, residual)
  y = by_rows(dot, operands, (True, False, False, True), linear.most_rows(recipe))
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


def as_rows(x: jax.Array) -> jax.Array:
  """x [..., K] as [rows, K]."""
  *lead, last = splits_of(x)
  return reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]), [merge_splits(lead), last])


def from_rows(y: jax.Array, x: jax.Array) -> jax.Array:
  """y [rows, N] as [..., N] with the leading axes of x."""
  rows, columns = splits_of(y)
  splits = [*unmerge_splits(rows, splits_of(x)[:-1]), columns]
  return reshape(y, (*x.shape[:-1], y.shape[1]), splits)


def named_dot(y: jax.Array, x: jax.Array) -> jax.Array:
  """Restores x's leading axes and names y for checkpoint policies."""
  return checkpoint_name(from_rows(y, x), DOT_NAME)


def prepared(name: str, w, x_shape, recipe: Recipe, backend: str | None):
  """w, checked against x; in 8 bits if the backward is to find those that the forward took."""
  get_backend(backend)
  array = linear.as_kernel(name, linear.master_weight(w))
  if x_shape[-1] != array.shape[0]:
    raise ValueError(f"x [..., K] and {name} [K, N] must agree in K: {x_shape} and {array.shape}.")
  if isinstance(w, QuantizedWeight):
    w = _with_transpose(w, recipe)
    _check_made_for(name, w, recipe)
  else:
    w = array
  if recipe.saved == "quantized" and not isinstance(w, QuantizedWeight):
    return linear.quantize_weight(w, recipe, backend=backend)
  return w


def _with_transpose(kernel: QuantizedWeight, recipe: Recipe) -> QuantizedWeight:
  """The kernel with what `fwd` multiplies by, where that is the transpose of what dgrad does."""
  shares = recipe.fwd and recipe.dgrad and recipe.fwd[1] == recipe.dgrad[1]
  if not shares or kernel.fwd is not None or kernel.dgrad is None or kernel.dgrad.spec.is_rowwise:
    return kernel
  return kernel._replace(fwd=kernel.dgrad.T)


def _check_made_for(name: str, kernel: QuantizedWeight, recipe: Recipe) -> None:
  for matmul in ("fwd",) if isinstance(kernel.master, linear.NoMaster) else ("fwd", "dgrad"):
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
  if bias.shape != linear.master_weight(w).shape[1:]:
    raise ValueError(f"{name} must be {linear.master_weight(w).shape[1:]}, not {bias.shape}.")
  return bias


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3, 4))
def _dot(recipe, backend, dtype, residual_sharding, multiplier, x, w, bias, residual):
  how = recipe, backend, dtype, residual_sharding, multiplier
  return _dot_fwd(*how, x, w, bias, residual)[0]


def _dot_fwd(recipe, backend, dtype, residual_sharding, multiplier, x, w, bias, residual):
  ops = get_backend(backend)
  x_q = x if recipe.fwd is None else ops.quantize(x, recipe.fwd[0])
  y = linear.forward(ops, recipe, x_q, w, bias, dtype, residual, multiplier)
  w = linear.saved_weight(w)
  if recipe.saved == "quantized":
    x, w = checkpoint_name((x_q, w), RESIDUAL_NAME)
  return y, (x, w, bias)


def _dot_bwd(recipe, backend, dtype, residual_sharding, multiplier, saved, dy):
  ops = get_backend(backend)
  x, w, bias = saved
  x_sharding = jax.typeof(x.values if isinstance(x, Quantized) else x).sharding
  x = dequantize(x, dtype) if isinstance(x, Quantized) else x
  d_residual = None if residual_sharding is None else linear.split_as(residual_sharding, dy)
  dy, dy_q, d_bias = linear.quantize_output_grad(ops, recipe, (dy,), bias, w)
  dx = linear.dgrad(ops, recipe, dy_q, w, dtype, x_sharding, multiplier)
  dw = linear.wgrad(ops, recipe, x, dy, w, multiplier)
  return linear.gradients((dx, linear.cotangent(w, dw), d_bias, d_residual), recipe)


_dot.defvjp(_dot_fwd, _dot_bwd)
