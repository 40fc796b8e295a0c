"""The 8-bit formats: what they can hold and what sums of their products are kept in."""

import contextlib

import jax.numpy as jnp
import numpy as np

INT8 = jnp.dtype(jnp.int8)
E4M3 = jnp.dtype(jnp.float8_e4m3fn)
E5M2 = jnp.dtype(jnp.float8_e5m2)

# int8 stays symmetric: -128 never occurs, so negation is exact.
_MAX_VALUE = {INT8: 127.0, E4M3: 448.0, E5M2: 57344.0}

# What operands, parameters and results may be.
FLOATS = tuple(map(jnp.dtype, ("bfloat16", "float16", "float32", "float64")))


def max_value(dtype) -> float:
  """The largest magnitude a quantized value takes: 127, 448 or 57344."""
  known = _dtype(dtype)
  if known is None or known not in _MAX_VALUE:
    formats = ", ".join(d.name for d in _MAX_VALUE)
    raise ValueError(
      f"{getattr(known, 'name', dtype)!r} is not an 8-bit format sbjax knows: {formats}."
    )
  return _MAX_VALUE[known]


def floating_dtype(name: str, dtype) -> jnp.dtype:
  """The dtype; a ValueError unless it is one of FLOATS."""
  known = _dtype(dtype)
  if known is None or known not in FLOATS:  # numpy takes None for float64.
    raise ValueError(f"{name}={dtype!r} must be one of {', '.join(d.name for d in FLOATS)}.")
  return known


def _dtype(dtype):
  """The dtype that a name or a type stands for; None for other values."""
  if isinstance(dtype, str | type | np.dtype):
    with contextlib.suppress(TypeError):
      return jnp.dtype(dtype)
  return None


def accumulator_dtype(dtype):
  """int32 for int8, whose sums are then exact; float32 for fp8."""
  return jnp.dtype(jnp.int32 if jnp.dtype(dtype) == INT8 else jnp.float32)
