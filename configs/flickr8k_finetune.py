"""Fine-tunes a checkpoint of configs/flickr8k.py on the same photos, with the image tower locked.

  python -m train.export --workdir=runs/flickr8k --format=open_clip
  python -m train.main --config=configs/flickr8k_finetune.py \\
      --config.data.root=path/to/flickr8k --config.init=runs/flickr8k/open_clip \\
      --config.data.tokenizer=runs/flickr8k/tokenizer.json --workdir=runs/flickr8k_finetune

The weights come from the exported folder. The model has the sizes of configs/flickr8k.py, which the
folder must have too, and the tokenizer must be the one that it was trained with. Only the text
tower and the logit scale learn (Zhai et al. 2022, https://arxiv.org/abs/2111.07991).
"""

from configs import flickr8k
from train.config import Config, OptimizerConfig


def get_config() -> Config:
  config = flickr8k.get_config()
  config.freeze = ("image/.*",)
  config.optimizer = OptimizerConfig(
    learning_rate=1e-4,  # a tenth of that from scratch
    warmup_steps=20,
    b2=0.98,
    weight_decay=0.1,
    learning_rate_scale=("text/token_embedding/.*=0.1",),
  )
  config.steps = 300
  config.eval_every = 100
  config.checkpoint_every = 100
  return config
