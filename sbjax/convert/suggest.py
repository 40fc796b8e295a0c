"""`suggest_rules`: a recipe for each linear layer of a model, by measurement.

What rounding changes is 1 - cosine of a result with the unrounded one. Errors of different layers
are nearly independent, so what each changes alone adds up to about what all change at once. Each
layer is rounded alone by each recipe, in one compiled program whose products have switches. Then
layers move to finer recipes, those first that gain most for their size, until the sum is within
the bounds; a measurement of all at once corrects the sum.
"""

import collections
import glob
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sbjax.convert.matmuls import Conversion, Products, in_columns, recipe_name
from sbjax.convert.quantize_model import ARRAYS, convert, naming
from sbjax.convert.rewrite import JOINED
from sbjax.quantize import FLOATS
from sbjax.recipes import FULL, Recipe, RecipeRules, as_recipe

GRADIENT, OUTPUTS = "gradient", "outputs"
Changes = dict[str, float]  # 1 - cosine of the gradient and of the outputs, by their names.


def suggest_rules(
  model,
  batch,
  loss: Callable,
  *,
  recipes: Sequence[Recipe | str] = ("switchback", "switchback_q", "full"),
  gradient_cosine: float | None = 0.995,
  output_cosine: float = 0.999,
  verbose: bool = False,
) -> RecipeRules:
  """Rules whose rounding keeps a model's gradient and outputs, found by measurement.

  They are for the model after `quantize_model`, for `quantize_weights`, and for layers of sbjax at
  the same paths. A model of sbjax's own layers is measured as one of Flax's, with the same names
  (CLIP with `block=PlainBlock` of `sbjax.models.flax_block`).

  It computes the loss and its gradient once for each layer and recipe: a few examples will do.

  Args:
    model: what `loss` takes first: linen's variables or parameters, an nnx module, or a tree.
    batch: what `loss` takes second: arrays of examples like those that the model will see.
    loss: of (model, batch), without rounding: a scalar, or a pair of a scalar and outputs (a tree
      of arrays, such as features or logits).
    recipes: those to choose from. A layer gets a later one only where the earlier do not suffice.
    gradient_cosine: the least cosine of the gradient of all parameters, above 0 and below 1; None
      for a model that is served: no gradient is computed.
    output_cosine: the same of the outputs, if `loss` returns them.
    verbose: prints what each layer changes alone, by recipe, and what the rules change.

  Returns:
    A rule for each layer that departs from the most frequent recipe, then one for "*".

  Raises:
    ValueError: a bound out of its range, fewer than two recipes, no linear layer, a loss that is no
      scalar, is not finite or does not depend on the parameters, or bounds that no rules reach.

  >>> def loss(params, x):
  ...   y = jnp.tanh(x @ params["b"] @ params["a"])
  ...   return jnp.mean(y), y
  >>> params = {"a": jnp.eye(32).at[0, 0].set(500.0), "b": jnp.eye(32)}
  >>> rules = suggest_rules(params, jax.random.normal(jax.random.key(0), (8, 32)), loss)
  >>> rules == RecipeRules.of({"a": "switchback_q", "*": "switchback"})
  True
  """
  bounds = _bounds(gradient_cosine, output_cosine)
  recipes = _checked(recipes)
  meter = _Meter(model, batch, loss, recipes, bounds)
  alone = {layer: meter.alone(layer) for layer in meter.work}
  chosen, changed = _choose(alone, meter)
  if verbose:
    share = sum(n for layer, n in meter.work.items() if recipes[chosen[layer]].rounds)
    print(_table(alone, chosen, changed, [recipe_name(recipe) for recipe in recipes]))
    print(f"{100 * share / sum(meter.work.values()):.0f} % of the multiplications are in 8 bits")
  return _rules(chosen, recipes)


def _bounds(gradient_cosine, output_cosine) -> Changes:
  """The largest 1 - cosine of each result."""
  given = {GRADIENT: gradient_cosine, OUTPUTS: output_cosine}
  names = {GRADIENT: "gradient_cosine", OUTPUTS: "output_cosine"}
  if gradient_cosine is None:
    del given[GRADIENT]
  for result, cosine in given.items():
    if not isinstance(cosine, int | float) or not 0 < cosine < 1:
      raise ValueError(f"{names[result]}={cosine!r} must be above 0 and below 1, such as 0.999.")
  return {result: 1 - cosine for result, cosine in given.items()}


def _checked(recipes) -> list[Recipe]:
  if isinstance(recipes, str | Recipe) or len(recipes) < 2:
    raise ValueError(
      f"recipes={recipes!r} must be two or more, the preferred one first, such as"
      " ('switchback', 'full')."
    )
  return [as_recipe(recipe) for recipe in recipes]


