"""How images are prepared for the model: normalized on the device; until then they are bytes.

A config beside published weights says how theirs were prepared: open_clip's in
open_clip_config.json, transformers' in preprocessor_config.json or, since its version 5, in
processor_config.json. Each field is applied, says what this program does, changes no pixel, or is
refused by its name; so is a field that is not known here.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from sbjax.interop.config_files import OPEN_CLIP_FILE, read_json
from sbjax.interop.files import WEIGHT_FILES
from sbjax.models.sizes import CLIPConfig

# Statistics of OpenAI's training images (Radford et al. 2021); later CLIP models use them too.
MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)


class Statistics(NamedTuple):
  """By which images are normalized: of pixels from 0 to 1, by channel."""

  mean: np.ndarray
  std: np.ndarray
  owner: str


OPENAI = Statistics(MEAN, STD, "OpenAI's")
SIGLIP = Statistics(np.full(3, 0.5, np.float32), np.full(3, 0.5, np.float32), "SigLIP's")


def statistics_of(model: CLIPConfig) -> Statistics:
  """Those that a model's published weights have."""
  return SIGLIP if model.vision.pool == "map" else OPENAI


IMAGES_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"  # transformers'

# What transformers' classes do where a file leaves a field out.
_CLIP = {
  **dict.fromkeys(("do_resize", "do_center_crop", "do_rescale", "do_normalize"), True),
  "do_convert_rgb": True,
  "do_pad": False,
  "size": {"shortest_edge": 224},
  "default_to_square": False,
  "crop_size": 224,
  "resample": 3,
  "rescale_factor": 1 / 255,
  "image_mean": MEAN.tolist(),
  "image_std": STD.tolist(),
}
_SIGLIP = {
  **_CLIP,
  "do_center_crop": False,
  "size": {"height": 224, "width": 224},
  "image_mean": [0.5] * 3,
  "image_std": [0.5] * 3,
}
_CLASSES = {
  **dict.fromkeys(("CLIPImageProcessor", "CLIPFeatureExtractor"), _CLIP),
  "SiglipImageProcessor": _SIGLIP,
}
# Fields that change no pixel.
_INERT = (
  *("image_processor_type", "feature_extractor_type", "processor_class", "_processor_class"),
  *("_valid_processor_keys", "data_format", "input_data_format", "return_tensors", "device"),
  *("disable_grouping", "image_seq_length", "transformers_version"),
  "pad_size",  # of do_pad, which is refused
)
_OPEN_CLIP_INERT = (
  "size",  # open_clip takes the model's.
  "fill_color",  # of resize_mode="longest", which is refused
)


class _Fields:
  """What a file says of images; errors name the weights, the file and the field."""

  def __init__(self, weights: str, file: str, values: Any, statistics: Statistics):
    self._weights, self._file, self._statistics = weights, file, statistics
    if not isinstance(values, Mapping):
      raise ValueError(f"{weights}: {file} says of its images {values!r}: expected an object.")
    self.values = {name: value for name, value in values.items() if value is not None}

  def refuse(self, field: str, ours: str) -> NoReturn:
    raise ValueError(
      f"{self._weights}: its images have {field}={self.values[field]!r} ({self._file}), and this"
      f" program {ours}."
    )

  def check(self, field: str, ours, what: str, atol: float = 0.0) -> None:
    """Refuses a number or numbers that are not ours."""
    try:
      theirs = np.asarray(self.values.get(field, ours), np.float64)
      same = theirs.shape in ((), (3,)) and np.allclose(theirs, ours, rtol=1e-3, atol=atol)
    except (TypeError, ValueError):
      same = False
    if not same:
      self.refuse(field, what)

  def check_normalization(self, mean: str, std: str) -> None:
    ours = self._statistics
    for field, values in ((mean, ours.mean), (std, ours.std)):
      numbers = [round(float(x), 4) for x in values]
      self.check(field, values, f"normalizes with {ours.owner}, {numbers}", atol=1e-4)

  def check_known(self, known) -> None:
    for field in self.values:
      if field not in known:
        self.refuse(field, "does not know what that does; remove it if it changes no pixel")


def is_squashed(
  weights: str, path: Path, image_size: int | None = None, statistics: Statistics = OPENAI
) -> bool:
  """Whether images are squashed to a square, not cropped, by the configs beside weights.

  The program whose name for weights the file has wrote the config that counts. With another name
  all that are there count, and must say the same.

  Args:
    weights: for messages.
    path: of the file of weights, or of its folder.
    image_size: the model's; None: not known.
    statistics: the model's.

  Raises:
    ValueError: a config says that images are prepared otherwise than this program does.
  """
  folder = path if path.is_dir() else path.parent
  held = (name for name in WEIGHT_FILES if (folder / name).is_file())
  name = next(held, "") if path.is_dir() else path.name
  known = name in WEIGHT_FILES
  files = sorted(
    _configs(folder), key=lambda config: (config[0] == OPEN_CLIP_FILE) != name.startswith("open_")
  )
  squashed = {
    file: _read(_Fields(weights, file, values, statistics), file, image_size)
    for file, values in (files[:1] if known else files)
  }
  if len({*squashed.values()}) > 1:
    ways = " and ".join(f"{'squashed' if how else 'cropped'} ({f})" for f, how in squashed.items())
    raise ValueError(f"{weights}: its images are {ways}. Remove the file that is of other weights.")
  return any(squashed.values())


