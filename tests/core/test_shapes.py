"""The data set of drawn shapes: the same everywhere, balanced, with true captions."""

import hashlib
import io
import itertools
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from train.data import shapes
from train.data.shapes import CLASSES, COLOURS, SHAPES, Shapes

SPLITS = ("train", "val", "test")


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
  builder = Shapes(config="tiny", data_dir=str(tmp_path_factory.mktemp("data")))
  builder.download_and_prepare(file_format="array_record")
  return builder


@pytest.fixture(scope="module")
def examples(builder):
  """All of the tiny data set: split -> list of records."""
  skip = {"image": tfds.decode.SkipDecoding()}
  return {split: list(builder.as_data_source(split, decoders=skip)) for split in SPLITS}


def texts(record):
  return [caption.decode() for caption in record["captions"]]


def pixels(record):
  return np.asarray(Image.open(io.BytesIO(record["image"])))


@pytest.mark.slow
def test_the_data_set_is_the_same_in_every_process(tmp_path):
  """With any hash seed of Python, and without TensorFlow."""
  code = """
import hashlib, io, json, sys
import numpy as np
from PIL import Image
from train.data.shapes import Shapes
builder = Shapes(config="tiny", data_dir=sys.argv[1])
builder.download_and_prepare(file_format="array_record")
examples = [builder.as_data_source("train")[i] for i in range(8)]
assert "tensorflow" not in sys.modules
pixels = hashlib.sha256(b"".join(e["image"].tobytes() for e in examples)).hexdigest()
print(json.dumps([pixels, [c.decode() for e in examples for c in e["captions"]]]))
"""
  outputs = []
  for seed in ("1", "2"):
    result = subprocess.run(
      [sys.executable, "-c", code, str(tmp_path / seed)],
      check=True,
      cwd=pathlib.Path(__file__).parents[2],
      env=os.environ | {"PYTHONHASHSEED": seed},
      stdout=subprocess.PIPE,
    )
    outputs.append(json.loads(result.stdout.splitlines()[-1]))
  assert outputs[0] == outputs[1]


def test_captions_equal_those_of_version_1(builder):
  """A change of the drawn captions needs a new version."""
  examples = itertools.islice(builder._generate_examples("train"), 100)
  captions = "\n".join(caption for _, example in examples for caption in example["captions"])
  assert hashlib.sha256(captions.encode()).hexdigest()[:16] == "470882e3fc6d7ecb"


def test_split_sizes_are_those_of_the_config(builder):
  assert {name: info.num_examples for name, info in builder.info.splits.items()} == {
    "train": 240,
    "val": 48,
    "test": 96,
  }
  full = Shapes.builder_configs["full"]
  assert (full.train, full.val, full.test) == (20_000, 1_000, 2_000)


def test_all_images_are_distinct(examples):
  images = [pixels(record).tobytes() for split in SPLITS for record in examples[split]]
  assert len(set(images)) == len(images)


def test_classes_are_colour_and_shape(builder):
  names = builder.info.features["label"].names
  assert names == [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]
  assert len(names) == 48


def test_the_test_split_has_each_class_equally_often(examples):
  labels = [record["label"] for record in examples["test"]]
  np.testing.assert_array_equal(np.bincount(labels, minlength=len(CLASSES)), 2)


def test_train_and_val_have_one_object_or_two(examples):
  for split in ("train", "val"):
    single = np.mean([record["label"] >= 0 for record in examples[split]])
    assert 0.4 < single < 0.8


def test_every_caption_names_the_objects(examples):
  for record in examples["train"] + examples["val"] + examples["test"]:
    captions = texts(record)
    assert len(set(captions)) == 5
    named = [
      {word for word in caption.split() if word in (*COLOURS, *SHAPES)} for caption in captions
    ]
    assert all(words == named[0] for words in named)
    if record["label"] >= 0:
      assert named[0] == set(CLASSES[record["label"]].split())


def test_a_single_object_has_its_colour_and_no_other_palette_colour_occurs(examples):
  palette = np.array(list(COLOURS.values()), float)
  for record in examples["test"]:
    colour = list(COLOURS).index(CLASSES[record["label"]].split()[0])
    distance = np.abs(pixels(record)[..., None, :] - palette).max(-1)
    near = (distance <= 14).reshape(-1, len(palette)).sum(0)  # 14: the colours' jitter
    assert near[colour] >= 50
    assert np.delete(near, colour).sum() == 0


# FORWARD words put the left or upper object first in a caption, BACKWARD words the other one.
FORWARD = {
  "left": (" to the left of ", " left of ", " on the left side of "),
  "above": (" above ", " over ", " higher than "),
}
BACKWARD = {
  "left": (" to the right of ", " right of "),
  "above": (" below ", " under ", " beneath "),
}


def test_captions_state_the_true_relation():
  rng = np.random.default_rng(0)
  for _ in range(300):
    scene = shapes._pair(rng, int(rng.integers(len(CLASSES))))
    first, second = scene.objects
    assert first.name != second.name
    gap = second.x - first.x if scene.relation == "left" else second.y - first.y
    assert gap >= first.radius + second.radius - 1e-9  # They do not overlap.
    for caption in shapes.captions(scene, rng):
      swapped = caption.index(first.name) > caption.index(second.name)
      relations = BACKWARD if swapped else FORWARD
      assert any(words in caption for words in (" and ", *relations[scene.relation])), caption


def test_objects_lie_inside_the_image():
  rng = np.random.default_rng(0)
  for make in (shapes._single, shapes._pair):
    for thing in (t for i in range(200) for t in make(rng, i % len(CLASSES)).objects):
      assert thing.radius - 1e-9 <= thing.x <= shapes.SIZE - thing.radius + 1e-9
      assert thing.radius - 1e-9 <= thing.y <= shapes.SIZE - thing.radius + 1e-9


def test_edges_are_smooth(examples):
  """A circle's mask has grey values between inside and outside."""
  thing = shapes.Object("red", "circle", 24, 24, 10)
  values = np.unique(np.asarray(shapes._mask(thing, 0)))
  assert len(values) > 8


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_reaches_its_radius(shape):
  covered = np.argwhere(np.asarray(shapes._mask(shapes.Object("red", shape, 24, 24, 12), 0)) > 127)
  reach = np.linalg.norm(covered + 0.5 - 24, axis=1).max()
  assert 11 < reach < 13
