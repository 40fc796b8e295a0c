"""`quantize_model` reaches a weight wherever it goes, or says where it does not."""

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_case import drawn, int8_products, normal
from jax.experimental import pallas as pl
from pairwise import mainly

from sbjax import SwitchBackDense, quantize_model

W, X = normal((16, 16)), normal((4, 16))


@pytest.fixture(autouse=True)
def as_models_have_it(strict_jax):
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


# ---- Results


CLOSED_OVER, OF_JAX = np.ones(3, np.float32), jnp.arange(3)


@pytest.mark.parametrize(
  "result",
  [
    lambda p: jnp.zeros(()),
    lambda p: jnp.asarray(2.0),  # Weak: it takes the dtype of what it meets.
    lambda p: jnp.asarray(2.0) * 3,
    lambda p: jnp.asarray(7),
    lambda p: jnp.asarray(True),
    lambda p: jnp.asarray(CLOSED_OVER),
    lambda p: OF_JAX,
    lambda p: p,
    lambda p: jax.random.key(0),
    lambda p: jax.lax.cond(p.sum() > 0, lambda: 1.0, lambda: 0.0),
  ],
)
def test_a_result_is_the_jax_array_that_jit_returns(result):
  expected, actual = jax.jit(result)(W), quantize_model(result, "full")(W)
  assert isinstance(actual, jax.Array)
  assert jax.typeof(actual) == jax.typeof(expected)
  assert jax.typeof(actual).weak_type == jax.typeof(expected).weak_type
  if not jnp.issubdtype(actual.dtype, jax.dtypes.prng_key):
    np.testing.assert_array_equal(actual, expected)


def test_results_that_are_no_jax_arrays_come_back_as_they_are():
  results = quantize_model(lambda p: (CLOSED_OVER, 2.0, "text", None), "full")(W)
  assert results[0] is CLOSED_OVER and results[1:] == (2.0, "text", None)


def test_a_converted_decoder_s_cache_counts_its_steps():
  def decode(convert):
    attention = {"num_heads": 4, "in_features": 16, "qkv_features": 16, "decode": True}
    model = convert(nnx.MultiHeadAttention(**attention, rngs=nnx.Rngs(0)))
    model.init_cache((2, 3, 16))
    return [model(normal((2, 1, 16), seed=step)) for step in range(3)]

  expected, actual = decode(lambda model: model), decode(lambda m: quantize_model(m, "full"))
  np.testing.assert_allclose(actual, expected, atol=1e-5)


# ---- Free batch sizes


class Images(nn.Module):
  @nn.compact
  def __call__(self, image):
    x = nn.Conv(16, (4, 4), (4, 4), name="patches")(image).reshape(image.shape[0], -1, 16)
    x += self.param("positions", nn.initializers.normal(), (1, *x.shape[1:]))
    x += nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
    return nn.Dense(8)(nn.gelu(SwitchBackDense(32)(x)).mean(1))


@pytest.mark.parametrize("rules", mainly(["switchback"], ["switchback", "full"]))
def test_a_model_is_exported_with_a_free_batch(rules):
  model, image = quantize_model(Images(), rules, activations=rules), normal((3, 8, 8, 3))
  variables = drawn(jax.eval_shape(model.init, jax.random.key(0), image))
  free = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("b"), 8, 8, 3), jnp.float32)
  apply = jax.jit(model.apply)
  exported = jax.export.export(apply)(variables, free)
  np.testing.assert_allclose(exported.call(variables, image), apply(variables, image), rtol=1e-5)


# ---- Where a weight goes


def _composite(w, x):
  return jax.lax.composite(lambda w, x: x @ w, "project.dense")(w, x)


def _carried(w, x):
  return jax.lax.scan(lambda carry, _: ((carry[0], carry[1] @ carry[0]), None), (w, x), length=2)[0]


def _while_carried(w, x):
  return jax.lax.fori_loop(0, 2, lambda _, carry: (carry[0], carry[1] @ carry[0]), (w, x))[1]


