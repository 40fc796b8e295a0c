"""Samples of tar shards: whose files are where, what they say, and which error is whose."""

import errno
import io
import json
import os
import re
import tarfile
import tracemalloc

import pytest
from shards_case import write_shard

from train.data import sample, tar_shards
from train.data.sample import Unusable


def read(path, limit=2**20):
  return list(tar_shards.samples(str(path), limit))


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_files_of_a_sample_may_be_anywhere_in_the_shard(tmp_path, mode):
  images = [(f"{i}.jpg", b"image %d" % i) for i in range(9)]
  texts = [(f"{i}.txt", b"text %d" % i) for i in reversed(range(9))]
  write_shard(tmp_path / "a", images + texts, mode)
  expected = [(f"{i}", {"jpg": b"image %d" % i, "txt": b"text %d" % i}) for i in range(9)]
  assert read(tmp_path / "a") == expected


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_files_that_are_far_apart_are_not_held_in_memory(tmp_path, mode):
  image = bytes(2**20)
  members = [(f"{i}.jpg", image) for i in range(32)] + [(f"{i}.txt", b"x") for i in range(32)]
  write_shard(tmp_path / "a", members, mode)
  tracemalloc.start()
  try:
    complete = sum(files.keys() == {"jpg", "txt"} for _, files in
                   tar_shards.samples(str(tmp_path / "a"), 2**21))  # fmt: skip
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  assert complete == 32
  assert peak < 8 * 2**20


def test_a_key_that_is_there_twice_gives_both_samples(tmp_path):
  members = [("0.jpg", b"A"), ("0.txt", b"a"), ("1.jpg", b"B"), ("0.txt", b"c"), ("0.jpg", b"C")]
  write_shard(tmp_path / "a", members)
  assert read(tmp_path / "a") == [
    ("0", {"jpg": b"A", "txt": b"a"}),
    ("0", {"jpg": b"C", "txt": b"c"}),
    ("1", {"jpg": b"B"}),
  ]


@pytest.mark.parametrize(
  "names",
  [["0.jpg", "0.jpg", "0.txt"], ["0.jpg", "0.jpg", "0.txt", "0.txt"], ["0.jpg", "0.txt", "0.txt"]],
)
def test_a_key_whose_files_do_not_pair_is_unusable(tmp_path, names):
  write_shard(tmp_path / "a", [*((name, b"x") for name in names), ("1.jpg", b"B")])
  (key, files), one = read(tmp_path / "a")
  assert (key, one) == ("0", ("1", {"jpg": b"B"}))
  assert {str(content)[:13] for content in files.values()} == {"duplicate key"}


def link(name, target, kind):
  info = tarfile.TarInfo(name)
  info.type, info.linkname = kind, target
  return info


def test_a_link_is_the_file_that_it_names(tmp_path):
  with tarfile.open(tmp_path / "a", "w") as tar:
    for name, content in (("store/x", b"image"), ("s/0.txt", b"text")):
      info = tarfile.TarInfo(name)
      info.size = len(content)
      tar.addfile(info, io.BytesIO(content))
    tar.addfile(link("s/0.jpg", "../store/x", tarfile.SYMTYPE))
    tar.addfile(link("s/1.jpg", "store/x", tarfile.LNKTYPE))
    tar.addfile(link("s/1.txt", "0.txt", tarfile.SYMTYPE))
    tar.addfile(link("s/2.jpg", "1.jpg", tarfile.SYMTYPE))
    tar.addfile(link("s/3.jpg", "/etc/passwd", tarfile.SYMTYPE))
    tar.addfile(link("s/4.jpg", "4.jpg", tarfile.SYMTYPE))
  samples = dict(read(tmp_path / "a"))
  assert samples["s/0"] == samples["s/1"] == {"jpg": b"image", "txt": b"text"}
  assert samples["s/2"] == {"jpg": b"image"}
  assert str(samples["s/3"]["jpg"]) == "link to no file of the shard (/etc/passwd)"
  assert str(samples["s/4"]["jpg"]) == "link to a link to a link"


def test_a_second_archive_behind_the_first_is_damage(tmp_path):
  write_shard(tmp_path / "a", [("0.jpg", b"A")])
  write_shard(tmp_path / "b", [("1.jpg", b"B")])
  (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes() + (tmp_path / "b").read_bytes())
  shard = tar_shards.samples(str(tmp_path / "a"), 99)
  assert next(shard) == ("0", {"jpg": b"A"})
  with pytest.raises(tar_shards.DamagedShard, match="after the end mark"):
    next(shard)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ENOMEM])
