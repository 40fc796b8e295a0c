"""examples/trained_models: two encoders from folders as transformers saves them; the program."""

import json
import sys

import jax
import numpy as np
import pytest
from PIL import Image

pytest.importorskip("safetensors")
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from examples.trained_models import encoders, inputs, rounding

WIDTH, LAYERS, WORDS = 32, 1, ["[PAD]", *"abcdefgh"]


def linear(names, rows, columns, random):
  """Weights and biases of the rows and columns of linear layers."""
  shapes = {f"{name}.weight": (rows, columns) for name in names}
  shapes |= {f"{name}.bias": (rows,) for name in names}
  return {name: random.normal(0, columns**-0.5, shape) for name, shape in shapes.items()}


def save(folder, kind, tensors):
  folder.mkdir()
  config = {"model_type": kind, "num_attention_heads": 2, "layer_norm_eps": 1e-6}
  (folder / "config.json").write_text(json.dumps(config))
  tensors = {name: np.asarray(x, np.float32) for name, x in tensors.items()}
  save_file(tensors, folder / "model.safetensors")
  return folder


def bert(folder):
  random, tensors = np.random.default_rng(0), {}
  sizes = {"word": len(WORDS), "position": 40, "token_type": 2}
  for name, rows in sizes.items():
    tensors[f"embeddings.{name}_embeddings.weight"] = random.normal(0, 1, (rows, WIDTH))
  norms = ["embeddings.LayerNorm"]
  for layer in (f"encoder.layer.{i}" for i in range(LAYERS)):
    inner = [f"{layer}.attention.self.{part}" for part in ("query", "key", "value")]
    tensors |= linear([*inner, f"{layer}.attention.output.dense"], WIDTH, WIDTH, random)
    tensors |= linear([f"{layer}.intermediate.dense"], 4 * WIDTH, WIDTH, random)
    tensors |= linear([f"{layer}.output.dense"], WIDTH, 4 * WIDTH, random)
    norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
  tensors |= {f"{name}.weight": np.ones(WIDTH) for name in norms}
  save(folder, "bert", tensors | {f"{name}.bias": np.zeros(WIDTH) for name in norms})
  tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[PAD]"))
  tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
  tokenizer.save(str(folder / "tokenizer.json"))
  return folder


def dinov2(folder):
  random = np.random.default_rng(1)
  e, tensors = "embeddings", {}
  tensors[f"{e}.patch_embeddings.projection.weight"] = random.normal(0, 0.1, (WIDTH, 3, 4, 4))
  tensors[f"{e}.patch_embeddings.projection.bias"] = np.zeros(WIDTH)
  tensors[f"{e}.cls_token"] = random.normal(0, 1, (1, 1, WIDTH))
  tensors[f"{e}.position_embeddings"] = random.normal(0, 1, (1, 1 + 9, WIDTH))
  norms = ["layernorm"]
  for layer in (f"encoder.layer.{i}" for i in range(LAYERS)):
    inner = [f"{layer}.attention.attention.{part}" for part in ("query", "key", "value")]
    tensors |= linear([*inner, f"{layer}.attention.output.dense"], WIDTH, WIDTH, random)
    tensors |= linear([f"{layer}.mlp.fc1"], 4 * WIDTH, WIDTH, random)
    tensors |= linear([f"{layer}.mlp.fc2"], WIDTH, 4 * WIDTH, random)
    tensors |= {f"{layer}.layer_scale{i}.lambda1": np.ones(WIDTH) for i in (1, 2)}
    norms += [f"{layer}.norm1", f"{layer}.norm2"]
  tensors |= {f"{name}.weight": np.ones(WIDTH) for name in norms}
  return save(folder, "dinov2", tensors | {f"{name}.bias": np.zeros(WIDTH) for name in norms})


def texts(file, count):
  random = np.random.default_rng(2)
  lines = (["".join(random.choice(list("abcdefgh"), 6)) for _ in range(2)] for _ in range(count))
  file.write_text("".join("\t".join(map(" ".join, pair)) + "\n" for pair in lines))
  return file


