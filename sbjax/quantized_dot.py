"""`y = x @ w` whose three matmuls are rounded as a recipe says.

Gradients pass straight through the rounding: the backward pass is the two matmuls of a linear
layer, each with its own quantization (Wortsman et al. 2023, https://arxiv.org/abs/2304.13013,
Algorithm 1 and its variants).
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from sbjax.backends import get_backend, warn_of_inexact_int8
from sbjax.formats import INT8
from sbjax.quantize import dequantize
from sbjax.recipes import Recipe, as_recipe

# What `jax.checkpoint` policies can keep: products, and the 8-bit operands the backward reuses.
DOT_NAME = "sbjax_dot"
RESIDUAL_NAME = "sbjax_residual"


def quantized_dot(
  x: jax.Array, w: jax.Array, recipe: Recipe | str, *, backend: str | None = None
) -> jax.Array:
  """`x @ w` for x [..., K] and w [K, N], giving [..., N] in x's dtype.

  Differentiable once, in x and w; dx has x's dtype. w may be wider than x (a float32 master
  copy beside bfloat16 activations): it is quantized as it is, and dw is the float32
  accumulator of x.T @ dy in w's dtype, never rounded to x's.

  Args:
    recipe: a `Recipe` or the name of one in RECIPES.
    backend: "xla", ...; None chooses.

  Raises:
    ValueError: integer or complex operands, sizes that do not match, an unknown recipe or backend.
    NotImplementedError: the named backend cannot compute this.
  """
  recipe = as_recipe(recipe)
  if get_backend(backend).name == "xla" and recipe.uses(INT8):
    warn_of_inexact_int8()
  check_floating("x", x)
  check_floating("w", w)
  if w.ndim != 2:
    raise ValueError(f"w must be [K, N], not {w.shape}.")
  if x.ndim < 1 or x.shape[-1] != w.shape[0]:
    raise ValueError(f"x [..., K] and w [K, N] must agree in K: {x.shape} and {w.shape}.")
  rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
  y = _dot(recipe, backend, rows, w).reshape(*x.shape[:-1], w.shape[1])
  return checkpoint_name(y, DOT_NAME)


def check_floating(name: str, operand: jax.Array) -> None:
  if not jnp.issubdtype(operand.dtype, jnp.floating):
    raise ValueError(f"{name} must be floating point, not {operand.dtype.name}.")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _dot(recipe, backend, x, w):
  return _dot_fwd(recipe, backend, x, w)[0]


def _dot_fwd(recipe, backend, x, w):
  if recipe.fwd is None:
    return _full_dot(x, w.astype(x.dtype), ((1,), (0,)), x.dtype), (x, w)
  ops, (x_spec, w_spec) = get_backend(backend), recipe.fwd
  x_q = ops.quantize(x, x_spec)
  if recipe.residuals == "full":
    return ops.scaled_matmul(x_q, ops.quantize_transposed(w, w_spec), x.dtype), (x, w)
  # w has one scale, so the transpose of the quantized is the quantized transpose.
  w_q, w_q_transposed = ops.quantize_both(w, w_spec)
  y = ops.scaled_matmul(x_q, w_q_transposed, x.dtype)
  return y, (*checkpoint_name((x_q, w_q), RESIDUAL_NAME), jnp.zeros((0,), w.dtype))


def _dot_bwd(recipe, backend, residuals, dy):
  ops = get_backend(backend)
  if recipe.residuals == "quantized":
    x_q, w_q, like_w = residuals
    x_sharding, w_sharding = _sharding(x_q.values), _sharding(w_q.values)
    x, w, w_dtype = dequantize(x_q, dy.dtype), None, like_w.dtype
  else:
    x, w = residuals
    x_sharding, w_sharding = _sharding(x), _sharding(w)
    w_q, w_dtype = None, w.dtype

  if recipe.dgrad is None:
    dx = _full_dot(dy, w.astype(dy.dtype), ((1,), (1,)), dy.dtype, x_sharding)
  else:
    dy_spec, w_spec = recipe.dgrad
    w_q = ops.quantize(w, w_spec) if w_q is None else w_q
    dx = ops.scaled_matmul(ops.quantize(dy, dy_spec), w_q, dy.dtype, x_sharding)

  if recipe.wgrad is None:
    dw = _full_dot(x, dy, ((0,), (0,)), w_dtype, w_sharding)
  else:
    x_spec, dy_spec = recipe.wgrad
    x_q, dy_q = ops.quantize_transposed(x, x_spec), ops.quantize_transposed(dy, dy_spec)
    dw = ops.scaled_matmul(x_q, dy_q, w_dtype, w_sharding)
  return dx, dw


_dot.defvjp(_dot_fwd, _dot_bwd)


def _sharding(operand):
  """How its gradient must be sharded in JAX's explicit mode."""
  return jax.typeof(operand).sharding


