"""How much do 8 bits change a run's gradient, and from which batch size does that matter?

  python -m train.rounding runs/a --recipes switchback switchback_q fp8_switchback
  python -m train.rounding vit_b32.safetensors --config=configs/clip_vit_b32.py --out=measured

Compares gradients in each recipe with those in 16 bits, on the batches of training that follow the
run's newest checkpoint, and finds noise, bias and the batch at which they are equal, by layer; then
the errors of outputs, and each layer's share (docs/rounding.md). Writes rounding.json and
rounding.png to the run's folder, or to --out. The same command continues after a stop; more batches
or recipes add to it. Fields of the run's config are flags: --config.data.data_dir=... Rules are a
recipe, too: 'image/block_0/*=full, *=switchback'.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from sbjax.convert.rounding import LEAST_GROUPS
from sbjax.interop.files import is_weights
from train import cli
from train.config import Config
from train.errors import RunError
from train.evaluate import positive
from train.paths import local_path
from train.rounding.measure import Subject, check_recipes, measure
from train.rounding.report import describe, draw, results
from train.run import make_run
from train.workdir import check_writable, lock, newest_step, read_config, write_json


def subject_of(options: argparse.Namespace, overrides: dict[str, list[str]], out: Path) -> Subject:
  """The run or the weights that the command names, with their data.

  Raises:
    RunError, ValueError: something of it is missing.
  """
  path = local_path(options.run, "RUN")
  weights = is_weights(path) and not path.is_dir()
  if weights != bool(options.config):
    need = "needs --config=FILE, with its model and data" if weights else "has its own config"
    raise RunError(f"{path} {need}.")
  if weights:
    config = cli.load_config(options.config)
    config.init = str(path)
  elif not (path / "config.json").is_file() or newest_step(path / "checkpoints") is None:
    raise RunError(f"{path} holds no run: it needs config.json and a checkpoint, or be weights.")
  else:
    config = Config.from_dict(read_config(path / "config.json"))
    config.model.backend = config.model.attention_backend = ""  # The run's device may be another.
    config.mesh.data, config.mesh.fsdp = -1, math.gcd(config.mesh.fsdp, jax.device_count())
    config.data.workers = 0
  cli.override(config, overrides)
  if config.lora.rank:
    raise RunError(
      f"lora.rank={config.lora.rank}: adapters on frozen kernels have no other recipes. Measure a"
      " run whose lora.rank is 0."
    )
  config.batch_size = options.batch_size or config.batch_size
  config.watch, config.data.eval_split, config.data.eval_data = (), "", ()
  run = make_run(config, out if weights else path, read_only=True)
  iterator = run.source.train_iterator(run.tokenizer, **run.task.example_sizes)
  position = iterator.get_state()
  iterator.close()
  if weights:
    return Subject(run, run.new_state().params, position, None)
  restored = run.restore()
  if restored is None:
    raise RunError(f"{run.checkpointer.directory} holds no checkpoint any more: try again.")
  position = {name: value for name, value in restored.data.items() if name != "tokenizer"}
  return Subject(run, restored.state.params, position, restored.step)


def run(options: argparse.Namespace, overrides: dict[str, list[str]]) -> None:
  path = local_path(options.run, "RUN")
  out = local_path(options.out or (path if path.is_dir() else "."), "--out")
  names, groups = list(dict.fromkeys(options.recipes)), options.batches // options.group
  check_recipes(names)
  if options.group < 2 or groups < LEAST_GROUPS:
    raise ValueError(
      f"--batches={options.batches} in groups of --group={options.group} are too few for an"
      f" interval: it needs {LEAST_GROUPS} groups of 2 or more."
    )
  check_writable(out, "--out")
  out.mkdir(parents=True, exist_ok=True)
  subject = subject_of(options, overrides, out)
  file = out / "rounding.json"

  def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

  with lock(out):
    measured = measure(subject, names, groups, options.group, file, say)
    found = results(measured, names)
    write_json(file, {**json.loads(file.read_text()), "results": found})
    draw(out / "rounding.png", measured, names)
  print(describe(measured, names, options.layers))
  print(f"The numbers are in {file}, the plot is {out / 'rounding.png'}.")


def parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    "python -m train.rounding", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument("run", help="a run's folder, or a file of open_clip's weights")
  parser.add_argument("--recipes", nargs="+", default=["switchback"], metavar="RECIPE")
  parser.add_argument("--batches", type=positive, default=64, help="of the gradients; default 64")
  parser.add_argument("--group", type=positive, default=8, help="batches of a group; default 8")
  parser.add_argument("--batch_size", type=positive, help="pairs of a batch; default: the run's")
  parser.add_argument("--layers", type=positive, default=10, help="the worst to print; default 10")
  parser.add_argument("--config", default="", help="a file of configs/, for weights")
  parser.add_argument("--out", default="", help="a folder; default: the run's")
  parser.add_argument("--debug", action="store_true", help="show tracebacks")
  return parser


def main(arguments: Sequence[str] | None = None) -> None:
  try:
    overrides, rest = cli.split_flags(sys.argv[1:] if arguments is None else arguments)
  except ValueError as error:
    sys.exit(str(error))
  options = parser().parse_args(rest)
  with cli.report_errors(options.debug):
    run(options, overrides)


if __name__ == "__main__":
  main()
