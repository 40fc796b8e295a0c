"""Norms, GELU and gated units with their matmuls on a mesh that splits rows or columns."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from mesh_case import Product, make_mesh, on_shards, plain, put
from pairwise import mainly

from sbjax.linear import fused, weight
from sbjax.linear.fused import gated_mlp, layer_norm_dense, layer_norm_mlp
from sbjax.ops.rows import LayerNormParams, RMSNormParams
from tests.aot.operations import gathered

MLP_LAYOUTS = {  # of x [M, K], w1 [K, H] and w2 [H, K]
  "batch": (P(("data", "fsdp")), P(), P()),
  "fsdp": (P(("data", "fsdp")), P("fsdp"), P(None, "fsdp")),
  "tensor": (P("data"), P(None, "fsdp"), P("fsdp")),
}


def mlp_case():
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
  w1, w2 = draw(128, 256) / 11, draw(256, 128) / 16
  return draw(320, 128), draw(2, 320, 128), draw(4, 128), w1, draw(256), w2


def put_mlp(mesh, layout, case):
  x_spec, w1_spec, w2_spec = MLP_LAYOUTS[layout]
  specs = x_spec, P(None, *x_spec), P(), w1_spec, P(*w1_spec[1:]), w2_spec
  return put(mesh, specs, *case)


def make_mlp(monkeypatch, name, backend, gated=False):
  """gated: an RMS norm and a gated unit; up is gate and 0.1."""

  def run(x, gradients, vectors, w1, b1, w2):
    monkeypatch.setattr(fused, "get_backend", lambda _: backend)
    monkeypatch.setattr(weight, "get_backend", lambda _: backend)
    scale, bias, b2, _ = vectors
    adds = name != "switchback_m"  # switchback_m returns x and y separately here.

    def mlp(x, scale, bias, w1, b1, w2, b2):
      if gated:
        norm, biases = RMSNormParams(1 + scale / 4), {"b_gate": b1, "b_down": b2}
        return gated_mlp(x, norm, w1, w1 + 0.1, w2, name, add_residual=adds, **biases)
      norm = LayerNormParams(1 + scale / 4, bias)
      return layer_norm_mlp(x, norm, w1, b1, w2, b2, name, add_residual=adds)

    y, backward = jax.vjp(mlp, x, scale, bias, w1, b1, w2, b2)
    return y, backward(gradients[1] if adds else tuple(gradients))

  return jax.jit(run)


NAMES = ["full", "switchback", "switchback_m", "switchback_cm", "fp8_switchback"]
IS_GATED = [False, True]


@pytest.mark.parametrize("layout", MLP_LAYOUTS)
@pytest.mark.parametrize("gated", IS_GATED)
@pytest.mark.parametrize("name", mainly(["switchback_cm"], NAMES))
def test_a_sharded_mlp_equals_one_device_and_gathers_no_activation(
  monkeypatch, name, gated, layout
):
  case = mlp_case()
  arrays = put_mlp(make_mesh(), layout, case)
  compiled = make_mlp(monkeypatch, name, on_shards(Product()), gated).lower(*arrays).compile()
  split, alone = compiled(*arrays), make_mlp(monkeypatch, name, plain(), gated)(*case)
  for a, b in zip(jax.tree.leaves(split), jax.tree.leaves(alone), strict=True):
    assert np.linalg.norm(a - b) <= (1e-5 if name == "full" else 4e-3) * np.linalg.norm(b)
  moved = {size for _, size in gathered(compiled.as_text())}
  rows_of_a_device = 160 if layout == "tensor" else 40
  assert not {size for size in moved if size % rows_of_a_device == 0}


@pytest.mark.parametrize("gated", IS_GATED)
@pytest.mark.parametrize(
  ("by_kernels", "layout"),
  # Without kernels JAX finds the shardings of all other layouts ambiguous.
  mainly(
    [(False, "batch"), (True, "fsdp")],
    [(False, "batch"), *((True, layout) for layout in MLP_LAYOUTS)],
  ),
)
def test_an_mlp_in_explicit_mode_equals_one_device(monkeypatch, by_kernels, layout, gated):
  mesh, case = make_mesh(AxisType.Explicit), mlp_case()
  arrays = put_mlp(mesh, layout, case)
  backend = on_shards(Product()) if by_kernels else plain()
  with jax.set_mesh(mesh):
    split = make_mlp(monkeypatch, "switchback", backend, gated)(*arrays)
  alone = make_mlp(monkeypatch, "switchback", plain(), gated)(*case)
  for a, b in zip(jax.tree.leaves(split), jax.tree.leaves(alone), strict=True):
    assert np.linalg.norm(a - b) <= 4e-3 * np.linalg.norm(b)


def test_dx_with_add_residual_is_sharded_as_x():
  mesh, case = make_mesh(AxisType.Explicit), mlp_case()
  x, _, vectors, w1, b1, w2 = case
  specs = P("data"), P(), P(), P(), P(None, "fsdp")  # The product is split by columns.

  def loss(x, vectors, w1, b1, w2):
    norm = LayerNormParams(1 + vectors[0] / 4, vectors[1])
    y = layer_norm_mlp(x, norm, w1, b1, w2, None, "switchback", backend="xla", add_residual=True)
    return jnp.sum(y * y)

  gradient = jax.jit(jax.grad(loss))
  arrays = put(mesh, specs, x, vectors, w1, b1, w2)
  with jax.set_mesh(mesh):
    dx = gradient(*arrays)
  assert dx.sharding.is_equivalent_to(arrays[0].sharding, 2)
  alone = gradient(x, vectors, w1, b1, w2)
  assert np.linalg.norm(dx - alone) <= 4e-3 * np.linalg.norm(alone)


def test_the_gradient_of_a_bias_is_sharded_as_the_bias(monkeypatch):
  mesh, case = make_mesh(AxisType.Explicit), mlp_case()
  x, gradients, vectors, w1, _, w2 = put_mlp(mesh, "batch", case)
  (b1,) = put(mesh, [P("fsdp")], case[4])
  with jax.set_mesh(mesh):
    run = make_mlp(monkeypatch, "switchback", on_shards(Product()))
    _, (*_, db1, _, _) = run(x, gradients, vectors, w1, b1, w2)
  _, (*_, alone, _, _) = make_mlp(monkeypatch, "switchback", plain())(*case)
  assert db1.sharding.spec == P("fsdp")
  np.testing.assert_allclose(db1, alone, rtol=0, atol=4e-3 * np.abs(alone).max())


def dot_case():
  """(x, its residual gradient), gradients of three outputs, a layer norm, w and bias."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
  return draw(2, 320, 128), draw(3, 320, 256), draw(2, 128), draw(128, 768) / 11, draw(768)


