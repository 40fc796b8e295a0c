"""How many images a second does the input pipeline give?

  python -m benchmarks.data

Two data sets: `shapes` (PNG of 48x48, to 48 pixels) and photos (JPEG of 500x375, to 224 pixels,
made here of smooth noise). A row of results/data.jsonl for each and for each number of worker
processes, where 0 is threads of this process. `images_per_cpu_second` is what one core does when
it does nothing else: images over the processor time of all threads, known for threads alone.
"""

import argparse
import importlib.metadata
import io
import json
import os
import pathlib
import platform
import sys
import tarfile
import tempfile
import time

import numpy as np
from PIL import Image

from train import data
from train.config import Config, DataConfig, ModelConfig
from train.tokenizer import make_tokenizer

_RESULTS = pathlib.Path(__file__).parent / "results" / "data.jsonl"
_PHOTOS = 512


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--batches", type=int, default=40, help="timed in each row")
  parser.add_argument("--batch_size", type=int, default=128)
  options = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    _write_photos(pathlib.Path(folder) / "photos.tar")
    sets = {
      48: DataConfig(name="shapes", data_dir=folder),
      224: DataConfig(name="photos", data_dir=folder, root=folder, train_shards="photos.tar"),
    }
    for image_size, data_config in sets.items():
      for workers in (0, 1, 2):
        data_config.workers = workers
        config = Config(model=ModelConfig(size=""), data=data_config, batch_size=options.batch_size)
        row = {
          "data": data_config.name,
          "image_size": image_size,
          "workers": workers,
          **measure(config, image_size, options.batches),
        }
        print(json.dumps(row), flush=True)
        with _RESULTS.open("a") as file:
          file.write(json.dumps(row | _circumstances()) + "\n")


def measure(config: Config, image_size: int, batches: int) -> dict:
  """Seconds to the first batch, then images a second over `batches` batches."""
  builder = data.prepare(config.data)
  tokenizer = make_tokenizer("bpe", data.captions(config, builder), 1024)
  iterator = data.train_iterator(
    config, builder, tokenizer, image_size=image_size, context_length=32
  )
  began = time.perf_counter()
  for _ in range(config.data.prefetch + 2):  # What was made while the workers started
    next(iterator)
  started, cpu = time.perf_counter(), time.process_time()
  for _ in range(batches):
    next(iterator)
  seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
  iterator.close()
  images = batches * config.batch_size
  return {
    "batch_size": config.batch_size,
    "start_seconds": round(started - began, 2),
    "images_per_second": round(images / seconds),
    "images_per_cpu_second": None if config.data.workers else round(images / cpu_seconds),
  }


def _write_photos(path: pathlib.Path) -> None:
  """Photos as Flickr gives them: 500x375, about 50 kB."""
  rng = np.random.default_rng(0)
  with tarfile.open(path, "w") as tar:
    for i in range(_PHOTOS):
      coarse = Image.fromarray(rng.integers(0, 256, (75, 100, 3), np.uint8))
      file = io.BytesIO()
      coarse.resize((500, 375), Image.Resampling.BICUBIC).save(file, "jpeg", quality=90)
      for name, content in (
        (f"{i:06d}.jpg", file.getvalue()),
        (f"{i:06d}.txt", b"A dog runs over the grass with a ball in its mouth ."),
      ):
        info = tarfile.TarInfo(name)
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))


def _circumstances() -> dict:
  packages = ("grain", "tensorflow-datasets", "array-record", "pillow", "numpy", "tokenizers")
  return {
    "command": " ".join(["python -m benchmarks.data", *sys.argv[1:]]),
    "versions": {name: importlib.metadata.version(name) for name in packages},
    "python": platform.python_version(),
    "cpu": _cpu_name(),
    "cores": os.cpu_count(),
    "load": round(os.getloadavg()[0], 1),  # Well above `workers`: the machine was not quiet.
  }


def _cpu_name() -> str:
  try:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
  except FileNotFoundError:
    return platform.processor()
  names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
  return next(names, platform.machine())


if __name__ == "__main__":
  main()
