"""Operations of unit scaling and their gradients equal graphcore's package unit-scaling 0.3.5.

RECORDED has what that package computed (torch 2.2.2, float64) for inputs and cotangents that are
waves: of the result, then of each gradient, the sum with another wave and the sum of squares.
"""

import doctest
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_case import output_and_gradients

from sbjax.studies import unit_scaling as us


def wave(*shape, phase=0.0):
  n = np.arange(math.prod(shape))
  return (1.4 * np.sin(1.7 * n + phase)).reshape(shape).astype(np.float32)


X = wave(6, 8)
W, B = wave(8, 12, phase=0.3), wave(12, phase=0.7)
NORM = wave(8, phase=0.2), wave(8, phase=0.4)
Q, K, V = (wave(2, 3, 5, 4, phase=p).transpose(0, 2, 1, 3) for p in (0.1, 0.2, 0.3))
LABELS, IDS = jnp.array([0, 3, 7, 2, 2, 5]), jnp.array([[1, 2, 2], [9, 0, 1]])

RECORDED = {
  "linear None": [
    (32.68815, 253.3917),
    (15.97955, 279.5781),
    (7.194386, 130.252),
    (6.942509, 4.214515),
  ],
  "linear gmean": [
    (29.53708, 206.8935),
    (17.68428, 342.4118),
    (7.194386, 130.252),
    (6.942509, 4.214515),
  ],
  "linear hmean": [
    (29.38598, 204.7821),
    (17.59382, 338.9175),
    (7.194386, 130.252),
    (6.942509, 4.214515),
  ],
  "linear amean": [
    (29.68896, 209.0266),
    (17.77522, 345.9422),
    (7.194386, 130.252),
    (6.942509, 4.214515),
  ],
  "linear to_output_scale": [
    (32.68815, 253.3917),
    (19.57088, 419.3671),
    (7.194386, 130.252),
    (6.942509, 4.214515),
  ],
  "linear to_grad_input_scale": [
    (26.68976, 168.9278),
    (15.97955, 279.5781),
    (7.194386, 130.252),
    (6.942509, 4.214515),
  ],
  "linear_readout": [
    (11.55701, 31.67396),
    (15.97955, 279.5781),
    (7.194386, 130.252),
    (6.942509, 4.214515),
  ],
  "linear no bias": [(29.33212, 245.2899), (19.57088, 419.3671), (7.194386, 130.252)],
  "gelu 1 to_output_scale": [(22.43216, 57.89723), (36.44987, 83.45659)],
  "silu 1 to_output_scale": [(22.45403, 47.21245), (36.46436, 65.30448)],
  "softmax 1 to_output_scale": [(16.68053, 54.40292), (22.02917, 17.65102)],
  "gelu 1 None": [(22.43216, 57.89723), (31.27021, 61.42289)],
  "silu 1 None": [(22.45403, 47.21245), (34.71026, 59.17273)],
  "softmax 1 None": [(16.68053, 54.40292), (22.02917, 17.65102)],
  "silu_glu 1": [(15.23494, 36.75974), (23.32542, 57.78816), (29.46448, 72.00922)],
  "attention 1 False": [
    (134.6274, 344.9987),
    (29.92545, 17.86973),
    (9.004862, 21.34047),
    (160.9403, 333.523),
  ],
  "attention 1 True": [
    (83.93598, 284.8564),
    (23.36367, 8.440836),
    (-2.449064, 12.53246),
    (176.0204, 342.5011),
  ],
  "cross_entropy 1 mean": [(2.170644, 3.395024), (-8.558367, 20.46743)],
  "cross_entropy 1 sum": [(13.02386, 122.2209), (-8.558367, 20.46743)],
  "gelu 0.5 to_output_scale": [(23.53097, 48.51146), (38.2066, 64.93323)],
  "silu 0.5 to_output_scale": [(23.54608, 43.72885), (38.22842, 51.26533)],
  "softmax 0.5 to_output_scale": [(11.2001, 51.93903), (17.10818, 8.687179)],
  "gelu 0.5 None": [(23.53097, 48.51146), (34.71644, 53.61181)],
  "silu 0.5 None": [(23.54608, 43.72885), (38.54229, 52.11062)],
  "softmax 0.5 None": [(11.2001, 51.93903), (33.52586, 33.36039)],
  "silu_glu 0.5": [(9.236253, 38.41728), (14.16417, 59.4323), (19.33132, 63.70976)],
  "attention 0.5 False": [
    (127.7775, 344.6146),
    (18.26092, 6.947664),
    (6.986688, 8.430543),
    (150.0946, 335.7873),
  ],
  "attention 0.5 True": [
    (76.57338, 293.0779),
    (13.51565, 2.979155),
    (-0.7063663, 4.438328),
    (176.8859, 362.8527),
  ],
  "cross_entropy 0.5 mean": [(2.191755, 3.461383), (-10.74761, 20.36597)],
  "cross_entropy 0.5 sum": [(13.15053, 124.6098), (-10.74761, 20.36597)],
  "softmax axis 0": [(17.26806, 57.6736), (22.84191, 19.09059)],
  "layer_norm": [
    (1.066669, 85.50596),
    (-1.773539, 22.65629),
    (0.8253538, 36.17943),
    (-0.1019686, 0.008181129),
  ],
  "layer_norm plain": [(25.6239, 47.9995), (19.10079, 11.09617)],
  "rms_norm": [(-0.5436771, 42.73111), (-0.1847421, 41.79646), (1.121981, 36.25163)],
  "rms_norm plain": [(25.71159, 47.99951), (19.16411, 11.10307)],
  "embedding": [(-0.9941988, 21.87869), (5.935333, 40.39381)],
  "add": [(51.1646, 76.36342), (29.24501, 23.54853), (29.24501, 23.54853)],
  "add broadcast None": [(17.64101, 45.9465), (41.35869, 47.09705), (-0.1019686, 0.008181129)],
  "add scalar": [(25.4638, 104.8801), (41.35869, 47.09705), (0.03402186, 0.0008340302)],
  "add number": [(25.45219, 347.318), (41.35869, 47.09705)],
  "mse_loss mean": [(0.8727518, 0.5488418), (-10.16225, 8.010013), (10.16225, 8.010013)],
  "mse_loss sum": [(41.89209, 1264.531), (-10.16225, 8.010013), (10.16225, 8.010013)],
  "residual_apply": [(30.84442, 70.79228), (50.08823, 72.95568)],
  "residual_apply default": [(17.92584, 57.94943), (29.09136, 140.0326)],
}


