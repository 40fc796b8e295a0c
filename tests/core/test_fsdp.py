"""Weights sharded over devices and gathered in 8 bits: the numbers of one device, in few bytes."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from mesh_case import make_mesh, put

from sbjax import RECIPES, quantized_dot
from sbjax.distributed.fsdp import gather, gather_weight
from sbjax.linear.weight import QuantizedWeight, quantize_weight

K, N, ROWS = 64, 48, 32
IN_8_BITS = [name for name in RECIPES if name != "full"]


def case():
  rng = np.random.default_rng(0)
  x, w = rng.normal(size=(ROWS, K)), rng.normal(size=(K, N)) * np.exp(rng.normal(size=(K, 1)))
  return x.astype(np.float32), w.astype(np.float32)


def on_devices(function, in_specs, out_specs, **options):
  """A function jitted in a shard_map over 2 x 4 devices."""
  return jax.jit(
    jax.shard_map(function, mesh=make_mesh(), in_specs=in_specs, out_specs=out_specs, **options)
  )


def gradients(recipe, check_vma=False, **options):
  """(dx, dw) of a linear layer on one device, those on eight, and the program of the eight."""

  def layer(x, kernel):
    return quantized_dot(x, kernel, recipe)

  def local(x, w):
    axes = {} if check_vma else {"reduce_axes": "data"}

    def loss(x, w):
      kernel = gather_weight(w, recipe, "fsdp", dtype=jnp.float32, **axes, **options)
      return jnp.sum(jnp.sin(layer(x, kernel)))

    return jax.grad(loss, (0, 1))(x, w)

  x, w = case()
  specs = P(("data", "fsdp")), P("fsdp")
  many = on_devices(local, specs, specs, check_vma=check_vma)
  arrays = put(make_mesh(), specs, x, w)
  one = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(layer(x, w))), (0, 1)))(x, w)
  return one, many(*arrays), many.lower(*arrays).as_text()


@pytest.mark.parametrize("name", IN_8_BITS)
def test_gather_weight_equals_quantize_weight(name):
  _, w = case()
  run = on_devices(lambda w: gather_weight(w, name, "fsdp")[1:], P("fsdp"), P(), check_vma=False)
  fwd, dgrad = run(w)
  _, *expected = jax.jit(functools.partial(quantize_weight, recipe=name))(w)
  shared = RECIPES[name].shares_w
  assert (fwd is None) == shared
  jax.tree.map(np.testing.assert_array_equal, [dgrad.T if shared else fwd, dgrad], expected)


def test_a_recipe_that_rounds_w_in_one_matmul_has_the_gradients_of_one_device():
  one, many, _ = gradients(dataclasses.replace(RECIPES["switchback"], dgrad=None))
  for a, b in zip(many, one, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  "name", ["full", "switchback", "switchback_m", "switchback_q", "switchback_c"]
)
def test_gradients_of_eight_devices_equal_those_of_one(name):
  one, many, text = gradients(name)
  for a, b in zip(many, one, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
  gathered = re.findall(r'"stablehlo.all_gather".*? -> tensor<(\w+)>', text)
  # A single scale serves w and w.T, as do scales of columns, which all devices have. Scales of rows
  # need two gathers of values and one of scales.
  expected = {"full": [f"{K}x{N}xf32"], "switchback_q": [f"{K}x1xf32", *[f"{K}x{N}xi8"] * 2]}
  assert sorted(gathered) == expected.get(name, [f"{K}x{N}xi8"])


@pytest.mark.parametrize("name", ["full", "switchback", "switchback_q", "switchback_c"])
def test_gradients_equal_one_device_s_with_check_vma(name):
  one, many, _ = gradients(name, check_vma=True)
  for a, b in zip(many, one, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_gradient_is_reduce_scattered_in_gradient_dtype(dtype):
  one, many, text = gradients("switchback", gradient_dtype=dtype)
  error = np.linalg.norm(many[1] - one[1]) / np.linalg.norm(one[1])
  assert many[1].dtype == jnp.float32
  assert 2.0**-12 < error < 2.0**-7 if dtype == jnp.bfloat16 else error < 1e-6
  scattered = re.findall(
    r'"stablehlo.reduce_scatter".*?\}\) : \(tensor<\d+x\d+x(\w+)>\)', text, re.S
  )
  assert scattered == ["bf16" if dtype == jnp.bfloat16 else "f32"]


def test_an_unquantized_weight_is_gathered_in_16_bits():
  _, w = case()
  run = on_devices(lambda w: gather_weight(w, "full", "fsdp"), P("fsdp"), P(), check_vma=False)
  assert "bf16" in run.lower(w).as_text()
  np.testing.assert_array_equal(run(w), w.astype(jnp.bfloat16).astype(np.float32))


def test_gather_weight_without_an_axis_is_quantize_weight():
  _, w = case()
  weight = gather_weight(w, "switchback", None)
  assert isinstance(weight, QuantizedWeight)
  jax.tree.map(np.testing.assert_array_equal, weight, quantize_weight(w, "switchback"))


@pytest.mark.parametrize("axis", [0, 1])
def test_gather_gathers_along_an_axis_and_splits_the_gradient(axis):
  x = np.random.default_rng(1).normal(size=(8, 12)).astype(np.float32)
  spec = P(*[None] * axis, "fsdp")

  def local(x):
    def loss(x):
      return jnp.sum(gather(x, "fsdp", axis=axis, reduce_axes=("data",)) ** 2) / 8

    return jax.value_and_grad(loss)(x)

  value, gradient = on_devices(local, spec, (P(), spec), check_vma=False)(x)
  np.testing.assert_allclose(8 * value, np.sum(x**2), rtol=1e-6)
  np.testing.assert_allclose(gradient, 2 * x, rtol=1e-6)


def test_a_stack_of_kernels_is_an_error():
  with pytest.raises(ValueError, match=r"a kernel \[K, N\], not \(2, 3, 4\)"):
    gather_weight(jnp.zeros((2, 3, 4)), "switchback", "fsdp")
