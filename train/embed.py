"""Embeds folders or shards of images, or lines of texts, into numbered .npy files.

  python -m train.embed --checkpoint=runs/quickstart --data=photos --out=embedded
  python -m train.embed --checkpoint=runs/quickstart --out=embedded --query "a red circle"

images-00000.npy has the unit vectors, float32 [n, E], of the first --shard_size images, and
images-00000.json their names (a path, or "shard.tar:key") and those of images that were skipped
because they cannot be decoded or are gone. The same command continues after the files that are
there, and embeds images that have come since. --texts embeds a text a line, into texts-*; row i
is that of line i. --query prints the images nearest to a text and draws them.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import math
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw
from tqdm import tqdm

from train import cli
from train.data import decode, sample, tar_shards
from train.data.decode import DEFAULT_LIMITS, Limits
from train.data.eval_batches import decoded
from train.data.sample import Unusable
from train.data.text_files import read_lines
from train.errors import RunError
from train.evaluate import add_model_arguments, limits_of, load_model, positive
from train.inference import Model
from train.paths import local_path
from train.workdir import lock, write_json

_IMAGES = tuple(f".{ending}" for ending in sample.IMAGES)
_TILE, _MARGIN = 128, 20  # pixels of a contact sheet
_ANY = Limits(sys.maxsize, sys.maxsize, math.inf)
_LIMITS = ("member_bytes", "image_pixels", "aspect_ratio")
_KEY = re.compile(r"(\.tar(?:\.gz)?):.*", re.DOTALL)


def sources(patterns: Sequence[str], out: Path | None = None) -> tuple[list[str], list[str]]:
  """The images and tar shards that folders, files and globs name, in order, and other files.

  None is in `out`.

  Raises:
    RunError: one of them names no image and no shard.
  """
  found, others = [], []
  for pattern in patterns:
    named = local_path(pattern, "--data")
    given = [str(named)] if named.exists() else tar_shards.expand(str(named))
    paths = [path for one in given for path in (_files(one) if os.path.isdir(one) else [one])]
    paths = [path for path in paths if os.path.dirname(os.path.realpath(path)) != str(out)]
    wanted = [path for path in paths if _is_shard(path) or _is_image(path)]
    if not wanted:
      raise RunError(f"--data={pattern} has no image ({', '.join(_IMAGES)}) and no .tar shard.")
    found += wanted
    others += [path for path in paths if not (_is_shard(path) or _is_image(path))]
  return list(dict.fromkeys(found)), others


def _files(folder: str | Path, above: tuple[str, ...] = ()) -> Iterator[str]:
  """All files below a folder in order; links are followed, but not to a folder above them."""
  real = os.path.realpath(folder)
  if real in above:
    return
  for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
    if entry.is_dir():
      yield from _files(entry.path, (*above, real))
    elif entry.is_file() or entry.is_symlink():  # A link to nothing is skipped, and listed.
      yield entry.path


def _is_shard(path) -> bool:
  return str(path).endswith((".tar", ".tar.gz"))


def _is_image(path) -> bool:
  return str(path).lower().endswith(_IMAGES)


class Source(NamedTuple):
  """How much of a file is embedded: `count` images, whose names and bytes have a checksum.

  `whole`: it has no more. size, mtime and ctime are those of the file. A program can choose the
  mtime of what it writes, but not the ctime.
  """

  count: int = 0
  checksum: int = 0
  whole: bool = False
  size: int = -1
  mtime: int = -1
  ctime: int = -1

  def is_unchanged(self, path: str) -> bool:
    return self.whole and self[3:] == _status(path)

  def after(self, example: dict[str, Any]) -> "Source":
    """With one image more."""
    image = b"" if isinstance(example["image"], Unusable) else example["image"]
    name = os.fsencode(example["where"])
    checksum = zlib.crc32(image, zlib.crc32(name, self.checksum))
    return self._replace(count=self.count + 1, checksum=checksum)


def _status(path: str) -> tuple[int, int, int]:
  status = os.stat(path)
  return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def examples(path: str, limits: Limits = DEFAULT_LIMITS) -> Iterator[dict[str, Any]]:
  """{"where": a path or "shard:key", "image": bytes, ...} of an image or of those of a shard.

  Unusable stands in place of the bytes of a file beyond the limit.
  """
  if not _is_shard(path):
    large = os.path.getsize(path) > limits.member_bytes
    reason = f"file larger than {limits.given_by}max_member_bytes={limits.member_bytes}"
    yield _example(path, Unusable(reason) if large else Path(path).read_bytes())
    return
  for key, files in tar_shards.checked_samples(path, limits.member_bytes):
    kinds = [kind for kind in files if f".{kind}" in _IMAGES]
    if kinds:
      yield _example(f"{path}:{key}", files[kinds[0]])


def _example(where: str, image: bytes | Unusable) -> dict[str, Any]:
  return {"where": where, "image": image, "captions": [], "label": -1}


class _Part:
  """What goes into one file: names, features, what was skipped, how far sources were read."""

  def __init__(self):
    self.names: list[str] = []
    self.skipped: list[tuple[str, str]] = []
    self.sources: dict[str, Source] = {}
    self.features: list[np.ndarray] = []

  def write(self, out: Path, stem: str, width: int) -> None:
    listed = {"names": self.names, "skipped": self.skipped, "sources": self.sources}
    write_json(out / f"{stem}.json", listed)
    partial = out / f"{stem}.partial.npy"
    np.save(partial, np.concatenate([np.zeros((0, width), np.float32), *self.features]))
    partial.replace(out / f"{stem}.npy")  # The last: a file of this name is complete.


def _parts(out: Path, kind: str) -> Iterator[dict[str, Any]]:
  """The contents of the complete parts' JSON files, from the first to the one before a gap."""
  for number in itertools.count():
    path = out / f"{kind}-{number:05d}.npy"
    if not path.is_file():
      return
    yield json.loads(path.with_suffix(".json").read_text())


