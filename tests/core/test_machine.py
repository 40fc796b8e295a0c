"""What the machine gives: cores to use, and errors of its own."""

import errno
import os

import pytest

from train.data import machine


def test_cores_are_those_that_this_process_may_use(monkeypatch):
  monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
  monkeypatch.setattr(os, "cpu_count", lambda: 64)
  assert machine.cores() == 2


def caused(cause):
  error = ValueError("a library's own")
  error.__cause__ = cause
  return error


@pytest.mark.parametrize(
  ("error", "words"),
  [
    (OSError(errno.EMFILE, "x"), "Too many open files"),
    (RuntimeError("open() failed: Too many open files; opening /x"), "Too many open files"),
    (RuntimeError("read() failed: Input/output error; reading /x"), "Input/output error"),
    (RuntimeError("read() failed: Stale file handle"), "Stale file handle"),
    (MemoryError(), "Cannot allocate memory"),
    (caused(OSError(errno.EACCES, "x")), "Permission denied"),
    (caused(OSError(errno.ETIMEDOUT, "x")), "Connection timed out"),
    (RuntimeError("open() failed: No such file or directory; opening /x"), None),
    (FileNotFoundError(errno.ENOENT, "x"), None),
    (ValueError("hash mismatch"), None),
  ],
)
def test_an_error_of_the_system_is_told_from_one_of_the_data(error, words):
  assert machine.system_error(error) == words
