"""How much memory and time do optimizer states in 8 bits save?

  XLA_FLAGS=--xla_gpu_enable_triton_gemm=false XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 \\
      python -m benchmarks.states

For each size and each choice of states (`optimizer.states` of the training program), in a process
of its own: bytes a parameter of the optimizer's state, the memory that XLA plans for the step of
benchmarks/step.py and for the optimizer's update by itself, and the time of both. Choices take
turns, round after round, and medians count. `--memory` compiles and times nothing. Adds a line for
each size.

`--update_only` times the update by itself, in one process, with random parameters. There
"coat, xla" is "coat" without the kernel of sbjax/pallas/adam_triton.py.
"""

import argparse
import functools
import importlib
import json
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from unittest import mock

import jax
import jax.numpy as jnp
import optax

from benchmarks.step import CASES, compiled, draw, task_of
from benchmarks.timing import append, provenance
from sbjax.models.sizes import SIZES
from train.config import OptimizerConfig
from train.optimizer import STATES, make_optimizer, matrix_dtype
from train.step import TrainState, make_init

_STABLE_ADAMW = importlib.import_module("sbjax.stable_adamw")
_ALL = ("B/16", "L/14", "H/14", "bigG/14")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", default="benchmarks/results/states.jsonl")
  parser.add_argument("--sizes", nargs="+", default=list(_ALL), choices=CASES)
  parser.add_argument("--states", nargs="+", default=list(STATES), choices=STATES)
  parser.add_argument("--recipe", default="switchback", help="a contender of benchmarks/step.py")
  parser.add_argument("--rounds", type=int, default=3, help="processes of each choice")
  parser.add_argument("--steps", type=int, default=12, help="timed steps of a process")
  parser.add_argument("--memory", action="store_true", help="compile only")
  parser.add_argument("--update_only", action="store_true", help="no step: see above")
  parser.add_argument("--one", action="store_true", help="print the first choice; for this program")
  args = parser.parse_args()
  if args.one:
    print(json.dumps(measure(args.sizes[0], args.states[0], args.recipe, args)))
    return
  for size in args.sizes:
    if args.update_only:
      line = {"benchmark": "states_update", "size": size, "states": race_updates(size, args)}
      print(json.dumps(line), flush=True)
      append(args.out, [line | provenance()])
      continue
    found = {states: [] for states in args.states}
    for i in range(1 if args.memory else args.rounds):
      for states in args.states[::-1] if i % 2 else args.states:
        found[states].append(in_a_process(size, states, args))
    rows = {states: summary(runs) for states, runs in found.items()}
    for states, row in rows.items():
      print(f"{size:8} {states:9} {row}", flush=True)
    batch_size, remat = CASES[size]
    line = {"benchmark": "states", "size": size, "recipe": args.recipe, "remat": remat}
    line |= {"batch_size": batch_size, "optimizer": "stable_adamw", "states": rows}
    where = found[args.states[0]][0]["provenance"]
    flags = where["command"].partition("python")[0]  # Those of the process that compiled.
    where["command"] = " ".join([f"{flags}python -m benchmarks.states", *sys.argv[1:]])
    append(args.out, [line | where])


def in_a_process(size: str, states: str, args) -> dict:
  """What `measure` returns in a process of its own."""
  command = [sys.executable, "-m", "benchmarks.states", "--one", "--sizes", size]
  command += ["--states", states, "--recipe", args.recipe, "--steps", str(args.steps)]
  command += ["--memory"] * args.memory
  run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
  return json.loads(run.stdout.splitlines()[-1])


def summary(runs: list[dict]) -> dict:
  """The first run, with the median and the spread of the times of all."""
  row = {key: value for key, value in runs[0].items() if key != "provenance"}
  for key in [key for key in row if key.endswith("milliseconds")]:
    times = [run[key] for run in runs]
    row[key] = round(statistics.median(times), 3)
    row[f"{key}_spread"] = round((max(times) - min(times)) / row[key], 4)
  return row


