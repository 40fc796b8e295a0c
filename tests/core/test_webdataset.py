"""The import of tar shards: samples are read, skipped and counted, or refused."""

import contextlib
import gzip
import json
import os
import re

import pytest
import shards_case
import tensorflow_datasets as tfds
from shards_case import captions, image_bytes, noisy_image_bytes, pairs, write_shard

from train.config import Config, ModelConfig
from train.data import builders, pool, tar_shards, webdataset
from train.data.builders import prepare
from train.data.source import check_eval_splits, check_split, open_source

config, folder = shards_case.config, shards_case.folder  # Fixtures.


def records(builder, split="train"):
  skip = {"image": tfds.decode.SkipDecoding()}
  return list(builder.as_data_source(split, decoders=skip))


def test_images_keep_their_bytes_and_captions_their_order(config, folder):
  images = {kind: image_bytes(kind) for kind in ("jpeg", "png", "webp")}
  write_shard(
    folder / "a.tar",
    [
      ("0.jpg", images["jpeg"]),
      ("0.txt", b" one caption \n"),
      ("1.PNG", images["png"]),
      ("1.json", json.dumps({"caption": "first", "captions": ["first", "second"]}).encode()),
      ("2.webp", images["webp"]),
      ("2.json", json.dumps({"caption": "from \u00fcnicode json"}).encode()),
      ("deep/er/3.jpeg", images["jpeg"]),
      ("deep/er/3.json", json.dumps({"caption": None, "url": "x"}).encode()),
      ("deep/er/3.txt", "\u732b".encode()),
      ("4.seg.png", b"another thing"),
      ("4.jpg", images["jpeg"]),
      ("4.json", json.dumps({"caption": ["a", "", "b"]}).encode()),
    ],
  )
  builder = prepare(config)
  rows = records(builder)
  assert [r["image"] for r in rows] == [images[k] for k in ("jpeg", "png", "webp", "jpeg", "jpeg")]
  assert captions(builder) == [
    ["one caption"],
    ["first", "second"],
    ["from \u00fcnicode json"],
    ["\u732b"],
    ["a", "b"],
  ]
  assert builder.info.metadata["skipped"] == {}


