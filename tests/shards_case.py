"""Small tar shards, and the config that imports them."""

import io
import tarfile

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from train.config import DataConfig


def image_bytes(kind="jpeg", colour=(200, 30, 30), size=(8, 6)):
  file = io.BytesIO()
  Image.new("RGB", size, colour).save(file, kind)
  return file.getvalue()


def noisy_image_bytes(seed):
  """A JPEG whose bytes are mostly pixels."""
  file = io.BytesIO()
  pixels = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), np.uint8)
  Image.fromarray(pixels).save(file, "jpeg", quality=95)
  return file.getvalue()


def write_shard(path, members, mode="w"):
  with tarfile.open(path, mode) as tar:
    for name, content in members:
      info = tarfile.TarInfo(name)
      info.size = len(content)
      tar.addfile(info, io.BytesIO(content))


def pairs(count, first=0):
  """Members of complete samples, a jpg and a txt each."""
  for i in range(first, first + count):
    yield f"{i:06d}.jpg", image_bytes(colour=(i % 256, 0, 0))
    yield f"{i:06d}.txt", f"caption {i}".encode()


def numbered(numbers, bad=(), captions=True):
  """Members of samples whose captions are "text 7" and whose pixels differ, in three classes.

  bad: numbers of those whose image is none.
  """
  for n in numbers:
    yield f"{n:06d}.jpg", b"junk" if n in bad else noisy_image_bytes(n)
    if captions:
      yield f"{n:06d}.txt", f"text {n}".encode()
    yield f"{n:06d}.cls", str(n % 3).encode()


def data_config(tmp_path) -> DataConfig:
  """Imports the shards in tmp_path/shards, as `mine`."""
  (tmp_path / "shards").mkdir()
  return DataConfig(
    name="mine",
    data_dir=str(tmp_path / "data"),
    root=str(tmp_path / "shards"),
    train_shards="*.tar*",
  )


@pytest.fixture
def config(tmp_path):
  return data_config(tmp_path)


@pytest.fixture
def folder(config, tmp_path):
  return tmp_path / "shards"


def captions(builder, split="train"):
  skip = {"image": tfds.decode.SkipDecoding()}
  source = builder.as_data_source(split, decoders=skip)
  return [[caption.decode() for caption in record["captions"]] for record in source]
