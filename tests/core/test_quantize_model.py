"""`quantize_model`: which products it replaces, by what, and that all else stays."""

import functools
import re
import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_case import compiled, drawn, int8_products, normal
from foreign_models import (
  GPT,
  Block,
  Cache,
  Classifier,
  Conv1D,
  ConvNeXt,
  Experts,
  FlaxCLIP,
  JimmCLIP,
  LanguageModel,
  Llama,
  NnxLlama,
  Qwen3,
  ViT,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pairwise import mainly

from sbjax import quantize_model, quantized_dot, quantized_dot_general

TOKENS, IMAGE = np.arange(10).reshape(2, 5) % 24, normal((2, 8, 8, 3))
BLOCK = 4 + 2  # Products of weights: attention's, and the MLP's.
CASES = {  # name: (model, inputs, products of weights)
  "conv1d and tied": (GPT(), (TOKENS,), 3),
  "scan and remat": (ViT(), (IMAGE,), 1 + BLOCK + 4 + 1),
  "class token": (Classifier(), (IMAGE,), 1 + BLOCK + 1),
  "shared embedding": (LanguageModel(), (TOKENS,), BLOCK + 1),
  "two towers": (FlaxCLIP(), (TOKENS, IMAGE), 1 + BLOCK + 1 + BLOCK + 1),
  "llama": (Llama(), (normal((2, 5, 16)),), 4 + 3),
  "experts": (Experts(), (normal((2, 3, 16)),), 1),
}
NNX_CASES = {  # The same; inputs are made for each call, which may change them.
  "convnext": (ConvNeXt, lambda: (IMAGE,), 1 + 2),
  "qwen3": (Qwen3, lambda: (TOKENS, Cache()), 4 + 3 + 1),
  "llama": (NnxLlama, lambda: (normal((2, 5, 16)),), 4 + 3),
  "jimm": (JimmCLIP, lambda: (IMAGE, TOKENS), 1 + BLOCK + 1 + BLOCK + 1),
}


def variables(model, *inputs):
  return drawn(jax.eval_shape(model.init, jax.random.key(0), *inputs))


def sum_of_sines(tree):
  return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(tree))


def gradient(apply, params, *inputs):
  return compiled(jax.grad(lambda p: sum_of_sines(apply(p, *inputs))))(params)


def of_params(model, inputs):
  """An nnx model's call as a function of its parameters, and the parameters."""
  graph, params, rest = nnx.split(model, nnx.Param, ...)

  def call(params):
    return nnx.merge(graph, params, rest, copy=True)(*inputs())

  return call, params


def assert_equal(actual, expected, rtol=2e-6):
  """Leaf by leaf, within rtol of the largest number of all leaves."""
  largest = max(float(np.max(np.abs(b))) for b in jax.tree.leaves(expected))
  for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=rtol * largest)


@pytest.fixture(autouse=True)
def as_models_have_it(strict_jax):
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


