"""Prints the rate of open_clip's loader of tar shards as JSON, for benchmarks/data.py.

  python -m benchmarks.data_open_clip --shards '/tmp/photos-{0..3}.tar' --workers 2

With --order, prints the captions of a pass, which are numbers, for benchmarks/data_scale.py.

The pipeline is open_clip's own (`get_wds_dataset`), with its transform for ViT-B-32 (224 pixels)
and its tokenizer. Needs open_clip_torch, torchvision, pandas and webdataset<=0.2.86. Use at least
one worker: inside the process of the loop, torch's threads wait for each other.
"""

import argparse
import importlib
import importlib.metadata
import json
import warnings

from benchmarks.host_rate import rate


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--shards", required=True, help="a path with a {range}")
  parser.add_argument("--workers", type=int, required=True, help="processes")
  parser.add_argument("--batches", type=int, default=40, help="timed")
  parser.add_argument("--batch_size", type=int, default=128)
  parser.add_argument("--order", type=int, default=0, help="samples of a pass")
  options = parser.parse_args()
  warnings.simplefilter("ignore")
  import_torchvision()
  import open_clip
  from open_clip_train.data import get_wds_dataset

  warm_up = 2 * max(1, options.workers) + 2  # DataLoader prefetches two batches in each worker.
  samples = (warm_up + options.batches + 2 * max(1, options.workers)) * options.batch_size
  args = argparse.Namespace(
    train_data=options.shards,
    train_num_samples=options.order or samples,
    train_data_upsampling_factors=None,
    dataset_resampled=not options.order,  # Repeats shards without end.
    seed=0,
    batch_size=options.batch_size,
    workers=options.workers,
    world_size=1,
  )
  transform = open_clip.image_transform(224, is_train=True)
  tokenizer = open_clip.get_tokenizer("ViT-B-32")
  if options.order:
    transform, tokenizer = (lambda image: 0), (lambda text: [int(text)])
  loader = get_wds_dataset(args, transform, is_train=True, tokenizer=tokenizer).dataloader
  iterator = iter(loader)
  if options.order:
    print(json.dumps([int(number) for _, numbers in iterator for number in numbers]))
    return
  result = rate(lambda: next(iterator), options.batch_size, warm_up, options.batches)
  packages = ("open_clip_torch", "torch", "torchvision", "webdataset", "pillow")
  versions = {name: importlib.metadata.version(name) for name in packages}
  print(json.dumps({**result, "versions": versions}))


_DECLARED = []  # Keeps libraries alive: their operators are declared only that long.


def import_torchvision() -> None:
  """Imports torchvision, even a CUDA build beside a CPU build of torch.

  PyPI's torchvision is such a build. Its operators then fail to load, and its import fails because
  it refers to two of them. open_clip needs neither, so declaring them is enough.
  """
  import torch

  try:
    importlib.import_module("torchvision")
  except RuntimeError as error:
    if "torchvision::nms does not exist" not in str(error):
      raise
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
      library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _DECLARED.append(library)
    importlib.import_module("torchvision")


if __name__ == "__main__":
  main()
