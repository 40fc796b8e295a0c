"""Eight CPU devices, and a backend whose kernels are the definition in plain jnp."""

import types

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding

from benchmarks.absent_gpu import Device
from sbjax import INT8, scaled_matmul
from sbjax.ops.registry import OPERATIONS, backend_of, get_backend
from sbjax.quantize import factor_and_scale, format_of


class Product:
  """Replaces a matmul's kernels, and records the shapes of their operands."""

  def __init__(self):
    self.seen = set()

  def scaled_matmul(self, lhs, rhs, out_dtype, **added):
    self.seen.add((lhs.values.shape, rhs.values.shape))
    return scaled_matmul(lhs, rhs, out_dtype, **added)

  def accumulate(self, lhs, rhs):
    self.seen.add((lhs.shape, rhs.shape))
    contracting = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(
      lhs, rhs, contracting, preferred_element_type=format_of(lhs.dtype).accumulator
    )


def absmax(x, axis):
  return jnp.max(jnp.abs(x.astype(jnp.float32)), axis=axis, keepdims=True)


def cast_scaled(x, absmax, spec):
  limit = format_of(spec.dtype).max
  factor, _ = factor_and_scale(absmax, spec)
  y = jnp.clip(x.astype(jnp.float32) * factor, -limit, limit)
  return (jnp.round(y) if spec.dtype == INT8 else y).astype(spec.dtype)


DEFINITIONS = {name: row.definition for name, row in OPERATIONS.items()}


def backend_by(kernels, **others):
  """A backend whose kernels are a module's functions; `others` are modules by operation."""
  by_name = dict.fromkeys(OPERATIONS, kernels) | others
  device = Device("NVIDIA", None, "gpu", "9.0")
  return backend_of("mosaic", {name: [kernel] for name, kernel in by_name.items()}, device)


def on_shards(product=None):
  """A backend of these kernels, partitioned over the mesh."""
  kernels = types.SimpleNamespace(**DEFINITIONS, absmax=absmax, cast_scaled=cast_scaled)
  return backend_by(kernels, scaled_matmul=product)


def make_mesh(kind=AxisType.Auto):
  return jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(kind,) * 2)


def put(mesh, specs, *arrays):
  return [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]


def plain():
  """The definition, without kernels."""
  return get_backend("xla")
