"""Are JAX's explicit mode and one `jax.shard_map` equally fast on several GPUs?

  python -m benchmarks.explicit_mode

Times the blocks of a model's image tower, forward and backward, on data=N GPUs: with the batch
split by one `jax.shard_map`, as train/step.py does it, and in explicit mode, where types carry
shardings and each GPU kernel gets a `shard_map` of its own. The first contender is one GPU.
Explicit mode rejects cuDNN's attention, which gets a `shard_map` here, and the rest of the training
step (docs/scaling.md). Adds a line to results/explicit_mode.jsonl. --platform=cpu shows that it
runs.
"""

import argparse
import functools
import statistics
import time
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.timing import append, provenance
from sbjax.models import SIZES, BlockOptions, transformer
from sbjax.models.sizes import VisionConfig
from sbjax.models.transformer import Block, Inits, blocks
from train.parallel import xla_flags

ROUNDS, STEPS = 7, 3


class Trunk(nn.Module):
  """The blocks of an image tower: x [B, L, D] to [B, L, D]."""

  config: VisionConfig
  options: BlockOptions

  @nn.compact
  def __call__(self, x_BLD):
    inits = Inits(*[nn.initializers.normal(0.02)] * 4)
    return blocks(x_BLD, self.config, self.options, block=Block, causal=False, inits=inits)[0]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", default="benchmarks/results/explicit_mode.jsonl")
  parser.add_argument("--size", default="L/14", choices=SIZES)
  parser.add_argument("--batch_size", type=int, default=256, help="of a device")
  parser.add_argument("--unroll", type=int, default=1, help="layers compiled together; 0: all")
  parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
  parser.add_argument("--platform", default="cuda", choices=["cuda", "cpu"])
  args = parser.parse_args()
  xla_flags.set_flags()
  jax.config.update("jax_platforms", args.platform)
  config = SIZES[args.size].vision
  trunk = Trunk(config, BlockOptions(recipe="switchback", unroll=args.unroll))
  found = {}
  for name in args.contenders:
    found[name] = measure(*CONTENDERS[name](trunk, config, args.batch_size))
    print(f"{name:10} {found[name]}", flush=True)
  line = {
    "benchmark": "explicit_mode",
    "size": args.size,
    "batch_size": args.batch_size,
    "layers": config.layers,
    "unroll": args.unroll,
    "contenders": found,
    "data": "normal numbers, one batch",
  }
  append(args.out, [line | provenance()])


def gradients(trunk, params, x):
  """The gradients of the mean square of the blocks' output."""

  def loss(params):
    return jnp.mean(jnp.square(trunk.apply(params, x).astype(jnp.float32)))

  return jax.grad(loss)(params)


def on_one(trunk, config, batch_size):
  return jax.jit(functools.partial(gradients, trunk)), *inputs(trunk, config, batch_size, None)


def by_shard_map(trunk, config, batch_size):
  mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))

  def of_shard(params, x):
    return jax.lax.pmean(gradients(trunk, params, x), "data")

  step = jax.shard_map(
    of_shard, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
  )
  return jax.jit(step), *inputs(trunk, config, batch_size * mesh.size, mesh)


def explicit(trunk, config, batch_size):
  mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Explicit,))
  attend = transformer.attention

  def attention(*qkv, **options):
    of_shard = functools.partial(attend, **options)
    return jax.shard_map(of_shard, in_specs=P("data"), out_specs=P("data"), check_vma=False)(*qkv)

  def step(params, x):
    with mock.patch.object(transformer, "attention", attention):
      return gradients(trunk, params, x)

  arrays = inputs(trunk, config, batch_size * mesh.size, mesh)
  jax.set_mesh(mesh)
  return jax.jit(step), *arrays


def inputs(trunk, config, batch_size, mesh):
  """Parameters on every device, and x split over `data`."""
  length = (config.image_size // config.patch_size) ** 2 + 1
  shape = (batch_size, length, config.width)
  everywhere, rows = (mesh and NamedSharding(mesh, spec) for spec in (P(), P("data")))
  tokens = jnp.zeros((1, *shape[1:]), jnp.bfloat16)
  params = jax.jit(trunk.init, out_shardings=everywhere)(jax.random.key(0), tokens)
  x = jax.jit(
    functools.partial(jax.random.normal, shape=shape, dtype=jnp.bfloat16), out_shardings=rows
  )(jax.random.key(1))
  return params, x


def measure(step, params, x) -> dict:
  started = time.perf_counter()
  compiled = step.lower(params, x).compile()
  seconds, times = time.perf_counter() - started, []
  for _ in range(ROUNDS + 1):
    started = time.perf_counter()
    for _ in range(STEPS):
      result = compiled(params, x)
    jax.block_until_ready(result)
    times.append((time.perf_counter() - started) / STEPS)
  return {
    "milliseconds": round(statistics.median(times[1:]) * 1e3, 2),
    "compile_seconds": round(seconds, 1),
    "temporary_gigabytes": round(compiled.memory_analysis().temp_size_in_bytes / 1e9, 2),
  }


CONTENDERS = {"one": on_one, "shard_map": by_shard_map, "explicit": explicit}

if __name__ == "__main__":
  main()
