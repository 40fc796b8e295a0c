"""Scores on folders of CLIP_benchmark: its layout, its names, and open_clip's numbers."""

import csv
import io
import json
import types

import numpy as np
import pytest
from open_clip_case import import_open_clip
from PIL import Image
from shards_case import image_bytes, write_shard

from train import evaluate, inference
from train.data.augment import CentreCrop
from train.data.wds_folder import CLASSIFICATION, RETRIEVAL, open_folder
from train.errors import RunError
from train.evaluate import classification_scores, evaluate_folder, probe_folder
from train.zero_shot import check_finite

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220),
           "white": (250, 250, 250), "black": (5, 5, 5), "grey": (120, 120, 120)}  # fmt: skip


def noisy(colour, seed, size=40):
  """A PNG of about that colour."""
  noise = np.random.default_rng(seed).integers(-40, 41, (size, size, 3))
  pixels = np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)
  file = io.BytesIO()
  Image.fromarray(pixels).save(file, "png")
  return file.getvalue()


def write_split(folder, shards):
  """Shards of a split, each a list of (extension, content) lists."""
  folder.mkdir(parents=True)
  (folder / "nshards.txt").write_text(f"{len(shards)}\n")
  for number, samples in enumerate(shards):
    members = [
      (f"s{i:04d}.{extension}", content)
      for i, sample in enumerate(samples)
      for extension, content in sample
    ]
    write_shard(folder / f"{number}.tar", members)


def labelled(count, first=0):
  """Pictures of the six colours in turn, with their labels."""
  colours = list(COLOURS.values())
  return [
    [("png", noisy(colours[i % 6], first + i)), ("cls", str(i % 6).encode())] for i in range(count)
  ]


@pytest.fixture
def colours(tmp_path):
  folder = tmp_path / "wds_colours"
  write_split(folder / "test", [labelled(10), labelled(8, 10)])
  write_split(folder / "train", [labelled(60, 100)])
  (folder / "classnames.txt").write_text("".join(f"{name}\n" for name in COLOURS))
  (folder / "zeroshot_classification_templates.txt").write_text("{c}\nall {c}\n")
  return folder


@pytest.fixture
def captioned(tmp_path):
  folder = tmp_path / "wds_captions"
  names = list(COLOURS)
  samples = [
    [("png", noisy(COLOURS[name], i)), ("txt", f"{name}\nall {name}".encode())]
    for i, name in enumerate(names)
  ]
  write_split(folder / "test", [samples])
  (folder / "dataset_type.txt").write_text("retrieval\n")
  return folder


def unit(x):
  x = np.float32(x) - 128.5
  return x / np.linalg.norm(x, axis=1, keepdims=True)


MODEL = types.SimpleNamespace(  # Sees mean colours, and reads the last word.
  crop=CentreCrop(32),
  batch_size=4,
  size="tiny",
  step=7,
  embed_pixels=lambda pixels, names: unit(pixels.mean(axis=(1, 2))),
  embed_texts=lambda texts: unit([COLOURS[text.split()[-1]] for text in texts]),
)


def test_classification_has_clip_benchmark_s_names(colours):
  folder = open_folder(colours)
  assert (folder.task, folder.name) == (CLASSIFICATION, "wds/colours")
  assert folder.templates == ["{}", "all {}"]
  scores = evaluate_folder(MODEL, folder)
  assert set(scores) == {"acc1", "acc5", "mean_per_class_recall"}
  assert scores["acc5"] == 1 and scores["acc1"] > 0.6


def test_retrieval_counts_an_image_once_and_each_text(captioned):
  folder = open_folder(captioned)
  assert (folder.task, folder.name) == (RETRIEVAL, "wds/captions")
  scores = evaluate_folder(MODEL, folder)
  ways = [f"{kind}_retrieval_recall@{k}" for kind in ("image", "text") for k in (1, 5, 10)]
  assert list(scores) == ways
  assert scores["image_retrieval_recall@10"] == 1 and scores["text_retrieval_recall@10"] == 1


def test_image_retrieval_is_by_texts(captioned):
  """All texts say "red": each image finds its own first, and a text only the red image."""
  red = types.SimpleNamespace(**vars(MODEL))
  red.embed_texts = lambda texts: unit([COLOURS["red"]] * len(texts))
  scores = evaluate_folder(red, open_folder(captioned))
  assert scores["image_retrieval_recall@1"] == pytest.approx(1 / 6)
  assert scores["text_retrieval_recall@1"] == pytest.approx(1 / 6)  # Of equal texts the first.
  assert scores["text_retrieval_recall@10"] == pytest.approx(5 / 6)