def _missing(paths: Sequence[str], out: Path, limits: Limits) -> Iterator[dict[str, Any]]:
  """The `examples` that `out` does not hold, each with the "source" up to it, or None.

  Raises:
    RunError: an image or a shard has changed since it was embedded.
  """
  skipped: set[str] = set()
  sources: dict[str, Source] = {}
  for part in _parts(out, "images"):
    skipped = (skipped | {name for name, _ in part["skipped"]}).difference(part["names"])
    sources |= {path: Source(*source) for path, source in part["sources"].items()}
  for path in paths:
    held, read = sources.get(path, Source()), Source()
    try:
      if held.is_unchanged(path):
        continue
      status = _status(path)
      if path in skipped:  # It could not be decoded, or was gone.
        held = Source()
      stream = _with_last(examples(path, limits))
      for example, last in stream:
        read = read.after(example)
        if read.count == held.count and read.checksum != held.checksum:
          break
        if read.count > held.count:
          yield example | {"source": (path, Source(*read[:2], last, *status))}
      if read.count < held.count or (read.count == held.count and read[:2] != held[:2]):
        raise RunError(
          f"{path} has changed since it was embedded into {out}. Choose another --out, or delete"
          " that folder to embed all again."
        )
    except FileNotFoundError:
      if path not in skipped and path not in sources:
        yield _example(path, Unusable("it is not there any more")) | {"source": None}


def _with_last(stream: Iterable) -> Iterator[tuple[Any, bool]]:
  """Each item, and whether it is the last."""
  stream = iter(stream)
  for item in stream:
    for following in stream:
      yield item, False
      item = following
    yield item, True


def embed_images(
  model: Model, paths: Sequence[str], out: Path, shard_size: int, limits: Limits = DEFAULT_LIMITS
) -> int:
  """Embeds the images of `sources` that `out` does not hold; returns how many were skipped."""
  crop = dataclasses.replace(model.crop, limits=limits)

  def pixels(example):
    if isinstance(example["image"], Unusable):
      raise ValueError(str(example["image"]))
    return crop(example)

  def noted(part, stream):
    for example in stream:
      if example["source"]:
        path, source = example["source"]
        part.sources[path] = source
      yield example

  def fill(part, stream, progress):
    for batch in decoded(noted(part, stream), pixels, model.batch_size, part.skipped):
      part.names += batch["where"]
      part.features.append(model.embed_pixels(batch["image"], batch["where"]))
      progress.update(len(batch["where"]))

  total = None if any(map(_is_shard, paths)) else len(paths)
  return _embed(model, out, "images", shard_size, _missing(paths, out, limits), fill, total)


