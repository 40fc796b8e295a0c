"""Noise and bias of 8-bit gradients: from which batch size does rounding matter?

A batch's gradient g is the mean gradient E[g] and noise, and the noise falls as the batch grows.
The rounded gradient is g + e. The part of the error e that changes from batch to batch is noise,
too, and small beside that of g. The rest is the *bias* E[e], which no batch averages away. The
*critical batch* B* has noise as large as the bias: B* = B tr Var(g) / |E[e]|^2, where B is the size
of the measured batches and tr Var(g) is their noise. It is to the bias what the noise scale of
McCandlish et al. 2018 (https://arxiv.org/abs/1812.06162) is to the gradient.

Estimators. The batches are split into groups of n. In a group, |x_1 + ... + x_n|^2 minus
|x_1|^2 + ... + |x_n|^2 sums x_i . x_j over all pairs of two batches, whose noises are independent:
its mean is n (n - 1) |E[x]|^2, without a share of noise. So the bias is not that of a plain mean,
which would keep 1 / n of the noise. Each quantity is a ratio of two such numbers, summed over
groups; the interval is Student's t of the groups' deviations from that ratio. Only sums are held:
one tree like the parameters for each recipe.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import stdtrit

from sbjax.convert.quantize_model import Rules, path_of, quantize_model
from sbjax.optim.stable_adamw import leading_axes

ALL = "all layers"
LEAST_GROUPS = 3
_CONFIDENCE = 0.95


class Estimate(NamedTuple):
  """A number and the bounds of its 95 % interval."""

  value: float
  low: float
  high: float

  def map(self, function: Callable[[float], float]) -> "Estimate":
    """The estimate of a monotone function of the number."""
    bounds = function(self.low), function(self.high)
    return Estimate(function(self.value), min(bounds), max(bounds))


class Rounding(NamedTuple):
  """How a recipe rounds a layer's gradient.

  Attributes:
    error: of one batch's gradient, over the noise of that gradient.
    bias: |E[e]| / |E[g]|.
    critical_batch: the batch size at which the gradient's noise is as large as the bias; its high
      bound is infinite if the batches do not tell the bias from zero.
  """

  error: Estimate
  bias: Estimate
  critical_batch: Estimate


# Of each layer, for the vectors x_i of a group: [|x_1 + ... + x_n|^2, |x_1|^2 + ... + |x_n|^2].
Squares = dict[str, list[float]]


class Group(NamedTuple):
  """The sums of a group of batches. They are plain numbers, so JSON holds them."""

  batches: int
  gradient: Squares
  errors: dict[str, Squares]  # by recipe


def gradient_rounding(
  loss: Callable[[Any, Any], jax.Array],
  params,
  batches: Iterable,
  recipes: Mapping[str, Rules],
  *,
  batch_size: int,
  group: int = 8,
  stacked: Callable | None = None,
) -> dict[str, dict[str, Rounding]]:
  """Noise and bias that recipes add to the gradient of a loss: {recipe: {layer: Rounding}}.

  A layer is a parameter of two or more axes, by its path; `ALL` is all of them together.

  Args:
    loss: of (params, batch), the mean over the batch's examples, in the reference precision.
    batches: independent ones of `batch_size` examples; those after the last whole group are left.
    recipes: by a name, the rules of `quantize_model`, which makes the rounded loss.
    group: batches of a group: two or more.
    stacked: as in `stable_adamw`: the number of leading axes of each parameter that count layers.

  Raises:
    ValueError: too few batches for an interval, a recipe that rounds nothing, gradients that are
      not finite or do not differ between batches; what `quantize_model` raises.

  >>> loss = lambda params, x: jnp.mean(jnp.square(x @ params["w"]))
  >>> xs = [jax.random.normal(jax.random.key(i), (16, 32)) for i in range(12)]
  >>> params, recipes = {"w": jnp.ones((32, 8))}, {"int8": "switchback"}
  >>> found = gradient_rounding(loss, params, xs, recipes, batch_size=16, group=4)
  >>> [*found["int8"]]
  ['w', 'all layers']
  """
  gradient = jax.jit(jax.grad(loss))
  rounded = {
    name: functools.partial(jax.jit(jax.grad(quantize_model(loss, rules))), params)
    for name, rules in recipes.items()
  }
  of_params = functools.partial(gradient, params)
  groups = [sum_group(of_params, rounded, few, stacked) for few in in_groups(batches, group)]
  whole = [each for each in groups if each.batches == group]
  return {name: roundings(whole, name, batch_size) for name in recipes}


def in_groups(batches: Iterable, size: int) -> Iterator[Iterable]:
  """Groups of that many batches, the last perhaps of fewer; each batch is asked for when used."""
  if size < 2:
    raise ValueError(f"group={size} must be at least 2: noise is a difference between batches.")
  batches = iter(batches)
  for first in batches:
    yield itertools.chain([first], itertools.islice(batches, size - 1))


def sum_group(
  gradient: Callable,
  rounded: Mapping[str, Callable],
  batches: Iterable,
  stacked: Callable | None = None,
) -> Group:
  """The sums over batches of gradients, and of the errors of rounded ones.

  gradient, rounded: functions of a batch that return trees like the parameters.
  """
  total, errors, count = _Sum(), {name: _Sum() for name in rounded}, 0
  for batch in batches:
    g, axes = _layers(gradient(batch), stacked)
    for name, function in rounded.items():
      errors[name].add(_difference(_layers(function(batch), stacked)[0], g), axes)
    total.add(g, axes)
    count += 1
  return Group(count, total.squares(), {name: error.squares() for name, error in errors.items()})


def _layers(tree, stacked) -> tuple[dict[str, jax.Array], tuple[int, ...]]:
  """The parameters of two or more axes by their paths, and how many of these count layers."""
  axes = jax.tree.leaves(leading_axes(stacked, tree))
  named = zip(jax.tree.leaves_with_path(tree), axes, strict=True)
  found = {path_of(path): (x, n) for (path, x), n in named if x.ndim - n > 1}
  return {name: x for name, (x, _) in found.items()}, tuple(n for _, n in found.values())


class _Sum:
  """Sums of trees of layers, and of the squares of each."""

  def __init__(self):
    self._total, self._each, self._axes = None, [], ()

  def add(self, tree, axes) -> None:
    self._axes = axes
    self._each.append(_squares(tree, axes))
    # The first tree may be a batch's own arrays, which are not ours to overwrite.
    self._total = _sum(self._total, tree) if self._total else jax.tree.map(jnp.copy, tree)

  def squares(self) -> Squares:
    of_sum, each = jax.device_get((_squares(self._total, self._axes), self._each))
    of_each = {name: sum(one[name].astype(np.float64) for one in each) for name in of_sum}
    found = {}
    for name, square in of_sum.items():
      pairs = np.stack([square.astype(np.float64), of_each[name]], -1)
      for index in np.ndindex(square.shape):
        layer = f"{name}[{','.join(map(str, index))}]" if index else name
        found[layer] = pairs[index].tolist()
    return found


@jax.jit
def _difference(a, b):
  return jax.tree.map(lambda a, b: a.astype(jnp.float32) - b.astype(jnp.float32), a, b)


@functools.partial(jax.jit, donate_argnums=0)
def _sum(a, b):
  return jax.tree.map(lambda a, b: a + b, a, b)


@functools.partial(jax.jit, static_argnums=1)
def _squares(tree, axes) -> dict[str, jax.Array]:
  """The sum of squares of each layer: [] or, for a stack, [layers]."""
  return {
    name: jnp.sum(jnp.square(x.astype(jnp.float32)), axis=tuple(range(n, x.ndim)))
    for (name, x), n in zip(tree.items(), axes, strict=True)
  }


def roundings(groups: list[Group], recipe: str, batch_size: int) -> dict[str, Rounding]:
  """The Rounding of each layer, and of all of them, from the sums of groups."""
  if len(groups) < LEAST_GROUPS:
    raise ValueError(
      f"{len(groups)} group{'s' * (len(groups) != 1)} of batches: an interval needs at least"
      f" {LEAST_GROUPS}. Give more batches, or smaller groups."
    )
  (n,) = {group.batches for group in groups}
  sums = {
    layer: np.array([[*group.gradient[layer], *group.errors[recipe][layer]] for group in groups])
    for layer in groups[0].gradient
  }  # [groups, 4]
  wrong = [layer for layer, x in sums.items() if not np.isfinite(x).all()]
  if wrong:
    raise ValueError(f"The gradient of {wrong[0]} is not finite in {recipe} or in the reference.")
  if not any(x[:, 3].any() for x in sums.values()):
    raise ValueError(f"{recipe} rounds nothing: its gradients are those of the reference.")
  sums = {layer: x for layer, x in sums.items() if x[:, 1].any()}  # Not those that are frozen.
  whole = np.sum([*sums.values()], axis=0)
  if not (whole[:, 1] * n > whole[:, 0]).all():
    raise ValueError("The batches have one gradient: its noise is a difference between batches.")
  return {layer: _rounding(x, n, batch_size) for layer, x in {**sums, ALL: whole}.items()}


def _rounding(sums: np.ndarray, n: int, batch_size: int) -> Rounding:
  """From [groups, 4]: both squares of gradients, and both of errors."""
  g_of_sum, g_of_each, e_of_sum, e_of_each = sums.T
  noise = (g_of_each - g_of_sum / n) / (n - 1)  # tr Var(g)
  gradient = (g_of_sum - g_of_each) / (n * (n - 1))  # |E[g]|^2
  bias = (e_of_sum - e_of_each) / (n * (n - 1))  # |E[e]|^2
  return Rounding(
    error=_ratio(e_of_each / n, noise).map(_root),
    bias=_ratio(bias, gradient).map(_root),
    critical_batch=_ratio(bias, noise).map(lambda r: batch_size / r if r > 0 else math.inf),
  )


def _root(x: float) -> float:
  return math.sqrt(max(x, 0.0))


def _ratio(above: np.ndarray, below: np.ndarray) -> Estimate:
  """The ratio of two means over groups; of nothing it is not known."""
  count = len(above)
  if not below.sum() > 0:
    return Estimate(math.nan, 0.0, math.inf)
  ratio = above.sum() / below.sum()
  deviations = (above - ratio * below) / below.mean()
  error = math.sqrt(np.square(deviations).sum() / (count * (count - 1)))
  half = float(stdtrit(count - 1, (1 + _CONFIDENCE) / 2)) * error
  return Estimate(float(ratio), float(ratio - half), float(ratio + half))
