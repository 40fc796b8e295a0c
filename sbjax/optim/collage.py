"""Collage: parameters in bfloat16, and beside them what their rounding loses.

bfloat16 has 8 significant bits. An update smaller than 1/512 of its weight is rounded away. Collage
(Yu et al. 2024, https://arxiv.org/abs/2405.03637) stores a parameter as a sum hi + lo. The model
computes with hi, a bfloat16, and the residual lo collects the updates that hi cannot hold:

  total = hi + lo + D          D is the update that the inner optimizer makes at hi + lo
  hi    = total to bfloat16
  lo    = total - hi

The paper computes in bfloat16. Here all is float32, and each stored number is rounded once. Its
Collage-light and Collage-plus are this with moments that `compress_state` keeps in bfloat16.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sbjax.ops.partition import over_shards, types_vary
from sbjax.optim.stable_adamw import parameter_dtype, states_of

BFLOAT16 = jnp.dtype(jnp.bfloat16)


class CompensatedState(NamedTuple):
  """The state of `compensated`."""

  inner: Any  # the state of the inner optimizer, for float32 parameters
  # A tree like the parameters: bfloat16, or int16 if "exact". int8 zeros for those in float32: a
  # tree with holes would not be like the parameters. None: there is no residual.
  residual: Any
  quality: Any  # float32 []: EDQ of the last update; None: not measured
  lost: Any  # float32 []: see `descent_quality`; None: not measured


def compensated(
  optimizer: optax.GradientTransformation,
  residual: Literal[True, "exact"] | None = True,
  measure: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """An optimizer for parameters in bfloat16, which keeps what their rounding loses.

  The inner optimizer gets gradients in float32, and as parameters the float32 sums hi + lo. So it
  decays the sums, and has moments of float32 unless it says otherwise. `optax.apply_updates` must
  get the updates as they are: put clipping and learning rates inside. A loss scale and
  `optax.masked` go around it.

  Parameters in float32, such as norms and biases beside bfloat16 matrices, are trained as without.

  Args:
    optimizer: any optax transformation.
    residual: True stores lo as bfloat16: hi + lo holds 16 bits or more. "exact" stores the lower
      half of the sum's bits, an int16: hi + lo is a float32. None stores none.
    measure: compute EDQ and the share of lost updates; see `descent_quality`.

  Raises:
    ValueError: another residual; in `init` and `update`, parameters that are neither bfloat16 nor
      float32, or all float32; in `update`, no parameters.

  >>> params = jnp.ones(2, jnp.bfloat16)
  >>> optimizer = compensated(optax.sgd(1e-4))  # A step of bfloat16 below 1 is 0.0039.
  >>> state = optimizer.init(params)
  >>> for _ in range(20):
  ...   updates, state = optimizer.update(jnp.ones(2), state, params)
  ...   params = optax.apply_updates(params, updates)
  >>> params, state.residual
  (Array([0.996094, 0.996094], dtype=bfloat16), Array([0.00191498, 0.00191498], dtype=bfloat16))
  """
  if not (residual is True or residual is None or residual == "exact"):
    raise ValueError(f"{residual=} must be True, 'exact' or None.")
  optimizer = optax.with_extra_args_support(optimizer)

  def wide(p):
    is_shape = isinstance(p, jax.ShapeDtypeStruct)
    return jax.ShapeDtypeStruct(p.shape, jnp.float32) if is_shape else p.astype(jnp.float32)

  def nothing(p):
    dtype = jnp.int16 if residual == "exact" else BFLOAT16
    return jnp.zeros_like(p, dtype if p.dtype == BFLOAT16 else jnp.int8)

  def init(params):
    _check(params)
    low = residual and jax.tree.map(nothing, params)
    measured = (jnp.float32(1), jnp.float32(0)) if measure else (None, None)
    return CompensatedState(optimizer.init(jax.tree.map(wide, params)), low, *measured)

  def update(updates, state, params=None, **extra):
    if params is None:
      raise ValueError("compensated needs the parameters: update(gradients, state, params).")
    _check(params)
    value = _sums(params, state.residual)
    gradients = optax.tree.cast(updates, jnp.float32)
    steps, inner = optimizer.update(gradients, state.inner, value, **extra)
    halves = jax.tree.map(lambda p, v, d: _split(v + d, p, residual), params, value, steps)
    high, low = (jax.tree.map(lambda _, half, i=i: half[i], params, halves) for i in (0, 1))
    low = residual and low
    # p + (hi - p) rounds to hi.
    updates = jax.tree.map(lambda p, hi: hi - p.astype(jnp.float32), params, high)
    measured = _quality(steps, value, _sums(high, low)) if measure else (None, None)
    return updates, CompensatedState(inner, low, *measured)

  return optax.GradientTransformationExtraArgs(init, update)


def descent_quality(opt_state) -> dict[str, jax.Array]:
  """{"edq", "lost"} of the last update, float32 []; empty if none in `opt_state` is measured.

  edq is the paper's effective descent quality, `<D, change of hi + lo> / <D, D>` over all
  parameters; 1 if nothing is lost, and before the first update. The authors' code has the change of
  hi. lost is the share of the numbers whose update is not zero and changed nothing.

  Raises:
    ValueError: several are measured.
  """
  states = [state for state in states_of(CompensatedState, opt_state) if state.quality is not None]
  if len(states) > 1:
    raise ValueError(f"{len(states)} optimizers measure EDQ; only one may.")
  return {"edq": states[0].quality, "lost": states[0].lost} if states else {}


def summed_parameters(params, opt_state):
  """The parameters as float32 sums hi + lo, with the residuals in `opt_state`."""
  params = optax.tree.cast(params, jnp.float32)
  for state in states_of(CompensatedState, opt_state):
    params = _sums(params, state.residual)
  return params


def split_parameters(values, params, opt_state):
  """`params` and `opt_state` whose sums hi + lo are float32 `values`; see `summed_parameters`.

  Without it training starts from the numbers rounded to bfloat16, which no small update of the
  first steps can move.

  Args:
    values: a tree like the parameters, float32.
    params: in the dtypes that they are trained in.
    opt_state: of an optimizer that was initialized with them.

  >>> values, optimizer = jnp.float32([1.001]), compensated(optax.sgd(1e-4))
  >>> params = values.astype(jnp.bfloat16)
  >>> params, state = split_parameters(values, params, optimizer.init(params))
  >>> params, state.residual
  (Array([1], dtype=bfloat16), Array([0.000999451], dtype=bfloat16))
  """

  def halves(low, value, p):
    if not _is_residual(low):
      return p, low
    high, low = _split(value, p, "exact" if low.dtype == jnp.int16 else True)
    return high.astype(p.dtype), low

  def split(state):
    nonlocal params
    if not isinstance(state, CompensatedState):
      return state
    pairs = _map_residual(halves, state.residual, values, params)
    params, low = (
      _map_residual(lambda _, pair, i=i: pair[i], state.residual, pairs) for i in (0, 1)
    )
    return state._replace(residual=low)

  params = jax.tree.map(lambda value, p: value.astype(p.dtype), values, params)
  opt_state = jax.tree.map(split, opt_state, is_leaf=lambda x: isinstance(x, CompensatedState))
  return params, opt_state


def _map_residual(function: Callable, residual, *trees):
  """`jax.tree.map`, where None or a MaskedNode of the residual may stand for a whole subtree."""

  def is_missing(node):
    return node is None or isinstance(node, optax.MaskedNode)

  return jax.tree.map(function, residual, *trees, is_leaf=is_missing)


def _check(params) -> None:
  dtypes = set(map(parameter_dtype, jax.tree.leaves(params)))
  if others := dtypes - {BFLOAT16, jnp.dtype(jnp.float32)}:
    raise ValueError(
      f"Parameters are {', '.join(sorted(d.name for d in others))}: compensated takes bfloat16, and"
      " float32 for those that it leaves as they are."
    )
  if dtypes and BFLOAT16 not in dtypes:
    raise ValueError(
      "bfloat16 parameters wanted and float32 given: cast them, as in jax.tree.map(lambda p:"
      " p.astype(jnp.bfloat16), params), or take the optimizer without compensated."
    )


def _split(total, like, residual) -> tuple[jax.Array, jax.Array | None]:
  """A float32 array as (hi, lo); hi is float32, and a number of the dtype of the parameter `like`.

  Rounds by `reduce_precision`, since XLA may drop a cast to bfloat16 and back.
  """
  if like.dtype != BFLOAT16:
    return total, jnp.zeros_like(total, jnp.int8)
  if residual == "exact":
    return _split_bits(total)
  high = jax.lax.reduce_precision(total, 8, 7)
  if residual is None:
    return high, None
  return high, jax.lax.reduce_precision(total - high, 8, 7).astype(jnp.bfloat16)


def _split_bits(total) -> tuple[jax.Array, jax.Array]:
  """A float32 without the lower half of its bits, which is the nearest bfloat16; and that half.

  Of two it is the larger: an int16 reaches -32768, and not 32768. What is not finite has 0.
  """
  bits = jax.lax.bitcast_convert_type(total, jnp.int32)
  low = ((bits + 0x8000) & 0xFFFF) - 0x8000
  low = jnp.where(jnp.isfinite(total), low, 0)
  high = jax.lax.bitcast_convert_type(bits - low, jnp.float32)
  return jnp.where(jnp.isfinite(total), high, total), low.astype(jnp.int16)


def _is_residual(low) -> bool:
  return hasattr(low, "dtype") and low.dtype != jnp.int8


def _sums(params, residual):
  """hi + lo in float32; hi where there is no lo."""

  def add(low, p):
    high: Any = optax.tree.cast(p, jnp.float32)
    if not _is_residual(low):
      return high
    if low.dtype != jnp.int16:
      return high + low.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(high, jnp.int32) + low.astype(jnp.int32)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)

  return _map_residual(add, residual, params)


def _quality(steps, before, after) -> tuple[jax.Array, jax.Array]:
  """EDQ, and the share of the numbers that their update did not change."""
  axes = jax.sharding.get_abstract_mesh().manual_axes
  if axes and not types_vary(axes):
    raise NotImplementedError(
      "measure=True sums over the shards of a jax.shard_map, and check_vma=False hides which"
      " parameters are shards: take check_vma=True, or measure=False."
    )

  def sums(d, was, now):
    m = now - was
    still = jnp.sum((d != 0) & (m == 0), dtype=jnp.float32)
    each = jnp.stack([jnp.sum(d * d), jnp.sum(d * m), still, jnp.float32(d.size)])
    return over_shards(jax.lax.psum, each)

  leaves = jax.tree.leaves(jax.tree.map(sums, steps, before, after))
  wanted, made, still, count = sum(leaves, jnp.zeros(4, jnp.float32))
  return jnp.where(wanted == 0, 1.0, made / wanted), still / jnp.maximum(count, 1)
