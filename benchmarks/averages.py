"""Do moments in few bits stay those of float32 over 10,000 steps?

  JAX_PLATFORMS=cpu python -m benchmarks.averages

Trains 8 x 128 numbers with StableAdamW, a rate of 1 and gradients that no parameter changes, for
each kind of gradient, second decay rate and choice of states. `distance` is that of the parameters
from those of float32 states, over how far these moved. `quiet` is the largest movement in the last
tenth of the steps, in learning rates, of the numbers whose gradient is 0 in the second half: the
even columns of "quiet columns" and the even rows of "quiet rows". "bfloat16, nearest" is bfloat16
as it rounds without chance. Adds a line for each kind and rate. Takes 20 minutes on two CPU cores.

  JAX_PLATFORMS=cpu python -m benchmarks.averages --moments

looks at the averages themselves, of 64 x 128 numbers in the last tenth of the steps. `bias` is by
how much the mean of an average is off, over that of float32: over time, numbers and chances. It has
a standard error. `error` is the root mean square of what is off at a time, over that of float32.
"""

import functools

import jax
import jax.numpy as jnp

from benchmarks.timing import append, parser_of, provenance
from sbjax.ops.adam import Coded
from sbjax.ops.dither import hashed, positions
from sbjax.optim.stable_adamw import stable_adamw
from sbjax.optim.state_formats import FORMATS, Format, compress_state
from train.optimizer import STATES

SHAPE, STEPS = (8, 128), 10_000

_NEAREST = Format(
  lambda x, axes, *how: Coded(x.astype(jnp.bfloat16), ()),
  lambda coded: coded.values.astype(jnp.float32),
)
CHOICES = {name: STATES[name] for name in ("bfloat16", "coat", "fp8_lm")}
CHOICES = {"bfloat16, nearest": {"mu": _NEAREST, "nu": _NEAREST}} | CHOICES
# The formats of each moment in these choices, and b1.
MOMENTS = {
  "mu": ("BFLOAT16", "E4M3_EXPANDED", "E4M3_SCALED"),
  "nu": ("BFLOAT16", "E4M3_EXPANDED", "FLOAT16_SCALED"),
}
B1 = 0.9


def main() -> None:
  parser = parser_of(__doc__, "averages")
  parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
  parser.add_argument("--b2", type=float, nargs="+", default=[0.95, 0.98, 0.999])
  parser.add_argument("--moments", action="store_true", help="the averages, not the parameters")
  args = parser.parse_args()
  if args.moments:
    return _moments(args)
  for kind in args.kinds:
    for b2 in args.b2:
      rows = measure(kind, b2)
      for name, row in rows.items():
        print(f"{kind:14} b2 {b2:5} {name:18} {row}", flush=True)
      line = {"benchmark": "averages", "gradients": kind, "b2": b2, "steps": STEPS, "states": rows}
      append(args.out, [line | provenance()])


def _moments(args) -> None:
  for kind in args.kinds:
    for moment, b in (("mu", B1), *(("nu", b2) for b2 in args.b2)):
      rows = moments(kind, moment, b)
      for name, row in rows.items():
        print(f"{kind:14} {moment} b {b:5} {name:18} {row}", flush=True)
      line = {"benchmark": "averages", "gradients": kind, "moment": moment, "b": b, "steps": STEPS}
      append(args.out, [line | {"formats": rows} | provenance()])


