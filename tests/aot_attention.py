"""Compiles attention's backward pass for an absent H200: python -m tests.aot_attention DIR

Prints what ptxas reports of each case, as JSON. DIR gets the PTX and the reports.
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

from sbjax.pallas import attention_sm90
from tests import aot

CASES = {  # Tokens, head size, packed, causal, dtype.
  "L/14": (257, 64, True, False, jnp.bfloat16),
  "B/16": (197, 64, False, False, jnp.float16),
  "half": (129, 64, False, True, jnp.bfloat16),
  "H/14": (257, 80, True, False, jnp.bfloat16),
  "H/14, half": (129, 80, False, False, jnp.bfloat16),
  "128, half": (129, 128, False, True, jnp.float16),
}


def main(folder: pathlib.Path):
  results = {}
  for i, (name, case) in enumerate(CASES.items()):
    targets = _compiled(*case)
    report = (folder / f"sbjax_attention_backward_{i}.ptxas").read_text()
    results[name] = {
      "targets": targets,
      "spilled": [int(n) for n in re.findall(r"(\d+) bytes spill", report)],
      "is_serialized": "serialized" in report,
    }
  return results


def _compiled(tokens, head_dim, packed, causal, dtype):
  backward = functools.partial(attention_sm90.attention_backward, causal=causal, length=tokens)
  with aot._mesh(90, (1,), ("data",)) as mesh:
    o = aot._argument(mesh, (256, tokens, 16, head_dim), dtype, P())
    lse = aot._argument(mesh, (256, 16, tokens), jnp.float32, P())
    shape = (256, tokens, 3 if packed else 1, 16, head_dim)
    qkv = [aot._argument(mesh, shape, dtype, P())] * (1 if packed else 3)
    hlo = jax.jit(backward).lower(o, lse, o, *qkv).compile().as_text()
  return aot._summary(hlo)["targets"]


if __name__ == "__main__":
  folder = pathlib.Path(sys.argv[1])
  assert os.environ["MOSAIC_GPU_DUMP_TO"] == str(folder)
  print(json.dumps(main(folder)))
