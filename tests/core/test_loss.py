import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.loss import LOSSES, siglip, softmax_contrastive

FUNCTIONS = {"softmax": jax.jit(softmax_contrastive), "siglip": jax.jit(siglip)}
BATCH, WIDTH = 16, 12


def features(seed=0, batch=BATCH):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(2, batch, WIDTH)).astype(np.float32)
  x[1] += x[0]  # A text is similar to its image.
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def scalars(name):
  return {"softmax": (jnp.float32(20),), "siglip": (jnp.float32(10), jnp.float32(-4))}[name]


def naive(name, image, text, scale, bias=0.0):
  """The loss pair by pair, in float64."""
  logits = float(scale) * np.float64(image) @ np.float64(text).T + float(bias)
  total = 0.0
  for i in range(len(logits)):
    if name == "softmax":
      for row in (logits[i], logits[:, i]):
        total -= np.log(np.exp(row[i]) / np.exp(row).sum()) / 2
    else:
      for j in range(len(logits)):
        total += np.log1p(np.exp(-logits[i, j] if i == j else logits[i, j]))
  return total / len(logits)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_loss_equals_a_loop_over_pairs(name):
  image, text = features()
  loss, _ = FUNCTIONS[name](image, text, *scalars(name))
  np.testing.assert_allclose(loss, naive(name, image, text, *scalars(name)), rtol=1e-6)


def test_two_pairs_give_the_losses_computed_by_hand():
  one, two = np.eye(2, dtype=np.float32), np.eye(2, dtype=np.float32)[::-1]
  softmax, sigmoid = FUNCTIONS.values()
  loss, metrics = softmax(one, one, jnp.float32(1))
  assert loss == pytest.approx(np.log1p(np.exp(-1)))
  assert metrics["accuracy"] == 1
  loss, metrics = softmax(one, two, jnp.float32(1))
  assert loss == pytest.approx(np.log1p(np.exp(1)))
  assert metrics["accuracy"] == 0
  loss, _ = sigmoid(one, one, jnp.float32(10), jnp.float32(-10))
  assert loss == pytest.approx(np.log(2) + np.log1p(np.exp(-10)))


def test_softmax_of_equal_features_is_the_log_of_the_batch_size():
  x = np.tile(features()[0][:1], (BATCH, 1))
  loss, metrics = softmax_contrastive(x, x, jnp.float32(100))
  np.testing.assert_allclose(loss, np.log(BATCH), rtol=1e-5)
  assert metrics["accuracy"] == 1 / BATCH


@pytest.mark.parametrize("name", FUNCTIONS)
def test_loss_and_gradients_on_eight_devices_equal_those_on_one(name):
  mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "fsdp"))
  rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
  image, text = features()
  arguments = range(2 + len(scalars(name)))
  step = jax.jit(jax.value_and_grad(FUNCTIONS[name], argnums=tuple(arguments), has_aux=True))
  one = step(image, text, *scalars(name))
  eight = step(jax.device_put(image, rows), jax.device_put(text, rows), *scalars(name))
  assert eight[1][0].sharding.is_equivalent_to(rows, 2)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, eight)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_device_holds_all_logits(name):
  batch = 1024
  mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
  x = jax.ShapeDtypeStruct(
    (batch, WIDTH), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data"))
  )
  gradient = jax.jit(jax.grad(FUNCTIONS[name], argnums=(0, 1), has_aux=True))
  compiled = gradient.lower(x, x, *scalars(name)).compile()
  assert f"f32[{batch // 8},{batch}]" in compiled.as_text()
  assert f"f32[{batch},{batch}]" not in compiled.as_text()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_order_of_the_pairs_does_not_matter(name):
  image, text = features()
  order = np.random.default_rng(1).permutation(BATCH)
  a = FUNCTIONS[name](image, text, *scalars(name))
  b = FUNCTIONS[name](image[order], text[order], *scalars(name))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), a, b)


def test_softmax_is_symmetric_in_images_and_texts():
  image, text = features()
  np.testing.assert_allclose(
    softmax_contrastive(image, text, jnp.float32(20))[0],
    softmax_contrastive(text, image, jnp.float32(20))[0],
    rtol=1e-6,
  )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_large_logits_do_not_overflow(name):
  image, text = features()
  rest = scalars(name)[1:]
  gradient = jax.jit(jax.value_and_grad(FUNCTIONS[name], argnums=(0, 1, 2), has_aux=True))
  for sign in (1, -1):
    (loss, _), gradients = gradient(image, sign * text, jnp.float32(1e4), *rest)
    assert all(np.isfinite(np.asarray(x)).all() for x in (loss, *gradients))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sixteen_bit_features_are_compared_in_float32(name):
  image, text = (f.astype(jnp.bfloat16) for f in features())
  loss, _ = FUNCTIONS[name](image, text, *scalars(name))
  assert loss.dtype == jnp.float32
  np.testing.assert_allclose(
    loss, naive(name, np.float64(image), np.float64(text), *scalars(name)), rtol=1e-6
  )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_loss_by_name_takes_what_clip_returns(name):
  image, text = features()
  keys = ("image_features", "text_features", "logit_scale", "logit_bias")
  out = dict(zip(keys, (image, text, *scalars(name)), strict=False))
  loss, metrics = jax.jit(LOSSES[name])(out | {"block_outputs": {}})
  np.testing.assert_allclose(loss, FUNCTIONS[name](image, text, *scalars(name))[0], rtol=1e-6)
  assert set(metrics) == {"accuracy"}
  assert set(LOSSES) == set(FUNCTIONS)
