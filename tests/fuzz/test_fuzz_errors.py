"""A call with one argument spoiled raises a ValueError or a NotImplementedError with a sentence.

`SBJAX_FUZZ=10` draws ten times as many, from a new seed.
"""

import math
import pathlib
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fuzz_case import fuzz
from hypothesis import given
from hypothesis import strategies as st

import sbjax
from sbjax import (
  INT8,
  LayerNormDense,
  LayerNormMLP,
  Quantized,
  Recipe,
  RecipeRules,
  Spec,
  SwitchBackDense,
  SwitchBackLinear,
  dequantize,
  quantize,
  quantized_dot,
  quantized_dot_general,
  scaled_matmul,
  stable_adamw,
)
from sbjax.distributed.fsdp import gather, gather_weight
from sbjax.linear.fused import gated_mlp, layer_norm_dense, layer_norm_mlp
from sbjax.linear.fused_nnx import GatedMLP as GatedNnxMLP
from sbjax.linear.layers import GatedMLP
from sbjax.linear.weight import quantize_weight
from sbjax.ops.registry import get_backend
from sbjax.ops.rows import LayerNormParams, RMSNormParams
from sbjax.recipes import parse_recipe

X, W = np.ones((3, 4), np.float32), np.ones((4, 5), np.float32)
NORM = LayerNormParams(np.ones(4, np.float32), np.zeros(4, np.float32))
INT8_ROW = Spec(INT8, "rowwise")
KEY, RULE = jax.random.key(0), {"*": "full"}
DIMENSIONS = (((1,), (0,)), ((), ()))
NOT_ARRAYS = (
  *(None, 3, 1.5, True, "x", [[1.0]], {}, object(), Quantized(X, X, INT8_ROW), KEY),
  *(X.astype(dtype) for dtype in ("int8", "int64", "bool", "complex64", "object", "str")),
  *(jnp.asarray(X).astype(dtype) for dtype in ("int4", "float8_e4m3fn", "float4_e2m1fn")),
  *(jax.ShapeDtypeStruct((3, 4), jnp.float32), np.zeros((3, 4), jax.dtypes.float0)),
)
NOT_CHOICES = (
  *(3, 1.5, "x", "", [1.0], {}, object(), X, jnp.ones(()), quantize(X, INT8_ROW), KEY),
  *("mosaic", "triton"),  # The names of backends that need a GPU.
)
NOT_SIZES = (-1, 0, 1.5, None, "x", [1], X)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def init(layer, x):
  return layer.init_with_output(KEY, x)[0]


def linear(x=X, recipe="switchback", **options):
  return SwitchBackLinear(4, 5, recipe=recipe, rngs=nnx.Rngs(0), **options)(x)


def general(lhs=X, rhs=W, dimensions=DIMENSIONS, recipe="switchback", backend=None, **options):
  return quantized_dot_general(recipe, backend=backend)(lhs, rhs, dimensions, **options)


def gated(w_gate=W, w_up=W, w_down=W.T, **options):
  return gated_mlp(X, RMSNormParams(NORM.scale), w_gate, w_up, w_down, "switchback", **options)


def nnx_gated(x=X, **options):
  return GatedNnxMLP(4, 5, **options, rngs=nnx.Rngs(0))(x)


def mlp(x=X, norm=NORM, w1=W, b1=None, w2=W.T, b2=None, recipe="switchback", **options):
  return layer_norm_mlp(x, norm, w1, b1, w2, b2, recipe, **options)


def adamw(g=X, p=X, rate=1e-3, **options):
  optimizer = stable_adamw(rate, **options)
  return optimizer.update({"w": g}, optimizer.init({"w": p}), {"w": p})


def leaf(a):
  """a, or a string for what is no leaf of a pytree."""
  leaves = jax.tree.leaves(a)
  return a if len(leaves) == 1 and leaves[0] is a else "x"


def is_matrix(shape):
  return len(shape) == 2


def has_columns(shape):
  return len(shape) > 0 and shape[-1] > 0


def rows_of(k):
  return lambda shape: len(shape) > 0 and shape[-1] == k