def _configs(folder: Path) -> Iterator[tuple[str, Any]]:
  """The names of the files that say something of images, and what."""
  if (folder / OPEN_CLIP_FILE).is_file():
    values = read_json(folder / OPEN_CLIP_FILE).get("preprocess_cfg")
    if values is not None:
      yield OPEN_CLIP_FILE, values
  # transformers prefers the first.
  processor = folder / PROCESSOR_FILE
  nested = read_json(processor).get("image_processor") if processor.is_file() else None
  if nested is not None:
    yield PROCESSOR_FILE, nested
  elif (folder / IMAGES_FILE).is_file():
    yield IMAGES_FILE, read_json(folder / IMAGES_FILE)


def _read(fields: _Fields, file: str, image_size: int | None) -> bool:
  """Whether they squash images; refuses what they do otherwise than this program."""
  return _of_open_clip(fields) if file == OPEN_CLIP_FILE else _of_transformers(fields, image_size)


def _of_open_clip(fields: _Fields) -> bool:
  modes = {"shortest": False, "squash": True}
  known = {
    "resize_mode": tuple(modes),
    "interpolation": ("bicubic", "random"),  # In evaluation the latter is the former.
    "mode": ("RGB",),
  }
  fields.check_known((*known, "mean", "std", *_OPEN_CLIP_INERT))
  for field, values in known.items():
    if fields.values.get(field, values[0]) not in values:
      fields.refuse(field, f"has {' and '.join(map(repr, values))}")
  fields.check_normalization("mean", "std")
  return modes[fields.values.get("resize_mode", "shortest")]


def _of_transformers(fields: _Fields, image_size: int | None) -> bool:
  kind = next((k for k in _INERT[:2] if k in fields.values), None)
  name = str(fields.values[kind]) if kind else "CLIPImageProcessor"
  name = name.removesuffix("Fast").removesuffix("Pil")  # The same by another library.
  if kind and name not in _CLASSES:
    fields.refuse(kind, f"knows {', '.join(_CLASSES)}")
  fields.check_known({*_CLIP, *_INERT})
  fields.values = _CLASSES[name] | fields.values
  for field, what in {
    "do_resize": "resizes images",
    "do_rescale": "divides pixels by 255",
    "do_normalize": "normalizes them",
    "do_convert_rgb": "converts them to RGB",
  }.items():
    if fields.values[field] is not True:
      fields.refuse(field, what)
  if fields.values["do_pad"]:
    fields.refuse("do_pad", "pads no image")
  fields.check("resample", 3, "resizes by 3, bicubic")
  fields.check("rescale_factor", 1 / 255, "divides pixels by 255")
  fields.check_normalization("image_mean", "image_std")
  return _squashes(fields, image_size)


def _squashes(fields: _Fields, image_size: int | None) -> bool:
  """Whether the whole image becomes the square that the model takes; refuses another size."""
  size = fields.values["size"]
  resized = _side(size, bool(fields.values["default_to_square"]))
  if resized is None:
    fields.refuse("size", "needs one number: {'shortest_edge': N}, or a height equal to the width")
  side, squash = resized
  if fields.values["do_center_crop"]:
    if _side(fields.values["crop_size"], True) != (side, True):
      fields.refuse("crop_size", f"crops to the size to which it resized, {size!r}")
  elif not squash:
    fields.refuse("do_center_crop", f"crops a square from {size!r}")
  if image_size not in (None, side):
    fields.refuse("size", f"makes the {image_size} pixels that the model takes")
  return squash


def _side(size: Any, square: bool) -> tuple[int, bool] | None:
  """The side of a size, and whether it is that of a square and not the shorter one; None: neither.

  square: what a number means.
  """
  if isinstance(size, list | tuple) and len(size) == 2:
    size = {"height": size[0], "width": size[1]}
  if not isinstance(size, Mapping):
    return (size, square) if isinstance(size, int) else None
  match {name: side for name, side in size.items() if side is not None}:
    case {"height": int(height), "width": int(width), **rest} if height == width and not rest:
      return height, True
    case {"shortest_edge": int(side), **rest} if not rest:
      return side, False
  return None


def normalize(image: jax.Array, statistics: Statistics = OPENAI) -> jax.Array:
  """Normalizes uint8 [B, H, W, 3] by mean and deviation to float32 [B, H, W, 3]."""
  mean, std = (x.reshape(1, 1, 1, 3) for x in (statistics.mean, statistics.std))
  return (image.astype(jnp.float32) / 255 - mean) / std
