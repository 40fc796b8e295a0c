"""The tiled losses against the plain ones, and against float64."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from train.loss import siglip, softmax_contrastive
from train.parallel import tiled_loss
from train.parallel.tiled_loss import (
  PRODUCTS,
  add_product,
  add_transposed_product,
  beside,
  operand,
  row_products,
  split,
  tile_shape,
  tiled_siglip,
  tiled_softmax,
  unit,
)

PLAIN = {"softmax": softmax_contrastive, "siglip": siglip}
TILED = {"softmax": tiled_softmax, "siglip": tiled_siglip}
AXES = ("data", "fsdp")
BATCH, WIDTH = 232, 48
# Errors relative to float64 at a scale of 100: of the loss, and in norm of features' gradients.
# Plain float32: 5e-8 and 1.4e-6 to 1.8e-6; one product of bfloat16: 2e-4 and 5e-3.
BOUNDS = {None: (1e-6, 4e-6), "float16": (1e-6, 4e-6), "bfloat16": (3e-6, 4e-5)}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
  """Gives each device several tiles of rows and columns, the last one partial."""
  monkeypatch.setattr(tiled_loss, "TILE", 1024)
  monkeypatch.setattr(tiled_loss, "COLUMNS", 100)


def features(batch, seed=0, alike=0.5):
  """Images and texts; `alike` makes a text similar to its image."""
  x = np.random.default_rng(seed).normal(size=(2, batch, WIDTH))
  x[1] += alike * x[0]
  return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


def scalars(name, scale):
  return (jnp.float32(scale), jnp.float32(-scale / 3))[: 1 if name == "softmax" else 2]


@functools.cache
def one_device(name, products):
  function = PLAIN[name] if products == "plain" else with_products(name, products)
  arguments = tuple(range(2 + len(scalars(name, 1))))
  return jax.jit(jax.value_and_grad(function, arguments, has_aux=True))


def with_products(name, products):
  return functools.partial(TILED[name], products=products)


@functools.cache
def eight_devices(name, products):
  """The loss and gradients in a shard_map; as in training the caller sums scalars' gradients."""
  mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), AXES)
  rows, rest = P(AXES), (P(),) * len(scalars(name, 1))
  specs = (rows, rows, *rest)

  def run(*arguments):
    function = functools.partial(with_products(name, products), axes=AXES)
    numbers = tuple(range(len(arguments)))
    result, gradients = jax.value_and_grad(function, numbers, has_aux=True)(*arguments)
    d_image, d_text, *shares = gradients
    return jax.tree.map(lambda x: x[None], result), (d_image, d_text, *jax.lax.psum(shares, AXES))

  run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=(P(AXES), specs), check_vma=False)

  def checked(*arguments):
    result, gradients = jax.jit(run)(*arguments)
    for x in jax.tree.leaves(result):
      np.testing.assert_array_equal(x, np.broadcast_to(x[0], x.shape), "devices differ")
    return jax.tree.map(lambda x: x[0], result), gradients

  return checked


DEVICES = {1: one_device, 8: eight_devices}


def assert_close(got, wanted, rtol):
  """Errors are relative to the largest element of each array."""
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())


# At a scale of 1e4 a logit's last bit is 1e-3, and so is a probability's relative error.
@pytest.mark.parametrize(("scale", "rtol"), [(1, 3e-6), (20, 3e-6), (100, 2e-5), (1e4, 2e-3)])
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("name", TILED)
def test_loss_and_gradients_equal_the_plain_ones(name, devices, scale, rtol):
  arguments = *features(BATCH), *scalars(name, scale)
  tiled, plain = DEVICES[devices](name, None), one_device(name, "plain")
  assert_close(tiled(*arguments), plain(*arguments), rtol)


@pytest.mark.parametrize("batch", [2, 211])
@pytest.mark.parametrize("name", TILED)
def test_any_batch_size_can_be_tiled(name, batch):
  arguments = *features(batch, alike=0), *scalars(name, 20)
  assert_close(one_device(name, None)(*arguments), one_device(name, "plain")(*arguments), 3e-6)


def in_float64(name: str, image, text, scale, bias=0.0):
  """The loss and its gradients in float64, by their formulas."""
  image, text, scale, bias = (np.float64(x) for x in (image, text, scale, bias))
  products, own = image @ text.T, np.eye(len(image))
  logits = scale * products + bias

  def softmax(axis):
    exp = np.exp(logits - logits.max(axis, keepdims=True))
    total = exp.sum(axis, keepdims=True)
    return exp / total, np.log(total) + logits.max(axis, keepdims=True)

  if name == "softmax":
    (p, rows), (q, columns) = softmax(1), softmax(0)
    loss = np.mean((rows[:, 0] + columns[0]) / 2 - np.diag(logits))
    g = (p + q - 2 * own) / 2
  else:
    sign = 2 * own - 1
    loss = np.logaddexp(0, -sign * logits).sum() / len(image)
    g = -sign / (1 + np.exp(sign * logits))
  g /= len(image)
  return loss, (scale * g @ text, scale * g.T @ image, np.sum(g * products), np.sum(g))


