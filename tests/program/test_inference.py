"""A run's checkpoint embeds one's own pictures and texts as the run's evaluation does."""

import dataclasses
import json
import runpy
import shutil
import sys
from pathlib import Path

import jax
import loop_case
import numpy as np
import pytest
from open_clip_case import import_open_clip
from PIL import Image

from sbjax import RECIPES
from sbjax.interop.config_files import to_open_clip
from sbjax.interop.serving import size_of
from sbjax.quantize import Quantized
from train import inference
from train.config import Config, ModelConfig
from train.data.augment import CentreCrop, Squash
from train.data.preprocessing import normalize
from train.data.tokenizer import make_tokenizer
from train.errors import RunError
from train.run import make_run

ROOT = Path(__file__).parents[2]
TEXTS = ["a red circle", "a blue ring", "a green star"]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  return loop_case.untrained_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
  folder, random = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
  pixels = random.integers(0, 255, (5, 32, 32, 3)).astype(np.uint8)
  for i, image in enumerate(pixels):
    Image.fromarray(image).save(folder / f"{i}.png")
  return pixels, sorted(map(str, folder.glob("*.png")))


def test_embeddings_are_those_of_the_run_s_model(workdir, pictures):
  model = inference.load(workdir, batch_size=4)
  assert model.step == 2
  config = loop_case.config(workdir / "data", steps=2)
  run = make_run(config, workdir)
  params = run.checkpointer.restore(run.abstract_state).state.params
  pixels, paths = pictures
  apply = run.task.model.apply
  images = apply({"params": params}, normalize(pixels), method="encode_image")
  tokens = run.tokenizer(TEXTS, config.model.context_length)
  texts = apply({"params": params}, tokens, method="encode_text")
  for ours, expected in [(model.embed_images(paths), images), (model.embed_texts(TEXTS), texts)]:
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1, rtol=1e-5)
    expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-4)


def test_no_picture_and_no_text_have_no_embedding(workdir):
  model = inference.load(workdir)
  pixels = np.zeros((0, model.image_size, model.image_size, 3), np.uint8)
  for none in (model.embed_images([]), model.embed_pixels(pixels), model.embed_texts([])):
    assert none.shape == (0, model.task.model.config.embed_dim) and none.dtype == np.float32


def test_the_example_prints_the_cosines_of_each_picture(workdir, pictures, monkeypatch, capsys):
  _, paths = pictures
  monkeypatch.setattr(sys, "path", list(sys.path))
  monkeypatch.setattr(sys, "argv", ["embed.py", str(workdir), *paths[:2], "--", *TEXTS])
  runpy.run_path(str(ROOT / "examples" / "embed.py"), run_name="__main__")
  lines = capsys.readouterr().out.splitlines()
  assert [line for line in lines if line in paths] == paths[:2]
  cosines = [float(line.split()[0]) for line in lines if line.startswith("  ")]
  assert len(cosines) == 6 and all(-1 <= cosine <= 1 for cosine in cosines)
  assert cosines[:3] == sorted(cosines[:3], reverse=True)


@pytest.mark.parametrize("field", ["backend", "attention_backend"])
def test_a_run_is_loaded_without_the_backends_of_its_device(workdir, field):
  path = workdir / "config.json"
  whole = path.read_text()
  values = json.loads(whole)
  values["model"][field] = {"backend": "mosaic", "attention_backend": "cudnn"}[field]
  path.write_text(json.dumps(values))
  try:
    assert inference.load(workdir).embed_texts(TEXTS).shape[0] == len(TEXTS)
  finally:
    path.write_text(whole)


@pytest.mark.slow
def test_a_run_in_8_bits_embeds_as_in_float(workdir, pictures):
  _, paths = pictures
  whole, int8 = inference.load(workdir), inference.load(workdir, int8=True)
  assert size_of(int8.params) < 0.35 * size_of(whole.params)
  # loop_case's recipe is "full".
  assert int8.task.model.options.recipe == RECIPES["switchback_q"]
  for embed, argument in (("embed_images", paths), ("embed_texts", TEXTS)):
    ours, theirs = getattr(int8, embed)(argument), getattr(whole, embed)(argument)
    assert (ours * theirs).sum(axis=1).min() > 0.999


@pytest.mark.parametrize(
  ("recipe", "served"),
  [
    ("full", "switchback_q"),
    ("image/*=full, text/*=full", "switchback_q"),
    ("switchback", "switchback"),
    ("image/*=full, text/*=switchback", "image/*=full, text/*=switchback"),
  ],
)
def test_only_a_recipe_without_a_rounded_forward_pass_is_replaced(recipe, served):
  params = {tower: {"blocks": {"fc1": {"kernel": np.ones((2, 8, 4), np.float32)}}}
            for tower in ("image", "text")}  # fmt: skip
  config, params = inference._in_int8(Config(model=ModelConfig(size="tiny", recipe=recipe)), params)
  assert config.model.recipe == served
  assert isinstance(params["text"]["blocks"]["fc1"]["kernel"], Quantized)