CONSTRAINTS = (None, "gmean", "hmean", "amean", "to_output_scale", "to_grad_input_scale")


def in_their_axes(function):
  """attention of [B, H, L, D]."""

  def run(*qkv):
    return function(*(a.transpose(0, 2, 1, 3) for a in qkv)).transpose(0, 2, 1, 3)

  return run


def calls():
  """{name: (function, operands)}, with the names of RECORDED."""
  found = {
    f"linear {c}": (functools.partial(us.linear, constraint=c), (X, W, B)) for c in CONSTRAINTS
  }
  found["linear_readout"] = us.linear_readout, (X, W, B)
  found["linear no bias"] = (lambda x, w: us.linear(x.reshape(2, 3, 8), w)), (X, W)
  for mult, text in ((1.0, "1"), (0.5, "0.5")):
    for c in ("to_output_scale", None):
      for function in (us.gelu, us.silu, us.softmax):
        name = f"{function.__name__} {text} {c}"
        found[name] = functools.partial(function, mult=mult, constraint=c), (X,)
    gate = wave(6, 8, phase=0.9)
    found[f"silu_glu {text}"] = functools.partial(us.silu_glu, mult=mult), (X, gate)
    qkv = [np.asarray(a).transpose(0, 2, 1, 3) for a in (Q, K, V)]
    for causal in (False, True):
      attention = functools.partial(us.attention, mult=mult, causal=causal)
      found[f"attention {text} {causal}"] = in_their_axes(attention), qkv
    for reduction in ("mean", "sum"):
      loss = functools.partial(us.cross_entropy, labels=LABELS, mult=mult, reduction=reduction)
      found[f"cross_entropy {text} {reduction}"] = loss, (X,)
  for reduction in ("mean", "sum"):
    loss = functools.partial(us.mse_loss, reduction=reduction)
    found[f"mse_loss {reduction}"] = loss, (X, wave(6, 8, phase=0.9))
  return found | {
    "softmax axis 0": (functools.partial(us.softmax, axis=0), (X,)),
    "layer_norm": (us.layer_norm, (X, *NORM)),
    "layer_norm plain": (us.layer_norm, (X,)),
    "rms_norm": (us.rms_norm, (X, NORM[0])),
    "rms_norm plain": (us.rms_norm, (X,)),
    "embedding": (functools.partial(us.embedding, IDS), (wave(10, 4),)),
    "add": (us.add, (X, wave(6, 8, phase=0.9))),
    "add broadcast None": (functools.partial(us.add, constraint=None), (X, wave(8, phase=0.9))),
    "add scalar": (us.add, (X, wave(1, phase=0.9))),
    "add number": (lambda x: us.add(x, 2.5), (X,)),
    "residual_apply": (functools.partial(us.residual_apply, us.gelu, tau=0.3), (X,)),
    "residual_apply default": (functools.partial(us.residual_apply, lambda r: r * r), (X,)),
  }


CALLS = calls()


def probes(array):
  array = np.asarray(array, np.float64).reshape(-1)
  return array @ wave(array.size, phase=1.0).astype(np.float64), array @ array


@pytest.mark.parametrize("name", RECORDED)
def test_results_and_gradients_equal_the_package_s(name):
  function, operands = CALLS[name]

  @jax.jit
  def run(*operands):
    y, backward = jax.vjp(function, *operands)
    return y, *backward(wave(*y.shape, phase=0.5))

  arrays = run(*map(jnp.asarray, operands))
  for array, (along, square) in zip(arrays, RECORDED[name], strict=True):
    # The first probe may cancel: its error is relative to what its terms can add up to.
    size = math.sqrt(square * array.size)
    np.testing.assert_allclose(probes(array), (along, square), rtol=2e-5, atol=2e-6 * size)


