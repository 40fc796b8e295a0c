"""An average of the parameters over the steps, which often scores better than the last ones.

  average = (1 - w) * average + w * parameters, w = (1 - decay) / (1 - decay^n) after update n

So it weighs the parameters after update i by decay^(n - i), and those before the first by 0.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sbjax.optim.collage import summed_parameters
from sbjax.optim.stable_adamw import newest_weight, only_state


class AveragedState(NamedTuple):
  """The state of `averaged`."""

  inner: Any  # the state of the inner optimizer
  count: jax.Array  # int32 []: updates made  # pyright: ignore
  average: Any  # float32, a tree like the parameters; zeros before the first update


def averaged(
  optimizer: optax.GradientTransformation, decay: float
) -> optax.GradientTransformationExtraArgs:
  """An optimizer that keeps an exponential moving average of the parameters; put it outermost.

  Its updates are those of the optimizer, and `optax.apply_updates` must get them as they are.
  Parameters of `compensated` count with what their rounding loses.

  Raises:
    ValueError: a decay that is not from 0 to below 1; in `update`, no parameters.

  >>> params, optimizer = jnp.ones(1), averaged(optax.sgd(1.0), 0.5)
  >>> state = optimizer.init(params)
  >>> for _ in range(2):  # To 0 and -1, with the weights 1/3 and 2/3.
  ...   updates, state = optimizer.update(jnp.ones(1), state, params)
  ...   params = optax.apply_updates(params, updates)
  >>> average_of(state).round(3)
  Array([-0.667], dtype=float32)
  """
  if not 0 <= np.float32(decay) < 1:
    raise ValueError(f"{decay=} must be from 0 to below 1 in float32.")
  optimizer = optax.with_extra_args_support(optimizer)

  def init(params):
    average = optax.tree.zeros_like(params, dtype=jnp.float32)
    return AveragedState(optimizer.init(params), jnp.zeros([], jnp.int32), average)

  def update(updates, state, params=None, **extra):
    if params is None:
      raise ValueError("averaged needs the parameters: update(gradients, state, params).")
    updates, inner = optimizer.update(updates, state.inner, params, **extra)
    count = jnp.asarray(optax.safe_increment(state.count))
    w = newest_weight(decay, count)
    values = summed_parameters(optax.apply_updates(params, updates), inner)
    average = jax.tree.map(lambda a, p: (1 - w) * a + w * p, state.average, values)
    return updates, AveragedState(inner, count, average)

  return optax.GradientTransformationExtraArgs(init, update)


def average_of(opt_state):
  """The average that an `averaged` in `opt_state` keeps; None if there is none.

  Raises:
    ValueError: there are several.
  """
  state = only_state(AveragedState, opt_state, "keep an average")
  return None if state is None else state.average
