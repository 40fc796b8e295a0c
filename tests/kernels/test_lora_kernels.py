"""A frozen kernel and its adapter through interpreted kernels: y and the gradients of XLA."""

import jax
import jax.numpy as jnp
import mosaic_case
import numpy as np
import pytest
import triton_case

from sbjax.linear import quantized_dot as dot
from sbjax.linear.weight import LoRAWeight, serving_weight
from sbjax.ops.registry import Backend, get_backend
from sbjax.pallas.sm90 import scaled_matmul as sm90
from sbjax.quantize import quantize
from sbjax.recipes import RECIPES

SMALL = sm90.TileConfig(block_m=128, block_n=64, block_k=64, stages=2, cluster=None)


def triton(lhs, rhs, out_dtype, *, out_sharding=None, **added):
  kernels = triton_case.interpreted("triton.scaled_matmul")
  config = kernels.by_rule(lhs.values.shape[0], rhs.values.shape[0], 90)
  return jnp.asarray(kernels.scaled_matmul(lhs, rhs, out_dtype, config=config, **added))


def mosaic(lhs, rhs, out_dtype, *, out_sharding=None, **added):
  how = {"config": SMALL, "num_sms": 4}
  return jnp.asarray(
    mosaic_case.interpreted(sm90.scaled_matmul, lhs, rhs, out_dtype, **how, **added)
  )


@pytest.mark.parametrize(
  "kernel", [triton, pytest.param(mosaic, marks=mosaic_case.needs_interpreter)]
)
@pytest.mark.parametrize("name", ["switchback", "switchback_c"])
@pytest.mark.parametrize("has_adapter", [True, False])
def test_y_and_gradients_are_those_of_xla(monkeypatch, kernel, name, has_adapter):
  """The interpreters take no tracers: the two passes are called as JAX calls them."""
  numbers, recipe = np.random.default_rng(0), RECIPES[name]
  x, w, dy, a, b = (
    jnp.asarray(numbers.normal(size=size), dtype)
    for size, dtype in (
      *(((40, 64), jnp.bfloat16), ((64, 64), jnp.float32), ((40, 64), jnp.bfloat16)),
      *(((64, 4), jnp.float32), ((4, 64), jnp.float32)),
    )
  )
  kernel_8 = serving_weight(quantize(w.T, recipe.fwd[1]))
  weight = LoRAWeight(kernel_8, a, b) if has_adapter else kernel_8
  how = recipe, "xla", x.dtype, 1.0, jax.typeof(x).sharding, None

  def both():
    y, saved = dot._dot_fwd(how, x, weight, None, None)
    dx, dw, *_ = dot._dot_bwd(how, saved, dy)
    return y, dx, dw

  expected = both()
  operations = vars(get_backend("xla")) | {"scaled_matmul": kernel}
  monkeypatch.setattr(dot, "get_backend", lambda name: Backend(**operations))
  for own, other in zip(*map(jax.tree.leaves, (both(), expected)), strict=True):
    own, other = np.asarray(own, np.float32), np.asarray(other, np.float32)
    # Adding a residual may round once instead of twice.
    np.testing.assert_allclose(own, other, rtol=2**-7, atol=2**-7 * np.abs(other).max())
