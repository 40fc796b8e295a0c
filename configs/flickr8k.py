"""CLIP from scratch on 6,000 photos with 5 captions each, from webdataset shards.

  python -m train.main --config=configs/flickr8k.py --config.data.root=path/to/flickr8k \\
      --workdir=runs/flickr8k

data.root is the folder with flickr8k-train-*.tar.gz and flickr8k-test-*.tar.gz (96 px JPEGs with
captions). It takes up to 20 minutes on 2 CPU cores; docs/performance.md has its accuracy.
"""

from train.config import Config, DataConfig, ModelConfig, OptimizerConfig


def get_config() -> Config:
  return Config(
    model=ModelConfig(
      size="tiny",
      image_size=96,
      patch_size=16,
      context_length=32,  # captions have 12 words on average
      recipe="switchback",
      dtype="float32",
      scan=False,  # unrolled layers take 15 % less time on a CPU
    ),
    data=DataConfig(
      name="flickr8k",
      train_shards="flickr8k-train-*.tar.gz",
      eval_shards="flickr8k-test-*.tar.gz",
      eval_split="eval",
      tokenizer_vocab_size=4096,
      crop_scale=(0.4, 1.0),  # the paper's 0.9 gives too little variety with so few photos
      flip=True,
    ),
    optimizer=OptimizerConfig(
      learning_rate=1e-3,
      warmup_steps=100,
      b2=0.98,
      weight_decay=0.5,
    ),
    batch_size=128,
    steps=1500,
    log_every=100,
    eval_every=500,
    checkpoint_every=500,
  )
