"""`quantized_dot` on a mesh gives the numbers of one device and gathers no activation."""

import math
import re

import jax
import numpy as np
import pytest
from dot_case import INT8_SUMS, Case, apply, assert_close, assert_same, layer, make_case
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pairwise import mainly

from sbjax import RECIPES, quantized_dot
from sbjax.recipes import SWITCHBACK

LAYOUTS = {  # name: (mesh shape, x, w)
  "batch": ((4, 2), P("data"), P()),
  "K": ((4, 2), P("data", "model"), P("model")),
  "N": ((2, 4), P("data"), P(None, "model")),
  "K and N": ((2, 4), P(None, "data"), P("data", "model")),
  "fsdp": ((2, 4), P(("data", "model")), P("model")),
}


def case_32():
  return make_case(m=32, k=136, n=128)


def sharded(case, layout, axis_type=AxisType.Auto):
  """The case sharded over eight devices; dy is sharded as y."""
  shape, x_spec, w_spec = LAYOUTS[layout]
  mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(axis_type,) * 2)
  dy_spec = P(x_spec[0], *[None] * (case.x.ndim - 2), w_spec[1] if len(w_spec) > 1 else None)
  if case.x.ndim > 2 and len(x_spec) > 1:
    x_spec = P(x_spec[0], None, x_spec[1])
  specs = (x_spec, w_spec, dy_spec)
  return [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(case, specs, strict=True)]


def compare(name, split, alone):
  split = jax.tree.map(np.asarray, split)
  if name in INT8_SUMS:
    assert_same((split.y, split.dx), (alone.y, alone.dx))
  if name == "llm_int8":
    assert_same(split.dw, alone.dw)
  assert_close(split, alone, 1e-6)


@pytest.mark.parametrize("name", RECIPES)
def test_a_split_batch_equals_one_device_and_gathers_nothing(name):
  case = case_32()
  alone = apply(*case, RECIPES[name])
  operands = sharded(case, "batch")
  compiled = layer.lower(*operands, RECIPES[name]).compile()
  compare(name, compiled(*operands), alone)
  hlo = compiled.as_text()
  assert "all-reduce" in hlo  # dw is a sum over the batch.
  for moved in ("all-gather", "all-to-all", "collective-permute"):
    assert moved not in hlo


@pytest.mark.parametrize("name", mainly(["switchback", "llm_int8", "fp8_tensorwise"], RECIPES))
@pytest.mark.parametrize("layout", ["K", "N"])
def test_a_split_width_equals_one_device(name, layout):
  case = case_32()
  split = layer(*sharded(case, layout), RECIPES[name])
  assert len(split.y.sharding.device_set) == 8
  compare(name, split, apply(*case, RECIPES[name]))


def test_splitting_both_widths_equals_one_device():
  case = case_32()
  split = layer(*sharded(case, "K and N"), SWITCHBACK)
  compare("switchback", split, apply(*case, SWITCHBACK))


@pytest.mark.parametrize("name", ["switchback", "switchback_m"])
def test_a_weight_split_over_the_batch_devices_is_gathered_in_int8(name):
  case = make_case("bfloat16", m=256, k=64, n=128)
  operands = sharded(case, "fsdp")
  compiled = layer.lower(*operands, RECIPES[name]).compile()
  compare(name, compiled(*operands), apply(*case, RECIPES[name]))
  gathered = re.findall(r"= (\w+)\[([\d,]*)\]\S* all-gather", compiled.as_text())
  assert gathered and {dtype for dtype, _ in gathered} == {"s8"}
  assert {math.prod(map(int, shape.split(","))) for _, shape in gathered} == {64 * 128}


@pytest.mark.parametrize("layout", ["batch", "N", "fsdp"])
@pytest.mark.parametrize("name", ["full", "switchback_m"])
def test_in_explicit_mode_gradients_are_sharded_as_their_primals(name, layout):
  case = case_32()
  x, w, dy = sharded(case, layout, AxisType.Explicit)
  with jax.set_mesh(x.sharding.mesh):
    split = layer(x, w, dy, RECIPES[name])
  assert split.dx.sharding.is_equivalent_to(x.sharding, 2)
  assert split.dw.sharding.is_equivalent_to(w.sharding, 2)
  compare(name, split, apply(*case, RECIPES[name]))


@pytest.mark.parametrize("spec", [P("data"), P(), P("data", "model")], ids=str)
def test_in_explicit_mode_a_residual_s_gradient_is_sharded_as_the_residual(spec):
  case = case_32()
  x, w, dy = sharded(case, "N", AxisType.Explicit)
  residual = jax.device_put(np.ones_like(case.dy), NamedSharding(x.sharding.mesh, spec))

  @jax.jit
  def run(x, w, residual, dy):
    y, backward = jax.vjp(
      lambda *a: quantized_dot(*a[:2], SWITCHBACK, residual=a[2]), x, w, residual
    )
    return y, *backward(dy)

  with jax.set_mesh(x.sharding.mesh):
    y, dx, _, d_residual = run(x, w, residual, dy)
  alone = apply(*case, SWITCHBACK)
  assert d_residual.sharding.is_equivalent_to(residual.sharding, 2)
  assert_close((y, dx, d_residual), (alone.y + 1, alone.dx, case.dy), 1e-6)


def test_explicit_mode_accepts_a_batch_of_sequences():
  case = case_32()
  alone = apply(*case, SWITCHBACK)
  case = Case(case.x.reshape(8, 4, -1), case.w, case.dy.reshape(8, 4, -1))
  x, w, dy = sharded(case, "batch", AxisType.Explicit)
  with jax.set_mesh(x.sharding.mesh):
    y, dx, dw = layer(x, w, dy, SWITCHBACK)
  assert y.sharding.is_equivalent_to(dy.sharding, 3)
  assert dx.sharding.is_equivalent_to(x.sharding, 3)
  y, dx = np.asarray(y), np.asarray(dx)
  assert_same((y.reshape(alone.y.shape), dx.reshape(alone.dx.shape)), (alone.y, alone.dx))
  assert_close(dw, alone.dw, 1e-6)
