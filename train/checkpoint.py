"""Checkpoints that a killed run resumes from exactly.

A checkpoint holds the training state (orbax, written in the background) and a JSON record with the
position of the data iterator and a checksum of every array. The position is the same in every
process, since all take the same steps. A checkpoint that is incomplete, unreadable or does not
match its checksums is renamed to damaged-<step>, and the one before it is used. A reader beside a
training program renames and deletes nothing. A run resumes in `_train` of train/loop.py.

Each of several processes writes and reads its part. A checkpoint gets its name when all parts are
written, and is restored if all can be read. orbax's CheckpointManager is not used: in a process
whose write failed it waits for the others, which wait for that write.
"""

import contextlib
import glob
import itertools
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from sbjax.optim.stable_adamw import ScaleByStableAdamState, leading_axes
from train.errors import RunError
from train.optimizer import stacked
from train.parallel.agreement import gather
from train.workdir import newest_step, steps_on_disk


def _glob(folder: epath.Path, pattern: str) -> Iterator[epath.Path]:
  return (folder / name for name in glob.glob(pattern, root_dir=folder))


# orbax looks for the parts of a checkpoint with it. etils' own takes the folder's name for a
# pattern, too: in "run[1]" it finds none of them, and the checkpoint is lost.
type(epath.Path()).glob = _glob


class Restored(NamedTuple):
  step: int
  state: Any
  data: dict  # the data iterator's position


