"""train/data/stream: batches are a function of the config and the step, and resume exactly."""

import collections
import itertools
import json
import os
import threading

import numpy as np
import pytest
from shards_case import image_bytes, numbered, write_shard

from train.config import Config, ModelConfig
from train.data.sample import Wanted
from train.data.stream import source, streams
from train.data.stream.batches import left_out, merged
from train.data.stream.order import Order, Position
from train.data.stream.source import open_streamed
from train.data.stream.streams import Reading, ShardSet, blocks
from train.data.stream.versions import Versions
from train.errors import RunError

SHARDS = 6
# A block is a shard.
READING = Reading(Wanted(True, "", None, True), (), 2**20, ("filepath", "title"), 100, True)


def write(folder, bad=(), first=0, captions=True):
  """Shards of 7, 8 or 9 samples, whose captions are "text 0", "text 1"..."""
  folder.mkdir(exist_ok=True)
  numbers = itertools.count(first)
  for shard in range(SHARDS):
    own = itertools.islice(numbers, 7 + shard % 3)
    write_shard(folder / f"{shard:03}.tar", numbered(own, bad, captions))


def tokenizer(texts, length):
  """One token: the number of the sample."""
  ids = np.zeros((len(texts), length), np.int32)
  ids[:, 0] = [int(text.split()[-1]) for text in texts]
  return ids


def config(folder, **data):
  made = Config(model=ModelConfig(size="tiny"), batch_size=8)
  fields = {"train_shards": str(folder / "{000..005}.tar"), "streams": 4, "block": 5}
  for name, value in ({"stream": True, "eval_split": "", **fields} | data).items():
    setattr(made.data, name, value)
  return made


def iterators(config, processes=1, workdir=None, image_size=16):
  found = open_streamed(config)
  return [
    found.train_iterator(
      tokenizer,
      image_size=image_size,
      context_length=2,
      process_index=i,
      process_count=processes,
      workdir=workdir,
    )
    for i in range(processes)
  ]


def take(config, steps, state=None, processes=1, workdir=None, image_size=16):
  """Batches of all processes together, and the state after them."""
  own = iterators(config, processes, workdir, image_size)
  for iterator in own if state else ():
    iterator.set_state(state)
  batches = []
  try:
    for _ in range(steps):
      parts = [next(iterator) for iterator in own]
      batches.append({k: np.concatenate([part[k] for part in parts]) for k in parts[0]})
    states = json.loads(json.dumps([iterator.get_state() for iterator in own]))
  finally:
    for iterator in own:
      iterator.close()
  return batches, merged(states)


def same(ours, theirs):
  assert len(ours) == len(theirs)
  for a, b in zip(ours, theirs, strict=True):
    for name in ("image", "text"):
      np.testing.assert_array_equal(a[name], b[name])


