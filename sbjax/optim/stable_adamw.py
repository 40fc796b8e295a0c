"""StableAdamW: AdamW whose rate shrinks for a tensor that its second moment has lost sight of.

Adam divides by the root of the second moment, an average over the past. When gradients grow faster
than it follows, the update is too large: the "stuck in the past" scenario of Wortsman et al. 2023
(https://arxiv.org/abs/2304.13013). Their StableAdamW has one measure for each tensor,
RMS = sqrt(mean(g^2 / u)), and divides the tensor's learning rate by max(1, RMS): the update
clipping of AdaFactor (Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sbjax.ops.adam import Coded, decode, encode, in_groups, out_of_groups, without_dust
from sbjax.ops.dither import halves_swapped, hashed, positions
from sbjax.ops.partition import Axes, is_explicit, is_manual, over_shards
from sbjax.ops.registry import get_backend, has_kernel
from sbjax.quantize import as_floating, floating_dtype


class ScaleByStableAdamState(NamedTuple):
  """The state; in `update` a moment may be in e4m3, a `Coded`, and then so is the new one."""

  count: jax.Array  # int32 []: updates made  # pyright: ignore
  # Trees like the parameters: the first moment, debiased, in the parameter's dtype or `mu_dtype`;
  # the second one, debiased if b2 is a number, in float32.
  mu: optax.Updates
  nu: optax.Updates
  # RMS of the last update, float32 [tensors]; [1] without tensors, as orbax stores no array of
  # size 0. A tree like the parameters would give each of these scalars a matrix's sharding.
  rms: jax.Array


def scale_by_stable_adam(
  b1: jax.typing.ArrayLike = 0.9,
  b2: jax.typing.ArrayLike | optax.Schedule = 0.99,
  eps: jax.typing.ArrayLike = 1e-6,
  mu_dtype: jax.typing.DTypeLike | None = None,
  *,
  weight_decay: optax.ScalarOrSchedule = 0.0,
  mask: Any | Callable[[optax.Params], Any] | None = None,
  decay_with: Literal["clipped", "plain"] = "clipped",
  clip_threshold: jax.typing.ArrayLike = 1.0,
  stacked: Any | Callable[[optax.Params], Any] | None = None,
  axis_name: Axes | None = None,
) -> optax.GradientTransformation:
  """Rescales updates as StableAdamW does, all but the learning rate; see `stable_adamw`.

  >>> optimizer = optax.chain(scale_by_stable_adam(b2=0.95), optax.scale(-1e-3))
  >>> state = optimizer.init({"w": jnp.ones(3)})
  """
  for name, b, kind in (("b1", b1, ""), ("b2", b2, ", or a schedule")):
    if not (kind and callable(b)):
      range_ = f"from 0 to below 1 in float32{kind}"
      _check(name, b, range_, lambda b: 0 <= np.float32(b) < 1)
  _check("eps", eps, "0 or more", lambda e: 0 <= e < jnp.inf)
  _check("clip_threshold", clip_threshold, "above 0", lambda d: d > 0)
  if not callable(weight_decay):
    _check("weight_decay", weight_decay, "a schedule or finite", np.isfinite)
  mu_dtype = None if mu_dtype is None else floating_dtype("mu_dtype", mu_dtype)
  if not isinstance(decay_with, str) or decay_with not in ("clipped", "plain"):
    raise ValueError(f"{decay_with=} is not a rule for weight decay: 'clipped' or 'plain'.")

  def init(params):
    jax.tree.map(parameter_dtype, params)
    axes = leading_axes(stacked, params)
    tensors = jax.tree.map(lambda n, p: math.prod(p.shape[:n]), axes, params)
    return ScaleByStableAdamState(
      count=jnp.zeros([], jnp.int32),
      mu=optax.tree.zeros_like(params, dtype=mu_dtype),
      nu=optax.tree.zeros_like(params, dtype=jnp.float32),
      rms=jnp.zeros(max(sum(jax.tree.leaves(tensors)), 1), jnp.float32),
    )

  def update(updates, state, params=None):
    count = optax.safe_increment(state.count)
    w1 = newest_weight(b1, count)
    # A schedule's average is not debiased.
    w2 = 1 - jnp.asarray(b2(state.count), jnp.float32) if callable(b2) else newest_weight(b2, count)
    g = _map(_as_gradient, updates, state.mu)
    step = functools.partial(_step, count, w1, w2, jnp.asarray(eps, jnp.float32), axis_name)
    stepped = _map(step, g, leading_axes(stacked, g), state.mu, state.nu)
    direction, mu, nu, rms = (_map(lambda g, s, i=i: s[i], g, stepped) for i in range(4))

    def clip(tree):
      divisor = _map(lambda r: jnp.maximum(1.0, r / clip_threshold), rms)
      return _map(lambda x, d: x / jnp.expand_dims(d, range(d.ndim, x.ndim)), tree, divisor)

    def decay(tree):
      if isinstance(weight_decay, int | float) and weight_decay == 0:
        return tree
      if params is None:
        raise ValueError("weight decay needs the parameters: update(gradients, state, params).")
      rate = weight_decay(state.count) if callable(weight_decay) else weight_decay
      add = optax.add_decayed_weights(rate, mask)  # pyright: ignore[reportArgumentType]
      wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
      return add.update(tree, add.init(wide), wide)[0]

    direction = clip(decay(direction)) if decay_with == "clipped" else decay(clip(direction))
    updates = _map(lambda x, g: x.astype(g.dtype), direction, updates)
    return updates, ScaleByStableAdamState(jnp.asarray(count), mu, nu, _numbers(rms))

  return optax.GradientTransformation(init, update)


def stable_adamw(
  learning_rate: optax.ScalarOrSchedule,
  b1: jax.typing.ArrayLike = 0.9,
  b2: jax.typing.ArrayLike | optax.Schedule = 0.99,
  eps: jax.typing.ArrayLike = 1e-6,
  mu_dtype: jax.typing.DTypeLike | None = None,
  weight_decay: optax.ScalarOrSchedule = 1e-4,
  mask: Any | Callable[[optax.Params], Any] | None = None,
  *,
  decay_with: Literal["clipped", "plain"] = "clipped",
  clip_threshold: jax.typing.ArrayLike = 1.0,
  stacked: Any | Callable[[optax.Params], Any] | None = None,
  axis_name: Axes | None = None,
) -> optax.GradientTransformationExtraArgs:
  """StableAdamW, Algorithm 2 of Wortsman et al. 2023, https://arxiv.org/abs/2304.13013.

  For each tensor p with gradient g, at step t, from debiased averages v (`mu`) and u (`nu`) that
  hold g already:

    RMS = sqrt(mean(g^2 / max(u, eps^2)))
    eta = learning_rate / max(1, RMS / clip_threshold)
    p  -= eta * (v / (sqrt(u) + eps) + weight_decay * p)

  With every RMS <= 1 this is `optax.adamw`. All of it is computed in float32, whatever the dtype of
  parameters and gradients; the update has the gradient's dtype.

  Args:
    learning_rate: a number or a schedule.
    b1, b2: decay of the first and the second moment. b2 may be a schedule: a function of the number
      of updates made before, 0 at first. A number is debiased. A schedule's value is used as it is,
      so it should start at 0, as AdaFactor's: `lambda count: 1 - (count + 1.0) ** -0.8`.
    eps: added to the root of the second moment, whose least value it is in the RMS.
    mu_dtype: of the first moment; None is the parameter's. The second is always float32.
    weight_decay: multiplied with the learning rate; a number or a schedule.
    mask: what decays, as a tree of bools that is like the parameters or a prefix of them, or a
      function from parameters to such a tree. Every parameter has moments, decayed or not.
    decay_with: "clipped", the paper's rule above, or "plain", where as in the code of the
      paper's first author the decay is `learning_rate * weight_decay * p`, unclipped.
    clip_threshold: the paper's d = 1. At infinity this is AdamW that shows its RMS.
    stacked: how many leading axes of a leaf number tensors of their own rather than belong to
      one, as the layers that `nn.scan` stacks: an int for each leaf (a prefix does, as for
      `mask`) or a function from parameters to these. Each tensor has its own RMS and rate.
    axis_name: within a `jax.shard_map`, the mesh axes whose devices hold shards of a tensor; the
      RMS is over all of them. None: all axes that a gradient varies over. Say () if each device has
      whole tensors of its own, such as the layers of its stage.

  >>> optimizer, params = stable_adamw(1e-3, b2=0.95, weight_decay=0.2), {"w": jnp.ones(3)}
  >>> updates, state = optimizer.update(params, optimizer.init(params), params)
  >>> optax.apply_updates(params, updates)["w"].round(4)
  Array([0.9988, 0.9988, 0.9988], dtype=float32)
  """
  if not callable(learning_rate):
    _check("learning_rate", learning_rate, "a schedule or finite", np.isfinite)
  scale = scale_by_stable_adam(
    *(b1, b2, eps, mu_dtype),
    weight_decay=weight_decay,
    mask=mask,
    decay_with=decay_with,
    clip_threshold=clip_threshold,
    stacked=stacked,
    axis_name=axis_name,
  )
  return optax.chain(scale, optax.scale_by_learning_rate(learning_rate))


def tensor_rms(
  opt_state, stacked: Any | Callable[[optax.Params], Any] | None = None
) -> dict[str, jax.Array]:
  """The RMS of the last update by the parameter's path, "visual/patch_embedding/kernel".

  The StableAdamW may sit anywhere in `opt_state`, several times too (`optax.multi_transform`);
  without one the dict is empty.

  Args:
    stacked: that of the optimizer. A stack of layers has its RMS in one array, [layers].

  Raises:
    ValueError: the optimizer has another `stacked`.
  """
  found = {}
  for state in states_of(ScaleByStableAdamState, opt_state):
    named, axes = jax.tree.leaves_with_path(state.mu), leading_axes(stacked, state.mu)
    shapes = [m.shape[:n] for (_, m), n in zip(named, jax.tree.leaves(axes), strict=True)]
    (rms,) = jax.tree.leaves(state.rms)
    sizes = [math.prod(shape) for shape in shapes]
    if rms.size != max(sum(sizes), 1):
      raise ValueError(
        f"The optimizer has an RMS for each of {rms.size} tensors, and {stacked=} makes"
        f" {sum(sizes)} of its parameters: give tensor_rms the optimizer's own `stacked`."
      )
    for (path, _), shape, size, end in zip(named, shapes, sizes, np.cumsum(sizes), strict=True):
      name = jax.tree_util.keystr(path, simple=True, separator="/")
      found[name] = rms[end - size : end].reshape(shape)
  return found


def states_of(kind: type, opt_state) -> list:
  """The states of a kind, a NamedTuple, anywhere in an optimizer's state."""

  def is_one(x):
    return isinstance(x, kind)

  return list(filter(is_one, jax.tree.leaves(opt_state, is_leaf=is_one)))


