"""What a config beside published weights says of their images."""

import json

import pytest

from train.preprocessing import is_squashed

OPEN_CLIP, HF = "open_clip_config.json", "preprocessor_config.json"


@pytest.mark.parametrize(
  ("files", "squashed"),
  [
    ({}, False),
    ({OPEN_CLIP: {"model_cfg": {}}}, False),
    ({OPEN_CLIP: {"preprocess_cfg": {"mean": None}}}, False),
    ({OPEN_CLIP: {"preprocess_cfg": {"resize_mode": "shortest"}}}, False),
    ({OPEN_CLIP: {"preprocess_cfg": {"resize_mode": "squash"}}}, True),
    ({HF: {"size": 224}}, False),
    ({HF: {"size": {"shortest_edge": 224}}}, False),
    ({HF: {"size": {"height": 224, "width": 224}}}, True),
    ({HF: {"image_mean": [0.5, 0.5, 0.5]}}, False),
    # open_clip's comes first.
    ({OPEN_CLIP: {"preprocess_cfg": {"resize_mode": "squash"}}, HF: {"size": 224}}, True),
    ({OPEN_CLIP: {"preprocess_cfg": {}}, HF: {"size": {"height": 9, "width": 9}}}, False),
  ],
)
def test_images_are_squashed_if_a_config_beside_the_weights_says_so(tmp_path, files, squashed):
  for name, values in files.items():
    (tmp_path / name).write_text(json.dumps(values))
  assert is_squashed("clip.pt", tmp_path) is squashed


def test_another_way_to_a_square_is_refused(tmp_path):
  (tmp_path / OPEN_CLIP).write_text('{"preprocess_cfg": {"resize_mode": "longest"}}')
  with pytest.raises(ValueError, match=r"clip.pt: its images have resize_mode='longest' .* has 's"):
    is_squashed("clip.pt", tmp_path)
