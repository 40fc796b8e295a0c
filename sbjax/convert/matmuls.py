"""The products of a model's parameters in the recipes of rules, and a table of them."""

import dataclasses
import fnmatch
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sbjax.convert import layouts
from sbjax.convert.rewrite import JOINED, Weight
from sbjax.linear.dot_general import DotGeneral
from sbjax.linear.frozen import Frozen, SharedScales
from sbjax.ops.partition import is_explicit, reshape, splits_of
from sbjax.recipes import RECIPES, SIMULATED, Recipe

_SEVERAL = "joined weights with several recipes"


@dataclasses.dataclass(frozen=True)
class Conversion:
  """What `quantize_model` was asked for."""

  rules: tuple[tuple[str, Recipe | None], ...]
  activations: Recipe | None = None
  backend: str | None = None
  verbose: bool = False

  def recipe_at(self, path: str) -> tuple[Recipe | None, str]:
    """The recipe of the first rule for a parameter, or None and the reason.

    Parameters that are joined (`JOINED`) have one if their rules have the same.
    """
    found = [self._first_rule(part) for part in path.split(JOINED)]
    if any(recipe != found[0][0] for recipe, _ in found):
      return None, _SEVERAL
    return found[0]

  def _first_rule(self, path: str) -> tuple[Recipe | None, str]:
    for pattern, recipe in self.rules:
      if fits(pattern, path):
        return recipe, "" if recipe else f"the rule for {pattern!r}"
    return None, "no rule"


def fits(pattern: str, path: str) -> bool:
  """Whether a pattern is that of a parameter's path, or of its layer's."""
  return any(fnmatch.fnmatchcase(p, pattern) for p in (path, path.rpartition("/")[0]))


class Row(NamedTuple):
  """A product in the table."""

  path: str  # the weight's, or "" for a product of two activations
  lhs: tuple[int, ...] | None  # the shape of x
  rhs: tuple[int, ...]  # the shape of the weight
  recipe: Recipe | None
  why: str = ""  # the reason if there is no recipe


