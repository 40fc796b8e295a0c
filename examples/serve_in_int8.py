"""A classifier of Flax's own layers, served in int8 by a process that knows neither Flax nor sbjax.

  python examples/serve_in_int8.py

Freezes the trained weights in 8 bits and exports the model, classifier.jax, with a free batch size;
the server has this file only. Takes half a minute on a CPU.
"""

import pathlib
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from sbjax import quantize_model, quantize_weights

CLASSES, STEPS, BATCH, FILE = 4, 60, 64, pathlib.Path("classifier.jax")
OPTIMIZER = optax.adamw(1e-3)
RULES = [("head", None), ("*", "switchback_q")]
SERVER = """
import sys, jax
model = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
print("served logits", *(model.call(jax.numpy.ones((n, 16, 16, 1))).shape for n in (1, 7)))
assert "flax" not in sys.modules and "sbjax" not in sys.modules
"""


class Classifier(nn.Module):
  @nn.compact
  def __call__(self, images):  # [B, 16, 16, 1]
    x = nn.Conv(64, (4, 4), (4, 4), name="patches")(images)
    x = x.reshape(x.shape[0], 16, 64)
    x = x + nn.MultiHeadDotProductAttention(4, name="attention")(nn.LayerNorm()(x))
    x = x + nn.Dense(64, name="fc2")(nn.gelu(nn.Dense(256, name="fc1")(nn.LayerNorm()(x))))
    return nn.Dense(CLASSES, name="head")(x.mean(axis=1))


def batch(key):
  """Noise with a bright row, one of four, and which one [B]."""
  labels = jax.random.randint(key, (BATCH,), 0, CLASSES)
  images = 4 * jax.nn.one_hot(labels, 16)[:, :, None, None]
  return images + jax.random.normal(key, (BATCH, 16, 16, 1)), labels


def trained():
  def loss_of(params, images, labels):
    logits = Classifier().apply(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

  @jax.jit
  def step(params, state, key):
    loss, gradients = jax.value_and_grad(loss_of)(params, *batch(key))
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss

  params = jax.jit(Classifier().init)(jax.random.key(0), jnp.ones((1, 16, 16, 1)))
  state = OPTIMIZER.init(params)
  for i in range(STEPS):
    params, state, loss = step(params, state, jax.random.fold_in(jax.random.key(2), i))
    if i % 10 == 0:
      print(f"step {i:2}: loss {loss:.3f}")
  return params


def main():
  params, (images, labels) = trained(), batch(jax.random.key(3))
  served = quantize_weights(params, RULES, call=lambda p: Classifier().apply(p, images))
  int8 = jax.jit(lambda images: quantize_model(Classifier(), RULES).apply(served, images))
  print("right in int8:", (int8(images).argmax(1) == labels).mean())
  shape = (*jax.export.symbolic_shape("batch"), 16, 16, 1)
  exported = jax.export.export(int8)(jax.ShapeDtypeStruct(shape, jnp.float32))
  FILE.write_bytes(exported.serialize())
  subprocess.run([sys.executable, "-c", SERVER, FILE], check=True)


if __name__ == "__main__":
  main()
