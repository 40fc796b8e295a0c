"""Layers with RMS norms and gated units: for linen and nnx, in a block of LLaMA, with bad input."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_case import assert_close, bitwise, drawn, int8_products, normal, value_and_grads
from foreign_models import Llama, NnxLlama, attend_rotated
from pairwise import mainly

from sbjax import (
  LayerNormDense,
  LayerNormMLP,
  SwitchBackDense,
  SwitchBackLinear,
  quantize_weights,
)
from sbjax.linear import fused_nnx
from sbjax.linear.fused import gated_mlp
from sbjax.linear.layers import GatedMLP
from sbjax.linear.lora import adapt, add_lora, init_lora, merge
from sbjax.linear.quantized_dot import DOT_NAME
from sbjax.linear.weight import serving_weight
from sbjax.ops import rows
from sbjax.ops.rows import ACTIVATIONS, LayerNormParams, RMSNormParams
from sbjax.quantize import quantize
from sbjax.recipes import RECIPES

WIDTH, HIDDEN = 16, 48
X = normal((2, 5, WIDTH)) * 3 + 1

LAYERS = {  # name: (a linen layer, an nnx layer) of options
  "dense": (
    functools.partial(LayerNormDense, HIDDEN),
    functools.partial(fused_nnx.LayerNormLinear, WIDTH, HIDDEN),
  ),
  "mlp": (
    functools.partial(LayerNormMLP, HIDDEN),
    functools.partial(fused_nnx.LayerNormMLP, WIDTH, HIDDEN),
  ),
  "gated": (
    functools.partial(GatedMLP, HIDDEN),
    functools.partial(fused_nnx.GatedMLP, WIDTH, HIDDEN),
  ),
}
OPTIONS = [
  {},
  {"norm": "rms", "use_bias": False, "recipe": "switchback_m", "dtype": "bfloat16"},
  {"norm": "layer", "use_bias": True, "recipe": "full", "epsilon": 0.3, "keep": "grouped"},
]


def run(function, params, x):
  """The results, and the gradients of the parameters and of x."""

  @bitwise
  def both(params, x):
    y, backward = jax.vjp(function, params, x)
    return y, backward(jax.tree.map(jnp.sin, y))

  return both(params, x)


def of_nnx(layer):
  """A call of the layer as a function of the parameters' tree, in linen's form."""
  graph, state, rest = nnx.split(layer, nnx.Param, ...)

  def call(params, x):
    params = {"linear" if name == "dense" else name: tree for name, tree in params.items()}
    full = jax.tree.map(lambda leaf: leaf, state)
    nnx.replace_by_pure_dict(full, params)
    return nnx.merge(graph, full, rest)(x)

  return call


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_the_nnx_layer_has_the_parameters_and_bits_of_the_linen_layer(name, options):
  of_linen, nnx_layer = LAYERS[name]
  layer = of_linen(**options)
  shapes = jax.eval_shape(layer.init, jax.random.key(0), X)["params"]
  params = drawn(shapes)
  theirs = of_nnx(nnx_layer(**options, rngs=nnx.Rngs(0)))
  assert jax.eval_shape(theirs, params, X) == jax.eval_shape(layer.apply, {"params": params}, X)
  actual = run(theirs, params, X)
  expected = run(lambda params, x: layer.apply({"params": params}, x), params, X)
  jax.tree.map(np.testing.assert_array_equal, actual, expected)
  state = nnx.state(nnx_layer(**options, rngs=nnx.Rngs(0)), nnx.Param)
  assert len(jax.tree.leaves(state)) == len(jax.tree.leaves(params))


@pytest.mark.parametrize("name", ["mlp", "gated"])
def test_a_pair_of_recipes_is_that_before_and_that_after_the_activation(name):
  of_linen, nnx_layer = LAYERS[name]
  pair = "switchback", "full"
  layer, theirs = of_linen(recipe=pair), nnx_layer(recipe=pair, rngs=nnx.Rngs(0))
  params = drawn(jax.eval_shape(layer.init, jax.random.key(0), X)["params"])
  ours = functools.partial(lambda params, x: layer.apply({"params": params}, x)[1], params)
  nnx_s = functools.partial(lambda params, x: of_nnx(theirs)(params, x)[1], params)
  assert int8_products(ours, X) == int8_products(nnx_s, X) == {"mlp": 1, "gated": 2}[name]
  recipes = [getattr(theirs, linear).recipe for linear in params if linear != "norm"]
  assert recipes.count(RECIPES["full"]) == 1
  assert (theirs.down if name == "gated" else theirs.fc2).recipe == RECIPES["full"]


@pytest.mark.parametrize("name", LAYERS)
def test_the_initial_kernel_and_the_parameters_dtype_are_fields(name):
  of_linen, nnx_layer = LAYERS[name]
  how = {"kernel_init": nn.initializers.constant(2.0), "param_dtype": jnp.bfloat16}
  params = of_linen(**how).init(jax.random.key(0), X)["params"]
  state = nnx.to_pure_dict(nnx.state(nnx_layer(**how, rngs=nnx.Rngs(0)), nnx.Param))
  for tree in (params, state):
    leaves = jax.tree.leaves_with_path(tree)
    assert {leaf.dtype for _, leaf in leaves} == {jnp.dtype(jnp.bfloat16)}
    kernels = [leaf for path, leaf in leaves if "kernel" in str(path[-1])]
    assert len(kernels) == {"dense": 1, "mlp": 2, "gated": 3}[name]
    assert all(np.all(kernel == 2) for kernel in kernels)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_gated_mlp_saves_groups_where_it_is_told_to(kind):
  of_linen, nnx_layer = LAYERS["gated"]
  layer = of_linen(keep="grouped")
  params = drawn(jax.eval_shape(layer.init, jax.random.key(0), X)["params"])
  call = functools.partial(lambda params, x: layer.apply({"params": params}, x), params)
  if kind == "nnx":
    call = functools.partial(of_nnx(nnx_layer(keep="grouped", rngs=nnx.Rngs(0))), params)
  saved = jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(call, x)[1], X))
  groups = [a.shape[1] for a in saved if a.dtype == jnp.float8_e4m3fn]
  assert sorted(groups) == [1, 3, 3]  # Of 16 numbers: of x, gate and up.
  assert not any(a.shape[:1] == (10,) and a.ndim == 2 for a in saved)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("name", LAYERS)
def test_norm_epsilon_and_activation_are_those_of_flax_s_layers(name, norm):
  how = {} if name == "dense" else {"activation": "quick_gelu"}
  layer = LAYERS[name][0](norm=norm, epsilon=0.3, recipe="full", use_bias=True, **how)

  def quick_gelu(x):
    return x * jax.nn.sigmoid(1.702 * x)

  class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
      n = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}[norm](epsilon=0.3, name="norm")(x)
      if name == "dense":
        return x, nn.Dense(HIDDEN, name="dense")(n)
      if name == "mlp":
        return x, nn.Dense(WIDTH, name="fc2")(quick_gelu(nn.Dense(HIDDEN, name="fc1")(n)))
      gate, up = nn.Dense(HIDDEN, name="gate")(n), nn.Dense(HIDDEN, name="up")(n)
      return x, nn.Dense(WIDTH, name="down")(quick_gelu(gate) * up)

  params = {"params": drawn(jax.eval_shape(Plain().init, jax.random.key(0), X)["params"])}
  actual, expected = (
    value_and_grads(lambda p, x, m=m: m.apply(p, x)[1], params, X) for m in (layer, Plain())
  )
  assert_close(actual, expected, 2e-6)


# ---- A block of LLaMA


class FusedLlama(nn.Module):
  """`Llama` of our layers."""

  recipe: str

  @nn.compact
  def __call__(self, x):
    how = {"recipe": self.recipe, "use_bias": False}
    x, qkv = LayerNormDense(3 * WIDTH, norm="rms", name="qkv", **how)(x)
    x = x + SwitchBackDense(WIDTH, name="out", **how)(attend_rotated(*jnp.split(qkv, 3, -1)))
    return GatedMLP(HIDDEN, add_residual=True, name="mlp", **how)(x)


class FusedNnxLlama(nnx.Module):
  def __init__(self, recipe, rngs):
    how = {"recipe": recipe, "use_bias": False, "rngs": rngs}
    self.qkv = fused_nnx.LayerNormLinear(WIDTH, 3 * WIDTH, norm="rms", **how)
    self.out = SwitchBackLinear(WIDTH, WIDTH, **how)
    self.mlp = fused_nnx.GatedMLP(WIDTH, HIDDEN, add_residual=True, **how)

  def __call__(self, x):
    x, qkv = self.qkv(x)
    return self.mlp(x + self.out(attend_rotated(*jnp.split(qkv, 3, -1))))


def fused_params(params, linear):
  """The parameters of Llama, or their gradients, as the fused block has them."""
  kernels = [params[f"{h}_proj"]["kernel"] for h in "qkv"]
  qkv = {"norm": params["attention_norm"], linear: {"kernel": jnp.concatenate(kernels, axis=1)}}
  mlp = {name: params[f"{name}_proj"] for name in ("gate", "up", "down")}
  return {"qkv": qkv, "out": params["o_proj"], "mlp": {"norm": params["mlp_norm"], **mlp}}


@pytest.mark.standard_promotion
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_in_full_a_block_of_our_layers_has_the_numbers_of_llama_s(kind):
  params = drawn(jax.eval_shape(Llama().init, jax.random.key(0), X)["params"])
  if kind == "linen":
    linear = "dense"
    theirs = lambda params, x: Llama().apply({"params": params}, x)  # noqa: E731
    ours = lambda params, x: FusedLlama("full").apply({"params": params}, x)  # noqa: E731
  else:
    linear = "linear"
    theirs, ours = map(of_nnx, (NnxLlama(nnx.Rngs(0)), FusedNnxLlama("full", nnx.Rngs(0))))
  y, (gradient, dx) = value_and_grads(theirs, params, X)
  actual = value_and_grads(ours, fused_params(params, linear), X)
  assert_close(actual, (y, (fused_params(gradient, linear), dx)), 3e-6)


# ---- Weights in 8 bits, adapters, and rematerialisation


close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def gated_case():
  norm = RMSNormParams(1 + normal((WIDTH,), seed=1) / 4)
  kernels = normal((2, WIDTH, HIDDEN), seed=2) / 4, normal((HIDDEN, WIDTH), seed=3) / 7
  return jnp.asarray(X.reshape(-1, WIDTH)), norm, (*kernels[0], kernels[1])


# 8 bits of int8 serve no input gradient in fp8: of the two only the kernel that is not frozen does.
TWO_FORMATS = dataclasses.replace(RECIPES["fp8_switchback"], fwd=RECIPES["switchback"].fwd)


@pytest.mark.parametrize(
  "recipe",
  [RECIPES["switchback_q"], RECIPES["switchback_c"], TWO_FORMATS],
  ids=["switchback_q", "switchback_c", "two formats"],
)
def test_one_of_gate_and_up_may_be_frozen(recipe):
  """Frozen or not, a kernel's 8 bits are nearly the same, and so is the gradient of x."""
  x, norm, (w_gate, w_up, w_down) = gated_case()

  def frozen(w):
    return serving_weight(quantize(w.T, recipe.fwd[1]))

  run = jax.jit(lambda x, *ws: jax.vjp(lambda x: gated_mlp(x, norm, *ws, recipe)[1], x)[1](x))
  (expected,) = run(x, w_gate, w_up, w_down)
  for ws in ((frozen(w_gate), w_up), (w_gate, frozen(w_up)), (frozen(w_gate), frozen(w_up))):
    (dx,) = run(x, *ws, w_down)
    bound = 2**-4 if recipe is TWO_FORMATS else 0.02  # Half a step of e4m3.
    assert np.linalg.norm(dx - expected) <= bound * np.linalg.norm(expected)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_frozen_weights_give_the_bits_of_float_weights(kind):
  of_linen, nnx_layer = LAYERS["gated"]
  if kind == "linen":
    layer = of_linen(add_residual=True)
    params = layer.init(jax.random.key(0), X)
    call, models = layer.apply, (params, quantize_weights(params, "switchback"))
    bits = models[1]["params"]["up"]["kernel"].fwd
  else:
    layer = nnx_layer(add_residual=True, rngs=nnx.Rngs(0))
    call, models = lambda layer, x: layer(x), (layer, quantize_weights(layer, "switchback"))
    bits = models[1].up.kernel.get_value().fwd
  assert bits.values.dtype == jnp.int8
  np.testing.assert_array_equal(*(call(model, X) for model in models))