@pytest.mark.parametrize(
  "name", mainly(["conv1d and tied", "scan and remat", "shared embedding", "llama"], CASES)
)
def test_full_changes_neither_output_nor_gradient(name):
  model, inputs, _ = CASES[name]
  params, full = variables(model, *inputs), quantize_model(model, "full")
  actual, expected = (compiled(m.apply)(params, *inputs) for m in (full, model))
  assert type(actual) is type(expected)
  assert_equal(actual, expected, 1e-5)
  actual, expected = (gradient(m.apply, params, *inputs) for m in (full, model))
  assert_equal(actual, expected, 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_each_product_of_a_weight_is_in_int8_forward_and_backward(name):
  model, inputs, products = CASES[name]
  params, int8 = variables(model, *inputs), quantize_model(model, "switchback")
  assert int8_products(int8.apply, params, *inputs) == products
  grad = functools.partial(jax.grad(lambda p: sum_of_sines(int8.apply(p, *inputs))), params)
  remat = 5 if isinstance(model, ViT) else 0  # Recomputed, but for fc2: its result is not needed.
  assert int8_products(grad) == 2 * products + remat


@pytest.mark.parametrize("name", mainly(["jimm", "llama"], NNX_CASES))
def test_full_changes_neither_output_nor_gradient_of_an_nnx_model(name):
  cls, inputs, _ = NNX_CASES[name]
  model = cls(nnx.Rngs(0))
  (actual, params), (expected, _) = (
    of_params(m, inputs) for m in (quantize_model(model, "full"), model)
  )
  assert_equal(compiled(actual)(params), compiled(expected)(params), 1e-5)
  assert_equal(gradient(actual, params), gradient(expected, params), 1e-5)


@pytest.mark.parametrize("name", NNX_CASES)
def test_each_product_of_an_nnx_weight_is_in_int8_forward_and_backward(name):
  cls, inputs, products = NNX_CASES[name]
  call, params = of_params(quantize_model(cls(nnx.Rngs(0)), "switchback"), inputs)
  assert int8_products(call, params) == products
  assert int8_products(jax.grad(lambda p: sum_of_sines(call(p))), params) == 2 * products


@pytest.mark.parametrize("name", ["switchback_q", "switchback_c"])
def test_a_layer_of_ones_own_has_the_numbers_of_quantized_dot(name):
  model, x = Conv1D(8), normal((4, 16))
  params = variables(model, x)
  kernel, bias = params["params"]["kernel"], params["params"]["bias"]

  def by_hand(x):
    return quantized_dot(x, kernel.T, name) + bias

  def converted(x):
    return quantize_model(model, name).apply(params, x)

  for of in (lambda f: f, lambda f: jax.grad(lambda x: jnp.sum(jnp.sin(f(x))))):
    np.testing.assert_array_equal(jax.jit(of(converted))(x), jax.jit(of(by_hand))(x))


def test_an_nn_dense_has_the_numbers_of_its_dot_general():
  x = normal((4, 16))
  model = nn.Dense(8)
  params = variables(model, x)
  same = nn.Dense(8, dot_general=quantized_dot_general("switchback"))
  ours, theirs = (jax.jit(m.apply) for m in (quantize_model(model, "switchback"), same))
  np.testing.assert_array_equal(ours(params, x), theirs(params, x))


def test_a_kernel_is_quantized_before_its_cast_to_the_compute_dtype():
  model, x = nn.Dense(8, use_bias=False, dtype=jnp.bfloat16), normal((4, 16), "bfloat16")
  params = variables(model, x)
  actual = jax.jit(quantize_model(model, "switchback").apply)(params, x)
  dot, kernel = jax.jit(quantized_dot, static_argnums=2), params["params"]["kernel"]
  expected = np.asarray(dot(x, kernel, "switchback"))
  np.testing.assert_array_equal(actual, expected)
  cast = np.asarray(kernel).astype(x.dtype)
  assert np.any(expected != np.asarray(dot(x, cast, "switchback")))


@pytest.mark.parametrize(
  ("shape", "padding"), [((2, 8, 8, 3), "VALID"), ((2, 8, 8, 3), "SAME"), ((2, 9, 10, 3), "VALID")]
)
def test_a_patch_convolution_is_a_product_of_patches(shape, padding):
  model, x = nn.Conv(8, (4, 2), (4, 2), padding=padding), normal(shape)
  params = variables(model, x)
  full = quantize_model(model, "full")
  assert_equal(full.apply(params, x), model.apply(params, x))
  assert_equal(gradient(full.apply, params, x), gradient(model.apply, params, x), 1e-5)
  assert int8_products(quantize_model(model, "switchback").apply, params, x) == 1


@pytest.mark.parametrize(
  "conv",
  [
    nn.Conv(8, (4, 4), (2, 2)),
    nn.Conv(8, (4, 4), (4, 4), padding=((2, 2), (2, 2))),
    nn.Conv(6, (2, 2), (2, 2), feature_group_count=3),
    nn.Conv(8, (2, 2), (2, 2), kernel_dilation=(2, 2)),
  ],
)
def test_other_convolutions_stay(conv):
  x = normal((2, 8, 8, 3))
  params = variables(conv, x)
  actual = quantize_model(conv, "switchback").apply(params, x)
  np.testing.assert_array_equal(actual, conv.apply(params, x))


@pytest.mark.slow
def test_parameters_and_random_keys_are_those_of_the_model():
  model, x = ViT(), normal((2, 8, 8, 3))
  int8, keys = quantize_model(model, "full"), {"params": jax.random.key(0)}
  params = compiled(model.init)(keys, x)
  assert_equal(compiled(int8.init)(keys, x), params, 0)
  dropout = {"dropout": jax.random.key(1)}
  actual, expected = (
    compiled(functools.partial(m.apply, train=True))(params, x, rngs=dropout) for m in (int8, model)
  )
  assert_equal(actual, expected, 1e-5)
  assert isinstance(int8, ViT) and repr(int8) == repr(model)


def test_a_converted_model_is_a_submodule_and_a_class():
  class Two(nn.Module):
    layer: type

    @nn.compact
    def __call__(self, x):
      return self.layer(8)(nn.Dense(16)(x))

  x = normal((4, 16))
  int8 = Two(quantize_model(nn.Dense, "switchback"))
  params = variables(Two(nn.Dense), x)
  assert jax.tree.structure(variables(int8, x)) == jax.tree.structure(params)
  assert int8_products(int8.apply, params, x) == 1


def test_rules_apply_in_order_by_the_path_of_a_parameter_or_its_layer():
  model, x = ViT(), normal((2, 8, 8, 3))
  params = variables(model, x)
  rules = [("*/fc1", None), ("pool/query/kernel", "full"), ("blocks/*", "switchback")]
  assert int8_products(quantize_model(model, rules).apply, params, x) == 5
  assert int8_products(quantize_model(model, dict(rules[::-1])).apply, params, x) == 6


def test_attention_s_products_are_replaced_on_request():
  model, x = GPT(), TOKENS
  int8 = quantize_model(model, "switchback", activations="switchback_q")
  assert int8_products(int8.apply, variables(model, x), x) == 5


def test_under_vmap_each_model_has_scales_of_its_own():
  model, x = Conv1D(8), normal((2, 4, 16))
  int8 = quantize_model(model, "switchback")
  small = jax.tree.map(np.asarray, variables(model, x[0]))
  params = [small, jax.tree.map(lambda a: 100 * a, small)]
  stacked = jax.tree.map(lambda *a: np.stack(a), *params)
  apply = jax.jit(int8.apply)
  expected = [apply(p, one) for p, one in zip(params, np.asarray(x), strict=True)]
  np.testing.assert_array_equal(jax.jit(jax.vmap(int8.apply))(stacked, x), expected)


@pytest.mark.parametrize("kind", mainly([AxisType.Auto], [AxisType.Auto, AxisType.Explicit]))
def test_on_a_mesh_the_gradient_is_that_of_one_device(kind):
  model, x = Block(), normal((8, 4, 16))
  int8 = quantize_model(model, "switchback_q")
  params = drawn(jax.eval_shape(lambda key: model.init(key, x, True), jax.random.key(0)))

  def loss(params, x):
    return jnp.sum(jnp.sin(int8.apply(params, x, True)[0]))

  alone = compiled(jax.grad(loss))(params, x)
  mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
  place = functools.partial(jax.device_put, device=NamedSharding(mesh, P()))
  with jax.set_mesh(mesh):
    split = jax.device_put(x, NamedSharding(mesh, P("data")))
    assert_equal(compiled(jax.grad(loss))(jax.tree.map(place, params), split), alone, 1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_products_within_branches_loops_and_shards_are_replaced(kind):
  mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))

  def function(w, x):
    x = jax.lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: x, x)
    x = jax.lax.fori_loop(0, 2, lambda _, x: x @ w, x)
    x = jax.lax.while_loop(lambda x: x.sum() > 1e9, lambda x: x @ w, x)
    x = jax.jit(lambda w, x: x @ w)(w, x)
    local = jax.shard_map(
      lambda w, x: x @ w, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
    )
    return local(w, x)

  with jax.set_mesh(mesh):
    w = jax.device_put(normal((16, 16)), P())
    x = jax.device_put(normal((4, 16)), P("data"))
    assert int8_products(quantize_model(function, "switchback"), w, x) == 5
    assert_equal(compiled(quantize_model(function, "full"))(w, x), compiled(function)(w, x), 1e-5)