# ---- What rounding changes


class _Meter:
  """Measures what the rounding of some layers changes.

  Attributes:
    work: of each layer, by the path of its weight, the multiplications in the loss.
    bounds: those of the results that the loss has.
  """

  work: dict[str, int]

  def __init__(self, model, batch, loss, recipes: list[Recipe], bounds: Changes):
    self._recipes, self._with_gradient = recipes, GRADIENT in bounds
    arrays, self._call = _of_arrays(model, loss, recipes[0])
    jax.eval_shape(self._results, {}, arrays, batch)  # Finds the layers.
    if not self.work:
      raise ValueError(
        "The loss multiplies by no parameter as a linear layer does. A layer of sbjax has a recipe"
        " of its own: measure the model with Flax's layers."
      )
    run = jax.jit(self._results)
    self._run = lambda places: run(places, arrays, batch)
    value, self._exact = self._run(self._places({}))
    if not np.isfinite(value):
      raise ValueError(f"The loss of this batch is {value}; without rounding it must be finite.")
    self.bounds = {name: bound for name, bound in bounds.items() if name in self._exact}
    for name in self.bounds:
      if not 0 < _size(self._exact[name]) < math.inf:
        raise ValueError(f"Without rounding, the {name} of the loss must be finite and not all 0.")

  def alone(self, layer: str) -> list[Changes]:
    """What one layer changes, by recipe."""
    nothing = dict.fromkeys(self.bounds, 0.0)
    return [
      self.changes({layer: i}) if recipe.rounds else nothing
      for i, recipe in enumerate(self._recipes)
    ]

  def changes(self, chosen: dict[str, int]) -> Changes:
    """What layers change at once by these of the recipes; the others are not rounded."""
    _, results = self._run(self._places(chosen))
    apart = {name: float(_apart(results[name], self._exact[name])) for name in self.bounds}
    return {name: math.inf if math.isnan(x) else x for name, x in apart.items()}

  def _places(self, chosen):
    return {layer: np.int32(chosen.get(layer, -1) + 1) for layer in self.work}

  def _results(self, places, arrays, batch):
    """The loss, and the results that are compared: {GRADIENT: [...], OUTPUTS: tree}."""
    products = _Switched([FULL, *self._recipes], places)

    def run(arrays):
      return _loss_and_outputs(self._call(products, arrays, batch))

    results = {}
    if self._with_gradient:
      (value, outputs), results[GRADIENT] = jax.value_and_grad(run, has_aux=True)(arrays)
    else:
      value, outputs = run(arrays)
      if outputs is None:
        raise ValueError("gradient_cosine=None needs a loss that returns a pair with outputs.")
    if outputs is not None:
      results[OUTPUTS] = outputs
    self.work = products.work
    return value, results


def _of_arrays(model, loss, recipe: Recipe):
  """A model's parameters, and the loss as a function of (products, parameters, batch)."""
  tree, of_tree = model, loss
  if isinstance(model, nnx.Module):
    graph, tree, rest = nnx.split(model, nnx.Param, ...)

    def of_tree(own, batch):
      return loss(nnx.merge(graph, own, rest, copy=True), batch)

  name_of = naming(tree)
  keyed, treedef = jax.tree.flatten_with_path(tree)
  leaves = [leaf for _, leaf in keyed]
  places = [
    i
    for i, (keys, leaf) in enumerate(keyed)
    if isinstance(leaf, ARRAYS) and leaf.dtype in FLOATS and name_of(keys) is not None
  ]
  if not places:
    raise ValueError(
      "A model is linen's variables, an nnx module, or a tree of floating-point parameters, not a"
      f" {type(model).__name__}."
    )
  conversion = Conversion((("*", recipe),))

  def call(products, arrays, batch):
    given = leaves.copy()
    for i, array in zip(places, arrays, strict=True):
      given[i] = array
    tree = treedef.unflatten(given)
    return convert(conversion, lambda tree: of_tree(tree, batch), tree, name_of, products)

  return [leaves[i] for i in places], call


def _loss_and_outputs(result):
  """The loss, and the outputs or None."""
  value, outputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
  if not isinstance(value, jax.Array) or value.shape or value.dtype not in FLOATS:
    raise ValueError(
      "loss must return a floating-point scalar, or a pair of it and outputs, not"
      f" {jax.tree.map(jax.typeof, result)}."
    )
  return value, outputs


