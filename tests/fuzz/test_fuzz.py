"""Drawn calls of the public functions return numbers near float64 numpy's.

`SBJAX_FUZZ=10` draws ten times as many, from a new seed.
"""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax_case import compiled
from fuzz_case import (
  LARGEST,
  LEAST,
  MOST,
  UNIT,
  Bound,
  assert_within,
  cast,
  contents,
  fuzz,
  half_step,
  mild,
  plus,
  product,
)
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from mesh_case import make_mesh, put

from sbjax import (
  E4M3,
  E5M2,
  INT8,
  RECIPES,
  LayerNormDense,
  LayerNormMLP,
  Recipe,
  Spec,
  SwitchBackDense,
  SwitchBackLinear,
  dequantize,
  quantize,
  quantized_dot,
  quantized_dot_general,
  stable_adamw,
)
from sbjax.distributed.fsdp import gather_weight
from sbjax.linear.fused import gated_mlp, layer_norm_dense, layer_norm_mlp
from sbjax.linear.layers import GatedMLP
from sbjax.linear.weight import quantize_weight
from sbjax.ops.rows import LayerNormParams, RMSNormParams
from sbjax.quantize import SCALINGS

formats = st.sampled_from(list(LARGEST))
specs = st.one_of(
  st.builds(Spec, formats, st.sampled_from(SCALINGS)),
  st.builds(Spec, formats, st.just("static"), st.sampled_from((-63, 4))),
)
matrices = st.sampled_from(
  ((3, 17, "float32"), (1, 1, "bfloat16"), (0, 3, "float16"), (5, 0, "float32"), (2, 9, "float64"))
)


@contextlib.contextmanager
def precision(dtype):
  """float64 arrays are JAX's only with x64 on."""
  with jax.enable_x64(dtype == "float64"), np.errstate(all="ignore"):
    yield


compiled_quantize = compiled(quantize)


@fuzz(300)
@given(contents, matrices, specs)
def test_dequantized_values_are_within_half_a_step(content, matrix, spec):
  *shape, dtype = matrix
  with precision(dtype):
    x = content.array(*shape, dtype=dtype)
    q = compiled_quantize(x, spec)
    assert q.values.dtype == spec.dtype and q.scale.dtype == jnp.float32
    error, _ = half_step(x.astype(np.float64), spec)
    # A power of two leaves the largest value off the grid: it may be rounded to more than MOST.
    size = np.abs(x.astype(np.float64)) + error
    bound = Bound(x.astype(np.float64), error + LEAST, size > 0.99 * MOST)
    assert_within(dequantize(q), bound)


weights = st.sampled_from(((3, 17), (0, 3)))


@functools.partial(compiled, static_argnums=(0, 1))
def compiled_weight(gathered, name, w):
  return gather_weight(w, name, None) if gathered else quantize_weight(w, name)


@fuzz(150)
@given(contents, weights, st.sampled_from(list(RECIPES)), st.booleans())
def test_both_forms_of_a_quantized_weight_are_within_half_a_step(content, shape, name, gathered):
  w, recipe = content.array(*shape), RECIPES[name]
  weight = compiled_weight(gathered, name, w)
  if name == "full":
    np.testing.assert_array_equal(weight, w)
    return
  with np.errstate(all="ignore"):
    for q, spec, a in ((weight.fwd, recipe.fwd[1], w.T), (weight.dgrad, recipe.dgrad[1], w)):
      a = a.astype(np.float64)
      error = half_step(a, spec)[0] + LEAST
      bound = Bound(a, error, np.abs(a) + error > 0.99 * MOST)
      assert_within(dequantize(q), bound)


# ---- Layers

_E4M3, _STATIC = Spec(E4M3, "rowwise"), Spec(INT8, "static")
RECIPE_VALUES = (
  *RECIPES.values(),
  Recipe((_E4M3, Spec(E5M2, "static")), None, (_E4M3, _E4M3)),
  Recipe((_STATIC, _STATIC), (_STATIC, _STATIC), None, "quantized"),
  Recipe(None, (Spec(E5M2, "rowwise"), _E4M3), (_STATIC, _STATIC)),
)
recipes = st.sampled_from(RECIPE_VALUES)
# (shape of x, N, x's dtype, w's dtype): each is compiled once for a recipe.
LAYERS = (
  ((3, 17), 5, "float32", "float32"),
  ((2, 3, 1), 1, "bfloat16", "float32"),
  ((0, 3), 4, "float32", "bfloat16"),
  ((5, 0), 3, "float16", "float32"),
  ((16,), 16, "float16", "float16"),
  ((2, 9), 3, "float64", "float64"),
)
layers = st.sampled_from(LAYERS)