def only_state(kind: type, opt_state, does: str):
  """The one state of a kind, or None; a ValueError if several optimizers do what that `does`."""
  found = states_of(kind, opt_state)
  if len(found) > 1:
    raise ValueError(f"{len(found)} optimizers {does}; only one, the outermost, may.")
  return found[0] if found else None


def _check(name: str, value, range_: str, fits: Callable) -> None:
  """Raises a ValueError for a number beyond its range; `optax.inject_hyperparams` gives arrays."""
  is_number = isinstance(value, int | float | np.number) and not isinstance(value, complex)
  if not isinstance(value, jax.Array | np.ndarray) and not (is_number and fits(value)):
    raise ValueError(f"{name}={value!r} must be a number, {range_}.")


def parameter_dtype(p) -> jnp.dtype:
  """The dtype of a parameter, an array or its shape from `jax.eval_shape`; floating point."""
  is_shape = isinstance(p, jax.ShapeDtypeStruct)
  return as_floating("a parameter", np.zeros((), p.dtype) if is_shape else p).dtype


def leading_axes(stacked, tree):
  """How many leading axes of each leaf number tensors of their own, by `stable_adamw`'s `stacked`.

  Raises:
    ValueError: a leaf does not have so many axes.
  """

  def checked(axes, x) -> int:
    if not isinstance(axes, int) or not 0 <= axes <= x.ndim:
      raise ValueError(f"stacked={axes!r} must be a number of leading axes of {x.shape}.")
    return axes

  if not jax.tree.leaves(tree):  # An empty group, or what optax.tree_map_params initializes with.
    return tree
  if stacked is None:
    return jax.tree.map(lambda _: 0, tree)
  leaves = jax.tree.leaves(stacked)  # A module is a tree, and may be callable as well.
  axes = stacked(tree) if leaves and all(map(callable, leaves)) else stacked
  return jax.tree.map(checked, jax.tree.broadcast(axes, tree), tree)