class Checkpointer:
  """Saves to and restores from `directory`, or only reads.

  Args:
    keep: how many of the newest steps stay.
    keep_every: its multiples stay, too; 0: none.
    best: the name of a score; the step with the best stays, too. "": none.
  """

  def __init__(
    self,
    directory: str | Path,
    keep: int = 1,
    read_only: bool = False,
    *,
    keep_every: int = 0,
    best: str = "",
  ):
    self.directory = Path(directory).absolute()
    self._keep, self._read_only = keep, read_only
    self._keep_every, self._best = keep_every, best
    self._scores: dict[int, float] = {}  # that of `best`, by step; more is better
    self._handler = ocp.CompositeCheckpointHandler("state", "record")
    # The limit is for those who do not wait: train.parallel.watchdog limits the waits.
    self._writer = ocp.AsyncCheckpointer(self._handler, timeout_secs=24 * 3600)
    self._thread = ThreadPoolExecutor(1, "checkpoint")
    self._write = None  # the Future of the last write
    if not read_only:
      self.directory.mkdir(parents=True, exist_ok=True)
      self._remove_unfinished()

  def save(self, step: int, state, data: dict) -> None:
    """Starts to write the state after `step` steps; it may be donated as soon as this returns."""
    self.wait()  # The unfinished write has to be on disk to measure space.
    self.directory.mkdir(parents=True, exist_ok=True)  # Someone may have deleted it.
    self._check_space(step, sum(x.nbytes for x in jax.tree.leaves(state)))
    record = {"data": data, "checksums": _checksums(state)}
    items = ocp.args.Composite(state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record))
    with self._reporting():
      self._writer.save(self.directory / str(step), args=items)
    self._write = self._thread.submit(self._finish)

  def scored(self, step: int, scores: dict[str, float]) -> None:
    """Notes the scores of a step, whose checkpoint stays while it is the best."""
    if self._best in scores:
      self._scores[step] = scores[self._best] * (-1 if self._best.endswith("loss") else 1)

  def best_step(self) -> int | None:
    """The step on disk with the best score, the newest of equals; None if none has a score."""
    steps = steps_on_disk(self.directory) & self._scores.keys()
    return max(steps, key=lambda step: (self._scores[step], step), default=None)

  def _finish(self) -> None:
    """Waits for the write, then removes the checkpoints that do not stay."""
    self._writer.wait_until_finished()
    if jax.process_index() == 0:
      steps = sorted(steps_on_disk(self.directory))
      stay = {*steps[-self._keep :], self.best_step()}
      for step in steps:
        if not (step in stay or (self._keep_every and step % self._keep_every == 0)):
          shutil.rmtree(self.directory / str(step))

  def check(self) -> None:
    """Raises the error of a write that has failed; waits for nothing."""
    if self._write and self._write.done():
      self.wait()

  def wait(self) -> None:
    """Returns when all checkpoints are on disk."""
    write, self._write = self._write, None
    if write:
      with self._reporting():
        write.result()

  def restore(self, like, only: int | None = None) -> Restored | None:
    """The newest undamaged checkpoint, laid out as `like` (shapes with shardings), or None.

    only: the step of the checkpoint, in place of the newest.

    Raises:
      RunError: there are checkpoints, but none of them can be read into `like`; or there is none of
        the step `only`.
    """
    failed = {}
    while steps := self._steps(only) - failed.keys():
      step = max(steps)
      restored, reason = self._restore(step, like)
      if restored is None and (before := older(like)) is not None:
        restored, _ = self._restore(step, before)
        restored = restored and restored._replace(state=newer(restored.state, like))
      if restored is None:
        failed[step] = reason
        continue
      damaged = self._still_there(failed)
      for damaged_step, reason in damaged.items():
        print(f"The checkpoint of step {damaged_step} cannot be read: {reason}", file=sys.stderr)
      if damaged:
        print(f"Falling back to the checkpoint of step {step}.", file=sys.stderr)
      if damaged and not self._read_only:
        self._put_aside(damaged)
      return restored
    if damaged := self._still_there(failed):
      reasons = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
      raise RunError(
        f"No checkpoint in {self.directory} can be restored: {reasons}."
        " Was it written with another model, or by an older version? A new --workdir starts afresh."
      )
    return None

  def close(self) -> None:
    self.wait()
    self._thread.shutdown()
    self._writer.close()

  def _restore(self, step: int, like) -> tuple[Restored | None, str]:
    """The checkpoint of a step, or None and what is wrong with it: the same in all processes."""
    items, reason = None, ""
    try:
      items = self._handler.restore(
        self.directory / str(step),
        args=ocp.args.Composite(
          state=ocp.args.StandardRestore(like), record=ocp.args.JsonRestore()
        ),
      )
    except Exception as error:  # Damage raises many types: a missing file, a codec, a shape.
      reason = _first_line(error)
    # A process that cannot read its part must not leave the others alone in what follows.
    reasons = gather(f"the checkpoint of step {step}", reason)
    if reason := "; ".join(dict.fromkeys(filter(None, reasons))):
      return None, reason
    sums = _checksums(items.state)
    wrong = [name for name, value in items.record["checksums"].items() if sums[name] != value]
    if wrong:
      return None, f"checksum of {wrong[0]} ({len(wrong)} arrays in all)"
    return Restored(step, items.state, items.record["data"]), ""

  def _steps(self, only: int | None = None) -> set[int]:
    """The steps that process 0 sees; of them `only` one, if it says which."""
    steps = gather("the names of the checkpoints", sorted(steps_on_disk(self.directory)))[0]
    if only is None:
      return set(steps)
    if only not in steps:
      there = ", ".join(map(str, steps)) or "none"
      raise RunError(f"{self.directory} has no checkpoint of step {only}: it has {there}.")
    return {only}

  def _still_there(self, failed: dict[int, str]) -> dict[int, str]:
    """The failed steps that are damaged, not deleted by a training program beside this one."""
    there = self._steps()
    return {step: reason for step, reason in failed.items() if step in there}

  def _put_aside(self, steps: Iterable[int]) -> None:
    if jax.process_index() == 0:
      for step in steps:
        names = (f"damaged-{step}" + (f"-{i}" if i > 1 else "") for i in itertools.count(1))
        free = next(name for name in names if not (self.directory / name).exists())
        (self.directory / str(step)).rename(self.directory / free)
    gather("damaged checkpoints to be put aside", None)

  @contextlib.contextmanager
  def _reporting(self) -> Iterator[None]:
    try:
      yield
    except Exception as error:
      self._remove_unfinished()
      raise RunError(
        f"Could not write a checkpoint to {self.directory}: {_first_line(error)}."
        f" The last good one is {self.describe_newest_on_disk()}. The same command continues from"
        " it."
      ) from error

  def _remove_unfinished(self) -> None:
    """Repeats it for seconds: threads of a write that failed may still make files."""
    deadline = time.monotonic() + 2
    while jax.process_index() == 0 and time.monotonic() < deadline:
      for unfinished in (left := [*self.directory.glob("*.orbax-checkpoint-tmp")]):
        shutil.rmtree(unfinished, ignore_errors=True)
      if not any(unfinished.exists() for unfinished in left):
        return
      time.sleep(0.05)

  def _check_space(self, step: int, needed: int) -> None:
    """Raises one clear error before the write: on a full disk, each of orbax's threads fails."""
    free = shutil.disk_usage(self.directory).free
    if free < needed:
      raise RunError(
        f"No space left on device: the checkpoint of step {step} takes {needed / 1e6:,.0f} MB, and"
        f" {self.directory} has {free / 1e6:,.0f}. The last good one is"
        f" {self.describe_newest_on_disk()}."
        " The same command continues from it."
      )

  def describe_last_good(self) -> str:
    """Waits for the current write, then names the newest checkpoint on disk."""
    with contextlib.suppress(RunError):
      self.wait()
    return self.describe_newest_on_disk()

  def describe_newest_on_disk(self) -> str:
    """As `describe_last_good`, but waits neither for a write nor for other processes."""
    step = newest_step(self.directory)
    return "none" if step is None else f"step {step} in {self.directory}"


