"""Layer norm and GELU with the matmuls beside them: int8 values are born where their floats are.

Between two 8-bit matmuls are a layer norm or a GELU, a quantizer, and in the backward pass the
gradient of a bias. Here they are one operation (`sbjax.ops.rows`), which reads its rows once, and a
layer norm with its linear layer, or a whole MLP, is one custom_vjp. The weight gradient takes the
output of layer norm or GELU, which the backward pass computes again.
"""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name

from sbjax.linear import quantized_dot as dot
from sbjax.linear.grouped import check_keep, kept, restored
from sbjax.linear.weight import (
  QuantizedWeight,
  cotangent,
  master_weight,
  saved_weight,
  split_columns,
)
from sbjax.ops.by_rows import by_rows
from sbjax.ops.partition import as_rows, from_rows, vary_alike
from sbjax.ops.registry import get_backend
from sbjax.ops.rows import ACTIVATIONS, NORM_EPSILON, LayerNormParams
from sbjax.quantize import Quantized, as_floating
from sbjax.recipes import Recipe, as_recipe


def layer_norm_dense(
  x: jax.Array,
  norm: LayerNormParams,
  w: jax.Array | QuantizedWeight,
  recipe: Recipe | str,
  *,
  bias: jax.Array | None = None,
  backend: str | None = None,
  num_outputs: int | None = None,
  epsilon: float = NORM_EPSILON,
  keep: str = "original",
) -> tuple[jax.Array, jax.Array | tuple[jax.Array, ...]]:
  """(x, layer_norm(x) @ w + bias) for x [..., K], w [K, N] and bias [N].

  The product is [..., N], or a tuple of `num_outputs` arrays [..., N / num_outputs]: queries, keys
  and values come from one kernel, and would be copied out of one array.

  x comes back as it was, for a residual connection: the two gradients that then meet in x are added
  where layer norm's is made. Layer norm is computed in float32 (`epsilon` is added to the variance)
  and quantized from there. Otherwise as `quantized_dot`, but for saved="quantized": the weight
  gradient sees the layer norm before it was rounded.

  keep: "original" saves x as it is for the backward pass; "grouped" saves it in e4m3 with a scale
    for each 16 numbers, 1.125 bytes a number (COAT, see `sbjax.linear.grouped`).

  Raises:
    NotImplementedError: `backend` is "mosaic" or "triton", and K (of `layer_norm_mlp` also H) is
      more than 8,192, or the recipe has one scale for all of x.

  >>> norm = LayerNormParams(jnp.ones(32), jnp.zeros(32))
  >>> x, y = layer_norm_dense(jnp.ones((4, 32)), norm, jnp.ones((32, 16)), "switchback")
  >>> y.shape
  (4, 16)
  """
  recipe, x = as_recipe(recipe), dot.as_tokens(x)
  norm = _as_norm(x, norm)
  w = dot.prepared("w", w, x.shape, recipe, backend)
  bias = dot.as_bias("bias", bias, w)
  columns = master_weight(w).shape[1]
  if num_outputs is not None and (
    not isinstance(num_outputs, int) or num_outputs < 1 or columns % num_outputs
  ):
    raise ValueError(f"{num_outputs=} must divide the {columns} columns of w.")
  operands = vary_alike(as_rows(x), norm, w, bias)
  how = recipe, backend, num_outputs or 1, _as_epsilon(epsilon), check_keep(keep)
  layer = functools.partial(_layer_norm_dense, how)
  x_rows, ys = by_rows(layer, operands, (True, False, False, False), dot.most_rows(recipe))
  ys = tuple(dot.named_dot(y, x) for y in ys)
  return from_rows(x_rows, x), ys if num_outputs else ys[0]


