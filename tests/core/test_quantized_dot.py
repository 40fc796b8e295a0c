"""The recipes against an independent float64 reference, and their invariants."""

import collections
import functools
import re

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from dot_case import (
  INT8_SUMS,
  Case,
  Result,
  apply,
  assert_close,
  assert_same,
  changed,
  layer,
  make_case,
)

from sbjax import RECIPES, quantize, quantized_dot
from sbjax.recipes import FULL, SWITCHBACK, SWITCHBACK_M

every_recipe = pytest.mark.parametrize("name", RECIPES)
SCALED = [name for name in RECIPES if name != "fp8_static"]
every_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
# ---- Numbers


@every_recipe
@every_dtype
def test_forward_and_gradients_equal_the_reference(name, dtype):
  case = make_case(dtype)
  result = apply(*case, RECIPES[name])
  for actual, expected in zip(result, reference.linear(name, *case), strict=True):
    reference.assert_within(actual, expected)


@pytest.mark.parametrize(
  "name", ["switchback", "switchback_q", "switchback_c", "fp8_switchback", "fp8_dinov3"]
)
@every_dtype
def test_switchback_wgrad_is_full_precision(name, dtype):
  case = make_case(dtype)
  assert_same(apply(*case, RECIPES[name]).dw, apply(*case, FULL).dw)


@pytest.mark.parametrize(
  ("name", "saving"), [("switchback", "switchback_m"), ("switchback_c", "switchback_cm")]
)
def test_saving_8_bits_changes_only_dw(name, saving):
  case = make_case()
  result, expected = apply(*case, RECIPES[saving]), apply(*case, RECIPES[name])
  assert_same((result.y, result.dx), (expected.y, expected.dx))
  assert np.any(result.dw != expected.dw)


@every_recipe
@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("w_dtype", ["float32", "bfloat16"])
def test_y_and_dx_have_the_dtype_of_x_and_dw_that_of_w(name, x_dtype, w_dtype):
  x, w, dy = make_case(x_dtype)
  out = jax.eval_shape(lambda *a: layer(*a, RECIPES[name]), x, w.astype(jnp.dtype(w_dtype)), dy)
  assert out.y.dtype == out.dx.dtype == x_dtype and out.dw.dtype == w_dtype
  assert out.y.shape == dy.shape and out.dx.shape == x.shape and out.dw.shape == w.shape


@every_recipe
def test_dw_is_not_rounded_to_the_compute_dtype(name):
  dw = apply(*make_case("bfloat16"), RECIPES[name]).dw
  assert np.mean(dw != dw.astype(jnp.bfloat16).astype(np.float32)) > 0.9


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "full"])
def test_a_float32_w_is_quantized_from_float32(name):
  x, w, dy = make_case("bfloat16")
  rounded = w.astype(jnp.bfloat16).astype(np.float32)
  assert np.any(apply(x, w, dy, RECIPES[name]).y != apply(x, rounded, dy, RECIPES[name]).y)


@pytest.mark.parametrize("name", SCALED)
def test_scaling_by_powers_of_two_is_exact(name):
  x, w, dy = make_case()
  result = apply(x, w, dy, RECIPES[name])
  scaled = apply(x * np.float32(2**9), w * np.float32(2**-3), dy * np.float32(2**5), RECIPES[name])
  expected = [a * np.float32(2**power) for a, power in zip(result, (6, 2, 14), strict=True)]
  assert_same(scaled, Result(*expected))


@pytest.mark.parametrize("name", ["full", "switchback_c", "switchback_cm"])
def test_powers_of_two_of_outputs_move_through_exactly(name):
  # Columns of w that differ 2**20 times keep their relative precision, and so do those of dy.
  x, w, dy = make_case()
  power = np.exp2(np.random.default_rng(1).integers(-10, 11, w.shape[1])).astype(np.float32)
  result, scaled = (apply(x, *a, RECIPES[name]) for a in ((w, dy), (w * power, dy / power)))
  y, dx, dw = result
  assert_same(scaled, Result(y * power, dx, dw / power))


