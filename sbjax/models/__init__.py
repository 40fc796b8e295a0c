"""Models that train in 8 bits."""

from sbjax.models.clip import CLIP
from sbjax.models.sizes import SIZES, CLIPConfig, TextConfig, VisionConfig

__all__ = ["CLIP", "SIZES", "CLIPConfig", "TextConfig", "VisionConfig"]
