"""How much faster is a training step than that of open_clip, compiled?

  XLA_FLAGS=--xla_gpu_enable_triton_gemm=false python -m benchmarks.step_open_clip

Times both programs' steps in one process, in turns, for each row of benchmarks/step.py's CASES that
open_clip has. open_clip's step is its own model and loss under `torch.compile` and bfloat16
autocast, with PyTorch's fused AdamW; where our blocks are rematerialised, open_clip checkpoints
them, and --remat overrides that. Ours is the contender "switchback" of benchmarks/step.py. Both
train on one batch of random pixels and tokens that is on the GPU. If the GPU's memory does not hold
both, --apart times one after the other, each in a process of its own. Needs
`pip install open_clip_torch`. Adds a line for each row to results/open_clip.jsonl.
--platform=cpu --batch_size=2 --sizes B/32 shows that it runs.
"""

import multiprocessing
import os
from collections.abc import Callable, Sequence

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory, too.

import jax
import open_clip
import torch

from benchmarks import step
from benchmarks.timing import Contender, append, parser_of, provenance, race
from sbjax.models.sizes import SIZES, CLIPConfig, open_clip_name
from train.config import OptimizerConfig
from train.optimizer import make_optimizer
from train.step import make_init

OPEN_CLIPS = ("B/32", "B/16", "L/14", "H/14")  # Sizes of a model of open_clip.
PROGRAMS = ("open_clip", "sbjax")
STEPS = 3  # that are queued before the host waits


def main() -> None:
  parser = parser_of(__doc__, "open_clip")
  parser.add_argument("--sizes", nargs="+", default=OPEN_CLIPS, choices=OPEN_CLIPS)
  parser.add_argument("--batch_size", type=int, default=0, help="0: that of benchmarks/step.py")
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--remat", choices=["none", "block"], help="of both, for all sizes")
  parser.add_argument("--apart", action="store_true", help="one after the other, not in turns")
  parser.add_argument("--platform", default="cuda", choices=["cuda", "cpu"])
  args = parser.parse_args()
  jax.config.update("jax_platforms", args.platform)
  for size in args.sizes:
    batch_size, remat = step.CASES[size]
    how = (args.remat or remat, args.rounds, args.platform, args.apart)
    line = measure(size, args.batch_size or batch_size, *how)
    append(args.out, [line | provenance() | {"torch": torch.__version__}])


def measure(
  size: str, batch_size: int, remat: str, rounds: int, platform: str, apart: bool = False
) -> dict:
  how = (size, batch_size, remat, rounds, platform)
  if apart:
    medians, gigabytes = {}, {}
    for program in PROGRAMS:
      with multiprocessing.get_context("spawn").Pool(1) as pool:  # Its end frees the memory.
        found = pool.apply(timed, ((program,), *how))
      medians |= found[0]
      gigabytes |= found[1]
  else:
    medians, gigabytes = timed(PROGRAMS, *how)
  ratio = medians["open_clip"] / medians["sbjax"]
  print(f"{size:5} {batch_size:5} {remat:6} {medians} ms, {ratio:.2f}x, {gigabytes} GB", flush=True)
  return {
    "benchmark": "open_clip",
    "size": size,
    "batch_size": batch_size,
    "remat": remat,
    "apart": apart,
    "milliseconds": medians["open_clip"],
    "gigabytes": round(gigabytes["open_clip"], 1),
    "sbjax": {
      "recipe": "switchback",
      "milliseconds": medians["sbjax"],
      "gigabytes": round(gigabytes["sbjax"], 1),
    },
    "open_clip": open_clip.__version__,
    "data": "uniform random pixels and tokens, one batch",
  }


def timed(
  programs: Sequence[str], size: str, batch_size: int, remat: str, rounds: int, platform: str
) -> tuple[dict[str, float], dict[str, float]]:
  """The named programs' milliseconds a step, timed in turns, and their gigabytes."""
  jax.config.update("jax_platforms", platform)
  runs, gigabytes, on_gpu = {}, {}, platform == "cuda"
  if "open_clip" in programs:
    if on_gpu:
      torch.cuda.empty_cache()
      torch.cuda.reset_peak_memory_stats()
    runs["open_clip"] = open_clip_steps(size, batch_size, remat, platform)
    runs["open_clip"]()  # Compiles.
    gigabytes["open_clip"] = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0
  if "sbjax" in programs:
    runs["sbjax"], gigabytes["sbjax"] = our_steps(SIZES[size], batch_size, remat)
  contenders = {
    name: Contender(lambda _, run=run: run(), range(STEPS)) for name, run in runs.items()
  }
  race(list(contenders.values()), rounds=rounds)
  return {name: round(one.seconds * 1e3, 1) for name, one in contenders.items()}, gigabytes


def open_clip_steps(
  size: str,
  batch_size: int,
  remat: str,
  platform: str,
  rank: int = 0,
  processes: int = 1,
  by_block: bool = False,
) -> Callable[[], None]:
  """Runs STEPS steps of open_clip's model and waits for them.

  With several processes, which have joined a process group, each trains on `batch_size` images
  under DistributedDataParallel. It computes its rows of the logits, as open_clip's --local-loss
  and --gather-with-grad do. `by_block` compiles each block in place of the model, once for all
  that are alike; a model of many checkpointed layers takes minutes as a whole.
  """
  torch.manual_seed(rank)
  config = SIZES[size]
  with torch.device(platform):  # A CPU draws the parameters of H/14 in a minute.
    model = open_clip.create_model(open_clip_name(size), device=platform, output_dict=True)
  model.train()
  if remat == "block":
    model.set_grad_checkpointing()
  if remat == "block" or by_block:
    # As open_clip: it cannot split checkpointed layers. Blocks need no split.
    torch._dynamo.config.optimize_ddp = False
  if by_block:
    for module in model.modules():
      if isinstance(module, open_clip.transformer.ResidualAttentionBlock):
        module.compile()
  shared = {}
  if processes > 1:
    model = torch.nn.parallel.DistributedDataParallel(model)
    shared = {"local_loss": True, "gather_with_grad": True, "rank": rank, "world_size": processes}
  compiled = model if by_block else torch.compile(model)
  loss = open_clip.ClipLoss(**shared)
  optimizer = torch.optim.AdamW(
    model.parameters(), lr=1e-6, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2, fused=True
  )
  side, length = config.vision.image_size, config.text.context_length
  images = torch.rand(batch_size, 3, side, side, device=platform)
  texts = torch.randint(1, config.text.end_id - 1, (batch_size, length), device=platform)
  texts[:, -1] = config.text.end_id

  def run() -> None:
    for _ in range(STEPS):
      optimizer.zero_grad()
      with torch.autocast(platform, dtype=torch.bfloat16):
        loss(**compiled(images, texts)).backward()
      optimizer.step()
    if platform == "cuda":
      torch.cuda.synchronize()

  return run


def our_steps(config: CLIPConfig, batch_size: int, remat: str) -> tuple[Callable[[], None], float]:
  """Runs STEPS steps of `switchback` and waits for them; and the step's gigabytes."""
  task = step.task_of("switchback", config, remat)
  optimizer, _ = make_optimizer(OptimizerConfig(), steps=20_000)
  state, batch = jax.jit(make_init(task, optimizer, seed=0))(), step.draw(config, batch_size)
  train_step, found = step.compiled(task, optimizer, state, batch)

  def run() -> None:
    nonlocal state
    for _ in range(STEPS):
      state, metrics, _ = train_step(state, batch)
    jax.block_until_ready(metrics)

  return run, found["peak_gigabytes"]


if __name__ == "__main__":
  main()