def kernel_of(k):
  return lambda shape: len(shape) == 2 and shape[0] == k


# An argument that is an array: (call, whether a shape fits).
ARRAYS = {
  "quantize": (lambda a: quantize(a, INT8_ROW), is_matrix),
  "quantize_weight": (lambda a: quantize_weight(a, "switchback"), is_matrix),
  "quantize_weight full": (lambda a: quantize_weight(a, "full"), is_matrix),
  "gather_weight": (lambda a: gather_weight(a, "switchback", None), is_matrix),
  "gather": (lambda a: gather(a, None), lambda shape: True),
  "quantized_dot x": (lambda a: quantized_dot(a, W, "switchback"), rows_of(4)),
  "quantized_dot full x": (lambda a: quantized_dot(a, W, "full"), rows_of(4)),
  "quantized_dot w": (lambda a: quantized_dot(X, a, "switchback_m"), kernel_of(4)),
  "quantized_dot bias": (lambda a: quantized_dot(X, W, "full", bias=a), (5,).__eq__),
  "quantized_dot residual": (lambda a: quantized_dot(X, W, "full", residual=a), (3, 5).__eq__),
  "quantized_dot_general lhs": (general, lambda shape: shape[1:2] == (4,)),
  "quantized_dot_general rhs": (lambda a: general(X, a), lambda shape: shape[:1] == (4,)),
  "SwitchBackDense": (lambda a: init(SwitchBackDense(5), a), has_columns),
  "SwitchBackLinear": (linear, rows_of(4)),
  "LayerNormDense": (lambda a: init(LayerNormDense(5), a), has_columns),
  "LayerNormMLP": (lambda a: init(LayerNormMLP(5), a), has_columns),
  "GatedMLP": (lambda a: init(GatedMLP(5), a), has_columns),
  "nnx GatedMLP": (nnx_gated, rows_of(4)),
  "gated_mlp w_gate": (lambda a: gated(w_gate=a), (4, 5).__eq__),
  "gated_mlp w_up": (lambda a: gated(w_up=a), (4, 5).__eq__),
  "gated_mlp w_down": (lambda a: gated(w_down=a), kernel_of(5)),
  "gated_mlp b_up": (lambda a: gated(b_up=a), (5,).__eq__),
  "layer_norm_dense x": (lambda a: layer_norm_dense(a, NORM, W, "switchback"), rows_of(4)),
  "layer_norm_dense w": (lambda a: layer_norm_dense(X, NORM, a, "switchback"), kernel_of(4)),
  "layer_norm_dense bias": (
    lambda a: layer_norm_dense(X, NORM, W, "switchback", bias=a),
    (5,).__eq__,
  ),
  "norm": (lambda a: layer_norm_dense(X, a, W, "switchback"), lambda shape: False),
  "norm.scale": (
    lambda a: layer_norm_dense(X, NORM._replace(scale=a), W, "switchback"),
    (4,).__eq__,
  ),
  "layer_norm_mlp x": (mlp, rows_of(4)),
  "layer_norm_mlp w1": (lambda a: mlp(w1=a), kernel_of(4)),
  "layer_norm_mlp b1": (lambda a: mlp(b1=a), (5,).__eq__),
  "layer_norm_mlp w2": (lambda a: mlp(w2=a), kernel_of(5)),
  "layer_norm_mlp w2, residual": (lambda a: mlp(w2=a, add_residual=True), (5, 4).__eq__),
  "stable_adamw gradient": (lambda a: adamw(g=leaf(a)), (3, 4).__eq__),
  "stable_adamw parameter": (lambda a: adamw(p=leaf(a)), (3, 4).__eq__),
}
OPTIONAL = ("bias", "residual", "b1", "b_up")
# An argument that is a choice: (call, whether a value of NOT_CHOICES is one of the choices).
CHOICES = {
  "Spec dtype": lambda a: Spec(a, "rowwise"),
  "Spec scaling": lambda a: Spec(INT8, a),
  "Recipe fwd": lambda a: Recipe(a, None, None),
  "Recipe wgrad": lambda a: Recipe(None, None, (a, INT8_ROW)),
  "Recipe saved": lambda a: Recipe(None, None, None, a),
  "RecipeRules": RecipeRules,
  "RecipeRules pair": lambda a: RecipeRules(((a, a),)),
  "RecipeRules.of": lambda a: RecipeRules.of({"*": a}),
  "RecipeRules.of mapping": lambda a: RecipeRules.of(3 if isinstance(a, dict) else a),
  "parse_recipe": parse_recipe,
  "get_backend": get_backend,
  "quantize spec": lambda a: quantize(X, a),
  "dequantize": lambda a: dequantize(None if isinstance(a, Quantized) else a),
  "dequantize dtype": lambda a: dequantize(quantize(X, INT8_ROW), a),
  "scaled_matmul dtype": lambda a: scaled_matmul(*[quantize(X, INT8_ROW)] * 2, a),
  "scaled_matmul lhs": lambda a: scaled_matmul(
    None if isinstance(a, Quantized) else a, quantize(X, INT8_ROW), jnp.float32
  ),
  "quantize_weight recipe": lambda a: quantize_weight(W, a),
  "quantize_weight backend": lambda a: quantize_weight(W, "full", backend=a),
  "quantized_dot recipe": lambda a: quantized_dot(X, W, a),
  "quantized_dot backend": lambda a: quantized_dot(X, W, "full", backend=a),
  "gather_weight axis": lambda a: gather_weight(W, "switchback", a),
  "gather_weight reduce_axes": lambda a: gather_weight(W, "switchback", None, reduce_axes=(a,)),
  "gather_weight dtype": lambda a: gather_weight(W, "full", None, dtype=a),
  "gather axis_name": lambda a: gather(W, a),
  "gather axis": lambda a: gather(W, None, axis=a),
  "quantized_dot_general recipe": lambda a: general(recipe=a),
  "quantized_dot_general backend": lambda a: general(backend=a),
  "quantized_dot_general dtype": lambda a: general(preferred_element_type=a),
  "quantized_dot_general precision": lambda a: general(precision=a),
  "quantized_dot_general dimensions": lambda a: general(dimensions=a),
  "quantized_dot_general axes": lambda a: general(dimensions=(((a,), (0,)), ((), ()))),
  "SwitchBackDense recipe": lambda a: init(SwitchBackDense(5, recipe=a), X),
  "SwitchBackDense backend": lambda a: init(SwitchBackDense(5, backend=a), X),
  "SwitchBackDense dtype": lambda a: init(SwitchBackDense(5, dtype=a), X),
  "SwitchBackDense param_dtype": lambda a: init(SwitchBackDense(5, param_dtype=a), X),
  "SwitchBackLinear recipe": lambda a: linear(recipe=a),
  "SwitchBackLinear backend": lambda a: linear(backend=leaf(a)),
  "SwitchBackLinear dtype": lambda a: linear(dtype=a),
  "SwitchBackLinear param_dtype": lambda a: linear(param_dtype=a),
  "LayerNormDense recipe": lambda a: init(LayerNormDense(5, recipe=a), X),
  "LayerNormDense dtype": lambda a: init(LayerNormDense(5, dtype=a), X),
  "LayerNormDense norm": lambda a: init(LayerNormDense(5, norm=a), X),
  "LayerNormMLP param_dtype": lambda a: init(LayerNormMLP(5, param_dtype=a), X),
  "LayerNormMLP activation": lambda a: init(LayerNormMLP(5, activation=a), X),
  "LayerNormMLP epsilon": lambda a: init(LayerNormMLP(5, epsilon=a), X),
  "nnx GatedMLP recipe": lambda a: nnx_gated(recipe=a),
  "nnx GatedMLP norm": lambda a: nnx_gated(norm=a),
  "nnx GatedMLP dtype": lambda a: nnx_gated(dtype=a),
  "nnx GatedMLP param_dtype": lambda a: nnx_gated(param_dtype=a),
  "nnx GatedMLP keep": lambda a: nnx_gated(keep=a),
  "LayerNormMLP backend": lambda a: init(LayerNormMLP(5, backend=a), X),
  "LayerNormMLP dtype": lambda a: init(LayerNormMLP(5, dtype=a), X),
  "layer_norm_mlp recipe": lambda a: mlp(recipe=("full", a)),
  "layer_norm_dense backend": lambda a: layer_norm_dense(X, NORM, W, "full", backend=a),
  "stable_adamw decay_with": lambda a: stable_adamw(1e-3, decay_with=a),
}
SIZES = {
  "SwitchBackDense features": lambda a: init(SwitchBackDense(a), X),
  "SwitchBackDense width": lambda a: init(SwitchBackDense(5), X[:, :0]),
  "SwitchBackLinear out_features": lambda a: SwitchBackLinear(4, a, rngs=nnx.Rngs(0)),
  "SwitchBackLinear in_features": lambda a: SwitchBackLinear(a, 4, rngs=nnx.Rngs(0)),
  "LayerNormDense features": lambda a: init(LayerNormDense(a), X),
  "LayerNormMLP hidden": lambda a: init(LayerNormMLP(a), X),
  "GatedMLP hidden": lambda a: init(GatedMLP(a), X),
  "nnx GatedMLP width": lambda a: GatedNnxMLP(a, 5, rngs=nnx.Rngs(0)),
  "nnx GatedMLP hidden": lambda a: GatedNnxMLP(4, a, rngs=nnx.Rngs(0)),
  "num_outputs": lambda a: layer_norm_dense(X, NORM, W, "full", num_outputs=-2 if a is None else a),
}
NUMBERS = {
  "stable_adamw b1": (lambda a: adamw(b1=a), (-0.1, 1.0, 1.5)),
  "stable_adamw b2": (lambda a: adamw(b2=a), (-0.1, 1.0, 1.5)),
  "stable_adamw eps": (lambda a: adamw(eps=a), (-1e-8, -1)),
  "stable_adamw clip_threshold": (lambda a: adamw(clip_threshold=a), (0, -1.0)),
  "stable_adamw learning_rate": (lambda a: adamw(rate=a), ()),
  "stable_adamw weight_decay": (lambda a: adamw(weight_decay=a), ()),
  "stable_adamw stacked": (lambda a: adamw(stacked=leaf(a)), (-1, 3)),
}
NOT_NUMBERS = ("x", [0.5], None, {"a": 1}, math.nan, 1j)


