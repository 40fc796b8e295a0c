"""Bad and extreme input at the library's door, drawn at random.

A valid call returns numbers within the rounding's half steps of float64 numpy. A call with one
argument spoiled raises a ValueError or a NotImplementedError with a sentence. `SBJAX_FUZZ=10` draws
ten times as many, from a new seed.
"""

import contextlib
import functools
import math
import os
import pathlib
import traceback
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_case import compiled
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from mesh_case import make_mesh, put

import sbjax
from sbjax import (
  E4M3,
  E5M2,
  INT8,
  RECIPES,
  LayerNormDense,
  LayerNormMLP,
  LayerNormParams,
  Quantized,
  Recipe,
  RecipeRules,
  Spec,
  SwitchBackDense,
  SwitchBackLinear,
  dequantize,
  gather,
  gather_weight,
  layer_norm_dense,
  layer_norm_mlp,
  quantize,
  quantize_weight,
  quantized_dot,
  quantized_dot_general,
  scaled_matmul,
  stable_adamw,
)
from sbjax.backends import get_backend
from sbjax.recipes import parse_recipe

TIMES = int(os.environ.get("SBJAX_FUZZ", "1"))


def fuzz(draws):
  return settings(
    max_examples=draws * TIMES,
    derandomize=TIMES == 1,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[phase for phase in Phase if phase != Phase.explain],
  )


# ---- Arrays, and how far rounding may move them

LEAST, MOST = 2.0**-126, float(np.finfo(np.float32).max)  # Machines flush smaller numbers to 0.


class Content(NamedTuple):
  """Random numbers of a size; one row of another size; one NaN or infinity."""

  seed: int
  size: float
  row_size: float
  poison: float | None

  def array(self, *shape, dtype="float32"):
    rng = np.random.default_rng(self.seed)
    x = rng.uniform(-1, 1, shape)
    with np.errstate(all="ignore"):
      x *= self.size
      if x.size:
        x[rng.integers(len(x))] *= self.row_size
        if self.poison is not None:
          x.flat[rng.integers(x.size)] = self.poison
      x = x if np.dtype(dtype) == np.float64 else np.clip(x, -MOST, MOST)
      return (x if self.poison is None else np.where(np.isnan(x), np.nan, x)).astype(dtype)


usually_1 = st.sampled_from((1.0, 1.0, 1.0, 1.0, 0.0, 1e30, MOST, 1e-30, 1e-40))
contents = st.builds(
  Content,
  st.integers(0, 2**32 - 1),
  usually_1,
  usually_1,
  st.sampled_from((None, None, None, None, np.nan, np.inf)),
)
mild = st.builds(
  Content, st.integers(0, 2**32 - 1), st.sampled_from((0.1, 1.0, 1e6)), st.just(1.0), st.none()
)

