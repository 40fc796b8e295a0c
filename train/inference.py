"""A trained CLIP for one's own images and texts: of a run's folder, or weights of open_clip.

model = load("runs/quickstart")
similarities = model.embed_images(["dog.jpg"]) @ model.embed_texts(["a dog", "a cat"]).T
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from sbjax.interop.config_files import config_of
from sbjax.interop.files import WEIGHT_FILES, is_weights
from sbjax.interop.serving import serving_params
from sbjax.interop.weights import load_weights
from sbjax.linear.lora import merge_lora
from sbjax.models.sizes import SIZES, open_clip_name
from sbjax.optim.averaged import average_of
from sbjax.recipes import parse_recipe, recipes_of
from train.checkpoint import Checkpointer
from train.config import Config, MeshConfig, ModelConfig
from train.data.augment import CentreCrop, Squash
from train.data.eval_batches import decoded
from train.data.preprocessing import is_squashed, statistics_of
from train.data.tokenizer import Tokenizer, make_tokenizer, tokenizer_beside
from train.errors import RunError
from train.optimizer import make_optimizer
from train.parallel.sharding import make_mesh
from train.paths import check_local, local_path
from train.run import abstract_state, check_tokenizer
from train.task import CLIPTask, block_options, make_task
from train.workdir import read_config
from train.zero_shot import check_finite, encode_rows, make_encoders, unit

# For weights that were not trained in 8 bits: a scale for each output of a linear layer.
_INT8 = "switchback_q"


class Model(NamedTuple):
  """Embeds images and texts as unit vectors, float32 [N, E]: a dot product is a cosine."""

  size: str  # a key of SIZES
  step: int | None  # of the checkpoint; None for weights of open_clip
  task: CLIPTask
  params: Any
  tokenizer: Tokenizer
  mesh: jax.sharding.Mesh
  batch_size: int
  squash: bool = False  # images to squares, in place of a crop

  @property
  def image_size(self) -> int:
    return self.task.example_sizes["image_size"]

  @property
  def crop(self) -> CentreCrop | Squash:
    """What makes an image a square of that size."""
    return Squash(self.image_size) if self.squash else CentreCrop(self.image_size)

  def tokenize(self, texts: Sequence[str]) -> np.ndarray:
    """int32 [N, L]."""
    return self.tokenizer(texts, self.task.example_sizes["context_length"])

  def embed_images(self, paths: Sequence[str | Path]) -> np.ndarray:
    """Of files, prepared as in evaluation."""
    examples = (
      {"where": path, "image": Path(path).read_bytes(), "captions": [], "label": -1}
      for path in paths
    )
    batches = decoded(examples, self.crop, self.batch_size)
    features = [self.embed_pixels(batch["image"], batch["where"]) for batch in batches]
    return np.concatenate([self._no_rows, *features])

  def embed_pixels(self, pixels: np.ndarray, names: Sequence[str] = ()) -> np.ndarray:
    """Of uint8 [N, S, S, 3]; `names` are for the message of an error."""
    return self._encode("image", pixels, names)

  def embed_texts(self, texts: Sequence[str]) -> np.ndarray:
    return self._encode("text", self.tokenize(texts), texts)

  def fingerprint(self) -> dict[str, str]:
    """Checksums of all that makes a vector of a text or of an image's pixels."""
    model = self.task.model
    computation = repr(
      (model.config, model.options.recipe, model.options.parametrization, model.options.tau)
    )
    weights = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(self.params):
      array = np.asarray(leaf)
      weights.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
      weights.update(np.ascontiguousarray(array).view(np.uint8).reshape(-1))
    return {
      "weights": weights.hexdigest()[:16],
      "computation": hashlib.sha256(computation.encode()).hexdigest()[:16],
      "vocabulary": hashlib.sha256(self.tokenizer.to_json().encode()).hexdigest()[:16],
    }

  @property
  def _no_rows(self) -> np.ndarray:
    return np.zeros((0, self.task.model.config.embed_dim), np.float32)

  def _encode(self, tower: str, rows: np.ndarray, names: Sequence[str]) -> np.ndarray:
    if not len(rows):
      return self._no_rows
    encoders = make_encoders(self.task.model, self.mesh)
    rows = encoders.cut(rows) if tower == "text" else rows
    encode = getattr(encoders, tower)
    features = unit(encode_rows(self.params, self.mesh, self.batch_size, encode, rows))
    check_finite(tower, features, names if len(names) else range(len(rows)))
    return features


def load(
  path: str | Path,
  batch_size: int = 32,
  *,
  size: str = "",
  tokenizer: str = "",
  dtype: str = "",
  int8: bool = False,
  ema: bool = False,
  step: int | None = None,
) -> Model:
  """The model of a run's newest checkpoint or of open_clip's weights, on the first device.

  Args:
    path: a run's folder, or a .safetensors, .pt, .pth or .bin file of weights, or an index of such
      shards.
    batch_size: images or texts at a time.
    size: of weights of open_clip: a key of SIZES, or open_clip's name, such as "ViT-B-32".
    tokenizer: of weights of open_clip: as in DataConfig; "" is "clip".
    dtype: of the computation; "": the run's, or float32 for weights of open_clip.
    int8: keep kernels and token embeddings in 8 bits only (sbjax.interop.serving), for the run's
      recipe, or "switchback_q" if that leaves the forward pass in 16 bits.
    ema: of a run with optimizer.ema: take the average of its parameters.
    step: of a run: the checkpoint of that step in place of the newest.

  Raises:
    RunError: the checkpoint, its tokenizer or its size is missing or another, or images of the
      weights are prepared otherwise than here.
  """
  path = local_path(path, "--checkpoint")
  check_local(size, "--model")
  size = {open_clip_name(key): key for key in SIZES}.get(size, size)
  if is_weights(path) and not path.is_dir():
    if ema or step is not None:
      raise RunError(f"{path} holds weights and no run: leave --ema and --step out.")
    config, task, params, tokenizer, step, squash = _open_clip(path, size, tokenizer)
  else:
    config, task, params, tokenizer, step, squash = *_run(path, size, tokenizer, ema, step), False
  if dtype:
    config.model.dtype = dtype
  if int8:
    config, params = _in_int8(config, params)
  task = task.with_options(block_options(config.model))
  mesh = make_mesh(MeshConfig(), jax.devices()[:1])
  return Model(config.model.size, step, task, params, tokenizer, mesh, batch_size, squash)


