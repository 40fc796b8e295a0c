"""A small SigLIP with a vocabulary of SigLIP's kind trains, goes on, embeds, and is exported."""

import json

import jax
import loop_case
import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from sbjax.interop.config_files import read_config
from sbjax.interop.weights import load_weights
from train import export, loop
from train.data.preprocessing import SIGLIP, normalize
from train.inference import load
from train.run import make_run

pytestmark = [pytest.mark.standard_promotion, pytest.mark.slow]  # The first as optax needs.

TEXTS = ["A red circle!", "a blue ring", "a green_star"]
OPTIONS = {"model.size": "tiny-siglip", "loss": "siglip", "model.backend": "xla", "batch_size": 16}
OPTIONS |= {"model.recipe": "switchback", "model.remat": "none", "eval_batch_size": 96}


def vocabulary(path):
  """A tokenizer.json as T5 has it: Unigram, without a start token, "</s>" at 1."""
  words = ["a", "red", "blue", "green", "circle", "ring", "star", "dark", "picture", "of", "there"]
  tokenizer = tokenizers.Tokenizer(models.Unigram())
  tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
  special = ["<pad>", "</s>", "<unk>"]
  trainer = trainers.UnigramTrainer(
    vocab_size=60, special_tokens=special, unk_token="<unk>", show_progress=False
  )
  tokenizer.train_from_iterator([" ".join(words)] * 9 + words, trainer)
  tokenizer.save(str(path))
  return str(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """The folder of a run of six steps in two starts, on one device, and its config by options."""
  folder = tmp_path_factory.mktemp("siglip")
  own = {**OPTIONS, "data.tokenizer": vocabulary(folder / "own.json"), "data.flip": True}

  def config(**options):
    return loop_case.config(folder / "data", **{**own, **options})

  one = jax.devices()[:1]
  with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
    patch.setattr(jax, "devices", lambda *_: one)
    for steps in (3, 6):
      loop.train(config(steps=steps), folder / "run")
  return folder, config


def test_a_siglip_trains_and_is_scored(trained):
  folder, _ = trained
  records = loop_case.records(folder / "run")
  losses = [record["loss"] for record in records if "loss" in record]
  assert len(losses) == 6 and losses[-1] < losses[0]
  assert {"eval/zero_shot_top1", "eval/image_to_text_recall@1"} <= {*records[-1]}
  model = load(folder / "run")
  row = model.tokenize(["a Red, circle"])[0]
  words = [row[i] for i in range(len(row)) if row[i] != 1]
  np.testing.assert_array_equal(row, [*words, *[1] * (len(row) - len(words))])
  np.testing.assert_array_equal(row, model.tokenize(["a red circle"])[0])
  assert model.params["logit_bias"] != -10


def test_its_images_are_normalized_as_siglip_s(trained):
  folder, _ = trained
  model = load(folder / "run")
  pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
  np.testing.assert_allclose(normalize(pixels, SIGLIP), pixels / 127.5 - 1, atol=1e-6)
  apply = jax.jit(model.task.model.apply, static_argnames="method")
  want = apply({"params": model.params}, normalize(pixels, SIGLIP), method="encode_image")
  np.testing.assert_allclose(model.embed_pixels(pixels), want, atol=1e-3)


def test_a_run_from_its_export_begins_with_its_parameters(trained, tmp_path, capsys):
  pytest.importorskip("safetensors", reason="needs the `interop` extra")
  folder, config = trained
  out = export.export(folder / "run", "hf", tmp_path / "hf")
  model = load(folder / "run")
  assert read_config(out).vision == model.task.model.config.vision
  jax.tree.map(
    np.testing.assert_array_equal, load_weights(out, read_config(out), scan=True), model.params
  )
  images = json.loads((out / "preprocessor_config.json").read_text())
  assert images["image_mean"] == images["image_std"] == [0.5] * 3
  tuned = config(init=str(out), **{"model.size": str(out)})
  capsys.readouterr()
  for name in ("tuned", "plain", "other"):
    (tmp_path / name).mkdir()
  state = make_run(tuned, tmp_path / "tuned").new_state()
  jax.tree.map(np.testing.assert_array_equal, state.params, model.params)
  assert capsys.readouterr().err == ""
  plain = config(init=str(out), loss="softmax", **{"model.size": str(out)})
  assert "logit_bias" not in make_run(plain, tmp_path / "plain").new_state().params
  other = config(init=str(out), **{"data.tokenizer": "bpe"})
  with pytest.raises(ValueError, match=r"data.tokenizer='bpe' gives words other ids"):
    make_run(other, tmp_path / "other").new_state()


def test_an_export_of_a_softmax_run_has_a_bias_of_zero(trained):
  folder, _ = trained
  model = load(folder / "run")
  params = {name: x for name, x in model.params.items() if name != "logit_bias"}
  state = export._hf(model._replace(params=params))["model.safetensors"]
  np.testing.assert_array_equal(state["logit_bias"], [0.0])


@pytest.mark.interop
def test_transformers_loads_its_export(trained, tmp_path):
  from open_clip_case import import_open_clip

  import_open_clip()
  transformers = pytest.importorskip("transformers")
  import torch

  folder, _ = trained
  model = load(folder / "run", dtype="float32")
  out = export.export(folder / "run", "hf", tmp_path / "hf")
  theirs = transformers.SiglipModel.from_pretrained(out).eval()
  tokenizer = transformers.AutoTokenizer.from_pretrained(out)
  ids = tokenizer(TEXTS, padding="max_length", truncation=True, return_tensors="pt").input_ids
  np.testing.assert_array_equal(ids.numpy(), model.tokenize(TEXTS))
  pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8)
  plain = model.task.with_recipe("full").model
  want = plain.apply({"params": model.params}, normalize(pixels, SIGLIP), ids.int().numpy())
  images = transformers.AutoImageProcessor.from_pretrained(out)([*pixels], return_tensors="pt")
  with torch.no_grad():
    got = theirs(input_ids=ids, pixel_values=images.pixel_values)
  np.testing.assert_allclose(got.image_embeds.numpy(), want["image_features"], atol=1e-4)
  np.testing.assert_allclose(got.text_embeds.numpy(), want["text_features"], atol=1e-4)
  np.testing.assert_allclose(theirs.logit_bias.item(), want["logit_bias"], rtol=1e-6)
