"""Pictures and texts become numbered files of unit vectors, which a later start continues."""

import json
import math
import os
import re
import types

import numpy as np
import pytest
from PIL import Image
from shards_case import image_bytes, write_shard

from train import embed, inference
from train.data.augment import CentreCrop
from train.errors import RunError

COLOURS = [(40 * i, 200 - 30 * i, 90) for i in range(6)]


def unit(x):
  x = np.float32(x) - 128.5
  return x / np.linalg.norm(x, axis=1, keepdims=True)


class FakeModel:
  """Sees mean colours; a text is the number of a colour. Counts what it embeds."""

  def __init__(self):
    options = types.SimpleNamespace(dtype=np.dtype("float32"))
    config = types.SimpleNamespace(embed_dim=3)
    self.task = types.SimpleNamespace(model=types.SimpleNamespace(config=config, options=options))
    self.crop, self.batch_size, self.step, self.size = CentreCrop(16), 2, 7, "tiny"
    self.squash, self.weights = False, "a"
    self.images = self.texts = 0

  def fingerprint(self):
    return {"weights": self.weights}

  def embed_pixels(self, pixels, names):
    self.images += len(pixels)
    return unit(pixels.mean(axis=(1, 2)))

  def embed_texts(self, texts):
    self.texts += len(texts)
    return unit([COLOURS[int(text or 0)] for text in texts])


@pytest.fixture
def model(monkeypatch):
  made = FakeModel()
  monkeypatch.setattr(inference, "load", lambda *args, **options: made)
  return made


