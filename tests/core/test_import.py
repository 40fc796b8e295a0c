"""An import of tar shards: what is named must be there, parts stay, further shards extend it."""

import collections
import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil
import time

import numpy as np
import pytest
import shards_case
from shards_case import captions, image_bytes, pairs, write_shard

from train.config import Config, ModelConfig
from train.data import builders, decode, parts, pool, webdataset
from train.data.builders import prepare
from train.data.prepared import Prepared
from train.data.tokenizer import make_tokenizer
from train.errors import RunError
from train.workdir import lock

config, folder = shards_case.config, shards_case.folder  # Fixtures.


def numbers(builder, split="train"):
  return [int(text.removeprefix("caption ")) for (text,) in captions(builder, split)]


def printed(capsys, start):
  return [line for line in capsys.readouterr().out.splitlines() if line.startswith(start)]


@pytest.mark.parametrize(
  ("pattern", "absent"),
  [
    ("a-{000..003}.tar", "a-001.tar, a-003.tar"),
    ("a-000.tar::b.tar", "b.tar"),
    ("{a,c}-*.tar", "c-*.tar"),
  ],
)
def test_named_shards_that_are_not_there_are_listed(config, folder, pattern, absent):
  for name in ("a-000.tar", "a-002.tar"):
    write_shard(folder / name, pairs(1))
  config.train_shards = pattern
  message = (
    f"train_shards={pattern!r} names what is missing in data.root={config.root!r}: {absent}."
  )
  with pytest.raises(ValueError, match=re.escape(message)):
    prepare(config)
  assert not list(folder.parent.rglob("part-*"))


def test_colons_join_patterns_of_several_folders(config, folder, tmp_path):
  for i, name in enumerate(("a/0.tar", "b/0.tar")):
    (folder / name).parent.mkdir()
    write_shard(folder / name, pairs(2, first=10 * i))
  config.train_shards = f"a/*.tar::{folder}/b/0.tar"
  assert numbers(prepare(config)) == [0, 1, 10, 11]


def test_what_is_no_tar_shard_is_refused_with_the_way_to_make_one(config, folder):
  (folder / "train.csv").write_text("filepath\ttitle\na.jpg\ta\n")
  (folder / "0.parquet").write_bytes(b"PAR1" + bytes(500) + b"PAR1")
  (folder / "pairs").mkdir()
  (folder / "pairs" / "0.jpg").write_bytes(image_bytes())
  (folder / "folder.tar").mkdir()
  (folder / "lost.tar").symlink_to(folder / "nowhere")
  for pattern in ("*.csv", "*.parquet", "pairs", "pairs/*", "folder*", "lost*"):
    config.train_shards = pattern
    named = "no tar archive|a folder" if pattern != "lost*" else "which is not there"
    with pytest.raises(ValueError, match=f"train_shards=.* matches .*({named})") as error:
      prepare(config)
    assert pattern == "lost*" or "tar --sort=name -cf" in str(error.value)


def test_names_with_several_dots_are_an_error_with_their_endings(config, folder):
  write_shard(folder / "a.tar", [("s0.input.jpg", image_bytes()), ("s0.outputs.txt", b"a")])
  message = r"1 no image\. Their files end in \.input\.jpg \(1\), \.outputs\.txt \(1\), after the"
  with pytest.raises(ValueError, match=message + r".*an image \(jpg, .*a caption \(txt or json\)"):
    prepare(config)


def test_a_skipped_sample_is_listed_with_the_folder_of_its_shard(config, folder):
  for part in ("part0", "part1"):
    (folder / part).mkdir()
    write_shard(folder / part / "0.tar", [*pairs(1), ("9.txt", part.encode())])
  config.train_shards = "part*/*.tar"
  builder = prepare(config)
  lines = (builder.data_path / "skipped.jsonl").read_text().splitlines()
  assert [json.loads(line)["shard"] for line in lines] == ["part0/0.tar", "part1/0.tar"]
  assert json.loads(lines[0])["detail"] == "it has txt"


