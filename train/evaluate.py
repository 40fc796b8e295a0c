"""Scores a trained CLIP: a run on its own kind of data, or any weights on CLIP_benchmark's folders.

The newest checkpoint of a run, on any data set, such as --config.data.name=cifar10:
  python -m train.evaluate --config=configs/quickstart.py --workdir=runs/quickstart
Zero-shot classification and retrieval with CLIP_benchmark's names; --help after --checkpoint:
  python -m train.evaluate --checkpoint=open_clip.safetensors --model=ViT-B-32 --data=wds_cifar10
"""

import argparse
import csv
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from sbjax.models.sizes import open_clip_name
from train import cli, inference
from train.config import Config, DataConfig
from train.data.decode import DEFAULT_LIMITS, Limits
from train.data.wds_folder import CLASSIFICATION, EVAL_SPLIT, WdsFolder, open_folder
from train.errors import RunError
from train.fields import AT_LEAST_1, KINDS, Limit, about
from train.inference import Model
from train.linear_probe import predict, train_probe
from train.paths import local_path
from train.run import make_run
from train.workdir import check_writable, newest_step, write_json
from train.zero_shot import (
  check_finite,
  label_ranks,
  recall,
  top_k_accuracy,
  zero_shot_classifier,
)

PROBE = "linear_probe"


def evaluate_checkpoint(config: Config, workdir: Path) -> dict[str, float]:
  """Scores the newest checkpoint in `workdir`, prints the scores and writes them there as JSON."""
  if newest_step(workdir / "checkpoints") is None:
    raise RunError(f"{workdir} holds no checkpoint: train there first, or mend --workdir.")
  if not (config.data.eval_split or config.data.eval_data):
    raise RunError("Nothing to score: set data.eval_split or data.eval_data.")
  run = make_run(config, workdir, read_only=True)
  restored = run.restore()
  if restored is None:
    raise RunError(f"{run.checkpointer.directory} holds no checkpoint any more: try again.")
  scores = run.at(restored.step).evaluate_state(restored.state)
  if jax.process_index() != 0:
    return scores
  data_set, split = run.source.full_name, config.data.eval_split or "eval_data"
  print_scores(f"step {restored.step}, {data_set}, {split}", scores)
  path = workdir / f"evaluation-{data_set.replace('/', '-')}-{split}.json"
  write_json(path, {"step": restored.step, **scores})
  return scores


def evaluate_folder(
  model: Model, folder: WdsFolder, split: str = EVAL_SPLIT, limits: Limits = DEFAULT_LIMITS
) -> dict[str, float]:
  """The zero-shot scores of a model on a data set, by CLIP_benchmark's names."""
  images, labels, captions = _features(model, folder, split, limits)
  if folder.task == CLASSIFICATION:
    classifier = zero_shot_classifier(model.embed_texts, list, folder.class_names, folder.templates)
    return classification_scores(images @ classifier.T, labels)
  owners = np.repeat(np.arange(len(images)), [len(texts) for texts in captions])
  texts = [text for texts in captions for text in texts]
  features = model.embed_texts(texts)
  check_finite("text", features, texts)
  scores = recall(images, features, owners)
  return {
    f"{name}_retrieval_recall@{k}": scores[f"{way}_recall@{k}"]
    for name, way in (("image", "text_to_image"), ("text", "image_to_text"))
    for k in (1, 5, 10)
  }


def probe_folder(
  model: Model,
  folder: WdsFolder,
  split: str = EVAL_SPLIT,
  train_split: str = "train",
  limits: Limits = DEFAULT_LIMITS,
) -> dict[str, float]:
  """The scores of a linear probe that is trained on `train_split`, by CLIP_benchmark's names."""
  images, labels, _ = _features(model, folder, train_split, limits)
  probe, penalty = train_probe(images, labels, len(folder.class_names))
  images, labels, _ = _features(model, folder, split, limits)
  scores = classification_scores(predict(probe, images), labels)
  return {**{f"lp_{name}": score for name, score in scores.items()}, "weight_decay": penalty}


