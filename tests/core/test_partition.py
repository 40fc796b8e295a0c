"""A kernel on a mesh gives the numbers of one device: each device computes on its shard.

The kernels here are the definition (`mesh_case`): these tests cover only the partitioning.
"""

import functools
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dot_case import INT8_SUMS, Result, assert_close, assert_same, make_case
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from mesh_case import DEFINITIONS, Product, make_mesh, on_shards, plain, put
from pairwise import mainly

from sbjax import (
  INT8,
  RECIPES,
  Quantized,
  Spec,
  quantize,
  quantized_dot,
  scaled_matmul,
)
from sbjax.ops.partition import _split, partitioned
from tests.aot.operations import gathered

LAYOUTS = {  # name: (x [M, K], w [K, N]) on a mesh of (data 2, fsdp 4)
  "batch": (P(("data", "fsdp")), P()),
  "K": (P("data", "fsdp"), P("fsdp")),
  "N": (P("data"), P(None, "fsdp")),
  "fsdp": (P(("data", "fsdp")), P("fsdp")),
}


def operands(rows, k, scaling, seed=0):
  x = np.random.default_rng(seed).normal(size=(rows, k)).astype(np.float32)
  return jax.tree.map(np.asarray, quantize(jnp.asarray(x), Spec(INT8, scaling)))


SHARDS = {  # layout: the shards of x [64, 128] and w.T [128, 128] that one device multiplies
  "batch": ((8, 128), (128, 128)),
  "K": ((32, 32), (128, 32)),
  "N": ((32, 128), (32, 128)),
  "fsdp": ((8, 128), (128, 128)),
}


def product_on_shards(mesh, layout, biased, product):
  """The sharded arguments, the function that multiplies them, and the expected product."""
  x_spec, w_spec = LAYOUTS[layout]
  k, n = (*w_spec, None, None)[:2]
  lhs, rhs = operands(64, 128, "rowwise"), operands(128, 128, "rowwise" if biased else "tensorwise")
  added = {}
  if biased:
    numbers = np.linspace(-1, 1, 64 * 128, dtype=np.float32).reshape(64, 128)
    added = {"bias": numbers[3] * 9, "residual": numbers}
  specs = (x_spec, P(n, k), P(x_spec[0]), P(n) if biased else P(), P(n), P(x_spec[0], n))
  lhs_spec, rhs_spec = lhs.spec, rhs.spec
  operands_of_all = lhs.values, rhs.values, lhs.scale, rhs.scale, *added.values()
  arrays = put(mesh, specs[: len(operands_of_all)], *operands_of_all)

  def run(lhs, rhs, lhs_scale, rhs_scale, *parts):
    given = Quantized(lhs, lhs_scale, lhs_spec), Quantized(rhs, rhs_scale, rhs_spec)
    options = dict(zip(added, parts, strict=True))
    return on_shards(product).scaled_matmul(*given, jnp.float32, **options)

  return arrays, run, np.asarray(scaled_matmul(lhs, rhs, jnp.float32, **added))


@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_each_device_multiplies_its_shards_and_gathers_no_activation(kind, layout, biased):
  product, mesh = Product(), make_mesh(kind)
  arrays, run, expected = product_on_shards(mesh, layout, biased, product)
  with jax.set_mesh(mesh):
    compiled = jax.jit(run).lower(*arrays).compile()
    y = compiled(*arrays)
  assert SHARDS[layout] in product.seen
  assert len(y.sharding.device_set) == 8 and not y.is_fully_replicated
  if biased:  # XLA may fuse the product and the sum.
    assert_close(y, expected, 2.0**-23)
  else:
    np.testing.assert_array_equal(y, expected)
  # Only a weight split over the batch's devices is gathered, in int8.
  assert gathered(compiled.as_text()) <= ({("s8", 128 * 128)} if layout == "fsdp" else set())


