"""Fine-tunes a checkpoint of configs/flickr8k.py by adapters of rank 8 on its kernels in int8.

  python -m train.export --workdir=runs/flickr8k --format=open_clip
  python -m train.main --config=configs/flickr8k_lora.py \\
      --config.data.root=path/to/flickr8k --config.init=runs/flickr8k/open_clip \\
      --config.data.tokenizer=runs/flickr8k/tokenizer.json --workdir=runs/flickr8k_lora

As configs/flickr8k_finetune.py, but both towers are frozen, in 8 bits, and only adapters learn (Hu
et al. 2021, https://arxiv.org/abs/2106.09685). Not measured yet.
"""

from configs import flickr8k_finetune
from train.config import Config, LoraConfig


def get_config() -> Config:
  config = flickr8k_finetune.get_config()
  config.freeze = ()
  config.lora = LoraConfig(rank=8)
  config.optimizer.learning_rate = 1e-3  # Adapters take ten times that of all parameters.
  config.optimizer.learning_rate_scale = ()  # Embeddings are frozen.
  config.optimizer.weight_decay = 0.0
  return config
