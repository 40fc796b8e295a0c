"""Under `jax.vmap` shared weights cost what one product of all rows costs, and numbers stay."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_case import bitwise, int8_products, normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pairwise import mainly

from sbjax import E5M2, INT8, LayerNormMLP, attention, quantize_model, quantized_dot
from sbjax.linear.fused import gated_mlp, layer_norm_dense, layer_norm_mlp
from sbjax.linear.weight import quantize_weight
from sbjax.ops.rows import LayerNormParams, RMSNormParams
from sbjax.quantize import FORMATS
from sbjax.recipes import as_recipe

B, T, K, N = 8, 6, 48, 64
X, W, V = normal((B, T, K)), normal((K, N), seed=1), normal((N, K), seed=2)
# Examples of other magnitudes: a scale that they shared would be seen.
X *= np.exp(2 * normal((B, 1, 1), seed=3))
NORM = LayerNormParams(np.ones(K, np.float32), np.zeros(K, np.float32))
BIAS, BACK = normal(N, seed=4), normal(K, seed=5)
ROWWISE = ["full", "switchback", "switchback_m", "switchback_q", "switchback_c", "llm_int8", "fp4"]
ROWWISE += ["fp8_switchback", "fp8_dinov3", "fp8_static", "switchback_fp8_wgrad"]
ONE_SCALE = ["fp8_tensorwise", "fp8_amax"]


def dot(x, w, name):
  return quantized_dot(x, w, name, bias=BIAS)


def prepared_dot(x, w, name):
  return quantized_dot(x, quantize_weight(w, name), name, multiplier=0.5)


def norm_dense(x, w, name):
  x, (y, z) = layer_norm_dense(x, NORM, w, name, bias=BIAS, num_outputs=2)
  return jnp.concatenate([y, z, x], axis=1)


def mlp(x, w, name):
  return layer_norm_mlp(x, NORM, w, BIAS, V, BACK, name, add_residual=True)


def gated(x, w, name):
  return gated_mlp(x, RMSNormParams(NORM.scale), w, W[::-1], V, name, b_up=BIAS, b_down=BACK)[1]


LAYERS = [dot, prepared_dot, norm_dense, mlp, gated]


def of_examples(layer, name):
  return lambda x, w: jax.vmap(lambda x: layer(x, w, name))(x)


def loss_of(function):
  return lambda x, w: jnp.sum(jnp.sin(function(x, w)))


def value_and_gradients(function, *args):
  gradients = jax.grad(loss_of(function), (0, 1))
  return bitwise(lambda *args: (function(*args), *gradients(*args)))(*args)


def loop(layer, name):
  return lambda x, w: jax.lax.map(lambda one: layer(one, w, name), x)


def assert_close(actual, expected, rtol=1e-3):
  """Programs that XLA fuses in other ways round a few values to the neighbouring step."""
  assert np.linalg.norm(actual - expected) <= rtol * np.linalg.norm(expected)


@pytest.mark.parametrize(
  ("layer", "name"),
  mainly(
    [(dot, "switchback"), (norm_dense, "llm_int8"), (mlp, "switchback_m")],
    itertools.product(LAYERS, [*ROWWISE, *ONE_SCALE]),
  ),
)
def test_outputs_and_input_gradients_are_those_of_each_example_alone(layer, name):
  y, dx, dw = value_and_gradients(of_examples(layer, name), X, W)
  y_alone, dx_alone, dw_alone = value_and_gradients(loop(layer, name), X, W)
  assert_close(y, y_alone)
  assert_close(dx, dx_alone)
  wgrad = None if name in ONE_SCALE else as_recipe(name).wgrad
  bound = 0.05 if wgrad else 1e-3  # Its scales are those of all rows.
  bound = 0.1 if wgrad and wgrad[1].dtype == E5M2 else bound  # Off by an eighth at most.
  assert_close(dw, dw_alone, bound)


@pytest.mark.parametrize("name", mainly(["full", "llm_int8"], ROWWISE))
def test_the_gradient_of_a_shared_weight_is_that_of_all_rows(name):
  rows = X.reshape(B * T, K)
  ours = value_and_gradients(of_examples(dot, name), X, W)
  plain = value_and_gradients(lambda x, w: dot(x, w, name), rows, W)
  for actual, expected in zip(ours, plain, strict=True):
    assert_close(np.reshape(actual, expected.shape), expected)


@pytest.mark.parametrize("name", ["full", "switchback", "switchback_m", "llm_int8"])
@pytest.mark.parametrize("layer", [dot, norm_dense, mlp])
def test_no_array_of_the_backward_pass_has_a_weight_s_size_for_each_example(layer, name):
  def largest(jaxpr):
    own = [v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars]
    inner = (largest(j) for eqn in jaxpr.eqns for j in jax.extend.core.jaxprs_in_params(eqn.params))
    return max([*own, *inner], default=0)

  x = normal((64, 2, K))
  for function in (of_examples(layer, name), jax.jit(of_examples(layer, name))):
    jaxpr = jax.make_jaxpr(jax.grad(loss_of(function), (0, 1)))(x, W)
    assert largest(jaxpr.jaxpr) <= 64 * 2 * max(K, N, 2 * N) < 64 * K * N / 8


def per_example(function):
  return lambda x, w: jax.vmap(jax.grad(loss_of(function), 1), (0, None))(x, w)


@pytest.mark.parametrize(
  ("layer", "name"),
  mainly(
    [(mlp, "fp8_tensorwise")],
    itertools.product(LAYERS, ["full", "switchback", "switchback_m", "fp8_tensorwise"]),
  ),
)
def test_per_example_gradients_stay_per_example(layer, name):
  function = functools.partial(layer, name=name)
  actual = jax.jit(per_example(function))(X, W)
  alone = jax.jit(jax.grad(loss_of(function), 1))
  expected = np.stack([alone(x, W) for x in X])
  assert actual.shape == (B, *W.shape)
  assert_close(actual, expected)


NESTED = {
  "two axes": lambda x, w: jax.vmap(of_examples(dot, "switchback"), (0, None))(
    x.reshape(2, 4, T, K), w
  ),
  "jit": lambda x, w: jax.vmap(jax.jit(lambda x: dot(x, w, "switchback")))(x),
  "checkpoint": lambda x, w: jax.vmap(jax.checkpoint(lambda x: dot(x, w, "switchback")))(x),
  "checkpoint around": jax.checkpoint(of_examples(dot, "switchback")),
  "last axis": lambda x, w: jax.vmap(lambda x: dot(x, w, "switchback"), in_axes=2, out_axes=1)(
    x.transpose(1, 2, 0)
  ).transpose(1, 0, 2),
  "scan within": lambda x, w: jax.vmap(
    lambda x: jax.lax.scan(lambda _, row: (None, dot(row[None], w, "switchback")), None, x)[1][:, 0]
  )(x),
  "vmap in a scan": lambda x, w: jax.lax.scan(
    lambda _, x: (None, of_examples(dot, "switchback")(x, w)), None, x.reshape(2, 4, T, K)
  )[1].reshape(B, T, N),
  "spmd_axis_name": lambda x, w: jax.vmap(lambda x: dot(x, w, "switchback"), spmd_axis_name="data")(
    x
  ),
  "a single row": lambda x, w: jax.vmap(jax.vmap(lambda x: dot(x, w, "switchback")))(x),
}


@pytest.mark.parametrize("name", mainly(["two axes", "vmap in a scan", "spmd_axis_name"], NESTED))
def test_other_transformations_within_and_around_change_no_number(name):
  mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
  with jax.set_mesh(mesh):
    y, dx, dw = value_and_gradients(NESTED[name], X, W)
  expected = value_and_gradients(lambda x, w: dot(x.reshape(-1, K), w, "switchback"), X, W)
  for actual, other in zip((y, dx, dw), expected, strict=True):
    assert_close(np.reshape(actual, other.shape), other)
  jaxpr = jax.make_jaxpr(jax.grad(loss_of(NESTED[name]), 1))(X, W)
  assert f"f32[{B},{K},{N}]" not in str(jaxpr)


def test_experts_keep_weights_of_their_own_and_share_them_over_examples():
  x, w = normal((5, 3, T, K)), normal((3, K, N))  # Examples, experts.
  experts = jax.vmap(lambda x, w: quantized_dot(x, w, "switchback"))

  def function(x, w):
    return jax.vmap(experts, (0, None))(x, w)

  def one_by_one(x, w):
    rows = x.transpose(1, 0, 2, 3).reshape(3, 5 * T, K)
    y = jax.lax.map(lambda pair: quantized_dot(*pair, "switchback"), (rows, w))
    return y.reshape(3, 5, T, N).transpose(1, 0, 2, 3)

  for actual, expected in zip(
    value_and_gradients(function, x, w), value_and_gradients(one_by_one, x, w), strict=True
  ):
    assert_close(actual, expected)
  assert f"f32[5,3,{K},{N}]" not in str(jax.make_jaxpr(jax.grad(loss_of(function), 1))(x, w))


def test_weights_of_their_own_have_gradients_of_their_own():
  w = np.stack([W, 2 * W] * 4)
  function = jax.vmap(functools.partial(quantized_dot, recipe="switchback"))
  dw = jax.jit(jax.grad(loss_of(function), 1))(X, w)
  alone = jax.jit(jax.grad(loss_of(functools.partial(quantized_dot, recipe="switchback")), 1))
  assert_close(dw, np.stack([alone(*pair) for pair in zip(X, w, strict=True)]))


def test_a_residual_that_examples_share_is_added_to_each():
  residual = normal((T, N), seed=6)

  def function(x, residual):
    return jax.vmap(lambda x: quantized_dot(x, W, "switchback", residual=residual))(x)

  def one_by_one(x, residual):
    return jax.lax.map(lambda a: quantized_dot(a, W, "switchback", residual=residual), x)

  for actual, expected in zip(
    value_and_gradients(function, X, residual),
    value_and_gradients(one_by_one, X, residual),
    strict=True,
  ):
    assert_close(actual, expected)


def test_more_rows_than_an_int8_sum_can_take_are_not_folded():
  rows = FORMATS[INT8].most_terms // 2
  x = jax.ShapeDtypeStruct((3, rows, 8), jnp.bfloat16)
  w = jax.ShapeDtypeStruct((8, 16), jnp.float32)
  gradient = jax.grad(loss_of(lambda x, w: of_examples(quantized_dot, "llm_int8")(x, w)), 1)
  assert jax.eval_shape(gradient, x, w).shape == w.shape


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh_examples_that_are_split_over_devices_stay_there(kind):
  mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
  alone = value_and_gradients(of_examples(norm_dense, "switchback"), X, W)
  with jax.set_mesh(mesh):
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    w = jax.device_put(W, NamedSharding(mesh, P()))
    split = value_and_gradients(of_examples(norm_dense, "switchback"), x, w)
  for actual, expected in zip(split, alone, strict=True):
    assert_close(actual, expected)
  assert split[0].sharding.spec[0] == "data"


@pytest.mark.parametrize("check_vma", [True, False])
def test_within_a_shard_map_examples_fold_too(check_vma):
  mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
  function = of_examples(dot, "switchback")
  specs = {"in_specs": (P("data"), P()), "out_specs": P("data"), "check_vma": check_vma}
  split = jax.shard_map(function, mesh=mesh, **specs)
  for actual, expected in zip(
    value_and_gradients(split, X, W), value_and_gradients(function, X, W), strict=True
  ):
    assert_close(actual, expected)


@pytest.mark.parametrize("packed", [True, False])
def test_attention_gets_the_examples_of_all_maps_in_one_call(packed):
  qkv = normal((2, 3, 5, 3, 2, 8))

  def function(qkv):
    if packed:
      return attention(qkv, backend="xla")
    return attention(*(qkv[:, :, i] for i in range(3)), backend="xla")

  def gradient(function, qkv):
    return jax.value_and_grad(lambda qkv: jnp.sum(jnp.sin(function(qkv))))(qkv)

  actual = gradient(jax.vmap(function), qkv)
  expected = gradient(function, qkv.reshape(6, 5, 3, 2, 8))
  assert_close(actual[0], expected[0])
  assert_close(actual[1].reshape(expected[1].shape), expected[1])
  assert "f32[6,5,2,8]" in str(jax.make_jaxpr(jax.vmap(function))(qkv))


def test_flax_modules_and_converted_models_fold_under_vmap():
  class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
      return LayerNormMLP(N, add_residual=True)(x + nn.Dense(K)(x))

  model = quantize_model(Model(), "switchback")
  params = model.init(jax.random.key(0), X[0])
  apply = jax.vmap(model.apply, (None, 0))
  expected = jax.jit(model.apply)(params, X.reshape(-1, K))
  assert_close(jax.jit(apply)(params, X), expected.reshape(X.shape))
  assert int8_products(apply, params, X) == 3
  gradient = jax.grad(lambda params: jnp.sum(jnp.sin(apply(params, X))))
  assert f"f32[{B},{K},{N}]" not in str(jax.make_jaxpr(gradient)(params))


# ---- JAX's own policies of `jax.checkpoint`


def plain_mlp(x, w1, w2):
  n = (x - x.mean(1, keepdims=True)) * jax.lax.rsqrt(x.var(1, keepdims=True) + 1e-5)
  return x + jax.nn.gelu(n @ w1.astype(x.dtype)) @ w2


def saved(function, policy, capsys):
  def loss(x, w):
    return jax.nn.gelu(function(x, w)).astype(jnp.float32).sum()

  x = X[0].astype(jnp.bfloat16)
  jax.ad_checkpoint.print_saved_residuals(jax.checkpoint(loss, policy=policy), x, W)
  lines = capsys.readouterr().out.splitlines()
  made = (line for line in lines if "argument" not in line and "constant" not in line)
  return sorted(line.split()[0] for line in made)


@pytest.mark.parametrize(
  "policy", ["dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable"]
)
@pytest.mark.parametrize("name", ["full", "switchback", "switchback_m", "fp8_tensorwise", "fp4"])
def test_a_policy_that_saves_products_saves_those_of_plain_dots(name, policy, capsys):
  policy = getattr(jax.checkpoint_policies, policy)
  w2 = normal((N, K)).astype(jnp.bfloat16)
  pairs = [
    (lambda x, w: quantized_dot(x, w, name), lambda x, w: x @ w.astype(x.dtype)),
    (lambda x, w: quantized_dot(x, w, name, bias=BIAS), lambda x, w: x @ w.astype(x.dtype)),
    (
      lambda x, w: quantized_dot(jnp.tanh(quantized_dot(x, w, name)), w2, name),
      lambda x, w: jnp.tanh(x @ w.astype(x.dtype)) @ w2,
    ),
    (
      lambda x, w: layer_norm_mlp(x, NORM, w, BIAS, w2, BACK, name, add_residual=True),
      lambda x, w: plain_mlp(x, w, w2),
    ),
  ]
  for ours, plain in pairs:
    assert saved(ours, policy, capsys) == saved(plain, policy, capsys)


def test_the_number_1_is_no_product_of_the_program():
  def step(x, w):
    return jax.grad(lambda x, w: jnp.sum(jnp.sin(quantized_dot(x, w, "switchback"))), (0, 1))(x, w)

  options = {"xla_backend_optimization_level": 3}
  text = jax.jit(step).lower(X[0], W).compile(compiler_options=options).as_text()
  assert text.count(" dot(") <= 3