def photos(folder, count):
  folder.mkdir()
  random = np.random.default_rng(3)
  for i in range(count):
    pixels = random.integers(0, 256, (20, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / f"{i:02}.png")
  return folder


@pytest.fixture(autouse=True)
def as_a_user_has_it(strict_jax):
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    yield


def test_padding_does_not_change_the_features_of_a_text(tmp_path):
  _, encode, params = encoders.load(bert(tmp_path / "bert"))
  ids, mask = np.array([[1, 2, 3, 4]]), np.ones((1, 4), bool)
  padded = {"ids": np.pad(ids, ((0, 0), (0, 3))), "mask": np.pad(mask, ((0, 0), (0, 3)))}
  run = jax.jit(encode)
  np.testing.assert_allclose(
    run(params, {"ids": ids, "mask": mask}), run(params, padded), atol=1e-5
  )


def test_positions_of_the_trained_size_are_the_checkpoints(tmp_path):
  """The class token sees patches at their places: other places give other features."""
  _, encode, params = encoders.load(dinov2(tmp_path / "dinov2"))
  run, image = jax.jit(encode), np.random.default_rng(0).normal(size=(1, 12, 12, 3))
  name = "embeddings.position_embeddings"
  positions = np.asarray(params[name])
  # Both patches and positions in another order are the same set of tokens.
  turned = np.concatenate(
    [positions[:, :1], positions[:, 1:].reshape(1, 3, 3, -1)[:, ::-1].reshape(1, 9, -1)], 1
  )
  blocks = image.reshape(1, 3, 4, 12, 3)[:, ::-1].reshape(image.shape)
  same = run(params | {name: turned}, blocks)
  np.testing.assert_allclose(run(params, image), same, atol=1e-5)
  assert np.abs(np.asarray(run(params, blocks)) - same).max() > 1e-3


@pytest.mark.parametrize("kind", ["bert", "dinov2"])
def test_the_program_rounds_each_linear_layer_and_adds_a_line_for_each_recipe(
  kind, tmp_path, monkeypatch, capsys
):
  model = {"bert": bert, "dinov2": dinov2}[kind](tmp_path / kind)
  given = texts(tmp_path / "t", 24) if kind == "bert" else photos(tmp_path / "photos", 24)
  out = tmp_path / "out.jsonl"
  arguments = [model, given, f"--out={out}", "--count=24", "--batch=4", "--image_size=12"]
  arguments += ["--recipes", "switchback", "full", "suggest_rules"]
  arguments += ["--no-critical_batch"] * (kind == "dinov2")
  monkeypatch.setattr(sys, "argv", ["rounding", *map(str, arguments)])
  rounding.main()
  int8, full, rules = map(json.loads, out.read_text().splitlines())
  assert (int8["recipe"], full["recipe"]) == ("switchback", "full")
  assert rules["rules"]["*"] in ("switchback", "switchback_q", "full")
  assert rules["gradient_cosine"][0] > 0.99  # 0.995 for the batch that they were found on.
  for name in ("output_cosine", "gradient_cosine"):
    assert 0.9 < int8[name][0] < full[name][0] < 1 - 1e-9, name
  assert int8["alone"]
  assert ("critical_batch" in int8) == (kind == "bert")
  assert int8["outputs"] == (48 if kind == "bert" else 24)

  _, encode, params = encoders.load(model)
  whole, *_ = inputs.texts(model, given, 2) if kind == "bert" else inputs.images(given, 2, 12)
  program = str(jax.make_jaxpr(rounding.rounded(encode, "switchback"))(params, whole))
  assert program.count("preferred_element_type=int32") == 6 * LAYERS


def test_a_model_of_another_type_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"model_type='gpt2' must be 'bert' or 'dinov2'"):
    encoders.load(save(tmp_path / "gpt2", "gpt2", {"x": np.ones(1)}))


def test_a_line_without_a_second_sentence_is_named(tmp_path):
  (tmp_path / "t").write_text("a b\tb a\na b c\n")
  with pytest.raises(ValueError, match="line 2, must have two sentences"):
    inputs.texts(bert(tmp_path / "bert"), tmp_path / "t", 4)
