"""Does int8 train like 16 bits? Compares the losses of the same steps under several recipes.

  python -m benchmarks.loss_parity --config=configs/clip_vit_b16.py --config.data.root=shards \\
      --workdir=runs/parity

For each seed, all variants start from the same parameters and see the same batches, crops and
dropped patches. Another seed has other parameters and another order of batches. A variant is a
recipe by its name, and after it may have "unfused", which uses FlaxBlock, a value of
optimizer.states, one of model.attention_backend, or "grouped", which is model.keep: "switchback
coat", "switchback cudnn", "switchback grouped". For simulated FP4 use
--variants=full,fp4_direct,fp4_dge,fp4. Adds a line for each variant to
benchmarks/results/loss_parity.jsonl. Prints the difference between the last losses of each variant
and of the first, and the standard deviation over seeds.
"""

import dataclasses
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from absl import flags

from benchmarks.timing import append, provenance
from sbjax.attention import BACKENDS
from sbjax.models.flax_block import FlaxBlock
from train import cli
from train.config import Config
from train.loop import jit_train_step
from train.optimizer import STATES
from train.parallel.sharding import batch_sharding
from train.run import Run, make_run

_VARIANTS = flags.DEFINE_list(
  "variants", ["full unfused", "switchback", "switchback unfused"], "The first is the base."
)
_SEEDS = flags.DEFINE_integer("seeds", 3, "How many seeds.")
_STEPS = flags.DEFINE_integer("parity_steps", 200, "Steps of each.")
_OUT = flags.DEFINE_string("out", "benchmarks/results/loss_parity.jsonl", "Where lines are added.")


def main(config: Config, workdir: Path) -> None:
  workdir.mkdir(parents=True, exist_ok=True)
  batches, states, base = None, {}, None
  print(f"{'variant':20} {'mean of the last quarter of losses, by seed':45} from the first variant")
  for variant in _VARIANTS.value:
    with tempfile.TemporaryDirectory(dir=workdir) as scratch:
      run = run_of(config, variant, Path(scratch))
      batches = batches or draw(run)
      row = measure(run, variant, batches, states)
      run.checkpointer.close()
    base = base or row
    row |= compare(row, base) | provenance()
    last = "  ".join(f"{loss:.4f}" for loss in row["last_losses"])
    print(f"{variant:20} {last:45} {row['mean_difference']:+.4f}", flush=True)
    append(_OUT.value, [row])
  print(f"The seeds' standard deviation: {base['deviation_over_seeds']:.4f}")


def run_of(config: Config, variant: str, workdir: Path) -> Run:
  recipe, *options = variant.split()
  if not {"unfused", "grouped", *STATES, *BACKENDS} >= set(options):
    known = ", ".join(["unfused", "grouped", *STATES, *BACKENDS])
    raise ValueError(f"variant {variant!r} must be a recipe, and options: {known}.")
  attention = next((o for o in options if o in BACKENDS), config.model.attention_backend)
  keep = "grouped" if "grouped" in options else config.model.keep
  model = dataclasses.replace(config.model, recipe=recipe, attention_backend=attention, keep=keep)
  states = next((option for option in options if option in STATES), config.optimizer.states)
  optimizer = dataclasses.replace(config.optimizer, states=states)
  run = make_run(dataclasses.replace(config, model=model, optimizer=optimizer), workdir)
  task = run.task._replace(model=run.task.model.clone(block=FlaxBlock))
  return run._replace(task=task) if "unfused" in options else run


def draw(run: Run) -> list:
  """The batches of all steps, in host memory."""
  iterator = run.source.train_iterator(run.tokenizer, **run.task.example_sizes)
  return [next(iterator) for _ in range(_STEPS.value)]


def measure(run: Run, variant: str, batches: list, states: dict) -> dict:
  """The losses of a variant for each seed. `states` caches the initial states."""
  config, sharding = run.config, batch_sharding(run.mesh)
  step, losses, gradient_norms, seconds = jit_train_step(run), [], [], []
  for seed in range(_SEEDS.value):
    key = seed, config.optimizer.states
    if key not in states:
      states[key] = jax.device_get(
        run._replace(config=dataclasses.replace(config, seed=seed)).new_state()
      )
    state = jax.device_put(states[key], jax.tree.map(lambda x: x.sharding, run.abstract_state))
    found = []
    for i in np.random.default_rng(seed).permutation(len(batches)):
      batch = jax.device_put(batches[i], sharding)
      started = time.perf_counter()
      state, metrics, _ = step(state, batch)
      found.append((float(metrics["loss"]), float(metrics["gradient_norm"])))
      seconds.append(time.perf_counter() - started)
    losses.append([loss for loss, _ in found])
    gradient_norms.append([norm for _, norm in found])
  return {
    "variant": variant,
    "losses": losses,
    "gradient_norms": gradient_norms,
    "compile_seconds": round(seconds[0], 1),
    "step_seconds": round(float(np.median(seconds[1:] or seconds)), 4),
    "size": config.model.size,
    "dtype": config.model.dtype,
    "batch_size": config.batch_size,
    "image_size": run.task.example_sizes["image_size"],
    "patch_dropout": config.model.patch_dropout,
    "learning_rate": config.optimizer.learning_rate,
    "warmup_steps": config.optimizer.warmup_steps,
    "data": config.data.name,
    "device": f"{run.mesh.size} x {jax.devices()[0].device_kind}",
  }


def compare(row: dict, base: dict) -> dict:
  """The means of the losses' last quarters, and their differences from those of `base`."""
  quarter = max(1, len(row["losses"][0]) // 4)
  last, others = (np.mean([one[-quarter:] for one in r["losses"]], axis=1) for r in (row, base))
  return {
    "last_losses": [round(float(loss), 5) for loss in last],
    "deviation_over_seeds": float(np.std(last, ddof=1)) if len(last) > 1 else 0.0,
    "mean_difference": float(np.mean(last - others)),
    "differences": [float(d) for d in last - others],
  }


if __name__ == "__main__":
  cli.run(main)
