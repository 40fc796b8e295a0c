"""Batches of streams: this process's rows of each, from threads or from worker processes.

A batch takes equally from every stream, in their order. A process has neighbouring streams, and so
has each of its workers. Which of them reads a stream changes nothing, so a run has the same batches
with any number of processes and workers.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np

from train.data import sample
from train.data.augment import RandomCrop
from train.data.machine import cores, system_error
from train.data.stream.streams import Reading, ShardSet, Skipped, Stream
from train.data.stream.versions import Versions
from train.data.workers import in_workers, worker_died
from train.errors import RunError

_FEW = 1000  # samples before whose number no share of bad ones ends a run


class Plan(NamedTuple):
  """What the batches of a run are made of; the same in all processes."""

  sets: tuple[ShardSet, ...]
  streams: int
  each: int  # rows that a batch takes from a stream
  seed: int
  reading: Reading
  crop: RandomCrop
  tokenize: Callable[[Sequence[dict]], dict[str, np.ndarray]]


class Batches(grain.DatasetIterator):
  """This process's rows of each batch, without end.

  Its state has those of its own streams; `merged` makes one of those of all processes.

  Args:
    own: the streams of this process.
    workers: processes; 0: threads of this one.
    ahead: batches that workers hold.
    digest: of the names of the shards.
    listed: a file for what is left out; None: it is only counted.
    max_bad_share: more left out than this share ends the run.
  """

  def __init__(
    self,
    plan: Plan,
    own: range,
    workers: int,
    ahead: int,
    digest: str,
    listed: Path | None,
    max_bad_share: float,
  ):
    super().__init__()
    self._iterator: grain.DatasetIterator | None = None
    self._plan, self._own, self._ahead, self._digest = plan, own, ahead, digest
    self._workers = min(workers, len(own))
    self._listed, self._max_bad_share = listed, max_bad_share
    self._states: dict[str, list] = {}
    self._reasons: Counter[str] = Counter()

  def start_prefetch(self) -> None:
    if self._iterator is None:
      pieces = max(1, self._workers)
      edges = [self._own.start + len(self._own) * i // pieces for i in range(pieces + 1)]
      groups = [range(a, b) for a, b in itertools.pairwise(edges)]
      self._groups = pieces
      dataset = _Groups(self._plan, groups, dict(self._states), threads=not self._workers)
      if self._workers:
        dataset = in_workers(dataset, self._workers, self._ahead)
      self._iterator = iter(dataset)

  def __next__(self) -> dict[str, np.ndarray]:
    self.start_prefetch()
    with worker_died(self._workers):
      parts = [next(self._iterator) for _ in range(self._groups)]
    for part in parts:
      about = json.loads(part["about"])
      self._states |= about["states"]
      self._note([Skipped(*each) for each in about["skipped"]])
    names = ("image", "text")
    # Copies out of the workers' shared memory.
    return {name: np.concatenate([part[name] for part in parts]) for name in names}

  def _note(self, skipped: Sequence[Skipped]) -> None:
    if not skipped:
      return
    self._reasons.update(each.reason for each in skipped)
    if self._listed:
      with self._listed.open("a", encoding="utf-8") as file:
        # ASCII, since texts of strangers can have halves of characters.
        file.writelines(json.dumps(each._asdict()) + "\n" for each in skipped)
    bad, seen = _counts(self._states)
    if seen >= _FEW and bad > self._max_bad_share * seen:
      reasons = ", ".join(f"{reason} ({n:,})" for reason, n in self._reasons.most_common(3))
      where = f" {self._listed} lists them." if self._listed else ""
      raise RunError(
        f"{bad:,} of {seen:,} samples could not be used, more than data.max_bad_share="
        f"{self._max_bad_share:g}: {reasons}.{where}"
      )

  def get_state(self) -> dict[str, Any]:
    return {"streams": dict(self._states), "shards": self._digest}

  def set_state(self, state: dict[str, Any]) -> None:
    self.close()
    if state.get("shards") != self._digest:
      raise RunError(
        "data.train_shards name other shards than those that this run began with, or the run read"
        " an import. Choose a new --workdir, or go back to the shards of then."
      )
    self._states = {str(i): state["streams"][str(i)] for i in self._own}

  def close(self) -> None:
    """Ends the threads or processes; `next` starts them again."""
    if self._iterator is not None:
      self._iterator.close()
      self._iterator = None


def merged(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """One state of those of all processes, each of which has its own streams."""
  first, *others = states
  for other in others if "streams" in first else ():
    first = first | {"streams": first["streams"] | other["streams"]}
  return first


def left_out(state: dict[str, Any]) -> float | None:
  """The share of samples that could not be used; None: of data that are no streams."""
  if "streams" not in state:
    return None
  bad, seen = _counts(state["streams"])
  return bad / max(1, seen)


def _counts(states: dict[str, list]) -> tuple[int, int]:
  """How many samples could not be used, of how many."""
  drawn, unusable, undecodable = (sum(state[i] for state in states.values()) for i in range(3))
  return unusable + undecodable, drawn + unusable


class _Groups(grain.IterDataset):
  """Parts of batches: those of each group of streams in turn; grain gives a worker its groups."""

  def __init__(self, plan: Plan, groups: Sequence[range], states: dict[str, list], threads: bool):
    super().__init__()
    self._plan, self._groups, self._states, self._threads = plan, groups, states, threads

  def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
    del sequential_slice
    self._groups = self._groups[sl]

  def __iter__(self) -> "_Parts":
    # grain also makes one that reads nothing, to ask for its state.
    return _Parts(self._plan, self._groups[0], self._states, cores() if self._threads else 1)


class _Parts(grain.DatasetIterator):
  """The rows of one group of streams in batch after batch, and the streams' states after it."""

  def __init__(self, plan: Plan, group: range, states: dict[str, list], threads: int):
    super().__init__()
    self._plan, self._group, self._states, self._threads = plan, group, states, threads
    self._streams: list[Stream] = []
    self._decodes: ThreadPoolExecutor | None = None

  def _begin(self) -> None:
    plan, states, versions = self._plan, self._states, Versions()
    if self._threads > 1:
      self._decodes = ThreadPoolExecutor(self._threads)
    self._streams = [
      Stream(plan.sets, i, plan.streams, plan.seed, plan.reading, versions, states.get(str(i), ()))
      for i in self._group
    ]

  def __next__(self) -> dict[str, Any]:
    if not self._streams:
      self._begin()
    rows: list[list[dict]] = [[] for _ in self._streams]
    skipped: list[Skipped] = []
    while missing := [i for i, own in enumerate(rows) for _ in range(self._plan.each - len(own))]:
      drawn = []
      for i in missing:
        example, rng, before = self._streams[i].draw()
        skipped += before
        drawn.append((example, rng))
      run = self._decodes.map if self._decodes else map
      for i, result in zip(missing, run(self._crop, drawn), strict=True):
        if isinstance(result, Skipped):
          self._streams[i].undecodable += 1
          skipped.append(result)
        else:
          rows[i].append(result)
    batch = self._plan.tokenize([row for own in rows for row in own])
    states = {str(i): s.state for i, s in zip(self._group, self._streams, strict=True)}
    return batch | {"about": json.dumps({"states": states, "skipped": skipped})}

  def _crop(self, drawn: tuple[dict, np.random.Generator]) -> dict | Skipped:
    example, rng = drawn
    try:
      return self._plan.crop(example, rng)
    except Exception as error:  # Each of Pillow's decoders has its own errors.
      if system_error(error):  # It says nothing about the image.
        raise
      cause = error.__cause__ or error
      reason = sample.undecodable(cause).reason
      return Skipped(example["shard"], example["key"], reason, str(cause))

  def close(self) -> None:
    for stream in self._streams:
      stream.close()
    if self._decodes:
      self._decodes.shutdown(wait=False, cancel_futures=True)

  def get_state(self) -> dict[str, Any]:
    return {}  # What a part says of its streams is in the part.

  def set_state(self, state: dict[str, Any]) -> None:
    raise NotImplementedError("The states of streams are given when this is made.")
