"""Embeds folders or shards of pictures, or lines of texts, into numbered .npy files.

  python -m train.embed --checkpoint=runs/quickstart --data=photos --out=embedded
  python -m train.embed --checkpoint=runs/quickstart --out=embedded --query "a red circle"

images-00000.npy has the unit vectors, float32 [n, E], of the first --shard_size pictures, and
images-00000.json their names (a path, or "shard.tar:key") and those of pictures that were skipped
because they cannot be decoded. The same command continues after the files that are there. --texts
embeds a text a line, into texts-*. --query prints the pictures nearest to a text and draws them.
"""

import argparse
import functools
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageOps
from tqdm import tqdm

from train import cli, inference
from train.datasets import pictures, sample, tar_shards
from train.datasets.pictures import DEFAULT_LIMITS
from train.errors import RunError
from train.evaluate import add_model_arguments, positive
from train.inference import Model
from train.paths import local_path
from train.workdir import lock, write_json

_PICTURES = tuple(f".{ending}" for ending in sample.IMAGES)
_TILE, _MARGIN = 128, 20  # pixels of a contact sheet


def sources(patterns: Sequence[str], out: Path | None = None) -> list[str]:
  """The pictures and tar shards that folders, files and globs name, in order; none in `out`.

  Raises:
    RunError: one of them names none.
  """
  found = []
  for pattern in patterns:
    folder = local_path(pattern, "--data")
    if folder.is_dir():
      paths = [path for path in _files(folder) if Path(path).resolve().parent != out]
    else:
      paths = [folder] if folder.is_file() else tar_shards.expand(str(folder))
    paths = [str(path) for path in paths if _is_shard(path) or _is_picture(path)]
    if not paths:
      raise RunError(f"--data={pattern} has no picture ({', '.join(_PICTURES)}) and no .tar shard.")
    found += paths
  return found


def _files(folder: str | Path, above: tuple[str, ...] = ()) -> Iterator[str]:
  """All files below a folder in order; links are followed, but not to a folder above them."""
  real = os.path.realpath(folder)
  if real in above:
    return
  for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
    if entry.is_dir():
      yield from _files(entry.path, (*above, real))
    elif entry.is_file():
      yield entry.path


def _is_shard(path) -> bool:
  return str(path).endswith((".tar", ".tar.gz"))


def _is_picture(path) -> bool:
  return str(path).lower().endswith(_PICTURES)


def examples(paths: Sequence[str], start: int = 0) -> Iterator[dict[str, Any]]:
  """{"where": a path or "shard:key", "image": bytes, ...} of each picture from the start-th on.

  The bytes of a file beyond the limit are empty. A picture before the start is not read.
  """
  count = itertools.count()
  for path in paths:
    if not _is_shard(path):
      if next(count) >= start:
        large = os.path.getsize(path) > DEFAULT_LIMITS.member_bytes
        yield _example(path, b"" if large else Path(path).read_bytes())
      continue
    for key, files in tar_shards.checked_samples(path, DEFAULT_LIMITS.member_bytes):
      kinds = [kind for kind in files if f".{kind}" in _PICTURES]
      if kinds and next(count) >= start:
        content = files[kinds[0]]
        yield _example(f"{path}:{key}", content if isinstance(content, bytes) else b"")


def _example(where: str, content: bytes) -> dict[str, Any]:
  return {"where": where, "image": content, "captions": [], "label": -1}


class _Part:
  """What goes into one file: names, features, and what was skipped."""

  def __init__(self):
    self.names: list[str] = []
    self.skipped: list[tuple[str, str]] = []
    self.features: list[np.ndarray] = []

  def write(self, out: Path, stem: str, width: int) -> None:
    write_json(out / f"{stem}.json", {"names": self.names, "skipped": self.skipped})
    partial = out / f"{stem}.partial.npy"
    np.save(partial, np.concatenate([np.zeros((0, width), np.float32), *self.features]))
    partial.replace(out / f"{stem}.npy")  # The last: a file of this name is complete.