def test_threads_convert_at_once():
  model, x = Conv1D(8), normal((4, 16))
  params, results = variables(model, x), {}
  models = {name: quantize_model(model, name) for name in ("full", "switchback", "llm_int8")}

  def run(name):
    results[name] = models[name].apply(params, x)

  threads = [threading.Thread(target=run, args=(name,)) for name in models]
  [thread.start() for thread in threads]
  plain = model.apply(params, x)
  [thread.join() for thread in threads]
  np.testing.assert_array_equal(plain, model.apply(params, x))
  for name, int8 in models.items():
    np.testing.assert_array_equal(results[name], int8.apply(params, x))


def test_an_nnx_model_keeps_its_state_and_keys():
  x = normal((2, 8, 8, 3))
  model, other = ConvNeXt(nnx.Rngs(0)), ConvNeXt(nnx.Rngs(0))
  full, run = quantize_model(other, "full"), nnx.jit(lambda model, x: model(x))
  for _ in range(2):
    assert_equal(run(full, x), run(model, x), 1e-5)
  assert_equal(full.norm.mean[...], model.norm.mean[...], 1e-5)
  assert np.all(other.norm.mean[...] == 0)  # The original is as it was.
  assert isinstance(full, ConvNeXt)


def test_an_nnx_model_multiplies_in_int8_under_jit_and_grad():
  x = normal((2, 8, 8, 3))
  int8 = quantize_model(ConvNeXt(nnx.Rngs(0)), "switchback")
  graph, state = nnx.split(int8)
  assert int8_products(lambda state: nnx.merge(graph, state)(x), state) == 3
  grads = nnx.jit(nnx.grad(lambda model: jnp.sum(jnp.sin(model(x)))))(int8)
  assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(grads.layers))


