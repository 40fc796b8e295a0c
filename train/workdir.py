"""The files of a work directory: one process holds it, and its JSON files are whole or named."""

import contextlib
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from train.errors import RunError

PATIENCE = 3600.0  # seconds to wait for a lock while nothing changes in the folder
_MINUTE = 60.0


@contextlib.contextmanager
def lock(folder: Path, wait: bool = False) -> Iterator[None]:
  """Holds `folder` for this process until it leaves the block or dies.

  wait: until no other process holds it. The wait is said each minute, and ends with an error an
    hour after the last change in the folder.

  Raises:
    RunError: another process holds it.
  """
  with (folder / ".lock").open("a+") as file:
    try:
      if wait:
        _wait(file, folder)
      else:
        fcntl.flock(file, _AT_ONCE)
    except BlockingIOError:
      raise RunError(
        f"{folder} is in use by {_holder(file)}. Wait until it ends or stop it, or choose another"
        " folder."
      ) from None
    except OSError as error:  # Some network file systems have no locks.
      print(f"{folder} cannot be locked: {error}. Start nothing else there.", file=sys.stderr)
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
    yield


_AT_ONCE = fcntl.LOCK_EX | fcntl.LOCK_NB


def _wait(file: TextIO, folder: Path) -> None:
  start = said = changed = time.monotonic()
  newest = 0.0
  while True:
    try:
      return fcntl.flock(file, _AT_ONCE)
    except BlockingIOError:
      now = time.monotonic()
      if now - said >= _MINUTE:
        before, newest, said = newest, _last_change(folder), now
        if newest != before:  # The clock of a file system may be another.
          changed = now
        if now - changed >= PATIENCE:
          raise
        print(
          f"Waiting for {_holder(file)}, which works in {folder}, for {(now - start) / 60:.0f} min;"
          f" the last change there was {(now - changed) / 60:.0f} min ago.",
          file=sys.stderr,
          flush=True,
        )
    time.sleep(0.2)


def _holder(file: TextIO) -> str:
  file.seek(0)
  return file.read().strip() or "another process"


def _last_change(folder: Path) -> float:
  """The newest time of a file in the folder, which may lose files meanwhile."""
  times = [0.0]
  for path in folder.rglob("*"):
    with contextlib.suppress(OSError):
      times.append(path.stat().st_mtime)
  return max(times)


def check_writable(folder: Path, what: str) -> None:
  """Raises a RunError if the flag `what` gives a folder that cannot be made or written."""
  there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
  if not there.is_dir():
    raise RunError(f"{what}={folder} is no folder: {there} is a file. Give another {what}.")
  if not os.access(there, os.W_OK | os.X_OK):
    raise RunError(f"{there} cannot be written. Give another {what}.")


def replace_text(path: Path, text: str) -> None:
  """Replaces the file at once, so that it is never partly written."""
  partial = path.with_suffix(".partial")
  partial.write_text(text)
  partial.replace(path)


def write_json(path: Path, value: dict) -> None:
  replace_text(path, json.dumps(value, indent=2) + "\n")


def read_config(path: Path) -> dict:
  """The contents of a config.json."""
  try:
    config = json.loads(path.read_bytes())
    if not isinstance(config, dict):
      raise ValueError("it holds no object")
  except (ValueError, RecursionError) as error:
    raise RunError(
      f"{path} is damaged: {error}. If the config of this command is the run's, delete that file,"
      " and the same command continues."
    ) from error
  return config


def steps_on_disk(checkpoints: Path) -> set[int]:
  """The steps of the complete checkpoints, without a look into them."""
  # orbax renames a checkpoint's directory to its step when it is complete.
  names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
  return {int(name) for name in names if name.isdecimal()}


def newest_step(checkpoints: Path) -> int | None:
  """The step of the newest complete checkpoint; None if there is none."""
  return max(steps_on_disk(checkpoints), default=None)
