"""Honest times on a GPU: contenders take turns, each sees fresh data, the median counts.

A contender is a function of one input set. One call under `jax.jit` runs it on every set in turn
(more bytes than the chip's cache holds), several calls are queued before the host waits, and the
contenders are timed round after round, so that a clock that drifts drifts for all.
"""

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

# Where a result was measured some may not be there.
_PACKAGES = ("jaxlib", "jax-cuda13-plugin", "triton", "jax-triton")

TRITON_GEMM = "xla_gpu_enable_triton_gemm"  # Off, cuBLAS multiplies in what XLA compiles.


@dataclasses.dataclass
class Contender:
  """A compiled function and what it is timed on: one call does `len(sets)` pieces of work."""

  call: Callable
  sets: Sequence
  times: list[float] = dataclasses.field(default_factory=list)  # Seconds a piece of work.

  @property
  def seconds(self) -> float:
    return statistics.median(self.times)


def contender(function: Callable, sets: Sequence, **compiler_options) -> Contender:
  """Compiles `function` over all input sets; `compiler_options` are XLA's, for this one alone."""
  jitted = jax.jit(lambda sets: [function(*one) for one in sets])
  return Contender(jitted.lower(sets).compile(compiler_options or None), sets)


def race(contenders: Sequence[Contender], *, rounds: int = 7, seconds: float = 0.02) -> None:
  """Fills `times` of each: `rounds` measurements of about `seconds` each, taken in turns."""
  calls = []
  for one in contenders:
    jax.block_until_ready(one.call(one.sets))
    calls.append(max(1, int(seconds / max(_timed(one, 2), 1e-7)) + 1))
  order = list(zip(contenders, calls, strict=True))
  for _ in range(rounds):
    random.shuffle(order)  # Who follows one that heats the chip starts at a lower clock.
    for one, n in order:
      one.times.append(_timed(one, n) / len(one.sets))


def _timed(one: Contender, calls: int) -> float:
  started = time.perf_counter()
  for _ in range(calls):
    result = one.call(one.sets)
  jax.block_until_ready(result)
  return (time.perf_counter() - started) / calls


def provenance() -> dict:
  """What every result line says of itself: chip, versions, command."""
  flags = [f"XLA_FLAGS='{os.environ['XLA_FLAGS']}'"] if os.environ.get("XLA_FLAGS") else []
  module = sys.modules["__main__"].__spec__.name
  return {
    "chip": jax.devices()[0].device_kind,
    "jax": jax.__version__,
    "python": sys.version.split()[0],
    "versions": {name: version for name in _PACKAGES if (version := _version(name))},
    "command": " ".join([*flags, "python -m", module, *sys.argv[1:]]),
  }


def _version(name: str) -> str | None:
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return None


def append(path: str | Path, rows: Sequence[dict]) -> None:
  """Adds rows to a JSONL file."""
  path = Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open("a") as file:
    for row in rows:
      file.write(json.dumps(row) + "\n")
