"""A tiny CLIP on scenes that are drawn as it trains: for CPUs, without a download or a disk.

  python -m train.main --config=configs/scenes_tiny.py --workdir=runs/scenes_tiny

"scenes/small" has one or two objects of 8 shapes, 10 colours and 4 textures: 320 classes, of which
a tenth is held out (docs/scenes.md).
"""

from train.config import Config, DataConfig, ModelConfig, OptimizerConfig
from train.data.scenes.words import TEMPLATES


def get_config() -> Config:
  return Config(
    model=ModelConfig(
      size="tiny",
      context_length=32,  # captions have at most 30 ids
      recipe="switchback",
      dtype="float32",  # most CPUs emulate bfloat16
      scan=False,  # unrolled layers take 15 % less time on a CPU
    ),
    data=DataConfig(
      name="scenes/small",
      eval_split="scenes[:500],classes[:1000],heldout[:500]",
      label_key="label",
      templates=TEMPLATES[:2],
      tokenizer="words",
    ),
    optimizer=OptimizerConfig(
      learning_rate=1e-3,
      warmup_steps=200,
      b2=0.98,
      weight_decay=0.1,
    ),
    batch_size=64,
    steps=2000,
    log_every=100,
    eval_every=1000,
    checkpoint_every=1000,
  )