def test_the_summary_says_where_captions_are_from(config, folder, capsys):
  jpg = image_bytes()
  both = [("0.jpg", jpg), ("0.txt", b"new\nand again"), ("0.json", b'{"caption": "old"}')]
  write_shard(folder / "a.tar", [*both, ("1.jpg", jpg), ("1.json", b'{"caption": "only"}')])
  builder = prepare(config)
  assert captions(builder) == [["new", "and again"], ["only"]]
  (line,) = printed(capsys, "Imported")
  assert "3 captions, from json's caption (1 sample), txt (1 sample)" in line


def test_the_key_of_the_captions_is_a_field_and_no_other_import_is_taken(config, folder):
  write_shard(
    folder / "a.tar", [("0.jpg", image_bytes()), ("0.json", b'{"caption": "a", "re": "b"}')]
  )
  assert captions(prepare(config)) == [["a"]]
  config.caption_key = "re"
  with pytest.raises(ValueError, match="mine was imported before with other caption_key"):
    prepare(config)
  assert captions(prepare(dataclasses.replace(config, name="again"))) == [["b"]]


def interrupted(config, monkeypatch, after):
  """An import that is interrupted after some parts; how many it had kept."""
  write = parts.write

  def stop(job, report):
    if len(os.listdir(os.path.dirname(job.output))) >= 2 * after:  # with their jsons
      raise KeyboardInterrupt
    write(job, report)

  with monkeypatch.context() as patch:
    patch.setattr(parts, "write", stop)
    with pytest.raises(KeyboardInterrupt):
      prepare(config)


def written(monkeypatch):
  """The shards that are imported from now on."""
  names, write = [], parts.write
  monkeypatch.setattr(
    parts,
    "write",
    lambda job, report: names.extend(s.name for s in job.shards) or write(job, report),
  )
  return names


def test_an_import_that_ended_early_goes_on_with_its_parts(config, folder, monkeypatch, capsys):
  for i in range(5):
    write_shard(folder / f"{i}.tar", [*pairs(i + 1, first=10 * i), (f"{i}99.txt", b"no image")])
  whole = prepare(dataclasses.replace(config, data_dir=str(folder.parent / "whole")))
  interrupted(config, monkeypatch, after=3)
  (folder.parent / "data/mine/incomplete.import/writing-part-x").write_bytes(b"half")
  names = written(monkeypatch)
  builder = prepare(config)
  assert names == ["3.tar", "4.tar"]
  assert "Importing 2 shards (0.0 MB) in 1 process; 3 shards of an earlier try are kept." in (
    capsys.readouterr().out
  )
  files = lambda builder: {  # noqa: E731
    path.name: path.read_bytes()
    for path in builder.data_path.iterdir()
    if path.name not in ("dataset_info.json", "metadata.json")
  }
  assert files(builder) == files(whole)
  assert set(os.listdir(folder.parent / "data/mine")) == {".lock", "1.0.0"}


@pytest.mark.parametrize("change", ["options", "a shard", "a part", "a half part"])
def test_parts_of_another_import_are_made_again(config, folder, monkeypatch, change):
  for i in range(3):
    write_shard(folder / f"{i}.tar", pairs(1, first=i))
  interrupted(config, monkeypatch, after=2)
  (made, *_) = sorted(folder.parent.rglob("part-*.json"), key=lambda path: path.stat().st_mtime_ns)
  if change == "options":
    config.max_image_pixels = 1000
  elif change == "a shard":
    write_shard(folder / "0.tar", pairs(1, first=7))
  elif change == "a part":
    made.unlink()
  else:
    os.truncate(made.with_suffix(""), 10)
  names = written(monkeypatch)
  assert numbers(prepare(config)) == [7 if change == "a shard" else 0, 1, 2]
  assert names == (["0.tar", "1.tar"] * (change == "options") or ["0.tar"]) + ["2.tar"]


