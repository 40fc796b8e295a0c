"""The products of a model's parameters in the recipes of rules, and a table of them."""

import dataclasses
import fnmatch
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sbjax.convert.rewrite import Weight
from sbjax.linear.dot_general import DotGeneral
from sbjax.ops.partition import is_explicit, reshape, splits_of
from sbjax.recipes import RECIPES, SIMULATED, Recipe


@dataclasses.dataclass(frozen=True)
class Conversion:
  """What `quantize_model` was asked for."""

  rules: tuple[tuple[str, Recipe | None], ...]
  activations: Recipe | None = None
  backend: str | None = None
  verbose: bool = False

  def recipe_at(self, path: str) -> tuple[Recipe | None, str]:
    """The recipe of the first rule for a parameter, or None and the reason."""
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
      return self._conv(eqn, operands[0], operands[1], weights[1])
    return None

  def left(self, eqn, weight: Weight) -> None:
    recipe, _ = self.conversion.recipe_at(weight.path)
    if recipe and recipe.rounds:
      warnings.warn(
        f"quantize_model leaves the products of {weight.path} within {eqn.primitive.name} as they"
        f" are. If they may stay, begin the rules with ({weight.path!r}, None).",
        stacklevel=2,
      )

  def _dot(self, eqn, operands, weights: list[Weight | None]):
    side = 1 if weights[1] or not weights[0] else 0  # x @ w where both are parameters.
    weight = weights[side]
    recipe, why = self.conversion.activations, ""
    if weight:
      recipe, why = self.conversion.recipe_at(weight.path)
    elif recipe is None:
      return None
    why = why or _obstacle(eqn) or _shape_obstacle(eqn, side)
    x, w = operands[1 - side], operands[side]
    self._add(weight.path if weight else "", x, w, recipe, why)
    if why:
      return None
    (lhs_k, rhs_k), (lhs_b, rhs_b) = eqn.params["dimension_numbers"]
    dims = ((lhs_k, rhs_k), (lhs_b, rhs_b)) if side else ((rhs_k, lhs_k), (rhs_b, lhs_b))
    y = self._product(recipe, x, weight.master if weight else w, dims, eqn.outvars[0].aval)
    if not side:  # From [batch, free of x, free of w].
      batch, free = len(lhs_b), x.ndim - len(rhs_k) - len(rhs_b)
      y = jnp.moveaxis(y, range(batch, batch + free), range(y.ndim - free, y.ndim))
    return [_sharded_as(eqn.outvars[0].aval, y)]

  def _conv(self, eqn, x, w, weight: Weight):
    """A convolution whose windows do not overlap, as the product of patches with the kernel."""
    recipe, why = self.conversion.recipe_at(weight.path)
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
    y = self._product(recipe, patches, kernel, (contracted, ((), ())), eqn.outvars[0].aval)
    # From [B, counts, O].
    y = jnp.moveaxis(y, (0, y.ndim - 1, *range(1, y.ndim - 1)), dims.out_spec)
    return [_sharded_as(eqn.outvars[0].aval, y)]

  def _product(self, recipe, x, w, dims, result):
    wider = None if result.dtype == x.dtype else result.dtype
    dot = DotGeneral(recipe, self.conversion.backend)
    return dot(x, w, dims, preferred_element_type=wider)

  def _add(self, path, x, w, recipe, why):
    self.rows[Row(path, x.shape, w.shape, None if why else recipe, why)] = None

  def table(self, parameters: dict[str, tuple[int, ...]]) -> str:
    """All products, then the parameters (path: shape) of several axes without one.

    Biases, which are added to something larger, are left out.
    """
    rows = list(self.rows)
    found = {row.path for row in rows}
    for path, shape in parameters.items():
      uses = self.uses.get(path, set())
      if path not in found and len(shape) > 1 and uses != {"bias"}:
        why = ", ".join(sorted(uses)) or "unused"
        rows.append(Row(path, None, shape, None, f"not a weight ({why})"))
    cells = [("weight", "x", "w", "recipe, or why not")]
    for row in rows:
      x, w = ("x".join(map(str, shape)) if shape else "-" for shape in (row.lhs, row.rhs))
      cells.append((row.path or "(activations)", x, w, row.why or _name(row.recipe)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
      "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
      for line in cells
    )


def _name(recipe: Recipe | None) -> str:
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
