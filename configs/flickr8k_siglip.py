"""configs/flickr8k.py with a tiny SigLIP in place of the CLIP: its towers, rows and loss.

  python -m train.main --config=configs/flickr8k_siglip.py \\
      --config.data.root=path/to/flickr8k --workdir=runs/flickr8k_siglip

The text tower reads the last position, sees in both directions, and has a tokenizer that is trained
on the captions. It takes as long as configs/flickr8k.py.
"""

from configs import flickr8k
from train.config import Config


def get_config() -> Config:
  config = flickr8k.get_config()
  config.model.size = "tiny-siglip"
  config.loss = "siglip"
  return config