@pytest.mark.parametrize("products", BOUNDS)
@pytest.mark.parametrize("name", TILED)
def test_the_error_against_float64_is_bounded(name, products):
  arguments = *features(BATCH), *scalars(name, 100)
  (loss, _), gradients = one_device(name, products)(*arguments)
  expected, expected_gradients = in_float64(name, *arguments)
  assert abs(loss - expected) <= BOUNDS[products][0] * expected
  for got, wanted in zip(gradients, expected_gradients, strict=False):
    assert np.linalg.norm(got - wanted) <= BOUNDS[products][1] * np.linalg.norm(wanted)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("devices", "products"), [(1, None), (8, None), (1, "float16")])
def test_equal_and_opposite_pairs_do_not_overflow_exp(devices, products, sign):
  image = features(BATCH)[0] + np.float32(0.3)  # Every logit is far from zero.
  image /= np.linalg.norm(image, axis=1, keepdims=True)
  for scale in (100, 1e4):
    arguments = image, sign * image, jnp.float32(scale)
    (loss, _), gradients = DEVICES[devices]("softmax", products)(*arguments)
    expected, expected_gradients = in_float64("softmax", *arguments)
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-7 * scale)
    for got, wanted in zip(gradients, expected_gradients[:3], strict=True):
      np.testing.assert_allclose(got, wanted, rtol=1e-2, atol=1e-6 * scale)


@pytest.mark.parametrize("devices", DEVICES)
def test_shifting_by_the_largest_logits_gives_the_same_sums(devices, monkeypatch):
  monkeypatch.setattr(tiled_loss, "_LOWEST", math.inf)  # Otherwise one shift fits at this scale.
  arguments = *features(BATCH), jnp.float32(100)
  tiled, plain = DEVICES[devices].__wrapped__("softmax", None), one_device("softmax", "plain")
  assert_close(tiled(*arguments), plain(*arguments), 2e-5)


@pytest.mark.parametrize(
  ("scale", "sign", "fits"),
  [(1, -1, True), (50, -1, True), (100, 1, True), (100, -1, False), (1e4, 1, True)],
)
def test_a_shift_fits_only_where_all_pairs_are_in_range(scale, sign, fits):
  image, _ = features(8)
  shift, is_in_range = tiled_loss._shift(image, sign * image, jnp.float32(scale), ())
  assert bool(is_in_range) == fits
  assert scale - shift <= tiled_loss._HIGHEST + 1e-6 * scale


@pytest.mark.parametrize(("devices", "products"), [(1, None), (8, None), (1, "float16")])
@pytest.mark.parametrize("name", TILED)
def test_accuracy_breaks_ties_as_argmax_does(name, devices, products):
  # Features have few bits, so that products are exact: texts are images with some signs flipped.
  rng = np.random.default_rng(0)
  image = rng.choice([-0.125, 0.125], size=(BATCH, WIDTH)).astype(np.float32)
  text = image * rng.choice([-1, 1], p=[0.3, 0.7], size=image.shape).astype(np.float32)
  text[100] = text[7] = text[150] = image[7]
  arguments = image, text, *scalars(name, 20)
  expected = np.mean(np.argmax(image @ text.T, axis=1) == np.arange(BATCH))
  (_, metrics), _ = DEVICES[devices](name, products)(*arguments)
  np.testing.assert_allclose(metrics["accuracy"], expected, rtol=1e-6)
  assert 0 < expected < 1


@pytest.mark.parametrize("name", TILED)
def test_a_cotangent_multiplies_all_gradients(name):
  arguments = *features(BATCH), *scalars(name, 20)

  def thrice(*arguments):
    loss, metrics = TILED[name](*arguments)
    return 3 * loss + metrics["accuracy"]

  _, gradients = one_device(name, None)(*arguments)
  got = jax.jit(jax.grad(thrice, tuple(range(len(arguments)))))(*arguments)
  assert_close(got, tuple(3 * g for g in gradients), 1e-6)


@pytest.mark.parametrize("name", TILED)
def test_the_loss_without_gradients_equals_the_loss_with_them(name):
  arguments = *features(BATCH), *scalars(name, 20)
  assert_close(jax.jit(TILED[name])(*arguments), one_device(name, None)(*arguments)[0], 1e-6)


@pytest.mark.parametrize("name", TILED)
def test_sixteen_bit_features_are_compared_in_float32(name):
  image, text = (x.astype(jnp.bfloat16) for x in features(BATCH))
  (loss, _), gradients = one_device(name, None)(image, text, *scalars(name, 20))
  assert loss.dtype == jnp.float32
  assert gradients[0].dtype == gradients[1].dtype == jnp.bfloat16
  (expected, _), _ = one_device(name, "plain")(image, text, *scalars(name, 20))
  np.testing.assert_allclose(loss, expected, rtol=1e-6)