@functools.partial(compiled, static_argnums=0)
def dot_and_gradients(recipe, x, w, bias, residual, dy):
  y, backward = jax.vjp(
    lambda *a: quantized_dot(*a[:2], recipe, bias=a[2], residual=a[3]), x, w, bias, residual
  )
  return y, *backward(dy)


def rows(x):
  return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


@fuzz(350)
@given(recipes, layers, contents, contents, contents, contents)
def test_quantized_dot_and_its_gradients_are_within_their_bounds(recipe, layer, cx, cw, cb, cy):
  shape, n, dtype, w_dtype = layer
  with precision(dtype):
    x, w = cx.array(*shape, dtype=dtype), cw.array(shape[-1], n, dtype=w_dtype)
    bias, residual = cb.array(n), cb.array(*shape[:-1], n, dtype=dtype)
    dy = cy.array(*shape[:-1], n, dtype=dtype)
    y, dx, dw, db, dr = dot_and_gradients(recipe, x, w, bias, residual, dy)
    assert (y.dtype, dx.dtype, dw.dtype, db.dtype) == (dtype, dtype, w_dtype, "float32")
    # NaN is NaN. XLA on a CPU may flush what float32 has below its least normal number.
    np.testing.assert_allclose(dr, dy, rtol=2**-23, atol=np.finfo(np.float32).tiny)
    x, dy = rows(x), rows(dy)
    bound = product(x, w, recipe.fwd, dtype)
    if recipe.fwd is None:  # Each addition is rounded.
      bound = cast(plus(cast(bound, dtype), bias.astype(dtype)), dtype)
    else:
      bound = plus(bound, bias)
    assert_within(rows(y), cast(plus(bound, rows(residual)), dtype))
    assert_within(rows(dx), cast(product(dy, w.T, recipe.dgrad, dtype), dtype))
    kept, lost = x, 0
    if recipe.saved == "quantized":
      step, _ = half_step(x.astype(np.float64), recipe.fwd[0])
      lost = (step + UNIT[dtype] * (np.abs(x) + step)).T
    wgrad = product(kept.T, dy, recipe.wgrad, dtype, lost)
    assert_within(dw, cast(wgrad, w_dtype))
    total = product(np.ones((1, len(dy))), dy, None, "float32")
    assert_within(db[None], cast(total, "float32"))


# (shape of lhs, of rhs, dimension_numbers, lhs's axes as batch, m and k, rhs's as batch, k and n)
CONTRACTIONS = (
  ((3, 17), (17, 5), (((1,), (0,)), ((), ())), (0, 1), (0, 1)),
  ((9, 2), (3, 9), (((0,), (1,)), ((), ())), (1, 0), (1, 0)),
  ((2, 3, 4), (4, 2, 5), (((0, 2), (1, 0)), ((), ())), (1, 0, 2), (1, 0, 2)),
  ((3, 2, 4), (2, 4, 5), (((2,), (1,)), ((1,), (0,))), (1, 0, 2), (0, 1, 2)),
  ((0, 3), (3, 4), (((1,), (0,)), ((), ())), (0, 1), (0, 1)),
)


@functools.partial(compiled, static_argnums=(0, 3))
def contract(dot_general, lhs, rhs, dimensions):
  return dot_general(lhs, rhs, dimensions)