def embed_images(model: Model, paths: Sequence[str], out: Path, shard_size: int) -> int:
  """Embeds the pictures of `sources`; returns how many were skipped in this call."""

  def fill(part, stream, progress):
    for batch in inference.prepared(stream, model.crop, model.batch_size, part.skipped):
      part.names += batch["where"]
      part.features.append(model.embed_pixels(batch["image"]))
      progress.update(len(batch["where"]))

  total = None if any(map(_is_shard, paths)) else len(paths)
  start = functools.partial(examples, paths)
  return _embed(model, out, "images", shard_size, start, fill, total)


def embed_texts(model: Model, texts: Sequence[str], out: Path, shard_size: int) -> None:
  """Embeds texts, whose names are the texts themselves."""

  def fill(part, stream, progress):
    while batch := list(itertools.islice(stream, model.batch_size)):
      part.names += batch
      part.features.append(model.embed_texts(batch))
      progress.update(len(batch))

  _embed(model, out, "texts", shard_size, lambda start: iter(texts[start:]), fill, len(texts))


def _embed(model, out: Path, kind: str, shard_size: int, start: Callable, fill, total) -> int:
  """Fills one part after another from `start(first)`, after those that are in `out`."""
  done = next(n for n in itertools.count() if not (out / f"{kind}-{n:05d}.npy").is_file())
  stream, skipped = start(done * shard_size), 0
  shown = {"desc": kind, "unit": kind.removesuffix("s"), "disable": None, "total": total}
  with tqdm(initial=min(done * shard_size, total or done * shard_size), **shown) as progress:
    for number in itertools.count(done):
      first = next(stream, None)
      if first is None:
        return skipped
      part = _Part()
      fill(part, itertools.chain([first], itertools.islice(stream, shard_size - 1)), progress)
      part.write(out, f"{kind}-{number:05d}", model.task.model.config.embed_dim)
      skipped += len(part.skipped)


def nearest(out: Path, queries: np.ndarray, count: int) -> list[list[tuple[float, str]]]:
  """For each unit vector [Q, E] the `count` nearest pictures in `out`: (cosine, name)s.

  Raises:
    RunError: `out` holds no embedded picture, or those of another model.
  """
  best: list[list[tuple[float, str]]] = [[] for _ in queries]
  files = sorted(out.glob("images-?????.npy"))
  if not files:
    raise RunError(f"{out} holds no images-00000.npy: embed pictures first, with --data.")
  for file in files:
    features = np.load(file)
    if features.shape[1] != queries.shape[1]:
      raise RunError(
        f"{file} has vectors of {features.shape[1]} numbers, and the model makes"
        f" {queries.shape[1]}: it is another one."
      )
    names = json.loads(file.with_suffix(".json").read_text())["names"]
    for query, row in enumerate(queries @ features.T):
      found = [(float(row[i]), names[i]) for i in np.argsort(-row, kind="stable")[:count]]
      best[query] = sorted(best[query] + found, key=lambda pair: -pair[0])[:count]
  if queries.size and not all(best):
    raise RunError(f"{out} holds no vector of a picture: all were skipped, and its JSON says why.")
  return best


def contact_sheet(rows: Sequence[tuple[str, Sequence[tuple[float, str]]]]) -> Image.Image:
  """A row of pictures for each (title, [(cosine, name), ...]); the cosine is below each."""
  height = _TILE + 2 * _MARGIN
  sheet = Image.new("RGB", (_TILE * max(len(row) for _, row in rows), height * len(rows)), "white")
  draw = ImageDraw.Draw(sheet)
  contents = _contents({name for _, row in rows for _, name in row})
  for y, (title, row) in enumerate(rows):
    printable = title.encode("latin-1", "replace").decode("latin-1")  # PIL's own font has no more.
    draw.text((4, height * y + 4), printable, "black")
    for x, (cosine, name) in enumerate(row):
      image = ImageOps.contain(pictures.decode(contents[name], DEFAULT_LIMITS), (_TILE, _TILE))
      sheet.paste(image, (_TILE * x, height * y + _MARGIN))
      draw.text((_TILE * x + 4, height * y + _MARGIN + _TILE + 4), f"{cosine:.3f}", "black")
  return sheet


def _contents(names: Iterable[str]) -> dict[str, bytes]:
  """The bytes of pictures by their names; a shard is read once."""
  names, found = set(names), {}
  # A key may hold a colon, too.
  shards = {re.sub(r"(\.tar(?:\.gz)?):.*", r"\1", name) for name in names if not _is_picture(name)}
  files = [name for name in names if _is_picture(name)]
  for path in (*files, *shards):
    if not Path(path).is_file():
      raise RunError(f"{path} is not there any more: nearest.png needs it where it was embedded.")
  for example in examples([*files, *sorted(shards)]):
    if example["where"] in names:
      found[example["where"]] = example["image"]
  return found


