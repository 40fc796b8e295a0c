"""Compiles sbjax for absent TPUs: python -m tests.aot.tpu v5e [--out FILE]

Needs the extra `tpu`. What XLA made of each case is printed as JSON, or added to FILE by lines.
"""

import argparse
import collections
import functools
import itertools
import json
import math
import os
import re

# The library looks for a TPU's machine in these, and would ask a server.
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AbstractDevice, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import rows
from benchmarks.absent_gpu import argument, mesh_of
from benchmarks.collectives import moved
from benchmarks.timing import append, provenance
from sbjax import RECIPES, SwitchBackDense, SwitchBackLinear, quantize_model
from sbjax.models import CLIP, SIZES, BlockOptions
from sbjax.ops.registry import get_backend
from sbjax.ops.rows import LayerNormParams
from tests.aot import operations, step, update
from train.step import make_init
from train.task import CLIPTask

TOPOLOGIES = {
  "v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"
}  # fmt: skip
# With 8,192 rows XLA compiles a layer for seven times as long, and the text is the same.
M, K, N = 512, operations.K, operations.N
# A size, a mesh (data, fsdp) and images a device: XLA takes longer for more.
STEPS = {"v5e": ("B/32", (2, 2), 256), "v6e": ("L/14", (1, 4), 8)}


def mesh(name: str, shape: tuple[int, ...], axes: tuple[str, ...]):
  """A mesh of absent TPUs; code within is traced for them."""
  devices = topologies.get_topology_desc(TOPOLOGIES[name], platform="tpu").devices
  devices = devices[: math.prod(shape)]
  return mesh_of(devices, AbstractDevice(devices[0].device_kind, 1, "tpu"), shape, axes)


def matmuls(hlo: str) -> dict[str, int]:
  """How many matmuls of which dtypes a compiled program has: XLA writes them as convolutions."""
  dtypes = dict(re.findall(r"^\s*(?:ROOT )?%?([\w.-]+) = (\w+)\[", hlo, re.M))
  found = collections.Counter()
  for result, operands in re.findall(r"= (\w+)\[[^=]*? (?:convolution|dot)\(([^)]*)\)", hlo):
    names = re.findall(r"%([\w.-]+)", operands)
    found[f"{' x '.join(sorted(dtypes[name] for name in names))} -> {result}"] += 1
  return dict(sorted(found.items()))


def targets(hlo: str) -> list[str]:
  return sorted(set(re.findall(r'custom_call_target="([^"]*)"', hlo)))


def summary(compiled) -> dict:
  hlo, memory = compiled.as_text(), compiled.memory_analysis()
  return {
    "matmuls": matmuls(hlo),
    "targets": targets(hlo),
    "gathered": sorted((d, n) for kind, d, n in moved(hlo) if kind == "all-gather"),
    "gigabytes": [
      round(memory.argument_size_in_bytes / 1e9, 3),
      round(memory.temp_size_in_bytes / 1e9, 3),
    ],
  }


def _linen(recipe, x, w):
  layer = SwitchBackDense(N, recipe=recipe, dtype=jnp.bfloat16)
  return layer.apply({"params": {"kernel": w, "bias": jnp.zeros(N)}}, x)


def _nnx(recipe, x, w):
  layer = SwitchBackLinear(K, N, recipe=recipe, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
  layer.kernel = nnx.Param(w)
  return layer(x)


def _converted(recipe, x, w):
  layer = quantize_model(nn.Dense(N, dtype=jnp.bfloat16), recipe)
  return layer.apply({"params": {"kernel": w, "bias": jnp.zeros(N)}}, x)


def _linear(recipe, x, w):
  """One product by each way to write it, of inputs of their own."""
  return [way(recipe, x + i, w) for i, way in enumerate((_linen, _nnx, _converted))]


def _mlp(recipe, x, w):
  return operations._mlp(recipe, None, x, w)


PIECES = {"linear": _linear, "mlp": _mlp}
CASES = [
  *itertools.product(["linear"], RECIPES),
  *itertools.product(["mlp"], ("full", "switchback", "fp8_tensorwise")),
]


def layers(name: str) -> dict:
  """What becomes of each recipe, forward and backward."""
  results = {}
  for piece, recipe in CASES:

    def run(x, w, piece=piece, recipe=recipe):
      y, backward = jax.vjp(functools.partial(PIECES[piece], recipe), x, w)
      return y, *backward(y)

    with mesh(name, (1,), ("data",)) as one:
      sizes = ((M, K), jnp.bfloat16), ((K, N), jnp.float32)
      arguments = [argument(one, *size, P()) for size in sizes]
      results[f"{piece}, {recipe}"] = summary(jax.jit(run).lower(*arguments).compile())
  return results


def training_step(name: str) -> dict:
  """A step of four devices, as the training program makes it for a TPU: layers are in a loop."""
  size, sizes, images = STEPS.get(name, STEPS["v5e"])
  config = SIZES[size]
  task = CLIPTask(CLIP(config, BlockOptions(recipe="switchback")))
  state = jax.eval_shape(make_init(task, optax.identity(), 0))
  widths = [w for t in (config.vision, config.text) for w in t.layers * [t.width]]
  lowered = step.lowered(functools.partial(mesh, name), sizes, task, images)
  return {
    "size": size,
    "mesh": sizes,
    "images": images,
    "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
    "kernels": sorted(rows * width**2 for width in widths for rows in (3, 1, 4, 4)),
    **summary(lowered.compile()),
  }


def passes(name: str, width: int = 1024) -> dict:
  """Bytes that norms, GELU, gated units and their gradients move, over the fewest that they could.

  As XLA counts those of the compiled program, each rounding included.
  """
  results = {}
  for operation, (run, operands, bytes_each) in rows.OPERATIONS.items():
    shape = (65536, rows.width_of(operation, width))
    with mesh(name, (1,), ("data",)) as one:
      whole = NamedSharding(one, P())
      norm = LayerNormParams(*[jax.ShapeDtypeStruct(shape[1:], jnp.float32, sharding=whole)] * 2)
      arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole)] * operands
      call = jax.jit(lambda norm, *arrays, run=run: run(get_backend("xla"), norm, *arrays))
      compiled = call.lower(norm, *arrays).compile()
    cost = compiled.cost_analysis()
    results[operation] = round(cost["bytes accessed"] / (bytes_each * math.prod(shape)), 2)
  return results


def out_of_memory(name: str) -> str:
  """XLA's message for a program that fits into no TPU."""
  with mesh(name, (1,), ("data",)) as one:
    x = jax.ShapeDtypeStruct((2**18, 2**18), jnp.float32, sharding=NamedSharding(one, P()))
    try:
      jax.jit(jnp.sin).lower(x).compile()
    except jax.errors.JaxRuntimeError as error:
      return str(error)
  return "compiled"


PARTS = {
  "layers": layers,
  "step": training_step,
  "passes": passes,
  "update": lambda name: update.update_bytes(functools.partial(mesh, name)),
  "out of memory": out_of_memory,
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("chip", choices=TOPOLOGIES)
  parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
  parser.add_argument("--out", help="a file of results")
  args = parser.parse_args()
  with mesh(args.chip, (1,), ("data",)) as one:
    kind = one.devices.flat[0].device_kind
  results = {name: PARTS[name](args.chip) for name in args.parts}
  if args.out:
    row = {"benchmark": "tpu", "compiled_for": kind}
    append(args.out, [row | {"part": n, "found": x} | provenance() for n, x in results.items()])
  print(json.dumps({"kind": kind, **results}))


if __name__ == "__main__":
  main()
