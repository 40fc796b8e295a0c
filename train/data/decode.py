"""Decodes images for CLIP: of limited size, upright, 8 bits a channel, on white.

The size is read from the header and checked before any pixel is decoded. Then the EXIF orientation
is applied, transparent pixels are blended with white, and 16-bit grey is divided by 256.
"""

import io
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image, features

from train.config import DataConfig

# Pillow's other formats are rare, and EPS starts a program.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
if features.check("avif"):  # Pillow from 11.3 on, if it was built with libavif
  _FORMATS += ("AVIF",)
Image.MAX_IMAGE_PIXELS = None  # `upright` checks the config's limit instead.

_T = Image.Transpose
_UPRIGHT = {
  2: _T.FLIP_LEFT_RIGHT, 3: _T.ROTATE_180, 4: _T.FLIP_TOP_BOTTOM, 5: _T.TRANSPOSE,
  6: _T.ROTATE_270, 7: _T.TRANSVERSE, 8: _T.ROTATE_90,
}  # fmt: skip


class Limits(NamedTuple):
  """The limits on data; DataConfig explains them."""

  member_bytes: int = DataConfig.max_member_bytes
  image_pixels: int = DataConfig.max_image_pixels
  aspect_ratio: float = DataConfig.max_aspect_ratio
  label: int = DataConfig.max_label
  given_by: str = "data."  # what stands before a limit's name: fields of a config, or flags

  @classmethod
  def of(cls, config: DataConfig) -> "Limits":
    return cls(
      config.max_member_bytes, config.max_image_pixels, config.max_aspect_ratio, config.max_label
    )


DEFAULT_LIMITS = Limits()


class BeyondLimits(ValueError):
  """An image has more pixels or is thinner than a limit, which the message names."""


def check_size(width: int, height: int, limits: Limits) -> None:
  """Raises BeyondLimits for a size beyond the limits."""
  if width * height > limits.image_pixels:
    raise BeyondLimits(f"more pixels than {limits.given_by}max_image_pixels={limits.image_pixels}")
  if max(width, height) > limits.aspect_ratio * min(width, height):
    ratio = f"{limits.given_by}max_aspect_ratio={limits.aspect_ratio:g}"
    raise BeyondLimits(f"a ratio of sides above {ratio}")


def upright(content: bytes, limits: Limits) -> Image.Image:
  """The RGB image of an encoded one, turned as its metadata say.

  Raises:
    BeyondLimits: its size is beyond the limits.
    Exception: it cannot be decoded. Each of Pillow's decoders has its own errors.
  """
  image = _load(content, limits)
  orientation = _orientation(image)
  if image.mode.startswith("I"):  # 16-bit grey; older versions of Pillow open it in 32 bits.
    image = Image.fromarray((np.clip(np.asarray(image), 0, 65535) >> 8).astype(np.uint8))
  if image.has_transparency_data:
    image = image.convert("RGBA")
    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
  image = image.convert("RGB")
  return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image


def plainly(content: bytes, limits: Limits) -> Image.Image:
  """As `upright`, with the pixels that open_clip's and CLIP_benchmark's readers see.

  They convert to RGB and no more: EXIF turns nothing, transparency shows what is stored below it,
  and 16-bit grey is cut at 255.
  """
  return _load(content, limits).convert("RGB")


def _load(content: bytes, limits: Limits) -> Image.Image:
  image = Image.open(io.BytesIO(content), formats=_FORMATS)
  check_size(*image.size, limits)
  image.load()
  return image


def is_upright(content: bytes) -> bool:
  """Whether a JPEG's metadata leave its pixels where they are."""
  if b"Exif\0\0" not in content and b"tiff:Orientation" not in content:
    return True
  try:
    return _orientation(Image.open(io.BytesIO(content), formats=["JPEG"])) not in _UPRIGHT
  except Exception:  # `upright` explains why.
    return False


def _orientation(image: Image.Image) -> int:
  try:
    return image.getexif().get(ExifTags.Base.Orientation, 1)
  except Exception:  # Broken metadata raise many kinds of errors; the pixels may be whole.
    return 1