def _full_dot(lhs, rhs, contracting, out_dtype, out_sharding=None):
  """A matmul in the operands' own dtype, as plain Flax has it; the sums are float32 on GPUs too.

  The result is asked for in `out_dtype`: a float32 one would be written out to be cast.
  """
  return jax.lax.dot_general(
    lhs, rhs, (contracting, ((), ())), preferred_element_type=out_dtype, out_sharding=out_sharding
  )


def quantized_dot_general(recipe: Recipe | str, *, backend: str | None = None) -> Callable:
  """A `dot_general=` for Flax layers: `nn.Dense(features, dot_general=quantized_dot_general(r))`.

  Serves linen's Dense, DenseGeneral and MultiHeadDotProductAttention (`qkv_dot_general`,
  `out_dot_general`) and nnx's Linear, LinearGeneral and MultiHeadAttention. Several contracted
  axes count as one, batch axes as separate products with scales of their own. These layers cast
  their kernel to the compute dtype before they multiply; SwitchBackDense and SwitchBackLinear
  do not, and get the weight gradient in float32.
  """
  recipe = as_recipe(recipe)
  get_backend(backend)  # An error belongs here rather than in a layer.

  def dot_general(
    lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, out_sharding=None
  ):
    if precision is not None:
      raise ValueError(
        f"{precision=} cannot be honoured by a quantized product; leave it None, and set"
        " jax.default_matmul_precision for the matmuls that a recipe leaves in full."
      )
    (lhs_k, rhs_k), (lhs_b, rhs_b) = dimension_numbers
    if [lhs.shape[a] for a in lhs_k] != [rhs.shape[a] for a in rhs_k]:
      raise ValueError(
        f"The contracted axes {lhs_k} of {lhs.shape} and {rhs_k} of {rhs.shape} must agree in K."
      )
    if preferred_element_type is not None:
      # Widened first, not last: x is quantized to the same bits, and y is cast once.
      wider = jnp.dtype(preferred_element_type).itemsize > lhs.dtype.itemsize
      lhs = lhs.astype(preferred_element_type) if wider else lhs
    lhs_free = [a for a in range(lhs.ndim) if a not in (*lhs_k, *lhs_b)]
    rhs_free = [a for a in range(rhs.ndim) if a not in (*rhs_k, *rhs_b)]
    batch = [lhs.shape[a] for a in lhs_b]
    free = [*(lhs.shape[a] for a in lhs_free), *(rhs.shape[a] for a in rhs_free)]
    k = math.prod(lhs.shape[a] for a in lhs_k)
    x = lhs.transpose(*lhs_b, *lhs_free, *lhs_k).reshape(*batch, -1, k)
    w = rhs.transpose(*rhs_b, *rhs_k, *rhs_free).reshape(*batch, k, -1)
    dot = functools.partial(quantized_dot, recipe=recipe, backend=backend)
    for _ in batch:
      dot = jax.vmap(dot)
    y = dot(x, w).reshape(*batch, *free)
    if preferred_element_type is not None:
      y = y.astype(preferred_element_type)
    return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)

  return dot_general
