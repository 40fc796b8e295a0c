"""`quantize_weights`: any model's weights in 8 bits, applied by the same model."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_case import compiled, int8_products, normal
from foreign_models import Conv1D
from pairwise import mainly
from test_quantize_model import CASES, NNX_CASES, assert_equal, of_params, variables

from sbjax import SwitchBackDense, SwitchBackLinear, quantize_model, quantize_weights, quantized_dot
from sbjax.convert.matmuls import Conversion, Products
from sbjax.convert.rewrite import rewritten
from sbjax.interop.serving import size_of
from sbjax.linear.frozen import freeze, view
from sbjax.linear.weight import is_frozen
from sbjax.quantize import Spec

ROWWISE, TENSORWISE = Spec(jnp.int8, "rowwise"), Spec(jnp.int8, "tensorwise")
X = normal((4, 16))


@pytest.fixture(autouse=True)
def as_models_have_it(strict_jax):
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


def served_by(model, params, recipe, *inputs):
  return quantize_weights(params, recipe, call=lambda params: model.apply(params, *inputs))


def frozen_paths(tree):
  leaves = jax.tree.leaves_with_path(tree, is_leaf=is_frozen)
  return {jax.tree_util.keystr(k, simple=True, separator="/") for k, x in leaves if is_frozen(x)}


def with_floats_of(served):
  """Parameters whose weights are the floats that the 8 bits stand for."""
  floats = lambda leaf: view(leaf).dequantized() if is_frozen(leaf) else leaf  # noqa: E731
  return jax.tree.map(floats, served, is_leaf=is_frozen)


# ---- The same numbers, for every kind of model


LINEN = ["scan and remat", "class token", "two towers", "experts"]


@pytest.mark.parametrize(
  ("name", "recipe"),
  mainly(
    [("scan and remat", "switchback_q"), ("experts", "switchback")],
    [(name, recipe) for name in LINEN for recipe in ("switchback_q", "switchback")],
  ),
)
def test_outputs_are_those_of_the_float_parameters_converted(name, recipe):
  model, inputs, products = CASES[name]
  params, int8 = variables(model, *inputs), quantize_model(model, recipe)
  served = served_by(model, params, recipe, *inputs)
  assert int8_products(int8.apply, served, *inputs) == products
  expected, actual = (compiled(int8.apply)(p, *inputs) for p in (params, served))
  assert_equal(actual, expected)


@pytest.mark.parametrize("name", mainly(["convnext"], NNX_CASES))
def test_outputs_of_an_nnx_model_are_those_of_its_floats_converted(name):
  cls, inputs, products = NNX_CASES[name]
  model = cls(nnx.Rngs(0))
  served = quantize_weights(model, "switchback_q", call=lambda model: model(*inputs()))
  (call, own), (floats, params) = (
    of_params(quantize_model(m, "switchback_q"), inputs)
    for m in (served, nnx.merge(*_with_rounded_tables(model, served)))
  )
  assert int8_products(call, own) == products
  assert_equal(compiled(call)(own), compiled(floats)(params))


def _with_rounded_tables(model, served):
  """The model's graph and state; with the tables whose rows it takes, too, as the 8 bits say."""
  graph, state = nnx.split(model)
  rounded = with_floats_of(nnx.state(served))
  own = jax.tree.map_with_path(
    lambda keys, a, b: b if "embedding" in str(keys) else a, state, rounded
  )
  return graph, own


@pytest.mark.parametrize(
  "name", mainly(["conv1d and tied"], ["conv1d and tied", "shared embedding"])
)
def test_rows_of_a_table_that_is_a_weight_too_are_looked_up_in_its_8_bits(name):
  model, inputs, products = CASES[name]
  params, int8 = variables(model, *inputs), quantize_model(model, "switchback_q")
  served = served_by(model, params, "switchback_q", *inputs)
  assert any("embedding" in path for path in frozen_paths(served))
  assert int8_products(int8.apply, served, *inputs) == products
  actual = compiled(int8.apply)(served, *inputs)
  assert_equal(actual, compiled(int8.apply)(with_floats_of(served), *inputs), 1e-5)


