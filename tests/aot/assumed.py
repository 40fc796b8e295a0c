"""Compiles for an absent H200 as SBJAX_ASSUME_CAPABILITY says: python -m tests.aot.assumed

Prints as JSON, for each case, whose kernels it calls; and of each Triton kernel its name, what its
PTX is made for, what JAX assembles it for, and what ptxas says against that.
"""

import functools
import json
import os
import re
import subprocess
import tempfile

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax_triton import triton_lib

from benchmarks import absent_gpu
from sbjax.attention import attention
from tests.aot import operations
from tests.triton_case import ptxas

RECIPES = ("fp8_switchback", "switchback", "switchback_m")  # No kernel is made twice.


def main() -> None:
  kernels, found = noted_kernels(), {}
  with absent_gpu.mesh(90, (1,), ("data",)) as mesh:
    cases = {r: functools.partial(operations._with_gradients, operations._mlp, r) for r in RECIPES}
    arguments = dict.fromkeys(cases, operations._arguments(mesh, P(), P()))
    cases["attention"] = jax.grad(lambda qkv: jnp.sum(attention(qkv, backend="triton")))
    qkv = absent_gpu.argument(mesh, (2, 257, 3, 2, 64), jnp.bfloat16, P())
    for name, run in cases.items():
      hlo = jax.jit(run).lower(*arguments.get(name, [qkv])).compile().as_text()
      found[name] = {"targets": operations._summary(hlo)["targets"], "kernels": list(kernels)}
      kernels.clear()
  print(json.dumps(found))


def noted_kernels() -> list:
  """Will have each kernel that jax-triton gives to jaxlib: its name, PTX's target, its chip's."""
  found, jaxlib = [], triton_lib.triton_kernel_call_lib
  make = jaxlib.TritonKernel

  def noting(*args):
    name, ptx, capability = args[0], args[4], args[6]
    found.append([name, re.search(r"\.target (\w+)", ptx)[1], capability, assembles(ptx)])
    return make(*args)

  jaxlib.TritonKernel = noting
  return found


def assembles(ptx: str) -> str:
  """What ptxas says where it cannot make an H200's code of it; "" if it can."""
  with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
    file.write(ptx)
    file.flush()
    command = [ptxas(), "-arch=sm_90a", file.name, "-o", os.devnull]
    return subprocess.run(command, capture_output=True, text=True).stderr


if __name__ == "__main__":
  main()
