"""Turns an example's image into pixels for CLIP on the host: decode, crop, resize.

Training reads the image's size from its header and draws the crop before it decodes. Grey and RGB
JPEGs take a fast path. libjpeg-turbo (simplejpeg) decodes them to the same bits as Pillow. A
resizer with vector instructions (cykooz_resizer) computes the same antialiased bicubic filter. Its
pixels differ from Pillow's crop and resize by 0.1 to 0.25 of 255 levels on average, by one at the
99th percentile, and by 17 at most. The largest differences are at hard edges, where both resizers
clip overshoots between their two passes. Both are 0.25 to 0.3 levels from the exact sum, mostly by
rounding. Pillow handles all other images, such as JPEGs that EXIF rotates, and evaluation.

If a crop has at least four times the target's pixels a side, the JPEG is decoded at 1/2, 1/4 or 1/8
of its size from the lower frequencies of its blocks. The reduced crop has at least twice the
target's pixels a side. This takes 0.3 to 0.7 of the time and changes pixels by 0.3 to 1 levels on
average (28 at most). Reducing further, to between one and two times the target's pixels, would
change them by 1 to 4 levels (67).
"""

import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import cykooz_resizer
import numpy as np
import simplejpeg
from PIL import Image

from train.data import decode
from train.data.decode import Limits

_BICUBIC = cykooz_resizer.ResizeAlg.convolution(cykooz_resizer.FilterType.catmull_rom)
_RGB = cykooz_resizer.PixelType.U8x3
_THIN = 8  # Evaluation crops images to this ratio of sides before it resizes them.


@dataclasses.dataclass(frozen=True)
class RandomCrop:
  """A random crop of the image, uint8 [image_size, image_size, 3], and one of the captions."""

  image_size: int
  crop_scale: tuple[float, float]
  flip: bool
  limits: Limits = decode.DEFAULT_LIMITS

  def __call__(self, example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    # The random draws and their order do not depend on how the image is decoded.
    jpeg_size = _jpeg_size(example["image"], self.limits)
    image = None if jpeg_size else _decode(example, self.limits)
    box = _random_box(*(jpeg_size or image.size), self.crop_scale, rng)
    mirror = self.flip and rng.random() < 0.5
    caption = example["captions"][rng.integers(len(example["captions"]))]
    pixels = _crop_jpeg(example["image"], jpeg_size, box, self.image_size) if jpeg_size else None
    if pixels is None:
      image = (image or _decode(example, self.limits)).crop(box)
      pixels = np.asarray(image.resize((self.image_size,) * 2, Image.Resampling.BICUBIC))
    return {"image": pixels[:, ::-1] if mirror else pixels, "caption": caption}


@dataclasses.dataclass(frozen=True)
class CentreCrop:
  """Scales the shorter side to the size and crops the centre: open_clip's evaluation transform."""

  image_size: int
  limits: Limits = decode.DEFAULT_LIMITS
  decode: Callable = decode.upright

  def __call__(self, example: dict[str, Any]) -> dict[str, Any]:
    image, size = _decode(example, self.limits, self.decode), self.image_size
    shorter = min(image.size)
    if max(image.size) > _THIN * shorter:  # Resized whole, it could take gigabytes.
      left, top = (max(0, side - _THIN * shorter) // 2 for side in image.size)
      image = image.crop((left, top, image.width - left, image.height - top))
    width, height = (size * side // shorter for side in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return _evaluated(example, image.crop((left, top, left + size, top + size)))


@dataclasses.dataclass(frozen=True)
class Squash:
  """Resizes the whole image to a square: open_clip's transform with resize_mode "squash"."""

  image_size: int
  limits: Limits = decode.DEFAULT_LIMITS
  decode: Callable = decode.upright

  def __call__(self, example: dict[str, Any]) -> dict[str, Any]:
    image = _decode(example, self.limits, self.decode)
    return _evaluated(example, image.resize((self.image_size,) * 2, Image.Resampling.BICUBIC))


def _evaluated(example: dict[str, Any], image: Image.Image) -> dict[str, Any]:
  return {"image": np.asarray(image), "captions": example["captions"], "label": example["label"]}


def _decode(
  example: dict[str, Any], limits: Limits, decode: Callable = decode.upright
) -> Image.Image:
  try:
    return decode(example["image"], limits)
  except Exception as error:  # Each of Pillow's decoders has its own errors.
    raise ValueError(f"The image of {example['where']} cannot be decoded: {error}") from error


def _random_box(
  width: int, height: int, scale: Sequence[float], rng: np.random.Generator
) -> tuple[int, int, int, int]:
  """(left, top, right, bottom) with a share of the area in `scale` and a ratio of 3/4 to 4/3.

  As torchvision's RandomResizedCrop: ten attempts, then the largest allowed box at the centre.
  """
  for _ in range(10):
    area = width * height * rng.uniform(*scale)
    ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
    w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
    if 0 < w <= width and 0 < h <= height:
      left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
      return left, top, left + w, top + h
  w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
  left, top = (width - w) // 2, (height - h) // 2
  return left, top, left + w, top + h


def _jpeg_size(image: bytes, limits: Limits) -> tuple[int, int] | None:
  """(width, height) of an upright grey or RGB JPEG; None for any other image."""
  if not image.startswith(b"\xff\xd8"):
    return None
  try:
    height, width, colours, _ = simplejpeg.decode_jpeg_header(image)
    decode.check_size(width, height, limits)
  except ValueError:
    return None
  usual = colours in ("YCbCr", "Gray", "RGB") and decode.is_upright(image)
  return (width, height) if usual else None


def _crop_jpeg(
  image: bytes, full: tuple[int, int], box: tuple[int, int, int, int], size: int
) -> np.ndarray | None:
  """`box` of a JPEG of `full` (width, height) as [size, size, 3]; None if the JPEG is damaged."""
  left, top, right, bottom = box
  reduced = _reduction(right - left, bottom - top, size)
  width, height = (math.ceil(side / reduced) for side in full)
  try:
    pixels = simplejpeg.decode_jpeg(image, "RGB", min_width=width, min_height=height)
  except ValueError:
    return None  # Pillow decodes some of these, and reports why it cannot decode the others.
  # Like Pillow's crop, this keeps pixels outside the box out of the filter.
  left, top, right, bottom = (side / reduced for side in box)
  x, y = math.floor(left), math.floor(top)
  pixels = pixels[y : math.ceil(bottom), x : math.ceil(right)]
  source = cykooz_resizer.ImageData(*pixels.shape[1::-1], _RGB, pixels.tobytes())
  target = cykooz_resizer.ImageData(size, size, _RGB)
  crop = cykooz_resizer.CropBox(left - x, top - y, right - left, bottom - top)
  options = cykooz_resizer.ResizeOptions(_BICUBIC, use_alpha=False, crop_box=crop)
  _LOCAL.resizer.resize(source, target, options)
  return np.frombuffer(target.get_buffer(), np.uint8).reshape(size, size, 3)


def _reduction(width: int, height: int, size: int) -> int:
  """The factor by which to reduce a crop of width x height while decoding: 1, 2, 4 or 8."""
  return max((n for n in (2, 4, 8) if min(width, height) >= 2 * size * n), default=1)


class _Local(threading.local):
  """One resizer for each thread, because a resizer serves one call at a time."""

  def __init__(self):
    self.resizer = cykooz_resizer.Resizer()


_LOCAL = _Local()
