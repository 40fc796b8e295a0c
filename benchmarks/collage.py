"""How far does AdamW with bfloat16 parameters stray from float64, and what share of it is lost?

  JAX_PLATFORMS=cpu python -m benchmarks.collage

Trains a matrix of weights (deviation 0.05, learning rate 1e-4, weight decay 0.1) on random
gradients with a constant part, in each way to keep parameters and moments. `distance` is from the
same AdamW in float64, over how far that one moved; `second_moment` is the distance of the second
moment, over its norm. `edq` and `lost` (optim/collage.py) are the means over all steps. Adds a line
for each second decay rate. Takes 15 seconds on a CPU.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.timing import append, provenance
from sbjax.optim.collage import CompensatedState, compensated, descent_quality, summed_parameters
from sbjax.optim.state_formats import compress_state
from train.optimizer import STATES

SHAPE, DEVIATION, RATE, DECAY = (128, 256), 0.05, 1e-4, 0.1

CHOICES = {  # The residual, and the formats of the moments.
  "bfloat16, no residual": (None, STATES["bfloat16"]),
  "collage_light": (True, STATES["collage_light"]),
  "collage_plus": (True, STATES["collage_plus"]),
  "exact, float32 moments": ("exact", STATES["float32"]),
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", default="benchmarks/results/collage.jsonl")
  parser.add_argument("--steps", type=int, default=400)
  parser.add_argument("--b2", type=float, nargs="+", default=[0.95, 0.98, 0.999])
  args = parser.parse_args()
  for b2 in args.b2:
    rows = measure(b2, args.steps)
    for name, row in rows.items():
      print(f"b2 {b2:5} {name:24} {row}", flush=True)
    line = {"benchmark": "collage", "b2": b2, "steps": args.steps, "choices": rows}
    append(args.out, [line | provenance()])


def measure(b2: float, steps: int) -> dict[str, dict[str, float]]:
  """Distance, EDQ and the lost share of each choice."""
  gradients = draw(steps)
  expected, second_moment = in_float64(b2, gradients)
  moved = np.linalg.norm(expected - np.float64(start()))
  rows = {}
  for name, (residual, formats) in CHOICES.items():
    inner = optax.adamw(RATE, b2=b2, weight_decay=DECAY)
    optimizer = compensated(compress_state(inner, **formats), residual, measure=True)
    params, state, measured = trained(optimizer, gradients)
    nu = np.float64(state.inner.inner_state[0].nu)  # None of these formats has scales.
    off = np.linalg.norm(nu - second_moment) / np.linalg.norm(second_moment)
    rows[name] = {
      "distance": float(f"{np.linalg.norm(np.float64(params) - expected) / moved:.3g}"),
      "second_moment": float(f"{off:.3g}"),
      **{key: round(float(np.mean(values)), 4) for key, values in measured.items()},
    }
  return rows


def start() -> jax.Array:
  weights = DEVIATION * np.random.default_rng(0).normal(size=SHAPE)
  return jnp.asarray(weights, jnp.float32).astype(jnp.bfloat16)


def draw(steps: int) -> np.ndarray:
  """float32 [steps, *SHAPE]: a gradient that stays, and noise."""
  rng = np.random.default_rng(1)
  return (rng.normal(size=SHAPE) + rng.normal(size=(steps, *SHAPE))).astype(np.float32)


def trained(optimizer, gradients) -> tuple[jax.Array, CompensatedState, dict[str, jax.Array]]:
  """The sums hi + lo and the state after all steps, and what each step measured."""

  def step(carry, gradient):
    params, state = carry
    updates, state = optimizer.update(gradient, state, params)
    return (optax.apply_updates(params, updates), state), descent_quality(state)

  params = start()
  (params, state), measured = jax.lax.scan(step, (params, optimizer.init(params)), gradients)
  return summed_parameters(params, state), state, measured


def in_float64(b2: float, gradients: np.ndarray, b1: float = 0.9, eps: float = 1e-8):
  """The weights and the second moment after AdamW in numpy."""
  p = np.float64(start())
  m = v = np.zeros_like(p)
  for t, g in enumerate(np.float64(gradients), start=1):
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
    p = p - RATE * (m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + DECAY * p)
  return p, v


if __name__ == "__main__":
  main()
