"""What a config beside published weights says of their images is done, or refused by name."""

import json

import pytest

from sbjax.models.sizes import SIZES
from train.data.preprocessing import MEAN, STD, is_squashed, statistics_of

OPEN_CLIP, HF, HF5 = "open_clip_config.json", "preprocessor_config.json", "processor_config.json"
SQUARE, SHORTEST = {"height": 224, "width": 224}, {"shortest_edge": 224}
# What transformers' CLIPImageProcessor writes.
FULL = {
  "image_processor_type": "CLIPImageProcessor",
  **dict.fromkeys(("do_resize", "do_center_crop", "do_rescale", "do_normalize"), True),
  "do_convert_rgb": True,
  "do_pad": None,
  "size": SHORTEST | {"longest_edge": None},
  "crop_size": SQUARE,
  "resample": 3,
  "rescale_factor": 0.00392156862745098,
  "image_mean": MEAN.tolist(),
  "image_std": STD.tolist(),
  "default_to_square": False,
  "data_format": "channels_first",
}


def squashed(folder, files, weights="clip.pt", image_size=224, **options):
  for name, values in files.items():
    (folder / name).write_text(json.dumps(values))
  return is_squashed("clip.pt", folder / weights, image_size, **options)


def open_clip(**values):
  return {OPEN_CLIP: {"preprocess_cfg": values}}


@pytest.mark.parametrize(
  ("files", "squash"),
  [
    ({}, False),
    ({OPEN_CLIP: {"model_cfg": {}}}, False),
    (open_clip(mean=None, mode="RGB", size=[224, 224], fill_color=9), False),
    (open_clip(mean=MEAN.tolist(), interpolation="random"), False),
    (open_clip(resize_mode="shortest"), False),
    (open_clip(resize_mode="squash", interpolation="bicubic"), True),
    ({HF: FULL}, False),
    ({HF5: {"image_processor": FULL, "processor_class": "CLIPProcessor"}}, False),
    ({HF5: {"processor_class": "CLIPProcessor"}, HF: FULL | {"size": SQUARE}}, True),
    ({HF: {"size": 224, "feature_extractor_type": "CLIPFeatureExtractor"}}, False),
    ({HF: {"size": 224, "default_to_square": True}}, True),
    ({HF: FULL | {"pad_size": SQUARE, "image_seq_length": 9}}, False),  # They change no pixel.
    ({HF: {"size": [224, 224], "do_center_crop": False}}, True),
    ({HF: FULL | {"size": SQUARE, "do_center_crop": False, "crop_size": 9}}, True),
    (
      {
        HF: FULL
        | {"size": SQUARE, "crop_size": None, "image_processor_type": "SiglipImageProcessorFast"}
      },
      True,
    ),
  ],
)
def test_images_are_squashed_if_a_config_beside_the_weights_says_so(tmp_path, files, squash):
  assert squashed(tmp_path, files) is squash


@pytest.mark.parametrize(
  ("field", "value", "ours"),
  [
    ("mean", [0.5, 0.5, 0.5], "normalizes with OpenAI's"),
    ("std", 0.5, "normalizes with OpenAI's"),
    ("mean", "imagenet", "normalizes with OpenAI's"),
    ("resize_mode", "longest", "has 'shortest' and 'squash'"),
    ("interpolation", "bilinear", "has 'bicubic' and 'random'"),
    ("mode", "L", "has 'RGB'"),
    ("crop_pct", 0.9, "does not know what that does"),
  ],
)
def test_another_field_of_open_clip_is_refused(tmp_path, field, value, ours):
  message = rf"clip.pt: its images have {field}=.*\({OPEN_CLIP}\), and this program {ours}"
  with pytest.raises(ValueError, match=message):
    squashed(tmp_path, open_clip(**{field: value}))


@pytest.mark.parametrize("file", [HF, HF5])
@pytest.mark.parametrize(
  ("changed", "field"),
  [
    ({"image_mean": [0.5, 0.5, 0.5]}, "image_mean"),
    ({"image_std": [0.27, 0.26]}, "image_std"),
    ({"resample": 2}, "resample"),
    ({"rescale_factor": 1 / 256}, "rescale_factor"),
    ({"rescale_factor": 1 / 127.5}, "rescale_factor"),
    ({"do_normalize": False}, "do_normalize"),
    ({"do_rescale": False}, "do_rescale"),
    ({"do_resize": False}, "do_resize"),
    ({"do_convert_rgb": False}, "do_convert_rgb"),
    ({"do_pad": True}, "do_pad"),
    ({"do_center_crop": False}, "do_center_crop"),
    ({"crop_size": 192}, "crop_size"),
    ({"crop_size": {"height": 224, "width": 192}}, "crop_size"),
    ({"size": {"shortest_edge": 256}}, "crop_size"),
    ({"size": {"shortest_edge": 256}, "crop_size": 256}, "size"),
    ({"size": {"height": 224, "width": 196}}, "size"),
    ({"size": {"shortest_edge": 224, "longest_edge": 448}}, "size"),
    ({"size": {"longest_edge": 224}}, "size"),
    ({"size": "large"}, "size"),
    ({"crop_pct": 0.875}, "crop_pct"),
    ({"image_processor_type": "ViTImageProcessor"}, "image_processor_type"),
    # Its class has a mean of its own.
    ({"image_processor_type": "SiglipImageProcessor", "image_mean": None}, "image_mean"),
  ],
)
def test_another_field_of_transformers_is_refused(tmp_path, file, changed, field):
  values = FULL | changed
  with pytest.raises(ValueError, match=rf"clip.pt: its images have {field}=.* \({file}\)"):
    squashed(tmp_path, {file: {"image_processor": values} if file == HF5 else values})


@pytest.mark.parametrize(
  ("own", "others"),
  [
    # As in timm's and google's folders of SigLIP's weights.
    (
      open_clip(mean=[0.5] * 3, std=[0.5] * 3, interpolation="bicubic", resize_mode="squash"),
      open_clip(mean=MEAN.tolist()),
    ),
    (
      {HF: {"image_processor_type": "SiglipImageProcessor", "size": SQUARE, "resample": 3}},
      {HF: FULL},
    ),
  ],
)
def test_a_siglip_has_siglip_s_statistics_only(tmp_path, own, others):
  options = {"statistics": statistics_of(SIZES["tiny-siglip"])}
  assert squashed(tmp_path, own, **options) is True
  with pytest.raises(ValueError, match=r"mean=.*normalizes with SigLIP's, \[0.5, 0.5, 0.5\]"):
    squashed(tmp_path, others, **options)
  with pytest.raises(ValueError, match=r"mean=.*normalizes with OpenAI's"):
    squashed(tmp_path, own)


def test_the_config_of_the_program_that_named_the_weights_counts(tmp_path):
  files = open_clip(resize_mode="squash") | {HF: FULL}
  assert squashed(tmp_path, files, "open_clip_model.safetensors") is True
  assert squashed(tmp_path, files, "model.safetensors") is False
  assert squashed(tmp_path, files, "model.safetensors.index.json") is False
  with pytest.raises(ValueError, match=rf"cropped \({HF}\) and squashed \({OPEN_CLIP}\)"):
    squashed(tmp_path, files)
  (tmp_path / "open_clip_pytorch_model.bin").touch()
  assert squashed(tmp_path, files, "") is True  # The folder: its first file of weights.


def test_a_config_that_is_no_object_is_named(tmp_path):
  with pytest.raises(
    ValueError, match=rf"{OPEN_CLIP} says of its images \[1\]: expected an object"
  ):
    squashed(tmp_path, {OPEN_CLIP: {"preprocess_cfg": [1]}})
