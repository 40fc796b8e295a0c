"""An nnx transformer block in 8 bits: SwitchBackLinear instead of nnx.Linear.

  python examples/nnx_transformer_block.py

One causal block learns to repeat the first half of a sequence. Needs no data and takes less than
half a minute on a CPU. RECIPE = "full" trains the same parameters in the compute dtype.
"""

import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from sbjax import SwitchBackLinear, quantized_dot_general

RECIPE = "switchback"
DTYPE = jnp.float32  # On a GPU: jnp.bfloat16. Parameters stay float32.
VOCABULARY, HALF, WIDTH, STEPS, BATCH = 16, 8, 64, 60, 64


class Block(nnx.Module):
  """A pre-norm block: x + attention(norm(x)), then x + MLP(norm(x))."""

  def __init__(self, width, heads, *, rngs):
    self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
    # Flax's attention takes a dot_general for its input layers and one for its output layer.
    product = quantized_dot_general(RECIPE)
    options = {"qkv_dot_general": product, "out_dot_general": product, "dtype": DTYPE}
    self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs, **options)
    self.fc1 = SwitchBackLinear(width, 4 * width, recipe=RECIPE, dtype=DTYPE, rngs=rngs)
    self.fc2 = SwitchBackLinear(4 * width, width, recipe=RECIPE, dtype=DTYPE, rngs=rngs)

  def __call__(self, x, mask):
    x = x + self.attention(self.norm1(x), mask=mask)
    return x + self.fc2(nnx.gelu(self.fc1(self.norm2(x))))


class Model(nnx.Module):
  def __init__(self, *, rngs):
    self.tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
    self.positions = nnx.Embed(2 * HALF, WIDTH, rngs=rngs)
    self.block = Block(WIDTH, heads=4, rngs=rngs)
    self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)  # The logits stay in full precision.

  def __call__(self, ids):  # [B, L]
    x = self.tokens(ids) + self.positions(jnp.arange(ids.shape[1]))[None]
    return self.head(self.block(x, nnx.make_causal_mask(ids)))


@nnx.jit
def step(model, optimizer, key):
  ids = jnp.tile(jax.random.randint(key, (BATCH, HALF), 0, VOCABULARY), (1, 2))

  def loss_of(model):
    logits = model(ids[:, :-1])[:, HALF - 1 :]  # Only the second half can be predicted.
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, HALF:]).mean()

  loss, gradients = nnx.value_and_grad(loss_of)(model)
  optimizer.update(model, gradients)
  return loss


def main():
  model = Model(rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
  losses = []
  for i in range(STEPS):
    losses.append(float(step(model, optimizer, jax.random.fold_in(jax.random.key(1), i))))
    if i % 10 == 0 or i == STEPS - 1:
      print(f"step {i:2}: loss {losses[-1]:.3f}")
  if sum(losses[-10:]) > 0.5 * sum(losses[:10]):
    sys.exit("The loss did not fall to half.")


if __name__ == "__main__":
  main()
