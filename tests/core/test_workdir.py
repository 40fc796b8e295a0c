"""A folder belongs to one process at a time; whoever waits for it says so."""

import subprocess
import sys
import threading
import time

import pytest

from train import workdir
from train.errors import RunError


@pytest.fixture
def held(tmp_path):
  """A folder that another process holds."""
  code = """
import pathlib, sys
from train.workdir import lock
with lock(pathlib.Path(sys.argv[1])):
  print(flush=True)
  sys.stdin.read()
"""
  holder = subprocess.Popen(
    [sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
  )
  holder.stdout.readline()
  yield tmp_path, holder
  holder.communicate()


def test_a_wait_for_a_lock_is_said_each_minute_and_ends_with_its_holder(held, monkeypatch, capfd):
  folder, holder = held
  monkeypatch.setattr(workdir, "_MINUTE", 0.3)
  threading.Timer(1.5, holder.communicate).start()
  with workdir.lock(folder, wait=True):
    assert holder.wait() == 0
  said = capfd.readouterr().err.splitlines()
  assert len(said) > 1 and f"Waiting for process {holder.pid} on " in said[0]


def test_a_wait_for_a_lock_ends_when_nothing_changes_in_the_folder(held, monkeypatch):
  folder, holder = held
  monkeypatch.setattr(workdir, "_MINUTE", 0.1)
  monkeypatch.setattr(workdir, "PATIENCE", 1.5)
  start = time.monotonic()
  beating = threading.Event()

  def beat():
    while not beating.wait(0.2) and time.monotonic() < start + 3:
      (folder / "part").write_text(str(time.monotonic()))

  thread = threading.Thread(target=beat)
  thread.start()
  with (
    pytest.raises(RunError, match=f"is in use by process {holder.pid} on"),
    workdir.lock(folder, wait=True),
  ):
    pass
  thread.join()
  assert time.monotonic() - start > 4
