"""Flax's own layers with `quantized_dot_general` are einsums over quantized operands."""

import functools
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax import nnx
from flax_case import assert_close, drawn, linen, normal, value_and_grads
from pairwise import mainly

from sbjax import quantized_dot_general
from sbjax.recipes import FULL, SWITCHBACK

# float32 to rounding; bfloat16 to one unit in the last place of the largest element.
RTOL = {"float32": 2e-6, "bfloat16": 2**-7}

DENSE = {  # name: (shape of x, the layer)
  "dense": ((2, 5, 12), functools.partial(nn.Dense, 8)),
  "vector": ((12,), functools.partial(nn.Dense, 8)),
  "to heads": ((2, 5, 12), functools.partial(nn.DenseGeneral, (3, 4))),
  "from heads": ((2, 5, 3, 4), functools.partial(nn.DenseGeneral, 8, axis=(-2, -1))),
  "middle axis": ((2, 12, 5), functools.partial(nn.DenseGeneral, (3, 4), axis=1)),
  "axes apart": ((2, 3, 5, 4), functools.partial(nn.DenseGeneral, (2, 3), axis=(3, 1))),
  "batch": ((3, 5, 12), functools.partial(nn.DenseGeneral, 8, batch_dims=(0,))),
  "batches": ((3, 2, 5, 12), functools.partial(nn.DenseGeneral, (2, 4), batch_dims=(0, 1))),
}


@pytest.mark.parametrize(
  ("kind", "name", "dtype"),
  [(kind, "switchback_q", "float32") for kind in DENSE]
  + [(kind, "switchback", "bfloat16") for kind in ("dense", "from heads", "axes apart", "batches")],
)
def test_linen_dense_layers_equal_the_reference(kind, name, dtype):
  shape, layer = DENSE[kind]
  x = normal(shape, dtype)
  actual = linen(layer(dtype=dtype, dot_general=quantized_dot_general(name)), x)
  expected = linen(layer(dtype=dtype, dot_general=reference.dot_general(name)), x)
  assert_close(actual, expected, RTOL[dtype])


@pytest.mark.parametrize("kind", ["axes apart", "batches"])
def test_a_full_dot_general_equals_flax_s_own(kind):
  shape, layer = DENSE[kind]
  x = normal(shape)
  actual = linen(layer(dot_general=quantized_dot_general(FULL)), x)
  assert_close(actual, linen(layer(), x), RTOL["float32"])


def test_linen_attention_equals_the_reference():
  def attention(dot):
    return nn.MultiHeadDotProductAttention(4, qkv_dot_general=dot, out_dot_general=dot)

  x = normal((2, 6, 16))
  actual = linen(attention(quantized_dot_general("switchback_q")), x)
  assert_close(actual, linen(attention(reference.dot_general("switchback_q")), x), 1e-5)


def run_nnx(layer, x):
  graph, params, rest = nnx.split(layer, nnx.Param, ...)
  params = drawn(jax.eval_shape(lambda: params))
  return value_and_grads(lambda params, x: nnx.merge(graph, params, rest)(x), params, x)


@pytest.mark.parametrize(
  ("name", "dtype"), [("switchback", "bfloat16"), ("switchback_q", "float32")]
)
def test_nnx_linear_equals_the_reference(name, dtype):
  def linear(dot):
    return nnx.Linear(12, 8, dtype=dtype, dot_general=dot, rngs=nnx.Rngs(0))

  x = normal((2, 5, 12), dtype)
  actual = run_nnx(linear(quantized_dot_general(name)), x)
  assert_close(actual, run_nnx(linear(reference.dot_general(name)), x), RTOL[dtype])


def nnx_attention(dot, dtype="float32"):
  return nnx.MultiHeadAttention(
    num_heads=4,
    in_features=16,
    dtype=dtype,
    decode=False,
    qkv_dot_general=dot,
    out_dot_general=dot,
    rngs=nnx.Rngs(0),
  )


