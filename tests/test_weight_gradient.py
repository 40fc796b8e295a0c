"""The study of 8-bit weight gradients: what it captures, and how its candidates round."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax.traverse_util import flatten_dict

from benchmarks import wgrad_candidates
from benchmarks.capture import make_capture
from benchmarks.wgrad_candidates import (
  CANDIDATES,
  STUDIED,
  balance,
  quantize_stochastic,
  weight_gradient,
)
from sbjax import quantized_dot
from sbjax.models.clip import CLIP
from sbjax.models.convert import unstack_blocks
from sbjax.models.sizes import CLIPConfig, TextConfig, VisionConfig
from sbjax.recipes import FULL, SWITCHBACK, int8_row
from train.images import normalize
from train.loss import LOSSES

ROUNDED_TO_NEAREST = [name for name, c in CANDIDATES.items() if not c.stochastic]

# ---- Capture

MICRO = CLIPConfig(
  24,
  VisionConfig(image_size=16, patch_size=4, width=48, layers=3, heads=3),
  TextConfig(context_length=8, vocab_size=64, width=32, layers=2, heads=2, eot_id=63),
)
LAYERS = ["image/block_0/qkv", "image/block_1/fc2", "image/block_2/fc1", "text/block_1/out"]


@functools.cache
def batch():
  rng = np.random.default_rng(0)
  text = rng.integers(2, 62, (4, 8)).astype(np.int32)
  text[:, 5] = 63
  return {"image": rng.integers(0, 256, (4, 16, 16, 3), np.uint8), "text": text}


@functools.cache
def params(scan):
  model, images = CLIP(MICRO, scan=scan), jnp.zeros((4, 16, 16, 3), jnp.float32)
  return jax.jit(model.init)(jax.random.key(0), images, batch()["text"])["params"]


@pytest.mark.parametrize(("scan", "patch_dropout"), [(False, 0.5), (True, 0.0)])
def test_captured_operands_make_the_kernel_s_float32_gradient(scan, patch_dropout):
  key = jax.random.key(3)
  trained = CLIP(MICRO, recipe=SWITCHBACK, scan=scan, patch_dropout=patch_dropout)
  plain = trained.clone(recipe=FULL, dtype=jnp.float32, fused=False)

  def loss(params):
    image, text = normalize(batch()["image"]), batch()["text"]
    out = plain.apply({"params": params}, image, text, train=True, rngs={"dropout": key})
    return LOSSES["softmax"](out)[0]

  gradients = flatten_dict(unstack_blocks(jax.jit(jax.grad(loss))(params(scan))), sep="/")
  capture = jax.jit(make_capture(trained, LOSSES["softmax"], LAYERS))
  operands = capture(params(scan), batch(), key)
  assert sorted(operands) == sorted(LAYERS)
  for layer, (x, dy) in operands.items():
    want = np.asarray(gradients[f"{layer}/kernel"])
    np.testing.assert_allclose(
      np.asarray(x).T @ np.asarray(dy), want, rtol=0, atol=2e-6 * np.max(np.abs(want))
    )
    assert x.dtype == dy.dtype == jnp.float32
    lengths = {"image": 1 + 16 if patch_dropout == 0 else 1 + 8, "text": 8}
    assert len(x) == len(dy) == 4 * lengths[layer.partition("/")[0]]


# ---- Candidates


def make_operands(tokens=300, k=24, n=40):
  """Tokens of different size in dy alone, the last of them silent."""
  rng = np.random.default_rng(0)
  x, dy = (rng.normal(size=(tokens, width)).astype(np.float32) for width in (k, n))
  dy *= 1e-6 * np.exp(2 * rng.normal(size=(tokens, 1))).astype(np.float32)
  dy[-1] = 0
  return x, dy


def expected(x, dy, candidate):
  """Tile by tile, as a kernel would: 8-bit products, their sum, two scales; in float64."""
  formats = [
    (np.dtype(spec.dtype).name, "row" if spec.scaling == "rowwise" else "tensor")
    for spec in (candidate.x, candidate.dy)
  ]
  names = {"int8": "int8", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
  formats = [(names[name], scaling) for name, scaling in formats]
  tile = candidate.tile or len(x)
  parts = [slice(i, i + tile) for i in range(0, len(x), tile)]
  return sum(reference.product(x[part].T, dy[part], formats).value for part in parts)


@pytest.mark.parametrize("name", ROUNDED_TO_NEAREST)
def test_a_candidate_is_the_sum_over_tiles_of_8_bit_products(name):
  x, dy = make_operands()
  got = jax.jit(functools.partial(weight_gradient, candidate=CANDIDATES[name]))(x, dy)
  if CANDIDATES[name].reused:
    x, dy = (np.float32(np.multiply(*reference.rounded(a, "int8", 1))) for a in (x, dy))
  if CANDIDATES[name].balanced:
    x, dy = map(np.asarray, jax.jit(balance)(x, dy))
  want = expected(x, dy, CANDIDATES[name])
  np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.max(np.abs(want)))


@pytest.mark.parametrize("tile", [128, 512])
def test_a_tile_that_int8_can_represent_is_exact(tile):
  tiled, rng = CANDIDATES[f"int8, per feature and {tile} tokens"], np.random.default_rng(0)
  x, dy = (rng.integers(-127, 128, (1024, width)).astype(np.float32) for width in (16, 8))
  x[::tile], dy[::tile] = 127, -127  # Each tile's features have the scale 1, times a power of two.
  steps = np.repeat(2.0 ** rng.integers(-9, 9, 1024 // tile), tile).astype(np.float32)[:, None]
  x, dy = x * steps, dy / steps
  got = jax.jit(functools.partial(weight_gradient, candidate=tiled))(x, dy)
  want = x.astype(np.float64).T @ dy
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.max(np.abs(want)))
  whole = weight_gradient(x, dy, CANDIDATES["int8, per feature"])
  assert np.linalg.norm(whole - want) > 1e-2 * np.linalg.norm(want)


def test_a_stochastic_value_is_one_of_its_two_neighbours_and_right_on_average():
  draws = 4096
  x = np.random.default_rng(0).uniform(-1, 1, (5, 33)).astype(np.float32)
  keys = jax.random.split(jax.random.key(0), draws)
  drawn = jax.jit(jax.vmap(lambda key: quantize_stochastic(x, int8_row, key)))(keys)
  values, scale = map(np.asarray, drawn)
  exact = x / scale[0]
  assert np.all(np.abs(values - exact) < 1 + 1e-4)
  # A draw between two neighbours deviates by at most half a step; six standard errors of the mean.
  mean = np.mean(values, axis=0, dtype=np.float64)
  assert np.max(np.abs(mean - exact)) < 6 * 0.5 / draws**0.5
  assert np.max(np.abs(np.rint(exact) - exact)) > 0.4  # Which rounding to nearest does not do.


@pytest.mark.parametrize("name", [name for name, c in CANDIDATES.items() if c.stochastic])
def test_the_mean_of_stochastic_gradients_comes_closer_with_the_root_of_their_number(name):
  x, dy = make_operands()
  exact = x.astype(np.float64).T @ dy
  draw = jax.jit(jax.vmap(lambda key: weight_gradient(x, dy, CANDIDATES[name], key)))
  dws = np.asarray(draw(jax.random.split(jax.random.key(0), 256)))
  one = np.sqrt(np.mean((dws - exact) ** 2))
  mean = np.sqrt(np.mean((np.mean(dws, axis=0) - exact) ** 2))
  assert 0.8 < one / mean / 16 < 1.25  # Independent errors in 960 places: 4 % at most.


@pytest.mark.parametrize("name", STUDIED)
def test_a_studied_recipe_trains_with_its_candidate(name):
  (x, dy), candidate = make_operands(), STUDIED[name].wgrad

  @jax.jit
  def run(x, dy):
    w = jnp.zeros((x.shape[1], dy.shape[1]))
    return jax.vjp(lambda w: quantized_dot(x, w, STUDIED[name]), w)[1](dy)[0]

  dw, exact = run(x, dy), x.T @ dy
  if candidate.stochastic:  # The same draw for the same dy, and another for another.
    np.testing.assert_array_equal(dw, run(x, dy))
    errors = dw - exact, run(x, dy[::-1]) - x.T @ dy[::-1]
    size, other = map(np.linalg.norm, errors)
    assert 0 < size < 0.1 * np.linalg.norm(exact)
    assert abs(np.vdot(*errors)) < 0.2 * size * other
  else:
    want = jax.jit(functools.partial(weight_gradient, candidate=candidate))(x, dy)
    np.testing.assert_allclose(dw, want, rtol=0, atol=1e-6 * np.max(np.abs(want)))


def test_balanced_tokens_have_one_absmax_and_the_same_product():
  x, dy = make_operands()
  a, b = map(np.asarray, jax.jit(balance)(x, dy))
  np.testing.assert_allclose(np.max(np.abs(a), axis=1), np.max(np.abs(b), axis=1), rtol=1e-6)
  assert not np.any(a[-1]) and not np.any(b[-1])
  want = x.astype(np.float64).T @ dy
  np.testing.assert_allclose(a.astype(np.float64).T @ b, want, atol=1e-6 * np.max(np.abs(want)))


def test_what_is_not_finite_is_not_balanced_away():
  x, dy = make_operands()
  for bad in (np.nan, np.inf):
    dy[5, 3] = bad
    dw = weight_gradient(x, dy, CANDIDATES["balanced int8, per feature"])
    assert not np.any(np.isfinite(dw[:, 3]))


def test_errors_are_of_the_whole_gradient():
  x, dy = make_operands()
  found = jax.jit(wgrad_candidates.errors)(x, dy, jax.random.key(0))
  exact = x.astype(np.float64).T @ dy

  def error(dw):
    return np.linalg.norm(dw - exact) / np.linalg.norm(exact)

  rounded = (a.astype(jnp.bfloat16).astype(np.float64) for a in (x, dy))
  np.testing.assert_allclose(found["bf16"], error(next(rounded).T @ next(rounded)), rtol=1e-3)
  for name in ROUNDED_TO_NEAREST:
    if not CANDIDATES[name].balanced:
      want = error(expected(x, dy, CANDIDATES[name]))
      np.testing.assert_allclose(found[name], want, rtol=1e-3)
