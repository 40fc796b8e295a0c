"""How many scenes a second does a device draw, alone and beside a training step?

  python -m benchmarks.scenes

Draws batches as a run does (train/data/scenes/scenes.py), on all devices. Then trains the model of
configs/scenes_s8.py, as train.main compiles the step: on one batch that stays on the devices, and
on batches that are drawn for each step. The three take turns, and medians count. Adds a line to
results/scenes.jsonl with images a second of each, the milliseconds that drawing adds to a step, and
the floating-point operations and bytes of drawing, as XLA counts them.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks.timing import append, provenance
from configs import scenes_s8
from train.config import Config
from train.loop import jit_train_step
from train.run import Run, make_run


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", default="benchmarks/results/scenes.jsonl")
  parser.add_argument("--size", default="S/16", help="of the model; its patches have 8 pixels")
  parser.add_argument("--batch_size", type=int, default=1024)
  parser.add_argument("--image_size", type=int, default=64)
  parser.add_argument("--remat", default="none", help="of the step")
  parser.add_argument("--steps", type=int, default=30, help="in each turn")
  parser.add_argument("--rounds", type=int, default=5)
  args = parser.parse_args()
  line = measure(config_of(args), args.steps, args.rounds)
  append(args.out, [line | provenance()])


def config_of(args: argparse.Namespace) -> Config:
  config = scenes_s8.get_config()
  config.model.size, config.model.image_size = args.size, args.image_size
  config.model.remat, config.batch_size = args.remat, args.batch_size
  return config


def measure(config: Config, steps: int, rounds: int) -> dict:
  """The line of one config: images a second, and what drawing costs."""
  with tempfile.TemporaryDirectory() as workdir:
    run = make_run(config, Path(workdir))
    times = race(run, steps, rounds)
    cost = cost_of_drawing(run)
  seconds = {name: statistics.median(found) for name, found in times.items()}
  rates = {name: round(config.batch_size / each, 1) for name, each in seconds.items()}
  added = (seconds["step_on_drawn_batches"] - seconds["step_on_one_batch"]) * 1e3
  for name, rate in rates.items():
    print(f"{name:22} {seconds[name] * 1e3:9.2f} ms {rate:12,.0f} images/s", flush=True)
  print(f"drawing adds {added:.2f} ms to a step; a batch: {cost}", flush=True)
  return {
    "benchmark": "scenes",
    "size": config.model.size,
    "image_size": config.model.image_size,
    "batch_size": config.batch_size,
    "devices": run.mesh.size,
    "images_per_second": rates,
    "milliseconds": {name: round(each * 1e3, 3) for name, each in seconds.items()},
    "milliseconds_added": round(added, 3),
    "drawing": cost,
  }


def race(run: Run, steps: int, rounds: int) -> dict[str, list[float]]:
  """Seconds of a batch or step, `rounds` times for each contender."""
  draw, step = run.source.to_devices(run.mesh, **run.task.example_sizes), jit_train_step(run)
  state, one_batch = run.new_state(), draw({"step": np.uint32(0)})
  state, *_ = step(state, one_batch)
  times = {name: [] for name in ("drawing", "step_on_one_batch", "step_on_drawn_batches")}
  for _ in range(rounds):
    times["drawing"].append(timed(lambda: _drawings(draw, steps)) / steps)
    for name in ("step_on_one_batch", "step_on_drawn_batches"):
      started = time.perf_counter()
      for i in range(steps):
        batch = one_batch if name == "step_on_one_batch" else draw({"step": np.uint32(i)})
        state, metrics, _ = step(state, batch)
      jax.block_until_ready((state, metrics))
      times[name].append((time.perf_counter() - started) / steps)
  return times


def _drawings(draw, steps: int):
  for i in range(steps):
    batch = draw({"step": np.uint32(i)})
  return batch


def timed(function) -> float:
  started = time.perf_counter()
  jax.block_until_ready(function())
  return time.perf_counter() - started


def cost_of_drawing(run: Run) -> dict[str, float]:
  """The operations and bytes of a batch on one device, and its temporary memory, as XLA counts."""
  put = run.source.to_devices(run.mesh, **run.task.example_sizes)
  compiled = put.lower({"step": np.uint32(0)}).compile()
  counted, memory = compiled.cost_analysis() or {}, compiled.memory_analysis()
  return {
    "gigaflops": round(counted.get("flops", 0) / 1e9, 3),
    "gigabytes_accessed": round(counted.get("bytes accessed", 0) / 1e9, 3),
    "temporary_gigabytes": round(getattr(memory, "temp_size_in_bytes", 0) / 1e9, 3),
  }


if __name__ == "__main__":
  main()
