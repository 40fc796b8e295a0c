"""Flickr8k and CIFAR-10 for the figures: their configs, and their shards in a folder of yours.

The repository has no photos. `--data ROOT` names a folder with these webdataset shards:

  ROOT/flickr8k  flickr8k-train-*.tar.gz and flickr8k-test-*.tar.gz: jpg, and json with `captions`
  ROOT/cifar10   cifar10-train-*.tar.gz and cifar10-test-*.tar.gz: jpg, and cls with 0 to 9;
                 classnames.txt, a class a line

They are imported once, into the folder of the runs, before the first run starts.
"""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.shards import add_file
from configs import flickr8k_gpu
from train.config import Config, DataConfig

# Images of train and test. CIFAR-10 has 50,000 to train on; our shards have 30,000.
COUNTS = {"flickr8k": (6000, 1000), "cifar10": (30_000, 10_000)}
_WORKERS = 7  # Two runs share 16 cores.


def flickr8k() -> Config:
  """configs/flickr8k_gpu.py: 85 times through 6,000 photos of 96 pixels."""
  config = flickr8k_gpu.get_config()
  config.data.workers = _WORKERS
  return config


def cifar10() -> Config:
  """The same model on CIFAR-10, 34 times through 30,000 images; captions are prompts.

  A batch has about 26 images of each class, so even a perfect model has a loss of log(26).
  """
  config = flickr8k_gpu.get_config()
  config.model.image_size, config.model.patch_size = 32, 4
  config.model.context_length = 16  # prompts have at most 9 words
  config.data = DataConfig(
    name="cifar10",
    train_shards="cifar10-train-*.tar.gz",
    eval_shards="cifar10-test-*.tar.gz",
    eval_split="eval",
    class_names="classnames.txt",
    text_key="",
    label_key="label",
    templates=("a photo of a {}.", "a small picture of a {}.", "there is a {} in this photo."),
    tokenizer="words",
    crop_scale=(0.4, 1.0),
    flip=True,
    workers=_WORKERS,
    prefetch=16,
  )
  config.optimizer.learning_rate, config.optimizer.warmup_steps = 1e-3, 400
  config.optimizer.weight_decay = 0.5
  config.batch_size, config.steps = 256, 4000
  return config


CONFIGS = {"flickr8k": flickr8k, "cifar10": cifar10}


def place(config: Config, root: Path, runs: Path) -> Config:
  """The config with its shards in `root`. Their import is in `runs`, and all runs share it."""
  config.data.root = str(root / config.data.name)
  config.data.data_dir = str(runs / "data")
  return config


def prepare(name: str, root: Path, runs: Path) -> None:
  """Imports a data set, unless it is there.

  Raises:
    ValueError: shards are missing, or have another number of images.
  """
  from train.data.builders import prepare  # Imports JAX, which takes seconds.

  builder = prepare(place(CONFIGS[name](), root, runs).data)
  found = tuple(builder.info.splits[split].num_examples for split in ("train", "eval"))
  if found != COUNTS[name]:
    raise ValueError(
      f"{root / name} has {found[0]:,} images to train on and {found[1]:,} to test, not"
      f" {COUNTS[name][0]:,} and {COUNTS[name][1]:,}. Add what is missing and delete"
      f" {builder.data_dir}, the import."
    )


def make_up(root: Path, name: str) -> None:
  """Writes shards of a data set with noise for images: 32 to train on, 16 to test."""
  folder, rng = root / name, np.random.default_rng(0)
  folder.mkdir(parents=True)
  (folder / "classnames.txt").write_text("".join(f"noise{label}\n" for label in range(10)))
  for split, count in ("train", 32), ("test", 16):
    with tarfile.open(folder / f"{name}-{split}-000000.tar.gz", "w:gz") as tar:
      for i in range(count):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(file, "jpeg")
        captions = [f"noise {i}, caption {k}" for k in range(5)]
        add_file(tar, f"{i:04d}.jpg", file.getvalue())
        add_file(tar, f"{i:04d}.json", json.dumps({"captions": captions}).encode())
        add_file(tar, f"{i:04d}.cls", str(i % 10).encode())