def put_dot(mesh, layout, case):
  x_spec, w_spec, _ = MLP_LAYOUTS[layout]
  columns = w_spec[1:]
  specs = P(None, *x_spec), P(None, *x_spec, *columns), P(), w_spec, P(*columns)
  return put(mesh, specs, *case)


def make_dot(monkeypatch, backend):
  def run(x_and_dx, dys, norm, w, bias):
    monkeypatch.setattr(fused, "get_backend", lambda _: backend)
    x, dx = x_and_dx

    def dot(x, scale, shift, w, bias):
      return layer_norm_dense(
        x, LayerNormParams(1 + scale / 4, shift), w, "switchback", bias=bias, num_outputs=3
      )

    (_, ys), backward = jax.vjp(dot, x, *norm, w, bias)
    return ys, backward((dx, tuple(dys)))

  return jax.jit(run)


@pytest.mark.parametrize(
  ("kind", "layout"),
  mainly(
    [(AxisType.Auto, "batch"), (AxisType.Explicit, "fsdp"), (AxisType.Auto, "tensor")],
    itertools.product([AxisType.Auto, AxisType.Explicit], MLP_LAYOUTS),
  ),
  ids=str,
)
def test_a_sharded_layer_norm_dense_with_three_outputs_equals_one_device(monkeypatch, kind, layout):
  case, mesh = dot_case(), make_mesh(kind)
  arrays = put_dot(mesh, layout, case)
  with jax.set_mesh(mesh):
    compiled = make_dot(monkeypatch, on_shards(Product())).lower(*arrays).compile()
  split, alone = compiled(*arrays), make_dot(monkeypatch, plain())(*case)
  for a, b in zip(jax.tree.leaves(split), jax.tree.leaves(alone), strict=True):
    assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)
  if layout != "tensor":  # There a device has columns of each output, not a shard of all columns.
    assert not {size for _, size in gathered(compiled.as_text()) if size % 40 == 0}