def test_every_recorded_operation_is_called():
  assert set(CALLS) == set(RECORDED)


TAUS = {
  (1.0, 1.0): [0.577350269, 0.5, 0.447213595, 0.40824829, 0.377964473, 0.353553391],
  (0.5, 0.25): [0.0990147543, 0.394131711, 0.0916698497, 0.365148372, 0.0857492926, 0.341743063],
}


@pytest.mark.parametrize(("mult", "ratio"), TAUS)
def test_taus_equal_the_package_s(mult, ratio):
  taus = [us.residual_tau(i, 6, residual_mult=mult, attention_ratio=ratio) for i in range(6)]
  np.testing.assert_allclose(taus, TAUS[mult, ratio], rtol=1e-8)


@pytest.mark.parametrize(
  ("kind", "depth", "factor"),
  [
    ("weight", None, 0.3535533905932738),
    ("weight", 6, 0.14433756729740646),
    ("bias", None, 1),
    ("norm", 6, 0.408248290463863),
    ("output", None, 1),
    ("output", 6, 0.408248290463863),
  ],
)
def test_adam_s_factors_equal_the_package_s(kind, depth, factor):
  assert us.adam_lr_factor(kind, 8, depth=depth) == pytest.approx(factor, rel=1e-12)


def test_the_examples_print_the_shown_output():
  results = doctest.testmod(us)
  assert results.attempted >= 6 and results.failed == 0


# ---- Laws


def std(x):
  return float(jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)))))


@pytest.mark.parametrize("recipe", ["full", "switchback", "fp8_static"])
def test_a_linear_layer_has_unit_variance_in_result_and_gradients(recipe):
  x, w, dy = (
    jax.random.normal(jax.random.key(i), shape)
    for i, shape in enumerate(((512, 256), (256, 1024), (512, 1024)))
  )
  linear = functools.partial(us.linear, recipe=recipe, constraint=None)
  assert [std(a) for a in output_and_gradients(linear, dy, x, w)] == pytest.approx(
    [1, 1, 1], abs=0.03
  )


def test_the_default_constraint_makes_gradients_those_of_a_function():
  """Along a line in x, the result's slope is the gradient's."""
  x, w, direction = X.astype(np.float64), W, wave(6, 8, phase=2.0)

  def f(t):
    return jnp.sum(us.gelu(us.linear(jnp.asarray(x + t * direction, jnp.float32), W)))

  gradient = jax.grad(lambda x: jnp.sum(us.gelu(us.linear(x, w))))(jnp.asarray(X))
  # gelu's own two scales are one as well.
  slope = (f(1e-2) - f(-1e-2)) / 2e-2
  np.testing.assert_allclose(slope, np.sum(gradient * direction), rtol=1e-3)


def test_arrays_without_numbers_are_added():
  assert us.add(jnp.ones((0, 3)), jnp.ones((0, 3))).shape == (0, 3)


@pytest.mark.parametrize("factor", [1 / 3, 2.0**0.5])
def test_scaled_rounds_16_bits_once(factor):
  x = jnp.asarray(wave(1000), jnp.bfloat16)
  y, backward = jax.vjp(lambda x: us.scaled(x, factor, 1 / factor), x)
  wide = np.asarray(x, np.float32)
  np.testing.assert_array_equal(y, jnp.asarray(wide * np.float32(factor), jnp.bfloat16))
  (dx,) = backward(x)
  np.testing.assert_array_equal(dx, jnp.asarray(wide * np.float32(1 / factor), jnp.bfloat16))


@pytest.mark.parametrize("name", ["gelu", "silu", "softmax", "layer_norm", "rms_norm"])
def test_results_have_the_dtype_of_x(name):
  assert getattr(us, name)(jnp.asarray(X, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: us.linear(X, W, constraint="mean"), r"constraint='mean'.*to_output_scale"),
    (lambda: us.add(X, X, constraint="to_grad_input_scale"), r"constraint='to_grad.*gmean"),
    (lambda: us.linear(X, B), r"w \[K, N\].*\(12,\)"),
    (lambda: us.gelu(X, mult=0), r"mult=0 must be a positive"),
    (lambda: us.scaled(jnp.arange(3)), r"x must be floating point, not int32"),
    (lambda: us.cross_entropy(X, LABELS[:2]), r"labels \[\.\.\.\].*\(6, 8\) and \(2,\)"),
    (lambda: us.mse_loss(X, X[:2]), r"one shape, not \(6, 8\) and \(2, 8\)"),
    (lambda: us.mse_loss(X, X, reduction="max"), r"reduction='max'.*'mean' or 'sum'"),
    (lambda: us.residual_tau(4, 4), r"index=4.*layers=4"),
    (lambda: us.adam_lr_factor("kernel", 8), r"kind='kernel'.*'weight'"),
  ],
)
def test_errors_name_the_value_and_what_would_be_right(call, message):
  with pytest.raises(ValueError, match=message):
    call()
