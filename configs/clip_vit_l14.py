"""ViT-L/14: configs/clip_vit_b32.py at another size.

  python -m train.main --config=configs/clip_vit_l14.py --config.data.root=path/to/laion2b \\
      --workdir=runs/clip_vit_l14

The paper trained it in 16 bits on 64 A100s, 256 images each, to 55.1 % zero-shot accuracy on
ImageNet.
"""

from configs import clip_vit_b32
from train.config import Config


def get_config() -> Config:
  config = clip_vit_b32.get_config()
  config.model.size = "L/14"
  return config