def ids(batches):
  return [int(n) for batch in batches for n in batch["text"][:, 0]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("shards")
  write(folder, bad=(3, 17))
  return folder


@pytest.fixture(scope="module")
def undisturbed(folder):
  return take(config(folder), 20)


@pytest.mark.parametrize("processes", [2, 4])
def test_any_number_of_processes_sees_the_same_batches(folder, undisturbed, processes):
  batches, state = take(config(folder), 20, processes=processes)
  same(batches, undisturbed[0])
  assert state == undisturbed[1]


@pytest.mark.parametrize("cut", [1, 3, 7, 13])
def test_a_run_resumes_with_any_number_of_processes(folder, undisturbed, cut):
  _, state = take(config(folder), cut, processes=2)
  batches, end = take(config(folder), 20 - cut, state, processes=1 if cut % 2 else 4)
  same(batches, undisturbed[0][cut:])
  assert end == undisturbed[1]


def test_a_stage_of_other_images_goes_on_with_any_number_of_processes(folder, undisturbed):
  small, state = take(config(folder), 5, processes=2, image_size=12)
  assert ids(small) == ids(undisturbed[0][:5]) and small[0]["image"].shape == (8, 12, 12, 3)
  batches, end = take(config(folder), 15, state)
  same(batches, undisturbed[0][5:])
  assert end == undisturbed[1]


@pytest.mark.program
@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_sees_the_same_batches(folder, undisturbed, workers):
  with_workers = config(folder, workers=workers)
  _, state = take(with_workers, 6)
  batches, end = take(with_workers, 14, state)
  same(batches, undisturbed[0][6:])
  assert end == undisturbed[1]


def test_each_pass_of_a_stream_gives_each_sample_of_its_shards_once(folder):
  batches, _ = take(config(folder), 60)
  sizes = np.cumsum([0] + [7 + i % 3 for i in range(SHARDS)])
  for stream in range(4):
    own = [int(n) for batch in batches for n in batch["text"][2 * stream : 2 * stream + 2, 0]]
    for epoch in range(2):
      order, expected = Order(SHARDS, 4, stream, (0, 0)), []
      for turn in itertools.count():
        shard = order.shard(Position(epoch, turn))
        if shard is None:
          break
        expected += range(sizes[shard], sizes[shard + 1])
      expected = set(expected) - {3, 17}
      drawn, own = own[: len(expected)], own[len(expected) :]
      assert len(drawn) == len(expected) and set(drawn) == expected


def test_a_pass_over_all_streams_has_each_shard_once_and_the_next_is_another():
  def one(epoch):
    return [
      order.shard(Position(epoch, turn))
      for order in (Order(10, 4, i, (7, 0)) for i in range(4))
      for turn in range(3)
    ]

  for epoch in range(3):
    assert sorted(x for x in one(epoch) if x is not None) == list(range(10))
  assert one(0) != one(1) != one(2)


def test_samples_are_shuffled_within_blocks_only(folder):
  batches, _ = take(config(folder, block=1), 10)
  own = [int(n) for batch in batches[:3] for n in batch["text"][:2, 0]]
  assert own == list(range(own[0], own[0] + len(own)))
  shuffled = [int(n) for b in take(config(folder, block=6), 3)[0] for n in b["text"][:2, 0]]
  assert set(shuffled) == set(own) and shuffled != own


def test_what_cannot_be_used_is_listed_once_and_counted(folder, tmp_path):
  _, state = take(config(folder), 9, workdir=tmp_path)
  _, state = take(config(folder), 1, state, workdir=tmp_path)
  listed = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
  keys = collections.Counter(line["key"] for line in listed)
  assert set(keys) <= {"000003", "000017"} and all(
    "undecodable" in line["reason"] for line in listed
  )
  assert sum(undecodable for _, _, undecodable, *_ in state["streams"].values()) == len(listed)
  drawn = sum(drawn for drawn, *_ in state["streams"].values())
  assert left_out(state) == len(listed) / drawn and drawn == 80 + len(listed)
  assert left_out({"batches": 3}) is None


def test_samples_without_a_caption_are_listed_with_their_shard(tmp_path):
  write(tmp_path / "a")
  write_shard(tmp_path / "a" / "001.tar", [("alone.jpg", image_bytes())], "a")
  take(config(tmp_path / "a"), 10, workdir=tmp_path)
  lines = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
  assert {(line["key"], line["reason"]) for line in lines} == {("alone", "no caption")}
  assert lines[0]["shard"].endswith("a/001.tar")


def test_too_large_a_share_of_bad_samples_ends_the_run(monkeypatch, tmp_path):
  write(tmp_path / "a", bad=range(0, 48, 4))
  monkeypatch.setattr("train.data.stream.batches._FEW", 40)
  take(config(tmp_path / "a", max_bad_share=0.5), 20)
  with pytest.raises(RunError, match=r"data.max_bad_share=0.1: undecodable image \(\d+\)"):
    take(config(tmp_path / "a", max_bad_share=0.1), 20, workdir=tmp_path)


def test_sets_are_mixed_by_their_weights_and_each_is_passed_over(tmp_path):
  for i, name in enumerate("ab"):
    write(tmp_path / name, first=1000 * i)
  both = "::".join(str(tmp_path / name / "*.tar") for name in "ab")
  mixed = config(tmp_path, train_shards=both, weights=(3.0, 1.0))
  batches, state = take(mixed, 60)
  share = np.mean(np.array(ids(batches)) >= 1000)
  assert 0.2 < share < 0.3
  epochs = [[position[0] for position in stream[3:]] for stream in state["streams"].values()]
  assert all(first > second for first, second in epochs)
  again, end = take(mixed, 25, take(mixed, 35, processes=2)[1])
  same(again, batches[35:])
  assert end == state
  one_set, _ = take(config(tmp_path, train_shards=both), 20)
  assert 0.3 < np.mean(np.array(ids(one_set)) >= 1000) < 0.7


def test_labels_become_captions(tmp_path):
  write(tmp_path / "a", captions=False)
  (tmp_path / "names.txt").write_text("class 0\nclass 1\nclass 2\n")
  labelled = config(
    tmp_path / "a", text_key="", label_key="label", class_names=str(tmp_path / "names.txt"),
    templates=("a {}",),
  )  # fmt: skip
  batches, _ = take(labelled, 10)
  assert set(ids(batches)) == {0, 1, 2}
  assert list(open_streamed(labelled).captions()) == ["a class 0", "a class 1", "a class 2"]


def test_captions_for_a_tokenizer_are_of_some_shards(folder, monkeypatch):
  monkeypatch.setattr(source, "_CAPTIONS", 6)
  monkeypatch.setattr(source, "_SHARDS_OF_CAPTIONS", 3)
  found = list(open_streamed(config(folder)).captions())
  assert len(found) == 6 and found[:2] == ["text 0", "text 1"]


def test_evaluation_shards_are_read_in_their_order(folder, tmp_path):
  write(tmp_path / "val", first=500)
  evaluated = config(folder, eval_split="val", eval_shards=str(tmp_path / "val" / "*.tar"))
  batches = list(open_streamed(evaluated).eval_batches("val", image_size=16, batch_size=10))
  assert [len(batch["image"]) for batch in batches] == [10, 10, 10, 10, 8]
  captions = [text for batch in batches for texts in batch["captions"] for text in texts]
  assert captions == [f"text {n}" for n in range(500, 548)]


@pytest.mark.parametrize(
  ("data", "message"),
  [
    ({"streams": 3}, "data.streams=3 must divide batch_size=8, .*: set data.streams=2"),
    ({"streams": 8}, "data.streams=8 .* at most the 6 shards .*000.tar: set data.streams=4"),
    ({"train_shards": ""}, "data.stream=true needs data.train_shards"),
    ({"weights": (1.0, 2.0)}, r"data.weights=\(1.0, 2.0\) are 2 numbers, .* are 1 sets"),
    ({"label_key": "label"}, "needs data.class_names"),
    ({"text_key": ""}, "Captions come from data.text_key or data.label_key"),
  ],
)
def test_wrong_values_are_named(folder, data, message):
  with pytest.raises(ValueError, match=message):
    iterators(config(folder, **data))


def test_streams_follow_from_the_shards_and_the_batch(folder):
  found = open_streamed(config(folder, streams=0))
  assert found._streams(1) == found._streams(2) == 4
  with pytest.raises(
    ValueError, match=r"8 processes, and at most the 6 shards .* more and smaller"
  ):
    found._streams(8)
  with pytest.raises(ValueError, match=r"data.streams=4 .* the 3 processes, .* more and smaller"):
    found._streams(3)
  many = found._replace(sets=(ShardSet(("a",) * 1000),))
  many.config.batch_size = 4096
  assert many._streams(1) == 64
  many.config.batch_size = 96
  assert many._streams(1) == 32


def test_parts_of_splits_are_refused(folder):
  found = open_streamed(config(folder))
  assert found.size("train") is None
  for split in ("train[:90%]", "val"):
    with pytest.raises(ValueError, match="reads whole splits"):
      found.size(split)


def test_a_shard_to_evaluate_on_is_not_trained_on(folder):
  with pytest.raises(ValueError, match=r"both name .*004.tar"):
    open_streamed(config(folder, eval_split="val", eval_shards=str(folder / "004.tar")))


def test_a_run_goes_on_with_its_own_shards_only(folder, tmp_path):
  _, state = take(config(folder), 2)
  with pytest.raises(RunError, match="name other shards than those that this run began with"):
    take(config(folder, train_shards=str(folder / "{000..004}.tar")), 1, state)
  with pytest.raises(RunError, match="or the run read an import"):
    take(config(folder), 1, {"batches": 3})


def touch(folder, seconds):
  for path in folder.glob("*.tar"):
    os.utime(path, (seconds, seconds))


def test_across_a_resume_a_change_of_size_is_seen(tmp_path):
  write(tmp_path / "a")
  whole, _ = take(config(tmp_path / "a"), 12)
  _, state = take(config(tmp_path / "a"), 2)
  touch(tmp_path / "a", 1000)  # as of a copy elsewhere
  same(take(config(tmp_path / "a"), 10, state)[0], whole[2:])
  for path in (tmp_path / "a").glob("*.tar"):
    path.write_bytes(path.read_bytes() + bytes(10240))
  with pytest.raises(
    RunError, match=r"has changed under this run: it has .* bytes .* now, and had [\d,]+ bytes\. "
  ):
    take(config(tmp_path / "a"), 20, state)


def test_a_shard_written_anew_is_seen_when_it_is_opened_again(tmp_path):
  write(tmp_path / "a")
  touch(tmp_path / "a", 1000)
  (iterator,) = iterators(config(tmp_path / "a", streams=1))
  try:
    next(iterator)
    touch(tmp_path / "a", 1001)
    times = [rf"\(changed 1970-01-01 00:16:{seconds} UTC\)" for seconds in (41, 40)]
    with pytest.raises(RunError, match=r"\d.tar has changed .*{} now, and had .*{}".format(*times)):
      for _ in range(12):  # two passes
        next(iterator)
  finally:
    iterator.close()


def test_streams_of_a_process_compare_what_they_open(tmp_path):
  write(tmp_path / "a")
  names = sorted(map(str, (tmp_path / "a").glob("*.tar")))
  versions = Versions()
  first, second = (
    blocks(names, Order(SHARDS, 2, i, (0, 0)), Position(), READING, versions) for i in range(2)
  )
  next(first)
  touch(tmp_path / "a", 1000)
  for _ in range(3):
    next(second)  # Shards that no stream had opened before.
  with pytest.raises(RunError, match=r"has changed under this run"):
    for _ in range(6):  # The next passes deal the shards out anew.
      next(second)


def test_without_streaming_a_place_elsewhere_is_refused_with_what_reads_it(folder):
  remote = config(folder, train_shards="s3://bucket/{000..009}.tar")
  remote.check()
  remote.data.stream = False
  with pytest.raises(RunError, match=r"data.train_shards='s3://.*data.stream=true reads such"):
    remote.check()


def test_reading_ends_with_the_iterator_and_no_end_waits_for_it(tmp_path, folder):
  before = set(threading.enumerate())
  (iterator,) = iterators(config(folder))
  next(iterator)
  reading = set(threading.enumerate()) - before
  names = [thread for thread in reading if thread.name == "reads"]
  assert len(names) == 4 and all(thread.daemon for thread in names)
  iterator.close()
  for thread in reading:
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.program
@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_is_gone_ends_the_run_or_is_listed(tmp_path, workers):
  write(tmp_path / "a")
  gone = config(tmp_path / "a", workers=workers, max_bad_share=1.0)
  (tmp_path / "a" / "002.tar").unlink()
  with pytest.raises(RunError, match=r"002.tar: No such file .* data.unreadable='skip'"):
    take(gone, 20)
  gone.data.unreadable = "skip"
  batches, _ = take(gone, 20, workdir=tmp_path)
  assert set(ids(batches)) == set(range(48)) - set(range(15, 24))
  lines = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
  assert {(line["shard"][-7:], line["key"], line["reason"]) for line in lines} == {
    ("002.tar", None, "unreadable")
  }


def test_shards_without_a_sample_end_the_run(tmp_path):
  write(tmp_path / "a", captions=False)
  with pytest.raises(RunError, match=r"Stream 0 of 4 found no sample .* in 10 passes: fewer"):
    take(config(tmp_path / "a", max_bad_share=1.0), 1)


def test_a_shard_that_cannot_be_read_for_a_while_has_not_changed(tmp_path):
  write(tmp_path / "a")
  names = sorted(map(str, (tmp_path / "a").glob("*.tar")))
  found = blocks(names, Order(SHARDS, 1, 0, (0, 0)), Position(), READING, Versions())
  for _ in range(2):
    assert sum(len(block.examples) for block in itertools.islice(found, SHARDS)) == 48
    (tmp_path / "a" / "002.tar").rename(tmp_path / "away")
    without = list(itertools.islice(found, SHARDS))
    assert sum(len(block.examples) for block in without) == 48 - 9
    assert [each.reason for block in without for each in block.skipped] == ["unreadable"]
    (tmp_path / "away").rename(tmp_path / "a" / "002.tar")


def test_an_evaluation_leaves_out_what_cannot_be_decoded(folder, tmp_path):
  write(tmp_path / "val", first=500, bad=(503, 540))
  evaluated = config(folder, eval_split="val", eval_shards=str(tmp_path / "val" / "*.tar"))
  batches = list(open_streamed(evaluated).eval_batches("val", image_size=16, batch_size=10))
  captions = [text for batch in batches for texts in batch["captions"] for text in texts]
  assert captions == [f"text {n}" for n in range(500, 548) if n not in (503, 540)]
  assert all(len(b["image"]) == len(b["captions"]) == len(b["label"]) for b in batches)


def test_a_lack_of_memory_is_no_fault_of_the_image(folder, monkeypatch):
  def decode(*_):
    raise MemoryError

  monkeypatch.setattr("train.data.augment._jpeg_size", lambda *_: None)
  monkeypatch.setattr("train.data.decode._load", decode)
  with pytest.raises(ValueError, match="cannot be decoded") as raised:
    take(config(folder, max_bad_share=1.0), 1)
  assert isinstance(raised.value.__cause__, MemoryError)


def test_an_ending_that_is_no_shard_s_fails_at_once(folder, tmp_path):
  (tmp_path / "a.zip").write_bytes(b"")
  for name in ("train_shards", "eval_shards"):
    with pytest.raises(RunError, match=r"a.zip is no shard that can be read"):
      open_streamed(config(folder, **{name: str(tmp_path / "a.zip")}))


@pytest.mark.parametrize("names, most", [(["a.tar"], 2), (["a.tar", "s3://b/a.tar"], 8)])
def test_a_disk_is_read_by_as_many_streams_as_there_are_cores_and_a_store_by_all(
  monkeypatch, names, most
):
  reading, at_once, changed = 0, [], threading.Condition()

  def blocks(*_):
    nonlocal reading
    with changed:
      reading += 1
      at_once.append(reading)
      changed.notify_all()
      changed.wait_for(lambda: reading > most, timeout=0.3)
    with changed:
      reading -= 1
    yield streams.Block(Position(), [{}], [])

  monkeypatch.setattr(streams, "blocks", blocks)
  monkeypatch.setattr(streams, "_DISK_TURNS", threading.Semaphore(2))
  readers = [streams._Reader(names, None, Position(), None, None) for _ in range(8)]
  for reader in readers:
    reader.take()
    reader.close()
  assert max(at_once) == most and len(at_once) == 8
