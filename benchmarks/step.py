"""How much faster is a whole training step in 8 bits?

  XLA_FLAGS=--xla_gpu_enable_triton_gemm=false XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 \\
      python -m benchmarks.step

Times a step as train.main compiles it, for each row of CASES: both towers, loss, backward, and
StableAdamW on float32 parameters. All contenders of a row train the same parameters in turns, on
one batch of random pixels and tokens, of Flickr8k's lengths if some compute texts in groups
(sbjax/models/text_groups.py). The baseline is recipe "full" in plain Flax
(sbjax/models/flax_block.py), compiled by XLA, with cuDNN's attention. Like all contenders it uses
split_k_matmul. Its layers are in a loop or unrolled, whichever is faster. Adds a line for each row:
time, images a second, memory, compile time, MFU, time by kernel groups, and who computes attention.
A contender that does not fit the device's memory is listed apart, with the reason.
"""

import argparse
import functools
import itertools
import math
import random
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import grouped, idle, kernels, origins_of
from benchmarks.timing import append, parser_of, provenance, spread_of
from sbjax.attention import fastest_backend
from sbjax.models.clip import CLIP
from sbjax.models.flax_block import FlaxBlock
from sbjax.models.sizes import SIZES, CLIPConfig, kept_patches
from sbjax.models.transformer import Block, BlockOptions
from sbjax.ops.device import compute_capability, target
from train.config import LoraConfig, OptimizerConfig
from train.memory import bytes_limit, is_out_of_memory
from train.optimizer import make_optimizer
from train.step import make_init, make_train_step
from train.task import BF16_PEAK, CLIPTask, model_flops

CASES = {  # size: images a batch, remat
  "H/14": (256, "block"),
  "L/14": (256, "none"),
  "B/16": (512, "none"),
  "B/32": (1024, "none"),
  "bigG/14": (128, "block"),
}


class Contender(NamedTuple):
  recipe: str
  block: type = Block
  unroll: int = 0  # How many layers are compiled together; 0: all.
  attention: str | None = None
  remat: str | None = None  # None: the case's.
  captions: str = ""  # whose lengths the groups of texts are for; "": none
  lora: int = 0  # the rank of adapters; their state is their own, so each is measured alone


CONTENDERS = {
  "flax": Contender("full", FlaxBlock, attention="cudnn"),
  "flax_loop": Contender("full", FlaxBlock, unroll=1, attention="cudnn"),
  "flax_no_remat": Contender("full", FlaxBlock, attention="cudnn", remat="none"),
  "full": Contender("full"),
  "switchback": Contender("switchback"),
  "switchback_flickr8k": Contender("switchback", captions="flickr8k"),
  "switchback_cc12m": Contender("switchback", captions="cc12m"),
  "switchback_loop": Contender("switchback", unroll=1),
  "switchback_no_remat": Contender("switchback", remat="none"),
  "switchback_cudnn": Contender("switchback", attention="cudnn"),
  "switchback_m": Contender("switchback_m"),
  "switchback_q": Contender("switchback_q"),
  "switchback_c": Contender("switchback_c"),
  "llm_int8": Contender("llm_int8"),
  "fp8_switchback": Contender("fp8_switchback"),
  "full_lora": Contender("full", lora=8),
  "switchback_m_lora": Contender("switchback_m", lora=8),
}
BASES = ("flax", "flax_loop", "flax_no_remat")


def main() -> None:
  parser = parser_of(__doc__, "step")
  parser.add_argument("--sizes", nargs="+", default=list(CASES), choices=CASES)
  default = ["flax", "flax_loop", "full", "switchback", "switchback_m"]
  parser.add_argument("--contenders", nargs="+", default=default, choices=CONTENDERS)
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--batch_size", type=int, help="default: that of the case")
  parser.add_argument("--patch_dropout", type=float, default=0.0, help="fraction of patches")
  parser.add_argument("--profile", action=argparse.BooleanOptionalAction, default=True)
  args = parser.parse_args()
  how = (args.contenders, args.rounds, args.profile, args.patch_dropout, args.batch_size)
  for size in args.sizes:
    append(args.out, [measure(size, *how) | provenance()])


