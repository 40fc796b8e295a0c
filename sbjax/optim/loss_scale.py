"""Loss scales: training in float16, whose gradients underflow below 2^-24.

The loss is multiplied before it is differentiated, and the optimizer divides the gradients. A scale
that is too large makes some of them infinite. What is skipped then is the difference:

- `fixed_loss_scale`, section 3.6 of Wortsman et al. 2023 (https://arxiv.org/abs/2304.13013): the
  scale stays, and only tensors whose own gradient is not finite are skipped.
- `dynamic_loss_scale`, as PyTorch's GradScaler: the whole step is skipped and the scale halved.

  scale = loss_scale(opt_state)
  loss, scaled = jax.value_and_grad(lambda params: loss_of(params) * scale)(params)
  updates, opt_state = optimizer.update(scaled, opt_state, params)
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sbjax.ops.partition import Axes, over_shards
from sbjax.optim.stable_adamw import leading_axes, only_state
from sbjax.optim.state_formats import CompressedState, join_details, split_details


class LossScaleState(NamedTuple):
  """The state of an optimizer with a loss scale."""

  inner_state: Any
  scale: jax.Array  # float32 []
  finite_steps: jax.Array  # int32 []: since the scale changed, or a step was skipped
  skipped: jax.Array  # int32 []: tensors (fixed) or steps (dynamic) skipped so far


def fixed_loss_scale(
  optimizer: optax.GradientTransformation,
  scale: float = 65_536.0,
  *,
  stacked: Any | Callable[[optax.Params], Any] | None = None,
  axis_name: Axes | None = None,
) -> optax.GradientTransformationExtraArgs:
  """An optimizer of gradients `scale` times too large, which skips tensors that are not finite.

  A skipped tensor has no update and keeps its moments; its RMS reads 0. Counts, and with them bias
  corrections and schedules, go on. Other tensors are updated as if its gradient were 0.

  Args:
    optimizer: any optax transformation; what its state has of a parameter, it has in a tree like
      the parameters.
    scale: what the loss was multiplied with; a power of two rounds nothing.
    stacked, axis_name: those of `stable_adamw`. A tensor is skipped on all devices that hold it.

  Raises:
    ValueError: a scale that is not positive and finite.

  >>> optimizer, params = fixed_loss_scale(optax.adam(0.1)), {"a": jnp.ones(2), "b": jnp.ones(2)}
  >>> gradients = {"a": jnp.array([1.0, jnp.inf]), "b": jnp.array([1.0, 2.0])}
  >>> updates, state = optimizer.update(gradients, optimizer.init(params), params)
  >>> updates["a"], state.skipped
  (Array([0., 0.], dtype=float32), Array(1, dtype=int32))
  """
  _check("scale", scale, 0)
  optimizer = optax.with_extra_args_support(optimizer)

  def update(updates, state, params=None, **extra):
    axes = leading_axes(stacked, updates)
    finite = jax.tree.map(functools.partial(_are_finite, axis_name), axes, updates)
    zeros = optax.tree.zeros_like(updates)
    gradients = _unscaled(_where(finite, updates, zeros), state.scale)
    updates, inner = optimizer.update(gradients, state.inner_state, params, **extra)
    inner = _where_like(gradients, finite, inner, state.inner_state)
    skipped = sum(jnp.sum(~ok, dtype=jnp.int32) for ok in jax.tree.leaves(finite))
    steps = jnp.where(skipped == 0, state.finite_steps + 1, 0)
    state = LossScaleState(inner, state.scale, steps, state.skipped + skipped)
    return _where(finite, updates, zeros), state

  return optax.GradientTransformationExtraArgs(_init(optimizer, scale), update)


def dynamic_loss_scale(
  optimizer: optax.GradientTransformation,
  initial: float = 65_536.0,
  *,
  factor: float = 2.0,
  interval: int = 2000,
  axis_name: Axes | None = None,
) -> optax.GradientTransformationExtraArgs:
  """An optimizer of scaled gradients, which skips steps that are not finite and adapts the scale.

  A skipped step leaves the inner state as it was, and divides the scale by `factor`, not below 1.
  After `interval` steps without a skip the scale is multiplied by `factor`, up to 2^126.

  >>> optimizer = dynamic_loss_scale(optax.adam(0.1))
  >>> state = optimizer.init(jnp.ones(2))
  >>> optimizer.update(jnp.array([jnp.inf, 1.0]), state)[1].scale
  Array(32768., dtype=float32)

  Args:
    optimizer: any optax transformation.
    initial, factor, interval: of the scale.
    axis_name: that of `stable_adamw`; these devices skip a step together.

  Raises:
    ValueError: an initial scale that is not positive and finite, a factor of 1 or less, or an
      interval below 1.
  """
  _check("initial", initial, 0)
  _check("factor", factor, 1)
  _check("interval", interval, 0)
  optimizer = optax.with_extra_args_support(optimizer)

  def update(updates, state, params=None, **extra):
    each = [_are_finite(axis_name, 0, g) for g in jax.tree.leaves(updates)]
    finite = functools.reduce(jnp.logical_and, each, jnp.bool_(True))
    zeros = optax.tree.zeros_like(updates)
    gradients = _unscaled(optax.tree.where(finite, updates, zeros), state.scale)
    updates, inner = optimizer.update(gradients, state.inner_state, params, **extra)
    steps = jnp.where(finite, state.finite_steps + 1, 0)
    grows = steps >= interval
    larger = jnp.where(grows, jnp.minimum(state.scale * factor, 2.0**126), state.scale)
    smaller = jnp.maximum(state.scale / factor, jnp.minimum(state.scale, 1.0))
    return optax.tree.where(finite, updates, zeros), LossScaleState(
      inner_state=optax.tree.where(finite, inner, state.inner_state),
      scale=jnp.where(finite, larger, smaller),
      finite_steps=jnp.where(grows, 0, steps),
      skipped=state.skipped + (~finite).astype(jnp.int32),
    )

  return optax.GradientTransformationExtraArgs(_init(optimizer, initial), update)


def loss_scale(opt_state) -> jax.Array | None:
  """What to multiply the next step's loss with; None if no optimizer in it scales."""
  state = only_state(LossScaleState, opt_state, "scale the loss")
  return None if state is None else state.scale


