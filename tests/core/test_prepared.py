"""Prepared data sets are looked up by name and features; errors name the missing ones."""

import dataclasses
import io
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from train.config import Config, DataConfig, ModelConfig
from train.data.builders import prepare
from train.data.source import open_source


def _png(value):
  file = io.BytesIO()
  Image.new("RGB", (4, 4), (value,) * 3).save(file, "png")
  return file.getvalue()


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"name": "nothing_here"}, r"No data set data.name='nothing_here' in .*: found shapes"),
    ({"name": "shapes/huge"}, r"'shapes/huge': there are shapes/full, shapes/tiny"),
    ({"text_key": "text"}, r"data.text_key='text' is no Text feature .*captions \(Sequence\)"),
    ({"text_key": "label"}, r"data.text_key='label' is no Text feature"),
    ({"image_key": "img"}, r"data.image_key='img' is no Image feature"),
    ({"label_key": "captions"}, r"data.label_key='captions' is no ClassLabel feature"),
    ({"text_key": "", "label_key": ""}, "one of them must be set"),
  ],
)
def test_missing_data_sets_and_features_are_named(tmp_path, changes, message):
  config = DataConfig(name="shapes/tiny", data_dir=str(tmp_path), label_key="label")
  prepare(config)
  with pytest.raises(ValueError, match=message):
    prepare(dataclasses.replace(config, **changes))


class Labelled(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """A data set that another program prepared with TFDS, like cifar10 or coco_captions."""

  name = "labelled"
  VERSION = tfds.core.Version("3.0.2")
  url_infos = None

  def _info(self):
    features = tfds.features
    return tfds.core.DatasetInfo(
      builder=self,
      features=features.FeaturesDict(
        {
          "image": features.Image(shape=(4, 4, 3)),
          "label": features.ClassLabel(names=["cat", "dog"]),
          "title": features.Text(),
          "told": features.Sequence({"text": features.Text(), "id": np.int64}),
        }
      ),
    )

  def _split_generators(self, dl_manager):
    return {"train": self._generate_examples(), "test": self._generate_examples()}

  def _generate_examples(self):
    for i in range(6):
      told = [{"text": f"told {i}", "id": 1}, {"text": f"again {i}", "id": 2}]
      image = _png(i)
      yield i, {"image": image, "label": i % 2, "title": f"title {i}", "told": told}


@pytest.mark.parametrize(
  ("text_key", "expected"),
  [("title", ["title"]), ("told/text", ["again", "told"]), ("", ["a"])],
)
def test_any_prepared_data_set_is_found_by_name(tmp_path, text_key, expected):
  config = Config(
    model=ModelConfig(size="test"),
    data=DataConfig(name="labelled", data_dir=str(tmp_path), text_key=text_key, label_key="label"),
  )
  Labelled(data_dir=tmp_path).download_and_prepare(file_format="array_record")
  source = open_source(config)
  assert source.class_names == ["cat", "dog"]
  assert sorted({caption.split()[0] for caption in source.captions()}) == expected
  (batch,) = source.eval_batches("test", image_size=4, batch_size=8)
  assert sorted({text.split()[0] for texts in batch["captions"] for text in texts}) == expected


def test_the_identity_of_a_data_set_tells_other_records_apart(tmp_path):
  def identity():
    data = DataConfig(name="shapes/tiny", data_dir=str(tmp_path))
    source = open_source(Config(model=ModelConfig(size=""), data=data))
    return source.builder.info.splits["train"].filepaths[0], source.identity()

  path, before = identity()
  assert identity()[1] == before
  records = bytearray(pathlib.Path(path).read_bytes())
  records[2000] ^= 1  # As many bytes.
  pathlib.Path(path).write_bytes(records)
  differs = {name for name, value in identity()[1].items() if value != before[name]}
  assert differs == {"its split train (examples, files, bytes, digest)"}


def test_a_data_set_in_another_format_is_refused(tmp_path):
  made = Labelled(data_dir=tmp_path)
  made.download_and_prepare(file_format="array_record")
  path = pathlib.Path(made.data_dir) / "dataset_info.json"
  path.write_text(path.read_text().replace("array_record", "tfrecord"))
  with pytest.raises(ValueError, match="format tfrecord, which cannot be read at random"):
    prepare(DataConfig(name="labelled", data_dir=str(tmp_path), text_key="title"))


@pytest.mark.slow
def test_reading_needs_no_tensorflow(tmp_path):
  code = """
import sys
from train.config import Config, DataConfig, ModelConfig
from train.data.source import open_source
data_config = DataConfig(name="shapes/tiny", data_dir=sys.argv[1])
config = Config(model=ModelConfig(size=""), data=data_config)
next(open_source(config).eval_batches("test", image_size=8, batch_size=4))
assert "tensorflow" not in sys.modules
"""
  root = pathlib.Path(__file__).parents[2]
  subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=root)
