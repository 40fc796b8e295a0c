"""Faults of data: hostile samples, damaged shards and records, killed processes."""

import dataclasses
import gzip
import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import tarfile
import threading
import time
import tracemalloc

import jax
import pytest
import shards_case
from shards_case import captions, image_bytes, pairs, write_shard

from train.config import Config, ModelConfig
from train.data import prefetch, sample, tar_shards
from train.data.builders import prepare
from train.data.prepared import Prepared
from train.data.tokenizer import make_tokenizer
from train.errors import RunError

ROOT = pathlib.Path(__file__).parents[2]


config, folder = shards_case.config, shards_case.folder  # Fixtures.


def skipped(builder):
  lines = (builder.data_path / "skipped.jsonl").read_text().splitlines()
  return {line["sample"]: line["reason"] for line in map(json.loads, lines)}


def whole_run(data):
  return Config(model=ModelConfig(size="test"), data=data, batch_size=4)


HOSTILE_TEXTS = {
  "half a character": b'{"caption": "\\ud83d"}',
  "deep": b"[" * 200_000,
  "long number": b'{"caption": "x", "id": ' + b"9" * 5_000 + b"}",
  "no object": b"3",
}


def test_a_sample_with_hostile_text_is_listed_and_skipped(config, folder):
  members = list(pairs(2))
  for name, text in HOSTILE_TEXTS.items():
    members += [(f"{name}.jpg", image_bytes()), (f"{name}.json", text)]
  write_shard(folder / "a.tar", [*members, *pairs(1, first=9)])
  builder = prepare(config)
  assert captions(builder) == [["caption 0"], ["caption 1"], ["caption 9"]]
  assert skipped(builder) == dict.fromkeys(HOSTILE_TEXTS, "unreadable text")


@pytest.mark.parametrize("cls", ["9" * 31, "9" * 5_000, "100000", "20000001"])
def test_a_huge_label_is_listed_and_skipped(config, folder, cls):
  config.text_key, config.label_key = "", "label"
  samples = {"good": "1", "bad": cls}
  write_shard(
    folder / "a.tar",
    [
      member
      for name, text in samples.items()
      for member in ((f"{name}.jpg", image_bytes()), (f"{name}.cls", text.encode()))
    ],
  )
  builder = prepare(config)
  assert builder.info.features["label"].names == ["0", "1"]
  assert set(skipped(builder)) == {"bad"}


def test_an_error_nobody_foresaw_skips_its_sample(config, folder, monkeypatch):
  write_shard(folder / "a.tar", pairs(3))
  captions_of = sample.captions

  def odd(files, key):
    if files["txt"] == b"caption 1":
      raise ZeroDivisionError
    return captions_of(files, key)

  monkeypatch.setattr(sample, "captions", odd)
  builder = prepare(config)
  assert captions(builder) == [["caption 0"], ["caption 2"]]
  assert skipped(builder) == {"000001": "unusable (ZeroDivisionError)"}


@pytest.mark.parametrize(
  ("limit", "reason"),
  [
    ({"max_member_bytes": 2_000}, "file larger than data.max_member_bytes=2000"),
    ({"max_image_pixels": 63}, "image with more pixels than data.max_image_pixels=63"),
    ({"max_aspect_ratio": 3}, "image with a ratio of sides above data.max_aspect_ratio=3"),
  ],
)
def test_samples_beyond_a_limit_are_listed_and_skipped(config, folder, limit, reason):
  large = image_bytes("bmp", size=(64, 16))
  write_shard(folder / "a.tar", [*pairs(1), ("large.jpg", large), ("large.txt", b"x")])
  builder = prepare(dataclasses.replace(config, **limit))
  assert captions(builder) == [["caption 0"]]
  assert skipped(builder) == {"large": reason}


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("max_member_bytes", 0),
    ("max_image_pixels", -1),
    ("max_aspect_ratio", 0.5),
    ("max_aspect_ratio", float("nan")),
    ("max_label", -1),
  ],
)
def test_a_limit_that_admits_nothing_is_refused(config, field, value):
  with pytest.raises(ValueError, match=f"data.{field}={value} must be"):
    whole_run(dataclasses.replace(config, **{field: value})).check()