class _Switched(Products):
  """Products by one of several recipes: `places` has which, or else the first."""

  def __init__(self, recipes: list[Recipe], places):
    super().__init__(Conversion((("*", recipes[1]),)))
    self._recipes, self._places = recipes, places
    self.work: dict[str, int] = {}

  def left(self, eqn, weight):
    """Says nothing: `quantize_model` will, if it has a rule for the weight."""

  def _product(self, path, recipe, x, w, dims, result):
    (_, contracted), (_, batch) = dims
    outputs = [n for axis, n in enumerate(w.shape) if axis not in (*contracted, *batch)]
    self.work[path] = self.work.get(path, 0) + x.size * math.prod(outputs)

    def by(recipe):
      return lambda: super(_Switched, self)._product(path, recipe, x, w, dims, result)

    return jax.lax.switch(self._places.get(path, 0), [by(recipe) for recipe in self._recipes])


@jax.jit
def _apart(a, b) -> jax.Array:
  """1 - cosine of two trees as vectors, by their difference: so it may be below float32's step."""

  def unit(tree):
    size = _size(tree)
    return jax.tree.map(lambda x: x.astype(jnp.float32) / size, tree)

  return jnp.square(_size(jax.tree.map(jnp.subtract, unit(a), unit(b)))) / 2


@jax.jit
def _size(tree) -> jax.Array:
  """The length of a tree as a vector."""
  squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)]
  return jnp.sqrt(sum(squares, jnp.float32(0)))


# ---- Which layer takes which recipe


def _choose(alone: dict[str, list[Changes]], meter: _Meter) -> tuple[dict[str, int], Changes]:
  """The place of each layer's recipe, the first or a later one; and what all change at once."""
  chosen = dict.fromkeys(alone, 0)
  while True:
    changed = meter.changes(chosen)
    if all(changed[name] <= bound for name, bound in meter.bounds.items()):
      return chosen, changed
    limits = {}
    for name, bound in meter.bounds.items():  # All at once may change less or more than the sum.
      share = _sum(alone, chosen, name) / (changed[name] or 1)
      limits[name] = bound * share if 0 < share < math.inf else bound
    finer = _finer(alone, chosen, limits, meter.work)
    if finer == chosen:
      reached = ", ".join(f"{1 - x:.6f} of the {name}" for name, x in changed.items())
      raise ValueError(
        f"No rules of these recipes reach the bounds; the best cosines are {reached}. Lower the"
        " bounds, or add 'full' to the recipes."
      )
    chosen = finer


def _sum(alone, chosen, name: str) -> float:
  return sum(alone[layer][place][name] for layer, place in chosen.items())


def _finer(alone, chosen, limits, work) -> dict[str, int]:
  """Later recipes for layers, until the sums are within the limits or no layer gains.

  At most one place further: a measurement comes before the next.
  """
  before, chosen = chosen, dict(chosen)
  count = len(next(iter(alone.values())))

  def over():
    return [name for name, limit in limits.items() if not _sum(alone, chosen, name) <= limit]

  def gain(layer, place):
    """What a layer takes away from that which is over its limit, for a multiplication."""
    now, then = alone[layer][chosen[layer]], alone[layer][place]
    return sum((now[name] - then[name]) / limits[name] for name in over()) / work[layer]

  for place in range(1, count):
    gains = {layer: gain(layer, place) for layer, now in chosen.items() if now < place}
    for layer in sorted(gains, key=gains.__getitem__, reverse=True):
      if not over():
        return chosen
      if gains[layer] > 0:
        chosen[layer] = place
    if chosen != before:
      break
  return chosen


def _rules(chosen: dict[str, int], recipes: list[Recipe]) -> RecipeRules:
  ((usual, _),) = collections.Counter(chosen.values()).most_common(1)
  places = {path: place for joined, place in chosen.items() for path in joined.split(JOINED)}
  layers = collections.Counter(path.rpartition("/")[0] for path in places)
  rules = []
  for path, place in places.items():
    if place != usual:
      layer = path.rpartition("/")[0]  # Layers of sbjax go by it, and it has one weight.
      pattern = layer if layer and layers[layer] == 1 else path
      rules.append((glob.escape(pattern), recipes[place]))
  return RecipeRules((*rules, ("*", recipes[usual])))


def _table(alone, chosen, changed: Changes, recipes: list[str]) -> str:
  """What each layer changes alone, the largest first; and what all change by the rules."""
  head = [f"{name}, {recipe}" for name in changed for recipe in recipes]
  lines = [["10,000 x (1 - cosine)", *head, "takes"]]
  for layer in sorted(alone, key=lambda layer: -sum(alone[layer][0].values())):
    cells = (changes[name] for name in changed for changes in alone[layer])
    lines.append([layer, *(f"{1e4 * cell:.3g}" for cell in cells), recipes[chosen[layer]]])
  rules = ", ".join(f"{name} {1e4 * x:.3g}" for name, x in changed.items())
  return "\n".join([*in_columns(lines), f"all layers by the rules: {rules}"])