def classification_scores(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
  """acc1, acc5 (from five classes on) and mean_per_class_recall of logits [N, classes]."""
  ranks = label_ranks(logits, labels)
  scores = {f"acc{k}": share for k, share in top_k_accuracy(ranks, logits.shape[1]).items()}
  recalls = [np.mean(ranks[labels == label] == 0) for label in np.unique(labels)]
  return {**scores, "mean_per_class_recall": float(np.mean(recalls))}


def _features(model: Model, folder: WdsFolder, split: str, limits: Limits):
  """Unit features [N, E] of the images of a split, their labels [N] and their captions."""
  images, labels, captions = [], [], []
  with tqdm(desc=f"{folder.name} {split}", unit="image", disable=None) as progress:
    for batch in folder.batches(split, model.crop, model.batch_size, limits):
      images.append(model.embed_pixels(batch["image"], batch["where"]))
      labels.append(batch["label"])
      captions += batch["captions"]
      progress.update(len(batch["image"]))
  if not images:
    raise RunError(f"The shards of {folder.path / split} hold no sample.")
  return np.concatenate(images), np.concatenate(labels), captions


def evaluate_folders(options: argparse.Namespace) -> list[dict]:
  """Scores a model on each folder; writes a JSON file for each and a csv of all."""
  limits = limits_of(options)
  checkpoint = local_path(options.checkpoint, "--checkpoint")
  out = local_path(options.out or (checkpoint if checkpoint.is_dir() else "."), "--out")
  check_writable(out, "--out")
  folders = [open_folder(path) for path in options.data]
  names = [folder.path.name for folder in folders]
  if len({*names}) < len(names):
    raise RunError(f"Folders need names of their own, for their results: {', '.join(names)}.")
  for folder in folders:  # These fail before anything is computed, which takes long.
    folder.shards(options.split)
    if options.linear_probe and folder.task == CLASSIFICATION:
      folder.shards(options.train_split)
  model = load_model(options)
  out.mkdir(parents=True, exist_ok=True)
  named = {
    "model": open_clip_name(model.size),
    "pretrained": " ".join(
      [str(options.checkpoint), *(name for name in ("ema", "int8") if getattr(options, name))]
    ),
    "language": "en",
  }
  rows = []
  for folder in folders:
    scores = {folder.task: evaluate_folder(model, folder, options.split, limits)}
    if options.linear_probe and folder.task == CLASSIFICATION:
      scores[PROBE] = probe_folder(model, folder, options.split, options.train_split, limits)
    for task, metrics in scores.items():
      about = {"split": options.split, "step": model.step, "task": task}
      row = {"dataset": folder.name, **named, **about, "metrics": metrics}
      suffix = "" if options.split == EVAL_SPLIT else f"_{options.split}"
      write_json(out / f"{folder.path.name}{suffix}_{task}.json", row)
      rows.append(row)
      write_csv(out / "benchmark.csv", rows)
      print_scores(f"{folder.name}, {task}", metrics)
  print(f"wrote {out / 'benchmark.csv'}")
  return rows


def print_scores(title: str, scores: dict[str, float]) -> None:
  """Prints scores with four digits, however small they are."""
  print(title)
  for name, score in scores.items():
    print(f"  {name:26} {score:.4g}")


def write_csv(path: Path, rows: Sequence[dict]) -> None:
  """A line for each result, with a column for each metric that any of them has."""
  metrics = dict.fromkeys(name for row in rows for name in row["metrics"])
  columns = [*metrics, "dataset", "model", "pretrained", "language", "split", "step", "task"]
  columns.append("model_fullname")
  # Names of files may be in another encoding.
  with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
    table = csv.DictWriter(file, columns)
    table.writeheader()
    for row in rows:
      rest = {name: value for name, value in row.items() if name != "metrics"}
      full_name = f"{row['model']} {row['pretrained']}"
      table.writerow({**row["metrics"], **rest, "model_fullname": full_name})


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
  """The flags of `load_model`."""
  parser.add_argument("--checkpoint", required=True, help="a run's workdir or open_clip's weights")
  parser.add_argument("--model", default="", help="the size of open_clip's weights: ViT-B-32")
  parser.add_argument("--tokenizer", default="", help='of open_clip\'s weights; "" is "clip"')
  parser.add_argument("--dtype", default="", choices=["", "float32", "bfloat16"])
  parser.add_argument("--int8", action="store_true", help="kernels and token table in 8 bits only")
  parser.add_argument("--ema", action="store_true", help="the average that optimizer.ema keeps")
  parser.add_argument("--step", type=positive, help="of a run's checkpoint; by default the newest")
  parser.add_argument("--batch_size", type=positive, default=256)
  for field in dataclasses.fields(DataConfig):
    if field.name in _LIMITS:
      kind, words = argument(field.type, *about(field).limits), f"by default {field.default:,}"
      parser.add_argument(
        f"--{field.name}", type=kind, default=field.default, help=f"of an image; {words}"
      )
  parser.add_argument("--debug", action="store_true", help="show tracebacks")


def load_model(options: argparse.Namespace) -> Model:
  """The model that the flags select; see train.inference.load."""
  return inference.load(
    options.checkpoint,
    options.batch_size,
    size=options.model,
    tokenizer=options.tokenizer,
    dtype=options.dtype,
    int8=options.int8,
    ema=options.ema,
    step=options.step,
  )


def limits_of(options: argparse.Namespace) -> Limits:
  """The limits that the flags give."""
  config = DataConfig(**{name: getattr(options, name) for name in _LIMITS})
  return Limits.of(config)._replace(given_by="--")


def argument(kind: type, *limits: Limit) -> Callable[[str], Any]:
  """Reads an argument as a field of that type and with these limits."""

  def read(text: str) -> Any:
    try:
      value = KINDS[kind].read(text)
    except ValueError:
      raise argparse.ArgumentTypeError(f"{text!r} must be {KINDS[kind].words}.") from None
    for limit in limits:
      if not limit.holds(value):
        raise argparse.ArgumentTypeError(f"{text} must be {limit.words}.")
    return value

  return read


positive = argument(int, AT_LEAST_1)
_LIMITS = ("max_member_bytes", "max_image_pixels", "max_aspect_ratio")  # fields of DataConfig


def main(arguments: Sequence[str]) -> None:
  parser = argparse.ArgumentParser(
    "python -m train.evaluate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  add_model_arguments(parser)
  parser.add_argument("--data", required=True, nargs="+", action="extend", help="wds_* folders")
  parser.add_argument("--split", default=EVAL_SPLIT)
  parser.add_argument("--linear_probe", action="store_true", help="train a linear probe, too")
  parser.add_argument("--train_split", default="train", help="of the linear probe")
  parser.add_argument("--out", default="", help="folder for JSON and csv; default: the workdir")
  options = parser.parse_args(arguments)
  with cli.report_errors(options.debug):
    evaluate_folders(options)


if __name__ == "__main__":
  if any(argument.partition("=")[0] == "--checkpoint" for argument in sys.argv[1:]):
    main(sys.argv[1:])
  else:
    cli.run(evaluate_checkpoint)