class Products:
  """Replaces products as a Conversion says, and remembers a Row of each."""

  def __init__(self, conversion: Conversion):
    self.conversion = conversion
    self.enters_all = conversion.activations is not None
    self.rows: dict[Row, None] = {}  # Ordered; a scan's body may be traced twice.
    self.uses: dict[str, set[str]] = {}

  def __call__(self, eqn, operands, weights):
    name = eqn.primitive.name
    for weight in filter(None, weights):
      # Shapes, not sizes: an exported batch may be of any size.
      is_bias = name == "add" and weight.master.shape != eqn.outvars[0].aval.shape
      self.uses.setdefault(weight.path, set()).add("bias" if is_bias else name)
    if name == "dot_general":
      return self._dot(eqn, operands, weights)
    if name == "conv_general_dilated" and weights[1]:
      x = self._floats(eqn, operands[0], weights[0])
      return self._conv(eqn, x, operands[1], weights[1])
    if name == "gather" and isinstance(operands[0], Frozen) and layouts.takes_rows(eqn):
      return self._rows(eqn, *operands)
    return None

  def _floats(self, eqn, x, weight: Weight | None):
    return self.opened(eqn, weight.path, x) if weight and isinstance(x, Frozen) else x

  def opened(self, eqn, path: str, weight: Frozen):
    raise ValueError(
      f"{path} is in 8 bits, and the model takes it in {eqn.primitive.name}, not in a matmul that"
      f" has a recipe: quantize the weights for this model (quantize_weights with call=), or leave"
      f" it in floats by a rule ({path!r}, None)."
    )

  def left(self, eqn, weight: Weight) -> None:
    if isinstance(weight.master, Frozen):
      return  # It has to be opened.
    recipe, _ = self.conversion.recipe_at(weight.path)
    if recipe and recipe.rounds:
      rules = ", ".join(f"({path!r}, None)" for path in weight.path.split(JOINED))
      warnings.warn(
        f"quantize_model leaves the products of {weight.path} within {eqn.primitive.name} as they"
        f" are. If they may stay, begin the rules with {rules}.",
        stacklevel=2,
      )

  def _recipe_of(self, weight: Weight) -> tuple[Recipe | None, str]:
    recipe, why = self.conversion.recipe_at(weight.path)
    if why == _SEVERAL:
      warnings.warn(
        f"quantize_model leaves the product of {weight.path} as it is: they are joined, and the"
        " rules give them several recipes, or None and a recipe. Give them one.",
        stacklevel=2,
      )
    return recipe, why

  def _dot(self, eqn, operands, weights: list[Weight | None]):
    side = 1 if weights[1] or not weights[0] else 0  # x @ w where both are parameters.
    weight = weights[side]
    recipe, why = self.conversion.activations, ""
    if weight:
      recipe, why = self._recipe_of(weight)
    elif recipe is None:
      return None
    why = why or _obstacle(eqn) or _shape_obstacle(eqn, side)
    x, w = operands[1 - side], operands[side]
    self._add(weight.path if weight else "", x, w, recipe, why)
    if why:
      return None
    x = self._floats(eqn, x, weights[1 - side])
    (lhs_k, rhs_k), (lhs_b, rhs_b) = eqn.params["dimension_numbers"]
    dims = ((lhs_k, rhs_k), (lhs_b, rhs_b)) if side else ((rhs_k, lhs_k), (rhs_b, lhs_b))
    path, w = (weight.path, weight.master) if weight else ("", w)
    y = self._product(path, recipe, x, w, dims, eqn.outvars[0].aval)
    if not side:  # From [batch, free of x, free of w].
      batch, free = len(lhs_b), x.ndim - len(rhs_k) - len(rhs_b)
      y = jnp.moveaxis(y, range(batch, batch + free), range(y.ndim - free, y.ndim))
    return [_sharded_as(eqn.outvars[0].aval, y)]

  def _conv(self, eqn, x, w, weight: Weight):
    """A convolution whose windows do not overlap, as the product of patches with the kernel."""
    recipe, why = self._recipe_of(weight)
    why = why or _obstacle(eqn) or _overlap(eqn)
    self._add(weight.path, x, w, recipe, why)
    if why:
      return None
    dims, windows = eqn.params["dimension_numbers"], eqn.params["window_strides"]
    spatial = range(2, x.ndim)
    patches = x.transpose(dims.lhs_spec)
    counts = [patches.shape[a] // window for a, window in zip(spatial, windows, strict=True)]
    for axis, count, window in zip(spatial, counts, windows, strict=True):
      patches = jax.lax.slice_in_dim(patches, 0, count * window, axis=axis)
    splits = splits_of(patches)
    shape, shape_splits = list(patches.shape[:2]), splits[:2]
    for axis, count, window in zip(spatial, counts, windows, strict=True):
      shape, shape_splits = [*shape, count, window], [*shape_splits, splits[axis], ()]
    patches = reshape(patches, shape, shape_splits)  # [B, C, count, window, count, window]
    kernel = weight.master.transpose(dims.rhs_spec)  # [O, C, window, window]
    contracted = ((1, *range(3, patches.ndim, 2)), (1, *range(2, kernel.ndim)))
    axes = contracted, ((), ())
    y = self._product(weight.path, recipe, patches, kernel, axes, eqn.outvars[0].aval)
    # From [B, counts, O].
    y = jnp.moveaxis(y, (0, y.ndim - 1, *range(1, y.ndim - 1)), dims.out_spec)
    return [_sharded_as(eqn.outvars[0].aval, y)]

  def _product(self, path, recipe, x, w, dims, result):
    wider = None if result.dtype == x.dtype else result.dtype
    dot = DotGeneral(recipe, self.conversion.backend)
    if isinstance(w, Frozen):
      _check_made_for(path, recipe, w)
    try:
      return dot(x, w, dims, preferred_element_type=wider)
    except SharedScales as error:
      raise ValueError(
        f"{path} was quantized for another matmul: {error}. Quantize the weights for this model:"
        " quantize_weights with call=."
      ) from error

  def _rows(self, eqn, weight: Frozen, indices):
    """Rows of a table: those of its 8-bit values, times those of its scales."""
    (rows,) = eqn.params["dimension_numbers"].start_index_map
    whole = list(weight.scale.shape)
    whole[rows] = weight.shape[rows]
    scale = jnp.broadcast_to(weight.scale, whole)  # Beyond the last row it is NaN, as floats are.

    params = {
      name: p for name, p in eqn.params.items() if name not in ("slice_sizes", "fill_value")
    }

    def take(table):
      sizes = [1 if axis == rows else size for axis, size in enumerate(table.shape)]
      return jax.lax.gather(table, indices, slice_sizes=sizes, **params)

    return [(take(weight.values).astype(jnp.float32) * take(scale)).astype(weight.dtype)]

  def _add(self, path, x, w, recipe, why):
    self.rows[Row(path, x.shape, w.shape, None if why else recipe, why)] = None

  def table(self, parameters: dict[str, tuple[int, ...]]) -> str:
    """All products, then the parameters (path: shape) of several axes without one.

    Biases, which are added to something larger, are left out.
    """
    rows = list(self.rows)
    found = {path for row in rows for path in row.path.split(JOINED)}
    for path, shape in parameters.items():
      uses = self.uses.get(path, set())
      if path not in found and len(shape) > 1 and uses != {"bias"}:
        why = ", ".join(sorted(uses)) or "unused"
        rows.append(Row(path, None, shape, None, f"not a weight ({why})"))
    cells = [("weight", "x", "w", "recipe, or why not")]
    for row in rows:
      x, w = ("x".join(map(str, shape)) if shape else "-" for shape in (row.lhs, row.rhs))
      cells.append((row.path or "(activations)", x, w, row.why or recipe_name(row.recipe)))
    return "\n".join(in_columns(cells))


def _check_made_for(path: str, recipe: Recipe, weight: Frozen) -> None:
  if recipe.fwd is None or recipe.fwd[1] != weight.spec:
    takes = "floats" if recipe.fwd is None else _words(recipe.fwd[1])
    raise ValueError(
      f"{path} was quantized for another recipe: it is {_words(weight.spec)}, and"
      f" {recipe_name(recipe)!r} takes {takes}. Give quantize_weights and quantize_model the same"
      " rules."
    )


def _words(spec) -> str:
  return f"{spec.dtype.name} {spec.scaling}"


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
  """A line for each row, whose cells stand below each other."""
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def recipe_name(recipe: Recipe | None) -> str:
  names = RECIPES | SIMULATED
  return next((name for name, known in names.items() if known == recipe), "a recipe")


def _obstacle(eqn) -> str:
  """Why no recipe can compute a product, or nothing."""
  dtypes = {v.aval.dtype for v in (*eqn.invars, *eqn.outvars)}
  if not all(jnp.issubdtype(d, jnp.floating) and d.itemsize > 1 for d in dtypes):
    return f"in {', '.join(sorted(d.name for d in dtypes))}"
  if eqn.params["precision"] not in (None, _default_precision()):
    return f"the model asks for precision {eqn.params['precision']}"
  return ""


def _default_precision():
  """What a product has that asks for nothing; `jax.default_matmul_precision` sets it."""
  x = jax.ShapeDtypeStruct((1, 1), jnp.float32)
  (eqn,) = jax.make_jaxpr(lambda x: jax.lax.dot(x, x))(x).eqns
  return eqn.params["precision"]


def _shape_obstacle(eqn, side: int) -> str:
  contracted, batch = (axes[side] for axes in eqn.params["dimension_numbers"])
  if not contracted:
    return "nothing is summed"
  if len(contracted) + len(batch) == eqn.invars[side].aval.ndim:
    return "a vector"
  return ""


def _overlap(eqn) -> str:
  """Why a convolution is no product of patches, or nothing."""
  params, kernel = eqn.params, eqn.invars[1].aval.shape
  windows = tuple(kernel[axis] for axis in params["dimension_numbers"].rhs_spec[2:])
  if params["feature_group_count"] > 1 or params["batch_group_count"] > 1:
    return "a convolution in groups"
  if tuple(params["window_strides"]) != windows:
    return "a convolution whose windows overlap"
  dilated = any(d > 1 for d in (*params["lhs_dilation"], *params["rhs_dilation"]))
  if dilated or any(map(any, params["padding"])):
    return "a convolution with padding or dilation"
  return ""


def _sharded_as(aval, y):
  """y with the sharding that the replaced result had; types have one in explicit mode."""
  return jax.sharding.reshard(y, aval.sharding.spec) if is_explicit() else y