def skipped_updates(opt_state) -> jax.Array | None:
  """How many tensors (`fixed_loss_scale`) or steps (`dynamic_loss_scale`) were skipped so far."""
  state = only_state(LossScaleState, opt_state, "scale the loss")
  return None if state is None else state.skipped


def _init(optimizer, scale: float):
  def init(params):
    zeros = (jnp.zeros([], jnp.int32) for _ in range(2))  # A buffer each: a state may be donated.
    return LossScaleState(optimizer.init(params), jnp.float32(scale), *zeros)

  return init


def _check(name: str, value, above: float) -> None:
  with np.errstate(over="ignore"), contextlib.suppress(OverflowError):  # Of an int such as 10**400.
    if isinstance(value, int | float | np.number) and above < np.float32(value) < np.inf:
      return
  raise ValueError(f"{name}={value!r} must be a finite number above {above} in float32.")


def _are_finite(axis_name: Axes | None, axes: int, g) -> jax.Array:
  """Whether tensors are finite, on all devices that hold shards of them; bool, of g's `axes`."""
  finite = jnp.all(jnp.isfinite(g), range(axes, g.ndim))
  return over_shards(jax.lax.pmin, finite.astype(jnp.int32), axis_name) > 0


def _unscaled(gradients, scale):
  """Gradients of the loss, in float32: unscaled they may be too small for 16 bits."""
  return jax.tree.map(lambda g: g.astype(jnp.float32) / scale, gradients)


def _where(finite, tree, other):
  """Leaves of `tree` for tensors that are finite, else of `other`; `finite` may be a prefix."""

  def select(ok, x, y):
    return jnp.where(ok.reshape(ok.shape + (1,) * (x.ndim - ok.ndim)), x, y)

  return jax.tree.map(select, jax.tree.broadcast(finite, tree), tree, other)


def _where_like(params, finite, state, other):
  """`_where` in each part of a state that is a tree like the parameters; else `state`."""
  structure, leaves = jax.tree.structure(params), jax.tree.leaves(params)
  flags = jax.tree.leaves(finite)

  def fits(p, ok, part):
    """Whether a part has the shape of its parameter, or a number for each tensor; or nothing."""
    shape, is_int32 = getattr(part, "shape", None), getattr(part, "dtype", None) == jnp.int32
    is_count = is_int32 and shape == ()
    return not jax.tree.leaves(part) or (shape in (p.shape, ok.shape) and not is_count)

  def is_like(node):
    try:
      parts = structure.flatten_up_to(node)
    except ValueError:
      return False
    return all(map(fits, leaves, flags, parts))

  def select(new, old):
    if isinstance(new, CompressedState):
      joined = map(join_details, (new, old))
      return split_details(_where_like(params, finite, *joined), new.count)
    return _where(finite, new, old) if is_like(new) else new

  return jax.tree.map(
    select, state, other, is_leaf=lambda node: isinstance(node, CompressedState) or is_like(node)
  )
