"""CLIP ViT-S/8 on scenes that the GPU draws: the trainer at scale, without data.

  python -m train.main --config=configs/scenes_s8.py --workdir=runs/scenes_s8

Scenes of 64 pixels show 1 to 5 objects of 32 shapes, 20 colours and 8 textures (docs/scenes.md).
Evaluation scores 5,120 classes on the triples that training shows and on the tenth that it does
not, and recall on 2,000 scenes. A larger model needs only another size:
--config.model.size=B/16.
"""

from train.config import Config, DataConfig, ModelConfig, OptimizerConfig
from train.data.scenes.words import TEMPLATES


def get_config() -> Config:
  return Config(
    model=ModelConfig(
      size="S/16",
      image_size=64,
      patch_size=8,
      context_length=32,  # captions have at most 30 ids
      patch_dropout=0.5,
    ),
    data=DataConfig(
      name="scenes",
      eval_split="scenes,classes[:4000],heldout[:2000]",
      label_key="label",
      templates=TEMPLATES,
      tokenizer="words",
    ),
    optimizer=OptimizerConfig(
      learning_rate=2e-3,
      warmup_steps=2000,  # a quarter of the steps
      b2=0.98,
      weight_decay=0.2,
    ),
    batch_size=1024,
    steps=8000,
    eval_every=2000,
    checkpoint_every=2000,
    eval_batch_size=1024,
  )
