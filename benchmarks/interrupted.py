"""Does a killed run go on with the same data and losses, and how long does it wait for data?

  python -m benchmarks.interrupted --kill_after 150 -- --config=configs/clip_vit_l14.py \\
      --config.data.root=path/to/photos --config.steps=300 --config.checkpoint_every=100

Flags after `--` go to train.main. When the program has recorded step --kill_after, SIGKILL ends it
with all its processes, and the same command starts again. Both parts record the steps between the
last checkpoint and the kill; their losses are compared. Adds a line to results/training.jsonl:
these losses, and of the second part images a second and the share of the time that steps waited
for data. Exits with 1 if losses differ by more than a hundredth.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.meshes import LIMIT, largest_difference
from train.record import read_metrics


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", default="benchmarks/results/training.jsonl")
  parser.add_argument("--kill_after", type=int, required=True, help="step")
  parser.add_argument("--data", default="", help="what the data are, for the results")
  parser.add_argument("--seconds", type=float, default=600, help="that each part may take")
  parser.add_argument("flags", nargs="+", help="of train.main, behind --")
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, "-m", "train.main", *args.flags, f"--workdir={folder}/run"]
    first = run(command, Path(folder) / "run", args.seconds, args.kill_after)
    started = time.perf_counter()
    second = run(command, Path(folder) / "run", args.seconds)
    seconds = round(time.perf_counter() - started, 1)
  # The second part keeps the records up to the checkpoint.
  found = compared(first, [r for r in second if r not in first]) | {"seconds": seconds}
  print(json.dumps(found), flush=True)
  from benchmarks.timing import append, provenance  # Imports JAX, which takes the GPUs.

  line = {"run": "interrupted", "killed_after": args.kill_after, "data": args.data} | found
  append(args.out, [line | provenance() | {"device": devices()}])
  sys.exit(int(found["losses_differ_by"] > LIMIT))


def run(command, workdir: Path, seconds: float, kill_after: int | None = None) -> list[dict]:
  """Runs a command to its end, or until it has recorded a step; returns the steps' records."""

  def is_reached() -> bool:
    return kill_after is not None and any(r["step"] >= kill_after for r in steps_of(workdir))

  with tempfile.TemporaryFile("w+") as said:
    process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
    deadline = time.perf_counter() + seconds
    while process.poll() is None and not is_reached() and time.perf_counter() < deadline:
      time.sleep(0.05)
    code = process.poll()
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if code != (0 if kill_after is None else None) or is_reached() != (kill_after is not None):
      said.seek(0)
      wanted = "its end" if kill_after is None else f"step {kill_after}"
      how = f"ended with {code}" if code is not None else f"was stopped after {seconds} s"
      sys.exit(f"{' '.join(command)}\n{how}, not at {wanted}:\n{said.read()[-4000:]}")
  return steps_of(workdir)


def steps_of(workdir: Path) -> list[dict]:
  path = workdir / "metrics.jsonl"
  return [r for r in read_metrics(path) if "loss" in r] if path.exists() else []


def compared(first: list[dict], second: list[dict]) -> dict:
  """The losses of the steps that both parts recorded, and the second part's rates."""
  losses = [{r["step"]: r["loss"] for r in part} for part in (first, second)]
  both = sorted(set(losses[0]) & set(losses[1]))
  if not both:
    raise SystemExit(
      f"No step was recorded twice: the parts have {sorted(losses[0])} and {sorted(losses[1])}."
      " A checkpoint has to be written before --kill_after, and log_every steps before it."
    )
  before, after = ([part[step] for step in both] for part in losses)
  waits = [r["data_wait_seconds"] / r["step_seconds"] for r in second[1:] or second]
  return {
    "steps_recorded_twice": both,
    "losses_before_the_kill": before,
    "losses_after": after,
    "losses_differ_by": float(f"{largest_difference(after, before):.2e}"),
    "last_step": second[-1]["step"],
    "last_loss": second[-1]["loss"],
    "images_per_second": round(statistics.median(r["images_per_second"] for r in second), 1),
    "peak_gigabytes": second[-1].get("peak_gigabytes"),
    "share_of_time_waiting_for_data": {
      "median": round(statistics.median(waits), 4),
      "largest": round(max(waits), 4),
    },
  }


def devices() -> str:
  import jax

  return f"{jax.device_count()} x {jax.devices()[0].device_kind}"


if __name__ == "__main__":
  main()
