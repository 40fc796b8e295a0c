"""How the layout of a `Frozen` weight follows that of the floats: transposed, sliced, gathered.

A companion of an array has its axes: of the array's size, or of 1 where the values along an axis
share one number. Scales are companions of 8-bit values.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from sbjax.linear.frozen import Frozen

_SAME = {"copy", "name", "CheckpointName", "stop_gradient", "optimization_barrier", "device_put"}
_SPLITS = {"sharding_constraint", "reshard", "pvary", "pcast"}  # Hints for a mesh: left out.


def follows(eqn) -> bool:
  """Whether `moved` knows the equation's layout."""
  return eqn.primitive.name in {*_SAME, *_SPLITS, *_MOVES, "convert_element_type"}


def takes_rows(eqn) -> bool:
  """Whether a gather is `jnp.take` along an axis."""
  dims, shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
  rows = dims.start_index_map
  others = [size for axis, size in enumerate(shape) if axis not in rows]
  sizes = [size for axis, size in enumerate(eqn.params["slice_sizes"]) if axis not in rows]
  is_plain = len(rows) == 1 and dims.collapsed_slice_dims == rows and sizes == others
  return is_plain and not dims.operand_batching_dims


def moved(eqn, weight: Frozen, others) -> list[Frozen]:
  """The equation's results, of a weight in 8 bits and the operands after it."""
  name = eqn.primitive.name
  if name == "convert_element_type":
    return [dataclasses.replace(weight, dtype=jnp.dtype(eqn.params["new_dtype"]))]
  if name in _SAME | _SPLITS:
    return [weight]
  move, shape = _MOVES[name], weight.shape
  leaves, tree = jax.tree.flatten((weight.values, weight.scale))
  parts = zip(*(move(leaf, shape, eqn, others) for leaf in leaves), strict=True)
  pairs = [tree.unflatten(part) for part in parts]
  return [dataclasses.replace(weight, values=values, scale=scale) for values, scale in pairs]


# Each takes a companion of an array of that shape (or the array), and returns the results' ones.


def _slice(x, shape, eqn, others) -> list:
  starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
  strides = eqn.params["strides"] or (1,) * len(shape)
  cuts = [
    slice(*cut) if size == whole else slice(None)
    for *cut, size, whole in zip(starts, limits, strides, x.shape, shape, strict=True)
  ]
  return [x[tuple(cuts)]]


def _dynamic_slice(x, shape, eqn, others) -> list:
  zero = jnp.zeros((), others[0].dtype)
  varies = [size == whole for size, whole in zip(x.shape, shape, strict=True)]
  starts = [jnp.asarray(s) if v else zero for s, v in zip(others, varies, strict=True)]
  sizes = [n if v else 1 for n, v in zip(eqn.params["slice_sizes"], varies, strict=True)]
  return [jax.lax.dynamic_slice(x, starts, sizes)]


def _gather(x, shape, eqn, others) -> list:
  """Matrices of a stack, as `takes_rows` has them."""
  (indices,), params = others, eqn.params | {"fill_value": None}
  dims = params["dimension_numbers"]
  (rows,) = dims.start_index_map
  if x.shape[rows] != shape[rows]:  # All share what x says.
    added = [a for a in range(len(eqn.outvars[0].aval.shape)) if a not in dims.offset_dims]
    return [jnp.expand_dims(jax.lax.squeeze(x, [rows]), added)]
  sizes = [1 if axis == rows else size for axis, size in enumerate(x.shape)]
  return [jax.lax.gather(x, indices, **(params | {"slice_sizes": sizes}))]


def _split(x, shape, eqn, others) -> list:
  axis, sizes = eqn.params["axis"], eqn.params["sizes"]
  if x.shape[axis] != shape[axis]:
    return [x] * len(sizes)
  return list(jax.lax.split(x, sizes, axis))


def _unstack(x, shape, eqn, others) -> list:
  axis, count = eqn.params["axis"], len(eqn.outvars)
  places = range(count) if x.shape[axis] == shape[axis] else [0] * count
  return [jax.lax.index_in_dim(x, i, axis, keepdims=False) for i in places]


def _broadcast_in_dim(x, shape, eqn, others) -> list:
  """Adds axes of size 1: a repeated row is no weight."""
  result = [1] * len(eqn.params["shape"])
  for axis, size in zip(eqn.params["broadcast_dimensions"], x.shape, strict=True):
    result[axis] = size
  return [x.reshape(result)]


def _reshape(x, shape, eqn, others) -> list:
  """Group by group of axes that become other axes of the same size together."""
  middle, result = [], []
  for before, after in _groups(shape, eqn.outvars[0].aval.shape):
    whole, own = [shape[a] for a in before], [x.shape[a] for a in before]
    shared = all(size == 1 for size in own)
    middle += own if shared else whole
    result += [1] * len(after) if shared else after
  return [jnp.broadcast_to(x, middle).reshape(result)]


def _groups(before, after) -> list[tuple[list[int], list[int]]]:
  """The smallest groups of neighbouring axes of one size: (axes before, sizes after)."""
  groups, i, j = [], 0, 0
  while i < len(before) or j < len(after):
    axes, sizes = [i] if i < len(before) else [], [*after[j : j + 1]]
    own, i, j = math.prod(before[a] for a in axes), i + 1, j + 1
    while own != math.prod(sizes):
      if own < math.prod(sizes):
        axes, own, i = [*axes, i], own * before[i], i + 1
      else:
        sizes, j = [*sizes, after[j]], j + 1
    groups.append((axes, sizes))
  return groups


_MOVES = {
  "transpose": lambda x, shape, eqn, others: [x.transpose(eqn.params["permutation"])],
  "squeeze": lambda x, shape, eqn, others: [jax.lax.squeeze(x, eqn.params["dimensions"])],
  "rev": lambda x, shape, eqn, others: [jax.lax.rev(x, eqn.params["dimensions"])],
  "slice": _slice,
  "dynamic_slice": _dynamic_slice,
  "gather": _gather,
  "split": _split,
  "unstack": _unstack,
  "broadcast_in_dim": _broadcast_in_dim,
  "reshape": _reshape,
}