def embed(options: argparse.Namespace) -> None:
  """Does what the flags say."""
  if not (options.data or options.texts or options.query):
    raise RunError("Nothing to do: --data, --texts or --query is needed.")
  out = local_path(options.out, "--out")
  paths = sources(options.data, out.resolve())
  texts = _texts(options.texts)
  model = inference.load(
    options.checkpoint,
    options.batch_size,
    size=options.model,
    tokenizer=options.tokenizer,
    dtype=options.dtype,
    int8=options.int8,
  )
  out.mkdir(parents=True, exist_ok=True)
  same = {"checkpoint": str(options.checkpoint), "step": model.step, "size": model.size}
  same |= {"dtype": model.task.model.options.dtype.name, "int8": options.int8}
  same |= {"tokenizer": options.tokenizer}
  checkpoint = local_path(options.checkpoint, "--checkpoint")
  if checkpoint.is_file():
    same["bytes"] = os.path.getsize(checkpoint)
  with lock(out):
    if paths:
      files = "\n".join(f"{path} {os.path.getsize(path)}" for path in paths)
      source = {"images": len(paths), "paths": zlib.crc32(os.fsencode(files))}
      source |= {"shard_size": options.shard_size, "squash": model.squash}
      _check_same(out / "images.json", same | source)
      skipped = embed_images(model, paths, out, options.shard_size)
      print(f"embedded pictures into {out}" + (f"; skipped {skipped}" if skipped else ""))
    if texts:
      source = {"texts": len(texts), "lines": zlib.crc32("\n".join(texts).encode())}
      _check_same(out / "texts.json", same | source | {"shard_size": options.shard_size})
      embed_texts(model, texts, out, options.shard_size)
      print(f"embedded {len(texts)} texts into {out}")
  if options.query:
    _check_same(out / "images.json", same, write=False)
    found = nearest(out, model.embed_texts(options.query), options.nearest)
    for text, row in zip(options.query, found, strict=True):
      print(text)
      for cosine, name in row:
        print(f"  {cosine:6.3f}  {name}")
    contact_sheet(list(zip(options.query, found, strict=True))).save(out / "nearest.png")
    print(f"drew {out / 'nearest.png'}")


def _texts(path: str) -> list[str]:
  if not path:
    return []
  # Unicode has further line breaks, which may be in a text.
  lines = local_path(path, "--texts").read_text(encoding="utf-8").split("\n")
  texts = [line.strip() for line in lines if line.strip()]
  if not texts:
    raise RunError(f"--texts={path} is empty: it should hold a text on each line.")
  return texts


def _check_same(path: Path, now: dict, write: bool = True) -> None:
  """Writes what a folder holds, or raises a RunError if it holds something else."""
  # A folder that does not say whether its pictures were squashed is older: they were cropped.
  before = {"squash": False} | json.loads(path.read_text()) if path.is_file() else now
  changed = [
    f"{name}: {before.get(name)!r} -> {now[name]!r}"
    for name in now
    if before.get(name) != now[name]
  ]
  if changed:
    raise RunError(
      f"{path.parent} holds other embeddings ({'; '.join(changed)}). Choose another --out, or go"
      " back to those flags to continue."
    )
  if write:
    write_json(path, now)


def main(arguments: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    "python -m train.embed", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  add_model_arguments(parser)
  parser.add_argument("--out", required=True, help="folder of the results")
  parser.add_argument(
    "--data", nargs="+", action="extend", default=[], help="folders, files or globs: pictures, .tar"
  )
  parser.add_argument("--texts", default="", help="a file with a text on each line")
  parser.add_argument("--shard_size", type=positive, default=10_000, help="vectors a file")
  parser.add_argument("--query", nargs="+", action="extend", default=[], help="texts to search for")
  parser.add_argument("--nearest", type=positive, default=8, help="pictures for each query")
  options = parser.parse_args(arguments)
  with cli.explained(options.debug):
    embed(options)


if __name__ == "__main__":
  main()
