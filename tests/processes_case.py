"""Two processes of a run, with one device each, on this machine."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import QUICK

ROOT = Path(__file__).parents[1]


def start_two(cache: str, *arguments: str, each=((), ())) -> list[subprocess.Popen]:
  """Starts two processes with the arguments, and with one more of `each`."""
  try:
    with socket.socket() as server:
      server.bind(("localhost", 0))
      port = server.getsockname()[1]
  except OSError as error:
    pytest.skip(f"no port can be opened here: {error}")
  environment = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"--xla_force_host_platform_device_count=1 {QUICK}",
    "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
    "JAX_NUM_PROCESSES": "2",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_COMPILATION_CACHE_DIR": cache,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }
  return [
    subprocess.Popen(
      [sys.executable, *arguments, *each[i]],
      cwd=ROOT,
      env={**environment, "JAX_PROCESS_ID": str(i)},
      text=True,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
    )
    for i in range(2)
  ]


def ends(started, deadline=180.0):
  """The exit codes and error messages of processes."""
  said = [process.communicate(timeout=deadline) for process in started]
  return [(process.returncode, err) for process, (_, err) in zip(started, said, strict=True)]
