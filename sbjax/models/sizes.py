"""The sizes of CLIP models: two towers and the width of their shared embedding space."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
  image_size: int = 224
  patch_size: int
  width: int
  layers: int
  heads: int
  mlp_ratio: float = 4.0

  def __post_init__(self):
    _check_divides("width", self.width, "heads", self.heads)
    _check_divides("image_size", self.image_size, "patch_size", self.patch_size)

  @property
  def patches(self) -> int:
    return (self.image_size // self.patch_size) ** 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig:
  context_length: int = 77
  vocab_size: int = 49408
  width: int
  layers: int
  heads: int
  mlp_ratio: float = 4.0
  eot_id: int = 49407

  def __post_init__(self):
    _check_divides("width", self.width, "heads", self.heads)
    if not 0 <= self.eot_id < self.vocab_size:
      raise ValueError(f"eot_id={self.eot_id} must be below vocab_size={self.vocab_size}.")


@dataclasses.dataclass(frozen=True)
class CLIPConfig:
  embed_dim: int
  vision: VisionConfig
  text: TextConfig


def _check_divides(name: str, value: int, divisor_name: str, divisor: int) -> None:
  if value % divisor:
    raise ValueError(f"{name}={value} must be a multiple of {divisor_name}={divisor}.")


# "tiny" and "Ti/16" are ours, for small machines; all others are open_clip's.
SIZES = {
  "tiny": CLIPConfig(
    64,
    VisionConfig(image_size=32, patch_size=8, width=128, layers=3, heads=4),
    TextConfig(context_length=24, vocab_size=1024, width=64, layers=2, heads=2, eot_id=1),
  ),
  "Ti/16": CLIPConfig(
    192,
    VisionConfig(patch_size=16, width=192, layers=12, heads=3),
    TextConfig(width=192, layers=6, heads=3),
  ),
  "S/16": CLIPConfig(
    384,
    VisionConfig(patch_size=16, width=384, layers=12, heads=6),
    TextConfig(width=384, layers=12, heads=6),
  ),
  "B/32": CLIPConfig(
    512,
    VisionConfig(patch_size=32, width=768, layers=12, heads=12),
    TextConfig(width=512, layers=12, heads=8),
  ),
  "B/16": CLIPConfig(
    512,
    VisionConfig(patch_size=16, width=768, layers=12, heads=12),
    TextConfig(width=512, layers=12, heads=8),
  ),
  "L/14": CLIPConfig(
    768,
    VisionConfig(patch_size=14, width=1024, layers=24, heads=16),
    TextConfig(width=768, layers=12, heads=12),
  ),
  "H/14": CLIPConfig(
    1024,
    VisionConfig(patch_size=14, width=1280, layers=32, heads=16),
    TextConfig(width=1024, layers=24, heads=16),
  ),
  "bigG/14": CLIPConfig(
    1280,
    VisionConfig(patch_size=14, width=1664, layers=48, heads=16, mlp_ratio=4.9231),
    TextConfig(width=1280, layers=32, heads=20),
  ),
}