def test_a_linear_probe_is_trained_on_the_train_split(colours):
  scores = probe_folder(MODEL, open_folder(colours))
  assert set(scores) == {"lp_acc1", "lp_acc5", "lp_mean_per_class_recall", "weight_decay"}
  assert scores["lp_acc1"] > 0.8


def test_scores_are_those_of_their_definitions():
  rng = np.random.default_rng(0)
  logits, labels = rng.normal(size=(200, 7)), rng.integers(0, 6, 200)  # Class 6 has no example.
  order = np.argsort(-logits, axis=1)
  first = order[:, 0] == labels
  assert classification_scores(logits, labels) == pytest.approx(
    {
      "acc1": first.mean(),
      "acc5": (order[:, :5] == labels[:, None]).any(axis=1).mean(),
      "mean_per_class_recall": np.mean([first[labels == c].mean() for c in range(6)]),
    }
  )
  assert set(classification_scores(logits[:, :4], labels % 4)) == {"acc1", "mean_per_class_recall"}


def test_equal_logits_have_the_accuracy_of_chance():
  scores = classification_scores(np.ones((100, 10)), np.arange(100) % 10)
  assert scores == pytest.approx({"acc1": 0.1, "acc5": 0.5, "mean_per_class_recall": 0.1})


def test_an_example_without_finite_logits_is_wrong(colours):
  logits = np.full((2, 6), np.nan)
  logits[0, 3] = 1
  scores = classification_scores(logits, np.array([3, 0]))
  assert scores["acc1"] == scores["acc5"] == scores["mean_per_class_recall"] == 0
  broken = types.SimpleNamespace(**vars(MODEL))
  broken.embed_pixels = lambda pixels, names: check_finite("image", np.nan * pixels[:, 0, 0], names)
  with pytest.raises(RunError, match=r"image tower gives 4 of 4 images .* 's?.*0.tar: s0000'"):
    evaluate_folder(broken, open_folder(colours))


@pytest.mark.parametrize("task", ["colours", "captioned"])
def test_texts_whose_features_are_not_finite_are_no_scores(task, request):
  broken = types.SimpleNamespace(**vars(MODEL))
  broken.embed_texts = lambda texts: check_finite("text", np.full((len(texts), 3), np.nan), texts)
  with pytest.raises(RunError, match=r"The text tower gives 12 of 12 texts .* of them 'red'"):
    evaluate_folder(broken, open_folder(request.getfixturevalue(task)))


def encoded(image, kind, **options):
  file = io.BytesIO()
  image.save(file, kind, **options)
  return file.getvalue()


def test_pictures_have_the_pixels_that_clip_benchmark_sees(tmp_path):
  """Its reader opens them and converts them to RGB: no more."""
  noise = np.random.default_rng(0).integers(0, 256, (40, 60, 4), np.uint8)
  turned = Image.Exif()
  turned[0x112] = 6
  plain = Image.fromarray(noise[..., :3])
  pictures = [
    ("jpg", encoded(plain, "jpeg", exif=turned)),
    ("png", encoded(Image.fromarray(noise), "png")),
    ("png", encoded(Image.fromarray(noise[..., 0].astype(np.uint16) * 200), "png")),
    ("png", encoded(plain.convert("P"), "png", transparency=3)),
    ("png", encoded(Image.fromarray(noise[..., :2], "LA"), "png")),
    ("jpg", encoded(plain.convert("CMYK"), "jpeg")),
  ]
  folder = tmp_path / "wds_x"
  write_split(folder / "test", [[[picture, ("txt", b"red")] for picture in pictures]])
  (folder / "dataset_type.txt").write_text("retrieval\n")
  seen = []
  model = types.SimpleNamespace(**vars(MODEL))
  model.embed_pixels = lambda pixels, _: (seen.append(pixels), unit(pixels.mean(axis=(1, 2))))[1]
  evaluate_folder(model, open_folder(folder))
  for got, (_, content) in zip(np.concatenate(seen), pictures, strict=True):
    image = Image.open(io.BytesIO(content)).convert("RGB")
    image = image.resize((48, 32), Image.Resampling.BICUBIC).crop((8, 0, 40, 32))
    np.testing.assert_array_equal(got, np.asarray(image))


