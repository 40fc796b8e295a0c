"""SigLIP ViT-B/16 in int8: configs/clip_vit_b32.py with the model and loss of Zhai et al. 2023.

  python -m train.main --config=configs/siglip_b16.py --config.data.root=path/to/laion2b \\
      --config.data.tokenizer=path/to/tokenizer.json --workdir=runs/siglip_b16

data.tokenizer is the tokenizer.json or spiece.model of published SigLIP weights, such as
timm/ViT-B-16-SigLIP's. --config.init=FOLDER begins from such weights. open_clip's names of the
other sizes, up to ViT-SO400M-14-SigLIP, are values of --config.model.size. This run was not made.
"""

from configs import clip_vit_b32
from train.config import Config


def get_config() -> Config:
  config = clip_vit_b32.get_config()
  config.model.size = "ViT-B-16-SigLIP"  # 64 tokens; needs open_clip installed, for its table
  config.model.patch_dropout = 0.0
  config.loss = "siglip"
  config.data.tokenizer = ""
  config.optimizer.learning_rate = 1e-3
  config.optimizer.b2 = 0.95  # the paper's, for stability at its batch sizes
  return config