def _first_line(error: Exception) -> str:
  """The error's type and first line; a long line is cut in the middle, as its ends say most."""
  line = next(iter(str(error).strip().splitlines()), "")
  line = line.partition(" [source locations")[0]  # Of tensorstore's C++.
  line = f"{line[:120]} ... {line[-180:]}" if len(line) > 310 else line
  return f"{type(error).__name__}: {line}" if line else type(error).__name__


@jax.jit
def _bit_sums(leaves):
  """The checksum of each array: the sum of its elements' bits modulo 2**32, in any order."""

  def bit_sum(x):
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return jnp.sum(jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32))

  return [bit_sum(x) for x in leaves]


def _checksums(state) -> dict[str, int]:
  paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(state), strict=True)
  names = [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]
  sums = jax.device_get(_bit_sums(leaves))
  return {name: int(np.asarray(value)) for name, value in zip(names, sums, strict=True)}


# Earlier versions had StableAdamW's RMS in a tree like the parameters, not in one vector.


def older(like) -> Any:
  """`like`, shapes with shardings, as an earlier version saved it; None if that is the same."""
  found = _changed(_rms_by_parameter, like)
  return None if jax.tree.structure(found) == jax.tree.structure(like) else found


def newer(state, like) -> Any:
  """A state that was restored as `older(like)`, as `like`."""
  state = _changed(lambda node: node._replace(rms=_vector(node.rms)), state)
  return jax.tree.map(lambda x, shape: jax.device_put(x, shape.sharding), state, like)


def _changed(change, tree) -> Any:
  def is_state(node):
    return isinstance(node, ScaleByStableAdamState)

  return jax.tree.map(lambda node: change(node) if is_state(node) else node, tree, is_leaf=is_state)


def _rms_by_parameter(node: ScaleByStableAdamState) -> ScaleByStableAdamState:
  def shape(axes, moment):
    return jax.ShapeDtypeStruct(moment.shape[:axes], jnp.float32, sharding=node.rms.sharding)

  return node._replace(rms=jax.tree.map(shape, leading_axes(stacked, node.mu), node.mu))


@jax.jit
def _vector(tree) -> jax.Array:
  return jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(tree)])