@pytest.fixture
def photos(tmp_path):
  """Six pictures in two folders, a file that is no picture, and one that is broken."""
  folder = tmp_path / "photos"
  for i, colour in enumerate(COLOURS):
    path = folder / "ab"[i // 3] / f"{i}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(image_bytes("png", colour))
  (folder / "a" / "notes.txt").write_text("no picture")
  (folder / "b" / "3a.jpg").write_bytes(b"broken")
  return folder


def run(out, *arguments, data=None):
  data = [] if data is None else [f"--data={data}"]
  embed.main(["--checkpoint=some", f"--out={out}", "--shard_size=3", *data, *arguments])


def results(out, kind="images"):
  """The names, the skipped and the vectors of all files."""
  files = sorted(out.glob(f"{kind}-*.npy"))
  listed = [json.loads(file.with_suffix(".json").read_text()) for file in files]
  names = [name for one in listed for name in one["names"]]
  return (
    names,
    [s for one in listed for s in one["skipped"]],
    np.concatenate(list(map(np.load, files))),
  )


def test_each_picture_of_a_folder_has_its_vector(model, photos, tmp_path, capsys):
  run(tmp_path / "out", data=photos)
  names, skipped, vectors = results(tmp_path / "out")
  assert [re.sub(".*/", "", name) for name in names] == [f"{i}.png" for i in range(6)]
  np.testing.assert_allclose(vectors, unit(COLOURS), atol=1e-6)
  assert vectors.dtype == np.float32
  [(name, reason)] = skipped
  assert name.endswith("b/3a.jpg") and "cannot be decoded" in reason
  assert "skipped 1" in capsys.readouterr().out


def test_shards_and_folders_embed_alike(model, photos, tmp_path):
  shards = tmp_path / "shards"
  shards.mkdir()
  for number in range(2):
    members = [
      (f"{i}.{kind}", content)
      for i in range(3 * number, 3 * number + 3)
      for kind, content in (("png", image_bytes("png", COLOURS[i])), ("txt", b"a"))
    ]
    write_shard(shards / f"{number}.tar", members)
  run(tmp_path / "out", data=shards)
  names, _, vectors = results(tmp_path / "out")
  assert names == [f"{shards}/{i // 3}.tar:{i}" for i in range(6)]
  np.testing.assert_allclose(vectors, unit(COLOURS), atol=1e-6)


def test_a_damaged_shard_is_named_with_the_cure(model, tmp_path):
  shard = tmp_path / "a.tar"
  write_shard(shard, [("0.png", image_bytes("png", COLOURS[0]))])
  shard.write_bytes(shard.read_bytes()[:700])
  with pytest.raises(RunError, match=r"a\.tar: .* The shard is damaged: copy it again\."):
    run(tmp_path / "out", "--debug", data=shard)


@pytest.mark.parametrize("kind", ["folder", "shard"])
def test_a_second_start_embeds_only_what_is_missing(model, photos, tmp_path, kind):
  data, out = photos, tmp_path / "out"
  if kind == "shard":
    data = tmp_path / "all.tar"
    write_shard(data, [(f"{i}.png", image_bytes("png", c)) for i, c in enumerate(COLOURS)])
  run(out, data=data)
  whole, count = results(out), model.images
  assert count == 6
  run(out, data=data)
  assert model.images == count
  (out / "images-00001.npy").unlink()
  (out / "images-00001.partial.npy").write_bytes(b"killed here")
  for later in out.glob("images-00002.*"):
    later.unlink()
  run(out, data=data)
  assert model.images < 2 * count
  again = results(out)
  assert again[0] == whole[0]
  assert [name for name, _ in again[1]] == [name for name, _ in whole[1]]
  np.testing.assert_array_equal(again[2], whole[2])


def short(names):
  return [re.sub(".*/", "", name) for name in names]


def test_an_index_knows_its_model_by_contents(model, photos, tmp_path):
  """A checkpoint may be replaced by one of the same name, size and step."""
  (tmp_path / "texts.txt").write_text("1")
  commands = [f"--data={photos}"], [f"--texts={tmp_path / 'texts.txt'}"], ["--query", "2"]
  for arguments in commands:
    run(tmp_path / "out", *arguments)
  for field, value, message in [
    ("weights", "b", "weights: 'a' -> 'b'"),
    ("step", 8, "step: 7 -> 8"),
  ]:
    before = getattr(model, field)
    setattr(model, field, value)
    for arguments in commands:
      with pytest.raises(RunError, match=rf"holds other embeddings \({message}\)"):
        run(tmp_path / "out", "--debug", *arguments)
    setattr(model, field, before)
  count = model.images
  embed.main(["--checkpoint=moved", f"--out={tmp_path / 'out'}", f"--data={photos}"])
  assert model.images == count
  (tmp_path / "out" / "images.json").write_text('{"step": 7}')  # Of an earlier version.
  with pytest.raises(RunError, match="weights: None -> 'a'"):
    run(tmp_path / "out", "--debug", data=photos)


def test_pictures_that_come_later_are_embedded_beside_the_others(model, photos, tmp_path, capsys):
  out = tmp_path / "out"
  run(out, data=photos)
  (photos / "a" / "0a.png").write_bytes(image_bytes("png", COLOURS[2]))
  (photos / "b" / "3a.jpg").write_bytes(image_bytes("jpeg", COLOURS[4]))  # It was broken.
  (photos / "a" / "1.png").unlink()
  count = model.images
  run(out, data=photos)
  assert model.images == count + 2
  names, skipped, vectors = results(out)
  assert short(names) == [*(f"{i}.png" for i in range(6)), "0a.png", "3a.jpg"]
  assert short(name for name, _ in skipped) == ["3a.jpg"]
  np.testing.assert_allclose(vectors[:7], unit(COLOURS + COLOURS[2:3]), atol=1e-6)
  for _ in range(2):  # Further folders are growth; without one of them, it is another index.
    embed.main(["--checkpoint=some", f"--out={out}", "--data", str(photos), str(photos / "a")])
  assert model.images == count + 2
  with pytest.raises(RunError, match=r"holds other embeddings \(without --data=.*photos/a\)"):
    run(out, "--debug", data=photos)


def replace(path, content, same_size=True):
  """Another content, and the old times."""
  status = path.stat()
  assert (path.stat().st_size == len(content)) == same_size
  path.write_bytes(content)
  os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def bitmap(colour):
  return image_bytes("bmp", colour)


@pytest.mark.parametrize("touched", [False, True])
def test_a_picture_that_was_replaced_is_named(model, tmp_path, touched):
  """Its size and times may be the same."""
  photo = tmp_path / "photos" / "0.bmp"
  photo.parent.mkdir()
  photo.write_bytes(bitmap(COLOURS[0]))
  run(tmp_path / "out", data=photo.parent)
  if touched:
    photo.touch()
  run(tmp_path / "out", data=photo.parent)  # A time is another, the bytes are the same.
  assert model.images == 1
  replace(photo, bitmap(COLOURS[1]))
  with pytest.raises(
    RunError, match=r"photos/0.bmp has changed since it was embedded into .*out\."
  ):
    run(tmp_path / "out", "--debug", data=photo.parent)


def shard_of(path, colours):
  write_shard(path, [(f"{i}.bmp", bitmap(colour)) for i, colour in enumerate(colours)])


@pytest.mark.parametrize("shard_size", [1, 2, 10])
def test_a_shard_may_grow_and_must_not_change(model, tmp_path, shard_size):
  shard, out = tmp_path / "a.tar", tmp_path / "out"

  def again(colours):
    shard_of(shard, colours)
    embed.main(
      [
        "--checkpoint=some",
        "--debug",
        f"--out={out}",
        f"--data={shard}",
        f"--shard_size={shard_size}",
      ]
    )

  again(COLOURS[:3])
  again(COLOURS[:3])
  assert model.images == 3
  again(COLOURS)
  assert model.images == 6
  names, _, vectors = results(out)
  assert names == [f"{shard}:{i}" for i in range(6)]
  np.testing.assert_allclose(vectors, unit(COLOURS), atol=1e-6)
  for other in (COLOURS[:5], [*COLOURS[:4], COLOURS[0], COLOURS[5]], COLOURS[::-1]):
    with pytest.raises(RunError, match=r"a.tar has changed since it was embedded into"):
      again(other)
  assert model.images == 6


def test_an_interrupted_shard_continues_where_it_was(model, tmp_path):
  shard_of(tmp_path / "a.tar", COLOURS)
  run(tmp_path / "out", data=tmp_path / "a.tar")
  whole = results(tmp_path / "out")
  (tmp_path / "out" / "images-00001.npy").unlink()
  count = model.images
  run(tmp_path / "out", data=tmp_path / "a.tar")
  assert model.images == count + 3
  np.testing.assert_array_equal(results(tmp_path / "out")[2], whole[2])
  (tmp_path / "out" / "images-00000.npy").unlink()  # What comes after a gap is made again.
  run(tmp_path / "out", "--shard_size=10", data=tmp_path / "a.tar")
  np.testing.assert_array_equal(results(tmp_path / "out")[2], whole[2])


@pytest.mark.parametrize("link", [False, True])
def test_a_picture_that_vanishes_is_listed_and_the_rest_embedded(
  model, photos, tmp_path, monkeypatch, link
):
  start, gone = embed.embed_images, photos / "a" / "1.png"

  def late(*args):
    gone.unlink(missing_ok=True)
    return start(*args)

  if link:
    gone.unlink()
    gone.symlink_to(tmp_path / "nothing")
  else:
    monkeypatch.setattr(embed, "embed_images", late)
  out = tmp_path / "out"
  for _ in range(2):
    run(out, data=photos)
    names, skipped, vectors = results(out)
    assert short(names) == ["0.png", *(f"{i}.png" for i in range(2, 6))]
    assert (short(skipped[0])[0], skipped[0][1]) == ("1.png", "it is not there any more")
    assert len(vectors) == 5 and len([*out.glob("images-*.npy")]) == 3  # No further part.
  monkeypatch.setattr(embed, "embed_images", start)
  gone.unlink(missing_ok=True)
  gone.write_bytes(image_bytes("png", COLOURS[1]))  # It is there again.
  run(out, data=photos)
  assert short(results(out)[0])[5:] == ["1.png"]


def test_an_error_of_the_system_ends_the_program_as_itself(model, photos, tmp_path, monkeypatch):
  def denied(path):
    raise PermissionError(13, "Permission denied", str(path))

  monkeypatch.setattr(embed.Path, "read_bytes", denied)
  with pytest.raises(PermissionError):
    run(tmp_path / "out", "--debug", data=photos)
  assert not list((tmp_path / "out").glob("images-*"))


def test_linked_folders_are_followed_but_not_in_circles(model, photos, tmp_path):
  (photos / "c").symlink_to(photos / "a")
  (photos / "a" / "round").symlink_to(photos)
  run(tmp_path / "out", data=photos)
  assert short(results(tmp_path / "out")[0]) == [f"{i}.png" for i in (0, 1, 2, 3, 4, 5, 0, 1, 2)]


def test_files_that_are_no_pictures_are_counted(model, photos, tmp_path, capsys):
  run(tmp_path / "out", data=photos)
  assert "1 other files in --data are no images (.txt: 1)" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["file", "shard"])
