"""The Mosaic quantizer that the benchmark races, interpreted."""

import jax
import jax.numpy as jnp
import pytest

from sbjax.formats import INT8
from sbjax.quantize import Spec, quantize

if jax.__version_info__ < (0, 11):
  pytest.skip("needs jax >= 0.11", allow_module_level=True)
plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
from benchmarks import quantize_mosaic  # noqa: E402


@pytest.mark.parametrize("k", [128, 768, 1664, 3072])  # A row a warp, or a row for four.
def test_it_is_the_definition_bit_for_bit(k):
  magnitudes = jnp.exp2(jnp.arange(-126.0, 126.0, 21.0)).astype(jnp.bfloat16)[:, None]
  x = jax.random.normal(jax.random.key(k), (12, k), jnp.bfloat16) * magnitudes
  x = x.at[3].set(0).at[4, 7].set(jnp.nan).at[5, 9].set(-jnp.inf)
  found = quantize_mosaic.quantize(x, interpret=plgpu.InterpretGPUParams())
  expected = quantize(x, Spec(INT8, "rowwise"))
  assert jnp.array_equal(found.values, expected.values)
  assert jnp.array_equal(found.scale, expected.scale, equal_nan=True)
  assert jnp.isnan(found.scale[4, 0]) and jnp.isnan(found.scale[5, 0]) and found.scale[3, 0] == 0


def test_what_it_does_not_take_is_an_error():
  for shape in ((12, 96), (6, 128)):
    with pytest.raises(NotImplementedError):
      quantize_mosaic.quantize(jnp.ones(shape, jnp.bfloat16))