def test_a_row_beyond_the_table_is_nan_as_in_floats():
  table, tokens = {"w": normal((8, 16))}, np.array([1, 9])

  def rows(p):
    return jnp.take(p["w"], tokens, 0)

  served = quantize_weights(table, "switchback", call=lambda p: rows(p) @ p["w"].T)
  actual = quantize_model(rows, "switchback")(served)
  np.testing.assert_array_equal(np.isnan(actual), [[False] * 16, [True] * 16])
  np.testing.assert_allclose(actual[0], table["w"][1], atol=0.02)


def test_a_weight_whose_matmuls_need_other_scales_stays_and_is_named():
  params = {"w": normal((16, 8)), "v": normal((16, 8))}

  def both_ways(p):
    return X @ p["w"] @ p["w"].T @ p["v"]

  with pytest.warns(UserWarning, match="leaves w in floats: its matmuls need other scales"):
    served = quantize_weights(params, "switchback_q", call=both_ways)
  assert frozen_paths(served) == {"v"}
  served = quantize_weights(params, "switchback", call=both_ways)  # One scale serves both.
  actual, expected = (quantize_model(both_ways, "switchback")(p) for p in (served, params))
  np.testing.assert_array_equal(actual, expected)


def test_the_input_gradient_is_that_of_the_float_parameters():
  model = Conv1D(8)
  params, int8 = variables(model, X), quantize_model(model, "switchback_c")
  served = served_by(model, params, "switchback_c", X)

  def gradient(params):
    return jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(int8.apply(params, x)))))(X)

  assert_equal(gradient(served), gradient(params))


def test_boxes_stay_around_8_bit_weights():
  init = nn.with_partitioning(nn.initializers.normal(0.2), (None, "model"))
  model = nn.Dense(8, kernel_init=init)
  params = model.init(jax.random.key(0), X)
  served = served_by(model, params, "switchback", X)
  assert isinstance(served["params"]["kernel"], nn.Partitioned)
  int8 = quantize_model(model, "switchback")
  np.testing.assert_array_equal(jax.jit(int8.apply)(served, X), jax.jit(int8.apply)(params, X))


def test_a_converted_layer_within_a_plain_loop_takes_its_slice_of_the_8_bits():
  class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
      return nn.Dense(16, name="dense")(x), None

  class Stack(nn.Module):
    layer: type

    @nn.compact
    def __call__(self, x):
      options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
      return nn.scan(self.layer, **options)(name="layers")(x, None)[0]

  plain, int8 = Stack(Layer), Stack(quantize_model(Layer, "switchback_q"))
  params = variables(plain, X)
  served = served_by(plain, params, "switchback_q", X)
  expected, actual = (compiled(int8.apply)(p, X) for p in (params, served))
  assert_equal(actual, expected)


# ---- Without a call: kernels of dense layers


def test_layers_of_ours_apply_kernels_in_8_bits():
  layer = SwitchBackDense(8, recipe="switchback_q")
  params = variables(layer, X)
  served = quantize_weights(params, "switchback_q")
  np.testing.assert_array_equal(jax.jit(layer.apply)(served, X), jax.jit(layer.apply)(params, X))
  layer = SwitchBackLinear(16, 8, recipe="switchback", rngs=nnx.Rngs(0))
  served = quantize_weights(layer, "switchback")
  np.testing.assert_array_equal(served(X), layer(X))
  assert is_frozen(served.kernel.get_value()) and not is_frozen(layer.kernel.get_value())


def test_a_stack_of_kernels_is_rounded_kernel_by_kernel():
  w = normal((3, 16, 8)) * np.array([1, 10, 100], np.float32)[:, None, None]
  kernel = quantize_weights({"kernel": w}, "switchback")["kernel"]
  assert kernel.fwd.values.shape == (3, 8, 16) and kernel.fwd.scale.shape == (3, 1, 1)
  one = quantize_weights({"kernel": w[2]}, "switchback")["kernel"]
  np.testing.assert_array_equal(kernel.fwd.values[2], one.fwd.values)


