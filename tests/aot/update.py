"""The optimizer's update, compiled for absent GPUs.

mesh_for: a context manager from sizes and names of axes to a mesh of absent devices.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.collectives import moved
from train.config import OptimizerConfig
from train.optimizer import STATES, make_optimizer, matrix_dtype
from train.parallel.sharding import state_shardings


def _placed(x, sharding):
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def update_bytes(mesh_for):
  """Bytes a parameter that an update of a stack of layers takes, with its gradients, by states.

  "averaged" has states of float32, and their average.
  """
  results, shape = {}, (4, 1024, 4096)
  cases = {states: OptimizerConfig(states=states, warmup_steps=1) for states in STATES}
  cases["averaged"] = OptimizerConfig(ema=0.999, warmup_steps=1)
  for name, config in cases.items():
    optimizer, _ = make_optimizer(config, 10)

    def step(params, state, optimizer=optimizer):
      gradients = jax.lax.optimization_barrier(jax.tree.map(jnp.sin, params))
      updates, state = optimizer.update(gradients, state, params)
      return optax.apply_updates(params, updates), state

    with mesh_for((1,), ("data",)) as mesh:
      params = {"blocks": {"w": jax.ShapeDtypeStruct(shape, matrix_dtype(config.states))}}
      arguments = params, jax.eval_shape(optimizer.init, params)
      whole = functools.partial(_placed, sharding=NamedSharding(mesh, P()))
      arguments = jax.tree.map(whole, arguments)
      memory = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile().memory_analysis()
    results[name] = {
      "temporary": memory.temp_size_in_bytes / math.prod(shape),
      "in_place": memory.alias_size_in_bytes / math.prod(shape),
    }
  return results


def sharded_update(mesh_for, width):
  """What an update of coded moments moves between four devices, and its kernels' results."""
  shapes = {
    "image": {"qkv": {"kernel": (2, 768, 1024)}},
    "text": {"token_embedding": {"embedding": (4096, width)}},
  }
  params = jax.tree.map(
    lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
    shapes,
    is_leaf=lambda x: type(x) is tuple,
  )
  config = OptimizerConfig(states="coat", warmup_steps=1, float32_moments=())
  optimizer, _ = make_optimizer(config, 10)
  with mesh_for((1, 4), ("data", "fsdp")) as mesh:
    arrays = params, jax.eval_shape(optimizer.init, params), params
    arguments = jax.tree.map(
      _placed, arrays, tuple(state_shardings(tree, params, mesh) for tree in arrays)
    )
    hlo = jax.jit(optimizer.update, donate_argnums=1).lower(*arguments).compile().as_text()
  calls = re.findall(r"= \(f32\[([\d,]*)\].*custom_call_target=\"triton", hlo)
  return {"moved": moved(hlo), "directions": sorted(calls)}
