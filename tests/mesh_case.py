"""Eight CPU devices, and a backend on them whose kernels are the definition in plain jnp."""

import types

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding

from sbjax import INT8, fused_ops, quantize, scaled_matmul
from sbjax.backends import _ROWS, Backend, _on_shards
from sbjax.formats import accumulator_dtype, max_value
from sbjax.quantize import factor_and_scale

FORMS = ("quantize", "quantize_transposed", "quantize_both")


class Product:
  """Stands for a matmul's kernels, and notes what it was given to multiply."""

  def __init__(self):
    self.seen = set()

  def scaled_matmul(self, lhs, rhs, out_dtype, **added):
    self.seen.add((lhs.values.shape, rhs.values.shape))
    return scaled_matmul(lhs, rhs, out_dtype, **added)

  def accumulate(self, lhs, rhs):
    self.seen.add((lhs.shape, rhs.shape))
    contracting = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(
      lhs, rhs, contracting, preferred_element_type=accumulator_dtype(lhs.dtype)
    )


def absmax(x, axis):
  return jnp.max(jnp.abs(x.astype(jnp.float32)), axis=axis, keepdims=True)


def cast_scaled(x, absmax, spec, *, transpose=False):
  limit = max_value(spec.dtype)
  factor, _ = factor_and_scale(absmax, spec)
  y = jnp.clip(x.astype(jnp.float32) * factor, -limit, limit)
  values = (jnp.round(y) if spec.dtype == INT8 else y).astype(spec.dtype)
  return (values, values.T) if transpose == "both" else values.T if transpose else values


def quantize_both(x, spec):
  return quantize(x, spec), quantize(x, spec).T


QUANTIZERS = types.SimpleNamespace(
  quantize=quantize,
  quantize_transposed=lambda x, spec: quantize(x.T, spec),
  quantize_both=quantize_both,
  absmax=absmax,
  cast_scaled=cast_scaled,
)


def on_shards(product):
  """A backend of these kernels, with the parts of sbjax.backends that give each device its own."""
  return _on_shards(
    "mosaic", product, QUANTIZERS, {name: getattr(fused_ops, name) for name in _ROWS}
  )


def make_mesh(kind=AxisType.Auto):
  return jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(kind,) * 2)


def put(mesh, specs, *arrays):
  return [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]


def plain():
  """The same without a mesh."""
  forms = (getattr(QUANTIZERS, form) for form in FORMS)
  return Backend("xla", *forms, scaled_matmul, *(getattr(fused_ops, name) for name in _ROWS))
