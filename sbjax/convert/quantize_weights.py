"""`quantize_weights`: a model's weights as 8-bit values and scales only, to be served.

A trace of the model says which axes of a parameter its matmuls sum over. So a parameter of any
shape gets the scales that its recipe has where the converted model rounds it in each call.
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from sbjax.convert.matmuls import Conversion, Products, fits
from sbjax.convert.quantize_model import (
  ARRAYS,
  Rules,
  check_patterns,
  convert,
  naming,
  pairs_of,
)
from sbjax.convert.rewrite import JOINED, Weight
from sbjax.linear.frozen import Frozen, freeze
from sbjax.linear.weight import is_frozen
from sbjax.ops.registry import check_name
from sbjax.quantize import FLOATS, Spec


def quantize_weights(
  params,
  rules: Rules,
  *,
  call: Callable[[Any], Any] | None = None,
  in_place: bool = False,
  backend: str | None = None,
  verbose: bool = False,
):
  """Parameters whose weights are frozen in 8 bits; biases, norms and tables stay as they are.

  The model applies them after `quantize_model(model, rules)`, with the numbers that it has for the
  float parameters, in about a quarter of their bytes. So do layers of sbjax with the same recipe. A
  weight has no gradient; the input and all other parameters have.

  Args:
    params: linen's variables or parameters, an nnx module, of which a copy is returned, or a tree.
    rules: as in `quantize_model`.
    call: the model as a function of params, for some input; it is traced and not run. So each
      weight's axes are known, whatever layer multiplies by it. None: parameters named "kernel", or
      by the last part of a pattern, are the kernels [..., K, N] of dense layers, perhaps stacked.
    in_place: changes the nnx module itself.
    verbose: prints a table of the matmuls that `call` has, and the recipe or why there is none.

  Raises:
    ValueError: a pattern that fits no parameter, rules that leave all weights in floats, parameters
      that are in 8 bits already, or what `quantize_model` raises.

  >>> params = {"kernel": jnp.ones((32, 16)), "bias": jnp.ones(16)}
  >>> w = quantize_weights(params, "switchback")["kernel"].fwd
  >>> w.values.shape, w.values.dtype, w.scale.shape
  ((16, 32), dtype('int8'), (1, 1))
  """
  check_name(backend)
  conversion = Conversion(pairs_of(rules), backend=backend, verbose=verbose)
  if not isinstance(params, nnx.Module):
    return _of_tree(params, conversion, call)
  graph, own, rest = nnx.split(params, nnx.Param, ...)
  of_own = None if call is None else lambda own: call(nnx.merge(graph, own, rest, copy=True))
  own = _of_tree(own, conversion, of_own)
  if not in_place:
    return nnx.merge(graph, own, rest, copy=True)
  nnx.update(params, own)
  return params


class _Use(NamedTuple):
  """How a matmul takes a parameter: its Spec, and the parameter's axes as in `freeze`."""

  spec: Spec
  contracted: tuple[int, ...]
  batch: tuple[int, ...]


def _of_tree(tree, conversion: Conversion, call):
  keyed, treedef = jax.tree.flatten_with_path(tree, is_leaf=is_frozen)
  name_of = naming(tree)
  paths = [name_of(keys) for keys, _ in keyed]
  for path, (_, leaf) in zip(paths, keyed, strict=True):
    if is_frozen(leaf):
      raise ValueError(f"{path} is in 8 bits already: give quantize_weights the float parameters.")
  given = {
    path: leaf
    for path, (_, leaf) in zip(paths, keyed, strict=True)
    if path is not None and isinstance(leaf, ARRAYS)
  }
  if call is None:
    check_patterns(conversion, list(given))
    uses = {path: _of_kernel(conversion, path, leaf) for path, leaf in given.items()}
  else:
    uses = _uses_of(conversion, call, tree, name_of)
  if not any(uses.values()):
    raise ValueError(
      "The rules leave every weight in floats: give one that is multiplied a recipe that rounds it,"
      " such as 'switchback_q'."
    )
  found = (None if path is None else uses.get(path) for path in paths)
  leaves = [
    freeze(leaf, *use, backend=conversion.backend) if use else leaf
    for use, (_, leaf) in zip(found, keyed, strict=True)
  ]
  return treedef.unflatten(leaves)


def _of_kernel(conversion: Conversion, path: str, w) -> _Use | None:
  """The use of a kernel [..., K, N]."""
  recipe, _ = conversion.recipe_at(path)
  name = path.rpartition("/")[2]
  named = any(fits(p, path) and p.rpartition("/")[2] == name for p, _ in conversion.rules)
  if not recipe or not recipe.fwd or not (named or name == "kernel"):
    return None
  if w.ndim < 2 or w.dtype not in FLOATS:
    return None
  return _Use(recipe.fwd[1], (w.ndim - 2,), tuple(range(w.ndim - 2)))


