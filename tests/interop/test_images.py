"""Images have the pixels that open_clip and transformers make of them."""

import io

import numpy as np
import pytest
from open_clip_case import import_open_clip
from PIL import Image

from train.data.augment import CentreCrop, Squash
from train.data.preprocessing import is_squashed, normalize


def encoded(size, kind):
  """Noise of that width and height."""
  file = io.BytesIO()
  pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
  Image.fromarray(pixels).save(file, kind)
  return file.getvalue()


def pixels_of(crop, image):
  return crop({"where": "here", "image": image, "captions": [], "label": -1})["image"]


@pytest.mark.parametrize("mode", ["shortest", "squash"])
@pytest.mark.parametrize("size", [(37, 53), (64, 48), (20, 90), (24, 24), (29, 24), (24, 27)])
def test_evaluation_images_equal_open_clip_s(size, mode):
  import_open_clip()
  import torch
  from open_clip.transform import image_transform

  crop = {"shortest": CentreCrop, "squash": Squash}[mode](24)
  reference = image_transform(24, False, mean=(0, 0, 0), std=(1, 1, 1), resize_mode=mode)
  for kind in ("png", "jpeg"):
    image = encoded(size, kind)
    theirs = reference(Image.open(io.BytesIO(image)).convert("RGB"))
    theirs = (theirs * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(pixels_of(crop, image), theirs)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("size", [(61, 44), (44, 61), (150, 37), (32, 32)])
def test_pixels_equal_transformers_s_processor(tmp_path, size, square):
  """Also those of a processor's own files, as it writes them today."""
  import_open_clip()
  transformers = pytest.importorskip("transformers")
  sides = {"height": 32, "width": 32} if square else {"shortest_edge": 32}
  processor = transformers.CLIPImageProcessorPil(
    size=sides, crop_size=32, do_center_crop=not square
  )
  processor.save_pretrained(tmp_path)
  assert is_squashed("clip.pt", tmp_path / "clip.pt", 32) is square
  image = encoded(size, "png")
  pixels = pixels_of((Squash if square else CentreCrop)(32), image)
  theirs = processor(Image.open(io.BytesIO(image)), return_tensors="np")["pixel_values"][0]
  ours = np.asarray(normalize(pixels[None]))[0]
  np.testing.assert_allclose(ours, theirs.transpose(1, 2, 0), atol=0.02)
