"""Writes the scenes of a track as tar shards, and the folder that scores it.

Both programs read the same files: JPEGs with a caption each. The folder is as CLIP_benchmark keeps
them. Drawing is a function of the track, so everyone has the same scenes.
"""

import io
import json
import multiprocessing
import os
import tarfile
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import jax
import numpy as np
from PIL import Image

from benchmarks.shards import add_file
from benchmarks.speedrun.tracks import Track
from train.config import Config, DataConfig, MeshConfig, ModelConfig
from train.data.scenes.scenes import CAPTION_LENGTH, Scenes, find_variant, text_of
from train.data.scenes.words import TEMPLATES
from train.parallel.sharding import make_mesh

WDS = "wds_scenes"


def write(track: Track, folder: Path) -> dict:
  """Writes what is not there yet; returns what data.json says of the data."""
  done = folder / "data.json"
  made_of = [track.scenes, track.image_size, track.shards, track.each, track.quality, track.classes]
  if done.is_file() and (found := json.loads(done.read_text()))["made_of"] == made_of:
    return found
  folder.mkdir(parents=True, exist_ok=True)
  scenes = _scenes(track)
  lengths: Counter[int] = Counter()
  most = len(os.sched_getaffinity(0))
  with ProcessPoolExecutor(most, multiprocessing.get_context("spawn")) as pool:
    written: deque[Future] = deque()
    for shard, (images, captions) in enumerate(_drawn(scenes, track)):
      lengths.update(len(text.split()) for text in captions)
      path = folder / f"train-{shard:04}.tar"
      written.append(pool.submit(_write_shard, path, images, "txt", captions, track.quality))
      if len(written) > most:  # Else the memory fills with images.
        written.popleft().result()
    for future in written:
      future.result()
  _write_wds(scenes, track, folder / WDS)
  found = {"made_of": made_of, "words of a caption": dict(sorted(lengths.items()))}
  done.write_text(json.dumps(found))
  return found


def _scenes(track: Track) -> Scenes:
  data = DataConfig(name=track.scenes, label_key="label")
  config = Config(model=ModelConfig(size="tiny"), data=data, batch_size=track.each)
  return Scenes(config, find_variant(track.scenes))


def _drawn(scenes: Scenes, track: Track) -> Iterator[tuple[np.ndarray, list[str]]]:
  """The images and captions of each shard: those of a step of training."""
  sizes = {"image_size": track.image_size, "context_length": CAPTION_LENGTH}
  draw = scenes.to_devices(make_mesh(MeshConfig(), jax.devices()[:1]), **sizes)
  for shard in range(track.shards):
    batch = jax.device_get(draw({"step": np.uint32(shard)}))
    yield batch["image"], [text_of(row) for row in batch["text"]]


def _write_wds(scenes: Scenes, track: Track, folder: Path) -> None:
  (folder / "test").mkdir(parents=True, exist_ok=True)
  lines = {
    "classnames": scenes.class_names,
    "zeroshot_classification_templates": [text.replace("{}", "{c}") for text in TEMPLATES],
    "test/nshards": ["1"],
  }
  for name, texts in lines.items():
    (folder / f"{name}.txt").write_text("".join(f"{text}\n" for text in texts))
  images, labels = [], []
  split = f"classes[:{track.classes}]"
  for batch in scenes.eval_batches(split, image_size=track.image_size, batch_size=1000):
    images += list(batch["image"])
    labels += [str(label) for label in batch["label"]]
  _write_shard(folder / "test" / "0.tar", images, "cls", labels, track.quality)


def jpeg(pixels: np.ndarray, quality: int) -> bytes:
  """Colours are told in captions, so they are not subsampled."""
  file = io.BytesIO()
  Image.fromarray(pixels).save(file, "jpeg", quality=quality, subsampling=0)
  return file.getvalue()


def _write_shard(path: Path, images, ending: str, texts: Sequence[str], quality: int) -> None:
  with tarfile.open(path, "w") as tar:
    for i, (image, text) in enumerate(zip(images, texts, strict=True)):
      add_file(tar, f"{i:06}.jpg", jpeg(image, quality))
      add_file(tar, f"{i:06}.{ending}", text.encode())
