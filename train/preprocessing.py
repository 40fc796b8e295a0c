"""How images are prepared for published weights, as a config beside the weights says.

open_clip keeps it in open_clip_config.json, and transformers in preprocessor_config.json.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sbjax.models.config_files import OPEN_CLIP_FILE, read_json
from train.images import MEAN, STD

IMAGES_FILE = "preprocessor_config.json"  # of transformers


def _configs(folder: Path) -> Iterator[tuple[str, dict]]:
  """The names of the files that are there, with what each says of images."""
  for file in (OPEN_CLIP_FILE, IMAGES_FILE):
    if (folder / file).is_file():
      values = read_json(folder / file)
      yield file, values.get("preprocess_cfg") or {} if file == OPEN_CLIP_FILE else values


def check_normalization(weights: str, folder: Path) -> None:
  """Raises a ValueError if a config beside the weights has another mean or std of images."""
  for file, values in _configs(folder):
    fields = ("mean", "std") if file == OPEN_CLIP_FILE else ("image_mean", "image_std")
    for field, ours in zip(fields, (MEAN, STD), strict=True):
      theirs = values.get(field)
      if theirs is not None and (
        np.shape(theirs) != (3,) or not np.allclose(theirs, ours, atol=1e-4)
      ):
        raise ValueError(
          f"{weights}: its images have {field}={theirs} ({file}), and this program normalizes with"
          f" OpenAI's, {[round(float(x), 4) for x in ours]}."
        )


def is_squashed(weights: str, folder: Path) -> bool:
  """Whether a config beside the weights says that images are squashed to a square, not cropped.

  Raises:
    ValueError: it says that they are padded to a square.
  """
  for file, values in _configs(folder):
    if file == OPEN_CLIP_FILE:
      mode = values.get("resize_mode") or "shortest"
      if mode not in ("shortest", "squash"):
        raise ValueError(
          f"{weights}: its images have resize_mode={mode!r} ({file}), and this program has"
          " 'shortest' and 'squash'."
        )
      return mode == "squash"
    size = values.get("size")
    if size:  # A number, or {"shortest_edge": 224}: the shorter side.
      return isinstance(size, dict) and "height" in size
  return False
