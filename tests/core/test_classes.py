"""Names of classes and labels: an import and an evaluation read them by one rule."""

import re

import numpy as np
import pytest
from shards_case import data_config, image_bytes, write_shard

from train.config import Config, ModelConfig
from train.data import prepared
from train.data.builders import prepare
from train.data.classes import read_class_names
from train.data.prepared import Prepared
from train.data.wds_folder import open_folder
from train.errors import RunError


def members(labels, captions=()):
  """A picture a label; None leaves out its cls."""
  for i, label in enumerate(labels):
    yield f"{i:03d}.jpg", image_bytes(colour=(20 * i, 0, 0))
    if label is not None:
      yield f"{i:03d}.cls", str(label).encode()
  for i in captions:
    yield f"{i:03d}.txt", f"caption {i}".encode()


@pytest.fixture(params=["import", "evaluation"])
def read(request, tmp_path):
  """read(names, labels): the names and labels as an import or an evaluation has them."""

  def imported(names: bytes, labels):
    config = data_config(tmp_path)
    (tmp_path / "shards" / "names.txt").write_bytes(names)
    write_shard(tmp_path / "shards" / "a.tar", members(labels))
    config.text_key, config.label_key, config.class_names = "", "label", "names.txt"
    config = Config(model=ModelConfig(size="tiny"), data=config)
    builder = prepare(config.data)
    examples = prepared._Examples(Prepared(config, builder), "train")
    found = [examples[i]["label"] for i in range(len(examples))]
    return Prepared(config, builder).class_names, found

  def evaluated(names: bytes, labels):
    folder = tmp_path / "wds_x"
    (folder / "test").mkdir(parents=True)
    write_shard(folder / "test" / "0.tar", members(labels))
    (folder / "classnames.txt").write_bytes(names)
    (folder / "zeroshot_classification_templates.txt").write_text("a {c}")
    opened = open_folder(folder)
    return opened.class_names, [example["label"] for example in opened.examples("test")]

  return imported if request.param == "import" else evaluated


def test_two_classes_may_have_one_name(read):
  assert read(b"sunglasses\nmissile\nsunglasses\n", [0, 1, 2]) == (
    ["sunglasses", "missile", "sunglasses"], [0, 1, 2],
  )  # fmt: skip


def test_marks_line_ends_and_empty_lines_at_the_end_are_no_names(read):
  content = "\ufeffcat \r\ndog\r\n\u732b\u2028x\r\n\r\n\n".encode()
  assert read(content, [2, 0]) == (["cat", "dog", "\u732b\u2028x"], [2, 0])


@pytest.mark.parametrize(
  ("names", "message"),
  [
    (b"cat\n\ndog\n", "line 2 is empty: each line should hold the name of a class"),
    (b"\n\n", "is empty: it should hold the name of a class on each line"),
    (b"cat\ncaf\xe9\n", r"line 2: b'caf\\xe9' is not UTF-8"),
    ("cat\n".encode("utf-16"), "line 1: .* is not UTF-8"),
  ],
)
def test_a_file_of_names_that_cannot_be_meant_is_refused_with_its_line(read, names, message):
  with pytest.raises(RunError, match=f"(names|classnames).txt.*{message}"):
    read(names, [0])


def test_labels_from_one_are_refused(read):
  names, labels = b"a\nb\nc\n", [1, 2, 3, 3, 1]
  message = "no sample has label 0, 2 have label 3, and .*names.* has 3 names: labels count from 0"
  with pytest.raises(RunError, match=message):
    read(names, labels)


def test_labels_beyond_the_names_are_refused(read):
  message = "3 samples have a label beyond the 3 names of .*, such as 3: labels are 0 to 2"
  with pytest.raises(RunError, match=message):
    read(b"a\nb\nc\n", [0, 1, 3, 9, 3])


def test_a_mac_s_line_ends_are_line_ends(tmp_path):
  (tmp_path / "names").write_bytes(b"a\rb\r")
  assert read_class_names(tmp_path / "names") == ["a", "b"]


@pytest.fixture
def both(tmp_path):
  """The config of captions to train on, and classes to evaluate on."""
  config = data_config(tmp_path)
  config.text_key, config.label_key, config.eval_shards = "captions", "label", "val.tar"
  config.train_shards, config.class_names = "a.tar", "names.txt"
  (tmp_path / "shards" / "names.txt").write_text("red\nblue\n")
  return Config(model=ModelConfig(size="tiny"), data=config, batch_size=4)


def test_a_label_is_for_evaluation_and_captions_are_for_training(both, tmp_path, capsys):
  write_shard(tmp_path / "shards" / "a.tar", members([None] * 6, captions=range(6)))
  write_shard(tmp_path / "shards" / "val.tar", members([0, 1, None, None, 1], captions=[2, 4]))
  builder = prepare(both.data)
  said = capsys.readouterr().out
  assert "7 unlabelled samples" in said and "2 uncaptioned samples" in said
  assert "skipped 1 (1 no caption)" in said  # It has neither.
  assert list(Prepared(both, builder).captions()) == [f"caption {i}" for i in range(6)]
  (batch,) = Prepared(both, builder).eval_batches("val", image_size=8, batch_size=8)
  np.testing.assert_array_equal(batch["label"], [0, 1, -1, 1])
  assert batch["captions"] == [[], [], ["caption 2"], ["caption 4"]]


def test_captions_are_needed_to_train(both, tmp_path):
  write_shard(tmp_path / "shards" / "a.tar", members([0, 1], captions=[1]))
  write_shard(tmp_path / "shards" / "val.tar", members([0, 1]))
  builder = prepare(both.data)
  assert list(Prepared(both, builder).captions()) == ["caption 1"]


def test_a_label_key_without_a_label_is_refused(both, tmp_path):
  for name in ("a.tar", "val.tar"):
    write_shard(tmp_path / "shards" / name, members([None] * 3, captions=range(3)))
  message = "No sample of 'a.tar', 'val.tar' has a label (cls): set data.label_key=\"\""
  with pytest.raises(RunError, match=re.escape(message)):
    prepare(both.data)
