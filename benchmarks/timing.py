"""Times functions on a GPU: contenders take turns on data outside the cache, and medians count.

A contender is a function of one input set. One call under `jax.jit` runs it on all sets in turn,
which are larger than the chip's cache. Several calls are queued before the host waits. Contenders
are timed in turns, round after round, so that a drifting clock affects all of them.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from benchmarks.commit import COMMIT
from sbjax.ops.device import target

# Environment variables that a command is recorded with.
_SETTINGS = ("XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "SBJAX_ASSUME_CAPABILITY")

# Some of these may not be installed.
_PACKAGES = ("jaxlib", "jax-cuda13-plugin", "triton", "jax-triton", "libtpu")

TRITON_GEMM = "xla_gpu_enable_triton_gemm"  # If off, XLA uses cuBLAS for matmuls.


@dataclasses.dataclass
class Contender:
  """A compiled function and the input sets that it is timed on: one call runs all of them."""

  call: Callable
  sets: Sequence
  times: list[float] = dataclasses.field(default_factory=list)  # Seconds for one input set.

  @property
  def seconds(self) -> float:
    return statistics.median(self.times)

  @property
  def spread(self) -> float:
    return spread_of(self.times)


def spread_of(times: Sequence[float]) -> float:
  """How far the fastest and the slowest are apart, as a part of the median."""
  return round((max(times) - min(times)) / statistics.median(times), 4)


def parser_of(doc: str, results: str) -> argparse.ArgumentParser:
  """The command line of the program with that docstring, with --out for its result lines."""
  made = argparse.ArgumentParser(description=doc.splitlines()[0])
  made.add_argument("--out", default=f"benchmarks/results/{results}.jsonl")
  return made


def contender(function: Callable, sets: Sequence, **compiler_options) -> Contender:
  """Compiles `function` over all input sets; `compiler_options` are XLA's, only for this one."""
  jitted = jax.jit(lambda sets: [function(*one) for one in sets])
  return Contender(jitted.lower(sets).compile(compiler_options or None), sets)


def race(contenders: Sequence[Contender], *, rounds: int = 7, seconds: float = 0.02) -> None:
  """Fills `times` of each contender: `rounds` measurements of about `seconds` each, in turns."""
  calls = []
  for one in contenders:
    jax.block_until_ready(one.call(one.sets))
    calls.append(max(1, int(seconds / max(_timed(one, 2), 1e-7)) + 1))
  order = list(zip(contenders, calls, strict=True))
  for _ in range(rounds):
    random.shuffle(order)  # A contender that runs after a hot one starts at a lower clock.
    for one, n in order:
      one.times.append(_timed(one, n) / len(one.sets))


def _timed(one: Contender, calls: int) -> float:
  started = time.perf_counter()
  for _ in range(calls):
    result = one.call(one.sets)
  jax.block_until_ready(result)
  return (time.perf_counter() - started) / calls


def provenance() -> dict:
  """The chip, versions, commit and command, for every result line.

  Lines that are older than the field `commit` name the commit that added them.
  """
  flags = [f"{name}='{value}'" for name in _SETTINGS if (value := os.environ.get(name))]
  spec = sys.modules["__main__"].__spec__  # None in a process that no `-m` has started.
  module = spec.name.removesuffix(".__main__") if spec else sys.argv[0]
  return {
    "chip": target().device_kind,
    "jax": jax.__version__,
    "python": sys.version.split()[0],
    "versions": {name: version for name in _PACKAGES if (version := _version(name))},
    "commit": COMMIT,
    "command": " ".join([*flags, "python -m", module, *_arguments()]),
  }


def _arguments() -> list[str]:
  """The command's arguments, without the file that the results go to."""
  pairs = zip([None, *sys.argv[1:]], sys.argv[1:], strict=False)
  return [x for last, x in pairs if last != "--out" and x.partition("=")[0] != "--out"]


def _version(name: str) -> str | None:
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return None


def reason(error: Exception) -> str:
  """An error's type and first line."""
  first_line, *_ = str(error).strip().splitlines() or [""]
  return f"{type(error).__name__}: {first_line}"[:300]


def append(path: str | Path, rows: Sequence[dict]) -> None:
  """Adds rows to a JSONL file."""
  path = Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open("a") as file:
    for row in rows:
      file.write(json.dumps(row) + "\n")