@every_recipe
@pytest.mark.parametrize("zero", ["x", "w", "dy"])
def test_a_zero_operand_gives_zeros(name, zero):
  case = make_case()
  case = case._replace(**{zero: np.zeros_like(getattr(case, zero))})
  y, dx, dw = apply(*case, RECIPES[name])
  assert np.all(np.isfinite(y)) and np.all(np.isfinite(dx)) and np.all(np.isfinite(dw))
  assert [np.any(y), np.any(dx), np.any(dw)] == [zero == "dy", zero == "x", zero == "w"]


@every_recipe
def test_zero_rows_give_zero_rows(name):
  x, w, dy = make_case()
  x, w, dy = changed(x, 4, 0), changed(changed(w, 9, 0), (slice(None), 6), 0), changed(dy, 5, 0)
  y, dx, dw = apply(x, w, dy, RECIPES[name])
  assert np.all(np.isfinite(y)) and np.all(np.isfinite(dx)) and np.all(np.isfinite(dw))
  assert not np.any(y[4]) and not np.any(y[:, 6]) and not np.any(dx[5]) and not np.any(dx[:, 9])


@every_recipe
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_values_reach_their_whole_row(name, bad):
  x, w, dy = make_case()
  clean = apply(x, w, dy, RECIPES[name])
  everywhere = name in ("fp8_tensorwise", "fp8_amax")
  row = np.arange(len(x)) == 4

  def assert_seen(actual, expected):
    lost = ~np.isfinite(actual) if name == "full" else np.isnan(actual)
    np.testing.assert_array_equal(np.all(lost, axis=1), row | everywhere)
    if not everywhere:
      np.testing.assert_array_equal(actual[~row], expected[~row])

  y, dx, dw = apply(changed(x, (4, 9), bad), w, dy, RECIPES[name])
  assert_seen(y, clean.y)
  assert_same(dx, clean.dx)
  assert not np.any(np.isfinite(dw[9]))

  y, dx, dw = apply(x, w, changed(dy, (4, 9), bad), RECIPES[name])
  assert_same(y, clean.y)
  assert_seen(dx, clean.dx)
  assert not np.any(np.isfinite(dw[:, 9]))


@every_recipe
def test_a_nan_in_w_reaches_y_and_dx(name):
  x, w, dy = make_case()
  y, dx, dw = apply(x, changed(w, (9, 5), np.nan), dy, RECIPES[name])
  assert np.all(np.isnan(y[:, 5])) and np.all(np.isnan(dx[:, 9]))
  assert_same(dw, apply(x, w, dy, RECIPES[name]).dw)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 1e-37, 1e-36, 3e38])
def test_extreme_magnitudes_neither_overflow_nor_become_nan(name, magnitude):
  # Each sum has one term, and each true result is in range.
  eye = np.eye(34, 16, dtype=np.float32)
  large = eye * np.float32(magnitude)
  half = 0.5 * np.eye(16, dtype=np.float32)
  rtol = 2**-3 if name == "fp8_amax" else 1e-5  # Others have the largest magnitude on their grid.
  for x, dy in ((large, eye), (eye, large)):
    expected = Result(0.5 * x, 0.5 * dy, 2 * half * np.float32(magnitude))
    for a, b in zip(apply(x, half, dy, RECIPES[name]), expected, strict=True):
      np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-35)


# ---- Structure


def equations(jaxpr):
  """Every equation of a jaxpr and of its inner jaxprs."""
  for eqn in jaxpr.eqns:
    yield eqn
    for inner in jax.extend.core.jaxprs_in_params(eqn.params):
      yield from equations(inner)


