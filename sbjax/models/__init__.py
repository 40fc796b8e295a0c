"""Models that train in 8 bits."""

from sbjax.models.clip import CLIP
from sbjax.models.sizes import SIZES, CLIPConfig, TextConfig, VisionConfig
from sbjax.models.transformer import BlockOptions

__all__ = ["CLIP", "SIZES", "BlockOptions", "CLIPConfig", "TextConfig", "VisionConfig"]
