"""Optimizer states in 8 or 16 bits: a `Format` says how the optimizer keeps a moment.

Adam keeps two moments of 4 bytes a parameter. They are read and written once a step, so they may
be stored in fewer bits: decode, update in float32, encode. `compress_state` does that around any
optax transformation. The update uses the new moments before they are rounded, as in COAT and
FP8-LM.

XLA for GPUs (jax 0.10 and 0.11) updates all but E4M3_EXPANDED in place, without temporary memory.
Of that it writes both new moments in float32: 8 bytes a parameter, of a leaf at a time. So
StableAdamW takes them coded, and a kernel of `sbjax.expansion.adam_direction` writes the direction
instead, where there is one.

  format          bytes   a number is stored as
  FLOAT32         4       itself
  BFLOAT16        2       bfloat16
  BFLOAT16_PAIR   4       the sum of two bfloat16: 16 bits of its significand
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
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sbjax import expansion
from sbjax.expansion import Coded
from sbjax.formats import E4M3, max_value
from sbjax.quantize import magnitude
from sbjax.stable_adamw import ScaleByStableAdamState, leading_axes


class Format(NamedTuple):
  """How an array is stored: `decode(encode(x, axes))` is close to x, a float32 array.

  axes: how many leading axes of x number tensors of their own.
  """

  encode: Callable[[jax.Array, int], Coded]
  decode: Callable[[Coded], jax.Array]


def compress_state(
  optimizer: optax.GradientTransformation,
  *,
  min_size: int = 4096,
  stacked: Any | Callable[[optax.Params], Any] | None = None,
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
    stacked: how many leading axes of a leaf number tensors of their own; see `stable_adamw`.
    **formats: a Format for each name of a field.

  Raises:
    ValueError: something that is no Format; in `init`, a field that the state does not have.

  >>> from sbjax.state_formats import E4M3_EXPANDED
  >>> optimizer = compress_state(optax.adamw(1e-3), mu=E4M3_EXPANDED, nu=E4M3_EXPANDED)
  >>> state = optimizer.init({"w": jnp.ones((64, 128))})
  >>> sum(x.nbytes for x in jax.tree.leaves(state)) / (64 * 128)  # With the count's 4 bytes.
  2.12548828125
  """
  for name, one in formats.items():
    if not isinstance(one, Format):
      raise ValueError(f"{name}={one!r} is no Format: take one of {', '.join(FORMATS)}.")
  optimizer = optax.with_extra_args_support(optimizer)
  decode = functools.partial(_in_fields, formats, _decode)
  encode = functools.partial(_in_fields, formats, functools.partial(_encode, stacked, min_size))

  def init(params):
    state = optimizer.init(params)
    names = _field_names(state)
    for name in formats:
      if name not in names:
        raise ValueError(f"No state of the optimizer has a field {name!r}: {', '.join(names)}.")
    # The moments are zeros. XLA would encode them while it compiles, number by number.
    return encode(jax.tree.map(jax.lax.optimization_barrier, state))

  def update(updates, state, params=None, **extra):
    updates, state = optimizer.update(updates, decode(state), params, **extra)
    return updates, encode(state)

  return optax.GradientTransformationExtraArgs(init, update)


def _in_fields(formats: dict[str, Format], function: Callable, state):
  """A state with `function(format, field, node)` for each field of a node that has a format."""

  def has_fields(node):
    return not formats.keys().isdisjoint(getattr(node, "_fields", ()))

  def change(node):
    if not has_fields(node):
      return node
    fields = {
      name: function(formats[name], field, node)
      if name in formats
      else _in_fields(formats, function, field)
      for name, field in zip(node._fields, node, strict=True)
    }
    return node._replace(**fields)

  return jax.tree.map(change, state, is_leaf=has_fields)


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


def _decode(form: Format, tree, node):
  if form == E4M3_EXPANDED and isinstance(node, ScaleByStableAdamState):
    return tree  # It takes coded moments, and returns new ones.
  return jax.tree.map(lambda x: form.decode(x) if _is_coded(x) else x, tree, is_leaf=_is_coded)


def _encode(stacked, min_size: int, form: Format, tree, node):
  del node

  def encode(axes, x):
    if _is_coded(x):
      return x
    size = math.prod(x.shape[axes:])
    if form == FLOAT32 or size < max(min_size, 1) or not jnp.issubdtype(x.dtype, jnp.floating):
      return x
    coded = form.encode(x.astype(jnp.float32), axes)
    return coded if sum(part.nbytes for part in jax.tree.leaves(coded)) <= x.nbytes else x

  arrays = jax.tree.map(lambda x: x.values if _is_coded(x) else x, tree, is_leaf=_is_coded)
  return jax.tree.map(encode, leading_axes(stacked, arrays), tree)


def _scaled(dtype, limit: float, least: float) -> Format:
  """x times the largest power of two that keeps a tensor within `limit`.

  least: the magnitude that smaller ones but zero are rounded to.
  """

  def encode(x, axes: int):
    size = magnitude(x)
    absmax = jnp.max(size, range(axes, x.ndim), keepdims=True)
    power = jnp.floor(jnp.log2(limit / jnp.where(absmax == 0, limit, absmax)))
    power = jnp.clip(power, -126, 126).astype(jnp.int32)
    size = jnp.minimum(size * jnp.ldexp(jnp.float32(1), power), limit)
    size = jnp.where(x == 0, 0.0, jnp.maximum(size, least))
    scale = jnp.where(jnp.isfinite(absmax), jnp.ldexp(jnp.float32(1), -power), jnp.nan)
    return Coded((jnp.sign(x) * size).astype(dtype), (scale,))

  return Format(encode, lambda coded: coded.values.astype(jnp.float32) * coded.details[0])


def _pair(x, axes: int) -> Coded:
  del axes
  high = jax.lax.reduce_precision(x, 8, 7)  # XLA may drop the rounding of two casts.
  return Coded(high.astype(jnp.bfloat16), ((x - high).astype(jnp.bfloat16),))


def _sum_of_pair(coded: Coded) -> jax.Array:
  return coded.values.astype(jnp.float32) + coded.details[0].astype(jnp.float32)


FORMATS = {
  "FLOAT32": Format(lambda x, axes: Coded(x, ()), lambda coded: coded.values),
  "BFLOAT16": Format(
    lambda x, axes: Coded(x.astype(jnp.bfloat16), ()),
    lambda coded: coded.values.astype(jnp.float32),
  ),
  "BFLOAT16_PAIR": Format(_pair, _sum_of_pair),
  # A group never has numbers of two tensors, so axes do not matter.
  "E4M3_EXPANDED": Format(lambda x, axes: expansion.encode(x), expansion.decode),
  "E4M3_SCALED": _scaled(E4M3, max_value(E4M3), least=0.0),
  "FLOAT16_SCALED": _scaled(jnp.float16, 65504.0, least=2.0**-24),
}
FLOAT32, BFLOAT16, BFLOAT16_PAIR, E4M3_EXPANDED, E4M3_SCALED, FLOAT16_SCALED = FORMATS.values()