def measure(
  size: str, names: list[str], rounds: int, profiled=True, patch_dropout=0.0, images=None
) -> dict:
  batch_size, remat, config = images or CASES[size][0], CASES[size][1], SIZES[size]
  optimizer, _ = make_optimizer(OptimizerConfig(), steps=20_000)
  tasks = {name: task_of(name, config, remat, patch_dropout=patch_dropout) for name in names}
  # All tasks have the same parameter tree, so they can share one state.
  state = jax.jit(make_init(tasks[names[0]], optimizer, seed=0))()
  for name in names:
    if captions := CONTENDERS[name].captions:
      tasks[name] = tasks[name].with_text_groups(CAPTIONS[captions](), batch_size, 1, most=6)
  lengths = CAPTIONS["flickr8k"]() if any(task.text_groups for task in tasks.values()) else ()
  batch = draw(config, batch_size, lengths)
  steps, found, too_large = fitting(size, tasks, optimizer, state, batch)
  times, state, losses = race(steps, state, batch, rounds)
  medians = {name: statistics.median(times[name]) for name in steps}
  bases = [medians[name] for name in BASES if name in steps]
  base = min(bases, default=next(iter(medians.values())))
  for name, seconds in medians.items():
    found[name] |= rates(times[name], batch_size, tasks[name].flops(batch_size))
    found[name] |= {"speedup": round(base / seconds, 3), "last_loss": round(losses[name], 5)}
    mfu = found[name]["mfu_of_bf16_peak"]
    print(
      f"{size:8} {name:18} {seconds * 1e3:8.1f} ms {base / seconds:5.2f}x"
      f" {batch_size / seconds:7.0f} images/s {found[name]['peak_gigabytes']:6.1f} GB"
      f" MFU {'?' if mfu is None else f'{mfu:.1%}'}",
      flush=True,
    )
  for name, step in steps.items() if profiled and jax.default_backend() == "gpu" else ():
    listed, state = profile(step, state, batch)
    groups = grouped(listed, origins_of(step.as_text())) | {"no kernel": round(idle(listed), 3)}
    found[name]["milliseconds_by_group"] = groups
    print(f"{size:8} {name:18} {len(listed)} kernels, ms: {groups}", flush=True)
  return {
    "benchmark": "step",
    "size": size,
    "batch_size": batch_size,
    "remat": remat,
    "patch_dropout": patch_dropout,
    "optimizer": "stable_adamw",
    "model_teraflops": round(model_flops(config, batch_size, patch_dropout) / 1e12, 2),
    "contenders": found,
    "do_not_fit": too_large,
    "data": "uniform random pixels and tokens, one batch",
  }


def task_of(
  name: str, config: CLIPConfig, remat: str, backend: str | None = None, patch_dropout: float = 0.0
) -> CLIPTask:
  """The contender of that name. On a TPU its layers are in a loop; cuDNN is for NVIDIA's GPUs."""
  one, chip = CONTENDERS[name], target()
  unroll = 1 if chip.platform == "tpu" else one.unroll
  attention = one.attention if compute_capability(chip) else None
  how = {"recipe": one.recipe, "remat": one.remat or remat, "unroll": unroll}
  options = BlockOptions(**how, backend=backend, attention_backend=attention)
  lora = LoraConfig(rank=one.lora) if one.lora else None
  return CLIPTask(CLIP(config, options, patch_dropout, block=one.block), lora=lora)


def fitting(size: str, tasks: dict[str, CLIPTask], optimizer, state, batch):
  """Compiles all steps: those that fit the devices, what is known of them, and why others do not.

  Raises:
    SystemExit: none fits.
  """
  limit, steps, found, too_large = bytes_limit() / 1e9, {}, {}, {}
  for name, task in tasks.items():
    try:
      step, row = compiled(task, optimizer, state, batch)
    except jax.errors.JaxRuntimeError as error:
      if not is_out_of_memory(error):
        raise
      too_large[name] = "XLA ran out of memory when it compiled"
    else:
      if row["peak_gigabytes"] > limit:
        too_large[name] = f"{row['peak_gigabytes']} GB, and JAX has {limit:.1f} GB on the device"
      else:
        steps[name], found[name] = step, row
    said = too_large.get(name) or f"compiled in {found[name]['compile_seconds']:.0f} s"
    print(f"{size:8} {name:18} {said}", flush=True)
  if not steps:
    raise SystemExit(f"No contender fits the device: {too_large}.")
  return steps, found, too_large