def test_a_plain_tree_s_weights_are_named_by_patterns():
  params = {"a": {"w": normal((16, 8)), "b": np.ones(8)}, "table": normal((4, 16))}
  served = quantize_weights(params, {"*/w": "switchback"})
  assert frozen_paths(served) == {"a/w"}
  function = quantize_model(lambda p, x: x @ p["a"]["w"] + p["a"]["b"], {"*/w": "switchback"})
  dot = functools.partial(quantized_dot, recipe="switchback")
  np.testing.assert_array_equal(function(served, X), dot(X, params["a"]["w"]) + np.float32(1))


def test_an_nnx_module_is_changed_in_place_on_request():
  model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
  assert quantize_weights(model, "switchback", in_place=True) is model
  assert is_frozen(model.kernel.get_value())


# ---- What stays, and bytes


def test_rules_leave_layers_in_floats_and_biases_norms_and_tables_stay():
  model, inputs, _ = CASES["class token"]
  params = variables(model, *inputs)
  served = quantize_weights(
    params, [("head", None), ("*", "switchback")], call=lambda p: model.apply(p, *inputs)
  )
  kernels = {"params/" + path for path in _kernels(params["params"])} - {"params/head/kernel"}
  assert frozen_paths(served) == kernels


def _kernels(params):
  leaves = jax.tree.leaves_with_path(params)
  paths = {jax.tree_util.keystr(keys, simple=True, separator="/") for keys, _ in leaves}
  return {path for path in paths if path.endswith("/kernel")}


class Layer(nn.Module):
  """A transformer's block of width 256."""

  @nn.compact
  def __call__(self, x):
    x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
    return x + nn.Dense(256)(nn.gelu(nn.Dense(1024)(nn.LayerNorm()(x))))


def test_a_transformer_s_block_takes_27_hundredths_of_float32():
  x = jax.ShapeDtypeStruct((2, 5, 256), jnp.float32)
  params = jax.eval_shape(Layer().init, jax.random.key(0), x)
  served = jax.eval_shape(
    lambda params: served_by(Layer(), params, "switchback_q", jnp.zeros(x.shape)), params
  )
  assert size_of(served) <= 0.27 * size_of(params)
  assert len(frozen_paths(served)) == 6


def test_a_weight_that_is_used_otherwise_too_stays_and_is_named():
  params = {"w": normal((16, 8)), "v": normal((8, 4))}

  def normalised(p, x):
    return (x @ p["w"]) / jnp.linalg.norm(p["w"]) @ p["v"]

  with pytest.warns(
    UserWarning, match="leaves w in floats: the model takes it in mul, which needs"
  ):
    served = quantize_weights(params, "switchback", call=lambda p: normalised(p, X))
  assert frozen_paths(served) == {"v"}


