"""Records are read at random with few open files, and errors of the system are not damage."""

import errno
import os
import pickle
import random

import pytest
from shards_case import data_config, pairs, write_shard

from train.config import Config, ModelConfig
from train.data import records
from train.data.builders import prepare, unreadable
from train.data.prepared import Prepared
from train.data.records import Records
from train.errors import RunError


@pytest.fixture
def builder(tmp_path):
  config = data_config(tmp_path)
  for i in range(7):
    write_shard(tmp_path / "shards" / f"{i}.tar", pairs(i % 3 + 1, first=10 * i))
  return prepare(config)


def open_records(builder):
  folder = str(builder.data_path)
  paths = (os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))
  return sum(path.startswith(folder) for path in paths)


@pytest.mark.parametrize("split", ["train", "train[20%:80%]"])
def test_records_are_those_of_tfds_with_few_files_open(builder, monkeypatch, split):
  monkeypatch.setattr(records, "open_files", lambda: 8)
  expected = list(builder.as_data_source(split).data_source)
  before, read = open_records(builder), Records(builder, split)
  assert len(read) == len(expected)
  order = random.Random(0).sample(range(len(read)), len(read)) * 2
  for i in order:
    assert read[i] == expected[i]
    assert open_records(builder) - before <= 2


def test_records_go_to_other_processes_without_their_files(builder):
  read = Records(builder, "train")
  assert pickle.loads(pickle.dumps(read))[5] == read[5]


def test_an_index_outside_is_an_error(builder):
  with pytest.raises(IndexError):
    Records(builder, "train")[10_000]


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.ESTALE, errno.ENOMEM])
def test_an_error_of_the_system_is_never_called_damage(builder, monkeypatch, code):
  def read(self, index):
    raise RuntimeError(f"open() failed: {os.strerror(code)}; opening /x")

  monkeypatch.setattr(Records, "__getitem__", read)
  config = Config(model=ModelConfig(size="test"), data=data_config_of(builder))
  with pytest.raises(
    RunError, match=rf"Record mine train\[0\] cannot be read: {os.strerror(code)}"
  ):
    list(Prepared(config, builder).eval_batches("train", image_size=4, batch_size=4))


def data_config_of(builder):
  config = Config(model=ModelConfig(size="test")).data
  config.name, config.data_dir = "mine", str(builder.data_path.parent.parent)
  return config


def test_what_is_damaged_is_still_called_so():
  error = unreadable("Record x", "/data", ValueError("hash mismatch."))
  assert str(error).startswith("Record x is damaged: hash mismatch. Copy /data again, or delete")