def _open_clip(path: Path, size: str, tokenizer: str):
  if not path.is_file():
    raise RunError(f"No file {path}: it should hold weights of open_clip.")
  if not size:
    raise RunError(f"{path} needs the size of its model, such as --model=ViT-B-32.")
  config = Config(model=ModelConfig(size=size, recipe="full", dtype="float32"))
  try:
    task = make_task(config)
    model = task.model.config
    squash = is_squashed(path.name, path, model.vision.image_size, statistics_of(model))
    made = _published_tokenizer(tokenizer, model.text.pool)
    beside = config_of(path) or (model if local_path(size, "--model").exists() else None)
    ends = beside is not None and beside.text.pool == "eot"  # Else texts are read elsewhere.
    if ends and beside.text.end_id != made.eot_id:
      raise ValueError(
        f"it ends texts with the token {beside.text.end_id}, and the tokenizer"
        f" {tokenizer or 'clip'!r} with {made.eot_id}: pass its own with --tokenizer."
      )
    own = tokenizer_beside(path.parent)
    if own is not None and not made.agrees_with(Tokenizer.load(own)):
      raise ValueError(
        f"the tokenizer {tokenizer or 'clip'!r} gives words other ids than the one beside the"
        f" weights: pass --tokenizer={own}."
      )
    task = task.with_tokenizer(made)
    params = load_weights(path, task.model.config)
  except ValueError as error:
    raise RunError(f"{path} as a model of --model={size}: {error}") from error
  config.model.zero_init_layer_scale = "ls_1" in params["image"]["blocks"]
  return config, task, jax.device_put(params, jax.devices()[0]), made, None, squash


def _published_tokenizer(tokenizer: str, pool: str) -> Tokenizer:
  """The tokenizer of published weights: "" is CLIP's."""
  if not tokenizer and pool == "last":
    raise ValueError(
      "it is a SigLIP, whose tokenizer is not 'clip': pass the path of its tokenizer.json or"
      " spiece.model with --tokenizer."
    )
  return make_tokenizer(tokenizer or "clip", None, 0, pool)


def _run(workdir: Path, size: str, tokenizer: str, ema: bool, step: int | None):
  if not (workdir / "config.json").is_file() or not (workdir / "checkpoints").is_dir():
    weights = next((name for name in WEIGHT_FILES if (workdir / name).is_file()), "")
    hint = f" For the weights pass {workdir / weights}." if weights else ""
    raise RunError(f"{workdir} holds no run: it needs config.json and checkpoints.{hint}")
  config = Config.from_dict(read_config(workdir / "config.json"))
  if size not in ("", config.model.size):
    raise RunError(f"{workdir} holds a {config.model.size}: leave --model={size} out.")
  if tokenizer:
    raise RunError(f"{workdir} has its own tokenizer: leave --tokenizer={tokenizer} out.")
  if ema and not config.optimizer.ema:
    raise RunError(f"{workdir} has no average, as its optimizer.ema is 0: leave --ema out.")
  if not (workdir / "tokenizer.json").is_file():
    raise RunError(
      f"{workdir / 'tokenizer.json'} is missing: it should hold the tokenizer of the run, as"
      " training wrote it there."
    )
  config.model.backend = config.model.attention_backend = ""  # The run's device may be another.
  task = make_task(config)
  made = Tokenizer.load(workdir / "tokenizer.json", task.model.config.text.pool)
  task = task.with_tokenizer(made)
  mesh = make_mesh(MeshConfig(), jax.devices()[:1])
  how = config.optimizer, config.steps, config.freeze, config.model.parametrization
  optimizer, _ = make_optimizer(*how)
  like = abstract_state(task, optimizer, config.seed, mesh)
  checkpoints = Checkpointer(workdir / "checkpoints", read_only=True)
  with contextlib.closing(checkpoints):
    restored = checkpoints.restore(like, step)
  if restored is None:
    raise RunError(f"{workdir / 'checkpoints'} holds no finished checkpoint.")
  check_tokenizer(restored, workdir)
  params = average_of(restored.state.opt_state) if ema else restored.state.params
  params = task.joined(params, restored.state.frozen)
  return config.at(restored.step), task, params, made, restored.step


def _in_int8(config: Config, params):
  """The config and the parameters of the same model with 8-bit kernels."""
  if all(recipe.fwd is None for recipe in recipes_of(parse_recipe(config.model.recipe))):
    model = dataclasses.replace(config.model, recipe=_INT8)
    config = dataclasses.replace(config, model=model)
  return config, serving_params(merge_lora(params), config.model.recipe)
