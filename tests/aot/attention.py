"""Compiles attention for an absent H200: python -m tests.aot.attention DIR mainly

Prints what ptxas reports of each case, as JSON. DIR gets the PTX and the reports.
With `mainly` it compiles the main cases, with `slow` the others.
"""

import functools
import json
import os
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks import absent_gpu
from sbjax.pallas.sm90.attention_backward import attention_backward
from sbjax.pallas.sm90.attention_forward import attention_forward
from tests.aot import operations

BACKWARD = {  # Tokens, head size, packed, causal, dtype.
  "L/14": (257, 64, True, False, jnp.bfloat16),
  "B/16": (197, 64, False, False, jnp.float16),
  "half": (129, 64, False, True, jnp.bfloat16),
  "H/14": (257, 80, True, False, jnp.bfloat16),
  "H/14, half": (129, 80, False, False, jnp.bfloat16),
  "bigG/14": (257, 104, True, False, jnp.bfloat16),
  "96": (257, 96, False, False, jnp.float16),
  "88": (145, 88, True, True, jnp.bfloat16),
  "96, half": (129, 96, True, False, jnp.bfloat16),
  "128, half": (129, 128, False, True, jnp.float16),
  "104, whole tiles": (256, 104, False, False, jnp.bfloat16),
  "128": (257, 128, True, False, jnp.bfloat16),
  "128, causal": (197, 128, False, True, jnp.float16),
  "SO400M": (256, 72, True, False, jnp.bfloat16),
}
FORWARD = {
  "B/16 forward": (197, 64, False, False, jnp.float16),
  "H/14 forward": (257, 80, True, False, jnp.bfloat16),
  "bigG/14 forward": (257, 104, False, True, jnp.bfloat16),
  "H/14, half, forward": (129, 80, True, False, jnp.bfloat16),
  "SO400M forward": (256, 72, True, False, jnp.bfloat16),
}
MAIN = ("H/14", "bigG/14", "128, half", "bigG/14 forward")


def main(folder: pathlib.Path, slow: bool):
  results = {}
  for name, case in (BACKWARD | FORWARD).items():
    if (name in MAIN) == slow:
      continue
    before = set(folder.iterdir())
    results[name] = _compiled(*case, is_forward=name in FORWARD)
    reports = [p.read_text() for p in set(folder.iterdir()) - before if p.suffix == ".ptxas"]
    results[name] |= {
      "kernels": len(reports),
      "spilled": [int(n) for r in reports for n in re.findall(r"(\d+) bytes spill", r)],
      "is_serialized": any("serialized" in r for r in reports),
    }
  return results


def _compiled(tokens, head_dim, packed, causal, dtype, is_forward):
  with absent_gpu.mesh(90, (1,), ("data",)) as mesh:
    o = absent_gpu.argument(mesh, (256, tokens, 16, head_dim), dtype, P())
    lse = absent_gpu.argument(mesh, (256, 16, tokens), jnp.float32, P())
    shape = (256, tokens, 3 if packed else 1, 16, head_dim)
    qkv = [absent_gpu.argument(mesh, shape, dtype, P())] * (1 if packed else 3)
    kernel = attention_forward if is_forward else attention_backward
    run = functools.partial(kernel, causal=causal, length=tokens)
    arguments = qkv if is_forward else [o, lse, o, *qkv]
    hlo = jax.jit(run).lower(*arguments).compile().as_text()
  return {"targets": operations._summary(hlo)["targets"], "copies": re.findall(r" copy\(.*", hlo)}


if __name__ == "__main__":
  folder = pathlib.Path(sys.argv[1])
  assert os.environ["MOSAIC_GPU_DUMP_TO"] == str(folder)
  print(json.dumps(main(folder, sys.argv[2] == "slow")))
