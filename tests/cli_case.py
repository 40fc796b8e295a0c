"""A program started as by its command line, in this process."""

import os
import sys

import pytest
from absl.testing import flagsaver

from train import cli


def started(monkeypatch, capsys, *arguments, job=lambda config, workdir: None):
  """The exit status and stderr of the program `job` in this process."""
  monkeypatch.setattr(sys, "argv", ["train.main", *map(str, arguments)])
  monkeypatch.setattr(sys, "excepthook", sys.excepthook)
  monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
  with flagsaver.flagsaver(), pytest.raises(SystemExit) as raised:
    cli.run(job)
  code = raised.value.code
  return (code if isinstance(code, int) else 1), f"{code}" + capsys.readouterr().err
