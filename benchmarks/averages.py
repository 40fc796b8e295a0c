"""Do moments in few bits stay those of float32 over 10,000 steps?

  JAX_PLATFORMS=cpu python -m benchmarks.averages

Trains 8 x 128 numbers with StableAdamW, a rate of 1 and gradients that no parameter changes, for
each kind of gradient, second decay rate and choice of states. `distance` is that of the parameters
from those of float32 states, over how far these moved. `quiet` is the largest movement in the last
tenth of the steps, in learning rates, of the numbers whose gradient is 0 in the second half: the
even columns of "quiet columns" and the even rows of "quiet rows". "bfloat16, nearest" is bfloat16
as it rounds without chance. Adds a line for each kind and rate. Takes 20 minutes on two CPU cores.
"""

import functools

import jax
import jax.numpy as jnp

from benchmarks.timing import append, parser_of, provenance
from sbjax.ops.adam import Coded
from sbjax.optim.stable_adamw import stable_adamw
from sbjax.optim.state_formats import Format, compress_state
from train.optimizer import STATES

SHAPE, STEPS = (8, 128), 10_000

_NEAREST = Format(
  lambda x, axes, *how: Coded(x.astype(jnp.bfloat16), ()),
  lambda coded: coded.values.astype(jnp.float32),
)
CHOICES = {name: STATES[name] for name in ("bfloat16", "coat", "fp8_lm")}
CHOICES = {"bfloat16, nearest": {"mu": _NEAREST, "nu": _NEAREST}} | CHOICES


def main() -> None:
  parser = parser_of(__doc__, "averages")
  parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
  parser.add_argument("--b2", type=float, nargs="+", default=[0.95, 0.98, 0.999])
  args = parser.parse_args()
  for kind in args.kinds:
    for b2 in args.b2:
      rows = measure(kind, b2)
      for name, row in rows.items():
        print(f"{kind:14} b2 {b2:5} {name:18} {row}", flush=True)
      line = {"benchmark": "averages", "gradients": kind, "b2": b2, "steps": STEPS, "states": rows}
      append(args.out, [line | provenance()])


def measure(kind: str, b2: float, choices=tuple(CHOICES)) -> dict[str, dict[str, float]]:
  """Distance from float32 states, and movement without a gradient, of each choice."""
  expected, _ = trained(kind, b2, "float32")
  rows = {}
  for name in choices:
    params, late = trained(kind, b2, name)
    distance = jnp.linalg.norm(params - expected) / jnp.linalg.norm(expected)
    rows[name] = {"distance": float(f"{distance:.3g}")}
    if kind.startswith("quiet"):
      rows[name]["quiet"] = float(f"{jnp.max(jnp.where(_is_even(kind), jnp.abs(late), 0)):.2g}")
  return rows


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def trained(kind: str, b2: float, states: str) -> tuple[jax.Array, jax.Array]:
  """The parameters after all steps, and their movement in the last tenth."""
  optimizer = stable_adamw(1.0, b2=b2, eps=1e-12, weight_decay=0.0)
  if states != "float32":
    optimizer = compress_state(optimizer, min_size=1, **CHOICES[states])
  scales = jnp.exp(jax.random.normal(jax.random.key(1), SHAPE))  # Columns and rows are not alike.

  def step(carry, t):
    params, state = carry
    drawn = KINDS[kind](*jax.random.split(jax.random.fold_in(jax.random.key(0), t)), t)
    updates, state = optimizer.update(scales * drawn, state)
    return (params + updates, state), None

  params = jnp.zeros(SHAPE)
  steps = jnp.arange(STEPS)
  carry, _ = jax.lax.scan(step, (params, optimizer.init(params)), steps[: -STEPS // 10])
  (after, _), _ = jax.lax.scan(step, carry, steps[-STEPS // 10 :])
  return after, after - carry[0]


def _is_even(kind: str) -> jax.Array:
  axis = 0 if kind == "quiet rows" else 1
  return jax.lax.broadcasted_iota(jnp.int32, SHAPE, axis) % 2 == 0


def _normal(key) -> jax.Array:
  return jax.random.normal(key, SHAPE)


def _vanishing(key, other, t) -> jax.Array:
  size = jnp.exp(-jnp.log(1e4) * t.astype(jnp.float32) / STEPS)
  return _normal(key) * jnp.where(_is_even("columns"), size, 1.0)


def _quiet(kind: str, key, other, t) -> jax.Array:
  return jnp.where(_is_even(kind) & (t >= STEPS // 2), 0.0, _normal(key))


KINDS = {  # Functions of two keys and the step.
  "stationary": lambda key, other, t: 0.1 + _normal(key),
  "sparse": lambda key, other, t: jnp.where(
    jax.random.uniform(other, SHAPE) < 0.01, _normal(key), 0.0
  ),
  "vanishing": _vanishing,  # Even columns fall to 1e-4.
  "heavy-tailed": lambda key, other, t: _normal(key) ** 3 * jnp.exp(2 * _normal(other)),
  "quiet columns": functools.partial(_quiet, "quiet columns"),
  "quiet rows": functools.partial(_quiet, "quiet rows"),
}

if __name__ == "__main__":
  main()
