"""Texts or images of an encoder, and pairs that mean the same.

Texts are lines of a file, two sentences in each, separated by a tab. Images are files of a folder;
a pair is two crops of one.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
from tokenizers import Tokenizer

TOKENS = 32
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def texts(model: Path, file: Path, count: int):
  """(all sentences, the pairs' first ones, their second ones), each a dict of ids and mask."""
  pairs = [line.split("\t") for line in file.read_text().splitlines()[:count]]
  for number, pair in enumerate(pairs, 1):
    if len(pair) != 2:
      raise ValueError(f"{file}, line {number}, must have two sentences separated by a tab.")
  tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
  tokenizer.enable_truncation(TOKENS)
  tokenizer.enable_padding()
  encoded = tokenizer.encode_batch(
    [sentence for pair in zip(*pairs, strict=True) for sentence in pair]
  )
  ids = jnp.array([each.ids for each in encoded])
  mask = jnp.array([each.attention_mask for each in encoded], bool)
  both = {"ids": ids, "mask": mask}
  first, second = ({k: x[part] for k, x in both.items()} for part in _halves(len(pairs)))
  return both, first, second


def _halves(n: int):
  return slice(0, n), slice(n, None)


def images(folder: Path, count: int, size: int, seed: int = 0):
  """(whole images, the pairs' first crops, their second ones), each [count, size, size, 3]."""
  random = np.random.default_rng(seed)
  paths = [path for path in sorted(folder.iterdir()) if path.suffix in (".jpg", ".jpeg", ".png")]
  pictures = [Image.open(path).convert("RGB") for path in paths[:count]]
  views = [pictures, *([_crop(picture, random) for picture in pictures] for _ in range(2))]
  return tuple(
    jnp.asarray(np.stack([_pixels(picture, size) for picture in view])) for view in views
  )


def _crop(picture: Image.Image, random: np.random.Generator) -> Image.Image:
  """A square of half the width or more, perhaps mirrored."""
  side = int(min(picture.size) * random.uniform(0.5, 1))
  x, y = (int(random.integers(0, length - side + 1)) for length in picture.size)
  picture = picture.crop((x, y, x + side, y + side))
  return picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else picture


def _pixels(picture: Image.Image, size: int) -> np.ndarray:
  picture = picture.resize((size, size), Image.Resampling.BICUBIC)
  return ((np.asarray(picture) / 255 - MEAN) / STD).astype(np.float32)


def split(tree, size: int) -> list:
  """Whole batches of a tree of arrays, in order."""
  count = len(jax.tree.leaves(tree)[0]) // size
  return [jax.tree.map(lambda x, i=i: x[i * size : (i + 1) * size], tree) for i in range(count)]
