"""Norms and GELU with the matmuls beside them: int8 values are born where their floats are.

Between two 8-bit matmuls are a norm or an activation, a quantizer, and in the backward pass the
gradient of a bias. Here they are one operation (`sbjax.ops.rows`), which reads its rows once, and a
norm with its linear layer, or a whole MLP, is one custom_vjp. The weight gradient takes the output
of the norm or the activation, which the backward pass computes again.

The norm is a layer norm or an RMS norm, by the type of its parameters. An MLP has one linear layer
before its activation, or two: gate and up. These stay two matmuls. So each kernel has its own
scales, 8 bits and adapter, and results are those of two layers; the product of the second adds
the input gradient of the first in its epilogue.
"""

import functools
from typing import Any

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
from sbjax.ops.rows import ACTIVATIONS, NORM_EPSILON, Norm
from sbjax.quantize import Quantized, as_floating
from sbjax.recipes import Recipe, as_recipe


def layer_norm_dense(
  x: jax.Array,
  norm: Norm,
  w: jax.Array | QuantizedWeight,
  recipe: Recipe | str,
  *,
  bias: jax.Array | None = None,
  backend: str | None = None,
  num_outputs: int | None = None,
  epsilon: float = NORM_EPSILON,
  keep: str = "original",
) -> tuple[jax.Array, jax.Array | tuple[jax.Array, ...]]:
  """(x, norm(x) @ w + bias) for x [..., K], w [K, N] and bias [N].

  The product is [..., N], or a tuple of `num_outputs` arrays [..., N / num_outputs]: queries, keys
  and values come from one kernel, and would be copied out of one array.

  x comes back as it was, for a residual connection: the two gradients that then meet in x are added
  where the norm's is made. The norm is computed in float32 and quantized from there. Otherwise as
  `quantized_dot`, but for saved="quantized": the weight gradient sees the norm before it was
  rounded.

  Args:
    norm: LayerNormParams, or RMSNormParams for an RMS norm.
    epsilon: added to the variance, or to an RMS norm's mean of squares.
    keep: "original" saves x as it is for the backward pass; "grouped" saves it in e4m3 with a scale
      for each 16 numbers, 1.125 bytes a number (COAT, see `sbjax.linear.grouped`).

  Raises:
    NotImplementedError: `backend` is "mosaic" or "triton", and K (of an MLP also H) is more than
      8,192, or the recipe has one scale for all of x.

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
  norm: Norm,
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
  """(x, gelu(norm(x) @ w1 + b1) @ w2 + b2) for x [..., K], w1 [K, H] and w2 [H, N].

  With `add_residual` their sum instead, which is a residual block [..., K]: x is added in the
  second product's epilogue.

  Args:
    recipe: one for both linear layers, or a pair: that of w1, that of w2.
    activation: "gelu" (exact), "gelu_tanh", "quick_gelu" or "silu": `sbjax.ops.rows.gelu_quantize`.

  The forward pass saves x and the input of GELU [..., H], which is in x's dtype, or in 8 bits if
  the recipe of w2 has saved="quantized". keep="grouped" saves x in 8 bits, and the input of GELU
  where the recipe does not. For the rest see `layer_norm_dense`.

  >>> norm = LayerNormParams(jnp.ones(32), jnp.zeros(32))
  >>> w1, w2 = jnp.ones((32, 128)), jnp.ones((128, 32))
  >>> x, recipe = jnp.ones((4, 32)), "switchback"
  >>> layer_norm_mlp(x, norm, w1, None, w2, None, recipe, add_residual=True).shape
  (4, 32)
  """
  linears = {"w1": (w1, b1)}, {"w2": (w2, b2)}
  return _mlp(x, norm, *linears, recipe, backend, add_residual, activation, epsilon, keep)


def gated_mlp(
  x: jax.Array,
  norm: Norm,
  w_gate: jax.Array | QuantizedWeight,
  w_up: jax.Array | QuantizedWeight,
  w_down: jax.Array | QuantizedWeight,
  recipe: Recipe | str | tuple[Recipe | str, Recipe | str],
  *,
  b_gate: jax.Array | None = None,
  b_up: jax.Array | None = None,
  b_down: jax.Array | None = None,
  backend: str | None = None,
  add_residual: bool = False,
  activation: str = "silu",
  epsilon: float = NORM_EPSILON,
  keep: str = "original",
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """(x, (silu(n @ w_gate + b_gate) * (n @ w_up + b_up)) @ w_down + b_down) for n = norm(x).

  x is [..., K], w_gate and w_up are [K, H], w_down is [H, N]. With RMSNormParams this is LLaMA's
  MLP. "silu" makes the unit SwiGLU, "gelu" GEGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202).

  Args:
    recipe: one for all linear layers, or a pair: that of w_gate and w_up, that of w_down.

  The forward pass saves x and both inputs of the gated unit [..., H]. For the rest see
  `layer_norm_mlp`.

  >>> w, w_down = jnp.ones((32, 128)), jnp.ones((128, 32))
  >>> norm, x = RMSNormParams(jnp.ones(32)), jnp.ones((4, 32))
  >>> gated_mlp(x, norm, w, w, w_down, "switchback", add_residual=True).shape
  (4, 32)
  """
  linears = {"w_gate": (w_gate, b_gate), "w_up": (w_up, b_up)}, {"w_down": (w_down, b_down)}
  return _mlp(x, norm, *linears, recipe, backend, add_residual, activation, epsilon, keep)


def _mlp(x, norm, first, last, recipe, backend, add_residual, activation, epsilon, keep) -> Any:
  """Either MLP; `first` and `last` are its linear layers before and after the activation."""
  recipes = as_pair(recipe)
  x = dot.as_tokens(x)
  norm = _as_norm(x, norm)
  w1s, b1s = _prepared(first, x.shape, recipes[0], backend)
  hidden, *others = (master_weight(w).shape[1] for w in w1s)
  if others and others != [hidden]:
    raise ValueError(
      f"{' and '.join(first)} [K, H] must agree in H, which is {hidden} and {others[0]}."
    )
  (w2,), (b2,) = _prepared(last, (*x.shape[:-1], hidden), recipes[1], backend)
  if add_residual and (shape := master_weight(w2).shape)[1] != x.shape[-1]:
    raise ValueError(f"add_residual needs {''.join(last)} [H, {x.shape[-1]}], not {shape}.")
  if not isinstance(activation, str) or activation not in ACTIVATIONS:
    raise ValueError(f"{activation=} must be one of {', '.join(ACTIVATIONS)}.")
  operands = vary_alike(as_rows(x), norm, w1s, b1s, w2, b2)
  how = recipes, backend, add_residual, activation, _as_epsilon(epsilon), check_keep(keep)
  layer = functools.partial(_norm_mlp, how)
  x_rows, y = by_rows(layer, operands, (True, *(False,) * 5), dot.most_rows(*recipes))
  return dot.named_dot(y, x) if add_residual else (from_rows(x_rows, x), dot.named_dot(y, x))


def as_pair(recipe) -> tuple[Recipe, Recipe]:
  """The recipes of an MLP's linear layers before its activation, and after it."""
  pair: Any = recipe if isinstance(recipe, tuple) and len(recipe) == 2 else (recipe, recipe)
  return as_recipe(pair[0]), as_recipe(pair[1])


