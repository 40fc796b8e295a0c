"""How fast are several GPUs with open_clip, compiled, compared with one?

  python -m benchmarks.scaling_open_clip --gpus 4

Times the steps of benchmarks/step_open_clip.py, first on each of the GPUs by itself at the same
time, then on all of them under DistributedDataParallel, one process a GPU. Needs `pip install
open_clip_torch`. Adds a line for each size to results/scaling.jsonl: milliseconds, images a second,
memory, and efficiency as in benchmarks/scaling.py. --by_block compiles each block in place of the
model: H/14, whose blocks are checkpointed, gave no result in six minutes as a whole.
--platform=cpu --batch_size=2 --sizes B/32 shows that it runs.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import step
from benchmarks.step_open_clip import OPEN_CLIPS, STEPS, open_clip_steps
from benchmarks.timing import append, parser_of, provenance


def main() -> None:
  parser = parser_of(__doc__, "scaling")
  parser.add_argument("--gpus", type=int, default=2)
  parser.add_argument("--sizes", nargs="+", default=OPEN_CLIPS, choices=OPEN_CLIPS)
  parser.add_argument("--batch_size", type=int, default=0, help="0: that of benchmarks/step.py")
  parser.add_argument("--by_block", action="store_true", help="compile blocks, not the model")
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--platform", default="cuda", choices=["cuda", "cpu"])
  args = parser.parse_args()
  for size in args.sizes:
    batch_size, remat = step.CASES[size]
    case = (size, args.batch_size or batch_size, remat, args.platform, args.rounds, args.by_block)
    alone = measure(args.gpus, False, *case)
    print(size, "alone:", json.dumps(alone), flush=True)  # The other may take minutes to compile.
    together = measure(args.gpus, True, *case)
    of_singles = args.gpus * alone["images_per_second"]
    together["efficiency"] = round(together["images_per_second"] / of_singles, 4)
    line = {"benchmark": "scaling_open_clip", "row": size, "gpus": args.gpus, "remat": remat}
    line |= {"compiled": "blocks" if args.by_block else "model"}
    line |= {"batch_size": case[1], "alone": alone, "together": together}
    print(json.dumps(line), flush=True)
    append(args.out, [line | provenance() | {"torch": torch.__version__}])


def measure(gpus: int, ddp: bool, size: str, batch_size: int, *case) -> dict:
  """Starts a process for each GPU; returns the means of what they measured."""
  with tempfile.TemporaryDirectory() as folder:
    torch.multiprocessing.spawn(
      measure_rank, (gpus, ddp, folder, size, batch_size, *case), nprocs=gpus
    )
    ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(gpus)]
  found = {name: round(statistics.mean(r[name] for r in ranks), 2) for name in ranks[0]}
  images = batch_size * (gpus if ddp else 1)
  return found | {"images_per_second": round(images / found["milliseconds"] * 1e3, 1)}


def measure_rank(
  rank: int, gpus: int, ddp: bool, folder: str, size, batch_size, remat, platform, rounds, by_block
) -> None:
  """Times the steps of one GPU and writes them to a file in `folder`."""
  on_gpu = platform == "cuda"
  if on_gpu:
    torch.cuda.set_device(rank)
  # Also without DDP: the processes wait for each other, so that all GPUs are busy at once.
  torch.distributed.init_process_group(
    "nccl" if on_gpu else "gloo", f"file://{folder}/meet", rank=rank, world_size=gpus
  )
  run = open_clip_steps(size, batch_size, remat, platform, rank, gpus if ddp else 1, by_block)
  started, times = time.perf_counter(), []
  run()  # Compiles.
  compile_seconds = time.perf_counter() - started
  run()
  for _ in range(rounds):
    torch.distributed.barrier()
    started = time.perf_counter()
    run()
    times.append((time.perf_counter() - started) / STEPS)
  found = {
    "milliseconds": statistics.median(times) * 1e3,
    "gigabytes": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0,
    "compile_seconds": compile_seconds,
  }
  (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
  torch.distributed.barrier()
  torch.distributed.destroy_process_group()


if __name__ == "__main__":
  main()