def count(function, *args, of):
  """{kind: number of equations}, where `of` names an equation's kind or returns None."""
  jaxpr = jax.make_jaxpr(function)(*args).jaxpr
  return dict(collections.Counter(filter(None, map(of, equations(jaxpr)))))


def dot_dtypes(eqn):
  """The dtypes of a product's operands and its sum; None for other equations."""
  if eqn.primitive.name == "dot_general":
    names = [v.aval.dtype.name for v in (*eqn.invars, *eqn.outvars)]
    assert eqn.params["preferred_element_type"] == names[2]
    return " ".join(re.sub("float8_e...(fn)?", "fp8", name) for name in names)
  return None


INT8, FP8, BF16 = "int8 int8 int32", "fp8 fp8 float32", "bfloat16 bfloat16 float32"
RESULT = "bfloat16 bfloat16 bfloat16"  # y times 1, which policies of `jax.checkpoint` can save.
PRODUCTS = {
  "full": {"bfloat16 bfloat16 bfloat16": 2, BF16: 1},
  "switchback": {INT8: 2, BF16: 1},
  "switchback_m": {INT8: 2, BF16: 1},
  "switchback_q": {INT8: 2, BF16: 1},
  "switchback_c": {INT8: 2, BF16: 1},
  "switchback_cm": {INT8: 2, BF16: 1},
  "llm_int8": {INT8: 3},
  "fp8_tensorwise": {FP8: 3},
  "fp8_switchback": {FP8: 2, BF16: 1},
  "fp8_dinov3": {FP8: 2, BF16: 1},
  "fp8_amax": {FP8: 3},
  "fp8_static": {FP8: 3},
  "switchback_fp8_wgrad": {INT8: 2, FP8: 1},
  "switchback_e4m3_wgrad": {INT8: 2, FP8: 1},
}


@every_recipe
def test_the_three_products_are_in_the_formats_of_the_recipe(name):
  case = make_case("bfloat16")
  expected = PRODUCTS[name] | ({} if name == "full" else {RESULT: 1})
  assert count(lambda *a: layer(*a, RECIPES[name]), *case, of=dot_dtypes) == expected


@every_recipe
def test_bytes_saved_for_backward_are_those_of_the_recipe(name):
  x, w, _ = make_case("bfloat16")
  (m, k), n = x.shape, w.shape[1]
  saved = jax.eval_shape(
    lambda x, w: jax.vjp(lambda x, w: quantized_dot(x, w, RECIPES[name]), x, w)[1], x, w
  )
  bytes_saved = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(saved))
  int8 = m * k + 4 * m + k * n  # With float32 scales of x.
  quantized = {"switchback_m": int8 + 4, "switchback_cm": int8 + 4 * n}
  assert bytes_saved == quantized.get(name, 2 * m * k + 4 * k * n)


# ---- Transformations and shapes


@pytest.mark.parametrize("lead", [(), (1,), (2, 17), (2, 1, 17)], ids=str)
def test_leading_axes_are_rows(lead):
  x, w, dy = make_case()
  rows = int(np.prod(lead))
  flat = apply(x[:rows], w, dy[:rows], SWITCHBACK_M)
  result = apply(x[:rows].reshape(*lead, -1), w, dy[:rows].reshape(*lead, -1), SWITCHBACK_M)
  assert result.y.shape == (*lead, w.shape[1]) and result.dx.shape == (*lead, w.shape[0])
  assert_same(result.y.reshape(flat.y.shape), flat.y)
  assert_same(result.dx.reshape(flat.dx.shape), flat.dx)
  assert_close(result.dw, flat.dw, 1e-6)


@pytest.mark.parametrize("name", ["full", "switchback_m", "fp8_tensorwise"])
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)], ids=str)
def test_empty_tokens_or_width_give_zeros(name, shape):
  x, w, dy = np.ones(shape), np.ones((shape[-1], 5)), np.ones((*shape[:-1], 5))
  y, dx, dw = apply(*(a.astype(np.float32) for a in (x, w, dy)), RECIPES[name])
  assert y.shape == dy.shape and dx.shape == x.shape and dw.shape == w.shape
  assert not np.any(y) and not np.any(dw)


