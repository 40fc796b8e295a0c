"""Norms, GELU and gated units fused with their matmuls equal the unfused layers."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_case import bitwise, drawn, normal, output_and_gradients
from pairwise import mainly

from sbjax import RECIPES, LayerNormDense, LayerNormMLP, quantize, quantized_dot
from sbjax.linear.fused import gated_mlp, layer_norm_dense, layer_norm_mlp
from sbjax.linear.weight import QuantizedWeight, quantize_weight
from sbjax.ops import rows as fused_ops
from sbjax.ops.rows import LayerNormParams, RMSNormParams
from sbjax.recipes import FULL, SWITCHBACK, SWITCHBACK_M

ROWS, WIDTH, HIDDEN = (3, 7), 48, 80


def make(dtype="float32"):
  """x, a gradient for each result, and the parameters of an MLP."""
  norm = LayerNormParams(1 + normal((WIDTH,), seed=1) / 4, normal((WIDTH,), seed=2) / 4)
  w1, w2 = normal((WIDTH, HIDDEN), seed=3) / 7, normal((HIDDEN, WIDTH), seed=4) / 9
  b1, b2 = normal((HIDDEN,), seed=5) / 2, normal((WIDTH,), seed=6) / 2
  x, dx = (normal((*ROWS, WIDTH), dtype, seed) for seed in (7, 8))
  dy = normal((*ROWS, HIDDEN), dtype, 9)  # Callers take as many columns as y has.
  return x * 3 + 1, (dx, dy), (norm, w1, b1, w2, b2)


def plain_norm(x, norm):
  cls = nn.RMSNorm if isinstance(norm, RMSNormParams) else nn.LayerNorm
  layer = cls(epsilon=1e-5, dtype=jnp.float32)
  return layer.apply({"params": norm._asdict()}, x.astype(jnp.float32)).astype(x.dtype)


def plain_mlp(x, norm, w1, b1, w2, b2, recipe):
  dot = functools.partial(quantized_dot, recipe=recipe, backend="xla")
  h = dot(plain_norm(x, norm), w1, bias=b1)
  return x, dot(nn.gelu(h, approximate=False), w2, bias=b2)


def plain_gated(x, norm, kernels, biases, recipe):
  dot = functools.partial(quantized_dot, recipe=recipe, backend="xla")
  (w_gate, w_up, w_down), (b_gate, b_up, b_down) = kernels, biases
  n = plain_norm(x, norm)
  return x, dot(nn.silu(dot(n, w_gate, bias=b_gate)) * dot(n, w_up, bias=b_up), w_down, bias=b_down)


def fused_gated(x, norm, kernels, biases, recipe, **options):
  names = "b_gate", "b_up", "b_down"
  biases = {} if biases is None else dict(zip(names, biases, strict=True))
  return gated_mlp(x, norm, *kernels, recipe, **biases, backend="xla", **options)


def plain_dot(x, norm, w, b, recipe):
  return x, quantized_dot(plain_norm(x, norm), w, recipe, bias=b, backend="xla")


def fused_dot(x, norm, w, b, recipe):
  return layer_norm_dense(x, norm, w, recipe, bias=b, backend="xla")


fused_mlp = functools.partial(layer_norm_mlp, backend="xla")


def results(function, x, gradients, parameters, recipe):
  """(x again, y, dx, gradients of the parameters)."""
  return jax.tree.map(np.asarray, _results(function, recipe, x, gradients, parameters))


@functools.partial(bitwise, static_argnums=(0, 1))
def _results(function, recipe, x, gradients, parameters):
  (same, y), backward = jax.vjp(lambda x, p: function(x, *p, recipe), x, parameters)
  dx, dy = gradients
  dx, d_parameters = backward((dx, dy[..., : y.shape[-1]]))
  return same, y, dx, d_parameters


def assert_near(actual, expected, rtol):
  """Every array's error, in norm, is at most rtol of the array."""
  for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    assert a.shape == b.shape and a.dtype == b.dtype
    a, b = a.astype(np.float64), b.astype(np.float64)
    assert np.linalg.norm(a - b) <= rtol * np.linalg.norm(b)