@pytest.mark.parametrize("compress", ["w", "w:gz"])
def test_reading_a_shard_holds_no_more_than_the_limit(tmp_path, compress):
  large = 64 * 2**20
  with tarfile.open(tmp_path / "a.tar", compress, format=tarfile.PAX_FORMAT) as tar:
    for name in ("0.txt", "1.bin"):
      info = tarfile.TarInfo(name)
      info.size = large
      with open("/dev/zero", "rb") as zeros:
        tar.addfile(info, zeros)
  tracemalloc.start()
  try:
    read = list(tar_shards.samples(str(tmp_path / "a.tar"), 2**20))
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  (zero, text), one = read
  assert (zero, one) == ("0", ("1", {"bin": b""}))
  assert text["txt"].reason == "file larger than data.max_member_bytes=1048576"
  assert peak < 8 * 2**20


def tar_header(kind, size):
  info = tarfile.TarInfo("0.txt")
  info.type, info.size = kind, size
  return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
  "shard",
  [
    tar_header(tarfile.XHDTYPE, 2**21) + bytes(2**21) + tar_header(tarfile.REGTYPE, 0),
    tar_header(tarfile.GNUTYPE_LONGNAME, 2**21) + b"n" * 2**21 + tar_header(tarfile.REGTYPE, 0),
    tar_header(tarfile.REGTYPE, -512),  # The next header would be this one.
    tar_header(tarfile.XHDTYPE, 512) * 2000,
    tar_header(tarfile.XHDTYPE, 512)
    + b"14 size=-1536\n".ljust(512, b"\0")
    + tar_header(tarfile.REGTYPE, 9),
  ],
  ids=["large pax", "large name", "negative", "nested", "negative pax"],
)
def test_hostile_tar_headers_are_damage(tmp_path, shard):
  whole = tmp_path / "whole.tar"
  write_shard(whole, [("0.jpg", b"A"), ("0.txt", b"a")])  # four blocks
  (tmp_path / "a.tar").write_bytes(whole.read_bytes()[:2048] + shard + bytes(1024))
  read = tar_shards.samples(str(tmp_path / "a.tar"), 2**20)
  assert next(read) == ("0", {"jpg": b"A", "txt": b"a"})
  with pytest.raises(tar_shards.DamagedShard):
    list(read)


def test_a_flipped_bit_of_a_compressed_shard_changes_nothing_or_is_noticed(tmp_path):
  plain, path = tmp_path / "a.tar", tmp_path / "a.tar.gz"
  write_shard(plain, pairs(3))
  packed = gzip.compress(plain.read_bytes(), mtime=0)
  whole, noticed = list(tar_shards.samples(str(plain), 2**20)), 0
  for position in range(0, len(packed), len(packed) // 60):
    damaged = bytearray(packed)
    damaged[position] ^= 1 << position % 8
    path.write_bytes(damaged)
    try:
      assert list(tar_shards.samples(str(path), 2**20)) == whole
    except tar_shards.DamagedShard:
      noticed += 1
  assert noticed >= 50


def test_a_wrong_checksum_is_listed(config, folder):
  write_shard(folder / "a.tar.gz", pairs(3), "w:gz")
  packed = bytearray((folder / "a.tar.gz").read_bytes())
  packed[-8] ^= 1
  (folder / "a.tar.gz").write_bytes(packed)
  builder = prepare(config)
  assert builder.info.metadata["damaged"] == ["a.tar.gz"]
  assert "CRC check failed" in skipped(builder)[None]


@pytest.mark.parametrize("gone", ["train", "val", "all"])
def test_prepared_data_need_no_shards(config, folder, gone):
  write_shard(folder / "a.tar", pairs(4))
  write_shard(folder / "b.tar", pairs(2))
  (folder / "names").write_text("cat\ndog\n")
  config.train_shards, config.eval_shards, config.class_names = "a*.tar", "b.tar", "names"
  prepare(config)
  for path in {"train": ["a.tar"], "val": ["b.tar"], "all": ["a.tar", "b.tar", "names"]}[gone]:
    (folder / path).unlink()
  assert len(captions(prepare(config), "val")) == 2
  if gone != "val":
    write_shard(folder / "a2.tar", pairs(1))  # Another shard under the same pattern.
    with pytest.raises(ValueError, match="mine was imported before with other shards"):
      prepare(config)


def test_missing_class_names_are_named_before_an_import(config, folder):
  write_shard(folder / "a.tar", pairs(1))
  config.class_names = "names"
  with pytest.raises(ValueError, match=r"No file data.class_names='names' in data.root=.*shards"):
    prepare(config)


DAMAGES = {
  "gone": lambda path: path.unlink(),
  "empty": lambda path: path.write_bytes(b""),
  "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().length // 2]),
  "another": lambda path: path.write_bytes(b"{}" * 50_000),
}


@pytest.mark.parametrize("shards", ["*.tar", ""])
def test_damaged_prepared_data_are_named_with_the_cure(config, folder, shards):
  write_shard(folder / "a.tar", pairs(8))
  builder = prepare(config)
  config.train_shards = shards
  files = {path: path.read_bytes() for path in builder.data_path.iterdir()}
  run = whole_run(config)
  for path, content in files.items():
    if path.name == "metadata.json" and not shards:
      continue  # It has only the source of the import.
    for name, damage in DAMAGES.items():
      damage(path)
      with pytest.raises(ValueError, match=r"mine .*damaged: .*data/mine.*, or delete it") as error:
        list(Prepared(run, prepare(config)).eval_batches("train", image_size=4, batch_size=4))
      assert "\n" not in str(error.value), (path.name, name)
      path.write_bytes(content)
  assert len(captions(prepare(config))) == 8


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.program)])
def test_a_flipped_bit_of_a_record_is_named_with_the_cure(config, folder, workers):
  write_shard(folder / "a.tar", pairs(8))
  builder = prepare(config)
  (path,) = builder.data_path.glob("*array_record*")
  content = bytearray(path.read_bytes())
  content[1000] ^= 4
  path.write_bytes(content)
  iterator = train_iterator(config, workers)
  with pytest.raises(ValueError, match=r"Record mine train\[\d\] is damaged: .*hash.*, or delete"):
    for _ in range(2):
      next(iterator)
  iterator.close()