REACHED = {
  "stop_gradient": lambda w, x: x @ jax.lax.stop_gradient(w),
  "device_put": lambda w, x: x @ jax.device_put(w, jax.devices()[0]),
  "optimization_barrier": lambda w, x: x @ jax.lax.optimization_barrier((x, w))[1],
  "rev": lambda w, x: x @ w[::-1],
  "a jitted cast": lambda w, x: x @ jax.jit(lambda w: w.T.astype(jnp.bfloat16))(w),
  "composite": _composite,
  "scan's carry": lambda w, x: _carried(w, x)[1],
  "while's carry": _while_carried,
}


@pytest.mark.parametrize("name", REACHED)
def test_a_weight_is_found_in_another_layout_and_within_calls(name):
  function = REACHED[name]
  assert int8_products(quantize_model(function, "switchback"), W, X) == 1
  full, expected = quantize_model(function, "full")(W, X), function(W, X)
  np.testing.assert_allclose(full, expected, atol=0.05 if "cast" in name else 1e-4)
  assert full.dtype == expected.dtype


@pytest.mark.parametrize("name", ["stop_gradient", "optimization_barrier", "scan's carry"])
def test_the_gradient_of_a_weight_in_another_layout_is_that_of_the_model(name):
  gradients = [
    jax.grad(lambda w, f=f: jnp.sum(jnp.sin(f(w, X))))(W)
    for f in (quantize_model(REACHED[name], "full"), REACHED[name])
  ]
  np.testing.assert_allclose(*gradients, atol=1e-4)


def test_the_new_checkpoint_of_jax_is_entered():
  if not hasattr(jax.config, "jax_remat3"):
    pytest.skip("This JAX has no jax_remat3.")

  @jax.checkpoint
  def block(w, x):
    return jnp.tanh(jax.ad_checkpoint.checkpoint_name(w, "w").T @ x.T)

  before = jax.config.jax_remat3
  jax.config.update("jax_remat3", True)
  try:
    int8, full = (quantize_model(block, rules) for rules in ("switchback", "full"))
    assert str(jax.make_jaxpr(int8)(W, X)).count("preferred_element_type=int32") == 1
    loss = lambda f: lambda w: jnp.sum(jnp.sin(f(w, X)))  # noqa: E731
    assert int8_products(jax.grad(loss(int8)), W) >= 2
    np.testing.assert_allclose(jax.grad(loss(full))(W), jax.grad(loss(block))(W), atol=1e-5)
  finally:
    jax.config.update("jax_remat3", before)


# ---- Where it is not followed


def _own_derivative(w, x):
  function = jax.custom_vjp(lambda w, x: x @ w.T)
  function.defvjp(lambda w, x: (x @ w.T, (w, x)), lambda saved, dy: saved)
  return function(w, x)


def _own_tangent(w, x):
  function = jax.custom_jvp(lambda w, x: x @ w)
  function.defjvp(lambda primals, tangents: (function(*primals), tangents[1]))
  return function(w, x)


def _own_batching(w, x):
  function = jax.custom_batching.custom_vmap(lambda w, x: x @ w)
  function.def_vmap(lambda size, batched, w, x: (x @ w, True))
  return function(w, x)


def _kernel(w, x):
  def multiply(w_ref, x_ref, y_ref):
    y_ref[...] = x_ref[...] @ w_ref[...]

  shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
  return pl.pallas_call(multiply, out_shape=shape, interpret=True)(w, x)


def _callback(w, x):
  shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
  return jax.pure_callback(lambda w, x: np.asarray(x) @ np.asarray(w), shape, w, x)


def _changing_carry(w, x):
  return jax.lax.fori_loop(0, 2, lambda _, carry: (carry[0].T, carry[1] @ carry[0]), (w, x))[1]


def _ragged(w, x):
  return jax.lax.ragged_dot(x, w[None], jnp.array([4]))


LEFT = {
  "custom_vjp_call": _own_derivative,
  "custom_jvp_call": _own_tangent,
  "custom_vmap_call": _own_batching,
  "pallas_call": _kernel,
  "pure_callback": _callback,
  "while|scan": _changing_carry,
  "ragged_dot_general": _ragged,
}


