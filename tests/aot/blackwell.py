"""Compiles every Triton kernel for an absent Blackwell GPU: python -m tests.aot.blackwell 120

Prints of each kernel, as JSON: its name, shared memory, target, matrix instructions, what ptxas
says against it, and how many bytes of registers it spills.
"""

import json
import re
import sys

import jax
import jax.numpy as jnp

from sbjax.ops.registry import get_backend
from sbjax.quantize import E4M3, INT8, Quantized, Spec
from tests import each_kernel, triton_case
from tests.aot import noted


def main(capability: int) -> None:
  found = noted.kernels()
  with triton_case.chip(capability):
    ops = get_backend("triton")

    def run():
      products = [(each_kernel.matmuls(ops, d), large_matmul(ops, d)) for d in (INT8, E4M3)]
      rows, direction = each_kernel.row_operations(ops, INT8), each_kernel.adam_step(ops)
      return products, rows, each_kernel.attentions(ops, [(197, 0, 64), (77, 3, 104)]), direction

    jax.jit(run).trace().lower(lowering_platforms=("cuda",))
  instructions = r"(?:tcgen05\.mma|mma\.sync)[\w.:]*"
  print(json.dumps([
    (one.name, one.shared_bytes, one.target, sorted(set(re.findall(instructions, one.ptx))),
     *one.assembled())
    for one in found
  ]))  # fmt: skip


def large_matmul(ops, dtype):
  """In the largest blocks that the kernel chooses."""
  lhs, rhs = (
    Quantized(jnp.ones((rows, 1280), dtype), jnp.ones((1, 1)), Spec(dtype, "tensorwise"))
    for rows in (16384, 5120)
  )
  return ops.scaled_matmul(lhs, rhs, jnp.bfloat16)


if __name__ == "__main__":
  main(int(sys.argv[1]))
