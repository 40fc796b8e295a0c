"""What a layer keeps for its backward pass, in e4m3 with a scale for each group of 16.

COAT (Xi et al. 2024, https://arxiv.org/abs/2410.19313, section 5) keeps the inputs of non-linear
layers that way: 1.125 bytes a number. Groups are along the last axis, so no scale is shared by
tokens. A scale of part of a row does not factor out of a sum, so no matmul takes these values.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from sbjax.linear.quantized_dot import RESIDUAL_NAME
from sbjax.ops.partition import reshape, splits_of
from sbjax.quantize import E4M3, FORMATS, Quantized, abs_or_inf, group_size

GROUP = 16  # The most numbers that share a scale.
KEEPS = ("original", "grouped")


class Grouped(NamedTuple):
  """Rows in 8 bits: a number is its value times the scale of its group."""

  values: jax.Array  # e4m3 [M, groups, numbers of a group]
  scale: jax.Array  # bfloat16 [M, groups, 1]


def group(x: jax.Array) -> Grouped:
  """x [M, K] in groups of 16, or of the largest divisor of K below; K has no padding.

  A normal number of e4m3 is off by 2**-4 of itself at most; smaller ones, below 2**-14 of the
  largest magnitude in their group, by 2**-18 of that. Zeros stay zeros. A NaN or an infinity makes
  its group NaN.

  >>> kept = group(jnp.ones((4, 32), jnp.bfloat16))
  >>> kept.values.shape, kept.scale.shape, sum(a.nbytes for a in kept) / (4 * 32)
  ((4, 2, 16), (4, 2, 1), 1.125)
  """
  width = x.shape[1]
  size = group_size(width, GROUP)
  rows, columns = splits_of(x)
  x = reshape(x, (x.shape[0], width // size, size), [rows, columns, ()]).astype(jnp.float32)
  absmax = jnp.max(abs_or_inf(x), axis=2, keepdims=True)
  scale = jnp.where(jnp.isfinite(absmax), absmax / FORMATS[E4M3].max, jnp.nan).astype(jnp.bfloat16)
  divisor = scale.astype(jnp.float32)
  values = x / jnp.where(divisor == 0, 1.0, divisor)
  # A subnormal scale that was rounded down leaves values beyond the format's range: NaN there.
  values = jnp.clip(values, -FORMATS[E4M3].max, FORMATS[E4M3].max)
  return Grouped(values.astype(E4M3), scale)


def ungroup(kept: Grouped, dtype) -> jax.Array:
  """The rows [M, K], multiplied in float32 and cast once."""
  x = kept.values.astype(jnp.float32) * kept.scale.astype(jnp.float32)
  rows, groups, _ = splits_of(x)
  return reshape(x, (x.shape[0], x.shape[1] * x.shape[2]), [rows, groups]).astype(dtype)


def check_keep(keep) -> str:
  """keep, or a ValueError unless it is one of KEEPS."""
  if not isinstance(keep, str) or keep not in KEEPS:
    raise ValueError(f"keep={keep!r} must be one of {', '.join(KEEPS)}.")
  return keep


def kept(x: Any, keep: str) -> Any:
  """x [M, K] as the backward pass finds it; a Quantized x stays what it is."""
  if keep == "original" or isinstance(x, Quantized):
    return x
  return checkpoint_name(group(x), RESIDUAL_NAME)


def restored(x: Any, dtype) -> Any:
  """x before it was `kept`, in `dtype` if it was grouped."""
  return ungroup(x, dtype) if isinstance(x, Grouped) else x
