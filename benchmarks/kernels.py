"""Profiles a compiled function on a GPU: the time of each kernel, by groups of purpose."""

import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from benchmarks.timing import Contender

# A kernel belongs to the first group whose pattern matches its name or its operation's origin.
GROUPS = {
  "between GPUs": r"nccl",
  "attention": r"sdpa|fmha|flash|cudnn|^(_|sbjax_)attention",
  "8-bit matmuls": r"sbjax_scaled_matmul|sbjax_accumulate|^_scaled_matmul_kernel",
  "16-bit matmuls": r"nvjet|gemm|xmma|cutlass",
  "layer norm, GELU, sums": r"^_(norm|gelu|quantize_sum)(_backward)?_kernel",
  "quantizing alone": r"^_(rowwise|absmax|cast)\w*_kernel",
  "XLA: the optimizer": r"/optimizer/",
  "XLA: around attention": r"_attention",
  "XLA: else": r"",
}


class Kernel(NamedTuple):
  name: str
  operation: str  # XLA's, as the compiled text names it; may be empty
  milliseconds: float
  start: float = 0.0  # Milliseconds, on the clock of the trace.


def kernels(function: Callable[[], object]) -> list[Kernel]:
  """The kernels that run on the first GPU in a call of `function`, in order; compile it before."""
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      jax.block_until_ready(function())
    (path,) = Path(folder).rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    listed = []
    for plane in planes:
      for line in plane.lines if plane.name.startswith("/device:GPU:0") else ():
        if line.name.startswith("Stream"):
          listed += [
            Kernel(
              event.name,
              str(dict(event.stats).get("hlo_op", "")),
              event.duration_ns / 1e6,
              event.start_ns / 1e6,
            )
            for event in line.events
          ]
    return sorted(listed, key=lambda kernel: kernel.start)


def kernel_seconds(one: Contender, *, calls: int = 10, ignored: str | None = None) -> float:
  """The kernels' time for one input set, without kernels whose names match `ignored`."""
  jax.block_until_ready(one.call(one.sets))
  listed = kernels(lambda: [one.call(one.sets) for _ in range(calls)])
  counted = [k.milliseconds for k in listed if not (ignored and re.search(ignored, k.name))]
  return sum(counted) / 1e3 / calls / len(one.sets)


def kernel_race(contenders: Sequence[Contender]) -> list[float]:
  """`kernel_seconds` of each, for work of microseconds: medians of five, measured in turns."""
  rounds = [[kernel_seconds(one, calls=2) for one in contenders] for _ in range(5)]
  return [statistics.median(times) for times in zip(*rounds, strict=True)]


def idle(found: list[Kernel]) -> float:
  """Milliseconds between the first and the last kernel during which none runs."""
  total, end = 0.0, found[0].start
  for kernel in found:
    total += max(0.0, kernel.start - end)
    end = max(end, kernel.start + kernel.milliseconds)
  return total


def exposed(found: list[Kernel], pattern: str) -> float:
  """Milliseconds during which only kernels run whose names match `pattern`."""
  return idle([k for k in found if not re.search(pattern, k.name)]) - idle(found)


def grouped(found: list[Kernel], origins: dict[str, str]) -> dict[str, float]:
  """Milliseconds by group; `origins` are `origins_of` the compiled program."""
  times = defaultdict(float)
  for kernel in found:
    described = f"{kernel.name} {origins.get(kernel.operation, '')}"
    group = next(g for g, pattern in GROUPS.items() if re.search(pattern, described))
    times[group] += kernel.milliseconds
  return {group: round(times[group], 3) for group in GROUPS if times[group]}


def origins_of(hlo: str) -> dict[str, str]:
  """The origins of a program's operations by XLA: {operation: path of functions and modules}."""
  origins = {}
  for line in hlo.splitlines():  # Not a regular expression: a line with a kernel has megabytes.
    name, equals, rest = line.partition(" = ")
    start = rest.rfind('op_name="') + len('op_name="')
    if equals and start >= len('op_name="'):
      origins[name.split()[-1].lstrip("%")] = rest[start : rest.index('"', start)]
  return origins