def test_nnx_attention_equals_the_reference():
  x = normal((2, 6, 16))
  actual = run_nnx(nnx_attention(quantized_dot_general("switchback")), x)
  assert_close(actual, run_nnx(nnx_attention(reference.dot_general("switchback")), x), 1e-5)


@pytest.mark.parametrize("library", mainly(["linen"], ["linen", "nnx"]))
def test_attention_in_bfloat16_has_the_error_of_int8(library):
  def run(recipe):
    dot = quantized_dot_general(recipe)
    if library == "nnx":
      # JAX's own attention promotes bfloat16 to float32 by itself.
      with jax.numpy_dtype_promotion("standard"):
        return run_nnx(nnx_attention(dot, "bfloat16"), x)
    return linen(
      nn.MultiHeadDotProductAttention(
        4, dtype=jnp.bfloat16, qkv_dot_general=dot, out_dot_general=dot
      ),
      x,
    )

  x = normal((2, 6, 16), "bfloat16")
  actual, expected = run(SWITCHBACK), run(FULL)
  assert np.any(actual[0] != expected[0])
  assert_close(actual, expected, 0.1)  # Measured: 0.03, from two rounded products in sequence.


def test_no_tokens_give_no_rows():
  layer = nn.Dense(8, dot_general=quantized_dot_general("switchback"))
  y = layer.apply(
    drawn(jax.eval_shape(layer.init, jax.random.key(0), normal((2, 12)))), normal((0, 12))
  )
  assert y.shape == (0, 8)


MATRIX = (((1,), (0,)), ((), ()))


def test_a_bfloat16_result_holds_what_overflows_in_float16():
  dot, x = quantized_dot_general("switchback"), jnp.full((1, 64), 300.0, jnp.float16)
  y = dot(x, x.T, MATRIX, preferred_element_type=jnp.bfloat16)
  np.testing.assert_allclose(y.astype(jnp.float32), 64 * 300.0**2, rtol=2**-6)


def test_preferred_element_type_is_the_dtype_of_the_result():
  x, w = normal((5, 12), "bfloat16"), normal((12, 8), "bfloat16")
  dot = quantized_dot_general("switchback")
  wide = dot(x, w, MATRIX, preferred_element_type=jnp.float32)
  assert wide.dtype == jnp.float32
  np.testing.assert_array_equal(wide.astype(jnp.bfloat16), dot(x, w, MATRIX))
  assert np.any(wide != wide.astype(jnp.bfloat16).astype(jnp.float32))  # Not rounded to bfloat16.


def test_a_precision_is_refused():
  layer = nn.Dense(8, precision="highest", dot_general=quantized_dot_general("switchback"))
  with pytest.raises(ValueError, match=r"precision=.*cannot be honoured.*leave it None"):
    jax.eval_shape(layer.init, jax.random.key(0), normal((2, 12)))


def test_an_unknown_recipe_fails_at_construction():
  with pytest.raises(ValueError, match=r"'int4'.*switchback"):
    quantized_dot_general("int4")


def test_integer_operands_are_refused():
  with pytest.raises(ValueError, match=r"floating.*int32"):
    quantized_dot_general("full")(np.ones((2, 4), np.int32), np.ones((4, 3), np.int32), MATRIX)


def test_sizes_that_do_not_match_are_refused():
  with pytest.raises(ValueError, match=r"\(2, 4\).*\(5, 3\).*must agree"):
    quantized_dot_general("switchback")(normal((2, 4)), normal((5, 3)), MATRIX)


def test_dot_generals_of_one_recipe_are_equal_and_survive_pickling():
  one, other = quantized_dot_general("switchback"), quantized_dot_general("switchback_q")
  assert one == quantized_dot_general("switchback") == pickle.loads(pickle.dumps(one)) != other
  assert hash(one) == hash(quantized_dot_general("switchback"))
  assert nn.Dense(3, dot_general=one) == nn.Dense(
    3, dot_general=quantized_dot_general("switchback")
  )
