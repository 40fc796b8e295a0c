"""How much memory and time do optimizer states in 8 bits save?

  XLA_FLAGS=--xla_gpu_enable_triton_gemm=false XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 \\
      python -m benchmarks.states

For each size and each choice of states (`optimizer.states` of the training program): bytes a
parameter of the optimizer's state, the memory that XLA plans for the step of benchmarks/step.py,
and the time of that step and of the optimizer's update by itself. "coat, xla" is "coat" without the
kernel of sbjax/pallas/triton/adam.py. Choices take turns, round after round, and medians count.
`--programs` chooses what is timed; with no name after it nothing is. Adds a line for each size.
"""

import importlib
import statistics
import time
from contextlib import nullcontext
from unittest import mock

import jax
import optax

from benchmarks.step import CASES, compiled, draw, task_of
from benchmarks.timing import append, parser_of, provenance, spread_of
from sbjax.models.sizes import SIZES
from train.config import OptimizerConfig
from train.optimizer import STATES, make_optimizer, matrix_dtype
from train.step import TrainState, make_init

_STABLE_ADAMW = importlib.import_module("sbjax.optim.stable_adamw")
_ALL = ("B/16", "L/14", "H/14", "bigG/14")
_PROGRAMS = ("step", "update")


def main(argv: list[str] | None = None) -> None:
  parser = parser_of(__doc__, "states")
  parser.add_argument("--sizes", nargs="+", default=list(_ALL), choices=CASES)
  choices = [*STATES, "coat, xla"]
  parser.add_argument("--states", nargs="+", default=list(STATES), choices=choices)
  parser.add_argument("--recipe", default="switchback", help="a contender of benchmarks/step.py")
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--steps", type=int, default=12, help="timed steps of a round")
  parser.add_argument("--programs", nargs="*", default=_PROGRAMS, choices=_PROGRAMS)
  args = parser.parse_args(argv)
  for size in args.sizes:
    batch_size, remat = CASES[size]
    rows = measure(size, args)
    for states, row in rows.items():
      print(f"{size:8} {states:9} {row}", flush=True)
    line = {"benchmark": "states", "size": size, "recipe": args.recipe, "remat": remat}
    line |= {"batch_size": batch_size, "optimizer": "stable_adamw", "states": rows}
    append(args.out, [line | provenance()])


def measure(size: str, args) -> dict[str, dict]:
  """Memory and times of each choice of states."""
  choices = {states: _Choice(size, states, args.recipe) for states in args.states}
  rows = {states: choice.memory() for states, choice in choices.items()}
  for program in args.programs:
    times = {states: [] for states in choices}
    for choice in choices.values():
      choice.start(program)
    for i in range(args.rounds):
      for states in list(choices)[:: -1 if i % 2 else 1]:
        times[states].append(choices[states].time(args.steps))
    for states, found in times.items():
      key = f"{program}_milliseconds"
      rows[states][key] = round(statistics.median(found), 3)
      rows[states][f"{key}_spread"] = spread_of(found)
  return rows


class _Choice:
  """A choice of states: its compiled step and update, and the state that they change."""

  def __init__(self, size: str, states: str, recipe: str):
    (batch_size, remat), config = CASES[size], SIZES[size]
    name, _, without_kernel = states.partition(", ")
    optimizer, _ = make_optimizer(OptimizerConfig(states=name), steps=20_000)
    task = task_of(recipe, config, remat)._replace(matrix_dtype=matrix_dtype(name))
    self._init = make_init(task, optimizer, seed=0)
    self._draw = lambda: draw(config, batch_size)
    self._shapes, batch = jax.eval_shape(self._init), jax.eval_shape(self._draw)
    changed = mock.patch.object(_STABLE_ADAMW, "has_kernel", lambda *_: False)
    with changed if without_kernel else nullcontext():
      self._step, self._of_step = compiled(task, optimizer, self._shapes, batch)
      lowered = jax.jit(_update(optimizer), donate_argnums=0).lower(
        self._shapes, self._shapes.params
      )
    self._update, self._state = lowered.compile(), None

  def memory(self) -> dict:
    """Bytes of the state and of both programs, and how the step was compiled."""
    parameters = sum(x.size for x in jax.tree.leaves(self._shapes.params))
    state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self._shapes.opt_state))
    of_update = self._update.memory_analysis()
    return {
      "state_bytes_a_parameter": round(state / parameters, 4),
      **{f"step_{key}": value for key, value in self._of_step.items()},
      "update_temporary_gigabytes": round(of_update.temp_size_in_bytes / 1e9, 2),
    }

  def start(self, program: str) -> None:
    """Makes the state, if there is none yet, and runs a program three times."""
    if self._state is None:
      self._state = jax.jit(self._init)()
    if program == "step":
      batch = self._draw()
      self._run = lambda state: self._step(state, batch)[0]
    else:
      scaled = jax.jit(lambda params: jax.tree.map(lambda p: 1e-3 * p, params))
      gradients = scaled(self._state.params)
      self._run = lambda state: self._update(state, gradients)
    self.time(3)

  def time(self, steps: int) -> float:
    """Milliseconds of a step of the program."""
    state, self._state = self._state, None
    started = time.perf_counter()
    for _ in range(steps):
      state = self._run(state)
    self._state = jax.block_until_ready(state)
    return (time.perf_counter() - started) / steps * 1e3


def _update(optimizer: optax.GradientTransformation):
  def update(state: TrainState, gradients) -> TrainState:
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state)

  return update


if __name__ == "__main__":
  main()
