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

from benchmarks.scaling import moved
from train.config import OptimizerConfig
from train.optimizer import STATES, make_optimizer, matrix_dtype


def argument(mesh, shape, dtype, spec):
  return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def update_bytes(mesh_for):
  """Temporary bytes a parameter of an update of a stack of layers, for each choice of states."""
  results, shape = {}, (4, 1024, 4096)
  for states in STATES:
    optimizer, _ = make_optimizer(OptimizerConfig(states=states, warmup_steps=1), 10)

    def step(params, state, gradients, optimizer=optimizer):
      updates, state = optimizer.update(gradients, state, params)
      return optax.apply_updates(params, updates), state

    with mesh_for((1,), ("data",)) as mesh:
      params = {"blocks": {"w": jax.ShapeDtypeStruct(shape, matrix_dtype(states))}}
      arguments = params, jax.eval_shape(optimizer.init, params), params
      place = functools.partial(argument, mesh)
      arguments = jax.tree.map(lambda x, place=place: place(x.shape, x.dtype, P()), arguments)
      memory = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile().memory_analysis()
    results[states] = {
      "temporary": memory.temp_size_in_bytes / math.prod(shape),
      "in_place": memory.alias_size_in_bytes / math.prod(shape),
    }
  return results


def sharded_update(mesh_for):
  """What an update of coded moments moves between four devices, and its kernels' results."""
  of = {"kernel": ((2, 768, 1024), P(None, "fsdp")), "embedding": ((4096, 1024), P(None, "fsdp"))}
  optimizer, _ = make_optimizer(OptimizerConfig(states="coat", warmup_steps=1), 10)
  with mesh_for((1, 4), ("data", "fsdp")) as mesh:
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, (shape, _) in of.items()}
    state = jax.eval_shape(optimizer.init, params)

    def place(path, x):
      name = next((n for n in of if n in jax.tree_util.keystr(path)), None)
      fits = name is not None and x.ndim == len(of[name][0])
      return argument(mesh, x.shape, x.dtype, of[name][1] if fits else P())

    arguments = jax.tree_util.tree_map_with_path(place, (params, state, params))
    hlo = jax.jit(optimizer.update, donate_argnums=1).lower(*arguments).compile().as_text()
  calls = re.findall(r"= \(f32\[([\d,]*)\].*custom_call_target=\"triton", hlo)
  return {"moved": moved(hlo), "directions": sorted(calls)}