LARGEST = {INT8: 127, E4M3: 448, E5M2: 57344}
HALF_UNIT = {E4M3: 2.0**-4, E5M2: 2.0**-3}
HALF_LEAST = {E4M3: 2.0**-10, E5M2: 2.0**-17}
UNIT = {"float64": 2.0**-24, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def half_step(a, spec, axis=1):
  """How far each element of a may move, NaN where a NaN or an infinity shares its scale; scales."""
  if spec is None:
    return np.where(np.abs(a) < LEAST, np.abs(a), 0), 1
  a = a.astype(np.float32).astype(np.float64)
  most, magnitude = LARGEST[spec.dtype], np.abs(a)
  shared = axis if spec.scaling == "rowwise" else None
  absmax = np.max(magnitude, axis=shared, keepdims=True, initial=0)
  scale = np.ones_like(absmax) if spec.scaling == "static" else absmax / most
  if spec.dtype == INT8:
    step = 0.5 * scale + np.zeros_like(a)
  else:
    step = np.maximum(magnitude * HALF_UNIT[spec.dtype], scale * HALF_LEAST[spec.dtype])
  step = np.maximum(step, magnitude - most * scale) + 2.0**-20 * magnitude
  step = np.where(scale < LEAST, absmax, step)
  return np.where(np.isfinite(absmax), step, np.nan), np.where(np.isfinite(absmax), scale, 1)


class Bound(NamedTuple):
  value: np.ndarray
  error: np.ndarray
  overflows: np.ndarray  # Where float32 may not hold an intermediate result.


def product(a, b, pair, dtype, a_error=0):
  """a [m, k] @ b [k, n] in float64, whose operands may be off by `a_error` and their rounding."""
  if pair is None:
    a, b = np.asarray(a).astype(dtype), np.asarray(b).astype(dtype)
  a, b = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
  a_spec, b_spec = pair or (None, None)
  (da, a_scale), (db, b_scale) = half_step(a, a_spec), half_step(b, b_spec, 0)
  if pair and np.any(a_error):  # The scale is that of the perturbed operand.
    da = da + half_step(np.zeros_like(a) + a_error, a_spec)[0]
  da = da + a_error
  size = (np.abs(a) + da) @ (np.abs(b) + db)
  scale = a_scale * b_scale
  error = da @ np.abs(b) + np.abs(a) @ db + da @ db
  error += np.where(scale < LEAST, size, (a.shape[1] + 16) * UNIT["float32"] * size)
  error += (a.shape[1] + 1) * LEAST
  return Bound(a @ b, error, (scale > MOST / 2) | (size > MOST / 2))


def cast(bound, dtype):
  least = 2.0**-24 if dtype == "float16" else LEAST
  size = np.abs(bound.value) + bound.error
  most = float(jnp.finfo(jnp.dtype(dtype)).max) * 0.99
  error = bound.error + UNIT[dtype] * size + least
  return bound._replace(error=error, overflows=bound.overflows | (size > most))


def plus(bound, added):
  if added is None:
    return bound
  added = np.asarray(added).astype(np.float64)
  size = np.abs(bound.value) + np.abs(added)
  error = bound.error + 2 * UNIT["float32"] * size + LEAST
  return Bound(bound.value + added, error, bound.overflows | (size > MOST / 2))


def assert_within(actual, bound):
  actual = np.asarray(actual)
  assert actual.shape == bound.value.shape
  actual = actual.astype(np.float64)
  lost = ~np.isfinite(bound.value) | np.isnan(bound.error)
  close = np.abs(actual - bound.value) <= bound.error
  silent = np.where(lost, np.isfinite(actual), ~close & (np.isfinite(actual) | ~bound.overflows))
  assert not np.any(silent), f"{actual[silent]} for {bound.value[silent]}"


specs = st.builds(
  Spec, st.sampled_from(list(LARGEST)), st.sampled_from(("rowwise", "tensorwise", "static"))
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
    bound = Bound(x.astype(np.float64), error + LEAST, np.abs(x.astype(np.float64)) > 0.99 * MOST)
    assert_within(dequantize(q), bound)


@fuzz(150)
@given(contents, matrices, st.sampled_from(list(RECIPES)), st.booleans())
def test_both_forms_of_a_quantized_weight_are_within_half_a_step(content, matrix, name, gathered):
  w, recipe = content.array(*matrix[:2]), RECIPES[name]
  weight = gather_weight(w, name, None) if gathered else quantize_weight(w, name)
  if name == "full":
    np.testing.assert_array_equal(weight, w)
    return
  with np.errstate(all="ignore"):
    for q, spec, a in ((weight.fwd, recipe.fwd[1], w.T), (weight.dgrad, recipe.dgrad[1], w)):
      a = a.astype(np.float64)
      bound = Bound(a, half_step(a, spec)[0] + LEAST, np.abs(a) > 0.99 * MOST)
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
    np.testing.assert_array_equal(dr, dy)
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
  """Layer norm in float64, and the error of float32."""
  x = x.astype(np.float64)
  centred = x - np.mean(x, axis=-1, keepdims=True)
  inverse = 1 / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + 1e-5)
  error = 1e-6 * (np.max(np.abs(x), axis=-1, keepdims=True) * inverse + 4) * np.abs(norm.scale)
  return centred * inverse * norm.scale + norm.bias, error + 1e-6 * np.abs(norm.bias)


def gelu(bound):
  cdf = 0.5 * (1 + np.vectorize(math.erf, otypes=[float])(bound.value / math.sqrt(2)))
  return bound.value * cdf, 1.13 * bound.error + 1e-6 * np.abs(bound.value)


@functools.partial(compiled, static_argnums=(0, 1))
def layer(kind, recipe, x, norm, w1, b1, w2, b2):
  """The result of the function or the Flax layer of that kind, with these parameters."""
  norms, first = norm._asdict(), {"kernel": w1, "bias": b1}
  if kind == "layer_norm_dense":
    return layer_norm_dense(x, norm, w1, recipe, bias=b1)[1]
  if kind == "layer_norm_mlp":
    return layer_norm_mlp(x, norm, w1, b1, w2, b2, recipe)[1]
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
few_recipes = st.sampled_from(
  [RECIPES[name] for name in ("full", "switchback", "switchback_m", "fp8_tensorwise")]
)
tokens = st.sampled_from(((3, 9), (0, 9), (2, 1, 9)))


@fuzz(150)
@given(st.sampled_from(PLAIN), few_recipes, tokens, contents, contents, contents)
def test_a_linear_layer_is_within_its_bound(kind, recipe, shape, cx, cw, cb):
  x, w, b = cx.array(*shape), cw.array(9, 5), cb.array(5)
  y = layer(kind, recipe, x, NORM, w, b, w, b)
  with np.errstate(all="ignore"):
    assert_within(rows(y), cast(plus(product(rows(x), w, recipe.fwd, "float32"), b), "float32"))


@fuzz(150)
@given(st.sampled_from(WITH_NORM), few_recipes, tokens, mild, mild, mild, st.booleans())
def test_a_layer_with_layer_norm_is_within_its_bound(kind, recipe, shape, cx, cw, cb, has_nan):
  x, w1, b1, w2, b2 = (
    c.array(*of) for c, of in ((cx, shape), (cw, (9, 5)), (cb, (5,)), (cb, (5, 9)), (cw, (9,)))
  )
  norm = LayerNormParams(*cb.array(2, 9))
  if has_nan and x.size:
    x[..., 3] = np.nan
  y = layer(kind, recipe, x, norm, w1, b1, w2, b2)
  with np.errstate(all="ignore"):
    n, error = standardized(rows(x), norm)
    bound = plus(product(n, w1, recipe.fwd, "float64", error), b1)
    if "mlp" in kind.lower():
      g, error = gelu(bound)
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


# ---- One argument spoiled

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
NOT_CHOICES = (3, 1.5, "x", "", [1.0], {}, object(), X, jnp.ones(()), quantize(X, INT8_ROW), KEY)
NOT_SIZES = (-1, 0, 1.5, None, "x", [1], X)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def init(layer, x):
  return layer.init_with_output(KEY, x)[0]


def linear(x=X, recipe="switchback", **options):
  return SwitchBackLinear(4, 5, recipe=recipe, rngs=nnx.Rngs(0), **options)(x)


def general(lhs=X, rhs=W, dimensions=DIMENSIONS, recipe="switchback", backend=None, **options):
  return quantized_dot_general(recipe, backend=backend)(lhs, rhs, dimensions, **options)


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
OPTIONAL = ("bias", "residual", "b1")
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
    assert source == pathlib.Path(sbjax.__file__).parent, f"{raised}: {error}"
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