def embed_texts(model: Model, texts: Sequence[str], out: Path, shard_size: int) -> None:
  """Embeds texts, whose names are the texts themselves; `out` may hold the first of them.

  Raises:
    RunError: `out` holds other texts.
  """
  held = [text for part in _parts(out, "texts") for text in part["names"]]
  if held != texts[: len(held)]:
    line = next(i for i, text in enumerate(held) if texts[i : i + 1] != [text])
    now = repr(texts[line]) if line < len(texts) else "not there"
    raise RunError(
      f"{out} holds other texts: line {line + 1} was {held[line]!r} and is {now}. Choose another"
      " --out."
    )

  def fill(part, stream, progress):
    while batch := list(itertools.islice(stream, model.batch_size)):
      part.names += batch
      part.features.append(model.embed_texts(batch))
      progress.update(len(batch))

  _embed(model, out, "texts", shard_size, iter(texts[len(held) :]), fill, len(texts))


def _embed(model, out: Path, kind: str, shard_size: int, stream: Iterator, fill, total) -> int:
  """Fills one part after another from the stream, after those that are in `out`."""
  counts, skipped = [len(part["names"]) for part in _parts(out, kind)], 0
  for path in out.glob(f"{kind}-?????.npy"):  # After a gap: what they held may come elsewhere now.
    if int(path.stem[-5:]) > len(counts):
      path.unlink()
  shown = {"desc": kind, "unit": kind.removesuffix("s"), "disable": None, "total": total}
  with tqdm(initial=sum(counts), **shown) as progress:
    for number in itertools.count(len(counts)):
      first = next(stream, None)
      if first is None:
        return skipped
      part = _Part()
      fill(part, itertools.chain([first], itertools.islice(stream, shard_size - 1)), progress)
      part.write(out, f"{kind}-{number:05d}", model.task.model.config.embed_dim)
      skipped += len(part.skipped)


def nearest(out: Path, queries: np.ndarray, count: int) -> list[list[tuple[float, str]]]:
  """For each unit vector [Q, E] the `count` nearest images in `out`: (cosine, name)s.

  Raises:
    RunError: `out` holds no embedded image, or those of another model.
  """
  best: list[list[tuple[float, str]]] = [[] for _ in queries]
  files = sorted(out.glob("images-?????.npy"))
  if not files:
    raise RunError(f"{out} holds no images-00000.npy: embed images first, with --data.")
  for file in files:
    features = np.load(file)
    if features.shape[1] != queries.shape[1]:
      raise RunError(
        f"{file} has vectors of {features.shape[1]} numbers, and the model makes"
        f" {queries.shape[1]}: it is another one."
      )
    if not np.isfinite(features).all():
      raise RunError(f"{file} has vectors that are not finite: embed into another --out.")
    names = json.loads(file.with_suffix(".json").read_text())["names"]
    for query, row in enumerate(queries @ features.T):
      found = [(float(row[i]), names[i]) for i in np.argsort(-row, kind="stable")[:count]]
      best[query] = sorted(best[query] + found, key=lambda pair: -pair[0])[:count]
  if queries.size and not all(best):
    raise RunError(f"{out} holds no vector of an image: all were skipped, and its JSON says why.")
  return best


def contact_sheet(
  rows: Sequence[tuple[str, Sequence[tuple[float, str]]]], out: Path
) -> Image.Image:
  """A row of images for each (title, [(cosine, name), ...]); the cosine is below each.

  The place of an image that is gone, or is another than the one embedded into `out`, is white.
  """
  height = _TILE + 2 * _MARGIN
  sheet = Image.new("RGB", (_TILE * max(len(row) for _, row in rows), height * len(rows)), "white")
  draw = ImageDraw.Draw(sheet)
  contents = _contents({name for _, row in rows for _, name in row}, out)
  for y, (title, row) in enumerate(rows):
    printable = title.encode("latin-1", "replace").decode("latin-1")  # PIL's own font has no more.
    draw.text((4, height * y + 4), printable, "black")
    for x, (cosine, name) in enumerate(row):
      if name in contents:
        image = decode.upright(contents[name], _ANY)
        scale = _TILE / max(image.size)
        image = image.resize([max(1, round(scale * side)) for side in image.size])
        sheet.paste(image, (_TILE * x, height * y + _MARGIN))
      draw.text((_TILE * x + 4, height * y + _MARGIN + _TILE + 4), f"{cosine:.3f}", "black")
  return sheet


