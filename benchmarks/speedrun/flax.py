"""Trains as `python -m train.main` does, by its flags, with blocks of plain Flax layers."""

import functools

from train import cli, task
from train.loop import train

if __name__ == "__main__":
  from sbjax.models.flax_block import FlaxBlock

  task.CLIP = functools.partial(task.CLIP, block=FlaxBlock)
  cli.run(train)