def _as_gradient(g, m) -> jax.Array:
  """g in float32; a ValueError unless it is floating point and of its parameter's shape."""
  g = as_floating("a gradient", g)
  if g.shape != m.shape:
    raise ValueError(f"A gradient {g.shape} must have its parameter's shape {m.shape}.")
  return g.astype(jnp.float32)


def newest_weight(b, count):
  """Weight of the newest value in a debiased average: the paper's 1 - beta_hat, 1 at step 1.

  `(1 - b) / (1 - b^count)`, through expm1 since 1 - 0.999^count would lose half of its digits.
  """
  b = jnp.asarray(b, jnp.float32)
  return (1 - b) / -jnp.expm1(count.astype(jnp.float32) * jnp.log(b))


def _step(count, w1, w2, eps, axis_name, g, axes, mu, nu):
  """A leaf's unscaled direction, its new moments as they are kept, and its RMS."""
  m = (1 - w1) * _decoded(mu) + w1 * g
  n = (1 - w2) * _decoded(nu) + w2 * g**2
  rms = _rms(g, n, eps, axes, axis_name)
  if isinstance(mu, Coded) and isinstance(nu, Coded):
    operands = in_groups(g), *(x._replace(values=in_groups(x.values)) for x in (mu, nu))
    operands += (positions(count, operands[0].shape, axes)[..., 0],)
    weights = jnp.stack([w1, w2, jnp.asarray(eps, jnp.float32)])
    if has_kernel("adam_direction", weights, *operands) and _are_whole(operands[0].shape[-2]):
      # The RMS reads nu before the kernel overwrites it: else XLA might copy nu.
      weights, rms = jax.lax.optimization_barrier((weights, rms))
      direction, *new = get_backend().adam_direction(weights, *operands)
      mu, nu = (x._replace(values=out_of_groups(x.values, g)) for x in new)
      return out_of_groups(direction, g), mu, nu, rms
  direction = m / (jnp.sqrt(n) + eps)
  chance = hashed(positions(count, g.shape, axes))
  m = without_dust(m, n) if isinstance(mu, Coded) else m
  return direction, _like(mu, m, chance), _like(nu, n, halves_swapped(chance)), rms


