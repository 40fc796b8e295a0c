"""How soon does a stream of many shards begin and resume, what does it hold, how does it shuffle?

  python -m benchmarks.data_scale

Needs moto and open_clip. Adds rows to results/data.jsonl. Batches are 512 images of 64 streams, by
threads of this process. Shards on the disk are links to 4, each with 512 photos of 80 kB; in moto's
S3 they have 8 small images. Names are listed by a pattern; moto takes most of the time for its
list. Memory is the most that a process ever had, with blocks of 16 photos: names count. A pass is
over 64 shards of 1,024 small images; the loader of open_clip has its 4 workers.
"""

import contextlib
import json
import multiprocessing
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.data import open_clip, record, s3, write_photos
from train.config import Config, DataConfig, ModelConfig
from train.data.source import open_source
from train.data.stream import stores

BATCH, STREAMS, EACH = 512, 64, 1024


def main() -> None:
  with tempfile.TemporaryDirectory() as name:
    for measure, case, value in measured(Path(name)):
      row = {"measure": measure, "case": case, "value": round(float(value), 4)}
      print(json.dumps(row), flush=True)
      record(row)


def measured(folder: Path) -> Iterator[tuple[str, str, float]]:
  write_photos(folder, each=512)
  few, many, most = (links(folder, count) for count in (STREAMS, 10_000, 100_000))
  yield "seconds from a state to its next batch, which has the same bits", "a disk", resumed(few)
  yield "seconds to the first batch of 10,000 shards", "a disk", first_batch(many)
  with s3(tiny(folder / "s3", 10_000, 8)) as place:
    began = time.perf_counter()
    stores.expand(f"{place}/*.tar")
    yield "seconds in which moto lists 10,000 names", "S3", time.perf_counter() - began
    yield "seconds to the first batch of 10,000 shards", "S3", first_batch(f"{place}/*.tar")
  for count, shards in (("10,000 shards", many), ("100,000 shards", most)):
    yield "MB of the largest of 16 workers", count, largest_worker(shards)
  numbered = f"{tiny(folder / 'numbered', STREAMS, EACH)}/photos-{{0..{STREAMS - 1}}}.tar"
  yield from shuffle("stream", order(numbered))
  theirs = open_clip(shards=numbered, workers=4, batch_size=BATCH, order=STREAMS * EACH)
  yield from shuffle("open_clip", np.array(theirs))


def links(folder: Path, count: int) -> str:
  (folder / str(count)).mkdir()
  for i in range(count):
    (folder / str(count) / f"{i:06}.tar").symlink_to(folder / f"photos-{i % 4}.tar")
  return f"{folder}/{count}/*.tar"


def tiny(folder: Path, shards: int, each: int) -> Path:
  """The folder, with shards of small images whose captions are their numbers."""
  folder.mkdir()
  write_photos(folder, shards, each, (30, 20), "{}")
  return folder


@contextlib.contextmanager
def batches(shards: str, **data) -> Iterator[Iterator[dict[str, np.ndarray]]]:
  data = DataConfig(name="photos", stream=True, train_shards=shards, streams=STREAMS, **data)
  source = open_source(Config(model=ModelConfig(size=""), data=data, batch_size=BATCH))
  iterator = source.train_iterator(numbers, image_size=224, context_length=1)
  with contextlib.closing(iterator):
    yield iterator


def numbers(captions: Sequence[str], length: int) -> np.ndarray:
  return np.array([[int(text) if text.isdecimal() else 0] * length for text in captions])


def first_batch(shards: str) -> float:
  began = time.perf_counter()
  with batches(shards) as iterator:
    next(iterator)
    return time.perf_counter() - began


def resumed(shards: str) -> float:
  with batches(shards) as iterator:
    for _ in range(40):
      next(iterator)
    state, expected = iterator.get_state(), next(iterator)
  with batches(shards) as iterator:
    began = time.perf_counter()
    iterator.set_state(state)
    batch = next(iterator)
    seconds = time.perf_counter() - began
  np.testing.assert_equal(batch, expected)
  return seconds


def largest_worker(shards: str) -> float:
  with batches(shards, workers=16, block=16) as iterator:
    for _ in range(3):
      next(iterator)
    workers = multiprocessing.active_children()
    statuses = [Path(f"/proc/{worker.pid}/status").read_text() for worker in workers]
  return max(int(re.search(r"VmHWM:\s*(\d+)", status)[1]) for status in statuses) * 1024 / 1e6


def order(shards: str) -> np.ndarray:
  """The numbers of a pass, batch after batch."""
  with batches(shards) as iterator:
    return np.concatenate([next(iterator)["text"][:, 0] for _ in range(STREAMS * EACH // BATCH)])


def shuffle(loader: str, order: np.ndarray) -> Iterator[tuple[str, str, float]]:
  assert np.array_equal(np.sort(order), np.arange(STREAMS * EACH))
  place = np.argsort(order)  # of each number
  shards = place.reshape(STREAMS, EACH)
  first, second = shards[:, :-1], shards[:, 1:]
  distance = np.abs(first - second)
  yield "samples between neighbours of a shard, in the mean of a pass", loader, distance.mean()
  yield "percent of neighbours that follow each other", loader, 100 * (distance == 1).mean()
  together = (first // BATCH == second // BATCH).mean()
  yield "percent of neighbours that share a batch", loader, 100 * together


if __name__ == "__main__":
  main()
