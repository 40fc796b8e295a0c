"""Samples of a stream: from any position on, as an import reads them, and up to the damage."""

import bz2
import gzip
import io
import lzma
import os
import random
import tarfile

import pytest

from train.data import tar_shards
from train.data.sample import Unusable
from train.data.stream import formats, stores

LIMIT = 4000
PACK = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


class ForwardOnly:
  """What the stores promise of a file, and nothing more."""

  def __init__(self, file):
    self._file, self.close, self.tell = file, file.close, file.tell

  def read(self, size):
    assert 0 <= size <= 2**21
    return self._file.read(size)

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.close()


@pytest.fixture(autouse=True)
def forward_only(monkeypatch):
  """The files that were opened, in their order; only what the stores promise works on them."""
  opened, open_at = [], stores.open_at

  def open_forward(url, start=0):
    opened.append((url, start))
    return ForwardOnly(open_at(url, start))

  monkeypatch.setattr(stores, "open_at", open_forward)
  return opened


def read(path, start=0, limit=LIMIT, **columns):
  """The samples, comparable, and whether damage ended them."""
  found = []
  try:
    for position, key, files in formats.samples(str(path), start, limit, **columns):
      found.append((position, key, comparable(files)))
  except tar_shards.DamagedShard as error:
    assert str(error).startswith(f"{path}: ")
    return found, True
  return found, False


def comparable(files):
  return {
    ending: f"{content}".replace("its sample", "the shard")
    if isinstance(content, Unusable)
    else content
    for ending, content in files.items()
  }


def imported(path):
  found = []
  try:
    for key, files in tar_shards.samples(str(path), LIMIT):
      found.append((key, comparable(files)))
  except tar_shards.DamagedShard:
    return found, True
  return found, False


def without_positions(found):
  samples, damaged = found
  return [(key, files) for _, key, files in samples], damaged


def assert_resumes(path, **columns):
  """From each position that was given comes exactly the rest."""
  samples, damaged = read(path, **columns)
  for i, (position, _, _) in enumerate(samples, 1):
    assert read(path, position, **columns) == (samples[i:], damaged)
  return samples


FOLDERS = ["", "./", "a//b/", "ü日/", "a b/../", "n" * 120 + "/", "\udce9\udcff/"]
ENDINGS = ["jpg", "JPEG", "png", "txt", "json", "cls", "bin", "seg.png", "", "webp"]


def random_tar(seed):
  """A tar whose samples are consecutive members, with all else that tars can have between them."""
  rng, file = random.Random(seed), io.BytesIO()
  kind = rng.choice([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
  with tarfile.open(fileobj=file, mode="w", format=kind, errors="surrogateescape") as tar:
    for number in range(rng.randrange(8)):
      stem = rng.choice(FOLDERS) + rng.choice(["", "x y_", "é"]) + f"{number}"
      endings = rng.sample(ENDINGS, rng.randrange(1, 5))
      if len(endings) > 1 and rng.random() < 0.15:
        endings.append(endings[0])
      for i, ending in enumerate(endings):
        if rng.random() < 0.2:
          add_other(tar, rng, stem)
        add_file(tar, rng, f"{stem}.{ending}" if ending else stem, i)
        if ending in ("jpg", "png") and rng.random() < 0.3:
          add_link(tar, rng, stem, ending)
  return file.getvalue()


def add_file(tar, rng, name, seed):
  info = tarfile.TarInfo(name)
  info.size = rng.choice([0, 1, 511, 512, 513, rng.randrange(2000), LIMIT, LIMIT + 1])
  if rng.random() < 0.3:
    info.pax_headers = {"SCHILY.xattr.user.é": "x" * rng.randrange(900), "mtime": "1.5"}
  tar.addfile(info, io.BytesIO(random.Random(seed).randbytes(info.size)))


def add_other(tar, rng, stem):
  info = tarfile.TarInfo(f"{os.path.dirname(stem)}/._{rng.randrange(9)}.jpg")
  info.type = rng.choice([tarfile.DIRTYPE, tarfile.REGTYPE, tarfile.FIFOTYPE])
  tar.addfile(info)


def add_link(tar, rng, stem, ending):
  info = tarfile.TarInfo(f"{stem}.gif")
  info.type = rng.choice([tarfile.SYMTYPE, tarfile.LNKTYPE])
  target = rng.choice([f"{stem}.{ending}", "nowhere"])
  info.linkname = os.path.basename(target) if info.issym() else target
  tar.addfile(info)


@pytest.mark.parametrize("packing", PACK)
def test_consecutive_members_are_the_samples_that_an_import_reads(tmp_path, packing):
  kinds = set()
  for seed in range(40):
    path = tmp_path / f"{seed}.tar{packing}"
    path.write_bytes(PACK[packing](random_tar(seed)))
    assert without_positions(read(path)) == imported(path)
    for _, _, files in assert_resumes(path):
      kinds |= {text.split()[0] for text in files.values() if isinstance(text, str)}
  assert kinds == {"file", "link", "duplicate"}  # Each was there.


@pytest.mark.parametrize("packing", PACK)
def test_of_a_shard_that_is_cut_come_the_samples_before_the_cut(tmp_path, packing):
  whole = random_tar(7)
  packed = PACK[packing](whole)
  path = tmp_path / f"a.tar{packing}"
  path.write_bytes(packed)
  samples, _ = read(path)
  edges = {0, len(packed) - 1} | {
    512 * i + j for i in range(len(packed) // 512) for j in (-1, 0, 1)
  }
  counts = set()
  for cut in sorted(edges | {*range(3, len(packed), max(1, len(packed) // 99))}):
    if cut >= 0:
      path.write_bytes(packed[:cut])
      found, damaged = read(path)
      counts.add(len(found))
      assert found[:-1] == samples[: len(found[:-1])]  # The last may lack files.
      assert damaged or found == samples  # The zeros at the end may be fewer.
      if not packing:
        assert without_positions((found, damaged)) == imported(path)
      assert_resumes(path)
  assert len(counts) > 3
