"""`quantized_dot` for layers that take a `dot_general=`: Flax's, linen and nnx."""

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp

from sbjax.linear.frozen import Frozen
from sbjax.linear.quantized_dot import quantized_dot
from sbjax.ops.partition import merge_splits, reshape, splits_of, unmerge_splits
from sbjax.ops.registry import check_name
from sbjax.quantize import as_floating, floating_dtype
from sbjax.recipes import Recipe, as_recipe


def quantized_dot_general(recipe: Recipe | str, *, backend: str | None = None) -> "DotGeneral":
  """A `dot_general=` for Flax layers: `nn.Dense(features, dot_general=quantized_dot_general(r))`.

  Serves linen's Dense, DenseGeneral and MultiHeadDotProductAttention (`qkv_dot_general`,
  `out_dot_general`) and nnx's Linear, LinearGeneral and MultiHeadAttention. Several contracted
  axes count as one, batch axes as separate products with scales of their own. These layers cast
  their kernel to the compute dtype before they multiply; SwitchBackDense and SwitchBackLinear do
  not.

  >>> layer = nn.Dense(16, dot_general=quantized_dot_general("switchback"))
  >>> layer.init_with_output(jax.random.key(0), jnp.ones((4, 32)))[0].shape
  (4, 16)
  """
  return DotGeneral(as_recipe(recipe), backend)


@dataclasses.dataclass(frozen=True)
class DotGeneral:
  """`jax.lax.dot_general` by a recipe; a function that is compared, hashed and pickled by value."""

  recipe: Recipe
  backend: str | None

  def __post_init__(self):
    check_name(self.backend)

  def __call__(
    self,
    lhs,
    rhs,
    dimension_numbers,
    precision=None,
    preferred_element_type=None,
    out_sharding=None,
  ):
    if precision is not None:
      raise ValueError(
        f"{precision=} cannot be honoured by a quantized product; leave it None, and set"
        " jax.default_matmul_precision for the matmuls that a recipe leaves in full."
      )
    lhs = as_floating("lhs", lhs)
    rhs = rhs if isinstance(rhs, Frozen) else as_floating("rhs", rhs)
    (lhs_k, rhs_k), (lhs_b, rhs_b) = _checked_axes(lhs.shape, rhs.shape, dimension_numbers)
    if preferred_element_type is not None:
      preferred_element_type = floating_dtype("preferred_element_type", preferred_element_type)
      # Widened first, not last: x is quantized to the same bits, and y is cast once. float16 and
      # bfloat16 meet in float32, since bfloat16 holds what overflows in float16.
      if {lhs.dtype, preferred_element_type} == {jnp.dtype("float16"), jnp.dtype("bfloat16")}:
        lhs = lhs.astype(jnp.float32)
      elif preferred_element_type.itemsize > lhs.dtype.itemsize:
        lhs = lhs.astype(preferred_element_type)
    lhs_free = [a for a in range(lhs.ndim) if a not in (*lhs_k, *lhs_b)]
    rhs_free = [a for a in range(rhs.ndim) if a not in (*rhs_k, *rhs_b)]
    batch = [lhs.shape[a] for a in lhs_b]
    free = [*(lhs.shape[a] for a in lhs_free), *(rhs.shape[a] for a in rhs_free)]
    x = _grouped(lhs, lhs_b, lhs_free, lhs_k)
    if isinstance(rhs, Frozen):
      w, rhs = rhs.grouped(rhs_b, rhs_k, rhs_free), rhs.values
    else:
      w = _grouped(rhs, rhs_b, rhs_k, rhs_free)
    dot = functools.partial(quantized_dot, recipe=self.recipe, backend=self.backend)
    for _ in batch:
      dot = jax.vmap(dot)
    y = dot(x, w)
    *splits, rows, columns = splits_of(y)
    for merged, array, axes in ((rows, lhs, lhs_free), (columns, rhs, rhs_free)):
      splits += unmerge_splits(merged, [splits_of(array)[a] for a in axes])
    y = reshape(y, (*batch, *free), splits)
    y = y if preferred_element_type is None else y.astype(preferred_element_type)
    return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)


def _checked_axes(lhs_shape, rhs_shape, dimension_numbers) -> Any:
  """dimension_numbers, or a ValueError unless they fit the shapes."""
  shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (lhs_shape, rhs_shape))
  try:
    pairs: Any = [[tuple(map(operator.index, axes)) for axes in pair] for pair in dimension_numbers]
    jax.eval_shape(lambda lhs, rhs: jax.lax.dot_general(lhs, rhs, pairs), *shapes)
  except (TypeError, ValueError) as error:
    reason = str(error).removesuffix(".")
    raise ValueError(
      f"{dimension_numbers=} must be ((lhs_k, rhs_k), (lhs_batch, rhs_batch)), axes of lhs"
      f" {lhs_shape} and of rhs {rhs_shape}, which must agree in size: {reason}."
    ) from None
  return pairs


def _grouped(x: jax.Array, batch, *groups) -> jax.Array:
  """x with its batch axes first, then each group of axes as one."""
  axes, splits = [*batch, *(a for group in groups for a in group)], splits_of(x)
  shape = [x.shape[a] for a in batch] + [math.prod(x.shape[a] for a in g) for g in groups]
  of_groups = [merge_splits(splits[a] for a in group) for group in groups]
  return reshape(x.transpose(axes), shape, [splits[a] for a in batch] + of_groups)
