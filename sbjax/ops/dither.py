"""Rounding by chance, which keeps a moving average in few bits right.

To the nearest number an average cannot decay: once a step is less than half the distance between
two numbers, `b * x` is rounded back to x. Here x becomes the number below or the number above, with
the probability that makes the mean x.

The chance is 32 bits that a hash makes of the step and of the number's index in its tensor. So it
is the same on every mesh and by every backend, and in a run that resumes. Within a `jax.shard_map`
an array is a device's own, and so are its indices.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np


def positions(count, shape: tuple[int, ...], axes: int = 0, salt: int = 0) -> jax.Array:
  """What `hashed` takes, uint32 of this shape: a hash of the step, plus indices modulo 2^32.

  Args:
    count: int32 []: updates made.
    axes: how many leading axes number tensors of their own, each with indices of its own.
    salt: another one gives other chances.
  """
  start = hashed(jnp.asarray(count).astype(jnp.uint32) + hashed(jnp.uint32(salt)))
  where = jnp.full(shape, start)
  for axis in range(axes, len(shape)):
    stride = math.prod(shape[axis + 1 :]) % 2**32
    where += jnp.uint32(stride) * jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
  return where


def hashed(x: jax.Array) -> jax.Array:
  """uint32 to uint32, one to one: lowbias32 of Wellons 2018, https://nullprogram.com/blog/2018/07/31."""
  x ^= x >> 16
  x *= jnp.uint32(0x7FEB352D)
  x ^= x >> 15
  x *= jnp.uint32(0x846CA68B)
  return x ^ (x >> 16)


def halves_swapped(chance: jax.Array) -> jax.Array:
  """The chance of a second number at the same place."""
  return (chance << 16) | (chance >> 16)


def round_by_chance(x: jax.Array, chance: jax.Array, dtype) -> jax.Array:
  """float32 x, rounded to values of a smaller dtype below or above; what is not finite stays.

  Args:
    chance: uint32, like x. 0 rounds toward zero.
    dtype: |x| is at most its largest number.
  """
  info = jnp.finfo(dtype)
  dropped = 23 - info.nmant
  # Numbers below the normal ones are apart as the least of these: so they are if it is added.
  least = jnp.float32(np.ldexp(1.0, info.minexp))
  shift = jnp.where(jnp.abs(x) < least, jnp.copysign(least, x), 0.0)
  bits = jax.lax.bitcast_convert_type(x + shift, jnp.uint32) + (chance >> (32 - dropped))
  bits = (bits >> dropped) << dropped
  return jax.lax.bitcast_convert_type(bits, jnp.float32) - shift