def test_many_shards_share_few_files(config, folder, monkeypatch):
  monkeypatch.setattr(parts, "_MOST", 4)
  for i in range(23):
    write_shard(folder / f"{i:02d}.tar", pairs(i % 3, first=10 * i))
  builder = prepare(config)
  assert numbers(builder) == [10 * i + k for i in range(23) for k in range(i % 3)]
  assert builder.info.splits["train"].num_shards <= 4


def test_further_shards_extend_an_import_without_reading_the_others(config, folder, monkeypatch):
  for name in ("a", "c"):
    write_shard(folder / f"{name}.tar", [*pairs(2, first=ord(name)), ("x.txt", b"no image")])
  before = prepare(config)
  content = {path: path.read_bytes() for path in before.data_path.iterdir()}
  write_shard(folder / "b.tar", pairs(2, first=ord("b")))
  names = written(monkeypatch)
  after = prepare(config)
  assert names == ["b.tar"]
  assert after.info.full_name == "mine/1.0.1"
  assert numbers(after) == [97, 98, 99, 100, 98, 99]
  assert dict(after.info.metadata)["skipped"] == {"no image": 2}
  assert len((after.data_path / "skipped.jsonl").read_text().splitlines()) == 2
  # Whoever reads the version before goes on, and the records are on the disk once.
  assert {path: path.read_bytes() for path in before.data_path.iterdir()} == content
  first = next(before.data_path.glob("*00000-of*"))
  assert os.path.samefile(first, next(after.data_path.glob("*00000-of*")))
  assert numbers(prepare(config)) == numbers(prepare(dataclasses.replace(config, train_shards="")))


def test_shards_of_a_further_split_extend_an_import(config, folder):
  write_shard(folder / "a.tar", pairs(2))
  write_shard(folder / "b.tar", pairs(1, first=9))
  config.train_shards = "a.tar"
  prepare(config)
  config.eval_shards = "b.tar"
  builder = prepare(config)
  assert (numbers(builder, "train"), numbers(builder, "val")) == ([0, 1], [9])


