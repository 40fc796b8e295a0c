"""Compiles for an absent H200 as SBJAX_ASSUME_CAPABILITY says: python -m tests.aot.assumed

Prints as JSON, for each case, whose kernels it calls; and of each Triton kernel its name, what its
PTX is made for, what JAX assembles it for, and what ptxas says against that.
"""

import functools
import json

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks import absent_gpu
from sbjax.attention import attention
from tests.aot import noted, operations

RECIPES = ("fp8_switchback", "switchback", "switchback_m")  # No kernel is made twice.


def main() -> None:
  kernels, found = noted.kernels(), {}
  with absent_gpu.mesh(90, (1,), ("data",)) as mesh:
    cases = {r: functools.partial(operations._with_gradients, operations._mlp, r) for r in RECIPES}
    arguments = dict.fromkeys(cases, operations._arguments(mesh, P(), P()))
    cases["attention"] = jax.grad(lambda qkv: jnp.sum(attention(qkv, backend="triton")))
    qkv = absent_gpu.argument(mesh, (2, 257, 3, 2, 64), jnp.bfloat16, P())
    for name, run in cases.items():
      hlo = jax.jit(run).lower(*arguments.get(name, [qkv])).compile().as_text()
      made = [(k.name, k.target, k.capability, k.assembled()[0]) for k in kernels]
      found[name] = {"targets": operations._summary(hlo)["targets"], "kernels": made}
      kernels.clear()
  print(json.dumps(found))


if __name__ == "__main__":
  main()