def _contents(names: set[str], out: Path) -> dict[str, bytes]:
  """The bytes of images by their names, of files that are as they were; a shard is read once."""
  # A key may hold a colon, too.
  paths = {name if _is_image(name) else re.sub(_KEY, r"\1", name) for name in names}
  sources = {
    path: source for part in _parts(out, "images") for path, source in part["sources"].items()
  }
  found = {}
  for path in sorted(paths & sources.keys()):
    try:
      if list(_status(path)) == sources[path][3:]:
        found |= {
          one["where"]: one["image"] for one in examples(path, _ANY) if one["where"] in names
        }
    except FileNotFoundError:
      continue
  return found


def embed(options: argparse.Namespace) -> None:
  """Does what the flags say."""
  if not (options.data or options.texts or options.query):
    raise RunError("Nothing to do: --data, --texts or --query is needed.")
  out = local_path(options.out, "--out")
  paths, others = sources(options.data, out.resolve())
  texts, limits = _texts(options.texts), limits_of(options)
  model = load_model(options)
  out.mkdir(parents=True, exist_ok=True)
  made = {"checkpoint": str(options.checkpoint), "step": model.step, "size": model.size}
  made |= {"dtype": model.task.model.options.dtype.name, "int8": options.int8}
  made |= model.fingerprint()
  made_images = made | {"squash": model.squash}
  with lock(out):
    if paths:
      limited = {f"max_{name}": getattr(limits, name) for name in _LIMITS}
      _check_same(out / "images.json", made_images | limited | {"data": options.data})
      skipped = embed_images(model, paths, out, options.shard_size, limits)
      print(f"embedded images into {out}" + (f"; skipped {skipped}" if skipped else ""))
      if others:
        endings = collections.Counter(os.path.splitext(path)[1] or "no ending" for path in others)
        counted = ", ".join(f"{ending}: {n}" for ending, n in endings.most_common(8))
        print(f"{len(others)} other files in --data are no images ({counted})")
    if texts:
      _check_same(out / "texts.json", made)
      embed_texts(model, texts, out, options.shard_size)
      empty = f"; {texts.count('')} of them are empty lines" if "" in texts else ""
      print(f"embedded {len(texts)} texts into {out}{empty}")
  if options.query:
    _check_same(out / "images.json", made_images, write=False)
    found = nearest(out, model.embed_texts(options.query), options.nearest)
    for text, row in zip(options.query, found, strict=True):
      print(text)
      for cosine, name in row:
        print(f"  {cosine:6.3f}  {name}")
    contact_sheet(list(zip(options.query, found, strict=True)), out).save(out / "nearest.png")
    print(f"drew {out / 'nearest.png'}")


def _texts(path: str) -> list[str]:
  """A text for each line, also for an empty one: a row of the result is that of a line."""
  if not path:
    return []
  texts = read_lines(local_path(path, "--texts"), keep_empty=True)
  if not any(texts):
    raise RunError(f"--texts={path} is empty: it should hold a text on each line.")
  return texts


def _check_same(path: Path, now: dict, write: bool = True) -> None:
  """Writes what made the vectors of a folder, or raises a RunError if something else made them.

  The checkpoint's name may change, and --data may name more.
  """
  before = json.loads(path.read_text()) if path.is_file() else now
  changed = [
    f"{name}: {before.get(name)!r} -> {now[name]!r}"
    for name in now
    if name not in ("checkpoint", "data") and before.get(name) != now[name]
  ]
  left_out = [data for data in before.get("data", ()) if data not in now.get("data", (data,))]
  changed += [f"without --data={data}" for data in left_out]
  if changed:
    raise RunError(
      f"{path.parent} holds other embeddings ({'; '.join(changed)}). Choose another --out, or go"
      " back to those flags and files to continue."
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
    "--data", nargs="+", action="extend", default=[], help="folders, files or globs: images, .tar"
  )
  parser.add_argument("--texts", default="", help="a file with a text on each line")
  parser.add_argument("--shard_size", type=positive, default=10_000, help="vectors a file")
  parser.add_argument("--query", nargs="+", action="extend", default=[], help="texts to search for")
  parser.add_argument("--nearest", type=positive, default=8, help="images for each query")
  options = parser.parse_args(arguments)
  with cli.report_errors(options.debug):
    embed(options)


if __name__ == "__main__":
  main()
