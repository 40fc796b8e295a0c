"""Optimizer states in 8 or 16 bits: a `Format` says how the optimizer keeps a moment.

Adam keeps two moments of 4 bytes a parameter. They are read and written once a step, so they may
be stored in fewer bits: decode, update in float32, encode. `compress_state` does that around any
optax transformation. The update uses the new moments before they are rounded, as in COAT and
FP8-LM. They are rounded by chance (`sbjax.ops.dither`), except BFLOAT16_PAIR: to the nearest number
they would stop to decay.

XLA updates all but E4M3_EXPANDED in place. So StableAdamW takes these coded, for the kernel of
`sbjax.ops.adam.adam_direction`.

  format          bytes   a number is stored as
  FLOAT32         4       itself
  BFLOAT16        2       bfloat16
  BFLOAT16_PAIR   4       the sum of two bfloat16, a float32: 16 bits of its significand
  E4M3_EXPANDED   1.0625  e4m3, after a power that stretches its group of 128 over e4m3's range
  E4M3_SCALED     1       e4m3, times a power of two that its tensor shares
  FLOAT16_SCALED  2       float16, times a power of two that its tensor shares

E4M3_EXPANDED is COAT's (Xi et al. 2024, https://arxiv.org/abs/2410.19313) with two numbers a group
instead of three, in groups along the last axis. FP8-LM (Peng et al. 2023,
https://arxiv.org/abs/2310.18313) has E4M3_SCALED for the first moment and FLOAT16_SCALED for the
second.
"""

import functools
import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sbjax.ops import adam as expansion
from sbjax.ops.adam import Coded
from sbjax.ops.dither import hashed, positions, round_by_chance
from sbjax.ops.partition import Axes, over_shards
from sbjax.optim.stable_adamw import ScaleByStableAdamState, leading_axes
from sbjax.quantize import E4M3, abs_or_inf, format_of


class Format(NamedTuple):
  """How an array is stored: `decode(encode(x, axes, axis_name, chance))` is close to x, float32.

  axes: how many leading axes of x number tensors of their own; axis_name: see `stable_adamw`.
  chance: of `sbjax.ops.dither.round_by_chance`, like x; None rounds to the nearest.
  """

  encode: Callable[..., Coded]
  decode: Callable[[Coded], jax.Array]


class CompressedState(NamedTuple):
  """The state of `compress_state`: arrays of the parameters' shapes, and beside them their scales.

  Frameworks shard and store whatever is like the parameters as the parameters; scales are not.
  """

  inner_state: Any  # the optimizer's, with arrays in the dtypes of their formats
  # {number of a leaf of inner_state: Coded.details}, for those that have any; a zero if none has.
  details: Any
  count: jax.Array  # int32 []: updates made  # pyright: ignore


def compress_state(
  optimizer: optax.GradientTransformation,
  *,
  min_size: int = 4096,
  stacked: Any | Callable[[optax.Params], Any] | None = None,
  axis_name: Axes | None = None,
  mask: Any | Callable[[optax.Params], Any] | None = None,
  **formats: Format,
) -> optax.GradientTransformationExtraArgs:
  """An optimizer that keeps the named fields of its state in other formats.

  A field is one of a NamedTuple anywhere in the state, such as `mu` and `nu` of `stable_adamw`,
  `optax.adamw` and `optax.contrib.muon`. Each must hold a tree like the parameters.

  A NaN or an infinity stays visible: it decodes to NaN, and with it all of its group
  (E4M3_EXPANDED) or tensor (the scaled formats). BFLOAT16 keeps both as they are.

  Args:
    optimizer: any optax transformation.
    min_size: tensors with fewer elements stay as they are: norms, biases, logit scales.
    stacked, axis_name: those of `stable_adamw`.
    mask: what is stored in these formats, as a tree of bools that is like the parameters or a
      prefix of them, or a function from parameters to such a tree. None: everything.
    **formats: a Format for each name of a field.

  Raises:
    ValueError: something that is no Format; in `init`, a field that the state does not have.

  >>> from sbjax.optim.state_formats import E4M3_EXPANDED
  >>> optimizer = compress_state(optax.adamw(1e-3), mu=E4M3_EXPANDED, nu=E4M3_EXPANDED)
  >>> state = optimizer.init({"w": jnp.ones((64, 128))})
  >>> sum(x.nbytes for x in jax.tree.leaves(state)) / (64 * 128)  # With 4 bytes of each count.
  2.1259765625
  """
  for name, one in formats.items():
    if not isinstance(one, Format):
      raise ValueError(f"{name}={one!r} is no Format: take one of {', '.join(FORMATS)}.")
  optimizer = optax.with_extra_args_support(optimizer)
  options = stacked, min_size, axis_name, mask
  decode = functools.partial(_in_fields, formats, _decode)
  first = functools.partial(_in_fields, formats, functools.partial(_encode_first, *options))

  def init(params):
    state = optimizer.init(params)
    names = _field_names(state)
    for name in formats:
      if name not in names:
        raise ValueError(f"No state of the optimizer has a field {name!r}: {', '.join(names)}.")
    # The moments are zeros. XLA would encode them while it compiles, number by number.
    state = first(jax.tree.map(jax.lax.optimization_barrier, state))
    return split_details(state, jnp.zeros([], jnp.int32))

  def update(updates, state, params=None, **extra):
    old, count = join_details(state), optax.safe_increment(state.count)
    updates, new = optimizer.update(updates, decode(old), params, **extra)
    encode = functools.partial(_encode, count, *options)
    return updates, split_details(_in_fields(formats, encode, old, new), jnp.asarray(count))

  return optax.GradientTransformationExtraArgs(init, update)