def compiled(task, optimizer, state, batch):
  """The compiled step, with its attention, compile time and memory."""
  step = jax.jit(make_train_step(task, optimizer, 0), donate_argnums=0)
  started = time.perf_counter()
  step = step.lower(state, batch).compile()
  seconds, memory = time.perf_counter() - started, step.memory_analysis()
  return step, {
    "attention_backend": attention_backend(task.model),
    "compile_seconds": round(seconds, 1),
    "peak_gigabytes": round((memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 1e9, 2),
    "temporary_gigabytes": round(memory.temp_size_in_bytes / 1e9, 2),
    **({"text_groups": task.text_groups} if task.text_groups else {}),
  }


def attention_backend(model: CLIP) -> str:
  """The name of the backend that computes the image tower's attention."""
  vision, options = model.config.vision, model.options
  length = vision.tokens - vision.patches + kept_patches(vision.patches, model.patch_dropout)
  head_dim = vision.width // vision.heads
  return options.attention_backend or fastest_backend(options.dtype, length, head_dim)


def _lengths(mean: float, deviation: float, pieces: float) -> list[int]:
  """Counts of 1, 2, ... 77 tokens: of log-normal words, of some pieces each, a start and an end."""
  variance = math.log1p((deviation / mean) ** 2)
  words = statistics.NormalDist(math.log(mean) - variance / 2, variance**0.5)
  edges = [words.cdf(math.log((n - 1.5) / pieces)) if n > 2 else 0.0 for n in range(77)]
  return [round(4096 * (b - a)) for a, b in itertools.pairwise([*edges, 1.0])]


# By the words of a caption. Those of 8,091 captions of Flickr8k, and their pieces, are measured;
# those of CC12M (https://arxiv.org/abs/2102.08981) assume 5/4 pieces a word.
CAPTIONS = {
  "flickr8k": functools.partial(_lengths, 12.1, 4.0, 1.03),
  "cc12m": functools.partial(_lengths, 20.2, 16.3, 1.25),
}


def draw(config: CLIPConfig, batch_size: int, counts: Sequence[int] = ()):
  keys, side = jax.random.split(jax.random.key(1)), config.vision.image_size
  length, vocabulary = config.text.context_length, config.text.vocab_size
  text = jax.random.randint(keys[1], (batch_size, length), 1, vocabulary - 2, jnp.int32)
  ends = np.full(batch_size, length - 1)
  if len(counts):
    shares = np.array(counts) / sum(counts)
    ends = np.random.default_rng(0).choice(length, batch_size, p=shares)
  return {
    "image": jax.random.randint(keys[0], (batch_size, side, side, 3), 0, 255, jnp.uint8),
    "text": text.at[np.arange(batch_size), ends].set(config.text.end_id),
  }


def race(steps, state, batch, rounds: int):
  """Times contenders in turns, three steps at a time: seconds a step, the state, last losses."""
  times, losses, order = {name: [] for name in steps}, {}, list(steps.items())
  for i in range(rounds + 1):
    random.shuffle(order)  # A contender that runs after a hot one starts at a lower clock.
    for name, step in order:
      started = time.perf_counter()
      for _ in range(3):
        state, metrics, _ = step(state, batch)
      jax.block_until_ready(metrics)
      if i:  # The first warms up.
        times[name].append((time.perf_counter() - started) / 3)
      losses[name] = float(metrics["loss"])
  return times, state, losses


def rates(times: list[float], batch_size: int, flops: float) -> dict:
  """What a step's times amount to; `flops` are those of a device."""
  seconds, peak = statistics.median(times), BF16_PEAK.get(jax.devices()[0].device_kind)
  return {
    "milliseconds": round(seconds * 1e3, 2),
    "spread": spread_of(times),
    "images_per_second": round(batch_size / seconds, 1),
    "mfu_of_bf16_peak": round(flops / seconds / peak, 4) if peak else None,
  }


def profile(step, state, batch, steps: int = 4):
  """The kernels of the last of some steps, and the state after them.

  Their times do not add up to the measured step time: a chip that was idle before is faster.
  """

  def run():
    nonlocal state
    for _ in range(steps):
      state, metrics, _ = step(state, batch)
    return metrics

  listed = kernels(run)
  return listed[-(len(listed) // steps) :], state


if __name__ == "__main__":
  main()