def test_a_further_shard_without_an_end_is_left_out_until_it_has_one(config, folder, capsys):
  write_shard(folder / "a.tar", pairs(2))
  prepare(config)
  write_shard(folder / "b.tar", pairs(2, first=5))
  whole = (folder / "b.tar").read_bytes()
  (folder / "b.tar").write_bytes(whole[: len(whole) // 2])
  capsys.readouterr()
  assert numbers(prepare(config)) == [0, 1]
  assert printed(capsys, str(folder)) == [
    f"{folder / 'b.tar'} has no end yet, and is left out until it has."
  ]
  (folder / "b.tar").write_bytes(whole)
  assert numbers(prepare(config)) == [0, 1, 5, 6]


def train_iterator(config, builder, **more):
  run = Config(model=ModelConfig(size="test"), data=config, batch_size=4, **more)
  tokenizer = make_tokenizer("bpe", ["a caption"], 300)
  return Prepared(run, builder).train_iterator(tokenizer, image_size=4, context_length=16)


@pytest.mark.parametrize("split", ["train", "train[:50%]", "train[25%:]"])
def test_a_run_goes_on_with_its_examples_when_data_have_grown(config, folder, split, capsys):
  write_shard(folder / "a.tar", pairs(16))
  config.train_split = split
  stream = train_iterator(config, prepare(config))
  for _ in range(3):
    next(stream)
  state = json.loads(json.dumps(stream.get_state()))
  write_shard(folder / "b.tar", pairs(9, first=100))
  resumed = train_iterator(config, prepare(config))
  resumed.set_state(state)
  assert "mine/1.0.1 has grown: this run goes on with train[" in capsys.readouterr().out
  for _ in range(9):
    expected, batch = next(stream), next(resumed)
    for name in expected:
      np.testing.assert_array_equal(batch[name], expected[name])
  assert resumed.get_state() == stream.get_state()
  stream.close()
  resumed.close()


def test_a_run_is_refused_data_that_were_imported_again_from_others(config, folder):
  write_shard(folder / "a.tar", pairs(16))
  stream = train_iterator(config, prepare(config))
  state = stream.get_state()
  shutil.rmtree(config.data_dir)
  write_shard(folder / "a.tar", pairs(16, first=50))
  again = train_iterator(config, prepare(config))
  with pytest.raises(RunError, match=r"mine/1\.0\.0 has other shards, .* Choose a new --workdir"):
    again.set_state(state)
  again.set_state({"batches": 2})  # of an older checkpoint


def test_another_shard_of_the_same_size_is_noticed(config, folder):
  write_shard(folder / "a.tar", pairs(2))
  prepare(config)
  os.utime(folder / "a.tar")  # A copy has another time.
  assert numbers(prepare(config)) == [0, 1]
  write_shard(folder / "a.tar", pairs(2, first=5))
  with pytest.raises(ValueError, match=r"other shards \(without a.tar; with a.tar\)"):
    prepare(config)


def test_shards_may_move_with_their_folders(config, folder):
  (folder / "deep").mkdir()
  write_shard(folder / "deep" / "a.tar", pairs(2))
  config.train_shards = "deep/*.tar"
  prepare(config)
  moved = folder.with_name("moved")
  (folder / "deep").rename(moved)
  config.root, config.train_shards = "", f"{moved}/*.tar"
  assert numbers(prepare(config)) == [0, 1]


def test_a_shard_of_two_splits_is_refused(config, folder):
  for name in ("a", "val-a", "val-b"):
    write_shard(folder / f"{name}.tar", pairs(1))
  config.eval_shards = "val-*.tar"
  with pytest.raises(
    ValueError, match=r"both name val-a\.tar and 1 more: an evaluation would score"
  ):
    prepare(config)
  config.train_shards = "a*.tar"
  assert numbers(prepare(config)) == [0]


def test_a_shard_with_two_names_counts_once(config, folder):
  write_shard(folder / "a.tar", pairs(2))
  (folder / "b.tar").symlink_to("a.tar")
  (folder / "c.tar").hardlink_to(folder / "a.tar")
  assert numbers(prepare(config)) == [0, 1]


def test_data_that_cannot_be_written_are_read_without_further_shards(
  config, folder, monkeypatch, capsys
):
  write_shard(folder / "a.tar", pairs(2))
  prepare(config)
  write_shard(folder / "b.tar", pairs(2))
  monkeypatch.setattr(os, "access", lambda path, mode: False)
  assert numbers(prepare(config)) == [0, 1]
  assert "mine/1.0.0 cannot be written to: further shards are not" in capsys.readouterr().out


def test_a_full_disk_names_the_folder_of_the_data(config, folder, monkeypatch):
  write_shard(folder / "a.tar", pairs(2))

  def full(descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(os, "fsync", full)
  with pytest.raises(OSError, match=r"No space left on device: '.*data/mine/1\.0\.0'"):
    prepare(config)


def test_a_lack_of_memory_is_no_property_of_a_sample(config, folder, monkeypatch):
  write_shard(folder / "a.tar", pairs(2))

  def fail(content, limits):
    raise MemoryError

  monkeypatch.setattr(decode, "upright", fail)
  with pytest.raises(RunError, match=r"Could not prepare .*mine/1\.0\.0: there is no memory left"):
    prepare(config)


def test_a_shard_that_cannot_be_reached_is_no_damage_of_the_prepared_data(
  config, folder, monkeypatch
):
  write_shard(folder / "a.tar", pairs(2))
  prepare(config)
  (folder / "a.tar").rename(folder / "b")
  (folder / "a.tar").symlink_to("nowhere")
  assert numbers(prepare(config)) == [0, 1]
  (folder / "b").replace(folder / "a.tar")
  stat = os.stat

  def fail(path, **options):
    if str(path).endswith("a.tar"):
      raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
    return stat(path, **options)

  monkeypatch.setattr(os, "stat", fail)
  with pytest.raises(OSError, match=r"Stale file handle: .*a\.tar"):
    prepare(config)


def test_an_import_of_an_earlier_version_is_read_but_not_extended(config, folder):
  write_shard(folder / "a.tar", pairs(2))
  path = prepare(config).data_path / "metadata.json"
  metadata = json.loads(path.read_text())
  source = metadata["source"]
  for key in ("rules", "caption_key"):
    del source[key]
  source["shards"]["train"] = [entry[:2] for entry in source["shards"]["train"]]
  path.write_text(json.dumps({"source": source, "skipped": {}, "damaged": []}))
  assert numbers(prepare(config)) == [0, 1]
  write_shard(folder / "b.tar", pairs(2))
  with pytest.raises(ValueError, match=r"by an earlier version, .* cannot go on with b.tar"):
    prepare(config)


def test_a_disk_that_is_too_small_is_refused_before_the_import(config, folder, monkeypatch):
  write_shard(folder / "a.tar", [*pairs(400), ("0.bin", bytes(2**22))])
  usage = collections.namedtuple("usage", "total used free")
  monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 100_000))
  message = r"mine needs about 0\.\d MB in .*mine, where 0.1 MB are free: free some space, or set"
  with pytest.raises(RunError, match=message):
    prepare(config)
  assert not list(folder.parent.rglob("incomplete*"))
  # Files that are not imported need no space.
  monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 1_000_000))
  assert len(numbers(prepare(config))) == 400