def join_details(state: CompressedState):
  """The inner state, with a Coded where an array has details."""
  details = state.details if isinstance(state.details, dict) else {}
  leaves, structure = jax.tree.flatten(state.inner_state)
  return structure.unflatten(
    Coded(x, details[str(i)]) if str(i) in details else x for i, x in enumerate(leaves)
  )


def split_details(state, count, nothing: Any = None) -> CompressedState:
  """What `join_details` joins; `nothing` is for no details at all."""
  leaves, structure = jax.tree.flatten(state, is_leaf=_is_coded)
  details = {str(i): x.details for i, x in enumerate(leaves) if _is_coded(x)}
  arrays = structure.unflatten(x.values if _is_coded(x) else x for x in leaves)
  # Not an empty dict: optax.tree_map_params compares with the state of no parameters.
  nothing = jnp.zeros([], jnp.float32) if nothing is None else nothing
  return CompressedState(arrays, details or nothing, count)


def _in_fields(formats: dict[str, Format], function: Callable, state, *new):
  """A state with `function(name, format, node, field)` for each field of a node that has a format.

  With a new state, the new one with `function(name, format, node, field, new field)`.
  """

  def has_fields(node):
    return not formats.keys().isdisjoint(getattr(node, "_fields", ()))

  def change(node, *new):
    last = (node, *new)[-1]  # A gradient of None leaves None in a new state.
    if not has_fields(node):
      return last
    fields = {
      name: function(name, formats[name], node, *values)
      if name in formats
      else _in_fields(formats, function, *values)
      for name, *values in zip(node._fields, node, *new, strict=True)
    }
    return last._replace(**fields)

  return jax.tree.map(change, state, *new, is_leaf=has_fields)


def _field_names(state) -> list[str]:
  """The fields of all NamedTuples in a state."""
  names = {}

  def visit(node):
    names.update(dict.fromkeys(getattr(node, "_fields", ())))
    return False

  jax.tree.leaves(state, is_leaf=visit)
  return list(names)


def _is_coded(x) -> bool:
  return isinstance(x, Coded)


def _decode(name: str, form: Format, node, tree):
  if form == E4M3_EXPANDED and isinstance(node, ScaleByStableAdamState):
    return tree  # It takes coded moments, and returns new ones.

  def decode(x):
    if _is_coded(x):
      return form.decode(x)
    return form.decode(Coded(x, ())) if x.dtype == _dtype_without_details(form) else x

  return jax.tree.map(decode, tree, is_leaf=_is_coded)


def _encode_first(stacked, min_size: int, axis_name, mask, name: str, form: Format, node, tree):
  """A field of a new state: in the format where that is smaller."""

  def encode(axes, chosen, x):
    if not (chosen and _is_large(x, axes, min_size) and jnp.issubdtype(x.dtype, jnp.floating)):
      return x
    coded = form.encode(x.astype(jnp.float32), axes, axis_name)
    return _stored(coded) if sum(part.nbytes for part in jax.tree.leaves(coded)) <= x.nbytes else x

  return jax.tree.map(encode, leading_axes(stacked, tree), _chosen(mask, tree), tree)