def test_each_limit_on_pictures_is_a_flag(tmp_path, monkeypatch, capsys):
  thin = encoded(Image.new("RGB", (505, 5), "red"), "png")
  folder = tmp_path / "wds_x"
  write_split(folder / "test", [[[("png", thin), ("txt", b"red")]]])
  (folder / "dataset_type.txt").write_text("retrieval\n")
  monkeypatch.setattr(inference, "load", lambda path, batch_size, **options: MODEL)
  flags = ["--checkpoint=some.pt", f"--data={folder}", f"--out={tmp_path}/out"]
  for flag, wider in (
    ("--max_aspect_ratio=100", "--max_aspect_ratio=101"),
    ("--max_image_pixels=2524", "--max_image_pixels=2525"),
    (f"--max_member_bytes={len(thin) - 1}", f"--max_member_bytes={len(thin)}"),
  ):
    with pytest.raises(SystemExit):
      evaluate.main([*flags, "--max_aspect_ratio=101", flag])
    assert flag in capsys.readouterr().err
    evaluate.main([*flags, "--max_aspect_ratio=101", wider])
  for flag, why in (
    ("--max_aspect_ratio=0.5", "0.5 must be at least 1."),
    ("--max_aspect_ratio=nan", "nan must be at least 1."),
    ("--max_image_pixels=0", "0 must be at least 1."),
    ("--max_member_bytes=1.5", "'1.5' must be a whole number."),
  ):
    with pytest.raises(SystemExit):
      evaluate.main([*flags, flag])
    assert f"argument {flag.partition('=')[0]}: {why}" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_computed(
  colours, tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(inference, "load", None)
  (tmp_path / "file").write_text("")
  flags = ["--checkpoint=some.pt", f"--data={colours}"]
  for out, message in (("file/out", "is a file. Give another --out"), ("new", "cannot be written")):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # Root may write everywhere.
    with pytest.raises(SystemExit):
      evaluate.main([*flags, f"--out={tmp_path}/{out}"])
    assert message in capsys.readouterr().err
  assert not (tmp_path / "new").exists()


def test_names_of_any_encoding_are_in_the_table(tmp_path):
  row = {"model": "m", "pretrained": "caf\udce9.pt", "metrics": {}, "dataset": "wds/\udcff"}
  evaluate.write_csv(tmp_path / "a.csv", [row])
  assert "caf\\udce9.pt" in (tmp_path / "a.csv").read_text(encoding="utf-8")


def test_the_program_writes_json_and_a_csv_of_all_sets(
  colours, captioned, tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(inference, "load", lambda path, batch_size, **options: MODEL)
  out = tmp_path / "out"
  evaluate.main(
    ["--checkpoint=some.pt", f"--data={colours}", f"--data={captioned}", f"--out={out}",
     "--linear_probe"]
  )  # fmt: skip
  row = json.loads((out / "wds_colours_zeroshot_classification.json").read_text())
  assert {name: row[name] for name in ("dataset", "model", "pretrained", "task", "language")} == {
    "dataset": "wds/colours", "model": "tiny", "pretrained": "some.pt",
    "task": "zeroshot_classification", "language": "en",
  }  # fmt: skip
  with (out / "benchmark.csv").open() as file:
    rows = list(csv.DictReader(file))
  tasks = ["zeroshot_classification", "linear_probe", "zeroshot_retrieval"]
  assert [row["task"] for row in rows] == tasks
  assert float(rows[0]["acc1"]) == row["metrics"]["acc1"] and rows[2]["acc1"] == ""
  assert rows[0]["model_fullname"] == "tiny some.pt"
  printed = capsys.readouterr().out
  assert all(f"{row['dataset']}, {row['task']}" in printed for row in rows)


def test_a_small_score_is_not_printed_as_zero(capsys):
  evaluate.print_scores("scores", {"acc1": 0.98765, "weight_decay": 1e-6})
  assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]] == [
    "0.9877", "1e-06"
  ]  # fmt: skip


def remove(name):
  return lambda folder: (folder / name).unlink()


def write(name, text):
  return lambda folder: (folder / name).write_text(text)


def replace_sample(*sample):
  return lambda folder: write_shard(folder / "test" / "1.tar", [(f"a.{e}", c) for e, c in sample])


def renumber(folder):
  (folder / "test" / "nshards.txt").unlink()
  (folder / "test" / "1.tar").rename(folder / "test" / "2.tar")


