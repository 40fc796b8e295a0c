"""Values and shardings of Flax's layers on an explicit mesh, where types have shardings."""

import functools
import importlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_case import assert_close, drawn, normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_case import Product, on_shards
from pairwise import mainly

from sbjax import quantized_dot_general

QUICK = {"xla_backend_optimization_level": 0}  # Nothing here is run twice.
HEADS = P(None, "model")


def dense(features, **options):
  return lambda dot: nn.DenseGeneral(features, dot_general=dot, **options)


def attention(dot):
  return nn.MultiHeadDotProductAttention(4, qkv_dot_general=dot, out_dot_general=dot)


# name: (shape of x, layer, spec of x, spec of its kernels); Flax's own layers accept them all.
LAYERS = {
  "dense": ((8, 4, 16), dense(32), P("data"), HEADS),
  "to heads": ((8, 4, 16), dense((4, 16)), P("data"), P()),
  "to split heads": ((8, 4, 16), dense((4, 16)), P("data"), HEADS),
  "from heads": ((8, 4, 2, 8), dense(16, axis=(-2, -1)), P("data"), P()),
  "split tokens": ((8, 4, 16), dense((4, 16)), P("data", "model"), P()),
  "only tokens": ((8, 4, 16), dense((4, 16)), P(None, "model"), P()),
  "middle axis": ((8, 16, 4), dense((4, 16), axis=1), P("data"), HEADS),
  "attention": ((8, 4, 16), attention, P(("data", "model")), P()),
}


def gradients(layer, variables, x):
  """y, and the gradients of the sum of its squares."""

  def loss(variables, x):
    y = layer.apply(variables, x)
    return jnp.sum(y * y), y

  (_, y), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(variables, x)
  return y, grads


def run(layer, *args):
  return jax.jit(functools.partial(gradients, layer), compiler_options=QUICK)(*args)


@pytest.mark.parametrize(
  ("kind", "by_kernels"),
  mainly(
    [*((kind, False) for kind in LAYERS if kind != "attention"), ("attention", True)],
    [*((kind, False) for kind in LAYERS), ("to split heads", True), ("attention", True)],
  ),
)
def test_flax_layers_in_explicit_mode_equal_one_device(monkeypatch, kind, by_kernels):
  shape, make, x_spec, kernel_spec = LAYERS[kind]
  layer, x = make(quantized_dot_general("switchback")), normal(shape)
  variables = drawn(jax.eval_shape(layer.init, jax.random.key(0), x))
  alone = jax.tree.map(np.asarray, run(layer, variables, x))
  mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)

  def put(path, array):
    spec = {"kernel": kernel_spec, "x": x_spec}.get(path[-1].key, P())
    return jax.device_put(array, NamedSharding(mesh, spec))

  if by_kernels:
    module = importlib.import_module("sbjax.linear.quantized_dot")
    backend = on_shards(Product())
    monkeypatch.setattr(module, "get_backend", lambda _: backend)
  arguments = jax.tree.map_with_path(put, {"variables": variables, "x": x})
  with jax.set_mesh(mesh):
    split = run(layer, *arguments.values())
    flax_s = jax.eval_shape(functools.partial(gradients, make(None)), *arguments.values())
  for a, b in zip(jax.tree.leaves(split), jax.tree.leaves(flax_s), strict=True):
    assert a.sharding.spec == b.sharding.spec
  assert_close(jax.tree.map(np.asarray, split), alone, 1e-5)
