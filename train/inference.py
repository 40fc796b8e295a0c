"""A trained CLIP from a run's folder, for one's own pictures and texts.

model = load("runs/quickstart")
similarities = model.embed_images(["dog.jpg"]) @ model.embed_texts(["a dog", "a cat"]).T
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from train.augment import CentreCrop
from train.checkpoint import Checkpointer
from train.config import Config, MeshConfig
from train.errors import RunError
from train.optimizer import make_optimizer
from train.run import abstract_state, check_tokenizer
from train.sharding import make_mesh
from train.task import CLIPTask, make_task
from train.tokenizer import Tokenizer
from train.workdir import read_config
from train.zero_shot import encode_rows, make_encoders, unit


class Model(NamedTuple):
  """Embeds pictures and texts as unit vectors, float32 [N, E]: a dot product is a cosine."""

  step: int  # of the checkpoint
  embed_images: Callable[[Sequence[str | Path]], np.ndarray]  # of files
  embed_texts: Callable[[Sequence[str]], np.ndarray]


def load(workdir: str | Path, batch_size: int = 32) -> Model:
  """The model of a run's newest checkpoint, on the first device.

  batch_size: pictures or texts at a time.
  """
  run = restore(workdir)
  encoders, sizes = make_encoders(run.task.model, run.mesh), run.task.example_sizes
  encode = functools.partial(encode_rows, run.params, run.mesh, batch_size)

  def embed_images(paths):
    return unit(encode(encoders.image, _pixels(paths, sizes["image_size"])))

  def embed_texts(texts):
    return unit(encode(encoders.text, run.tokenizer(texts, sizes["context_length"])))

  return Model(run.step, embed_images, embed_texts)


class RestoredRun(NamedTuple):
  """A run's newest checkpoint."""

  step: int
  params: dict
  task: CLIPTask
  tokenizer: Tokenizer
  mesh: jax.sharding.Mesh


def restore(workdir: str | Path) -> RestoredRun:
  """A run's newest checkpoint, on the first device.

  Raises:
    RunError: the folder holds no finished checkpoint, or lacks a file.
  """
  workdir = Path(workdir).expanduser()
  if not (workdir / "config.json").is_file() or not (workdir / "checkpoints").is_dir():
    raise RunError(f"{workdir} holds no run: it needs config.json and checkpoints.")
  config = Config.from_dict(read_config(workdir / "config.json"))
  config.model.backend = ""  # The run's device may be another.
  if not (workdir / "tokenizer.json").is_file():
    raise RunError(
      f"{workdir} lacks tokenizer.json, the vocabulary that its run trained with (in the format of"
      " Hugging Face tokenizers)."
    )
  tokenizer = Tokenizer.load(workdir / "tokenizer.json")
  task, mesh = make_task(config, tokenizer), make_mesh(MeshConfig(), jax.devices()[:1])
  optimizer, _ = make_optimizer(config.optimizer, config.steps, config.freeze)
  like = abstract_state(task, optimizer, config.seed, mesh)
  checkpoints = Checkpointer(workdir / "checkpoints", read_only=True)
  with contextlib.closing(checkpoints):
    restored = checkpoints.restore(like)
  if restored is None:
    raise RunError(f"{workdir / 'checkpoints'} holds no finished checkpoint.")
  check_tokenizer(restored, workdir)
  return RestoredRun(restored.step, restored.state.params, task, tokenizer, mesh)


def _pixels(paths: Sequence[str | Path], image_size: int) -> np.ndarray:
  """Files as in evaluation: uint8 [N, image_size, image_size, 3]."""
  crop = CentreCrop(image_size)
  examples = [
    {"where": path, "image": Path(path).read_bytes(), "captions": [], "label": -1} for path in paths
  ]
  return np.stack([crop(example)["image"] for example in examples])
