"""Paths that a user gives: of local files alone, with ~ for the home folder."""

import os
import re
from pathlib import Path

from train.errors import RunError

# "gs://bucket", which pathlib shortens to "gs:/bucket", and what open_clip and webdataset write
# without slashes. A drive has one letter.
_SCHEME = re.compile(r"(?i)[a-z][a-z0-9+.-]+:/|(pipe|hf-hub|local-dir|file):")


def local_path(path: str | os.PathLike, what: str, utf8: bool = False) -> Path:
  """The path that the flag or field `what` gives.

  utf8: it must be UTF-8, because libraries in C++ write there.

  Raises:
    RunError: it is none of this machine's, or there is no home folder for its ~.
  """
  check_local(path, what)
  if utf8 and any("\ud800" <= letter <= "\udfff" for letter in os.path.abspath(path)):
    raise RunError(f"{what}={os.path.abspath(path)!r} is not UTF-8: rename it.")
  return Path(path).expanduser()


def check_local(path: str | os.PathLike, what: str, but: str = "") -> None:
  """Raises a RunError for a place on another machine, a null byte, and a ~ without a home.

  but: what else would take such a place.
  """
  text = os.fspath(path)
  if _SCHEME.match(text):
    raise RunError(
      f"{what}={text!r} is no path of this machine: only local files and folders are read and"
      f" written{but}. Mount that place, or copy the files to a disk."
    )
  if "\0" in text:
    raise RunError(f"{what}={text!r} has a null byte, which no path may have.")
  try:
    Path(path).expanduser()
  except RuntimeError as error:
    raise RunError(f"{what}={text!r} needs a home folder: set HOME, or name a user.") from error