@fuzz(150)
@given(st.sampled_from(list(RECIPES)), st.sampled_from(CONTRACTIONS), contents, contents)
def test_quantized_dot_general_is_within_its_bound(name, contraction, c_lhs, c_rhs):
  lhs_shape, rhs_shape, dimensions, lhs_axes, rhs_axes = contraction
  lhs, rhs = c_lhs.array(*lhs_shape), c_rhs.array(*rhs_shape)
  y = contract(quantized_dot_general(name), lhs, rhs, dimensions)
  (lhs_k, _), (batch, _) = dimensions
  parts, k = (2 if batch else 1), math.prod(lhs_shape[axis] for axis in lhs_k)
  lhs = lhs.transpose(lhs_axes).reshape(parts, lhs.size // (parts * k), k)
  rhs = rhs.transpose(rhs_axes).reshape(parts, k, rhs.size // (parts * k))
  with np.errstate(all="ignore"):
    for part, a, b in zip(y if batch else y[None], lhs, rhs, strict=True):  # Each has its scales.
      assert_within(part, cast(product(a, b, RECIPES[name].fwd, "float32"), "float32"))


def standardized(x, norm):
  """The norm in float64, and the error of float32."""
  x, is_rms = x.astype(np.float64), isinstance(norm, RMSNormParams)
  bias = 0 if is_rms else norm.bias
  centred = x if is_rms else x - np.mean(x, axis=-1, keepdims=True)
  inverse = 1 / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + 1e-5)
  error = 1e-6 * (np.max(np.abs(x), axis=-1, keepdims=True) * inverse + 4) * np.abs(norm.scale)
  return centred * inverse * norm.scale + bias, error + 1e-6 * np.abs(bias)


def gelu(bound):
  cdf = 0.5 * (1 + np.vectorize(math.erf, otypes=[float])(bound.value / math.sqrt(2)))
  return bound.value * cdf, 1.13 * bound.error + 1e-6 * np.abs(bound.value)


def swiglu(gate, up):
  active = gate.value / (1 + np.exp(-gate.value))
  error = 1.1 * gate.error + 1e-6 * np.abs(gate.value)
  lost = error * (np.abs(up.value) + up.error) + np.abs(active) * up.error
  return active * up.value, lost + 1e-6 * np.abs(active * up.value)


@functools.partial(compiled, static_argnums=(0, 1))
def layer(kind, recipe, x, norm, w1, b1, w2, b2):
  """The result of the function or the Flax layer of that kind, with these parameters."""
  norms, first = norm._asdict(), {"kernel": w1, "bias": b1}
  if kind == "layer_norm_dense":
    return layer_norm_dense(x, norm, w1, recipe, bias=b1)[1]
  if kind == "layer_norm_mlp":
    return layer_norm_mlp(x, norm, w1, b1, w2, b2, recipe)[1]
  if kind == "gated_mlp":
    biases = {"b_gate": b1, "b_up": b1[::-1], "b_down": b2}
    return gated_mlp(x, norm, w1, w1[:, ::-1], w2, recipe, **biases)[1]
  if kind == "GatedMLP":
    up, down = {"kernel": w1[:, ::-1], "bias": b1[::-1]}, {"kernel": w2, "bias": b2}
    params = {"norm": norms, "gate": first, "up": up, "down": down}
    return GatedMLP(len(b1), use_bias=True, recipe=recipe).apply({"params": params}, x)[1]
  if kind == "LayerNormDense":
    params = {"norm": norms, "dense": first}
    return LayerNormDense(len(b1), recipe=recipe).apply({"params": params}, x)[1]
  if kind == "LayerNormMLP":
    params = {"norm": norms, "fc1": first, "fc2": {"kernel": w2, "bias": b2}}
    return LayerNormMLP(len(b1), recipe=recipe).apply({"params": params}, x)[1]
  if kind == "SwitchBackDense":
    return SwitchBackDense(len(b1), recipe=recipe).apply({"params": first}, x)
  if kind == "quantize_weight":
    return quantized_dot(x, quantize_weight(w1, recipe), recipe, bias=b1)
  linear = SwitchBackLinear(*w1.shape, recipe=recipe, rngs=nnx.Rngs(0))
  linear.kernel, linear.bias = nnx.Param(w1), nnx.Param(b1)
  return linear(x)


PLAIN = ("SwitchBackDense", "SwitchBackLinear", "quantize_weight")
WITH_NORM = ("layer_norm_dense", "LayerNormDense", "layer_norm_mlp", "LayerNormMLP")
GATED = ("gated_mlp", "GatedMLP")
few_recipes = st.sampled_from(
  [RECIPES[name] for name in ("full", "switchback", "switchback_m", "fp8_tensorwise")]
)
tokens = st.sampled_from(((3, 9), (0, 9), (2, 1, 9)))


@fuzz(150)
@given(st.sampled_from(PLAIN), few_recipes, tokens, contents, contents, contents)
def test_a_linear_layer_is_within_its_bound(kind, recipe, shape, cx, cw, cb):
  x, w, b = cx.array(*shape), cw.array(9, 5), cb.array(5)
  norm = LayerNormParams(np.ones(9), np.zeros(9))
  y = layer(kind, recipe, x, norm, w, b, w, b)
  with np.errstate(all="ignore"):
    assert_within(rows(y), cast(plus(product(rows(x), w, recipe.fwd, "float32"), b), "float32"))


@fuzz(150)
@given(st.sampled_from(WITH_NORM + GATED), few_recipes, tokens, mild, mild, mild, st.booleans())
def test_a_layer_with_a_norm_is_within_its_bound(kind, recipe, shape, cx, cw, cb, has_nan):
  x, w1, b1, w2, b2 = (
    c.array(*of) for c, of in ((cx, shape), (cw, (9, 5)), (cb, (5,)), (cb, (5, 9)), (cw, (9,)))
  )
  norm = LayerNormParams(*cb.array(2, 9))
  norm = RMSNormParams(norm.scale) if kind in GATED else norm
  if has_nan and x.size:
    x[..., 3] = np.nan
  y = layer(kind, recipe, x, norm, w1, b1, w2, b2)
  with np.errstate(all="ignore"):
    n, error = standardized(rows(x), norm)
    bound = plus(product(n, w1, recipe.fwd, "float64", error), b1)
    if "mlp" in kind.lower():
      up = plus(product(n, w1[:, ::-1], recipe.fwd, "float64", error), b1[::-1])
      g, error = swiglu(bound, up) if kind in GATED else gelu(bound)
      bound = plus(product(g, w2, recipe.fwd, "float64", error), b2)
    assert_within(rows(y), cast(bound, "float32"))


# ---- On a mesh of 2 x 4 devices


@functools.cache
def on_mesh(mode, recipe):
  """`quantized_dot` of x [4, 8] and w [8, 5], as one function of whole arrays."""

  def gathered(x, w):
    return quantized_dot(x, gather_weight(w, recipe, "fsdp", dtype=jnp.float32), recipe)

  dot = functools.partial(quantized_dot, recipe=recipe)
  mesh = make_mesh(AxisType.Explicit if mode == "explicit" else AxisType.Auto)
  if mode == "shard_map":
    specs = P("data"), P("fsdp")
    dot = jax.shard_map(gathered, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=False)
    run, specs = compiled(dot), [P("data"), P("fsdp")]
  else:
    run, specs = compiled(dot), [P("data"), P(None, None)]

  def call(x, w):
    with jax.set_mesh(mesh) if mode == "explicit" else contextlib.nullcontext():
      return np.asarray(run(*put(mesh, specs, x, w)))

  return call


@fuzz(100)
@given(
  st.sampled_from(("auto", "explicit", "shard_map")),
  st.sampled_from(("full", "switchback", "switchback_q", "fp8_switchback")),
  contents,
  contents,
)
def test_quantized_dot_on_a_mesh_is_within_its_bound(mode, name, cx, cw):
  x, w = cx.array(4, 8), cw.array(8, 5)
  with np.errstate(all="ignore"):
    bound = cast(product(x, w, RECIPES[name].fwd, "float32"), "float32")
    assert_within(on_mesh(mode, name)(x, w), bound)


# ---- The optimizer


def adamw(g, p, rate, **options):
  optimizer = stable_adamw(rate, **options)
  return optimizer.update({"w": g}, optimizer.init({"w": p}), {"w": p})


@fuzz(100)
@given(contents, contents, st.sampled_from((1e-30, 0.1, 1.0)), st.floats(0, 0.999))
def test_the_first_update_of_stable_adamw_is_within_its_bound(cg, cp, rate, b1):
  """Debiased moments are the gradient and its square, so the update is -rate * (sign + decay)."""
  g, p = cg.array(3, 4), cp.array(3, 4)
  update = np.asarray(adamw(g, p, rate, b1=b1, weight_decay=0.1)[0]["w"]).astype(np.float64)
  with np.errstate(all="ignore"):
    g, p = g.astype(np.float64), p.astype(np.float64)
    whole = np.all(np.abs(g) < 1e18) and np.all(np.isfinite(g))
    sizes = np.abs(g)
    value = -rate * (g / (sizes + 1e-6) + 0.1 * p)
    slack = np.where(sizes < 1e-15, sizes / 1e-6, 0)  # Squares that vanish.
    error = rate * (1e-3 * (1 + 0.1 * np.abs(p)) + slack) + LEAST
    close = np.abs(update - value) <= error
  assert np.all(close | ~np.isfinite(value)) if whole else True
  assert np.all(np.isfinite(update[np.isfinite(value)])) if whole else True