@pytest.mark.parametrize(
  ("spoil", "message"),
  [
    (remove("classnames.txt"), r"classnames.txt is missing: it should hold the name of a class"),
    (write("classnames.txt", "\n"), r"classnames.txt is empty: it should hold the name of a class"),
    (
      remove("zeroshot_classification_templates.txt"),
      r"zeroshot_classification_templates.txt is missing: it should hold a prompt on each line",
    ),
    (write("zeroshot_classification_templates.txt", "a photo"), r"'a photo' has no \{c\}"),
    (write("dataset_type.txt", "multilabel"), "holds 'multilabel': only 'classification' and"),
    (write("test/nshards.txt", "3"), r"test/2.tar is missing: .* has test, train"),
    (write("test/nshards.txt", "1"), r"test/1.tar is one of 2 shards, and .*nshards.txt says that"),
    (write("test/0.tar.gz", ""), r"test/0.tar and 0.tar.gz are both there"),
    (renumber, r"test/1.tar is missing"),
    (write("test/nshards.txt", "many"), "'many': it should hold the number of shards"),
    (write("classnames.txt", "a\nb"), "10 samples have a label beyond the 2 names of .* as 2"),
    (replace_sample(("cls", b"1")), r"1.tar: a must have an image .* and a cls"),
    (replace_sample(("png", image_bytes("png"))), r"1.tar: a must have an image .* and a cls"),
    (write("test/1.tar", "no tar"), r"1.tar: file could not be .* damaged: copy it again"),
  ],
)  # fmt: skip
def test_a_folder_that_cannot_be_scored_says_what_it_lacks(colours, spoil, message):
  spoil(colours)
  with pytest.raises(RunError, match=message):
    list(open_folder(colours).examples("test"))


def test_missing_folders_and_splits_are_named(colours, tmp_path):
  with pytest.raises(RunError, match=r"wds_none is no folder: --data needs folders"):
    open_folder(tmp_path / "wds_none")
  with pytest.raises(RunError, match=r"val/0.tar is missing.* has test, train"):
    open_folder(colours).shards("val")


@pytest.mark.interop
def test_scores_equal_open_clip_s(colours, captioned, tmp_path):
  open_clip = import_open_clip()
  import torch

  vision = {"image_size": 32, "patch_size": 8, "width": 128, "layers": 3, "head_width": 32}
  text = {"context_length": 24, "vocab_size": 49408, "width": 64, "layers": 2, "heads": 2}
  torch.manual_seed(0)
  theirs = open_clip.model.CLIP(64, vision, text).eval()
  path = tmp_path / "open_clip.pt"
  torch.save(theirs.state_dict(), path)
  ours = inference.load(path, size="tiny")

  folder = open_folder(colours)
  tokenizer = open_clip.tokenizer.SimpleTokenizer(context_length=24)
  classifier = open_clip.build_zero_shot_classifier(
    theirs, tokenizer, folder.class_names, [t.format for t in folder.templates]
  )
  transform = open_clip.image_transform(32, is_train=False)

  def encoded(folder):
    examples = list(folder.examples("test"))
    images = [transform(Image.open(io.BytesIO(e["image"]))) for e in examples]
    return examples, theirs.encode_image(torch.stack(images), normalize=True)

  with torch.no_grad():
    examples, images = encoded(folder)
    logits = (100 * images @ classifier).numpy()
    labels = np.array([e["label"] for e in examples])
    nearest = np.argsort(-logits, axis=1)
    scores = evaluate_folder(ours, folder)
    assert scores["acc1"] == pytest.approx(np.mean(nearest[:, 0] == labels), abs=1e-4)
    top5 = (nearest[:, :5] == labels[:, None]).any(axis=1).mean()
    assert scores["acc5"] == pytest.approx(top5, abs=1e-4)
    np.testing.assert_allclose(
      ours.embed_texts(["a red cat"]),
      theirs.encode_text(tokenizer(["a red cat"]), normalize=True),
      atol=1e-5,
    )

    examples, images = encoded(open_folder(captioned))
    texts = [text for e in examples for text in e["captions"]]
    similarity = (images @ theirs.encode_text(tokenizer(texts), normalize=True).T).numpy()
    owners = np.repeat(np.arange(6), 2)
    scores = evaluate_folder(ours, open_folder(captioned))
    by_text = np.argsort(-similarity, axis=0)
    for k in (1, 5):
      expected = (by_text[:k] == owners).any(axis=0).mean()
      assert scores[f"image_retrieval_recall@{k}"] == pytest.approx(expected, abs=1e-4)
      by_image = owners[np.argsort(-similarity, axis=1)[:, :k]]
      expected = (by_image == np.arange(6)[:, None]).any(axis=1).mean()
      assert scores[f"text_retrieval_recall@{k}"] == pytest.approx(expected, abs=1e-4)
