"""The files of a work directory: one process holds it, and its JSON files are whole or named."""

import contextlib
import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from train.errors import RunError


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
  """Holds `folder` for this process until it leaves the block or dies.

  Raises:
    RunError: another process holds it.
  """
  with (folder / ".lock").open("a+") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      file.seek(0)
      holder = file.read().strip() or "another process"
      raise RunError(
        f"{folder} is in use by {holder}. Wait until it ends or stop it, or choose another folder."
      ) from None
    except OSError as error:  # Some network file systems have no locks.
      print(f"{folder} cannot be locked: {error}. Start nothing else there.", file=sys.stderr)
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
    yield


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