def measure(size: str, states: str, recipe: str, args) -> dict:
  """Memory, and unless `args.memory` the time, of the step and of the update of one choice."""
  (batch_size, remat), config = CASES[size], SIZES[size]
  optimizer, _ = make_optimizer(OptimizerConfig(states=states), steps=20_000)
  task = task_of(recipe, config, remat)._replace(matrix_dtype=matrix_dtype(states))
  init = make_init(task, optimizer, seed=0)
  state = jax.eval_shape(init)
  batch = jax.eval_shape(lambda: draw(config, batch_size))
  step, of_step = compiled(task, optimizer, state, batch)
  update = jax.jit(_update(optimizer), donate_argnums=0).lower(state, state.params).compile()
  parameters = sum(x.size for x in jax.tree.leaves(state.params))
  of_update = update.memory_analysis()
  row = {
    "state_bytes_a_parameter": round(_bytes(state.opt_state) / parameters, 4),
    **{f"step_{key}": value for key, value in of_step.items()},
    "update_temporary_gigabytes": round(of_update.temp_size_in_bytes / 1e9, 2),
    "provenance": provenance(),
  }
  if args.memory:
    return row
  state, batch = jax.jit(init)(), draw(config, batch_size)
  state, row["step_milliseconds"] = _timed(lambda s: step(s, batch)[0], state, args.steps)
  gradients = jax.tree.map(lambda p: 1e-3 * p, state.params)
  state, row["update_milliseconds"] = _timed(lambda s: update(s, gradients), state, args.steps)
  return row


def race_updates(size: str, args) -> dict:
  """For each choice the temporary memory and the milliseconds of an update, timed in turns."""
  updates, rows = {}, {}
  for states in [*args.states, *["coat, xla"] * ("coat" in args.states)]:
    name, _, by = states.partition(", ")
    optimizer, _ = make_optimizer(OptimizerConfig(states=name), steps=20_000)
    task = task_of(args.recipe, SIZES[size], CASES[size][1])
    init = make_init(task._replace(matrix_dtype=matrix_dtype(name)), optimizer, seed=0)
    params = _drawn(jax.eval_shape(init).params)
    state = TrainState(jnp.int32(0), params, jax.jit(optimizer.init)(params))
    with mock.patch.object(_STABLE_ADAMW, "has_kernel", _never) if by else nullcontext():
      lowered = jax.jit(_update(optimizer), donate_argnums=0).lower(state, params)
    update = lowered.compile()
    gradients = jax.tree.map(lambda p: 1e-3 * p, params)
    temporary = update.memory_analysis().temp_size_in_bytes
    rows[states] = {"update_temporary_gigabytes": round(temporary / 1e9, 3), "times": []}
    run = functools.partial(lambda update, gradients, s: update(s, gradients), update, gradients)
    updates[states] = [run, state]
  for i in range(args.rounds):
    for states in list(updates)[:: -1 if i % 2 else 1]:
      run, state = updates[states]
      updates[states][1], milliseconds = _timed(run, state, args.steps)
      rows[states]["times"].append(milliseconds)
  for row in rows.values():
    times = row.pop("times")
    row["update_milliseconds"] = round(statistics.median(times), 3)
    row["update_milliseconds_spread"] = round((max(times) - min(times)) / min(times), 4)
  return rows


def _never(*args) -> bool:
  return False


def _drawn(shapes):
  """Parameters of deviation 0.02."""
  leaves, structure = jax.tree.flatten(shapes)
  keys = jax.random.split(jax.random.key(0), len(leaves))
  drawn = [0.02 * jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
  return jax.tree.unflatten(structure, drawn)


def _update(optimizer: optax.GradientTransformation):
  def update(state: TrainState, gradients) -> TrainState:
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state)

  return update


def _timed(run, state, steps: int):
  """The last state, and milliseconds of a call: of `steps` after three that warm up."""
  for _ in range(3):
    state = run(state)
  jax.block_until_ready(state)
  started = time.perf_counter()
  for _ in range(steps):
    state = run(state)
  jax.block_until_ready(state)
  return state, round((time.perf_counter() - started) / steps * 1e3, 3)


def _bytes(tree) -> int:
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


if __name__ == "__main__":
  main()