@pytest.mark.parametrize(
  ("form", "scaling"),
  [
    *itertools.product(["quantize", "quantize_transposed"], ["rowwise", "tensorwise"]),
    *itertools.product(["quantize_both"], ["tensorwise", "columnwise"]),
  ],
)
@pytest.mark.parametrize("spec", [P("data"), P(None, "fsdp"), P("fsdp", "data")], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_sharded_array_is_quantized_with_the_scale_of_the_whole(kind, spec, form, scaling):
  x = make_case(m=64, k=96).x  # The largest number is in one shard.
  mesh, fmt = make_mesh(kind), Spec(INT8, scaling)
  (split,) = put(mesh, [spec], x)
  with jax.set_mesh(mesh):
    run = jax.jit(lambda x: getattr(on_shards(), form)(x, fmt))
    compiled = run.lower(split).compile()
    actual = compiled(split)
  # Also compiled: XLA may round a product with a constant differently without compilation.
  expected = jax.jit(lambda x: DEFINITIONS[form](x, fmt))(x)
  assert_same(jax.tree.map(np.asarray, actual), expected)
  assert "all-gather" not in compiled.as_text()
  values = jax.tree.leaves(actual)[0]
  assert not values.is_fully_replicated


def make_layer(monkeypatch, name, backend):
  """A jitted function that computes y, dx and dw of a layer by a backend."""

  @jax.jit
  def layer(x, w, dy):
    module = importlib.import_module("sbjax.linear.quantized_dot")
    monkeypatch.setattr(module, "get_backend", lambda _: backend)
    y, backward = jax.vjp(lambda x, w: quantized_dot(x, w, name), x, w)
    return Result(y, *backward(dy))

  return layer


def put_case(mesh, layout, case):
  x_spec, w_spec = LAYOUTS[layout]
  return put(mesh, (x_spec, w_spec, P(x_spec[0], (*w_spec, None, None)[1])), *case)


def compare(name, split, alone):
  split, alone = jax.tree.map(np.asarray, (split, alone))
  if name in INT8_SUMS:
    assert_same((split.y, split.dx), (alone.y, alone.dx))
  # A float32 sum in another order may change the last bit of a bfloat16 result.
  assert_close((split.y, split.dx), (alone.y, alone.dx), 2.0**-8)
  assert_close(split.dw, alone.dw, 1e-5)


@pytest.mark.parametrize(
  ("name", "layout"),
  mainly(
    [
      *(("llm_int8", "batch"), ("switchback_m", "K"), ("switchback_c", "N")),
      *(("fp8_tensorwise", "fsdp"), ("fp8_switchback", "N")),
    ],
    itertools.product([name for name in RECIPES if name != "full"], LAYOUTS),
  ),
)
def test_a_sharded_layer_equals_one_device(monkeypatch, name, layout):
  case = make_case("bfloat16", m=256, k=128, n=192)
  arrays, product = put_case(make_mesh(), layout, case), Product()
  compiled = make_layer(monkeypatch, name, on_shards(product)).lower(*arrays).compile()
  compare(name, compiled(*arrays), make_layer(monkeypatch, name, plain())(*case))
  assert 256 // (8 if layout in ("batch", "fsdp") else 2) in {lhs[0] for lhs, _ in product.seen}
  moved = gathered(compiled.as_text())
  assert not {size for _, size in moved} & {256 * 128, 256 * 192}
  if layout == "fsdp":
    weights = {dtype for dtype, size in moved if size == 128 * 192}
    assert weights and not weights & {"f32", "bf16"}


@pytest.mark.parametrize(
  ("name", "layout"),
  [
    ("switchback_m", "batch"),
    ("switchback_m", "N"),
    ("switchback_m", "fsdp"),
    ("switchback_c", "N"),
    ("llm_int8", "fsdp"),
  ],
)
def test_in_explicit_mode_gradients_are_sharded_as_their_primals(monkeypatch, name, layout):
  case = make_case("bfloat16", m=256, k=128, n=192)
  mesh = make_mesh(AxisType.Explicit)
  x, w, dy = put_case(mesh, layout, case)
  with jax.set_mesh(mesh):
    split = make_layer(monkeypatch, name, on_shards(Product()))(x, w, dy)
  assert split.dx.sharding.is_equivalent_to(x.sharding, 2)
  assert split.dw.sharding.is_equivalent_to(w.sharding, 2)
  compare(name, split, make_layer(monkeypatch, name, plain())(*case))


def test_within_shard_map_each_shard_has_its_own_scale():
  x, mesh = make_case(m=64, k=96).x, make_mesh()

  def local(quantizer, x):
    return tuple(jax.tree.leaves(quantizer(x, Spec(INT8, "tensorwise"))))

  def mapped(quantizer):
    body = functools.partial(local, quantizer)
    specs = P("data", "fsdp")
    run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    assert "custom_partitioning" not in str(jax.make_jaxpr(run)(x))
    return jax.jit(run)(*put(mesh, [specs], x))

  ours = mapped(on_shards().quantize)
  assert_same(ours, mapped(quantize))
  assert len(np.unique(ours[1])) > 1  # Each shard has a scale of its own.


def test_vmap_calls_the_kernel_once_per_element():
  x = np.stack([make_case(m=32, k=48, seed=seed).x for seed in range(3)])
  spec = Spec(INT8, "tensorwise")
  product, w = Product(), operands(16, 48, "rowwise", seed=1)

  def run(x):
    backend = on_shards(product)
    return backend.scaled_matmul(backend.quantize(x, spec), w, jnp.float32)

  expected = [scaled_matmul(quantize(a, spec), w, jnp.float32) for a in x]
  np.testing.assert_array_equal(jax.jit(jax.vmap(run))(x), jnp.stack(expected))
  assert product.seen == {((32, 48), (16, 48))}


def test_k_whose_shards_are_no_multiples_of_16_is_gathered():
  product, mesh = Product(), make_mesh()
  lhs, rhs = operands(64, 80, "rowwise"), operands(48, 80, "tensorwise")
  arrays = put(mesh, (P("data", "fsdp"), P()), lhs.values, rhs.values)
  run = jax.jit(
    lambda a, b: on_shards(product).scaled_matmul(
      Quantized(a, lhs.scale, lhs.spec),
      Quantized(b, rhs.scale, rhs.spec),
      jnp.float32,
    )
  )
  np.testing.assert_array_equal(run(*arrays), scaled_matmul(lhs, rhs, jnp.float32))
  assert ((32, 80), (48, 80)) in product.seen


def test_an_axis_is_split_as_in_the_first_operand_if_its_size_divides():
  mesh, names = {"data": 2, "fsdp": 4}, [("m", "k"), ("n", "k")]

  def split(*operands, multiple_of_16=()):
    return _split(mesh, operands, names, multiple_of_16)

  assert split(((8, 8), P("data", "fsdp")), ((8, 8), P())) == {"m": ("data",), "k": ("fsdp",)}
  # A mesh axis serves one name, the first that has it.
  assert split(((8, 8), P(("data", "fsdp"))), ((8, 8), P("fsdp"))) == {"m": ("data", "fsdp")}
  assert split(((8, 8), P("data")), ((8, 8), P(("data", "fsdp")))) == {
    "m": ("data",), "n": ("fsdp",)
  }  # fmt: skip
  # An axis that only one operand splits is split in both.
  assert split(((8, 8), P()), ((8, 8), P(None, "data"))) == {"k": ("data",)}
  # Sizes that the devices do not divide, or not into multiples of 16.
  assert split(((6, 8), P("fsdp")), ((8, 8), P())) == {}
  assert split(((8, 48), P(None, "data")), ((8, 48), P()), multiple_of_16=["k"]) == {}
  assert split(((8, 64), P(None, "data")), ((8, 64), P()), multiple_of_16=["k"]) == {"k": ("data",)}
  # An axis of one device splits nothing.
  assert _split({"data": 1}, [((8, 8), P("data"))], [("m", "k")], ()) == {}


def test_an_axis_without_a_name_is_never_split():
  mesh = make_mesh()
  (x,) = put(mesh, [P("data", "fsdp")], np.arange(64.0, dtype=np.float32).reshape(8, 8))
  seen = []

  def local(run, split, x):
    seen.append((split, x.shape))
    return (jnp.sum(x, axis=1),)

  (y,) = jax.jit(lambda x: partitioned(local, [x], [("m", None)], [("m",)]))(x)
  np.testing.assert_array_equal(y, jnp.sum(np.asarray(x), axis=1))
  assert ({"m": ("data",)}, (4, 8)) in seen


def test_layers_share_a_kernel_lowered_once():
  mesh, lowered = make_mesh(), []

  def kernel(x, factor):
    lowered.append(x.shape)
    return x * factor

  def local(run, split, x):
    return (run(kernel, x, 2.0),)

  @functools.partial(jax.jit, static_argnums=1)
  def model(x, layers):
    for _ in range(layers):
      (x,) = partitioned(local, [x], [("m", "k")], [("m", "k")])
    return x

  (x,) = put(mesh, [P("data", "fsdp")], np.ones((8, 8), np.float32))
  for layers in (1, 3):
    np.testing.assert_array_equal(model(x, layers), np.full((8, 8), 2.0**layers))
  assert lowered.count((4, 2)) == 1