def _prepared(linears, x_shape, recipe, backend) -> tuple[tuple, tuple]:
  """The kernels and the biases of linear layers of the same x, checked; `linears` by w's name."""
  ws = tuple(dot.prepared(name, w, x_shape, recipe, backend) for name, (w, _) in linears.items())
  named = zip(ws, linears.items(), strict=True)
  return ws, tuple(dot.as_bias(f"b{name[1:]}", b, w) for w, (name, (_, b)) in named)


def _as_norm(x, norm) -> Norm:
  """norm with JAX's arrays; a ValueError unless they fit x."""
  if not isinstance(norm, Norm):
    raise ValueError(
      "norm must be LayerNormParams(scale, bias) or RMSNormParams(scale), not a"
      f" {type(norm).__name__}."
    )
  arrays = {name: as_floating(f"norm.{name}", vector) for name, vector in norm._asdict().items()}
  for name, vector in arrays.items():
    if vector.shape != x.shape[-1:]:
      raise ValueError(f"norm.{name} must be {x.shape[-1:]} for x {x.shape}, not {vector.shape}.")
  return type(norm)(**arrays)


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
def _norm_mlp(how, *operands):
  return _norm_mlp_fwd(how, *operands)[0]


def _norm_mlp_fwd(how, x, norm, w1s, b1s, w2, b2):
  (first, second), backend, add_residual, activation, epsilon, keep = how
  ops = get_backend(backend)
  n = ops.norm_quantize(x, norm, first.fwd and first.fwd[0], epsilon=epsilon)
  hs = tuple(
    checkpoint_name(dot.forward(ops, first, n, w, b, x.dtype), dot.DOT_NAME)
    for w, b in zip(w1s, b1s, strict=True)
  )
  spec = second.fwd and second.fwd[0]
  h_spec = spec if second.saved == "quantized" else None
  if len(hs) == 1:
    g, *hs = ops.gelu_quantize(*hs, spec, h_spec, activation=activation)
  else:
    g, hs = ops.glu_quantize(*hs, spec, h_spec, activation=activation)
  y = dot.forward(ops, second, g, w2, b2, x.dtype, x if add_residual else None)
  hs = tuple(
    checkpoint_name(h, dot.RESIDUAL_NAME) if isinstance(h, Quantized) else kept(h, keep) for h in hs
  )
  w1s = tuple(saved_weight(w) for w in w1s)
  results = (None if add_residual else x), y
  return results, (kept(x, keep), norm, hs, w1s, b1s, saved_weight(w2), b2)


