"""Do two processes of one GPU each train as one process with two?

  python -m benchmarks.processes

Trains the quickstart's tiny CLIP at 32 pixels for 20 steps each way, and compares losses, images a
second and the norm of the parameters. --meshes data fsdp compares both; --platform=cpu runs
anywhere, slowly. Exits with 1 where losses differ by more than a hundredth: sums in another order
turn some roundings the other way.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = {
  "data.name": "shapes/tiny",
  "model.image_size": 32,
  "model.context_length": 16,
  "model.dtype": "bfloat16",
  "batch_size": 256,
  "optimizer.warmup_steps": 2,
  "log_every": 1,
  "eval_every": 0,
  "eval_batch_size": 96,
  "checkpoint_every": 0,
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--platform", default="cuda", choices=["cuda", "cpu"])
  parser.add_argument("--meshes", nargs="+", default=["data"], choices=["data", "fsdp"])
  parser.add_argument("--recipe", default="switchback")
  parser.add_argument("--batch", type=int, default=256)
  parser.add_argument("--steps", type=int, default=20)
  args = parser.parse_args()
  differ = False
  with tempfile.TemporaryDirectory() as folder:
    for mesh in args.meshes:
      one, two = (
        train(Path(folder) / f"{mesh}{count}", Path(folder), args, mesh, count) for count in (1, 2)
      )
      apart = max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in zip(one, two, strict=True))
      differ |= apart > 1e-2
      for count, records in ((1, one), (2, two)):
        speeds = sorted(r["images_per_second"] for r in records[2:-1])
        print(
          f"{mesh}=2, {count} processes: last loss {records[-1]['loss']:.5f}, parameter norm"
          f" {records[-1]['parameter_norm']:.4f}, {speeds[len(speeds) // 2]:,.0f} images/s"
        )
      print(f"{mesh}=2: losses differ by {apart:.1e} at most", flush=True)
  sys.exit(int(differ))


def train(workdir: Path, shared: Path, args, mesh: str, count: int) -> list[dict]:
  """The records of a run on two devices by one process, or by two."""
  options = CONFIG | {
    "data.data_dir": shared / "data",
    "model.recipe": args.recipe,
    "batch_size": args.batch,
    "steps": args.steps,
    "mesh.data": 1 + (mesh == "data"),
    "mesh.fsdp": 1 + (mesh == "fsdp"),
  }
  command = [sys.executable, "-m", "train.main", "--config=configs/quickstart.py"]
  command += [f"--config.{name}={value}" for name, value in options.items()]
  command += [f"--workdir={workdir}"] + ["--distributed"] * (count > 1)
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  environment = os.environ | {
    "JAX_PLATFORMS": args.platform,
    "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
    "JAX_NUM_PROCESSES": str(count),
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
  }
  if args.platform == "cpu":
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={2 // count}"
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
