"""States of earlier versions, whose StableAdamW had its RMS in a tree like the parameters."""

from typing import Any

import jax
import jax.numpy as jnp

from sbjax.optim.stable_adamw import ScaleByStableAdamState, leading_axes
from train.optimizer import stacked


def older(like) -> Any:
  """`like`, shapes with shardings, as an earlier version saved it; None if that is the same."""
  found = _changed(_rms_by_parameter, like)
  return None if jax.tree.structure(found) == jax.tree.structure(like) else found


def newer(state, like) -> Any:
  """A state that was restored as `older(like)`, as `like`."""
  state = _changed(lambda node: node._replace(rms=_vector(node.rms)), state)
  return jax.tree.map(lambda x, shape: jax.device_put(x, shape.sharding), state, like)


def _changed(change, tree) -> Any:
  def is_state(node):
    return isinstance(node, ScaleByStableAdamState)

  return jax.tree.map(lambda node: change(node) if is_state(node) else node, tree, is_leaf=is_state)


def _rms_by_parameter(node: ScaleByStableAdamState) -> ScaleByStableAdamState:
  def shape(axes, moment):
    return jax.ShapeDtypeStruct(moment.shape[:axes], jnp.float32, sharding=node.rms.sharding)

  return node._replace(rms=jax.tree.map(shape, leading_axes(stacked, node.mu), node.mu))


@jax.jit
def _vector(tree) -> jax.Array:
  return jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(tree)])