def test_a_long_import_says_each_minute_how_far_it_is(monkeypatch, capsys):
  now = [0.0]
  monkeypatch.setattr(time, "monotonic", lambda: now[0])
  progress = parts.Progress(10, 1000)
  for second in range(1, 300):
    now[0] = second
    progress(parts.Step(0, 4, 1, 2) if second % 2 else None)
  lines = capsys.readouterr().out.splitlines()
  assert lines[0] == (
    "Importing: 0 of 10 shards, 4 images (2/s), skipped 1; about 17 minutes left."
  )
  assert len(lines) == 3 + 4  # after 2, 10 and 30 seconds, then after 60, 120, 180 and 240


def test_an_import_waits_for_another_one(config, folder, monkeypatch):
  write_shard(folder / "a.tar", pairs(2))
  asked = []
  monkeypatch.setattr(
    builders, "lock", lambda folder, wait: asked.append(wait) or lock(folder, wait)
  )
  prepare(config)
  assert asked == [True]


def test_imports_at_the_same_time_without_locks_do_not_disturb_each_other(
  config, folder, monkeypatch, capsys
):
  write_shard(folder / "a.tar", pairs(2))

  def no_locks(file, how):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

  monkeypatch.setattr(fcntl, "flock", no_locks)
  write, others = parts.write, []

  def meanwhile(job, report):
    if not others:  # Another process begins and ends before this one has its part.
      others.append(os.getpid())
      with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        prepare(config)
    write(job, report)

  monkeypatch.setattr(parts, "write", meanwhile)
  assert numbers(prepare(config)) == [0, 1]
  assert set(os.listdir(f"{config.data_dir}/mine")) == {".lock", "1.0.0"}


def test_a_file_system_without_links_has_the_files_moved_or_copied(config, folder, monkeypatch):
  def no_links(source, target):
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))

  monkeypatch.setattr(os, "link", no_links)
  write_shard(folder / "a.tar", pairs(2))
  before = prepare(config)
  write_shard(folder / "b.tar", pairs(2, first=5))
  assert numbers(prepare(config)) == [0, 1, 5, 6]
  assert numbers(before) == [0, 1]


def test_an_import_uses_the_cores_of_its_job(config, folder, monkeypatch):
  for i in range(3):
    write_shard(folder / f"{i}.tar", pairs(1, first=i))
  monkeypatch.setattr(webdataset, "_BYTES_PER_PROCESS", 1)
  asked, run = [], pool.run
  monkeypatch.setattr(pool, "run", lambda w, j, n, h: asked.append(n) or run(w, j, 1, h))
  monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5})
  prepare(config)
  assert asked == [2]
