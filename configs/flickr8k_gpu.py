"""configs/flickr8k.py with a larger model and smaller patches; takes five minutes on a GPU.

  python -m train.main --config=configs/flickr8k_gpu.py --config.data.root=path/to/flickr8k \\
      --workdir=runs/flickr8k_gpu
"""

from configs import flickr8k
from train.config import Config


def get_config() -> Config:
  config = flickr8k.get_config()
  config.model.size = "Ti/16"
  config.model.patch_size = 8
  config.model.patch_dropout = 0.5
  config.model.dtype = "bfloat16"
  config.model.scan = True
  config.data.crop_scale = (0.3, 1.0)
  config.data.workers = 8
  config.data.prefetch = 16
  config.optimizer.learning_rate = 5e-4
  config.optimizer.weight_decay = 1.0
  config.steps = 4000
  config.log_every = 200
  return config
