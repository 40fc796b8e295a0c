"""COAT's dynamic range expansion: groups of a moment in e4m3, and Adam's step on them.

Xi et al. 2024, https://arxiv.org/abs/2410.19313. A group of neighbours along the last axis shares
its largest magnitude and an exponent, two float32. The power stretches the group over e4m3's range.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sbjax.ops.dither import halves_swapped, hashed, round_by_chance
from sbjax.ops.operation import Operation
from sbjax.ops.partition import is_explicit
from sbjax.quantize import E4M3, FORMATS, abs_or_inf, group_size

GROUP = 128  # The most numbers that share two float32.
# Binades from 448 to 2/448, the least magnitude that an expanded group has.
SPAN = math.log2(448**2 / 2)
LEAST = 2.0**-9  # The least magnitude of e4m3.
DUST = 2.0**-12  # In learning rates: see `without_dust`.


class Coded(NamedTuple):
  """An array in a format of `sbjax.optim.state_formats`, or groups in e4m3."""

  values: jax.Array  # of the array's shape
  details: tuple[jax.Array, ...]  # with as many axes as the array

  @property
  def shape(self) -> tuple[int, ...]:
    return self.values.shape


def in_groups(x: jax.Array) -> jax.Array:
  """x [..., n] as [..., n / g, g], g the largest divisor of n up to 128."""
  n = x.shape[-1] if x.ndim else 1
  group = group_size(n, GROUP)
  if is_explicit() and x.ndim:
    spec = jax.typeof(x).sharding.spec
    axes = spec[-1] if isinstance(spec[-1], tuple) else (spec[-1],)
    sizes = jax.sharding.get_abstract_mesh().shape
    if n // group % math.prod(sizes[axis] for axis in axes if axis):  # A group must be whole.
      x = jax.sharding.reshard(x, jax.sharding.PartitionSpec(*spec[:-1], None))
  return x.reshape(*x.shape[:-1], n // group, group)


def out_of_groups(groups: jax.Array, like: jax.Array) -> jax.Array:
  """What `in_groups` made of an array like that one."""
  x = groups.reshape(like.shape)
  return jax.sharding.reshard(x, jax.typeof(like).sharding.spec) if is_explicit() else x


def _power(x, exponent) -> jax.Array:
  """x ** exponent for x >= 0 and exponent > 0."""
  return jnp.exp(jnp.log(x) * exponent)


def _round_by_chance(expanded: jax.Array, exponent: jax.Array, chance: jax.Array) -> jax.Array:
  """The number of e4m3 below or above, with the probability that keeps the mean of `contract`.

  The chance is even between what those two numbers contract to, not between themselves: the power
  is convex or concave, and its mean is not the power of the mean.
  """
  below = round_by_chance(expanded, jnp.uint32(0), E4M3)
  above = round_by_chance(expanded, jnp.uint32(2**32 - 1), E4M3)

  def beyond(x):  # How much more than `below` x contracts to, over what `below` contracts to.
    return jnp.expm1(jnp.log(x / below) / exponent)

  draw = (chance >> 8).astype(jnp.float32) * 2.0**-24
  return jnp.where(draw * beyond(above) < beyond(expanded), above, below)


def expand(groups: jax.Array, chance: jax.Array | None = None) -> Coded:
  """e4m3 of `448 (|x| / top)^exponent`, with the sign of x; details are (top, exponent) [...].

  The exponent takes the least nonzero magnitude of a group [..., g] to 2/448 or a little more, so
  nothing but zero becomes zero. It is a multiple of 1/16.

  chance: uint32 [..., g], of `sbjax.ops.dither`, keeps the mean of `contract(expand(x))` at x; None
    rounds to the nearest.
  """
  size = abs_or_inf(groups)
  top = jnp.max(size, -1, keepdims=True)
  top = jnp.where(jnp.isfinite(top), top, jnp.nan)
  low = jnp.min(jnp.where(size > 0, size, jnp.inf), -1, keepdims=True)
  exponent = jnp.floor(16 * SPAN / (jnp.log2(top) - jnp.log2(low))) / 16
  exponent = jnp.where(top > 0, jnp.clip(exponent, 1 / 16, 64.0), 1.0)
  expanded = FORMATS[E4M3].max * _power(size / jnp.where(top == 0, 1.0, top), exponent)
  # A power of 1 may be a bit more than 1, and beyond its largest number e4m3 has NaN.
  expanded = jnp.clip(expanded, LEAST, FORMATS[E4M3].max)
  if chance is not None:
    expanded = _round_by_chance(expanded, exponent, chance)
  expanded = jnp.where(size == 0, 0.0, expanded)
  return Coded((jnp.sign(groups) * expanded).astype(E4M3), (top[..., 0], exponent[..., 0]))


def contract(coded: Coded) -> jax.Array:
  """The groups [..., g] that `expand` coded, in float32."""
  top, exponent = coded.details
  groups = coded.values.astype(jnp.float32)
  size = top[..., None] * _power(jnp.abs(groups) / FORMATS[E4M3].max, 1 / exponent[..., None])
  size = jnp.maximum(size, jnp.finfo(jnp.float32).tiny)  # More than 126 binades below the top.
  return jnp.sign(groups) * size


def encode(x: jax.Array, chance: jax.Array | None = None) -> Coded:
  """x [..., n] in e4m3; details are [..., n / g]. For chance [..., n] see `expand`."""
  coded = expand(in_groups(x), None if chance is None else in_groups(chance))
  return coded._replace(values=out_of_groups(coded.values, x))


def decode(coded: Coded) -> jax.Array:
  """The array that `encode` coded, in float32."""
  for scales in coded.details:
    if scales.shape[:-1] != coded.shape[:-1]:
      raise ValueError(
        f"Scales {scales.shape} of groups do not fit their array {coded.shape}: within a"
        " jax.shard_map, split both alike."
      )
  groups = contract(coded._replace(values=in_groups(coded.values)))
  return out_of_groups(groups, coded.values)


def without_dust(m: jax.Array, n: jax.Array) -> jax.Array:
  """The first moment, without numbers that move a parameter by less than 2^-12 learning rates.

  Of a gradient that is often zero, m decays without end, and n more slowly. Its least m would
  stretch the range of its group, and take precision from the others.
  """
  return jnp.where(jnp.abs(m) < DUST * jnp.sqrt(n), 0.0, m)


def adam_direction(
  weights: jax.Array, g: jax.Array, mu: Coded, nu: Coded, first: jax.Array
) -> tuple[jax.Array, Coded, Coded]:
  """Adam's unscaled direction, and both moments with the newest gradient, coded again.

  The direction has the new moments before they are rounded, by chance.

  Args:
    weights: float32 (w1, w2, eps): of g in the first moment, of g^2 in the second, and Adam's eps.
    g: gradients, float32 [..., g], in groups as both moments.
    first: uint32 [...]: the `sbjax.ops.dither.positions` of the first number of each group.
  """
  w1, w2, eps = weights
  m = (1 - w1) * contract(mu) + w1 * g
  n = (1 - w2) * contract(nu) + w2 * g**2
  chance = hashed(first[..., None] + jax.lax.broadcasted_iota(jnp.uint32, g.shape, g.ndim - 1))
  coded = expand(without_dust(m, n), chance), expand(n, halves_swapped(chance))
  return m / (jnp.sqrt(n) + eps), *coded


_CODED = "abcdk. abcdk abcdk"  # Groups, and their details.
OPERATIONS = {
  "adam_direction": Operation(
    adam_direction,
    f". abcdk. {_CODED} {_CODED} abcdk -> abcdk. {_CODED} {_CODED}",
    kernels=("triton.adam",),
  ),
}