def test_wrong_parameters_are_no_reason_for_another_recipe():
  config = Config(model=ModelConfig(size="tiny", recipe="text/*=switchback"))
  params = {"image": {"blocks": {"fc1": {"kernel": np.ones((2, 8, 4), np.float32)}}}}
  with pytest.raises(ValueError, match="No rule fits the linear layer 'image/blocks/fc1'"):
    inference._in_int8(config, params)


def test_what_does_not_fit_a_run_is_named(workdir):
  for options, message in [
    ({"size": "ViT-B-32"}, "holds a tiny: leave --model=B/32 out"),
    ({"size": "ViT-B-33"}, "holds a tiny: leave --model=ViT-B-33 out"),
    ({"tokenizer": "clip"}, "has its own tokenizer: leave --tokenizer=clip out"),
  ]:
    with pytest.raises(RunError, match=message):
      inference.load(workdir, **options)
  tokenizer = workdir / "tokenizer.json"
  tokenizer.rename(workdir / "aside")
  try:
    with pytest.raises(RunError, match=r"tokenizer.json is missing: it should hold the tokenizer"):
      inference.load(workdir)
  finally:
    (workdir / "aside").rename(tokenizer)


def test_weights_need_a_file_and_a_size(workdir, tmp_path):
  with pytest.raises(RunError, match=r"No file .*b32.safetensors: it should hold weights"):
    inference.load(tmp_path / "b32.safetensors", size="B/32")
  (tmp_path / "b32.pt").touch()
  with pytest.raises(RunError, match=r"b32.pt needs the size of its model, such as --model="):
    inference.load(tmp_path / "b32.pt")
  with pytest.raises(RunError, match=r"b32.pt .* --model=ViT-B-33.* is no model: known are tiny"):
    tokenizer = str(workdir / "tokenizer.json")
    inference.load(tmp_path / "b32.pt", size="ViT-B-33", tokenizer=tokenizer)


def test_weights_with_another_normalization_of_images_are_refused(tmp_path):
  (tmp_path / "clip.pt").touch()
  values = {"preprocess_cfg": {"mean": [0.5, 0.5, 0.5]}}
  (tmp_path / "open_clip_config.json").write_text(json.dumps(values))
  with pytest.raises(RunError, match=r"clip.pt: its images have mean=\[0.5, 0.5, 0.5\]"):
    inference.load(tmp_path / "clip.pt", size="B/32")


@pytest.mark.parametrize("mode", ["shortest", "squash", "longest"])
def test_images_of_weights_are_cropped_or_squashed_as_beside_them(
  workdir, tmp_path, monkeypatch, mode
):
  run = inference.load(workdir)
  monkeypatch.setattr(inference, "load_weights", lambda path, config: run.params)
  (tmp_path / "clip.pt").touch()
  (tmp_path / "open_clip_config.json").write_text(
    json.dumps({"preprocess_cfg": {"resize_mode": mode}})
  )

  def load():
    tokenizer = str(workdir / "tokenizer.json")
    return inference.load(tmp_path / "clip.pt", size=run.size, tokenizer=tokenizer)

  if mode == "longest":
    with pytest.raises(RunError, match=r"clip.pt: its images have resize_mode='longest'"):
      load()
    return
  pixels = np.random.default_rng(0).integers(0, 256, (40, 90, 3), np.uint8)
  Image.fromarray(pixels).save(tmp_path / "wide.png")
  example = {"image": (tmp_path / "wide.png").read_bytes(), "captions": [], "label": 0}
  crop = {"shortest": CentreCrop, "squash": Squash}[mode](run.image_size)
  model = load()
  np.testing.assert_array_equal(
    model.embed_images([tmp_path / "wide.png"]),
    model.embed_pixels(crop(example | {"where": ""})["image"][None]),
  )


