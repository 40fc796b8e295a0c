"""`quantized_einsum`: einsum in 8 bits, with roles said."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_case import int8_products, normal

from sbjax.convert.quantize_model import quantized_einsum


@pytest.mark.parametrize(
  ("equation", "shapes"),
  [
    ("ebd,edf->bef", ((2, 3, 16), (2, 16, 4))),
    ("btd,dnh->btnh", ((2, 3, 16), (16, 2, 4))),
    ("btnh,nhd->btd", ((2, 3, 2, 8), (2, 8, 16))),
    ("bd,fd->fb", ((3, 16), (4, 16))),
  ],
)
def test_quantized_einsum_rounds_w_as_the_weight(equation, shapes):
  x, w = map(normal, shapes)
  exact = jnp.einsum(equation, x, w)
  np.testing.assert_allclose(quantized_einsum(equation, x, w, "full"), exact, rtol=0, atol=1e-5)
  assert int8_products(lambda x, w: quantized_einsum(equation, x, w, "switchback"), x, w) == 1


def test_quantized_einsum_keeps_a_large_row_of_x_to_itself():
  x, w = normal((2, 3, 16)), normal((2, 16, 4))
  large = x.copy()
  large[:, 0] *= 1000
  run = jax.jit(functools.partial(quantized_einsum, "ebd,edf->bef", recipe="switchback"))
  np.testing.assert_array_equal(np.asarray(run(large, w))[1:], np.asarray(run(x, w))[1:])


@pytest.mark.parametrize("equation", ["ab,cb->a", "ab,bb->a"])
def test_an_equation_without_a_product_with_w_is_refused(equation):
  with pytest.raises(ValueError, match="no product with the weight"):
    quantized_einsum(equation, normal((4, 4)), normal((4, 4)), "switchback")
