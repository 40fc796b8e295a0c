"""SigLIP's models, losses, gradients and tokenizers are those of transformers and open_clip."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clip_case import drawn
from open_clip_case import import_open_clip, perturb
from PIL import Image
from tokenizer_case import NASTY

from sbjax.interop.config_files import config_from_dict, open_clip_names, read_config
from sbjax.interop.weights import load_weights
from sbjax.models.clip import CLIP
from sbjax.models.sizes import SIZES, CLIPConfig
from sbjax.models.transformer import BlockOptions
from train import export
from train.config import Config, MeshConfig, ModelConfig
from train.data.tokenizer import TOKENIZER_FILES, make_tokenizer
from train.errors import RunError
from train.inference import Model, load
from train.loss import LOSSES
from train.parallel.sharding import make_mesh
from train.task import CLIPTask, make_task

CAPTIONS = [
  "two brown dogs run on a beach, and a third one waits",
  "children play football near red cars; it's sunny!",
  "a small yellow ring in the middle of a dark picture",
  "the man's blue hat (left) has 3 stars and 12 stripes",
] * 5
# Where transformers' SiglipTokenizer cleans otherwise than open_clip: HTML, broken encodings, "_",
# and no text at all.
PLAIN = [
  "A dog, RUNNING!",
  "  two\tspaces\n",
  "it's 3.5 stars (of 5)",
  "über Straße ½",
  "dog " * 99,
]


@pytest.fixture(scope="module")
def transformers():
  import_open_clip()
  return pytest.importorskip("transformers")


def siglip(transformers):
  """A small model of transformers with random weights."""
  shared = dict(hidden_size=32, num_attention_heads=2, num_hidden_layers=2)
  vision = shared | dict(intermediate_size=86, image_size=16, patch_size=4)
  text = shared | dict(intermediate_size=50, max_position_embeddings=8, vocab_size=64)
  model = transformers.SiglipModel(
    transformers.SiglipConfig(text_config=text, vision_config=vision)
  ).eval()
  perturb(model)
  return model


@pytest.mark.parametrize("scan", [True, False])
def test_the_loss_and_its_gradients_equal_transformers(transformers, scan):
  import torch

  model = siglip(transformers)
  rng = np.random.default_rng(0)
  image = rng.integers(0, 256, (6, 16, 16, 3), np.uint8)
  ids = rng.integers(0, 64, (6, 8), np.int32)
  pixels = torch.from_numpy((np.float32(image) / 255 - 0.5) / 0.5).permute(0, 3, 1, 2)
  out = model(input_ids=torch.from_numpy(ids).long(), pixel_values=pixels, return_loss=True)
  out.loss.backward()
  config = config_from_dict(model.config.to_dict())
  params = load_weights(model.state_dict(), config, scan=scan)
  gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
  options = BlockOptions(dtype=jnp.float32, recipe="full", scan=scan)
  task = CLIPTask(CLIP(config, options, init_logit_bias=-10.0), LOSSES["siglip"])
  batch = {"image": image, "text": ids}

  def loss(params):
    out = task.apply({"params": params}, batch, jax.random.key(0), 0)
    return task.loss(out, ())[0]

  value, gradient = jax.jit(jax.value_and_grad(loss))(params)
  np.testing.assert_allclose(value, out.loss.item(), rtol=1e-5)
  jax.tree.map(
    lambda got, want: np.testing.assert_allclose(got, want, atol=1e-4),
    gradient,
    load_weights(gradients, config, scan=scan),
  )


@pytest.fixture(scope="module")
def folder(transformers, tmp_path_factory):
  """A folder with a tokenizer as google's SigLIP has it, but for what its model has seen."""
  spiece = pytest.importorskip("sentencepiece", reason="needs the `interop` extra")
  folder = tmp_path_factory.mktemp("siglip")
  special = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
  spiece.SentencePieceTrainer.train(
    sentence_iterator=iter(CAPTIONS),
    model_prefix=str(folder / "spiece"),
    vocab_size=64,
    minloglevel=2,
    **special,
  )
  return folder


@pytest.mark.parametrize("length", [64, 8])
def test_a_spiece_model_gives_the_ids_of_transformers(transformers, folder, length):
  ours = make_tokenizer(str(folder / "spiece.model"), None, 0, "last")
  theirs = transformers.SiglipTokenizer(str(folder / "spiece.model"))
  options = {"padding": "max_length", "truncation": True, "return_tensors": "np"}
  ids = theirs(PLAIN, max_length=length, **options).input_ids
  np.testing.assert_array_equal(ours(PLAIN, length), ids)


