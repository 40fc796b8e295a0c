"""Images beside texts: how well each text fits each image, for a CLIP that you trained.

  python examples/embed.py runs/quickstart cat.jpg dog.png -- "a red circle" "a blue ring"

Run it from the root of this repository. It loads the newest checkpoint, and prints the cosine of
each image with each text; the largest cosine is the best fit.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # train/ is not installed.

from train.inference import load


def main(workdir, *arguments):
  split = arguments.index("--")
  images, texts = arguments[:split], arguments[split + 1 :]
  model = load(workdir)
  similarities = model.embed_images(images) @ model.embed_texts(texts).T
  print(f"cosines, after step {model.step}")
  for image, row in zip(images, similarities, strict=True):
    print(image)
    for text, cosine in sorted(zip(texts, row, strict=True), key=lambda pair: -pair[1]):
      print(f"  {cosine:6.3f}  {text}")


if __name__ == "__main__":
  if "--" not in sys.argv[3:-1]:
    sys.exit(__doc__)
  main(*sys.argv[1:])