def _norm_mlp_bwd(how, saved, gradients):
  (first, second), backend, add_residual, activation, epsilon, _ = how
  ops = get_backend(backend)
  x, norm, hs, w1s, b1s, w2, b2 = saved
  dx, dy = gradients
  x, hs = restored(x, dy.dtype), tuple(restored(h, dy.dtype) for h in hs)
  dx = dot.cotangent_like(x, dy) if add_residual else dx
  x_sharding, h_sharding = (jax.typeof(jax.tree.leaves(a)[0]).sharding for a in (x, hs))
  w1_qs = tuple(dot.dgrad_weight(ops, first, w, dy.dtype) for w in w1s)
  w2_q = dot.dgrad_weight(ops, second, w2, dy.dtype)
  dy, dy_q, db2 = dot.quantize_output_grad(ops, second, (dy,), b2, w2_q)
  added = dot.adapter_input_gradient(dy, w2, dy.dtype)
  dg = dot.input_gradient(ops, second, dy_q, w2_q, dy.dtype, h_sharding, added=added)
  backward = _gelu_backward if len(hs) == 1 else _glu_backward
  dhs, dh_qs, db1s, g = backward(ops, first, hs, dg, w1_qs, b1s, activation)
  dw2 = cotangent(w2, dot.weight_gradient(ops, second, g, dy, w2))
  dn = None
  for w, w_q, dh, dh_q in zip(w1s, w1_qs, dhs, dh_qs, strict=True):
    added = dot.adapter_input_gradient(dh, w, dy.dtype)
    if dn is not None:
      added = dn if added is None else dn + added
    dn = dot.input_gradient(ops, first, dh_q, w_q, dy.dtype, x_sharding, added=added)
  dx, d_norm, n = ops.norm_backward(x, norm, dn, dx, epsilon=epsilon)
  dw1s = tuple(
    cotangent(w, dot.weight_gradient(ops, first, n, dh, w)) for w, dh in zip(w1s, dhs, strict=True)
  )
  d_norm = jax.tree.map(dot.cotangent_like, norm, d_norm)
  return dot.forbid_second_derivatives((dx, d_norm, dw1s, db1s, dw2, db2), first, second)


def _gelu_backward(ops, recipe, hs, dg, w_qs, bs, activation):
  """Of the one h: its gradient, that for `input_gradient`, that of the bias; and GELU again."""
  spec, fold = dot.output_grad_rounding(recipe, w_qs[0])
  dh, dh_q, db, g = ops.gelu_backward(*hs, dg, spec, activation=activation, fold=fold)
  dbs = jax.tree.map(dot.cotangent_like, bs, (None if bs[0] is None else db,))
  return (dh,), (dh if dh_q is None else dh_q,), dbs, g


def _glu_backward(ops, recipe, hs, dg, w_qs, bs, activation):
  """Of gate and up each what `_gelu_backward` returns; and the gated unit again."""
  specs, folds = zip(*(dot.output_grad_rounding(recipe, w_q) for w_q in w_qs), strict=True)
  if None in specs:  # One kernel may be frozen in another format: `input_gradient` rounds then.
    specs, folds = (None, None), (None, None)
  dhs, dh_qs, g = ops.glu_backward(*hs, dg, specs[0], activation=activation, folds=folds)
  return dhs, dhs if dh_qs is None else dh_qs, tuple(map(dot.bias_gradient, bs, dhs)), g


_norm_mlp.defvjp(_norm_mlp_fwd, _norm_mlp_bwd)
