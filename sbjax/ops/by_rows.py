"""Calls of functions of rows: under `jax.vmap` with a shared weight they get more rows.

JAX maps a function that has a derivative rule by mapping the rule: each example has a small matmul
and a weight gradient [K, N] of its own, and only then are these summed. A call here stands around
the rule. Where examples share all but their rows, it is one call with the rows of all examples, and
the rule is that of one large matmul. The vmap of a gradient differentiates first, within: there
each example has a weight gradient of its own, as it must.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from sbjax.ops.partition import merge_splits, reshape, splits_of, unmerge_splits


def by_rows(function: Callable, operands: tuple, rows: tuple, most: int | None = None) -> Any:
  """function(*operands), whose results are all [rows, ...]; a row of them depends on no other row.

  In a jaxpr it is one equation, so policies of `jax.checkpoint` do not see the matmuls within.

  Args:
    rows: for each operand, or each array of one, whether it is [rows, ...]; the rows share the
      others.
    most: the most rows that one call may get from several examples; None for any number.
  """
  leaves, tree = jax.tree.flatten(operands)
  if not any(isinstance(leaf, Tracer) for leaf in leaves):
    return function(*operands)
  structures = []

  def flat(*leaves):
    results, structure = jax.tree.flatten(function(*tree.unflatten(leaves)))
    structures.append(structure)
    return results

  has_rows = tuple(jax.tree.leaves(jax.tree.broadcast(rows, operands)))
  results = _call(_Function(flat, has_rows, most), leaves)
  return structures[-1].unflatten(results)


@dataclasses.dataclass(frozen=True)
class _Function:
  """A function of arrays, mapped over axes that arrays have in front of their own.

  mapped: for each of these, the innermost first: which arrays have it, and `vmap`'s spmd_axis_name.
  """

  function: Callable
  has_rows: tuple[bool, ...]
  most: int | None
  mapped: tuple[tuple[tuple[bool, ...], Any], ...] = ()

  def __call__(self, *arrays) -> list[jax.Array]:
    function = self.function
    for which, name in self.mapped:
      axes = tuple(0 if has_axis else None for has_axis in which)
      function = jax.vmap(function, in_axes=axes, spmd_axis_name=name)
    return function(*arrays)

  def row_axis(self, i: int) -> int:
    """Which axis of the i-th array are the rows."""
    return sum(which[i] for which, _ in self.mapped)

  def folds(self, arrays, is_mapped) -> bool:
    """Whether one more axis, the first of those arrays that have it, can become rows."""
    first = self.has_rows.index(True)
    if any(m and not r for m, r in zip(is_mapped, self.has_rows, strict=True)):
      return False
    if not is_mapped[first]:  # Only what is added to the matmul's result has it.
      return False
    count = arrays[first].shape[0] * arrays[first].shape[1 + self.row_axis(first)]
    return self.most is None or (isinstance(count, int) and count <= self.most)


def _call(function: _Function, arrays) -> list[jax.Array]:
  return _call_p.bind(*arrays, function=function, jaxpr=jax.make_jaxpr(function)(*arrays))


def _map(axis, arrays, axes, *, function: _Function, jaxpr):
  """The rule of `jax.vmap`."""
  is_mapped = tuple(a is not None for a in axes)
  arrays = [x if a is None else jnp.moveaxis(x, a, 0) for x, a in zip(arrays, axes, strict=True)]
  if not function.folds(arrays, is_mapped):
    function = dataclasses.replace(function, mapped=(*function.mapped, (is_mapped, axis.spmd_name)))
    results = _call(function, arrays)
    return results, [0] * len(results)
  folded, splits = [], []
  for i, x in enumerate(arrays):
    if function.has_rows[i]:
      x = x if is_mapped[i] else jnp.broadcast_to(x[None], (axis.size, *x.shape))
      x, own = _fold(x, function.row_axis(i))
      splits = splits or own
    folded.append(x)
  at = len(function.mapped)
  results = [_unfold(y, at, axis.size, splits) for y in _call(function, folded)]
  return results, [at] * len(results)


def _fold(x: jax.Array, at: int) -> tuple[jax.Array, list]:
  """The first axis and the rows, which come `at` axes later, as one; and what split the two."""
  x = jnp.moveaxis(x, 0, at)
  splits = splits_of(x)
  both = splits[at : at + 2]
  shape = (*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :])
  return reshape(x, shape, [*splits[:at], merge_splits(both), *splits[at + 2 :]]), both


def _unfold(y: jax.Array, at: int, size: int, splits: list) -> jax.Array:
  """The rows, axis `at`, as (size, rows)."""
  own = splits_of(y)
  shape = (*y.shape[:at], size, y.shape[at] // size, *y.shape[at + 1 :])
  return reshape(y, shape, [*own[:at], *unmerge_splits(own[at], splits), *own[at + 1 :]])


def _tangent(primals, tangents, *, function: _Function, jaxpr):
  """The rule of `jax.jvp`, for those arrays that change: zeros would be saved for the backward."""
  places = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]

  def of_changing(*arrays):
    changing = dict(zip(places, arrays, strict=True))
    return function(*(changing.get(i, x) for i, x in enumerate(primals)))

  points, changes = (tuple(all[i] for i in places) for all in (primals, tangents))
  return jax.jvp(of_changing, points, changes)


def _evaluate(*arrays, function: _Function, jaxpr):
  return function(*arrays)


_call_p = Primitive("sbjax_by_rows")
_call_p.multiple_results = True
_call_p.def_impl(_evaluate)
_call_p.def_effectful_abstract_eval(lambda *_, jaxpr, function: (jaxpr.out_avals, jaxpr.effects))
mlir.register_lowering(_call_p, mlir.lower_fun(_evaluate, multiple_results=True))
batching.fancy_primitive_batchers[_call_p] = _map
ad.primitive_jvps[_call_p] = _tangent
