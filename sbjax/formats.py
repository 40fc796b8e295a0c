"""The 8-bit formats: what they can hold and what sums of their products are kept in."""

import contextlib

import jax.numpy as jnp

INT8 = jnp.dtype(jnp.int8)
E4M3 = jnp.dtype(jnp.float8_e4m3fn)
E5M2 = jnp.dtype(jnp.float8_e5m2)

# int8 stays symmetric: -128 never occurs, so negation is exact.
_MAX_VALUE = {INT8: 127.0, E4M3: 448.0, E5M2: 57344.0}


def max_value(dtype) -> float:
  """The largest magnitude a quantized value takes: 127, 448 or 57344."""
  with contextlib.suppress(TypeError):  # The error below names values that are no dtype.
    dtype = jnp.dtype(dtype)
  if dtype not in _MAX_VALUE:
    known = ", ".join(d.name for d in _MAX_VALUE)
    raise ValueError(
      f"{getattr(dtype, 'name', dtype)!r} is not an 8-bit format sbjax knows: {known}."
    )
  return _MAX_VALUE[dtype]


def accumulator_dtype(dtype):
  """int32 for int8, whose sums are then exact; float32 for fp8."""
  return jnp.dtype(jnp.int32 if jnp.dtype(dtype) == INT8 else jnp.float32)