def moments(kind: str, moment: str, b: float, rows: int = 64) -> dict[str, dict[str, float]]:
  """Bias and error of a moment, "mu" or "nu", in each format."""
  found = {}
  for name, (coded, plain, square, size) in averaged(kind, moment, b, rows).items():
    of_rows = (coded / plain)[plain > 0]  # Samples.
    numbers = {
      "bias": coded.sum() / plain.sum() - 1,
      "standard_error": of_rows.std() / len(of_rows) ** 0.5,
      "error": (square.sum() / size.sum()) ** 0.5,
    }
    found[name] = {key: float(f"{value:.2g}") for key, value in numbers.items()}
  return found


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def averaged(kind: str, moment: str, b: float, rows: int) -> dict[str, list[jax.Array]]:
  """For each format sums of each row over the numbers whose gradient changes, and the last steps.

  Of what is stored, with the sign of float32's; of float32's; of the squares of their difference;
  and of float32's squares.
  """
  shape = (rows, SHAPE[1])
  formats = {"nearest": _NEAREST} | {name: FORMATS[name] for name in MOMENTS[moment]}
  scales = jnp.exp(jax.random.normal(jax.random.key(1), shape))
  # What no gradient moves has no mean that is worth a comparison.
  chosen = ~_is_even(kind, shape) if kind.startswith("quiet") else _is_even(kind, shape)

  def step(carry, t):
    plain, stored, sums = carry
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), t))
    g = scales * KINDS[kind](*keys, t, shape)
    new = (1 - b) * (g if moment == "mu" else g * g)
    plain, chance = b * plain + new, hashed(positions(t, shape))
    counts = chosen & (t >= STEPS - STEPS // 10)
    for name, form in formats.items():
      x = b * form.decode(stored[name]) + new
      stored = stored | {name: form.encode(x, 0, None, chance)}
      x = form.decode(stored[name])
      found = jnp.sign(plain) * x, jnp.abs(plain), (x - plain) ** 2, plain**2
      added = [s + jnp.where(counts, y, 0).sum(1) for s, y in zip(sums[name], found, strict=True)]
      sums = sums | {name: added}
    return (plain, stored, sums), None

  zeros = jnp.zeros(shape)
  stored = {name: form.encode(zeros, 0) for name, form in formats.items()}
  sums = {name: [jnp.zeros(shape[:1])] * 4 for name in formats}
  return jax.lax.scan(step, (zeros, stored, sums), jnp.arange(STEPS))[0][2]


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
    drawn = KINDS[kind](*jax.random.split(jax.random.fold_in(jax.random.key(0), t)), t, SHAPE)
    updates, state = optimizer.update(scales * drawn, state)
    return (params + updates, state), None

  params = jnp.zeros(SHAPE)
  steps = jnp.arange(STEPS)
  carry, _ = jax.lax.scan(step, (params, optimizer.init(params)), steps[: -STEPS // 10])
  (after, _), _ = jax.lax.scan(step, carry, steps[-STEPS // 10 :])
  return after, after - carry[0]


def _is_even(kind: str, shape=SHAPE) -> jax.Array:
  axis = 0 if kind == "quiet rows" else 1
  return jax.lax.broadcasted_iota(jnp.int32, shape, axis) % 2 == 0


def _vanishing(key, other, t, shape) -> jax.Array:
  size = jnp.exp(-jnp.log(1e4) * t.astype(jnp.float32) / STEPS)
  return jax.random.normal(key, shape) * jnp.where(_is_even("columns", shape), size, 1.0)


def _quiet(kind: str, key, other, t, shape) -> jax.Array:
  return jnp.where(_is_even(kind, shape) & (t >= STEPS // 2), 0.0, jax.random.normal(key, shape))


KINDS = {  # Functions of two keys, the step and the shape.
  "stationary": lambda key, other, t, shape: 0.1 + jax.random.normal(key, shape),
  "sparse": lambda key, other, t, shape: jnp.where(
    jax.random.uniform(other, shape) < 0.01, jax.random.normal(key, shape), 0.0
  ),
  "vanishing": _vanishing,  # Even columns fall to 1e-4.
  "heavy-tailed": lambda key, other, t, shape: (
    jax.random.normal(key, shape) ** 3 * jnp.exp(2 * jax.random.normal(other, shape))
  ),
  "quiet columns": functools.partial(_quiet, "quiet columns"),
  "quiet rows": functools.partial(_quiet, "quiet rows"),
}

if __name__ == "__main__":
  main()
