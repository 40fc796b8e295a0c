"""A tiny CLIP in int8 on drawn shapes: trains in minutes on a laptop's CPU, without a download.

  python -m train.main --config=configs/quickstart.py --workdir=runs/quickstart

On 2 cores it takes 4 to 8 minutes and reaches at least 90 % zero-shot accuracy on held-out images
of 48 classes, "red circle" to "pink ring". --config.model.recipe=full trains without int8.
"""

from train.config import Config, DataConfig, ModelConfig, OptimizerConfig


def get_config() -> Config:
  return Config(
    model=ModelConfig(
      size="tiny",
      recipe="switchback",
      dtype="float32",  # most CPUs emulate bfloat16
      scan=False,  # unrolled layers take 15 % less time on a CPU
    ),
    data=DataConfig(
      name="shapes",
      eval_split="test",
      label_key="label",
      templates=("a {}", "a picture of a {}", "there is a {}"),
      crop_scale=(1.0, 1.0),  # no crops: the drawings vary enough
    ),
    optimizer=OptimizerConfig(
      learning_rate=1e-3,
      warmup_steps=300,
      b2=0.98,
      weight_decay=0.1,
    ),
    batch_size=64,
    steps=2000,
    log_every=100,
    eval_every=1000,
    checkpoint_every=1000,
  )
