"""The watchdog ends a hanging program with a message, but not a slow, suspended or ended one."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from train.parallel.watchdog import EXIT_CODE, describe_threads

ROOT = Path(__file__).parents[2]
PROGRAM = """
import threading, time
from train.parallel import watchdog
from train.parallel.watchdog import Watchdog

watchdog.PATIENCE = 1

def last_good():
  {last_good}

def pull():
  threading.Event().wait()

def step():
  {step}

threading.Thread(target=pull, name="decoder", daemon=True).start()
with Watchdog({seconds}, {pause}, {process}, 3, last_good, tick=0.05, linger={linger}) as watch:
  watch.{wait}
  print("started", flush=True)
  step()
print("done", flush=True)
time.sleep(0.3)
"""


def start(**parts) -> subprocess.Popen:
  parts = {
    "last_good": "return 'step 6 in runs'", "step": "time.sleep(60)", "process": 1, "linger": 0,
    "seconds": 0.3, "pause": 60, "wait": "waits_for('the result of step 7')", **parts,
  }  # fmt: skip
  return subprocess.Popen(
    [sys.executable, "-c", PROGRAM.format(**parts)],
    cwd=ROOT,
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )


def run(**parts) -> tuple[int, str, str]:
  process = start(**parts)
  out, err = process.communicate(timeout=30)
  return process.returncode, out, err


def test_a_program_that_hangs_ends_and_says_where():
  code, out, err = run()
  assert code == EXIT_CODE != 0
  assert out == "started\n"
  assert re.search(r"Process 1 of 3 \(pid \d+\) waited 0.3 s for the result of step 7", err)
  assert "The limit is --config.step_timeout_seconds" in err
  assert re.search(r"  MainThread\n(    .*\n)*    <string>:\d+ step\n", err)
  assert re.search(r"  decoder\n(    .*\n)*    <string>:\d+ pull\n", err)
  assert "the last good checkpoint is step 6 in runs" in err
  assert "watchdog\n" not in err


def test_a_program_stuck_in_c_is_ended():
  # One call of C without the GIL, like a collective that waits for ever.
  blocked = "import ctypes; ctypes.CDLL(None).pause()"
  code, _, err = run(step=blocked)
  assert code == EXIT_CODE
  assert "the result of step 7" in err


def test_a_hanging_file_system_delays_the_end_by_seconds_only():
  started = time.monotonic()
  code, _, err = run(last_good="threading.Event().wait()")
  assert code == EXIT_CODE
  assert time.monotonic() - started < 10
  assert "the workdir does not answer" in err


def test_the_first_process_lingers_after_its_message():
  process = start(process=0, linger=1.5)
  line = ""
  while "last good" not in line:
    line = process.stderr.readline()
    assert line
  spoken = time.monotonic()
  process.communicate(timeout=30)
  assert process.returncode == EXIT_CODE
  assert time.monotonic() - spoken > 1


@pytest.mark.parametrize("parts", [{"seconds": 0}, {"seconds": 1.5}], ids=["off", "in time"])
def test_a_program_within_its_limit_continues(parts):
  assert run(step="time.sleep(0.7)", **parts) == (0, "started\ndone\n", "")


def test_the_first_step_has_three_times_the_limit_and_a_pause_its_own():
  first = "waits_for('the first', first=True)"
  assert run(step="time.sleep(1.2)", seconds=0.6, wait=first) == (0, "started\ndone\n", "")
  code, _, err = run(seconds=0.2, wait=first)
  assert code == EXIT_CODE and "waited 0.6 s for the first," in err
  code, _, err = run(seconds=0, pause=0.2, wait="pauses_for('an evaluation')")
  assert code == EXIT_CODE
  assert "waited 0.2 s for an evaluation, and" in err and "--config.pause_timeout_seconds" in err


def test_code_after_the_with_block_is_not_watched():
  assert run(step="pass", seconds=0.1) == (0, "started\ndone\n", "")


def test_time_suspended_does_not_count():
  process = start(step="time.sleep(0.5)", seconds=1.2)
  assert process.stdout.readline() == "started\n"
  os.kill(process.pid, signal.SIGSTOP)
  time.sleep(2)
  os.kill(process.pid, signal.SIGCONT)
  out, err = process.communicate(timeout=30)
  assert (process.returncode, out, err) == (0, "done\n", "")


def test_each_wait_starts_from_zero():
  steps = "[(watch.waits_for(f'batch {i}'), time.sleep(0.1)) for i in range(20)]"
  assert run(step=steps, seconds=1) == (0, "started\ndone\n", "")


def test_threads_with_equal_stacks_are_described_once():
  over = threading.Event()
  threads = [threading.Thread(target=over.wait, name=f"worker-{i}") for i in range(3)]
  for thread in threads:
    thread.start()
  time.sleep(0.2)  # All of them wait by then.
  try:
    text = describe_threads()
    assert "worker-0 and 2 more like it" in text
    assert text.startswith("  MainThread\n")
    assert "test_watchdog.py:" in text and str(ROOT) not in text
  finally:
    over.set()