def test_numpy_arrays_are_accepted():
  x, w, _ = make_case()
  y = quantized_dot(x, w, SWITCHBACK)
  assert isinstance(y, jax.Array)
  assert_same(y, quantized_dot(jnp.asarray(x), jnp.asarray(w), SWITCHBACK))


@pytest.mark.parametrize(
  ("name", "axes"),
  [
    ("switchback", (0, None)),
    ("switchback", (None, 0)),
    ("switchback_m", (0, 0)),
    ("fp8_tensorwise", (0, 0)),
  ],
)
def test_vmap_equals_a_loop(name, axes):
  cases = [make_case(seed=seed) for seed in range(3)]
  x, w, dy = (np.stack(a) for a in zip(*cases, strict=True))
  x, w = x if axes[0] == 0 else x[0], w if axes[1] == 0 else w[0]
  mapped = jax.vmap(lambda x, w, dy: layer(x, w, dy, RECIPES[name]), in_axes=(*axes, 0))
  batched = jax.tree.map(np.asarray, mapped(x, w, dy))
  for i in range(3):
    alone = apply(x[i] if axes[0] == 0 else x, w[i] if axes[1] == 0 else w, dy[i], RECIPES[name])
    result = Result(*(a[i] for a in batched))
    if name in INT8_SUMS:
      assert_same((result.y, result.dx), (alone.y, alone.dx))
    assert_close(result, alone, 1e-6)


def test_vmap_sums_the_gradient_of_a_shared_w():
  x, w, dy = make_case()
  mapped = jax.vmap(lambda x, w: quantized_dot(x, w, SWITCHBACK), in_axes=(0, None))

  @jax.jit
  def run(x, w, dy):
    y, backward = jax.vjp(mapped, x, w)
    return Result(y, *backward(dy))

  result = run(x.reshape(2, 17, -1), w, dy.reshape(2, 17, -1))
  expected = apply(x, w, dy, SWITCHBACK)
  assert_same(np.asarray(result.y).reshape(expected.y.shape), expected.y)
  assert_same(np.asarray(result.dx).reshape(expected.dx.shape), expected.dx)
  assert_close(result.dw, expected.dw, 1e-6)


def two_layers(x, w1, w2, recipe):
  y = quantized_dot(jnp.tanh(quantized_dot(x, w1, recipe)), w2, recipe)
  return jnp.sum(jnp.square(y.astype(jnp.float32)))


def gradients(recipe, policy=None, remat=True):
  function = functools.partial(two_layers, recipe=recipe)
  return jax.grad(jax.checkpoint(function, policy=policy) if remat else function, (0, 1, 2))


SAVE_PRODUCTS = jax.checkpoint_policies.save_only_these_names("sbjax_dot")


def test_remat_changes_no_gradient():
  x, w, _ = make_case()
  expected = jax.jit(gradients(SWITCHBACK_M, remat=False))(x, w, w.T)
  for policy in (None, SAVE_PRODUCTS):
    assert_close(jax.jit(gradients(SWITCHBACK_M, policy))(x, w, w.T), expected, 2e-6)


def test_a_remat_policy_that_saves_products_recomputes_none():
  x, w, _ = make_case("bfloat16")
  plain, saving, recomputing = (
    count(gradients(SWITCHBACK, **kwargs), x, w, w.T, of=dot_dtypes)
    for kwargs in ({"remat": False}, {"policy": SAVE_PRODUCTS}, {})
  )
  assert saving == plain == {INT8: 4, BF16: 2, RESULT: 2}
  assert recomputing[INT8] > 4