def _encode(
  count, stacked, min_size: int, axis_name, mask, name: str, form: Format, node, old, new
):
  """A field of a state that was updated, as its old one is stored, rounded by chance."""
  salt = zlib.crc32(name.encode())

  def encode(axes, chosen, old, x):
    if x is None or _is_coded(x):
      return x
    if _is_coded(old) or (
      chosen and old.dtype == _dtype_without_details(form) and _is_large(x, axes, min_size)
    ):
      chance = hashed(positions(count, x.shape, axes, salt))
      return _stored(form.encode(x.astype(jnp.float32), axes, axis_name, chance))
    return x.astype(old.dtype)

  arrays = jax.tree.map(lambda x: x.values if _is_coded(x) else x, old, is_leaf=_is_coded)
  return jax.tree.map(encode, leading_axes(stacked, arrays), _chosen(mask, arrays), old, new)


def _chosen(mask, tree):
  """Whether `compress_state`'s mask chooses each leaf of a tree like the parameters."""
  mask = True if mask is None else mask(tree) if callable(mask) else mask
  return jax.tree.broadcast(mask, tree)


def _is_large(x, axes: int, min_size: int) -> bool:
  return math.prod(x.shape[axes:]) >= max(min_size, 1)


def _stored(coded: Coded):
  return coded if coded.details else coded.values


@functools.cache
def _dtype_without_details(form: Format) -> jnp.dtype | None:
  coded = jax.eval_shape(lambda x: form.encode(x, 0), jax.ShapeDtypeStruct((1,), jnp.float32))
  return None if coded.details else coded.values.dtype


def _scaled(dtype, limit: float, least: float) -> Format:
  """x times the largest power of two that keeps a tensor within `limit`.

  least: the magnitude that smaller ones but zero are rounded to.
  """

  def encode(x, axes: int, axis_name: Axes | None = None, chance=None):
    size = abs_or_inf(x)
    absmax = jnp.max(size, range(axes, x.ndim), keepdims=True)
    absmax = over_shards(jax.lax.pmax, absmax, axis_name)
    power = jnp.floor(jnp.log2(limit / jnp.where(absmax == 0, limit, absmax)))
    power = jnp.clip(power, -126, 126).astype(jnp.int32)
    size = jnp.minimum(size * jnp.ldexp(jnp.float32(1), power), limit)
    size = jnp.where(x == 0, 0.0, jnp.maximum(size, least))
    size = size if chance is None else round_by_chance(size, chance, dtype)
    scale = jnp.where(jnp.isfinite(absmax), jnp.ldexp(jnp.float32(1), -power), jnp.nan)
    return Coded((jnp.sign(x) * size).astype(dtype), (scale,))

  return Format(encode, lambda coded: coded.values.astype(jnp.float32) * coded.details[0])


def _bfloat16(x, axes, axis_name=None, chance=None) -> Coded:
  x = x if chance is None else round_by_chance(x, chance, jnp.bfloat16)
  return Coded(x.astype(jnp.bfloat16), ())


def _pair(x, axes, axis_name=None, chance=None) -> Coded:
  high = jax.lax.reduce_precision(x, 8, 7)  # XLA may drop the rounding of two casts.
  return Coded(high + jax.lax.reduce_precision(x - high, 8, 7), ())


def _expanded(x, axes, axis_name=None, chance=None) -> Coded:
  return expansion.encode(x, chance)  # A group has numbers of one tensor and one device.


FORMATS = {
  "FLOAT32": Format(lambda x, axes, *how: Coded(x, ()), lambda coded: coded.values),
  "BFLOAT16": Format(_bfloat16, lambda coded: coded.values.astype(jnp.float32)),
  "BFLOAT16_PAIR": Format(_pair, lambda coded: coded.values),
  "E4M3_EXPANDED": Format(_expanded, expansion.decode),
  "E4M3_SCALED": _scaled(E4M3, format_of(E4M3).max, least=0.0),
  "FLOAT16_SCALED": _scaled(jnp.float16, 65504.0, least=2.0**-24),
}
FLOAT32, BFLOAT16, BFLOAT16_PAIR, E4M3_EXPANDED, E4M3_SCALED, FLOAT16_SCALED = FORMATS.values()
