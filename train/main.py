"""Trains a CLIP: python -m train.main --config=configs/quickstart.py --workdir=runs/quickstart

The same command continues a run that was stopped. Every field of the config is a flag
(--config.steps=300); train/config.py lists them.
"""

from train.parallel import stop

if __name__ == "__main__":
  with stop.importing():  # Which takes seconds.
    from train import cli
    from train.loop import train

    cli.run(train)
