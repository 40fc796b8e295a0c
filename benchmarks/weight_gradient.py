"""Which 8-bit weight gradient could be used? The error of each on what a real run multiplies.

  python -m benchmarks.weight_gradient --config=configs/flickr8k_gpu.py \\
      --config.data.root=path/to/flickr8k --workdir=runs/weight_gradient --capture_steps=1,200

Trains as the config says, and before each of the given steps takes x and dy of the linear layers
of some blocks from that step in float32 (benchmarks.capture). Adds a line a layer and step to
benchmarks/results/weight_gradient.jsonl: the relative error of dw for every candidate of
benchmarks.wgrad_candidates, and statistics that say why. Prints the errors as multiples of
bfloat16's.
"""

import math
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from absl import flags

from benchmarks.capture import make_capture
from benchmarks.timing import append, provenance
from benchmarks.wgrad_candidates import errors, statistics
from sbjax.models.sizes import CLIPConfig
from sbjax.models.transformer import BLOCK_LINEARS
from train import cli, data
from train.config import Config
from train.loop import jit_train_step
from train.loss import LOSSES
from train.run import make_run
from train.sharding import batch_sharding

_STEPS = flags.DEFINE_list("capture_steps", ["1", "200"], "The steps whose operands are taken.")
_TOKENS = flags.DEFINE_integer(
  "max_tokens", 65536, "At most so many of a layer's tokens; the paper's ViT-H had 65,536 a GPU."
)
_OUT = flags.DEFINE_string(
  "out", "benchmarks/results/weight_gradient.jsonl", "Where lines are added."
)


def main(config: Config, workdir: Path) -> None:
  workdir.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=workdir) as scratch:
    rows = measure(config, Path(scratch), sorted(map(int, _STEPS.value)))
  append(_OUT.value, rows)
  print_table(rows)


def measure(config: Config, workdir: Path, steps: list[int]) -> list[dict]:
  """A row for each watched layer before each of `steps`."""
  run = make_run(config, workdir)
  vision, text = run.model.config.vision, run.model.config.text
  batches = data.prefetch_to_device(
    data.train_iterator(
      config, run.builder, run.tokenizer,
      image_size=vision.image_size, context_length=text.context_length,
    ),
    batch_sharding(run.mesh),
    config.data.prefetch,
  )  # fmt: skip
  capture = jax.jit(make_capture(run.model, LOSSES[config.loss], watched(run.model.config)))
  train_step, state, rows = jit_train_step(run), run.new_state(), []
  for step in range(1, steps[-1] + 1):
    batch = next(batches)[0]
    taken = step in steps
    if taken:
      started = time.perf_counter()
      key = jax.random.fold_in(jax.random.key(config.seed), state.step)  # As the step draws it.
      operands = capture(state.params, batch, key)
      found = [analyse(step, layer, *operands.pop(layer)) for layer in list(operands)]
      seconds = time.perf_counter() - started
    state, metrics, _ = train_step(state, batch)
    if taken:
      loss = float(metrics["loss"])
      print(f"step {step}: loss {loss:.4f}, {len(found)} layers in {seconds:.0f} s", flush=True)
      rows += [row | {"loss": loss} for row in found]
  batches.close()
  run.checkpointer.close()
  about = {
    "size": config.model.size,
    "recipe": config.model.recipe,
    "dtype": config.model.dtype,
    "batch_size": config.batch_size,
    "image_size": vision.image_size,
    "patch_size": vision.patch_size,
    "patch_dropout": config.model.patch_dropout,
    "learning_rate": config.optimizer.learning_rate,
    "warmup_steps": config.optimizer.warmup_steps,
    "data": config.data.name,
    **provenance(),
  }
  # Behind a layer scale of zero there is no gradient yet, and no relative error.
  return [row | about for row in rows if math.isfinite(row["errors"]["bf16"])]


def watched(config: CLIPConfig) -> list[str]:
  """The linear layers of the first, the middle and the last image block and of a text block."""
  last = config.vision.layers - 1
  blocks = [f"image/block_{i}" for i in dict.fromkeys((0, last // 2, last))]
  blocks.append(f"text/block_{config.text.layers // 2}")
  return [f"{block}/{layer}" for block in blocks for layer in BLOCK_LINEARS]


def analyse(step: int, layer: str, x: jax.Array, dy: jax.Array) -> dict:
  """What is measured of one layer's operands."""
  x, dy = x[: _TOKENS.value], dy[: _TOKENS.value]
  found = jax.tree.map(float, _measured(x, dy, jax.random.key(step)))
  tokens, k = x.shape
  return {"step": step, "layer": layer, "tokens": tokens, "k": k, "n": dy.shape[1], **found}


@jax.jit  # Once for each shape.
def _measured(x, dy, key):
  return {"errors": errors(x, dy, key), "statistics": statistics(x, dy)}


def print_table(rows: list[dict]) -> None:
  """Median and worst over the layers, at each step, best first: errors as multiples of bf16's."""
  steps = sorted({row["step"] for row in rows})
  groups = [[row for row in rows if row["step"] == step] for step in steps]

  def line(name, value):
    values = [[value(row) for row in group] for group in groups]
    return name, [(np.median(v), max(v)) for v in values]

  bf16 = lambda row: row["errors"]["bf16"]  # noqa: E731
  ratios = [line(n, lambda row, n=n: row["errors"][n] / bf16(row)) for n in rows[0]["errors"]]
  ratios.sort(key=lambda line: line[1][-1])
  why = [line(n, lambda row, n=n: row["statistics"][n]) for n in rows[0]["statistics"]]
  print(f"\n{'error of dw / that of bf16':58}", *(f"{f'at step {step}':>20}" for step in steps))
  print(f"{'':58}", *(f"{'median':>10}{'worst':>10}" for _ in steps))
  for name, pairs in (*ratios, line("relative error of bf16", bf16), *why):
    print(f"{name:58}", *(f"{median:10.3g}{worst:10.3g}" for median, worst in pairs))


if __name__ == "__main__":
  cli.run(main)