def layer_norm_mlp(
  x: jax.Array,
  norm: LayerNormParams,
  w1: jax.Array | QuantizedWeight,
  b1: jax.Array | None,
  w2: jax.Array | QuantizedWeight,
  b2: jax.Array | None,
  recipe: Recipe | str | tuple[Recipe | str, Recipe | str],
  *,
  backend: str | None = None,
  add_residual: bool = False,
  activation: str = "gelu",
  epsilon: float = NORM_EPSILON,
  keep: str = "original",
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """(x, gelu(layer_norm(x) @ w1 + b1) @ w2 + b2) for x [..., K], w1 [K, H] and w2 [H, N].

  With `add_residual` their sum instead, which is a residual block [..., K]: x is added in the
  second product's epilogue.

  recipe: one for both linear layers, or a pair: that of w1, that of w2.
  activation: as in `sbjax.ops.rows.gelu_quantize`: "gelu" (exact), "gelu_tanh" or "quick_gelu".

  The forward pass saves x and the input of GELU [..., H], which is in x's dtype, or in 8 bits if
  the recipe of w2 has saved="quantized". keep="grouped" saves x in 8 bits, and the input of GELU
  where the recipe does not. For the rest see `layer_norm_dense`.

  >>> norm = LayerNormParams(jnp.ones(32), jnp.zeros(32))
  >>> w1, w2 = jnp.ones((32, 128)), jnp.ones((128, 32))
  >>> x, recipe = jnp.ones((4, 32)), "switchback"
  >>> layer_norm_mlp(x, norm, w1, None, w2, None, recipe, add_residual=True).shape
  (4, 32)
  """
  pair = recipe if isinstance(recipe, tuple) and len(recipe) == 2 else (recipe, recipe)
  recipes = first, second = tuple(as_recipe(one) for one in pair)
  x = dot.as_tokens(x)
  norm = _as_norm(x, norm)
  w1 = dot.prepared("w1", w1, x.shape, first, backend)
  w2 = dot.prepared("w2", w2, (*x.shape[:-1], master_weight(w1).shape[1]), second, backend)
  b1, b2 = dot.as_bias("b1", b1, w1), dot.as_bias("b2", b2, w2)
  if add_residual and master_weight(w2).shape[1] != x.shape[-1]:
    raise ValueError(f"add_residual needs w2 [H, {x.shape[-1]}], not {master_weight(w2).shape}.")
  if activation not in ACTIVATIONS:
    raise ValueError(f"{activation=} must be one of {', '.join(ACTIVATIONS)}.")
  operands = vary_alike(as_rows(x), norm, w1, b1, w2, b2)
  how = recipes, backend, add_residual, activation, _as_epsilon(epsilon), check_keep(keep)
  layer = functools.partial(_layer_norm_mlp, how)
  x_rows, y = by_rows(layer, operands, (True, *(False,) * 5), dot.most_rows(*recipes))
  return dot.named_dot(y, x) if add_residual else (from_rows(x_rows, x), dot.named_dot(y, x))


def _as_norm(x, norm) -> LayerNormParams:
  """norm with JAX's arrays; a ValueError unless they fit x."""
  if not isinstance(norm, LayerNormParams):
    raise ValueError(f"norm must be LayerNormParams(scale, bias), not a {type(norm).__name__}.")
  arrays = {name: as_floating(f"norm.{name}", vector) for name, vector in norm._asdict().items()}
  for name, vector in arrays.items():
    if vector.shape != x.shape[-1:]:
      raise ValueError(f"norm.{name} must be {x.shape[-1:]} for x {x.shape}, not {vector.shape}.")
  return LayerNormParams(**arrays)


def _as_epsilon(epsilon) -> float:
  if not isinstance(epsilon, float) or not epsilon > 0:
    raise ValueError(f"{epsilon=} must be a positive float, such as {NORM_EPSILON}.")
  return epsilon


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer_norm_dense(how, *operands):
  return _layer_norm_dense_fwd(how, *operands)[0]


def _layer_norm_dense_fwd(how, x, norm, w, bias):
  recipe, backend, num_outputs, epsilon, keep = how
  ops = get_backend(backend)
  n = ops.norm_quantize(x, norm, recipe.fwd and recipe.fwd[0], epsilon=epsilon)
  columns = split_columns(ops, recipe, w, bias, num_outputs)
  ys = tuple(dot.forward(ops, recipe, n, w, bias, x.dtype) for w, bias in columns)
  return (x, ys), (kept(x, keep), norm, saved_weight(w), bias)


def _layer_norm_dense_bwd(how, saved, gradients):
  recipe, backend, _, epsilon, _ = how
  ops = get_backend(backend)
  x, norm, w, bias = saved
  dx, dys = gradients
  x = restored(x, dx.dtype)
  w_q = dot.dgrad_weight(ops, recipe, w, dys[0].dtype)
  dy, dy_q, d_bias = dot.quantize_output_grad(ops, recipe, dys, bias, w_q)
  added = dot.adapter_input_gradient(dy, w, dy.dtype)
  dn = dot.input_gradient(ops, recipe, dy_q, w_q, dy.dtype, jax.typeof(x).sharding, added=added)
  dx, d_norm, n = ops.norm_backward(x, norm, dn, dx, epsilon=epsilon)
  dw = dot.weight_gradient(ops, recipe, n, dy, w)
  d_norm = jax.tree.map(dot.cotangent_like, norm, d_norm)
  return dot.forbid_second_derivatives((dx, d_norm, cotangent(w, dw), d_bias), recipe)


_layer_norm_dense.defvjp(_layer_norm_dense_fwd, _layer_norm_dense_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer_norm_mlp(how, *operands):
  return _layer_norm_mlp_fwd(how, *operands)[0]


def _layer_norm_mlp_fwd(how, x, norm, w1, b1, w2, b2):
  (first, second), backend, add_residual, activation, epsilon, keep = how
  ops = get_backend(backend)
  n = ops.norm_quantize(x, norm, first.fwd and first.fwd[0], epsilon=epsilon)
  h = checkpoint_name(dot.forward(ops, first, n, w1, b1, x.dtype), dot.DOT_NAME)
  spec = second.fwd and second.fwd[0]
  h_spec = spec if second.saved == "quantized" else None
  g, h = ops.gelu_quantize(h, spec, h_spec, activation=activation)
  y = dot.forward(ops, second, g, w2, b2, x.dtype, x if add_residual else None)
  h = checkpoint_name(h, dot.RESIDUAL_NAME) if isinstance(h, Quantized) else kept(h, keep)
  results = (None if add_residual else x), y
  return results, (kept(x, keep), norm, h, saved_weight(w1), b1, saved_weight(w2), b2)


def _layer_norm_mlp_bwd(how, saved, gradients):
  (first, second), backend, add_residual, activation, epsilon, _ = how
  ops = get_backend(backend)
  x, norm, h, w1, b1, w2, b2 = saved
  dx, dy = gradients
  x, h = restored(x, dy.dtype), restored(h, dy.dtype)
  dx = dot.cotangent_like(x, dy) if add_residual else dx
  h_sharding = jax.typeof(jax.tree.leaves(h)[0]).sharding
  w1_q, w2_q = (dot.dgrad_weight(ops, r, w, dy.dtype) for r, w in ((first, w1), (second, w2)))
  dy, dy_q, db2 = dot.quantize_output_grad(ops, second, (dy,), b2, w2_q)
  added = dot.adapter_input_gradient(dy, w2, dy.dtype)
  dg = dot.input_gradient(ops, second, dy_q, w2_q, dy.dtype, h_sharding, added=added)
  spec, fold = dot.output_grad_rounding(first, w1_q)
  dh, dh_q, db1, g = ops.gelu_backward(h, dg, spec, activation=activation, fold=fold)
  dw2 = dot.weight_gradient(ops, second, g, dy, w2)
  dh_q = dh if dh_q is None else dh_q
  added = dot.adapter_input_gradient(dh, w1, dy.dtype)
  dn = dot.input_gradient(ops, first, dh_q, w1_q, dy.dtype, jax.typeof(x).sharding, added=added)
  dx, d_norm, n = ops.norm_backward(x, norm, dn, dx, epsilon=epsilon)
  dw1 = dot.weight_gradient(ops, first, n, dh, w1)
  dw1, dw2 = cotangent(w1, dw1), cotangent(w2, dw2)
  d_norm, db1 = jax.tree.map(dot.cotangent_like, (norm, b1), (d_norm, None if b1 is None else db1))
  return dot.forbid_second_derivatives((dx, d_norm, dw1, db1, dw2, db2), first, second)


_layer_norm_mlp.defvjp(_layer_norm_mlp_fwd, _layer_norm_mlp_bwd)
