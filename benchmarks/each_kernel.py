"""Runs every kernel once, on small ragged arrays: something for a memory checker to watch.

  XLA_PYTHON_CLIENT_ALLOCATOR=platform compute-sanitizer --tool memcheck \\
      python -m benchmarks.each_kernel
"""

import jax
import jax.numpy as jnp

from sbjax.backends import NAMES, get_backend
from sbjax.formats import E4M3, INT8
from sbjax.quantize import Spec


def main() -> None:
  x = jax.random.normal(jax.random.key(0), (333, 464), jnp.bfloat16)
  w = jax.random.normal(jax.random.key(1), (464, 208))
  for name in NAMES[1:]:
    try:
      ops = get_backend(name)
    except NotImplementedError as reason:
      print(f"{name}: not here: {reason}")
      continue
    for dtype in (INT8, E4M3):
      row, tensor = Spec(dtype, "rowwise"), Spec(dtype, "tensorwise")
      for spec in (row, tensor):
        y = ops.scaled_matmul(ops.quantize(x, row), ops.quantize_transposed(w, spec), jnp.bfloat16)
        jax.block_until_ready(y)
      jax.block_until_ready((ops.quantize_both(w, tensor), ops.quantize(w, tensor)))
    print(f"{name}: ran")


if __name__ == "__main__":
  main()
