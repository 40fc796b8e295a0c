"""A linen image classifier in 8 bits: SwitchBackDense instead of nn.Dense, and dot_general=.

  python examples/linen_classifier.py

Recognises the direction of noisy stripes in 16 x 16 images. Needs no data and takes less than half
a minute on a CPU. RECIPE = "full" trains the same parameters in the compute dtype.
"""

import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from sbjax import SwitchBackDense, quantized_dot_general

RECIPE = "switchback"
DTYPE = jnp.float32  # On a GPU: jnp.bfloat16. Parameters stay float32.
CLASSES, STEPS, BATCH = 4, 60, 64


class Classifier(nn.Module):
  width: int = 64

  @nn.compact
  def __call__(self, images):  # [B, 16, 16]
    # A layer with a dot_general argument stays as it is, and its parameters keep their names.
    patches = nn.Dense(
      self.width, dtype=DTYPE, dot_general=quantized_dot_general(RECIPE), name="patches"
    )
    x = patches(images.reshape(-1, 4, 4, 4, 4).swapaxes(2, 3).reshape(-1, 16, 16))
    # Without `name` Flax names a layer by its class: SwitchBackDense_0 instead of Dense_0.
    y = SwitchBackDense(4 * self.width, recipe=RECIPE, dtype=DTYPE, name="fc1")(nn.LayerNorm()(x))
    x = x + SwitchBackDense(self.width, recipe=RECIPE, dtype=DTYPE, name="fc2")(nn.gelu(y))
    # The last layer is small and computes the logits, so it stays in full precision.
    return nn.Dense(CLASSES, name="head")(x.mean(axis=1))


def batch(key):
  """Images [B, 16, 16] of stripes in one of four directions, and the directions [B]."""
  direction, phase, noise = jax.random.split(key, 3)
  labels = jax.random.randint(direction, (BATCH,), 0, CLASSES)
  angle = (labels * (jnp.pi / CLASSES))[:, None, None]
  rows, columns = jnp.mgrid[:16, :16].astype(jnp.float32)
  along = jnp.cos(angle) * columns[None] + jnp.sin(angle) * rows[None]
  shift = jax.random.uniform(phase, (BATCH, 1, 1), maxval=6.0)
  return jnp.sin(along + shift) + jax.random.normal(noise, along.shape), labels


def main():
  model = Classifier()
  optimizer = optax.adamw(1e-3)

  def loss_of(params, images, labels):
    logits = model.apply({"params": params}, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

  @jax.jit
  def step(params, state, key):
    loss, gradients = jax.value_and_grad(loss_of)(params, *batch(key))
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss

  params = model.init(jax.random.key(0), batch(jax.random.key(1))[0])["params"]
  state, losses = optimizer.init(params), []
  for i in range(STEPS):
    params, state, loss = step(params, state, jax.random.fold_in(jax.random.key(2), i))
    losses.append(float(loss))
    if i % 10 == 0 or i == STEPS - 1:
      print(f"step {i:2}: loss {loss:.3f}")
  if sum(losses[-10:]) > 0.5 * sum(losses[:10]):
    sys.exit("The loss did not fall to half.")


if __name__ == "__main__":
  main()
