"""A data set format is a class with the methods of `Source`, and one line."""

from typing import NamedTuple

import grain
import jax
import loop_case
import numpy as np
import pytest

from train import loop
from train.config import Config
from train.data import source
from train.data.source import Source, open_source
from train.parallel.sharding import batch_sharding


class Counting(grain.DatasetIterator):
  """Batches whose pixels are the number of their step. Its state is that number."""

  def __init__(self, config, image_size, context_length):
    super().__init__()
    self._step, self._rows = 0, config.batch_size
    self._shapes = (self._rows, image_size, image_size, 3), (self._rows, context_length)

  def __next__(self):
    self._step += 1
    image, text = self._shapes
    return {"image": np.full(image, self._step, np.uint8), "text": np.ones(text, np.int32)}

  def get_state(self):
    return {"batches": self._step}

  def set_state(self, state):
    self._step = state["batches"]

  def close(self):
    pass


class Numbers(NamedTuple):
  config: Config
  full_name = "numbers"
  class_names = None

  def identity(self):
    return {}

  def size(self, split):
    return None if split == "train" else 4

  def captions(self):
    yield "one two three"

  def train_iterator(self, tokenizer, *, image_size, context_length, **_):
    return Counting(self.config, image_size, context_length)

  def to_devices(self, mesh, **_):
    return lambda batch: jax.device_put(batch, batch_sharding(mesh))

  def eval_batches(self, split, *, image_size, batch_size):
    images = np.zeros((4, image_size, image_size, 3), np.uint8)
    yield {"image": images, "captions": [["one"]] * 4, "label": np.full(4, -1, np.int32)}


@pytest.mark.parametrize("name", ["shapes/tiny", "scenes", "numbers"])
def test_each_format_has_the_methods_of_a_source(name, tmp_path, monkeypatch):
  monkeypatch.setattr(source, "_FORMATS", (open_numbers, *source._FORMATS))
  opened = open_source(loop_case.config(tmp_path, **{"data.name": name}))
  methods = {name for name in vars(Source) if not name.startswith("_")}
  assert methods <= {*dir(opened)} and opened.full_name.startswith(name)


def open_numbers(config):
  return Numbers(config) if config.data.name == "numbers" else None


@pytest.mark.program
def test_a_format_of_one_s_own_is_trained_on_and_resumed(tmp_path, monkeypatch):
  monkeypatch.setattr(source, "_FORMATS", (open_numbers, *source._FORMATS))
  loop_case.replace_model(monkeypatch.setattr)
  ours = {"data.name": "numbers", "data.tokenizer": "words", "data.eval_split": "val"}
  config = loop_case.config(tmp_path, **ours)
  for config.steps in (2, 4):
    loop.train(config, tmp_path / "run")
  losses = [r["loss"] for r in loop_case.records(tmp_path / "run") if "loss" in r]
  pixels, tokens = 8 * 32 * 32 * 3, 8 * 16
  assert losses == [step * pixels + tokens for step in (1, 2, 3, 4)]  # The sum of a batch.