def test_siglip_s_files_give_the_ids_of_open_clip(transformers, folder, tmp_path):
  """Of a spiece.model, and of the tokenizer.json that transformers makes of it."""
  open_clip = import_open_clip()
  (tmp_path / "spiece.model").write_bytes((folder / "spiece.model").read_bytes())
  config = {"tokenizer_class": "T5Tokenizer", "extra_ids": 0}
  config |= {"pad_token": "</s>", "eos_token": "</s>", "unk_token": "<unk>"}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
  theirs = open_clip.tokenizer.HFTokenizer(str(tmp_path), context_length=32, clean="canonicalize")
  theirs.save_pretrained(tmp_path)
  for name in TOKENIZER_FILES:
    ours = make_tokenizer(str(tmp_path / name), None, 0, "last")
    texts = [*NASTY, "a \u00b4 dog \u00b8"]  # NFKC makes spaces of the signs.
    np.testing.assert_array_equal(ours(texts, 32), theirs(texts).numpy())
    assert ours.vocab_size == 64


def test_another_sentencepiece_model_or_none_is_named(folder, tmp_path):
  import sentencepiece

  captions = iter(CAPTIONS)
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=captions,
    model_prefix=str(tmp_path / "bpe"),
    model_type="bpe",
    vocab_size=64,
    minloglevel=2,
  )
  with pytest.raises(ValueError, match=r"bpe.model is a SentencePiece model, and not Unigram"):
    make_tokenizer(str(tmp_path / "bpe.model"), None, 0, "last")
  for contents in (b"", b"no model", (folder / "spiece.model").read_bytes()[:100]):
    (tmp_path / "none.model").write_bytes(contents)
    with pytest.raises(ValueError, match=r"none.model is not a SentencePiece model"):
      make_tokenizer(str(tmp_path / "none.model"), None, 0, "last")


def test_an_exported_siglip_tokenizer_gives_transformers_the_same_ids(
  transformers, folder, tmp_path
):
  ours = make_tokenizer(str(folder / "spiece.model"), None, 0, "last")
  tokenizer, config = ours.for_transformers()
  (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"model_max_length": 16}))
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
  texts = [*PLAIN, "", "snake_case_words"]
  ids = theirs(texts, padding="max_length", truncation=True, return_tensors="np").input_ids
  np.testing.assert_array_equal(ours(texts, 16), ids)


@pytest.mark.slow
def test_open_clip_loads_an_exported_siglip_and_we_what_it_loads(
  transformers, folder, tmp_path, monkeypatch
):
  open_clip = import_open_clip()
  import torch

  vision = read_config("ViT-B-32-SigLIP2-256").vision
  text = dataclasses.replace(SIZES["tiny-siglip"].text, vocab_size=64, eot_id=1)
  config = CLIPConfig(768, vision, text)
  clip = CLIP(config, BlockOptions(dtype=jnp.float32, recipe="full"), init_logit_bias=-10.0)
  arguments = jnp.zeros((1, 256, 256, 3)), jnp.zeros((1, text.context_length), jnp.int32)
  params = drawn(jax.eval_shape(clip.init, jax.random.key(0), *arguments)["params"])
  tokenizer = make_tokenizer(str(folder / "spiece.model"), None, 0, "last")
  mesh = make_mesh(MeshConfig(), jax.devices()[:1])
  run = Model("", None, CLIPTask(clip, LOSSES["siglip"]), params, tokenizer, mesh, 2)
  monkeypatch.setattr(export, "load", lambda *_, **__: run)
  out = export.export(tmp_path, "open_clip")
  model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{out}")
  assert tuple(transform.transforms[-1].mean) == tuple(transform.transforms[-1].std) == (0.5,) * 3
  texts = [*PLAIN, "snake_case &amp; more"]
  ids = open_clip.get_tokenizer(f"local-dir:{out}")(texts)
  np.testing.assert_array_equal(ids.numpy(), run.tokenize(texts))
  pixels = np.random.default_rng(0).integers(0, 256, (1, 256, 256, 3), np.uint8)
  image = transform(Image.fromarray(pixels[0]))[None]
  with torch.no_grad():
    want, of_texts = model.eval().encode_image(image, True), model.encode_text(ids, True)
  weights = out / "open_clip_model.safetensors"
  with pytest.raises(RunError, match=r"it is a SigLIP, whose tokenizer is not 'clip'"):
    load(weights, size=str(out))
  loaded = load(weights, size=str(out), tokenizer=str(out / "tokenizer.json"))
  np.testing.assert_allclose(loaded.embed_pixels(pixels), want.numpy(), atol=1e-4)
  np.testing.assert_allclose(loaded.embed_texts(texts), of_texts.numpy(), atol=1e-4)


def test_training_takes_all_of_open_clip_s_siglips_and_no_clipa():
  import_open_clip()
  names = [name for name in open_clip_names() if "SigLIP" in name]
  assert {"ViT-B-16-SigLIP", "ViT-L-16-SigLIP-256", "ViT-SO400M-14-SigLIP"} < {*names}
  for name in names:
    task = make_task(Config(model=ModelConfig(size=name), loss="siglip"))
    assert task.model.config == read_config(name)
  with pytest.raises(ValueError, match=r"size='ViT-H-14-CLIPA' is a CLIPA. Training does not have"):
    make_task(Config(model=ModelConfig(size="ViT-H-14-CLIPA")))
