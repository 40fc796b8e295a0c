"""Samples of a stream: from any position on, as an import reads them, and up to the damage."""

import bz2
import csv
import gzip
import io
import lzma
import os
import random
import sys
import tarfile
import tracemalloc

import pytest
from shards_case import write_shard

from train.data import tar_shards
from train.data.sample import Unusable
from train.data.stream import formats, loose_files, stores
from train.errors import RunError

LIMIT = 4000
TOO_LARGE = f"data.max_member_bytes={LIMIT}"
SEED = 26  # of a tar with many kinds of members


def several_bz2(content):
  return b"".join(bz2.compress(content[i : i + 2**14]) for i in range(0, len(content), 2**14))


PACK = {"": bytes, ".gz": gzip.compress, ".bz2": several_bz2, ".xz": lzma.compress}


class ForwardOnly(io.RawIOBase):
  """A file that cannot seek, as in a store, and is never asked for much at once."""

  def __init__(self, file):
    self._file, self.tell = file, file.tell

  def readable(self):
    return True

  def readinto(self, buffer):
    assert len(buffer) <= 2**21
    return self._file.readinto(buffer)

  def close(self):
    self._file.close()
    super().close()


@pytest.fixture(autouse=True)
def forward_only(monkeypatch):
  """The files that were opened, in their order; only what the stores promise works on them."""
  opened, open_at = [], stores.open_at

  def open_forward(url, start=0):
    opened.append((url, start))
    return io.BufferedReader(ForwardOnly(open_at(url, start)))

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