@pytest.fixture
def exported(workdir, tmp_path, monkeypatch):
  """The run's parameters as weights with a config and a tokenizer beside them, and their size."""
  run = inference.load(workdir)
  monkeypatch.setattr(inference, "load_weights", lambda path, config: run.params)
  (tmp_path / "clip.pt").touch()
  shutil.copy(workdir / "tokenizer.json", tmp_path)
  config = {"model_cfg": to_open_clip(run.task.model.config)}
  (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
  return tmp_path, run


def test_weights_need_their_own_tokenizer(exported, tmp_path):
  """Another one may have as many tokens."""
  folder, run = exported

  def load(tokenizer=folder / "tokenizer.json"):
    return inference.load(folder / "clip.pt", size=run.size, tokenizer=str(tokenizer))

  assert load().fingerprint()["vocabulary"] == run.fingerprint()["vocabulary"]
  other = make_tokenizer(
    "bpe", ["cats and dogs play football on a beach"], run.tokenizer.vocab_size
  )
  other.save(tmp_path / "other.json")
  with pytest.raises(
    RunError, match=r"other.json' gives words other ids than .* pass --tokenizer="
  ):
    load(tmp_path / "other.json")
  config = json.loads((folder / "open_clip_config.json").read_text())
  config["model_cfg"]["text_cfg"] |= {"pool_type": "eos", "eos_id": 7}
  (folder / "open_clip_config.json").write_text(json.dumps(config))
  with pytest.raises(
    RunError, match=r"it ends texts with the token 7, and the tokenizer .* with 2"
  ):
    load()


def test_a_fingerprint_is_that_of_all_that_makes_a_vector(workdir):
  model = inference.load(workdir)
  mine = model.fingerprint()
  assert mine == inference.load(workdir, batch_size=3).fingerprint()
  params = jax.tree.map(np.array, model.params)
  params["text"]["ln_final"]["bias"][-1] += 1e-3
  recipe = dataclasses.replace(model.task.model.options, recipe="switchback")
  task = model.task._replace(model=model.task.model.clone(options=recipe))
  tokenizer = make_tokenizer("bpe", ["a dog"], 300)
  for field, changed in {
    "weights": model._replace(params=params),
    "computation": model._replace(task=task),
    "vocabulary": model._replace(tokenizer=tokenizer),
  }.items():
    assert {k for k, v in changed.fingerprint().items() if v != mine[k]} == {field}
  assert inference.load(workdir, int8=True).fingerprint()["weights"] != mine["weights"]


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("int8", [False, True])
def test_features_that_are_not_finite_end_what_would_use_them(workdir, pictures, value, int8):
  """A square that overflows leaves zeros: they are no direction either."""
  model, (_, paths) = inference.load(workdir, int8=int8), pictures
  for tower, embed, name in [
    ("image", lambda m: m.embed_images(paths), paths[0]),
    ("text", lambda m: m.embed_texts(TEXTS), "a red circle"),
  ]:
    params = {**model.params, tower: {**model.params[tower]}}
    params[tower]["proj"] = np.full_like(params[tower]["proj"], value)
    message = rf"The {tower} tower gives .* of . {tower}s features that are not finite or all zero"
    with pytest.raises(RunError, match=rf"{message}, the first of them '{name}'"):
      embed(model._replace(params=params))


@pytest.mark.interop
@pytest.mark.slow
def test_weights_of_another_size_name_the_size_that_fits(tmp_path):
  open_clip = import_open_clip()
  import torch

  path = tmp_path / "open_clip.pt"
  torch.save(open_clip.create_model("ViT-S-16").state_dict(), path)
  with pytest.raises(
    RunError, match=r"--model=B/32. The state dict .* are those of SIZES\['S/16'\]"
  ):
    inference.load(path, size="ViT-B-32")


def test_batches_keep_their_order_and_list_what_cannot_be_decoded(pictures):
  pixels, paths = pictures
  contents = [Path(path).read_bytes() for path in paths]
  contents[2:2] = [b"", b"no picture", b""]
  examples = [
    {"where": str(i), "image": content, "captions": [], "label": i}
    for i, content in enumerate(contents)
  ]
  skipped = []
  batches = list(inference.decoded(examples, CentreCrop(32), 3, skipped))
  np.testing.assert_array_equal(np.concatenate([batch["image"] for batch in batches]), pixels)
  assert [list(batch["label"]) for batch in batches] == [[0, 1], [5], [6, 7]]
  assert [where for where, _ in skipped] == ["2", "3", "4"]
  with pytest.raises(ValueError, match="The image of 2 cannot be decoded"):
    list(inference.decoded(examples, CentreCrop(32), 3))
  assert list(inference.decoded([], CentreCrop(32), 3)) == []


def test_a_folder_without_a_run_is_named(tmp_path):
  with pytest.raises(RunError, match=f"{tmp_path} holds no run"):
    inference.load(tmp_path)
  (tmp_path / "open_clip_model.safetensors").touch()
  with pytest.raises(RunError, match=r"For the weights pass .*/open_clip_model.safetensors"):
    inference.load(tmp_path)


def test_another_tokenizer_json_than_the_run_s_is_refused(workdir):
  path = workdir / "tokenizer.json"
  whole = path.read_text()
  path.write_text(whole + "\n")
  try:
    with pytest.raises(RunError, match=r"tokenizer.json is not the one that this run trained with"):
      inference.load(workdir)
  finally:
    path.write_text(whole)
