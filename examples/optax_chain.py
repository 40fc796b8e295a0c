"""StableAdamW in an optax chain: a schedule, a decay mask, and the RMS that it clips by.

  python examples/optax_chain.py

Fits a small network. At step 100 the targets grow tenfold and the gradients jump, but the second
moment still describes the earlier gradients. The printed RMS then exceeds 1, and StableAdamW
divides that tensor's learning rate by it. Needs no data and takes a few seconds on a CPU.
"""

import sys

import jax
import jax.numpy as jnp
import optax

from sbjax import stable_adamw
from sbjax.optim.stable_adamw import tensor_rms

STEPS, JUMP, BATCH = 300, 100, 256


def decays(params):
  """The weight decay mask: matrices decay, vectors (biases, norms) do not."""
  return jax.tree.map(lambda p: p.ndim > 1, params)


schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, warmup_steps=20, decay_steps=STEPS)
optimizer = optax.chain(
  optax.zero_nans(),  # Other transforms can come before or after.
  stable_adamw(schedule, b1=0.9, b2=0.99, weight_decay=0.1, mask=decays),
)


def init(key):
  keys = jax.random.split(key, 2)
  return {
    "fc1": {"w": jax.random.normal(keys[0], (8, 64)) / 8**0.5, "b": jnp.zeros(64)},
    "fc2": {"w": jax.random.normal(keys[1], (64, 1)) / 64**0.5, "b": jnp.zeros(1)},
  }


def loss_of(params, x, y):
  hidden = jnp.tanh(x @ params["fc1"]["w"] + params["fc1"]["b"])
  return jnp.mean((hidden @ params["fc2"]["w"] + params["fc2"]["b"] - y) ** 2)


@jax.jit
def step(params, state, key, size):
  x = jax.random.normal(key, (BATCH, 8))
  y = size * jnp.sin(x[:, :1] + x[:, 1:2])
  loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
  updates, state = optimizer.update(gradients, state, params)
  return optax.apply_updates(params, updates), state, loss


def main():
  params = init(jax.random.key(0))
  state, losses = optimizer.init(params), []
  for i in range(STEPS):
    size = 1.0 if i < JUMP else 10.0
    params, state, loss = step(params, state, jax.random.fold_in(jax.random.key(1), i), size)
    losses.append(float(loss))
    if i % 50 == 0 or i in (JUMP - 1, JUMP + 1, STEPS - 1):
      tensor, rms = max(tensor_rms(state).items(), key=lambda item: item[1])
      print(f"step {i:3}: loss {loss:.3f}, largest RMS {rms:.2f} ({tensor})")
  if losses[JUMP - 1] > 0.5 * losses[0] or losses[-1] > 0.8 * losses[JUMP]:
    sys.exit("The loss did not fall.")


if __name__ == "__main__":
  main()
