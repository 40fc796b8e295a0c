"""ViT-H/14: configs/clip_vit_b32.py at another size.

  python -m train.main --config=configs/clip_vit_h14.py --config.data.root=path/to/laion2b \\
      --workdir=runs/clip_vit_h14

The paper trained it in 16 bits on 64 A100s, 256 images each, to 57.6 % zero-shot accuracy on
ImageNet; with update clipping b2 = 0.99 was best. The state is split over 8 GPUs (mesh.fsdp).
"""

from configs import clip_vit_b32
from train.config import Config


def get_config() -> Config:
  config = clip_vit_b32.get_config()
  config.model.size = "H/14"
  config.mesh.fsdp = 8
  config.optimizer.b2 = 0.99
  return config