@pytest.mark.parametrize("name", TILED)
def test_a_nan_reaches_the_loss(name):
  image, text = features(BATCH)
  image[50, 3] = np.nan
  assert np.isnan(one_device(name, None)(image, text, *scalars(name, 20))[0][0])


def largest_array(hlo):
  """The elements of the largest array that the compiled program names."""
  shapes = re.findall(r"\b(?:f32|f16|bf16|s32|u32|pred)\[([\d,]+)\]", hlo)
  return max(math.prod(map(int, shape.split(","))) for shape in shapes)


@pytest.mark.parametrize(("devices", "products"), [(1, "float16"), (8, None)])
@pytest.mark.parametrize("name", TILED)
def test_no_array_is_larger_than_a_tile(name, devices, products, monkeypatch):
  batch, width, tile = 4096, 64, 2**18
  monkeypatch.setattr(tiled_loss, "TILE", tile)
  monkeypatch.setattr(tiled_loss, "COLUMNS", 1024)
  mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
  axes = ("data",) if devices > 1 else ()
  run = jax.grad(functools.partial(TILED[name], products=products, axes=axes), (0, 1), has_aux=True)
  rows, rest = P("data"), (P(),) * len(scalars(name, 20))
  run = jax.shard_map(
    run, mesh=mesh, in_specs=(rows, rows, *rest), out_specs=((rows, rows), P()), check_vma=False
  )
  x = jax.ShapeDtypeStruct((batch, width), jnp.float32)
  compiled = jax.jit(run).lower(x, x, *scalars(name, 20)).compile()
  # Split texts have three parts side by side: this may exceed a tile, but never b * B.
  bound = max(tile, 3 * batch * width)
  assert bound < batch * batch // devices
  assert largest_array(compiled.as_text()) <= bound
  # Tiles in float32: logits, parts of their gradient, exp and masks on a CPU. Then the features.
  assert compiled.memory_analysis().temp_size_in_bytes <= 4 * (4 * tile + 12 * batch * width)


@pytest.mark.parametrize(
  "rows, columns",
  [
    (32768, 32768),
    (65536, 65536),
    (8192, 65536),
    (997, 997),
    (49999, 49999),
    (1, 131072),
    (40000, 40000),
    (2048, 16384),
  ],
)
def test_tile_shapes_divide_the_columns_and_have_bounded_size(rows, columns, monkeypatch):
  monkeypatch.undo()
  height, width = tile_shape(rows, columns)
  assert columns % width == 0
  assert height * width <= tiled_loss.TILE
  assert height == rows or height >= 1024
  assert -(-rows // height) * height < rows + 128 * -(-rows // height)  # Few padding rows.


def test_a_tile_of_a_large_batch_is_4096_by_16384(monkeypatch):
  monkeypatch.undo()
  assert tile_shape(32768, 32768) == tile_shape(65536, 65536) == (4096, 16384)


@pytest.mark.parametrize(("products", "bound"), [("float16", 2**-22), ("bfloat16", 2**-16)])
def test_two_parts_sum_to_the_whole_under_jit(products, bound):
  by = PRODUCTS[products]
  x = np.random.default_rng(0).uniform(-1, 1, (64, 48)).astype(np.float32)
  hi, lo = jax.jit(split, static_argnums=1)(x, by)
  assert hi.dtype == lo.dtype == by.dtype
  np.testing.assert_array_equal(np.float32(hi), np.float32((x * by.factor).astype(by.dtype)))
  whole = (np.float64(hi) + np.float64(lo)) / by.factor
  np.testing.assert_allclose(whole, x, rtol=bound, atol=2.0**-37)
  assert np.any(lo != 0)


@pytest.mark.parametrize(("products", "bound"), [("float16", 3e-7), ("bfloat16", 4e-6)])
def test_three_products_sum_to_the_product(products, bound):
  by = PRODUCTS[products]
  x, y = features(97)
  parts = jax.jit(lambda x: split(x, by))

  def rows(x, y):
    return row_products(operand(parts(x), 0), operand(parts(y), 1)) * unit(by)

  np.testing.assert_allclose(jax.jit(rows)(x, y), np.float64(x) @ y.T, rtol=0, atol=bound)
  to, wanted = np.zeros((97, 97), np.float32), np.float64(x) @ y.T
  got = jax.jit(lambda to, x, y: add_product(to, parts(x), beside(parts(y))))(to, x, y.T.copy())
  np.testing.assert_allclose(got * unit(by), wanted, rtol=0, atol=bound)
  got = jax.jit(lambda to, x, y: add_transposed_product(to, parts(x), parts(y)))(
    to, x.T.copy(), y.T.copy()
  )
  np.testing.assert_allclose(got * unit(by), wanted, rtol=0, atol=bound)