def of_gated(parameters):
  """An RMS norm, the kernels and the biases of a gated MLP."""
  norm, w1, b1, w2, b2 = parameters
  return RMSNormParams(norm.scale), (w1, w1[::-1] + 0.1, w2), (b1, 0.5 - b1, b2)


PAIRS = {  # (fused, not fused, what they take of the parameters of an MLP)
  "dot": (fused_dot, plain_dot, lambda parameters: parameters[:3]),
  "rms dot": (fused_dot, plain_dot, lambda p: (RMSNormParams(p[0].scale), *p[1:3])),
  "mlp": (fused_mlp, plain_mlp, lambda parameters: parameters),
  "gated": (fused_gated, plain_gated, of_gated),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_full_is_plain_flax(pair):
  fused, plain, pick = PAIRS[pair]
  x, gradients, parameters = make()
  arguments = x, gradients, pick(parameters), FULL
  assert_near(results(fused, *arguments), results(plain, *arguments), 2e-6)


MAIN = ("switchback_cm", "llm_int8")  # They differ most.


@pytest.mark.parametrize("name", mainly(MAIN, [name for name in RECIPES if name != "full"]))
@pytest.mark.parametrize("pair", PAIRS)
def test_every_recipe_fused_equals_unfused_to_rounding(pair, name):
  fused, plain, pick = PAIRS[pair]
  x, gradients, parameters = make()
  arguments = x, gradients, pick(parameters), RECIPES[name]
  # In float32 quantizers see the unfused values, but for last bits that flip a few roundings. Only
  # with 8-bit saved arrays another array is rounded: GELU's input, not its output.
  rtol = 2e-2 if RECIPES[name].saved == "quantized" else 1.2e-2 if "fp8" in name else 4e-3
  assert_near(results(fused, *arguments), results(plain, *arguments), rtol)


@pytest.mark.parametrize("pair", mainly(["mlp", "gated"], PAIRS))
def test_in_bfloat16_fused_layers_err_no_more_than_plain_ones(pair):
  fused, plain, pick = PAIRS[pair]
  x, gradients, parameters = make("bfloat16")
  exact = jax.tree.map(lambda a: a.astype(np.float32), (x, gradients))
  truth = jax.tree.leaves(results(plain, *exact, pick(parameters), FULL))
  for recipe in (FULL, SWITCHBACK):
    both = [
      jax.tree.leaves(results(function, x, gradients, pick(parameters), recipe))
      for function in (fused, plain)
    ]
    for ours, theirs, want in zip(*both, truth, strict=True):
      assert ours.dtype == theirs.dtype
      ours, theirs = (np.linalg.norm(a.astype(np.float32) - want) for a in (ours, theirs))
      assert ours <= 1.15 * theirs + 1e-6 * np.linalg.norm(want)


@pytest.mark.parametrize("name", ["full", "switchback", "switchback_m"])
def test_add_residual_is_a_residual_connection(name):
  x, (_, dy), parameters = make()
  dy = dy[..., :WIDTH]

  def added(x, *parameters):
    return fused_mlp(x, *parameters, name, add_residual=True)

  def apart(x, *parameters):
    return jnp.add(*fused_mlp(x, *parameters, name))

  actual, expected = (
    jax.tree.map(np.asarray, output_and_gradients(function, dy, x, *parameters))
    for function in (added, apart)
  )
  assert_near(actual, expected, 1e-6)


@pytest.mark.parametrize("name", ["full", "switchback"])
def test_a_residual_is_added_to_the_product_and_receives_dy(name):
  x, (_, dy), (_, w, b, _, _) = make()
  residual = normal((*ROWS, HIDDEN), seed=11)

  def run(x, w, b, residual):
    return quantized_dot(x, w, name, bias=b, residual=residual, backend="xla")

  y, *gradients, d_residual = output_and_gradients(run, dy, x, w, b, residual)
  plain, *expected = output_and_gradients(lambda *a: run(*a, None), dy, x, w, b)
  np.testing.assert_array_equal(d_residual, dy)
  actual, expected = (y, *gradients), (plain + residual, *expected)
  assert_near(*jax.tree.map(np.asarray, (actual, expected)), 1e-6)


@pytest.mark.parametrize(
  "name",
  mainly(["switchback_q", "switchback_c", "llm_int8", "fp8_switchback", "fp8_amax"], RECIPES),
)
def test_a_weight_quantized_beforehand_gives_the_same_bits(name):
  x, gradients, (norm, w1, b1, w2, b2) = make()
  recipe = RECIPES[name]
  want = results(fused_mlp, x, gradients, (norm, w1, b1, w2, b2), recipe)

  def with_kernels(x, norm, w1, b1, w2, b2, recipe):
    w1, w2 = (quantize_weight(w, recipe, backend="xla") for w in (w1, w2))
    assert isinstance(w1, QuantizedWeight) == (name != "full")
    return fused_mlp(x, norm, w1, b1, w2, b2, recipe)

  got = results(with_kernels, x, gradients, (norm, w1, b1, w2, b2), recipe)
  jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(
  ("quantized", "biased"),
  mainly([(True, True), (False, False)], [(False, True), (True, True), (False, False)]),
)
@pytest.mark.parametrize("name", mainly(MAIN, RECIPES))
def test_outputs_are_column_slices_of_the_single_output(name, quantized, biased):
  x, (_, dy), (norm, w, b, _, _) = make()
  w = quantize_weight(w, name, backend="xla") if quantized else w
  b = b if biased else None

  def whole(x, norm, w, b):
    return fused_dot(x, norm, w, b, name)[1]

  def parts(x, norm, w, b):
    return jnp.concatenate(
      layer_norm_dense(x, norm, w, name, bias=b, backend="xla", num_outputs=5)[1], axis=-1
    )

  actual, expected = (output_and_gradients(f, dy, x, norm, w, b) for f in (parts, whole))
  for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    if a.dtype != jax.dtypes.float0:  # The 8-bit values of a QuantizedWeight have no gradient.
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_quantized_weight_passes_its_gradient_only_to_the_master():
  x, (_, dy), (_, w, *_) = make()
  kernel = quantize_weight(w, SWITCHBACK, backend="xla")
  run = functools.partial(quantized_dot, recipe=SWITCHBACK, backend="xla")

  @jax.jit
  def gradient(w):
    return jax.vjp(lambda w: run(x, w), w)[1](dy)[0]

  found = gradient(kernel)
  np.testing.assert_array_equal(found.master, gradient(w))
  assert not any(np.any(np.asarray(part.scale)) for part in (found.fwd, found.dgrad))


def test_a_gated_mlp_adds_its_residual_and_takes_weights_quantized_beforehand():
  x, (_, dy), parameters = make()
  norm, kernels, biases = of_gated(parameters)

  def added(x, norm, kernels, biases):
    kernels = [quantize_weight(w, SWITCHBACK, backend="xla") for w in kernels]
    return fused_gated(x, norm, kernels, biases, SWITCHBACK, add_residual=True)

  def apart(x, norm, kernels, biases):
    return jnp.add(*fused_gated(x, norm, kernels, biases, SWITCHBACK))

  actual, expected = (
    jax.tree.map(np.asarray, output_and_gradients(f, dy[..., :WIDTH], x, norm, kernels, biases))
    for f in (added, apart)
  )
  assert_near(actual, expected, 1e-6)


def test_a_gated_mlp_without_biases_has_the_numbers_of_zeros():
  x, _, parameters = make()
  norm, kernels, biases = of_gated(parameters)

  def sum_of(kernels, biases):
    return jnp.sum(fused_gated(x, norm, kernels, biases, "switchback")[1])

  zeros = jax.tree.map(jnp.zeros_like, biases)
  with_zeros, without = (bitwise(jax.value_and_grad(sum_of))(kernels, b) for b in (zeros, None))
  jax.tree.map(np.testing.assert_array_equal, without, with_zeros)


def test_a_gated_mlp_saves_x_and_both_inputs_of_its_unit_for_backward():
  x, _, parameters = make("bfloat16")
  saved = {}
  for name in ("switchback", "switchback_m"):
    run = functools.partial(lambda r, x, p: fused_gated(x, *p, r), RECIPES[name])
    _, backward = jax.eval_shape(functools.partial(jax.vjp, run), x, of_gated(parameters))
    arrays = [a for a in jax.tree.leaves(backward) if a.ndim == 2 and a.shape[0] == 21]
    saved[name] = sorted((a.dtype.name, a.shape[1]) for a in arrays)
  assert saved["switchback"] == [("bfloat16", WIDTH), *2 * [("bfloat16", HIDDEN)]]
  kept = [*2 * [("float32", 1)], *2 * [("int8", HIDDEN)]]
  assert saved["switchback_m"] == [("bfloat16", WIDTH), *kept]


def test_an_mlp_saves_x_and_the_gelu_input_for_backward():
  """GELU's input has 8 bits with switchback_m. Outputs of layer norm and GELU are never saved."""
  x, _, parameters = make("bfloat16")
  saved = {}
  for name in ("switchback", "switchback_m"):
    run = functools.partial(lambda r, x, p: fused_mlp(x, *p, r), RECIPES[name])
    _, backward = jax.eval_shape(functools.partial(jax.vjp, run), x, parameters)
    arrays = [a for a in jax.tree.leaves(backward) if a.ndim == 2 and a.shape[0] == 21]
    saved[name] = sorted((a.dtype.name, a.shape[1]) for a in arrays)
  h, row_scale = HIDDEN, ("float32", 1)
  assert saved["switchback"] == [("bfloat16", WIDTH), ("bfloat16", h)]
  assert saved["switchback_m"] == [("bfloat16", WIDTH), row_scale, ("int8", h)]


def test_the_residual_gradient_is_added_before_rounding():
  x, (dx, _), (norm, *_) = make("bfloat16")
  x, dx, dn = x.reshape(21, WIDTH), dx.reshape(21, WIDTH), normal((21, WIDTH), "bfloat16", 3)
  wide = [jnp.asarray(a, jnp.float32) for a in (x, dn, dx)]
  alone = fused_ops.norm_backward(wide[0], norm, wide[1], None)[0]
  fused = fused_ops.norm_backward(jnp.asarray(x), norm, jnp.asarray(dn), jnp.asarray(dx))[0]
  np.testing.assert_array_equal(fused, (alone + wide[2]).astype(jnp.bfloat16))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_inputs_give_nan_rows(bad):
  x, gradients, parameters = make()
  x[1, 2, 3] = bad
  for function, _, pick in PAIRS.values():
    _, y, dx, _ = results(function, x, gradients, pick(parameters), SWITCHBACK)
    assert np.isnan(y[1, 2]).all() and np.isnan(dx[1, 2]).all()
    assert np.isfinite(np.delete(y.reshape(21, -1), 9, 0)).all()


@pytest.mark.parametrize("layer", [LayerNormDense(HIDDEN), LayerNormMLP(HIDDEN)])
def test_layers_equal_the_functions_with_flax_s_parameters(layer):
  x, _, _ = make()
  shapes = jax.eval_shape(layer.init, jax.random.key(0), x)["params"]
  names = {"norm": {"scale", "bias"}}
  names |= {key: {"kernel", "bias"} for key in ("dense", "fc1", "fc2") if key in shapes}
  assert {key: set(value) for key, value in shapes.items()} == names
  params = drawn(shapes)
  same, y = layer.apply({"params": params}, x)
  np.testing.assert_array_equal(same, x)
  norm = LayerNormParams(**params["norm"])
  if "dense" in params:
    want = layer_norm_dense(
      x, norm, params["dense"]["kernel"], "switchback", bias=params["dense"]["bias"]
    )
  else:
    linears = [params[fc][name] for fc in ("fc1", "fc2") for name in ("kernel", "bias")]
    want = layer_norm_mlp(x, norm, *linears, "switchback")
    added = LayerNormMLP(HIDDEN, add_residual=True).apply({"params": params}, x)
    np.testing.assert_allclose(added, x + y, rtol=1e-5, atol=1e-5)
  np.testing.assert_array_equal(y, want[1])


@pytest.mark.parametrize(
  ("change", "why"),
  [
    ({"x": jnp.ones((2, WIDTH), jnp.int32)}, "x must be floating point, not int32"),
    (
      {"norm": LayerNormParams(jnp.ones(3), jnp.ones(3))},
      r"norm.scale must be \(48,\) for x .*, not \(3,\)",
    ),
    ({"w1": jnp.ones((5, HIDDEN))}, r"x \[..., K\] and w1 \[K, N\] must agree in K"),
    ({"w2": jnp.ones((5, WIDTH))}, r"x \[..., K\] and w2 \[K, N\] must agree in K"),
    ({"recipe": "int4"}, "Unknown recipe 'int4'"),
    ({"b1": jnp.ones(3)}, r"b1 must be \(80,\), not \(3,\)"),
    ({"b2": jnp.ones(WIDTH, jnp.int32)}, "b2 must be floating point, not int32"),
    (
      {"w2": jnp.ones((HIDDEN, 9)), "b2": None, "add_residual": True},
      r"w2 \[H, 48\], not \(80, 9\)",
    ),
    ({"w1": quantize_weight(jnp.ones((WIDTH, HIDDEN)), "switchback_q")}, "w1 was quantized for an"),
    ({"w2": quantize_weight(jnp.ones((HIDDEN, WIDTH)), "switchback"), "recipe": "full"}, "w2 was"),
  ],
)
def test_errors_name_the_right_value(change, why):
  x, _, (norm, w1, b1, w2, b2) = make()
  arguments = dict(x=x, norm=norm, w1=w1, b1=b1, w2=w2, b2=b2, recipe="switchback") | change
  with pytest.raises(ValueError, match=why):
    layer_norm_mlp(**arguments)


@pytest.mark.parametrize("parts", [0, -1, 7])
def test_num_outputs_that_does_not_divide_the_columns_is_refused(parts):
  x, _, (norm, w, b, _, _) = make()
  with pytest.raises(ValueError, match=f"num_outputs={parts} must divide the 80 columns of w"):
    layer_norm_dense(x, norm, w, "switchback", bias=b, num_outputs=parts)


def test_biases_may_be_left_out():
  x, _, (norm, w1, b1, w2, b2) = make()

  def sum_of(w1, b1, b2):
    return jnp.sum(layer_norm_mlp(x, norm, w1, b1, w2, b2, "switchback")[1])

  with_zeros, without = (
    bitwise(jax.value_and_grad(sum_of))(w1, *biases) for biases in ((0 * b1, 0 * b2), (None, None))
  )
  jax.tree.map(np.testing.assert_array_equal, without, with_zeros)


def test_quantize_sum_concatenates_parts_and_returns_a_single_part_unchanged():
  parts, spec = tuple(jnp.asarray(normal((2, 4, 16)))), SWITCHBACK.dgrad[0]
  dy, dy_q, summed = fused_ops.quantize_sum(parts, spec)
  np.testing.assert_array_equal(dy, np.hstack(parts))
  jax.tree.map(np.testing.assert_array_equal, dy_q, quantize(dy, spec))
  np.testing.assert_array_equal(summed, np.hstack([np.sum(part, axis=0) for part in parts]))
  assert fused_ops.quantize_sum(parts[:1], spec)[0] is parts[0]


def test_gelu_quantize_saves_its_input_in_the_saved_spec():
  h, spec = jnp.asarray(normal((4, 16))), SWITCHBACK_M.fwd[0]
  g, saved = fused_ops.gelu_quantize(h, spec, spec)
  jax.tree.map(np.testing.assert_array_equal, saved, quantize(h, spec))
  jax.tree.map(np.testing.assert_array_equal, fused_ops.gelu_quantize(h, spec)[0], g)
  assert fused_ops.gelu_quantize(h, spec)[1] is h
