"""Scores the newest checkpoint of a run, on any data set, such as --config.data.name=cifar10.

python -m train.evaluate --config=configs/quickstart.py --workdir=runs/quickstart
"""

from pathlib import Path

import jax

from train import cli
from train.config import Config
from train.errors import RunError
from train.run import make_run
from train.workdir import newest_step, write_json


def evaluate_checkpoint(config: Config, workdir: Path) -> dict[str, float]:
  """Scores the newest checkpoint in `workdir`, prints the scores and writes them there as JSON."""
  if newest_step(workdir / "checkpoints") is None:
    raise RunError(f"{workdir} holds no checkpoint: train there first, or mend --workdir.")
  run = make_run(config, workdir, read_only=True)
  restored = run.restore()
  if restored is None:
    raise RunError(f"{run.checkpointer.directory} holds no checkpoint any more: try again.")
  scores = run.evaluate(restored.state.params)
  if jax.process_index() != 0:
    return scores
  print(f"step {restored.step}, {run.builder.info.full_name}, {config.data.eval_split} split")
  for name, score in scores.items():
    print(f"  {name:26} {score:.4f}")
  data_set = run.builder.info.full_name.replace("/", "-")
  path = workdir / f"evaluation-{data_set}-{config.data.eval_split}.json"
  write_json(path, {"step": restored.step, **scores})
  return scores


if __name__ == "__main__":
  cli.run(evaluate_checkpoint)
