"""Does a CLIP train as well with parameters in bfloat16, and what share of its updates is kept?

  python -m benchmarks.collage_training --config=configs/flickr8k_gpu.py \\
      --config.data.root=path/to/flickr8k --config.steps=2000 --workdir=runs/collage

Trains with each choice of `optimizer.states` at each second decay rate, from the same parameters on
the same batches. "option_a" is the paper's baseline (Yu et al. 2024,
https://arxiv.org/abs/2405.03637): bfloat16 parameters and moments without a residual. Adds a line
for each run: the mean losses, EDQ and lost shares (optim/collage.py) of each tenth of the steps,
and the evaluation's scores at the end.
"""

import dataclasses
import tempfile
from pathlib import Path

import jax
import numpy as np
from absl import flags

from benchmarks.timing import append, provenance
from train import cli
from train.config import Config
from train.loop import jit_train_step
from train.optimizer import COLLAGE, STATES
from train.parallel.sharding import batch_sharding
from train.run import make_run

_STATES = flags.DEFINE_list(
  "states", ["float32", "option_a", "collage_light", "collage_plus"], "Choices to train with."
)
_B2 = flags.DEFINE_list("b2", ["0.98", "0.999"], "Second decay rates.")
_OUT = flags.DEFINE_string("out", "benchmarks/results/collage_training.jsonl", "Gets the lines.")


def main(config: Config, workdir: Path) -> None:
  workdir.mkdir(parents=True, exist_ok=True)
  STATES["option_a"], COLLAGE["option_a"] = STATES["bfloat16"], None
  print(f"{'b2':>6} {'states':14} {'last loss':>9} {'EDQ':>7} {'in the last tenth':>18}")
  for b2 in map(float, _B2.value):
    for states in _STATES.value:
      row = train(config, states, b2, workdir)
      edq = row.get("edq", [1.0])
      print(
        f"{b2:6} {states:14} {row['loss'][-1]:9.4f} {np.mean(edq):7.4f} {edq[-1]:18.4f}", flush=True
      )
      append(_OUT.value, [row | provenance()])


def train(config: Config, states: str, b2: float, workdir: Path) -> dict:
  """A run of `config.steps`: its means by tenths of the steps, and its scores."""
  optimizer = dataclasses.replace(
    config.optimizer, states=states, b2=b2, measure_edq=states in COLLAGE
  )
  with tempfile.TemporaryDirectory(dir=workdir) as scratch:
    run = make_run(dataclasses.replace(config, optimizer=optimizer), Path(scratch))
    step, state, found = jit_train_step(run), run.new_state(), []
    stream = run.source.train_iterator(run.tokenizer, **run.task.example_sizes)
    sharding = batch_sharding(run.mesh)
    for _ in range(config.steps):
      state, metrics, _ = step(state, jax.device_put(next(stream), sharding))
      found.append({name: metrics[name] for name in ("loss", "edq", "lost") if name in metrics})
    scores = run.evaluate(state.params)
    run.checkpointer.close()
  tenths = np.array_split(np.arange(config.steps), 10)
  values = {name: np.array([float(one[name]) for one in found]) for name in found[0]}
  return {
    "benchmark": "collage training",
    "states": states,
    "b2": b2,
    "steps": config.steps,
    "batch_size": config.batch_size,
    "size": config.model.size,
    "dtype": config.model.dtype,
    "recipe": config.model.recipe,
    "data": config.data.name,
    "learning_rate": config.optimizer.learning_rate,
    **{name: [round(float(x[i].mean()), 5) for i in tenths] for name, x in values.items()},
    "scores": {name: round(float(value), 4) for name, value in scores.items()},
  }


if __name__ == "__main__":
  cli.run(main)