def test_a_remat_policy_can_save_the_8_bit_residuals():
  x, w, _ = make_case("bfloat16")
  policy = jax.checkpoint_policies.save_only_these_names("sbjax_dot", "sbjax_residual")

  def rounds(**kwargs):
    def of(eqn):
      return eqn.primitive.name if eqn.primitive.name == "round" else None

    return count(gradients(SWITCHBACK_M, **kwargs), x, w, w.T, of=of)["round"]

  # Each of two layers rounds x, w and dy once: nothing is rounded again.
  assert rounds(policy=policy) == rounds(remat=False) == 6
  assert rounds() > 6


def test_a_scan_over_stacked_weights_equals_a_loop():
  x, w, _ = make_case(n=130)
  w = np.stack([w, w.T, -w])
  dot = functools.partial(quantized_dot, recipe=SWITCHBACK)

  def scanned(x, w):
    return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(dot(x, w)), None), x, w)[0])

  def looped(x, w):
    for i in range(len(w)):
      x = jnp.tanh(dot(x, w[i]))
    return jnp.sum(x)

  actual, expected = (jax.jit(jax.value_and_grad(f, (0, 1)))(x, w) for f in (scanned, looped))
  assert_close(actual, expected, 1e-5)


# ---- Errors


@pytest.mark.parametrize(
  ("x", "w", "recipe", "message"),
  [
    (np.ones((2, 4)), np.ones((4, 3)), "int4", r"'int4'.*full, switchback, switchback_m"),
    (np.ones((2, 4)), np.ones((5, 3)), "full", r"agree in K: \(2, 4\) and \(5, 3\)"),
    (np.ones((2, 4)), np.ones((4, 3, 2)), "full", r"\[K, N\].*\(4, 3, 2\)"),
    (np.ones((2, 4)), np.ones(4), "full", r"\[K, N\].*\(4,\)"),
    (np.ones(()), np.ones((4, 3)), "full", r"x must be .*, not a scalar"),
    (np.ones((2, 4), np.int32), np.ones((4, 3)), "full", r"x must be floating.*int32"),
    (np.ones((2, 4)), np.ones((4, 3), np.int8), "switchback", r"w must be floating.*int8"),
    (np.ones((2, 4), np.complex64), np.ones((4, 3)), "full", r"x must be floating.*complex64"),
  ],
)
def test_errors_name_the_value_and_what_would_be_right(x, w, recipe, message):
  with pytest.raises(ValueError, match=message):
    quantized_dot(x, w, recipe)


def test_a_quantized_operand_is_refused():
  x, w = jnp.ones((2, 4)), jnp.ones((4, 3))
  x_q, w_q = (quantize(a, SWITCHBACK.fwd[0]) for a in (x, w))
  with pytest.raises(ValueError, match=r"x is Quantized.* pass the array, or dequantize\(x\)"):
    quantized_dot(x_q, w, "switchback")
  with pytest.raises(ValueError, match=r"w is Quantized.* pass the array, or dequantize\(w\)"):
    quantized_dot(x, w_q, "switchback")


def float32(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_a_bias_of_another_length_is_refused():
  with pytest.raises(ValueError, match=r"bias must be \(16,\), not \(1,\)"):
    quantized_dot(jnp.ones((2, 32)), jnp.ones((32, 16)), "switchback", bias=jnp.ones(1))


def test_a_contraction_that_could_overflow_is_refused():
  def dot(recipe):
    function = functools.partial(quantized_dot, recipe=recipe)
    return jax.eval_shape(function, float32(1, 131_073), float32(131_073, 1))

  with pytest.raises(ValueError, match=r"131073.*131072"):
    dot("switchback")
  assert dot("full").shape == (1, 1)


def test_switchback_takes_any_number_of_tokens():
  """Only wgrad contracts tokens, and it stays in 16 bits."""
  case = Case(float32(200_000, 4), float32(4, 3), float32(200_000, 3))
  jax.eval_shape(lambda *a: layer(*a, SWITCHBACK), *case)