def test_each_limit_has_a_flag(model, tmp_path, kind):
  data = tmp_path / "data"
  data.mkdir()
  content = image_bytes("png", COLOURS[0], (400, 2))
  if kind == "file":
    (data / "0.png").write_bytes(content)
  else:
    write_shard(data / "0.tar", [("0.png", content)])
  for flag, words in {
    "--max_aspect_ratio=199": "a ratio of sides above --max_aspect_ratio=199",
    "--max_image_pixels=799": "more pixels than --max_image_pixels=799",
    "--max_member_bytes=9": "max_member_bytes=9",
  }.items():
    out = tmp_path / flag
    run(out, flag, "--max_aspect_ratio=200" if "ratio" not in flag else flag, data=data)
    [(_, reason)] = results(out)[1]
    assert words in reason
    with pytest.raises(RunError, match=rf"{flag[2:].partition('=')[0]}: .* -> "):
      run(out, "--debug", "--max_aspect_ratio=201", "--max_image_pixels=9999", data=data)
  run(tmp_path / "all", "--max_aspect_ratio=200", "--query=0", data=data)
  assert len(results(tmp_path / "all")[0]) == 1 and not results(tmp_path / "all")[1]


def test_squashed_and_cropped_pictures_do_not_share_a_folder(model, photos, tmp_path):
  """A config beside the weights decides, which may come or go between two starts."""
  out = tmp_path / "out"
  run(out, data=photos)
  model.squash = True
  for arguments in ([f"--data={photos}"], ["--query=2"]):
    with pytest.raises(RunError, match=r"holds other embeddings \(squash: False -> True\)"):
      run(out, "--debug", *arguments)
  model.squash = False
  run(out, data=photos)