# ---- The uses of parameters, by a trace


def _uses_of(conversion: Conversion, call, tree, name_of: Callable) -> dict[str, _Use]:
  survey = _Survey(dataclasses.replace(conversion, verbose=False))

  def trial(keys, leaf):
    if name_of(keys) is None or not isinstance(leaf, ARRAYS) or leaf.dtype not in FLOATS:
      return leaf
    return _with_labels(leaf)

  def run(tree):
    tree = jax.tree.map_with_path(trial, tree)
    return convert(survey.conversion, call, tree, name_of, survey)

  jax.eval_shape(run, tree)
  if conversion.verbose:
    named = ((name_of(keys), leaf.shape) for keys, leaf in jax.tree.leaves_with_path(tree))
    print(survey.table({path: shape for path, shape in named if path is not None}))
  return survey.result()


def _with_labels(w) -> Frozen:
  """A stand-in for w whose scale is a companion for each axis: it shows where that axis goes."""
  axes = range(w.ndim)
  labels = tuple(jnp.zeros([w.shape[a] if i == a else 1 for i in axes]) for a in axes)
  return Frozen(jnp.zeros(w.shape, jnp.int8), labels, Spec(jnp.int8, "tensorwise"), w.dtype)


class _Survey(Products):
  """Sees which axes of which parameters are multiplied, and computes zeros."""

  def __init__(self, conversion: Conversion):
    super().__init__(conversion)
    self.found: dict[str, set[_Use | None]] = {}  # None: no scales serve that matmul.
    self.opened_in: dict[str, str] = {}

  def _product(self, path, recipe, x, w, dims, result):
    if isinstance(w, Frozen) and recipe.fwd:
      self.found.setdefault(path, set()).add(_use_of(recipe.fwd[1], w, dims))
    elif isinstance(w, Frozen):
      self.opened_in[path] = "a matmul whose forward pass is in floats"
    elif JOINED in path and recipe.fwd:  # Opened before they were joined.
      self.found |= {part: set() for part in path.split(JOINED)}
    (x_axes, w_axes) = ({*dims[0][side], *dims[1][side]} for side in (0, 1))
    shape = [x.shape[a] for a in dims[1][0]]
    shape += [n for a, n in enumerate(x.shape) if a not in x_axes]
    shape += [n for a, n in enumerate(w.shape) if a not in w_axes]
    return jnp.zeros(shape, result.dtype)

  def _rows(self, eqn, weight, indices):
    return [jnp.zeros(eqn.outvars[0].aval.shape, weight.dtype)]

  def opened(self, eqn, path, weight):
    self.opened_in[path] = eqn.primitive.name
    if eqn.primitive.name == "sbjax_by_rows" and weight.ndim > 1:  # A layer of ours.
      self.left(eqn, Weight(path, weight))
    return jnp.zeros(weight.shape, weight.dtype)

  def left(self, eqn, weight):
    recipe, _ = self.conversion.recipe_at(weight.path)
    if recipe and recipe.fwd:
      self.found.setdefault(weight.path, set())  # And it is opened.

  def result(self) -> dict[str, _Use]:
    """Of each parameter that 8 bits can serve; a warning names those that some matmuls cannot."""
    found = {}
    for path, uses in self.found.items():
      if path in self.opened_in:
        reason = f"the model takes it in {self.opened_in[path]}, which needs floats"
      elif (use := _one_for(uses)) is None:
        reason = "its matmuls need other scales"
      else:
        found[path] = use
        continue
      warnings.warn(
        f"quantize_weights leaves {path} in floats: {reason}. If it may stay, begin the rules with"
        f" ({path!r}, None).",
        stacklevel=2,
      )
    return found


def _one_for(uses: set[_Use | None]) -> _Use | None:
  """A use whose scales serve all of them, if there is one."""
  known = sorted((use for use in uses if use), key=lambda use: use.contracted)
  if len(known) < len(uses) or len({(use.spec, use.batch) for use in known}) != 1:
    return None
  # One scale for all of a weight serves sums over any of its axes.
  return known[0] if len(known) == 1 or not known[0].spec.is_rowwise else None


def _use_of(spec: Spec, w: Frozen, dims) -> _Use | None:
  """The axes of the parameter that w is, from those of w that a product sums over."""
  contracted_by, batch_by = {*dims[0][1]}, {*dims[1][1]}
  contracted, batch = [], []
  for axis, label in enumerate(w.scale):
    varies = {a for a, n in enumerate(label.shape) if n > 1}
    if varies & contracted_by:
      if spec.is_rowwise and not varies <= contracted_by:
        return None
      contracted.append(axis)
    elif varies <= batch_by:  # Or sliced away: an index is a matmul of its own.
      batch.append(axis)
  return _Use(spec, tuple(contracted), tuple(batch))
