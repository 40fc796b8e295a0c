"""Does a run on several GPUs, in one process or in several, have the losses of a run on one?

  python -m benchmarks.meshes --ways 1x1 2x1 1x2 2x1:2 1x2:2
  python -m benchmarks.meshes --ways 1x1 2x1 1x2 -- --config=configs/flickr8k_gpu.py \\
      --config.data.root=path/to/flickr8k --config.steps=50 --config.log_every=1

Trains each of the --ways, DATAxFSDP[:PROCESSES], one after the other, and compares their logged
losses with those of the first. Flags after `--` go to train.main; the default is the quickstart's
tiny CLIP at 32 pixels for 20 steps. --platform=cpu runs anywhere, slowly. Exits with 1 if losses
differ by more than a hundredth; smaller differences are expected, since sums in another order
change some roundings. Adds a line to results/scaling.jsonl.
"""

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

LIMIT = 1e-2
QUICK = [
  "--config=configs/quickstart.py",
  "--config.data.name=shapes/tiny",
  "--config.model.image_size=32",
  "--config.model.context_length=16",
  "--config.model.dtype=bfloat16",
  "--config.batch_size=128",
  "--config.eval_batch_size=96",
  "--config.steps=20",
  "--config.log_every=5",  # Processes meet on the host to log, so not at each step.
  "--config.optimizer.warmup_steps=2",
]
ALWAYS = ["--config.eval_every=0", "--config.checkpoint_every=0"]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", default="benchmarks/results/scaling.jsonl")
  parser.add_argument("--platform", default="cuda", choices=["cuda", "cpu"])
  parser.add_argument("--ways", nargs="+", type=way, default=[way("2x1"), way("2x1:2")])
  parser.add_argument("flags", nargs="*", help="of train.main, behind --")
  args = parser.parse_args()
  runs = {}
  with tempfile.TemporaryDirectory() as folder:
    for name, *sizes in args.ways:
      workdir = Path(folder) / name.replace(":", "_")
      records = train(workdir, Path(folder), args.platform, args.flags or QUICK, *sizes)
      runs[name] = {
        "losses": [record["loss"] for record in records],
        "parameter_norm": records[-1]["parameter_norm"],
        "images_per_second": statistics.median(
          r["images_per_second"] for r in records[1:] or records
        ),
      }
      apart = largest_difference(runs[name]["losses"], next(iter(runs.values()))["losses"])
      runs[name]["losses_differ_by"] = float(f"{apart:.2e}")
      print(
        f"{name:8} last loss {records[-1]['loss']:.5f}, parameter norm"
        f" {records[-1]['parameter_norm']:.4f}, {runs[name]['images_per_second']:,.0f} images/s,"
        f" losses differ by {apart:.1e} at most",
        flush=True,
      )
  from benchmarks.timing import append, provenance  # Imports JAX, which takes the GPUs.

  append(args.out, [{"benchmark": "meshes", "runs": runs} | provenance()])
  sys.exit(int(not all(run["losses_differ_by"] <= LIMIT for run in runs.values())))


def way(text: str) -> tuple[str, int, int, int]:
  """Parses DATAxFSDP[:PROCESSES] into (text, data, fsdp, processes)."""
  match = re.fullmatch(r"(\d+)x(\d+)(?::(\d+))?", text)
  if not match:
    raise argparse.ArgumentTypeError(f"{text!r} must be DATAxFSDP or DATAxFSDP:PROCESSES.")
  return text, *(int(size or 1) for size in match.groups())


def largest_difference(losses: list[float], expected: list[float]) -> float:
  """The largest relative difference between the losses of the same steps."""
  return max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))


def train(workdir: Path, shared: Path, platform: str, flags, data, fsdp, count) -> list[dict]:
  """The records of a run's steps on data x fsdp devices, by `count` processes."""
  devices = data * fsdp // count  # of a process
  command = [sys.executable, "-m", "train.main", *flags, *ALWAYS, f"--workdir={workdir}"]
  command += [f"--config.mesh.data={data}", f"--config.mesh.fsdp={fsdp}"]
  command += [f"--config.data.data_dir={shared / 'data'}"] + ["--distributed"] * (count > 1)
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  environment = os.environ | {
    "JAX_PLATFORMS": platform,
    "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
    "JAX_NUM_PROCESSES": str(count),
    "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(data * fsdp))),
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
  }
  if platform == "cpu":
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
  processes = [
    subprocess.Popen(
      command,
      env=environment | {"JAX_PROCESS_ID": str(index)},
      text=True,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
    )
    for index in range(count)
  ]
  said = [process.communicate(timeout=600)[0] for process in processes]
  for process, text in zip(processes, said, strict=True):
    if process.returncode:
      sys.exit(f"{' '.join(command)}\nended with {process.returncode}:\n{text[-4000:]}")
  records = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  return [record for record in records if "loss" in record]


if __name__ == "__main__":
  main()