def test_a_policy_that_saves_outputs_leaves_no_product_to_repeat():
  layer = GatedMLP(HIDDEN)
  params = layer.init(jax.random.key(0), X)
  saving = jax.checkpoint_policies.save_only_these_names(DOT_NAME)

  def products(policy):
    call = jax.checkpoint(lambda params, x: layer.apply(params, x)[1], policy=policy)
    return int8_products(jax.grad(lambda *a: jnp.sum(jnp.sin(call(*a))), (0, 1)), params, X)

  assert (products(None), products(saving)) == (8, 6)  # That of down has no further use.


def test_adapters_of_a_gated_mlp_learn_beside_its_kernels():
  layer = GatedMLP(HIDDEN, recipe="full", add_residual=True)
  params = drawn(jax.eval_shape(layer.init, jax.random.key(0), X)["params"])
  lora = drawn(jax.eval_shape(lambda: init_lora(jax.random.key(1), params, 4, (".*",))))
  assert set(lora) == {"gate", "up", "down"}

  def beside(lora, x):
    return jnp.sum(jnp.sin(layer.apply({"params": add_lora(params, lora, 8.0)}, x)))

  def merged(lora, x):
    added = {
      name: {"kernel": w["kernel"] + 2.0 * lora[name]["kernel"]["a"] @ lora[name]["kernel"]["b"]}
      for name, w in params.items()
      if name != "norm"
    }
    return jnp.sum(jnp.sin(layer.apply({"params": params | added}, x)))

  actual, expected = (jax.jit(jax.value_and_grad(f, (0, 1)))(lora, X) for f in (beside, merged))
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), actual, expected
  )