def train_iterator(config, workers):
  run = whole_run(dataclasses.replace(config, workers=workers))
  tokenizer = make_tokenizer("bpe", ["a caption"], 300)
  return Prepared(run, prepare(config)).train_iterator(tokenizer, image_size=4, context_length=8)


@pytest.mark.program
@pytest.mark.parametrize(
  ("signum", "message"),
  [
    (signal.SIGKILL, r"killed by SIGKILL: .* memory .*Fewer data\.workers \(now 1\)"),
    (signal.SIGBUS, r"killed by SIGBUS: .*--shm-size.* /dev/shm has [\d,]+ MB"),
    (signal.SIGSEGV, r"killed by SIGSEGV\. The same command continues"),
  ],
)
def test_a_worker_s_end_is_explained_by_its_signal(config, folder, signum, message):
  write_shard(folder / "a.tar", pairs(8))
  iterator = train_iterator(config, workers=1)
  next(iterator)
  os.kill(multiprocessing.active_children()[0].pid, signum)
  with pytest.raises(RunError, match=rf"A worker process that loads data was {message}"):
    for _ in range(20):
      next(iterator)
  iterator.close()


def test_a_worker_that_hangs_does_not_hold_the_exit(config, folder, monkeypatch):
  monkeypatch.setattr(prefetch, "_PATIENCE", 1)
  write_shard(folder / "a.tar", pairs(8))
  batches = prefetch.prefetch_to_device(train_iterator(config, workers=1), jax.device_put, 1)
  next(batches)
  (worker,) = multiprocessing.active_children()
  os.kill(worker.pid, signal.SIGSTOP)
  closing = threading.Thread(target=batches.close, daemon=True)
  closing.start()
  closing.join(60)
  if hangs := closing.is_alive():
    worker.kill()
  assert not hangs


IMPORT = """
import os, sys
from train.config import DataConfig
from train.data.builders import prepare
from train.data import builders, webdataset
builders._check_shard = lambda *_: None  # It would refuse a pipe.
webdataset.cores, webdataset._BYTES_PER_PROCESS = lambda: 2, 1
prepare(DataConfig(name="mine", data_dir=sys.argv[1], root=sys.argv[2], train_shards="*.tar*"))
"""


@pytest.mark.program
def test_a_killed_import_leaves_no_process_and_the_next_one_succeeds(config, folder):
  write_shard(folder / "a.tar", pairs(2))
  os.mkfifo(folder / "b.tar")  # The import waits for what nobody writes.
  command = [sys.executable, "-c", IMPORT, config.data_dir, config.root]
  program = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
  try:
    wait_until(lambda: list(pathlib.Path(config.data_dir).rglob("part-*.json")))
    children = pathlib.Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
  finally:
    program.kill()
    program.wait()
  assert len(children) >= 2
  wait_until(lambda: not any(is_running(child) for child in children))
  (folder / "b.tar").unlink()
  write_shard(folder / "b.tar", pairs(1, first=7))
  assert captions(prepare(config)) == [["caption 0"], ["caption 1"], ["caption 7"]]
  assert set(os.listdir(f"{config.data_dir}/mine")) == {".lock", "1.0.0"}


def is_running(pid):
  try:
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
  except FileNotFoundError:
    return False


def wait_until(condition, seconds=120):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.1)