def test_an_nnx_argument_may_change_within_the_call():
  model = Qwen3(nnx.Rngs(0))

  def after_two_calls(model):
    graph, state = nnx.split(model)

    def run(state):
      model, cache = nnx.merge(graph, state), Cache()
      model(TOKENS, cache)
      model(TOKENS[:, :1], cache)
      return nnx.state(cache)

    return compiled(run)(state)

  actual, expected = map(after_two_calls, (quantize_model(model, "full"), model))
  assert actual["length"][...] == 6
  assert_equal(actual, expected, 1e-5)


def test_each_public_method_of_an_nnx_model_is_converted():
  int8 = quantize_model(JimmCLIP(nnx.Rngs(0)), "switchback")
  graph, state = nnx.split(int8)
  image = int8_products(lambda s: nnx.merge(graph, s).encode_image(IMAGE), state)
  text = int8_products(lambda s: nnx.merge(graph, s).encode_text(TOKENS), state)
  assert (image, text) == (1 + BLOCK + 1, BLOCK + 1)


def test_the_table_has_each_product_and_the_reason_where_there_is_none(capsys):
  rules = {"layers/1": None, "*": "switchback"}
  model = quantize_model(ConvNeXt(nnx.Rngs(0)), rules, verbose=True)
  nnx.eval_shape(lambda model, x: model(x), model, normal((2, 8, 8, 3)))
  cells = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()]
  lines = {path: rest for path, *rest in cells}
  assert lines["stem/kernel"] == ["2x8x8x3", "4x4x3x16", "switchback"]
  assert lines["depthwise/kernel"][-1] == "a convolution in groups"
  assert lines["layers/1/kernel"][-1] == "the rule for 'layers/1'"
  assert not any("bias" in path for path in lines)


def test_the_table_says_what_parameters_are_that_are_no_weights(capsys):
  def function(p, i):
    return p["embed"][i] @ (p["base"] + p["a"] @ p["b"]) + p["bias"]

  shapes = {"embed": (8, 16), "base": (16, 16), "a": (16, 2), "b": (2, 16), "bias": (1, 16)}
  params = {name: normal(shape) for name, shape in shapes.items()}
  jax.eval_shape(quantize_model(function, "switchback", verbose=True), params, np.arange(3))
  rows = dict(
    re.findall(r"^(\w+) .* (\S+ a weight \(.*\))$", capsys.readouterr().out, re.MULTILINE)
  )
  kinds = {"embed": "gather", "base": "add", "a": "dot_general"}
  assert rows == {name: f"not a weight ({kind})" for name, kind in kinds.items()}


def test_a_precision_that_the_model_asks_for_is_left(capsys):
  model, x = nn.Dense(8, precision="highest"), normal((4, 16))
  params = variables(model, x)
  actual = quantize_model(model, "switchback", verbose=True).apply(params, x)
  np.testing.assert_array_equal(actual, model.apply(params, x))
  assert "asks for precision" in capsys.readouterr().out
  with jax.default_matmul_precision("highest"):
    int8 = quantize_model(nn.Dense(8), "switchback")
    assert int8_products(int8.apply, params, x) == 1


def test_a_pattern_that_fits_nothing_names_near_paths():
  model = quantize_model(nn.Dense(8), {"kernal": "switchback"})
  with pytest.raises(ValueError, match=r"'kernal' fits no parameter.*kernel"):
    model.apply(variables(nn.Dense(8), normal((4, 16))), normal((4, 16)))


@pytest.mark.parametrize(
  ("model", "rules", "message"),
  [
    (nn.Dense(8), "int4", "int4.*switchback"),
    (nn.Dense(8), [("*",)], "pair of a pattern"),
    (nn.Dense(8), {"*": "int4"}, "int4.*switchback"),
    (3, "full", "linen module"),
    (nn.Dense(8).bind({}), "full", "bound module"),
  ],
)
def test_bad_input_is_refused_at_once(model, rules, message):
  with pytest.raises(ValueError, match=message):
    quantize_model(model, rules)
