"""An import's processes: signals do not end them, their death is explained, nothing is left."""

import contextlib
import errno
import multiprocessing
import os
import signal
import sys
import time
import types

import pytest

from train.data import pool
from train.errors import RunError

JOBS = list(range(6))


def square(job, report):
  report(job)
  return job * job


def signal_the_group_s_processes(job, report):
  for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    os.kill(os.getpid(), number)
  return job


def end(job, report):
  os.kill(os.getpid(), job)
  time.sleep(60)


def fail(job, report):
  raise FileNotFoundError(errno.ENOENT, "No such file", f"shard {job}")


def wait(job, report):
  report(job)
  time.sleep(600)


@pytest.mark.parametrize("processes", [1, 2])
def test_each_job_gives_its_result_and_its_reports(processes):
  heard = []
  assert dict(pool.run(square, JOBS, processes, heard.append)) == {job: job * job for job in JOBS}
  assert sorted(message for message in heard if message is not None) == JOBS


def test_signals_to_a_process_do_not_end_it():
  before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
  work = pool.run(signal_the_group_s_processes, JOBS, 2, lambda message: None)
  assert sorted(job for job, _ in work) == JOBS
  assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


@pytest.mark.parametrize(
  ("number", "message"),
  [
    (signal.SIGKILL, "on 9 was killed by SIGKILL: mostly the system, for lack of memory"),
    (signal.SIGBUS, "on 7 was killed by SIGBUS: a full disk or /dev/shm"),
  ],
)
def test_the_death_of_a_process_is_explained_by_its_signal(number, message):
  with pytest.raises(RunError, match=message):
    list(pool.run(end, [number, number], 2, lambda message: None))
  assert not multiprocessing.active_children()


def test_an_error_of_a_job_is_raised_as_it_is():
  with pytest.raises(FileNotFoundError) as raised:
    list(pool.run(fail, JOBS, 2, lambda message: None))
  assert raised.value.filename.startswith("shard ")


def test_an_interrupted_program_ends_its_processes_at_once():
  def interrupt(message):
    if message is not None:
      raise KeyboardInterrupt

  work = contextlib.closing(pool.run(wait, JOBS, 2, interrupt))
  with work as ended, pytest.raises(KeyboardInterrupt):
    next(ended)
  assert not multiprocessing.active_children()


def test_a_process_does_not_import_the_program(monkeypatch, tmp_path):
  program = types.ModuleType("__main__")
  program.__file__ = str(tmp_path / "program.py")
  (tmp_path / "program.py").write_text("raise SystemExit(7)")
  monkeypatch.setitem(sys.modules, "__main__", program)
  assert len(list(pool.run(square, JOBS, 2, lambda message: None))) == len(JOBS)
  assert sys.modules["__main__"] is program