@pytest.mark.standard_promotion
def test_an_nnx_gated_mlp_is_adapted_and_merged():
  model = nnx.Dict(mlp=fused_nnx.GatedMLP(WIDTH, HIDDEN, rngs=nnx.Rngs(0)))
  before = model.mlp(X)[1]
  adapt(model, 4, 8.0, ("mlp/(gate|up)",), rngs=nnx.Rngs(1))
  assert isinstance(model.mlp.gate.lora.a, nnx.LoRAParam) and model.mlp.down.lora is None
  np.testing.assert_allclose(model.mlp(X)[1], before, atol=0.02 * np.abs(before).max())
  argument = nnx.DiffState(0, nnx.LoRAParam)
  gradient = nnx.grad(lambda model: jnp.sum(jnp.sin(model.mlp(X)[1])), argnums=argument)(model)
  assert np.any(gradient.mlp.up.lora.b[...]) and np.any(gradient.mlp.gate.lora.b[...])
  merge(model)
  assert model.mlp.gate.lora is None and model.mlp.gate.kernel[...].dtype == jnp.float32


# ---- The definition


@pytest.mark.parametrize("activation", mainly(["silu", "gelu"], ACTIVATIONS))
def test_the_gradients_of_a_gated_unit_are_jax_s(activation):
  gate, up, dg = jnp.asarray(normal((3, 4, 24)) * 3)
  act = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "silu": jax.nn.silu,
  }[activation]
  with jax.enable_x64(True):  # In float32 JAX's 1 + tanh cancels for negative numbers.
    at = np.float64(gate), np.float64(up)
    g, backward = jax.vjp(lambda gate, up: act(gate) * up, *at)
    expected = g, g, *backward(jnp.float64(dg))
  (d_gate, d_up), quantized, again = rows.glu_backward(gate, up, dg, None, activation=activation)
  assert quantized is None
  actual = rows.glu_quantize(gate, up, None, activation=activation)[0], again, d_gate, d_up
  for ours, theirs in zip(actual, expected, strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [LayerNormParams, RMSNormParams])