@pytest.mark.parametrize("name", LEFT)
def test_a_weight_that_is_multiplied_where_nobody_looks_is_named_with_the_primitive(name):
  model = {"layer": {"kernel": W}}

  def function(params, x):
    return LEFT[name](params["layer"]["kernel"], x)

  with pytest.warns(UserWarning, match=f"the products of layer/kernel within ({name})"):
    result = quantize_model(function, "switchback")(model, X)
  np.testing.assert_allclose(result, function(model, X), atol=1e-5)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    quantize_model(function, [("layer/kernel", None), ("*", "switchback")])(model, X)
    quantize_model(function, "full")(model, X)


def test_a_primitive_nobody_knows_is_named():
  mine = jax.extend.core.Primitive("my_matmul")
  mine.def_impl(lambda w, x: x @ w)
  mine.def_abstract_eval(lambda w, x: jax.core.ShapedArray((4, 16), x.dtype))
  with pytest.warns(UserWarning, match="the products of params within my_matmul"):
    quantize_model(lambda w, x: mine.bind(w, x), "switchback")(W, X)


def test_what_multiplies_by_no_matrix_gives_no_warning():
  def function(w, x):
    jax.debug.print("{}", w[0, 0])
    scale = jnp.linalg.svd(w, compute_uv=False)[0] + jnp.sort(jax.nn.silu(w))[0, 0]
    rows = jnp.take(w, jnp.arange(3), axis=0) + w.at[0].add(1.0)[:3] + jnp.cumsum(w, 0)[:3]
    params = {"kernel": w[:, :8], "bias": w[0, :8]}
    return scale, rows, SwitchBackDense(8, parent=None).apply({"params": params}, x)

  with warnings.catch_warnings():
    warnings.simplefilter("error")
    quantize_model(function, "switchback")(W, X)


# ---- Methods


class Mixin:
  def mixed(self, x):
    return self.dense(x)


class Linen(Mixin, nn.Module):
  def setup(self):
    self.dense = self._made(16)

  def _made(self, features):
    return nn.Dense(features, use_bias=False)

  def __call__(self, x):
    return self._encode(x)

  def _encode(self, x, *, scale=1.0):
    return scale * self.dense(x)


class Nnx(Mixin, nnx.Module):
  def __init__(self, rngs):
    self.dense = nnx.Linear(16, 16, use_bias=False, rngs=rngs)

  def __call__(self, x):
    return self._encode(x)

  def _encode(self, x, *, scale=1.0):
    return scale * self.dense(x)


METHODS = {
  "a private one": "_encode",
  "a function": Linen._encode,
  "a lambda": lambda model, x: model._encode(x, scale=2.0),
  "a layer's": lambda model, x: model.dense(x),
  "a mixin's": "mixed",
}


@pytest.mark.parametrize("name", METHODS)
def test_whatever_apply_calls_of_a_linen_model_is_converted(name):
  model = quantize_model(Linen(), "switchback")
  variables = model.init(jax.random.key(0), X)
  apply = functools.partial(model.apply, method=METHODS[name])
  assert int8_products(apply, variables, X) == 1
  y, state = model.apply(variables, X, method=METHODS[name], mutable=["cache"])
  assert y.shape == (4, 16) and not state


@pytest.mark.parametrize("method", ["__call__", "_encode", "mixed"])
def test_methods_of_a_bound_linen_model_are_converted(method):
  model = quantize_model(Linen(), "switchback")
  variables = model.init(jax.random.key(0), X)

  def call(variables, x):
    return getattr(model.bind(variables), method)(x)

  assert int8_products(call, variables, X) == 1


@pytest.mark.parametrize("method", ["__call__", "_encode", "mixed"])
def test_methods_of_an_nnx_model_are_converted(method):
  graph, state = nnx.split(quantize_model(Nnx(nnx.Rngs(0)), "switchback"))
  assert int8_products(lambda state: getattr(nnx.merge(graph, state), method)(X), state) == 1