def test_the_pictures_that_it_drew_are_no_data(model, photos):
  for _ in range(2):
    run(photos / "out", "--query", "2", data=photos)
    assert len(results(photos / "out")[0]) == 6


def test_row_i_of_the_texts_is_line_i(model, tmp_path, capsys):
  """Also after empty lines, and in a file with a byte-order mark."""
  file = tmp_path / "texts.txt"
  file.write_bytes(b"\xef\xbb\xbf3\n\n1\r\n 4 \n  \n0\n\n")
  run(tmp_path / "out", f"--texts={file}")
  names, _, vectors = results(tmp_path / "out", "texts")
  assert names == ["3", "", "1", "4", "", "0", ""]
  np.testing.assert_allclose(vectors, unit([COLOURS[int(n or 0)] for n in names]), atol=1e-6)
  assert "embedded 7 texts" in (said := capsys.readouterr().out) and "3 of them are empty" in said


def test_a_file_of_texts_may_grow_and_must_not_change(model, tmp_path):
  file, out = tmp_path / "texts.txt", tmp_path / "out"
  file.write_text("0\n1\n2\n3")
  run(out, f"--texts={file}")
  file.write_text("0\n1\n2\n3\n4\n5\n")
  run(out, f"--texts={file}")
  assert results(out, "texts")[0] == list("012345") and model.texts == 6
  for text, message in {
    "0\n1\n5\n3\n4\n5": "line 3 was '2' and is '5'",
    "0\n1": "line 3 was '2' and is not there",
    "\n0\n1\n2\n3\n4\n5": "line 1 was '0' and is ''",
  }.items():
    file.write_text(text)
    with pytest.raises(RunError, match=f"holds other texts: {message}. Choose another --out"):
      run(out, "--debug", f"--texts={file}")


