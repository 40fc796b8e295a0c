"""Every container of ours goes through msgpack and jax.export."""

import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, serialization
from jax._src.tree_util import _registry

import sbjax
from sbjax.quantize import Quantized, Spec, quantize

# NamedTuples that hold no arrays of a user's: our own tables, and what is used within one trace.
TABLES = {"Backend", "Operation", "Format", "Row", "Weight", "Frozen", "Layout", "Inits"}
TABLES |= {"Estimate", "Rounding", "Group", "Forward"}  # Plain numbers of `sbjax.convert.rounding`.
SPEC = Spec(jnp.int8, "rowwise")


def containers():
  """Our NamedTuples and registered classes, by the modules that define them."""
  found = {}
  for module in pkgutil.walk_packages(sbjax.__path__, "sbjax."):
    if module.name.startswith("sbjax.pallas"):  # Needs packages of a GPU.
      continue
    for name, cls in vars(importlib.import_module(module.name)).items():
      if not inspect.isclass(cls) or cls.__module__ != module.name or name.startswith("_"):
        continue
      is_namedtuple = issubclass(cls, tuple) and hasattr(cls, "_fields")
      if is_namedtuple or (cls in _registry and not issubclass(cls, nnx.Module)):
        found[name] = cls
  return {name: cls for name, cls in found.items() if name not in TABLES}


def example(cls):
  """An instance with an array, or what it must have, in each field."""
  if cls is Spec:
    return SPEC
  if cls is Quantized:
    return quantize(jnp.ones((2, 16)), SPEC)
  if not hasattr(cls, "_fields"):  # A placeholder for an array of a shape.
    return cls((2, 16))
  return cls(*(jnp.full((2, 3), i, jnp.float32) for i, _ in enumerate(cls._fields)))


CONTAINERS = containers()


def test_all_kinds_are_found():
  assert {"Quantized", "QuantizedWeight", "LoRAWeight", "Spec", "ScaleByStableAdamState"} <= set(
    CONTAINERS
  )


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_goes_through_msgpack(name):
  value = {"layer": example(CONTAINERS[name])}
  target = jax.tree.map(jnp.zeros_like, value)
  read = serialization.from_bytes(target, serialization.to_bytes(value))
  assert jax.tree.structure(read) == jax.tree.structure(value)
  jax.tree.map(np.testing.assert_array_equal, read, value)
  dtypes = [[leaf.dtype for leaf in jax.tree.leaves(tree)] for tree in (read, value)]
  assert dtypes[0] == dtypes[1]


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_goes_through_an_exported_function(name):
  value = example(CONTAINERS[name])

  def function(value, x):
    return value, x + 1

  pytest.importorskip("flatbuffers")
  exported = jax.export.export(jax.jit(function))(value, jnp.ones(2))
  again = jax.export.deserialize(exported.serialize(vjp_order=0))
  result, _ = again.call(value, jnp.ones(2))
  assert jax.tree.structure(result) == jax.tree.structure(value)
  assert again.in_tree == exported.in_tree and again.out_tree == exported.out_tree
  jax.tree.map(np.testing.assert_array_equal, result, value)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise", "static"])
def test_every_format_of_8_bits_goes_through_msgpack(dtype, scaling):
  value = quantize(jnp.linspace(-1, 1, 32).reshape(2, 16), Spec(dtype, scaling))
  read = serialization.from_bytes(value, serialization.to_bytes(value))
  assert read.spec == value.spec and read.values.dtype == value.values.dtype
  np.testing.assert_array_equal(read.values, value.values)


def test_8_bits_of_another_format_or_shape_are_refused():
  int8 = quantize(jnp.ones((2, 16)), SPEC)
  for other in (Spec(jnp.float8_e4m3fn, "rowwise"), Spec(jnp.int8, "tensorwise")):
    written = serialization.to_bytes(quantize(jnp.ones((2, 16)), other))
    with pytest.raises(ValueError, match=r"The file's (values|scale) of a Quantized are"):
      serialization.from_bytes(int8, written)
