"""Makes docs/images/scenes.png: 24 scenes of 64 pixels with their captions.

python docs/plots/scenes.py
"""

import io
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from PIL import Image

from train.config import Config, DataConfig, ModelConfig
from train.data.source import open_source

IMAGE = Path(__file__).parent.parent / "images/scenes.png"


def main():
  source = open_source(Config(model=ModelConfig(size=""), data=DataConfig(name="scenes")))
  batch = next(source.eval_batches("scenes", image_size=64, batch_size=24))
  figure, axes = plt.subplots(4, 6, figsize=(10.5, 8.6))
  for axis, pixels, (text,) in zip(axes.flat, batch["image"], batch["captions"], strict=True):
    axis.imshow(pixels, interpolation="nearest")
    axis.set_title(textwrap.fill(text, 28), fontsize=7)
    axis.axis("off")
  figure.subplots_adjust(0.01, 0.01, 0.99, 0.92, 0.08, 0.42)
  drawn = io.BytesIO()
  figure.savefig(drawn, dpi=75)
  # 128 colours take less than half of the bytes.
  Image.open(drawn).convert("RGB").quantize(128).save(IMAGE, optimize=True)
  print(f"wrote {IMAGE}, {IMAGE.stat().st_size // 1024} KB")


if __name__ == "__main__":
  main()
