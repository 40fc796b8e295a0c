"""What a compiled program moves between devices: its collectives by kind and dtype."""

import math
import re
from collections import defaultdict

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}


def collectives(hlo: str) -> dict[str, dict[str, list[float]]]:
  """{kind: {dtype: [megabytes, how many arrays]}} of a compiled program, on each device.

  Bytes are those of the whole array that is gathered, summed, or summed and scattered.
  """
  found = defaultdict(lambda: defaultdict(lambda: [0.0, 0]))
  for kind, dtype, elements in moved(hlo):
    entry = found[kind][dtype]
    entry[0] += elements * _BYTES[dtype] / 1e6
    entry[1] += 1
  return {
    kind: {dtype: [round(mb, 3), n] for dtype, (mb, n) in sorted(by_dtype.items())}
    for kind, by_dtype in sorted(found.items())
  }


def moved(hlo: str) -> list[tuple[str, str, int]]:
  """(kind of collective, dtype, elements) of each array that a compiled program moves."""
  kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
  starts = dict(re.findall(rf"^\s*%?(\S+) = [^\n]*? (?:{kinds})-start\(([^\n]*)", hlo, re.M))
  pattern = rf"^\s*(?:ROOT )?%?\S+ = (.*?) ({kinds})(-done)?\(([^\n]*)"
  found = []
  for types, kind, done, rest in re.findall(pattern, hlo, re.M):
    attributes = starts[rest.partition(")")[0].split()[-1].lstrip("%")] if done else rest
    times = _group_size(attributes) if kind == "reduce-scatter" else 1
    for dtype, sizes in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", types):
      elements = math.prod(int(size) for size in sizes.split(",") if size)
      found.append((kind, dtype, elements * times))
  return found


def _group_size(attributes: str) -> int:
  """The number of devices in a collective's group; XLA writes groups in three ways."""
  if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
    return len(listed[1].split(","))
  if named := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", attributes):
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
    return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
  return int(re.search(r"replica_groups=\[\d+,(\d+)\]", attributes)[1])
