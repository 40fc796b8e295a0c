"""Pictures and texts become numbered files of unit vectors, which a later start continues."""

import json
import re
import types

import numpy as np
import pytest
from PIL import Image
from shards_case import image_bytes, write_shard

from train import embed, inference
from train.augment import CentreCrop
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
    self.squash = False
    self.images = self.texts = 0

  def embed_pixels(self, pixels):
    self.images += len(pixels)
    return unit(pixels.mean(axis=(1, 2)))

  def embed_texts(self, texts):
    self.texts += len(texts)
    return unit([COLOURS[int(text)] for text in texts])


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


def test_linked_folders_are_followed_and_loops_are_not(tmp_path):
  def picture(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(image_bytes("png"))

  photos, real = tmp_path / "photos", tmp_path / "real"
  for path in (photos / "b" / "same.png", real / "same.png", real / "deep" / "UP.JPEG"):
    picture(path)
  (photos / "a").symlink_to(real)
  (photos / "b" / "up").symlink_to(photos)
  (real / "deep" / "again").symlink_to(real)
  (photos / "file.jpg").symlink_to(real / "same.png")
  (photos / "gone.jpg").symlink_to(tmp_path / "none")
  names = [path.removeprefix(f"{photos}/") for path in embed.sources([str(photos)])]
  assert names == ["a/deep/UP.JPEG", "a/same.png", "b/same.png", "file.jpg"]


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


def test_other_data_or_another_model_is_refused(model, photos, tmp_path):
  run(tmp_path / "out", data=photos)
  (photos / "a" / "0a.png").write_bytes(image_bytes("png"))
  with pytest.raises(RunError, match=r"holds other embeddings \(images: 7 -> 8; paths: "):
    run(tmp_path / "out", "--debug", data=photos)
  (photos / "a" / "0a.png").unlink()
  model.step = 8
  with pytest.raises(RunError, match=r"holds other embeddings \(step: 7 -> 8\)"):
    run(tmp_path / "out", "--debug", data=photos)
  with pytest.raises(RunError, match=r"holds other embeddings \(step: 7 -> 8\)"):
    run(tmp_path / "out", "--debug", "--query", "2")
  model.step = 7
  replaced = photos / "a" / "0.png"
  replaced.write_bytes(replaced.read_bytes() + b"another")
  with pytest.raises(RunError, match=r"holds other embeddings \(paths: "):
    run(tmp_path / "out", "--debug", data=photos)


def test_squashed_and_cropped_pictures_do_not_share_a_folder(model, photos, tmp_path):
  """A config beside the weights decides, which may come or go between two starts."""
  out = tmp_path / "out"
  run(out, data=photos)
  model.squash = True
  with pytest.raises(RunError, match=r"holds other embeddings \(squash: False -> True\)"):
    run(out, "--debug", data=photos)
  old = json.loads((out / "images.json").read_text())
  del old["squash"]  # As earlier versions wrote it, which cropped.
  (out / "images.json").write_text(json.dumps(old))
  with pytest.raises(RunError, match=r"holds other embeddings \(squash: False -> True\)"):
    run(out, "--debug", data=photos)
  model.squash = False
  run(out, data=photos)


def test_the_pictures_that_it_drew_are_no_data(model, photos):
  for _ in range(2):
    run(photos / "out", "--query", "2", data=photos)
    assert len(results(photos / "out")[0]) == 6


def test_texts_are_embedded_line_by_line(model, tmp_path):
  file = tmp_path / "texts.txt"
  file.write_text("3\n\n1\n 4 \n0\n")
  run(tmp_path / "out", f"--texts={file}")
  names, _, vectors = results(tmp_path / "out", "texts")
  assert names == ["3", "1", "4", "0"]
  np.testing.assert_allclose(vectors, unit([COLOURS[i] for i in (3, 1, 4, 0)]), atol=1e-6)


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
    (["--data=none"], r"--data=none has no picture \(.jpg, .*\) and no .tar shard"),
    (["--query=1"], r"holds no images-00000.npy: embed pictures first, with --data"),
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
  assert embed._texts(str(file)) == ["a dog\u2028on grass", "cat\x0b two"]


def test_a_query_among_no_pictures_is_one_message(tmp_path):
  np.save(tmp_path / "images-00000.npy", np.ones((0, 4), np.float32))
  (tmp_path / "images-00000.json").write_text(json.dumps({"names": []}))
  with pytest.raises(RunError, match="holds no vector of a picture: all were skipped"):
    embed.nearest(tmp_path, np.ones((1, 4), np.float32), 2)


def test_vectors_of_another_width_are_not_compared(model, photos, tmp_path):
  run(tmp_path / "out", data=photos)
  with pytest.raises(RunError, match="has vectors of 3 numbers, and the model makes 4"):
    embed.nearest(tmp_path / "out", np.ones((1, 4), np.float32), 2)