def test_the_gradients_of_a_norm_are_jax_s(kind):
  x, dn, dx = jnp.asarray(normal((3, 6, 24)) * 3 + 1)
  norm = kind(*(jnp.asarray(v) for v in normal((len(kind._fields), 24), seed=1)))
  cls = nn.RMSNorm if kind is RMSNormParams else nn.LayerNorm

  def flax_s(x, norm):
    return cls(epsilon=0.1, use_fast_variance=False).apply({"params": norm._asdict()}, x)

  n, backward = jax.vjp(flax_s, x, norm)
  d_x, d_norm = backward(dn)
  actual = rows.norm_backward(x, norm, dn, dx, epsilon=0.1)
  assert isinstance(actual[1], kind)
  expected = d_x + dx, d_norm, n
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), actual, expected
  )
  np.testing.assert_allclose(
    rows.norm_quantize(x, norm, None, epsilon=0.1), n, rtol=1e-5, atol=1e-6
  )


# ---- Bad input


@pytest.mark.parametrize(
  ("change", "why"),
  [
    ({"norm": (jnp.ones(WIDTH),)}, r"norm must be LayerNormParams\(scale, bias\) or RMSNormParams"),
    ({"norm": RMSNormParams(jnp.ones(3))}, r"norm.scale must be \(16,\) for x .*, not \(3,\)"),
    ({"w_gate": jnp.ones((5, HIDDEN))}, r"x \[..., K\] and w_gate \[K, N\] must agree in K"),
    ({"w_up": jnp.ones((WIDTH, 9))}, r"w_gate and w_up \[K, H\] must agree in H, .* 48 and 9"),
    ({"w_down": jnp.ones((5, WIDTH))}, r"x \[..., K\] and w_down \[K, N\] must agree in K"),
    ({"w_down": jnp.ones((HIDDEN, 9)), "add_residual": True}, r"w_down \[H, 16\], not \(48, 9\)"),
    ({"b_gate": jnp.ones(3)}, r"b_gate must be \(48,\), not \(3,\)"),
    ({"b_down": jnp.ones(WIDTH, jnp.int32)}, "b_down must be floating point, not int32"),
    ({"activation": "relu"}, "activation='relu' must be one of gelu, .*, silu"),
    ({"epsilon": 0}, "epsilon=0 must be a positive float"),
    ({"keep": "none"}, "keep='none' must be one of original, grouped"),
    ({"recipe": "int4"}, "Unknown recipe 'int4'"),
  ],
)
def test_errors_name_the_right_value(change, why):
  x, norm, (w_gate, w_up, w_down) = gated_case()
  arguments = dict(x=x, norm=norm, w_gate=w_gate, w_up=w_up, w_down=w_down, recipe="switchback")
  with pytest.raises(ValueError, match=why):
    gated_mlp(**arguments | change)


@pytest.mark.parametrize("name", LAYERS)
def test_an_unknown_norm_is_refused(name):
  of_linen, nnx_layer = LAYERS[name]
  with pytest.raises(ValueError, match="norm='batch' must be one of layer, rms"):
    of_linen(norm="batch").init(jax.random.key(0), X)
  with pytest.raises(ValueError, match="norm='batch' must be one of layer, rms"):
    nnx_layer(norm="batch", rngs=nnx.Rngs(0))
