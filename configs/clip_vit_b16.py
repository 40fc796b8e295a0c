"""ViT-B/16: configs/clip_vit_b32.py at another size.

  python -m train.main --config=configs/clip_vit_b16.py --config.data.root=path/to/laion2b \\
      --workdir=runs/clip_vit_b16

The paper timed this size end to end: SwitchBack was not faster than PyTorch's linear layers.
"""

from configs import clip_vit_b32
from train.config import Config


def get_config() -> Config:
  config = clip_vit_b32.get_config()
  config.model.size = "B/16"
  return config
