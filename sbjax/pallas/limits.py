"""What the kernels of several devices do not take."""

import jax.numpy as jnp

OUT_DTYPES = ("bfloat16", "float16", "float32")


def unsupported_matmul(rhs, out_dtype) -> str | None:
  """Why no kernel multiplies with rhs [N, K], or None."""
  (n, k), dtype = rhs.values.shape, jnp.dtype(out_dtype).name
  if k % 16 or n % 16:
    return f"takes K and N that are multiples of 16, not {k} and {n}"
  return None if dtype in OUT_DTYPES else f"gives {', '.join(OUT_DTYPES)}, not {dtype}"