def test_a_line_that_is_not_utf_8_is_named(model, tmp_path):
  (tmp_path / "texts.txt").write_bytes("1\n2\ncaf\xe9\n".encode("latin-1"))
  with pytest.raises(RunError, match=r"texts.txt, line 3: b'caf.xe9' is not UTF-8"):
    run(tmp_path / "out", "--debug", f"--texts={tmp_path / 'texts.txt'}")


def test_a_query_prints_and_draws_the_nearest_pictures(model, photos, tmp_path, capsys):
  out, shard = tmp_path / "out", tmp_path / "more.tar"
  write_shard(shard, [("s.png", image_bytes("png", COLOURS[5]))])
  run(out, "--query", "2", "5", "--nearest=2", f"--data={photos}", f"--data={shard}")
  lines = capsys.readouterr().out.splitlines()
  start = lines.index("2")
  assert re.fullmatch(r"   1\.000  .*/2.png", lines[start + 1])
  assert {line[10:] for line in lines[start + 4 : start + 6]} == {
    str(photos / "b" / "5.png"), f"{shard}:s"
  }  # fmt: skip
  sheet = np.asarray(Image.open(out / "nearest.png"))
  assert sheet.shape == (2 * 168, 2 * 128, 3)
  for y, x, colour in [(20, 0, COLOURS[2]), (168 + 20, 0, COLOURS[5]), (188, 128, COLOURS[5])]:
    np.testing.assert_array_equal(sheet[y + 2, x + 3], colour)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ([], "Nothing to do: --data, --texts or --query is needed"),
    (["--data=none"], r"--data=none has no image \(.jpg, .*\) and no .tar shard"),
    (["--query=1"], r"holds no images-00000.npy: embed images first, with --data"),
    (["--texts=empty.txt"], "--texts=empty.txt is empty: it should hold a text on each line"),
  ],
)
def test_what_cannot_be_embedded_is_one_message(model, tmp_path, monkeypatch, arguments, message):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "empty.txt").write_text("\n")
  with pytest.raises(RunError, match=message):
    run(tmp_path / "out", "--debug", *arguments)


def test_only_line_breaks_end_a_text(tmp_path):
  file = tmp_path / "texts.txt"
  file.write_bytes("a dog\u2028on grass\r\n\n cat\x0b two\n".encode())
  assert embed._texts(str(file)) == ["a dog\u2028on grass", "", "cat\x0b two"]


def test_vectors_that_are_not_finite_are_not_searched(tmp_path):
  np.save(tmp_path / "images-00000.npy", np.full((1, 4), math.nan, np.float32))
  with pytest.raises(RunError, match=r"images-00000.npy has vectors that are not finite"):
    embed.nearest(tmp_path, np.ones((1, 4), np.float32), 2)


def test_a_picture_that_is_gone_or_another_is_not_drawn(model, photos, tmp_path):
  out = tmp_path / "out"
  run(out, data=photos)
  run(out, "--query", "2", "4", "--nearest=1")
  sheet = np.asarray(Image.open(out / "nearest.png"))
  assert (sheet[22, 3] != 255).any() and (sheet[168 + 22, 3] != 255).any()
  (photos / "a" / "2.png").unlink()
  (photos / "b" / "4.png").write_bytes(image_bytes("png", COLOURS[0]))
  run(out, "--query", "2", "4", "--nearest=1")
  sheet = np.asarray(Image.open(out / "nearest.png"))
  assert (sheet[22, 3] == 255).all() and (sheet[168 + 22, 3] == 255).all()


def test_a_query_among_no_pictures_is_one_message(tmp_path):
  np.save(tmp_path / "images-00000.npy", np.ones((0, 4), np.float32))
  (tmp_path / "images-00000.json").write_text(json.dumps({"names": []}))
  with pytest.raises(RunError, match="holds no vector of an image: all were skipped"):
    embed.nearest(tmp_path, np.ones((1, 4), np.float32), 2)


def test_vectors_of_another_width_are_not_compared(model, photos, tmp_path):
  run(tmp_path / "out", data=photos)
  with pytest.raises(RunError, match="has vectors of 3 numbers, and the model makes 4"):
    embed.nearest(tmp_path / "out", np.ones((1, 4), np.float32), 2)