def random_tar(seed, most=8):
  """A tar whose samples are consecutive members, with all else that tars can have between them."""
  rng, file = random.Random(seed), io.BytesIO()
  kind = rng.choice([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
  with tarfile.open(fileobj=file, mode="w", format=kind, errors="surrogateescape") as tar:
    for number in range(rng.randrange(most)):
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


def cuts(whole):
  """At the edges of headers, contents, paddings and the end mark, and within them."""
  edges = {512 * i + j for i in range(1, len(whole) // 512, 3) for j in (-1, 0, 1)}
  for cut in sorted(edges | {*range(0, len(whole), len(whole) // 40)}):
    yield whole[:cut]


def garbage(whole):
  for place in range(0, len(whole), len(whole) // 60):
    yield whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]
  yield whole[:1000] + random.Random(0).randbytes(5000)
  yield whole + whole


@pytest.mark.parametrize("damage", [cuts, garbage])
def test_of_a_damaged_shard_comes_what_an_import_reads(tmp_path, damage):
  path, noticed, counts = tmp_path / "a.tar", 0, set()
  for damaged in damage(random_tar(SEED, 12)):
    path.write_bytes(damaged)
    samples, is_damaged = read(path)
    assert without_positions((samples, is_damaged)) == imported(path)
    assert all(position <= len(damaged) for position, _, _ in samples)
    for i in {0, len(samples) // 2, len(samples) - 1} if samples else ():
      assert read(path, samples[i][0]) == (samples[i + 1 :], is_damaged)
    counts.add(len(samples))
    noticed += is_damaged
  assert len(counts) > 5
  assert noticed > 20


@pytest.mark.parametrize("packing", [*PACK][1:])
def test_of_a_compressed_shard_that_is_cut_come_the_samples_before_the_cut(tmp_path, packing):
  whole, path, counts = PACK[packing](random_tar(SEED, 12)), tmp_path / f"a.tar{packing}", set()
  path.write_bytes(whole)
  samples, _ = read(path)
  for damaged in cuts(whole):
    path.write_bytes(damaged)
    found, is_damaged = read(path)
    assert is_damaged
    assert found[:-1] == samples[: len(found[:-1])]  # The last may lack files.
    for i in {0, len(found) // 2, len(found) - 1} if found else ():
      assert read(path, found[i][0]) == (found[i + 1 :], True)
    counts.add(len(found))
  assert len(counts) > 1


@pytest.mark.parametrize("packing", [*PACK][1:])
def test_a_wrong_byte_of_a_compressed_shard_changes_nothing_or_is_noticed(tmp_path, packing):
  whole, path, noticed = PACK[packing](random_tar(SEED, 12)), tmp_path / f"a.tar{packing}", 0
  path.write_bytes(whole)
  samples = read(path)
  for damaged in garbage(whole):
    path.write_bytes(damaged)
    found = read(path)
    assert found == samples or found[1]
    for i, (position, _, _) in enumerate(found[0], 1):
      assert read(path, position) == (found[0][i:], found[1])
    noticed += found[1]
  assert noticed > 50


def test_a_member_that_is_not_read_takes_no_memory_and_one_sample_is_held(tmp_path):
  path, gigabyte = tmp_path / "a.tar", 2**30
  with path.open("wb") as file:
    for name, size in (("0.jpg", gigabyte), ("1.bin", gigabyte // 8)):
      info = tarfile.TarInfo(name)
      info.size = size
      file.write(info.tobuf())
      file.seek(size, os.SEEK_CUR)
    for i in range(2, 34):
      info = tarfile.TarInfo(f"{i}.jpg")
      info.size = 2**20
      file.write(info.tobuf() + bytes(2**20))
    file.write(bytes(1024))
  samples = formats.samples(str(path), 0, 2**20)
  tracemalloc.start()
  try:
    sizes = [{e: str(f) if e == "jpg" and i == 0 else len(f) for e, f in files.items()}
             for i, (_, _, files) in enumerate(samples)]  # fmt: skip
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  too_large = "file larger than data.max_member_bytes=1048576"
  assert sizes == [{"jpg": too_large}, {"bin": 0}, *[{"jpg": 2**20}] * 32]
  assert peak < 5 * 2**20


def test_files_of_a_key_that_are_apart_are_samples_of_their_own(tmp_path):
  path = tmp_path / "a.tar"
  write_shard(path, [("0.jpg", b"A"), ("0.txt", b"a"), ("1.jpg", b"B"), ("0.json", b"{}")])
  samples, _ = without_positions(read(path))
  assert samples == [
    ("0", {"jpg": b"A", "txt": b"a"}),
    ("1", {"jpg": b"B"}),
    ("0", {"json": b"{}"}),
  ]
  assert_resumes(path)


def test_files_of_a_key_that_are_there_twice_in_a_row_are_unusable(tmp_path):
  path = tmp_path / "a.tar"
  write_shard(path, [("0.jpg", b"A"), ("0.txt", b"a")] * 2)
  reason = "duplicate key (several files 0.jpg)"
  assert without_positions(read(path))[0] == [("0", {"jpg": reason, "txt": reason})]


def test_a_link_to_another_sample_says_that_it_leads_nowhere(tmp_path):
  path = tmp_path / "a.tar"
  with tarfile.open(path, "w") as tar:
    for name, target in (("0.jpg", ""), ("1.jpg", "0.jpg"), ("1.x", ""), ("1.png", "1.x")):
      info = tarfile.TarInfo(name)
      info.type, info.linkname = tarfile.LNKTYPE if target else tarfile.REGTYPE, target
      tar.addfile(info)
  _, (_, _, files) = formats.samples(str(path), 0, LIMIT)
  assert [str(files[ending]) for ending in ("jpg", "png")] == [
    "link to no file of its sample (0.jpg)",
    "link to a file that is not read (1.x)",
  ]
  assert_resumes(path)


def test_a_global_header_changes_nothing_behind_the_next_member(tmp_path):
  path, header = tmp_path / "a.tar", tarfile.TarInfo.create_pax_global_header
  write_shard(path, [("0.jpg", b"A"), ("1.jpg", b"B"), ("2.jpg", b"C")])
  path.write_bytes(header({"path": "x.jpg"}) + path.read_bytes())
  assert [key for _, key, _ in assert_resumes(path)] == ["x", "1", "2"]


def test_a_compressed_shard_with_another_name_says_which_it_needs(tmp_path):
  (tmp_path / "a.tar").write_bytes(gzip.compress(random_tar(0)))
  with pytest.raises(tar_shards.DamagedShard, match=r"its name must end in \.tar\.gz$"):
    next(formats.samples(str(tmp_path / "a.tar"), 0, LIMIT))


def test_only_a_compressed_shard_is_read_from_its_beginning(tmp_path, forward_only):
  for name, begins in (("a.tar", 2048), ("b.tgz", 0)):
    write_shard(tmp_path / name, [("0.jpg", b"A"), ("0.txt", b"a"), ("1.txt", b"b")],
                "w:gz" if begins == 0 else "w")  # fmt: skip
    assert len(read(tmp_path / name, 2048)[0]) == 1
    assert forward_only[-1] == (str(tmp_path / name), begins)


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.parquet"])
def test_a_store_that_fails_is_no_damage(tmp_path, monkeypatch, name):
  def fail(self, buffer):
    raise stores.Unreadable("tried often")

  (tmp_path / name).write_bytes(bytes(2000))
  monkeypatch.setattr(ForwardOnly, "readinto", fail)
  with pytest.raises(stores.Unreadable, match="tried often"):
    list(formats.samples(str(tmp_path / name), 0, LIMIT))


def write_parquet(path, rows=10, row_group_size=3, **columns):
  import pyarrow
  import pyarrow.parquet

  columns = {
    "key": [f"{i:05}" for i in range(rows)],
    "jpg": [b"image %d" % i for i in range(rows)],
    "caption": [f"caption {i}" for i in range(rows)],
    **columns,
  }
  table = pyarrow.table({name: values for name, values in columns.items() if values is not None})
  pyarrow.parquet.write_table(table, path, row_group_size=row_group_size)


def test_rows_of_a_parquet_file_are_its_samples(tmp_path):
  write_parquet(tmp_path / "a.parquet", json=['{"width": 9}'] * 9 + [None], cls=[3] * 10)
  samples = assert_resumes(tmp_path / "a.parquet")
  row = {"txt": b"caption 4", "json": b'{"width": 9}', "cls": b"3"}
  assert samples[4] == (5, "00004", {"jpg": b"image 4", **row})
  assert len(samples) == 10
  assert "json" not in samples[9][2]


def test_a_parquet_file_has_images_in_other_columns_too(tmp_path):
  images = [{"bytes": b"A", "path": "a"}, {"bytes": None, "path": "b"}, None]
  captions = ["a\nb", None, "\u2028"]
  write_parquet(tmp_path / "a.parquet", 3, jpg=None, key=None, image=images, caption=captions)
  assert without_positions(read(tmp_path / "a.parquet"))[0] == [
    ("0", {"jpg": b"A", "txt": b"a b"}),
    ("1", {}),
    ("2", {"txt": "\u2028".encode()}),
  ]
  write_parquet(tmp_path / "a.parquet", 2, jpg=None, key=[None, 7], webp=[b"W", b"x" * (LIMIT + 1)])
  samples, _ = without_positions(read(tmp_path / "a.parquet"))
  assert [key for key, _ in samples] == ["0", "7"]
  assert [files["webp"] for _, files in samples] == [b"W", f"file larger than {TOO_LARGE}"]


def test_rows_that_img2dataset_could_not_download_are_no_samples(tmp_path):
  status = ["success", "failed_to_download"] * 5
  images = [b"A", None] * 5
  write_parquet(tmp_path / "a.parquet", status=status, jpg=images)
  assert [key for _, key, _ in assert_resumes(tmp_path / "a.parquet")] == [
    f"{i:05}" for i in range(0, 10, 2)
  ]


def test_a_parquet_file_without_images_is_refused_with_its_columns(tmp_path):
  write_parquet(tmp_path / "a.parquet", jpg=None, url=["x"] * 10)
  with pytest.raises(RunError, match=r"no column with images .* but key, caption, url"):
    read(tmp_path / "a.parquet")


def test_parquet_needs_an_extra(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
  with pytest.raises(RunError, match=r"pip install 'sbjax\[parquet\]'"):
    read(tmp_path / "a.parquet")


def test_columns_of_a_parquet_file_that_are_not_read_are_passed_over(tmp_path, forward_only):
  noise, path = random.Random(0), tmp_path / "a.parquet"
  images, unread, labels = ([noise.randbytes(n) for _ in range(30)] for n in (3000, 2000, 9))
  write_parquet(path, 30, 10, jpg=images, caption=None, unread=unread, txt=labels)
  samples, _ = without_positions(read(path))
  assert [files for _, files in samples] == [
    {"jpg": image, "txt": label} for image, label in zip(images, labels, strict=True)
  ]
  assert len(forward_only) == 2  # At the end, for what is where, and at the first row.


def test_of_a_damaged_parquet_file_come_the_rows_before_the_damage(tmp_path):
  path, counts = tmp_path / "a.parquet", set()
  write_parquet(path, 40)
  whole, (samples, _) = path.read_bytes(), read(path)
  for size in range(0, len(whole), len(whole) // 50):
    path.write_bytes(whole[:size])
    assert read(path) == ([], True)  # What is where stands at the end.
  for place in range(0, len(whole) - 8, len(whole) // 100):
    path.write_bytes(whole[:place] + bytes(8) + whole[place + 8 :])
    found, noticed = read(path)
    if noticed:
      counts.add(len(found))
      assert [key for _, key, _ in found] == [key for _, key, _ in samples[: len(found)]]
    for position, _, _ in found[::7]:
      assert read(path, position) == (found[position:], noticed)
  assert len(counts) > 5


def write_csv(path, rows, delimiter):
  with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
    csv.writer(file, delimiter=delimiter).writerows(rows)


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.csv", "\t"), ("a.tsv", "\t")])
def test_rows_of_a_csv_are_images_beside_it_and_captions(tmp_path, name, delimiter):
  (tmp_path / "deep").mkdir()
  (tmp_path / "deep/0.jpg").write_bytes(b"A")
  (tmp_path / "1.PNG").write_bytes(b"B")
  (tmp_path / "2").write_bytes(bytes(LIMIT + 1))
  rows = [
    ("number", "title", "filepath"),
    (0, 'one, "two"\tand\nthree', "deep/0.jpg"),
    (1, "\udcff", tmp_path / "1.PNG"),
    (2, "x", "2"),
    (3, "x", "missing.jpg"),
    (4, "x", "deep"),
    (5, "x", "deep/0.jpg/x"),
    (6, "x", "nul\0"),
    (7, "x", "n" * 300),
    (8, "x"),
    (9, "", "1.PNG"),
    (10, "x", "ftp://x/0.jpg"),
  ]
  write_csv(tmp_path / name, rows, delimiter)
  samples = assert_resumes(tmp_path / name)
  assert [position for position, _, _ in samples] == [*range(1, 12)]
  assert samples[0][1:] == ("deep/0.jpg", {"jpg": b"A", "txt": b'one, "two"\tand three'})
  assert samples[1][1:] == (f"{tmp_path}/1.PNG", {"png": b"B", "txt": b"\xff"})
  assert samples[2][2]["jpg"] == f"file larger than {TOO_LARGE}"
  assert [s[2]["jpg"].partition(" (")[0] for s in samples[3:9]] == [
    *["file that cannot be read"] * 5,
    "row without a path",
  ]
  assert samples[9][2] == {"png": b"B", "txt": b""}
  assert samples[10][2]["jpg"].startswith("file that cannot be read (ftp://x/0.jpg: ")


def test_a_csv_names_its_columns(tmp_path):
  (tmp_path / "0.jpg").write_bytes(b"A")
  (tmp_path / "a.csv").write_text("\ufeffurl,TEXT\n\n0.jpg,a\n")
  columns = {"image_key": "url", "caption_key": "TEXT"}
  assert read(tmp_path / "a.csv", **columns)[0] == [(1, "0.jpg", {"jpg": b"A", "txt": b"a"})]
  with pytest.raises(RunError, match=r"no column 'title': set data.caption_key .* 'url', 'TEXT'"):
    read(tmp_path / "a.csv", image_key="url")
  (tmp_path / "a.csv").write_text("")
  with pytest.raises(RunError, match=r"no column 'filepath': set data.image_key"):
    read(tmp_path / "a.csv")


@pytest.mark.parametrize("row", ['x,"' + "y" * 2**18, "x" + ",y" * 2**20])
def test_a_csv_with_an_endless_row_is_damage(tmp_path, row):
  (tmp_path / "a.csv").write_text(f"filepath,title\n0.jpg,a\n{row}\n1.jpg,b\n")
  samples, noticed = read(tmp_path / "a.csv")
  assert ([key for _, key, _ in samples], noticed) == (["0.jpg"], True)


def test_a_csv_of_urls_needs_the_extra_of_their_store(tmp_path, monkeypatch):
  (tmp_path / "a.csv").write_text("filepath,title\ns3://bucket/0.jpg,a\n")
  monkeypatch.setitem(sys.modules, "s3fs", None)
  with pytest.raises(RunError, match=r"pip install 'sbjax\[s3\]'"):
    read(tmp_path / "a.csv")


def test_a_path_in_a_csv_is_relative_to_it_wherever_it_is():
  assert loose_files.beside("s3://bucket/a/b.csv", "c/d.jpg") == "s3://bucket/a/c/d.jpg"
  assert loose_files.beside("https://x.y/a/b.csv?key=/z", "d.jpg") == "https://x.y/a/d.jpg"
  assert loose_files.beside("/a/b.csv", "gs://c/d.jpg") == "gs://c/d.jpg"
  assert loose_files.beside("b.csv", "d.jpg") == "d.jpg"


def test_a_folder_of_pairs_is_a_shard(tmp_path):
  folder = tmp_path / "[a]*.tar"
  (folder / "2.jpg").parent.mkdir()
  files = [
    "b.jpg",
    "b.txt",
    "a.PNG",
    "a.json",
    "a.seg.png",
    "c.jpg",
    "c.JPG",
    ".DS_Store",
    "._a.jpg",
  ]
  for name in files:
    (folder / name).write_bytes(name.encode())
  (folder / "deeper.jpg").mkdir()
  (folder / "d.jpg").symlink_to("b.jpg")
  (folder / "d.txt").symlink_to("nowhere")
  assert assert_resumes(folder) == [
    (1, "a", {"png": b"a.PNG", "json": b"a.json", "seg.png": b""}),
    (2, "b", {"jpg": b"b.jpg", "txt": b"b.txt"}),
    (3, "c", {"jpg": "duplicate key (several files c.jpg)"}),
    (4, "d", {"jpg": b"b.jpg"}),
  ]


def test_a_folder_that_is_not_there_is_unreadable(tmp_path):
  with pytest.raises(stores.Unreadable, match="missing/: No such file or directory"):
    next(formats.samples(f"{tmp_path}/missing/", 0, LIMIT))


@pytest.mark.parametrize(
  ("url", "kind"),
  [
    ("a.TAR", "tar"),
    ("s3://b/a.tgz", "tar.gz"),
    ("a.tar.xz", "tar.xz"),
    ("https://x/a.parquet?download=true#1", "parquet"),
    ("a.tsv", "csv"),
    ("gs://b/a.tar/", "folder"),
  ],
)
def test_a_name_says_the_format(url, kind):
  assert formats.kind(url) == kind


@pytest.mark.parametrize("url", ["a", "a.zip", "s3://b/a.tar.zst", "https://x/a?b=a.tar"])
def test_another_ending_is_refused_with_those_that_are_read(url):
  with pytest.raises(RunError, match=r"must end in \.tar, .* \.parquet, \.csv, \.tsv, or in /"):
    formats.kind(url)