def assert_refused(call, argument):
  """The call raises a ValueError or a NotImplementedError of sbjax's own, with a sentence."""
  try:
    with np.errstate(all="ignore"):
      result = call(argument)
  except (ValueError, NotImplementedError) as error:
    raised = traceback.extract_tb(error.__traceback__)[-1]
    source = pathlib.Path(raised.filename).parent
    assert source.is_relative_to(pathlib.Path(sbjax.__file__).parent), f"{raised}: {error}"
    assert str(error).endswith(".") and len(str(error).split()) > 3, str(error)
  else:
    raise AssertionError(f"accepted: {result}")


def spoiled(kind):
  return st.sampled_from(list(kind.items()))


@fuzz(400)
@given(spoiled(ARRAYS), st.one_of(st.sampled_from(NOT_ARRAYS), shapes))
def test_a_wrong_array_is_refused(door, wrong):
  name, (call, fits) = door
  if isinstance(wrong, tuple):
    if fits(wrong):
      return
    wrong = np.ones(wrong, np.float32)
  if wrong is not None or not name.endswith(OPTIONAL):
    assert_refused(call, wrong)


@fuzz(300)
@given(spoiled(CHOICES), st.sampled_from(NOT_CHOICES))
def test_a_wrong_choice_is_refused(door, wrong):
  assert_refused(door[1], wrong)


@pytest.mark.parametrize("door", SIZES)
def test_a_wrong_size_is_refused(door):
  for wrong in NOT_SIZES:
    assert_refused(SIZES[door], wrong)


@pytest.mark.parametrize("door", NUMBERS)
def test_a_wrong_number_is_refused(door):
  call, beyond = NUMBERS[door]
  for wrong in (*NOT_NUMBERS, *beyond):
    assert_refused(call, wrong)
