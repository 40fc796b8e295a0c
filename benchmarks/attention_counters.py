"""What bounds the kernels of attention? Hardware counters, by Nsight Compute.

  python -m benchmarks.attention_counters --cases "H/14 image"

Starts itself under `ncu` for each case of benchmarks/attention.py, runs our forward and backward
pass once on normal data, and adds a line with the counters of each kernel to
results/attention_counters.jsonl. Needs `ncu`, and the right to read a GPU's counters.
"""

import csv
import functools
import os
import subprocess
import sys

import jax

from benchmarks.attention import CASES, draw, value_and_gradients
from benchmarks.attention_report import COUNTERS
from benchmarks.timing import append, parser_of, provenance
from sbjax.attention import attention

STALLS = ("long_scoreboard", "short_scoreboard", "barrier", "gmma", "wait", "mio_throttle")
METRICS = (
  "gpu__time_duration.sum",
  "dram__bytes_read.sum",
  "dram__bytes_write.sum",
  "launch__registers_per_thread",
  *COUNTERS,
  *(f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in STALLS),
)


def main() -> None:
  parser = parser_of(__doc__, "attention_counters")
  parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
  parser.add_argument("--backend", default="mosaic")
  parser.add_argument("--run", choices=CASES, help="only run this case's kernels")
  args = parser.parse_args()
  if args.run:
    run(args.run, args.backend)
    return
  for case in args.cases:
    row = {"benchmark": "attention_counters", "case": case, "data": "standard normal"}
    row["kernels"] = counters(case, args.backend)
    append(args.out, [row | provenance()])
    for name, found in row["kernels"].items():
      print(case, name, found["gpu__time_duration.sum"], flush=True)


def run(case: str, backend: str) -> None:
  *shape, causal = CASES[case]
  attend = functools.partial(attention, causal=causal, backend=backend)
  compiled = jax.jit(functools.partial(value_and_gradients, attend))
  jax.block_until_ready(compiled(*draw(*shape)))


def counters(case: str, backend: str) -> dict[str, dict[str, float]]:
  """By kernel, its counters; times are in ns, sizes in bytes."""
  ncu = ["ncu", "--target-processes", "all", "--kernel-name", "regex:attention", "--csv"]
  ncu += ["--page", "raw", "--clock-control", "none", "--print-units", "base"]
  ncu += ["--metrics", ",".join(METRICS)]
  child = [sys.executable, "-m", "benchmarks.attention_counters", "--run", case]
  flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
  environment = os.environ | {"XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
  done = subprocess.run(
    [*ncu, *child, "--backend", backend], capture_output=True, text=True, env=environment
  )
  if done.returncode:
    raise SystemExit(f"ncu failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
  return parsed(done.stdout)


def parsed(output: str) -> dict[str, dict[str, float]]:
  """Of ncu's CSV: the names of columns, their units, then a line for each kernel."""
  lines = [line for line in output.splitlines() if line.startswith('"')]
  rows = list(csv.DictReader(lines))[1:]
  if not rows:
    raise SystemExit(f"ncu printed no counters:\n{output}")
  return {
    row["Kernel Name"]: {name: float(row[name].replace(",", "")) for name in METRICS}
    for row in rows
  }


if __name__ == "__main__":
  main()
