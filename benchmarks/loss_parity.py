"""Does int8 train like 16 bits? The same steps under several recipes, losses side by side.

  python -m benchmarks.loss_parity --config=configs/clip_vit_b16.py --config.data.root=shards \\
      --workdir=runs/parity

Every recipe starts from the same parameters and sees the same batches, crops and dropped patches.
Writes one line a recipe to benchmarks/results/loss_parity.jsonl: the losses, and how far each is
from the first recipe's.
"""

import dataclasses
import json
import platform
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from absl import flags

from train import cli, data
from train.config import Config
from train.loop import jit_train_step
from train.run import make_run
from train.sharding import batch_sharding

_RECIPES = flags.DEFINE_list(
  "recipes", ["full", "switchback"], "The first is what others compare to."
)
_STEPS = flags.DEFINE_integer("parity_steps", 10, "Steps of each.")
_OUT = flags.DEFINE_string("out", "benchmarks/results/loss_parity.jsonl", "Where lines are added.")


def main(config: Config, workdir: Path) -> None:
  rows = [measure(config, recipe, workdir) for recipe in _RECIPES.value]
  print(f"{'recipe':16} {'first loss':>11} {'last loss':>11} {'largest difference':>20}")
  with Path(_OUT.value).open("a") as file:
    for row in rows:
      for name in ("losses", "gradient_norms"):
        pairs = zip(row[name], rows[0][name], strict=True)
        row[f"largest_difference_of_{name}"] = max(abs(a - b) / b for a, b in pairs)
      first, last = row["losses"][0], row["losses"][-1]
      difference = row["largest_difference_of_losses"]
      print(f"{row['recipe']:16} {first:11.5f} {last:11.5f} {difference:20.3%}")
      file.write(json.dumps(row) + "\n")


def measure(config: Config, recipe: str, workdir: Path) -> dict:
  """The losses of the first steps under a recipe."""
  config = dataclasses.replace(config, model=dataclasses.replace(config.model, recipe=recipe))
  with tempfile.TemporaryDirectory(dir=workdir) as scratch:
    run = make_run(config, Path(scratch))
    vision, text = run.model.config.vision, run.model.config.text
    batches = data.prefetch_to_device(
      data.train_iterator(
        config, run.builder, run.tokenizer,
        image_size=vision.image_size, context_length=text.context_length,
      ),
      batch_sharding(run.mesh),
      config.data.prefetch,
    )  # fmt: skip
    step, state = jit_train_step(run), run.new_state()
    losses, gradient_norms, seconds = [], [], []
    for _ in range(_STEPS.value):
      batch = next(batches)[0]
      started = time.perf_counter()
      state, metrics, _ = step(state, batch)
      losses.append(float(metrics["loss"]))
      gradient_norms.append(float(metrics["gradient_norm"]))
      seconds.append(time.perf_counter() - started)
    batches.close()
    run.checkpointer.close()
  return {
    "recipe": recipe,
    "losses": losses,
    "gradient_norms": gradient_norms,
    "compile_seconds": round(seconds[0], 1),
    "step_seconds": round(float(np.median(seconds[1:] or seconds)), 4),
    "size": config.model.size,
    "dtype": config.model.dtype,
    "batch_size": config.batch_size,
    "image_size": vision.image_size,
    "patch_dropout": config.model.patch_dropout,
    "learning_rate": config.optimizer.learning_rate,
    "warmup_steps": config.optimizer.warmup_steps,
    "data": config.data.name,
    "device": f"{run.mesh.size} x {jax.devices()[0].device_kind}",
    "jax": jax.__version__,
    "python": platform.python_version(),
    "command": "python -m benchmarks.loss_parity " + " ".join(sys.argv[1:]),
  }


if __name__ == "__main__":
  cli.run(main)
