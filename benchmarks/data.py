"""How many images a second does the input pipeline give?

  python -m benchmarks.data [--open_clip] [--s3]

Two data sets: `shapes` (PNGs of 48x48, resized to 48 pixels) and photos (JPEGs of 500x375 made here
from smooth noise, resized to 224 pixels), which are imported and streamed. Adds a row to
results/data.jsonl for each data set and number of worker processes; 0 uses threads of this process.
`--s3` adds streams from moto's S3 on the loopback, a process of its own; `--open_clip` adds rows of
open_clip's loader of the same shards. Both if they are installed. Contenders run in turns, and
medians are reported. `images_per_cpu_second` is the rate of one fully used core: images divided by
the processor time of all threads and processes. Trust this figure if others use the machine too.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.metadata
import io
import json
import os
import pathlib
import platform
import re
import socket
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import fsspec
import numpy as np
from PIL import Image

from benchmarks.commit import COMMIT
from benchmarks.host_rate import rate
from benchmarks.shards import add_file
from benchmarks.timing import append
from train.config import Config, DataConfig, ModelConfig
from train.data.source import open_source
from train.data.tokenizer import make_tokenizer

_RESULTS = pathlib.Path(__file__).parent / "results" / "data.jsonl"
_SHARDS = "photos-{0..3}.tar"  # Several, since open_clip does not share a shard between workers.


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--batches", type=int, default=40, help="timed in each turn")
  parser.add_argument("--batch_size", type=int, default=128)
  parser.add_argument("--turns", type=int, default=3, help="of each contender")
  parser.add_argument("--data", nargs="+", default=["shapes", "photos"], help="which of the two")
  parser.add_argument("--workers", nargs="+", type=int, default=[0, 1, 2], help="processes")
  parser.add_argument("--s3", action="store_true", help="stream from a store, too")
  parser.add_argument("--open_clip", action="store_true", help="compare with open_clip's loader")
  options = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as closing:
    write_photos(pathlib.Path(folder))
    stores = [closing.enter_context(s3(folder))] if options.s3 else []
    contenders = _contenders(folder, options, stores)
    found = [[] for _ in contenders]
    for _ in range(options.turns):
      for (row, measured), turns in zip(contenders, found, strict=True):
        turns.append(measured())
        print(json.dumps(row | turns[-1]), flush=True)
  for (row, _), turns in zip(contenders, found, strict=True):
    medians = {
      name: statistics.median(turn[name] for turn in turns)
      for name in ("start_seconds", "images_per_second", "images_per_cpu_second")
    }
    row |= {"batch_size": options.batch_size, "turns": options.turns, **medians}
    print(json.dumps(row), flush=True)
    record(row, **turns[0].get("versions", {}))


def _contenders(folder: str, options: argparse.Namespace, stores: list[str]) -> list:
  """Pairs of a row's description and the function that measures it."""
  photos = DataConfig(name="photos", data_dir=folder, root=folder, train_shards=_SHARDS)
  sets = [(48, {}, DataConfig(name="shapes", data_dir=folder)), (224, {}, photos)]
  for place in [folder, *stores]:
    streamed = dataclasses.replace(photos, stream=True, train_shards=f"{place}/{_SHARDS}")
    sets.append((224, {"loader": "stream" + " from s3" * (place != folder)}, streamed))
  found = []
  for image_size, loader, data_config in sets:
    for workers in options.workers if data_config.name in options.data else ():
      config = Config(
        model=ModelConfig(size=""),
        data=dataclasses.replace(data_config, workers=workers),
        batch_size=options.batch_size,
      )
      row = {"data": data_config.name, **loader, "image_size": image_size, "workers": workers}
      found.append((row, functools.partial(measure, config, image_size, options.batches)))
  for workers in filter(None, options.workers if options.open_clip else ()):
    row = {"data": "photos", "loader": "open_clip", "image_size": 224, "workers": workers}
    flags = {"shards": f"{folder}/{_SHARDS}", "workers": workers, "batches": options.batches}
    found.append((row, functools.partial(open_clip, **flags, batch_size=options.batch_size)))
  return found