def test_corrupt_samples_are_skipped_and_counted_by_reason(config, folder, capsys):
  jpg, noise = image_bytes(), noisy_image_bytes(0)
  write_shard(
    folder / "a.tar",
    [
      *pairs(3),
      ("100.jpg", noise[: len(noise) * 3 // 4]),
      ("100.txt", b"cut image"),
      ("101.jpg", b"no image at all"),
      ("101.txt", b"x"),
      ("102.jpg", jpg),
      ("103.jpg", jpg),
      ("103.txt", b"  \n"),
      ("104.jpg", jpg),
      ("104.txt", b"caf\xe9"),
      ("105.jpg", jpg),
      ("105.json", b"{not json"),
      ("106.jpg", jpg),
      ("106.json", json.dumps({"caption": 3}).encode()),
      ("107.txt", b"no image"),
      ("._108.jpg", b"resource fork"),
      *pairs(2, first=200),
    ],
  )
  builder = prepare(config)
  assert captions(builder) == [[f"caption {i}"] for i in (0, 1, 2, 200, 201)]
  assert builder.info.metadata["skipped"] == {
    "undecodable image": 2,
    "no caption": 2,
    "unreadable text": 3,
    "no image": 1,
  }
  lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Imported")]
  assert lines == [
    "Imported mine: 5 train (of 13 samples in 1 shard); 5 captions, from txt; skipped 8 "
    "(2 no caption, 1 no image, 2 undecodable image, 3 unreadable text); the files of incomplete "
    "samples end in .jpg (2), .txt (2); listed in "
    f"{builder.data_path / 'skipped.jsonl'}."
  ]
  listed = (builder.data_path / "skipped.jsonl").read_text().splitlines()
  assert json.loads(listed[0]) == {
    "split": "train",
    "shard": "a.tar",
    "sample": "100",
    "reason": "undecodable image",
  }
  assert [json.loads(line)["sample"] for line in listed] == [str(i) for i in range(100, 108)]


@pytest.mark.parametrize("compress", [False, True])
def test_a_truncated_shard_gives_the_samples_before_the_cut(config, folder, compress):
  path = folder / ("a.tar.gz" if compress else "a.tar")
  members = [(f"{i}.jpg", noisy_image_bytes(i)) for i in range(20)]
  members = [m for i, m in enumerate(members) for m in (m, (f"{i}.txt", f"{i}".encode()))]
  write_shard(path, members, "w:gz" if compress else "w")
  whole = path.read_bytes()
  path.write_bytes(whole[: len(whole) // 2])
  builder = prepare(config)
  texts = captions(builder)
  assert texts == [[str(i)] for i in range(len(texts))]
  assert 8 <= len(texts) <= 12
  assert builder.info.metadata["damaged"] == [path.name]


@pytest.mark.parametrize(
  ("cut", "whole"),
  [(0, 2), (100, 2), (512, 2), (513, 3), (1024, 3), (1100, 3), (1536, 3), (1537, 4), (2048, 4)],
)
def test_every_complete_member_of_a_cut_shard_is_used(tmp_path, cut, whole):
  """Two samples of two members, each a header and a block; `cut` counts from the second sample.

  At 2048 only the end mark is missing.
  """
  path = tmp_path / "a.tar"
  members = [("0.jpg", b"A"), ("0.txt", b"a"), ("1.jpg", b"B"), ("1.txt", b"b")]
  write_shard(path, members)
  path.write_bytes(path.read_bytes()[: 2048 + cut])
  read, shard = [], tar_shards.samples(str(path), 2**20)
  with pytest.raises(tar_shards.DamagedShard, match=r"a\.tar"):
    for _, sample in shard:
      read += sample.items()
  assert read == [(name[2:], content) for name, content in members[:whole]]


def test_a_damaged_shard_among_whole_ones_is_named(config, folder):
  write_shard(folder / "a.tar", pairs(2))
  (folder / "b.tar").write_bytes(b"this is no tar archive" * 100)
  with gzip.open(folder / "c.tar.gz", "wb") as file:
    file.write(b"nor is this")
  builder = prepare(config)
  assert builder.info.metadata["damaged"] == ["b.tar", "c.tar.gz"]
  assert captions(builder) == [["caption 0"], ["caption 1"]]


def test_several_shards_in_several_processes_keep_the_order(config, folder, monkeypatch):
  for i, count in enumerate((1, 0, 3)):
    write_shard(folder / f"{i}.tar", pairs(count, first=10 * i))
  monkeypatch.setattr(webdataset, "cores", lambda: 2)
  monkeypatch.setattr(webdataset, "_BYTES_PER_PROCESS", 1)
  builder = prepare(config)
  assert captions(builder) == [[f"caption {i}"] for i in (0, 20, 21, 22)]
  assert builder.info.splits["train"].num_shards == 2  # The empty one is left out.


def test_both_splits_are_imported(config, folder):
  write_shard(folder / "a-000.tar", pairs(2))
  write_shard(folder / "a-001.tar", pairs(2, first=2))
  write_shard(folder / "b.tar", pairs(1, first=9))
  config.train_shards, config.eval_shards = "a-{000..001}.tar", "b.tar"
  builder = prepare(config)
  assert len(captions(builder, "train")) == 4
  assert captions(builder, "val") == [["caption 9"]]


def test_parts_of_splits_are_read_from_whole_imports(config, folder):
  write_shard(folder / "a.tar", pairs(10))
  config.train_split, config.eval_split = "train[:80%]", "train[80%:]"
  source = open_source(Config(model=ModelConfig(size=""), data=config))
  check_split(source, config.train_split)
  check_eval_splits(source, [config.eval_split])
  splits = ("train", config.train_split, config.eval_split)
  assert [len(captions(source.builder, split)) for split in splits] == [10, 8, 2]
  assert [source.size(split) for split in splits] == [10, 8, 2]


@pytest.mark.parametrize(
  ("split", "message"),
  [
    ("val", "has no split 'val': it has train."),
    ("train[:20%", "Error parsing split 'train[:20%'. See format"),
    ("train[90%]", "Error parsing split 'train[90%]'. See format"),
    (
      "train[:20]",
      "has no split 'train[:20]': Requested slice [:20] incompatible with 10 examples",
    ),
    ("train[:0]", "The part 'train[:0]' of mine/1.0.0 has no example."),
    ("train[5:3]", "The part 'train[5:3]' of mine/1.0.0 has no example."),
    ("train[:5],train", "'train[:5],train' has two parts of one split"),
  ],
)
def test_a_wrong_or_empty_split_is_named(config, folder, split, message):
  write_shard(folder / "a.tar", pairs(10))
  source = open_source(Config(model=ModelConfig(size=""), data=config))
  with pytest.raises(ValueError, match=re.escape(message)):
    check_eval_splits(source, split.split(","))


@pytest.mark.parametrize("names", [None, ["cat", "dog", "ox"]])
def test_cls_becomes_a_label(config, folder, names):
  jpg = image_bytes()
  labels = [b"0", b"2\n", b"x", b"-1", b"1"]
  members = [(f"{i}.cls", label) for i, label in enumerate(labels)]
  write_shard(
    folder / "a.tar", [m for i, cls in enumerate(members) for m in ((f"{i}.jpg", jpg), cls)]
  )
  config.text_key, config.label_key = "", "label"
  if names:
    (folder / "classnames.txt").write_text("\n".join(names) + "\n")
    config.class_names = "classnames.txt"
  builder = prepare(config)
  assert [r["label"] for r in records(builder)] == [0, 2, 1]
  assert builder.info.features["label"].names == (names or ["0", "1", "2"])
  assert builder.info.metadata["skipped"] == {"unreadable label": 1, "label out of range": 1}


def test_no_usable_sample_is_an_error_with_pattern_and_reasons(config, folder):
  write_shard(folder / "a.tar", [("0.jpg", image_bytes()), ("1.txt", b"x")])
  with pytest.raises(
    ValueError, match=r"No usable sample in .*\*\.tar\*.*1 no caption, 1 no image"
  ):
    prepare(config)
  assert not list((folder.parent / "data" / "mine").glob("*.*.*"))


@pytest.mark.parametrize("pattern", ["none-*.tar", "none-{000..003}.tar"])
@pytest.mark.parametrize(
  ("root", "where"),
  [
    (None, r"in data.root='/.*/shards'"),
    ("", "in /.*, because data.root is empty"),
    ("/not/here", "because data.root='/not/here' is no folder"),
  ],
)
def test_a_pattern_that_matches_nothing_is_named_with_its_root(config, pattern, root, where):
  config.train_shards = pattern
  config.root = config.root if root is None else root
  with pytest.raises(ValueError, match=rf"No shard matches .*none-.* {where}\.$"):
    prepare(config)


def test_shards_are_imported_once(config, folder, monkeypatch):
  write_shard(folder / "a.tar", pairs(2))
  prepare(config)
  monkeypatch.setattr(pool, "run", lambda *args: pytest.fail("imported again"))
  assert len(captions(prepare(config))) == 2
  config.train_shards = ""  # The name suffices.
  assert len(captions(prepare(config))) == 2


@pytest.mark.parametrize("change", ["other shards", "another size", "labels"])
def test_changed_shards_or_features_under_the_same_name_are_refused(config, folder, change):
  write_shard(folder / "a.tar", pairs(2))
  prepare(config)
  if change == "other shards":
    (folder / "a.tar").unlink()
    write_shard(folder / "b.tar", pairs(2))
  elif change == "another size":
    write_shard(folder / "a.tar", pairs(20))
  else:
    config.label_key = "label"
  match = "other features" if change == "labels" else "other shards"
  with pytest.raises(ValueError, match=f"mine was imported before with {match}.*delete"):
    prepare(config)


def test_an_interrupted_import_leaves_no_data_set(config, folder, monkeypatch):
  write_shard(folder / "a.tar", pairs(4))

  def killed(self, *args):
    assert any((folder.parent / "data").rglob("part-*"))
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(webdataset.WebDataset, "_finish_split", killed)
    with pytest.raises(KeyboardInterrupt):
      prepare(config)
  assert len(captions(prepare(config))) == 4


def test_a_process_that_waited_for_an_import_uses_it(config, folder, monkeypatch):
  write_shard(folder / "a.tar", pairs(2))
  alone, runs, run = builders.lock, [], pool.run

  @contextlib.contextmanager
  def after_another(directory, wait):
    with monkeypatch.context() as patch:
      patch.setattr(builders, "lock", alone)
      prepare(config)
    yield True

  monkeypatch.setattr(builders, "lock", after_another)
  monkeypatch.setattr(pool, "run", lambda *args: runs.append(args) or run(*args))
  assert len(captions(prepare(config))) == 2
  assert len(runs) == 1


def test_files_of_a_killed_import_are_removed(config, folder):
  write_shard(folder / "a.tar", pairs(1))
  left = folder.parent / "data" / "mine" / "incomplete.ABC_1.0.0"
  left.mkdir(parents=True)
  (left / "part-0").write_bytes(b"half")
  assert len(captions(prepare(config))) == 1
  assert not left.exists()


def test_a_full_disk_is_an_os_error_with_the_directory(config, folder, monkeypatch):
  write_shard(folder / "a.tar", pairs(1))

  def write(self, path, examples):
    raise RuntimeError("write() failed: No space left on device")

  monkeypatch.setattr(tfds.core.ExampleWriter, "write", write)
  with pytest.raises(OSError, match=r"prepare .*mine.*: write\(\) failed: No space left"):
    prepare(config)


def test_braces_expand_as_in_a_shell(tmp_path):
  for name in ("a-08", "a-09", "a-10", "b-x", "b-y", "c"):
    (tmp_path / f"{name}.tar").touch()
  paths = tar_shards.expand(str(tmp_path / "{a-{08..10},b-{x,z}}.tar"))
  assert [os.path.basename(path) for path in paths] == [
    "a-08.tar",
    "a-09.tar",
    "a-10.tar",
    "b-x.tar",
  ]


@pytest.mark.parametrize("name", ["My data", "shapes", "a/b", ""])
def test_an_invalid_name_is_refused(config, folder, name):
  write_shard(folder / "a.tar", pairs(1))
  config.name = name
  with pytest.raises(ValueError, match=f"data.name='{name}' cannot name an import"):
    prepare(config)


@pytest.mark.parametrize(
  ("split", "message"),
  [
    ("train", "is the train split already"),
    ("train[:5]", "is the train split already"),
    ("a,b", "must be one split, that of data.eval_shards"),
  ],
)
def test_shards_for_another_split_than_one_of_evaluation_are_refused(
  config, folder, split, message
):
  write_shard(folder / "a.tar", pairs(1))
  config.eval_shards, config.eval_split = "a.tar", split
  with pytest.raises(ValueError, match=re.escape(f"eval_split={split!r} {message}")):
    prepare(config)


def test_a_wrong_feature_is_named_before_the_import(config, folder, monkeypatch):
  write_shard(folder / "a.tar", pairs(1))
  monkeypatch.setattr(pool, "run", lambda *args: pytest.fail("imported"))
  config.text_key = "caption"
  with pytest.raises(ValueError, match="text_key='caption' is no Text feature"):
    prepare(config)
