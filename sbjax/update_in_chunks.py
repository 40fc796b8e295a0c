"""Updates large stacks of layers a few layers at a time.

`nn.scan` stacks the parameters of all layers in one array, [layers, ...]. An optimizer updates a
leaf at once, and what it cannot fuse it writes to memory: of an 8-bit state XLA for GPUs (jax 0.10
to 0.12) writes both new moments in float32, 5 GB for an MLP kernel of ViT-bigG. In a loop over
chunks of layers it writes those of a chunk, and state and updates are overwritten in place.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

_CHUNK_BYTES = 2**26  # The most that a chunk of a leaf takes, if that is a layer or more.


def update_in_chunks(optimizer: optax.GradientTransformationExtraArgs, stacked):
  """An optimizer that updates every stack of more than 64 MB in a loop.

  optimizer: treats the layers of a stack apart. A leaf of its state is [layers, ...] like a stack,
    or something that all layers share, such as a count.
  stacked: how many leading axes of a leaf number tensors of their own; see `stable_adamw`.
  """

  def update(updates, state, params=None, **extra):
    chunks = _chunks(updates, stacked)
    if not chunks:
      return optimizer.update(updates, state, params, **extra)
    held, made, changed = _leaves(state), {}, {}
    others = _leaves(updates).keys() - chunks.keys()
    parts = [(others, None), *(({path}, layers) for path, layers in chunks.items())]
    for paths, layers in parts:
      mine, theirs = _only(paths, updates), _only(paths, params)
      like = jax.eval_shape(optimizer.init, mine if params is None else theirs)
      old = jax.tree_util.tree_map_with_path(lambda path, _: held[path], like)
      run = optimizer.update if layers is None else functools.partial(_loop, optimizer, layers)
      mine, new = run(mine, old, theirs, **extra)
      made, changed = made | _leaves(mine), changed | _leaves(new)
    return _with_leaves(updates, made), _with_leaves(state, changed)

  return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _loop(optimizer, layers: int, updates, state, params, **extra):
  """An update of stacks of layers, `layers` at a time; the stacks are overwritten in place."""
  stack = jax.tree.leaves(updates)[0]

  def slices(tree, start):
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, layers), tree)

  piece = jax.eval_shape(lambda tree: optimizer.init(slices(tree, 0)), updates)
  is_stack = jax.tree.map(lambda x, part: x.shape != part.shape, state, piece)

  def body(i, carry):
    updates, new = carry
    start = i * layers

    def put(stack, part):
      return jax.lax.dynamic_update_slice_in_dim(stack, part, start, 0)

    # What no layer has of its own, such as a count, is the old for every chunk.
    now = jax.tree.map(lambda s, x, old: slices(x, start) if s else old, is_stack, new, state)
    part, now = optimizer.update(slices(updates, start), now, slices(params, start), **extra)
    new = jax.tree.map(lambda s, x, y: put(x, y) if s else y, is_stack, new, now)
    return jax.tree.map(put, updates, part), new

  return jax.lax.fori_loop(0, len(stack) // layers, body, (updates, state))


def _chunks(updates, stacked) -> dict[tuple, int]:
  """{path: how many layers to update at a time} of the stacks above _CHUNK_BYTES."""

  def layers(axes, x):
    if not axes or x.dtype != jnp.float32 or x.nbytes <= _CHUNK_BYTES:
      return 0
    most = max(1, _CHUNK_BYTES * len(x) // x.nbytes)
    return largest_divisor(len(x), most) % len(x)

  found = _leaves(map_with_axes(layers, stacked, updates))
  return {path: count for path, count in found.items() if count}


def map_with_axes(function: Callable, stacked, tree):
  """A tree of `function(axes, leaf)`, with the number of leading axes that `stacked` says."""
  axes = stacked(tree) if callable(stacked) else 0 if stacked is None else stacked
  return jax.tree.map(
    lambda n, part: jax.tree.map(functools.partial(function, n), part), axes, tree
  )


def largest_divisor(n: int, most: int) -> int:
  """The largest divisor of n up to `most`."""
  return next(d for d in range(min(n, most), 0, -1) if n % d == 0)


def _leaves(tree) -> dict[tuple, Any]:
  return dict(jax.tree_util.tree_leaves_with_path(tree))


def _with_leaves(tree, leaves: dict[tuple, Any]):
  return jax.tree_util.tree_map_with_path(lambda path, _: leaves[path], tree)


def _only(paths, tree):
  return jax.tree_util.tree_map_with_path(lambda path, x: x if path in paths else None, tree)