def measure(config: Config, image_size: int, batches: int) -> dict:
  """The rate of `train_iterator` over `batches` batches."""
  source = open_source(config)
  tokenizer = make_tokenizer("bpe", source.captions(), 1024)
  iterator = source.train_iterator(tokenizer, image_size=image_size, context_length=32)
  warm_up = config.data.prefetch + 2
  result = rate(lambda: next(iterator), config.batch_size, warm_up, batches)
  iterator.close()
  return result


@contextlib.contextmanager
def s3(folder: str) -> Iterator[str]:
  """The URL of a folder's shards in moto's S3."""
  with socket.socket() as server:
    server.bind(("127.0.0.1", 0))
    port = server.getsockname()[1]
  os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
  os.environ |= dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "testing")
  command = [sys.executable, "-m", "moto.server", "-H127.0.0.1", f"-p{port}"]
  with subprocess.Popen(command, stderr=subprocess.DEVNULL) as store:
    try:
      while socket.socket().connect_ex(("127.0.0.1", port)):
        time.sleep(0.1)
      bucket = fsspec.filesystem("s3")
      bucket.mkdir("shards")
      bucket.put([str(path) for path in pathlib.Path(folder).glob("*.tar")], "shards/")
      yield "s3://shards"
    finally:
      store.kill()


def open_clip(**flags) -> Any:
  """What benchmarks/data_open_clip.py prints."""
  command = [sys.executable, "-m", "benchmarks.data_open_clip"]
  command += [f"--{name}={value}" for name, value in flags.items()]
  run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
  return json.loads(run.stdout.splitlines()[-1])


def write_photos(
  folder: pathlib.Path,
  shards: int = 4,
  each: int = 128,
  size: tuple[int, int] = (500, 375),
  caption: str = "A dog runs over the grass with a ball in its mouth .",
) -> None:
  """Writes photos-0.tar and so on; by default photos as large as Flickr's: 500x375, 80 kB."""
  rng = np.random.default_rng(0)
  for shard in range(shards):
    with tarfile.open(folder / f"photos-{shard}.tar", "w") as tar:
      for i in range(shard * each, (shard + 1) * each):
        coarse = Image.fromarray(rng.integers(0, 256, (size[1] // 5, size[0] // 5, 3), np.uint8))
        file = io.BytesIO()
        coarse.resize(size, Image.Resampling.BICUBIC).save(file, "jpeg", quality=90)
        texts = (f"{i:06d}.jpg", file.getvalue()), (f"{i:06d}.txt", caption.format(i).encode())
        for name, content in texts:
          add_file(tar, name, content)


def record(row: dict, **versions: str) -> None:
  """Adds a row with the circumstances; `versions` are those of another process."""
  row |= _circumstances()
  row["versions"] |= versions
  append(_RESULTS, [row])


def _circumstances() -> dict:
  packages = (
    "grain", "tensorflow-datasets", "array-record", "simplejpeg", "cykooz-resizer", "pillow",
    "numpy", "tokenizers",
  )  # fmt: skip
  return {
    "commit": COMMIT,
    "command": " ".join(["python -m", sys.modules["__main__"].__spec__.name, *sys.argv[1:]]),
    "versions": {name: importlib.metadata.version(name) for name in packages},
    "python": platform.python_version(),
    "cpu": _cpu_name(),
    "cores": os.cpu_count(),
    "load": round(os.getloadavg()[0], 1),  # Well above `workers`: others used the machine too.
  }


def _cpu_name() -> str:
  cpus = pathlib.Path("/proc/cpuinfo")
  named = re.search(r"model name\s*: (.*)", cpus.read_text() if cpus.exists() else "")
  return named[1] if named else platform.processor() or platform.machine()


if __name__ == "__main__":
  main()