def _are_whole(groups: int) -> bool:
  """Whether no mesh can split this number of groups of 128 amid a group.

  XLA decides about shardings later, and cannot give parts of a group to a kernel. A number of
  devices that divides 128 `groups` divides `groups`, too, if its power of two does.
  """
  mesh = jax.sharding.get_abstract_mesh()
  devices = jax.device_count() if mesh.empty else mesh.size
  return is_manual() or groups % 2 ** (devices.bit_length() - 1) == 0


def _decoded(moment) -> jax.Array:
  return decode(moment) if isinstance(moment, Coded) else moment.astype(jnp.float32)


def _like(old, moment, chance):
  return encode(moment, chance) if isinstance(old, Coded) else moment.astype(old.dtype)


def _rms(g, nu, eps, axes: int, axis_name):
  """The paper's sqrt(mean(g^2 / max(u, eps^2))), with the root inside: eps^2 may underflow."""
  if not g.size:
    return jnp.zeros(g.shape[:axes], jnp.float32)
  squares = jnp.mean((g / jnp.maximum(jnp.sqrt(nu), eps)) ** 2, range(axes, g.ndim))
  return jnp.sqrt(over_shards(jax.lax.pmean, squares, axis_name))  # Shards have equal sizes.


def _numbers(tree) -> jax.Array:
  """The numbers in a tree as one vector."""
  parts = [x.reshape(-1) for x in jax.tree.leaves(tree)] or [jnp.zeros(1, jnp.float32)]
  if is_explicit():
    parts = [jax.sharding.reshard(x, jax.sharding.PartitionSpec(None)) for x in parts]
  return jnp.concatenate(parts)


def _map(f, tree, *rest):
  """`jax.tree.map` that keeps a None in `tree`, as optax does: it has no gradient."""
  return jax.tree.map(
    lambda x, *xs: None if x is None else f(x, *xs), tree, *rest, is_leaf=lambda x: x is None
  )
