"""ViT-B/32 in int8, set up as in Wortsman et al. 2023 (https://arxiv.org/abs/2304.13013).

  python -m train.main --config=configs/clip_vit_b32.py --config.data.root=path/to/laion2b \\
      --workdir=runs/clip_vit_b32

The paper trained it in 16 bits on 16 A100s, 1,024 images each, to 41.7 % zero-shot accuracy on
ImageNet. data.root is the folder of webdataset shards, and data.train_shards a pattern of names or
of URLs, such as s3://bucket/{00000..23295}.tar. They are read where they are.
"""

from train.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig


def get_config() -> Config:
  return Config(
    model=ModelConfig(
      size="B/32",
      recipe="switchback",
      patch_dropout=0.5,
    ),
    data=DataConfig(
      name="laion2b_en",
      stream=True,
      train_shards="train-*.tar",
      eval_shards="val-*.tar",
      eval_split="eval",
      tokenizer="clip",
      workers=16,
    ),
    optimizer=OptimizerConfig(
      name="stable_adamw",
      learning_rate=2e-3,
      warmup_steps=5000,
      b1=0.9,
      b2=0.98,  # 0.99 did best with update clipping on ViT-H
      eps=1e-6,
      weight_decay=0.2,
    ),
    mesh=MeshConfig(data=-1, fsdp=1),
    batch_size=16384,
    steps=20_000,
    log_every=50,
    eval_every=1000,
    checkpoint_every=1000,
  )