def test_an_error_of_the_system_is_no_damage_of_the_shard(tmp_path, monkeypatch, code):
  write_shard(tmp_path / "a", [("0.jpg", b"A")])
  error = MemoryError() if code == errno.ENOMEM else OSError(code, os.strerror(code))

  def fail(self):
    raise error

  monkeypatch.setattr(tar_shards._Index, "read_headers", fail)
  with pytest.raises(type(error)) as raised:
    read(tmp_path / "a")
  assert code == errno.ENOMEM or raised.value.filename == str(tmp_path / "a")


def test_braces_and_colons_name_what_must_be_there(tmp_path):
  for name in ("a-0.tar", "a-1.tar.gz", "a-3.tar", "b/0.tar"):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
  (tmp_path / "a-4.tar").symlink_to("nowhere")

  def missing(pattern):
    return tar_shards.missing(pattern, str(tmp_path))

  assert missing("a-{0..4}.tar::b/*.tar") == ["a-1.tar", "a-2.tar", "a-4.tar"]
  assert missing("a-{0..1}.{tar,tar.gz}") == []
  assert missing("{a,b,c}/*.tar") == ["a/*.tar", "c/*.tar"]
  assert [os.path.basename(p) for p in tar_shards.expand("b/*.tar::a-[01]*", str(tmp_path))] == [
    "a-0.tar",
    "a-1.tar.gz",
    "0.tar",
  ]


def test_the_name_of_a_folder_or_of_a_file_is_no_pattern(tmp_path):
  root = tmp_path / "[a]{1,2}*"
  root.mkdir()
  (root / "x[1].tar").touch()
  assert tar_shards.expand("*.tar", str(root)) == [str(root / "x[1].tar")]
  assert tar_shards.expand("x[1].tar", str(root)) == [str(root / "x[1].tar")]


@pytest.mark.parametrize(
  ("files", "key", "captions", "source"),
  [
    ({"txt": b" a \r\nb\rc\n\n"}, "", ["a", "b", "c"], "txt"),
    ({"txt": "\ufeffa\u2028b".encode()}, "", ["a\u2028b"], "txt"),
    ({"txt": b"new", "json": b'{"caption": "old"}'}, "", ["new"], "txt"),
    ({"txt": b" \n", "json": b'{"caption": "old"}'}, "", ["old"], "json's caption"),
    ({"txt": b"x", "json": b'{"re": ["a", " ", "b"]}'}, "re", ["a", "b"], "json's re"),
    ({"json": b'\xef\xbb\xbf{"captions": "a\\nb"}'}, "", ["a\nb"], "json's captions"),
    ({"txt": Unusable("too large"), "json": b'{"re": "a"}'}, "re", ["a"], "json's re"),
  ],
)
def test_captions_are_the_lines_of_the_txt_or_those_of_the_json(files, key, captions, source):
  assert sample.captions(files, key) == (captions, source)


@pytest.mark.parametrize(
  ("files", "key", "reason"),
  [
    ({"jpg": b"", "outputs.txt": b""}, "", "no caption (it has jpg, outputs.txt)"),
    ({"json": b'{"caption": "a"}'}, "re", "no caption (json without 're')"),
    ({"txt": b"\xff\xfea\x00"}, "", "unreadable text"),
    ({"txt": Unusable("too large"), "json": b'{"caption": "a"}'}, "", "too large"),
  ],
)
def test_a_sample_without_a_caption_says_what_it_has(files, key, reason):
  with pytest.raises(Unusable, match=f"^{re.escape(reason)}$"):
    sample.captions(files, key)


@pytest.mark.parametrize(
  ("content", "label"), [(b"7", 7), (b"\xef\xbb\xbf007 \r\n", 7), (b"-1", -1)]
)
def test_a_label_is_a_whole_number(content, label):
  assert sample.label({"cls": content}) == label


@pytest.mark.parametrize("content", [b"", b"1_0", b"7.0", b"1\n2x", b"+", b"cat", b"9" * 5000])
def test_what_is_no_label_is_unusable(content):
  with pytest.raises(Unusable, match="unreadable label"):
    sample.label({"cls": content})


def test_an_image_has_one_of_the_endings():
  assert sample.image({"webp": b"second", "jpg": b"first"}) == b"first"
  assert sample.image({"avif": b"x", "input.jpg": b""}) == b"x"
  with pytest.raises(Unusable, match=r"no image \(it has input.jpg\)"):
    sample.image({"input.jpg": b""})


def test_a_json_with_numbers_is_no_caption():
  with pytest.raises(Unusable, match="unreadable text"):
    sample.captions({"json": json.dumps({"caption": [1]}).encode()})