def test_a_weight_of_a_layer_of_ours_is_named_where_a_call_is_traced():
  class Mixed(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.Dense(4, name="plain")(SwitchBackDense(8, name="ours")(x))

  with pytest.warns(UserWarning, match="leaves ours/kernel in floats: the model takes it in sbj"):
    served = served_by(Mixed(), variables(Mixed(), X), "switchback", X)
  assert frozen_paths(served) == {"params/plain/kernel"}


# ---- Errors


def test_8_bits_of_another_recipe_or_layout_are_one_sentence():
  model = nn.MultiHeadDotProductAttention(2)
  x = normal((2, 5, 16))
  params = variables(model, x)
  served = served_by(model, params, "switchback", x)
  with pytest.raises(
    ValueError, match="query/kernel was quantized for another recipe: it is int8 t"
  ):
    quantize_model(model, "switchback_q").apply(served, x)
  rules = [("query", None), ("*", "switchback")]
  with pytest.raises(
    ValueError, match="query/kernel is in 8 bits, and the model takes it in dot_ge"
  ):
    quantize_model(model, rules).apply(served, x)
  by_names = quantize_weights(params, "switchback_q")  # As if [..., K, N].
  with pytest.raises(ValueError, match="query/kernel was quantized for another matmul: the axes"):
    quantize_model(model, "switchback_q").apply(by_names, x)


def test_8_bits_that_the_model_takes_elsewhere_are_one_sentence():
  served = quantize_weights({"w": normal((16, 8))}, {"w": "switchback"})
  with pytest.raises(ValueError, match="w is in 8 bits, and the model takes it in mul, not in a m"):
    quantize_model(lambda p: p["w"] * 2, "switchback")(served)


def test_rules_that_fit_nothing_or_round_nothing_are_one_sentence():
  params = variables(nn.Dense(8), X)
  with pytest.raises(
    ValueError, match=r"The rule for 'kernal' fits no parameter. Near it are: ker"
  ):
    quantize_weights(params, {"kernal": "switchback"})
  for call in (None, lambda params: nn.Dense(8).apply(params, X)):
    with pytest.raises(ValueError, match="The rules leave every weight in floats: give one that"):
      quantize_weights(params, "full", call=call)
  served = quantize_weights(params, "switchback")
  with pytest.raises(ValueError, match="kernel is in 8 bits already"):
    quantize_weights(served, "switchback")


# ---- Layouts: 8 bits move as their floats do


class Opens(Products):
  """Takes floats of every weight in 8 bits that is not multiplied."""

  def opened(self, eqn, path, weight):
    return weight.dequantized()


LAYOUTS = {
  "transposed": lambda w: w.T,
  "cast": lambda w: w.astype(jnp.bfloat16),
  "merged": lambda w: w.reshape(3, -1),
  "split": lambda w: w.reshape(3, 2, 2, 2, 3),
  "moved and merged": lambda w: w.transpose(2, 0, 1).reshape(-1, 4),
  "another axis": lambda w: w[:, None],
  "a slice": lambda w: w[1:, ::2],
  "an index": lambda w: w[2],
  "a part": lambda w: jnp.split(w, 2, axis=1)[1],
  "reversed": lambda w: w[::-1, :, ::-1],
  "a traced index": lambda w: jax.lax.dynamic_index_in_dim(w, jnp.argmax(jnp.arange(3)), 0, False),
  "within jit": jax.jit(lambda w: w.swapaxes(0, 1)),
  "within a loop": lambda w: jax.lax.scan(lambda c, w: (c, w.T * 2), 0, w)[1],
  "within a branch": lambda w: jax.lax.cond(jnp.array(True), lambda w: w * 3, lambda w: w * 4, w),
  "checkpointed": jax.checkpoint(lambda w: w.T + 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("contracted", "batch"), [((1,), (0,)), ((0, 2), ()), ((1,), ())])
def test_8_bits_in_a_layout_are_those_of_the_floats_there(layout, contracted, batch):
  w = freeze(normal((3, 4, 6)), ROWWISE, contracted, batch)
  function = LAYOUTS[layout]
  actual = rewritten(lambda w: function(w) * 1, ["w"], Opens(Conversion(())))(w)
  np.testing.assert_array_equal(actual, function(view(w).dequantized()))


@pytest.mark.parametrize(("contracted", "batch"), [((0,), ()), ((2, 0), (1,)), ((1,), (2,))])
def test_8_bits_are_the_floats_to_half_a_step(contracted, batch):
  w = normal((3, 4, 6))
  q = freeze(w, ROWWISE, contracted, batch)
  np.testing.assert_allclose(view(q).dequantized(), w, rtol=0, atol=np.abs(w).max() / 253)


def test_each_matmul_of_a_parameter_has_the_scales_of_its_recipe():
  w = normal((3, 4, 6))
  q = freeze(w, ROWWISE, contracted=(0, 2)).fwd
  np.testing.assert_allclose(q.scale[:, 0], np.abs(w).max((0, 2)) / 127, rtol=1e-6)
  q = freeze(w, TENSORWISE, contracted=(1,), batch=(0,)).fwd
  np.testing.assert_allclose(q.scale[:, 0, 0], np.abs(w).max((1, 2)) / 127, rtol=1e-6)
