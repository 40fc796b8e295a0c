import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clip_case import MICRO, clip

from sbjax.linear.quantized_dot import quantized_dot
from sbjax.models.clip import CLIP
from sbjax.models.sizes import SIZES, TextConfig, VisionConfig
from sbjax.models.transformer import BlockOptions
from sbjax.recipes import FP8_TENSORWISE, FULL, SWITCHBACK
from train import zero_shot
from train.config import MeshConfig
from train.data.preprocessing import MEAN, STD, normalize
from train.errors import RunError
from train.parallel.sharding import make_mesh, parameter_shardings
from train.task import CLIPTask
from train.zero_shot import accuracy, evaluate, make_encoders, recall, zero_shot_classifier

KS = (1, 5, 10)


def naive_recall(image_features, text_features, owners, ks=KS):
  """Recall by its definition, query by query; of equal candidates the first ranks higher."""
  scores = {}
  similarity = image_features @ text_features.T
  for k in ks:
    hits = [
      any(owners[m] == n for m in np.argsort(-similarity[n], kind="stable")[:k])
      for n in range(len(image_features))
    ]
    scores[f"image_to_text_recall@{k}"] = np.mean(hits)
    hits = [
      owners[m] in np.argsort(-similarity[:, m], kind="stable")[:k]
      for m in range(len(text_features))
    ]
    scores[f"text_to_image_recall@{k}"] = np.mean(hits)
  return scores


def integers(*shape, seed=0):
  """Small integers: their dot products are exact, and many are equal."""
  return np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32)


@pytest.mark.parametrize("images, texts", [(40, 130), (7, 6), (1, 3)])
def test_recall_equals_its_definition_with_ties_and_several_captions(images, texts):
  image_features, text_features = integers(images, 6), integers(texts, 6, seed=1)
  owners = np.random.default_rng(2).integers(0, images, texts)  # Some images have no text.
  text_features += image_features[owners]
  expected = naive_recall(image_features, text_features, owners)
  assert recall(image_features, text_features, owners) == pytest.approx(expected, rel=1e-6)


def test_images_without_a_caption_do_not_count_in_recall():
  rows = np.eye(3, dtype=np.float32)
  encoders = types.SimpleNamespace(image=None, text=None, mesh=None, cut=lambda texts: texts)
  batch = {"image": rows, "captions": [["0"], [], ["2"]], "label": np.full(3, -1)}
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(zero_shot, "encode_rows", lambda params, mesh, size, encoder, rows: rows)
    tokenize = lambda texts: rows[[int(text) for text in texts]]  # noqa: E731
    scores = evaluate(encoders, None, tokenize, [batch], batch_size=3)
  assert scores["image_to_text_recall@1"] == scores["text_to_image_recall@1"] == 1


@pytest.mark.parametrize("tower", ["image", "text"])
@pytest.mark.parametrize("classes", [(), ("0", "1")])
def test_features_that_are_not_finite_are_no_scores(tower, classes):
  rows = {"image": np.eye(3, dtype=np.float32), "text": np.eye(3, dtype=np.float32)}
  rows[tower][1] = np.nan
  encoders = types.SimpleNamespace(image=None, text=None, mesh=None, cut=lambda texts: texts)
  batch = {"image": rows["image"], "captions": [["0"], ["1"], ["2"]], "label": np.arange(3) % 2}
  first = "1" if tower == "image" else "'1'"
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(zero_shot, "encode_rows", lambda params, mesh, size, encoder, rows: rows)
    tokenize = lambda texts: rows["text"][[int(text) for text in texts]]  # noqa: E731
    arguments = {"class_names": classes, "templates": ["{}"], "retrieval": not classes}
    with pytest.raises(RunError, match=f"The {tower} tower gives 1 of .* first of them {first}"):
      evaluate(encoders, None, tokenize, [batch], batch_size=3, **arguments)


def test_recall_of_known_features():
  image_features = np.eye(3, dtype=np.float32)
  # Two captions for each image. One of image 0's is nearer to image 1; both of image 2's are
  # nearer to other images.
  text_features = np.float32(
    [[2, 0, 0], [0, 0.5, 0], [0, 2, 0], [0, 1, 0], [1, 0, 0], [0, 0.8, 0.6]]
  )
  owners = np.array([0, 0, 1, 1, 2, 2])
  scores = recall(image_features, text_features, owners, ks=(1, 2))
  assert scores == pytest.approx(
    {
      "image_to_text_recall@1": 1.0,  # One caption is enough: 0.6 beats the others' 0.
      "image_to_text_recall@2": 1.0,
      "text_to_image_recall@1": 3 / 6,
      "text_to_image_recall@2": 5 / 6,  # Not (1, 0, 0): image 1 is as far as 2, and comes first.
    }
  )


def test_equal_features_have_the_recall_of_chance():
  ones = np.ones((100, 4), np.float32)
  scores = recall(ones, ones, np.arange(100))
  assert scores == pytest.approx(
    {f"{way}_recall@{k}": k / 100 for way in ("image_to_text", "text_to_image") for k in KS}
  )


def test_recall_does_not_depend_on_the_chunk_size():
  queries, candidates = integers(37, 5), integers(21, 5, seed=1)
  owners = np.arange(37) % 21
  whole = zero_shot._hits(queries, owners, candidates, np.arange(21), 10, chunk=37)
  for chunk in (1, 8, 64):
    hits = zero_shot._hits(queries, owners, candidates, np.arange(21), 10, chunk=chunk)
    np.testing.assert_array_equal(hits, whole)


@pytest.mark.parametrize("classes", [3, 5, 6, 20])
def test_accuracy_is_the_share_of_images_whose_class_is_in_the_top_k(classes, monkeypatch):
  monkeypatch.setattr(zero_shot, "_AT_ONCE", 7)  # of 50: the last part is smaller
  features, classifier = integers(50, 4), integers(classes, 4, seed=1)
  labels = np.random.default_rng(2).integers(-1, classes, 50)
  order = np.argsort(-(features @ classifier.T), axis=1, kind="stable")[labels >= 0]
  known = labels[labels >= 0, None]
  expected = {"top1": np.mean(order[:, 0] == known[:, 0])}
  if classes >= 5:
    expected["top5"] = np.mean((order[:, :5] == known).any(axis=1))
  assert accuracy(features, labels, classifier) == pytest.approx(expected, rel=1e-6)


def test_an_image_without_finite_features_is_wrong():
  features = np.full((2, 4), np.nan, np.float32)
  assert accuracy(features, np.array([0, 1]), integers(6, 4)) == {"top1": 0, "top5": 0}


def test_images_without_any_label_have_no_accuracy():
  assert accuracy(integers(3, 4), np.full(3, -1), integers(2, 4)) == {}


def test_a_class_is_the_mean_direction_of_its_prompts():
  vectors = {
    "a cat": [3, 0, 0], "the cat": [0, 0, 5],
    "a dog": [0, -2, 0], "the dog": [0, -9, 0],
  }  # fmt: skip
  classifier = zero_shot_classifier(
    lambda tokens: np.float32([vectors[t] for t in tokens]),
    list,
    ["cat", "dog"],
    ["a {}", "the {}"],
  )
  np.testing.assert_allclose(classifier, [[0.5**0.5, 0, 0.5**0.5], [0, -1, 0]], rtol=1e-6)


def test_a_template_without_a_placeholder_is_an_error():
  with pytest.raises(ValueError, match=r"'a photo' has no \"\{\}\""):
    zero_shot_classifier(np.asarray, list, ["cat"], ["a photo of a {}", "a photo"])


def test_images_are_normalized_channel_by_channel():
  image = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 3)).astype(np.uint8)
  expected = (np.float64(image) / 255 - [0.48145466, 0.4578275, 0.40821073]) / [
    0.26862954, 0.26130258, 0.27577711,
  ]  # fmt: skip
  np.testing.assert_allclose(normalize(jnp.asarray(image)), expected, rtol=1e-5, atol=1e-6)
  assert MEAN.dtype == STD.dtype == np.float32


CONFIG = dataclasses.replace(
  SIZES["tiny"],
  vision=VisionConfig(image_size=8, patch_size=4, width=16, layers=1, heads=2),
  text=TextConfig(context_length=6, vocab_size=32, width=16, layers=1, heads=2, eot_id=1),
)
NAMES, TEMPLATES = ["ab", "cd", "ef"], ["{}", "x {}"]


def tokenize(texts):
  """Makes one token of each letter."""
  rows = [[*(ord(c) % 30 + 2 for c in text[:5]), 1, 0, 0, 0, 0, 0][:6] for text in texts]
  return np.array(rows, np.int32)


@pytest.fixture(scope="module")
def examples():
  """Eleven images with one to three captions each, and labels for all but one."""
  rng = np.random.default_rng(0)
  return {
    "image": rng.integers(0, 256, (11, 8, 8, 3)).astype(np.uint8),
    "captions": [
      ["".join(rng.choice(list("abcdefgh"), 4)) for _ in range(1 + n % 3)] for n in range(11)
    ],
    "label": np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 0, -1], np.int32),
  }


def in_batches(examples, size):
  return [{k: v[i : i + size] for k, v in examples.items()} for i in range(0, 11, size)]


@pytest.fixture(scope="module")
def model():
  return CLIP(CONFIG, BlockOptions(recipe="switchback", dtype=jnp.float32))


@pytest.fixture(scope="module")
def params(model):
  image, text = jnp.zeros((1, 8, 8, 3)), jnp.zeros((1, 6), jnp.int32)
  return jax.jit(model.init)(jax.random.key(0), image, text)["params"]


@pytest.fixture(scope="module")
def expected(model, params, examples):
  """The metrics from all examples at once."""

  def encode(x, method):
    return np.asarray(jax.jit(lambda x: model.apply({"params": params}, x, method=method))(x))

  texts = [text for texts in examples["captions"] for text in texts]
  owners = np.repeat(np.arange(11), [len(texts) for texts in examples["captions"]])
  prompts = [name for name in NAMES for name in (name, f"x {name}")]
  features = encode(tokenize(texts + prompts), "encode_text")
  images = encode(normalize(jnp.asarray(examples["image"])), "encode_image")
  classifier = zero_shot_classifier(lambda _: features[len(texts) :], tokenize, NAMES, TEMPLATES)
  top = accuracy(images, examples["label"], classifier)
  scores = {"zero_shot_top1": top["top1"], "zero_shot_loss": loss(images, classifier, examples)}
  return recall(images, features[: len(texts)], owners) | scores


def loss(images, classifier, examples):
  """The mean cross-entropy of the labelled examples, with CLIP's first logit scale."""
  log_likelihoods = np.log(np.exp(images @ classifier.T / 0.07))
  log_likelihoods -= np.log(np.exp(log_likelihoods).sum(1, keepdims=True))
  return -np.mean([log_likelihoods[i, label] for i, label in enumerate(examples["label"][:10])])


@pytest.mark.parametrize("devices, fsdp", [(1, 1), (8, 2)])
def test_evaluation_on_any_mesh_equals_one_batch_of_all_examples(
  model, params, examples, expected, devices, fsdp
):
  mesh = make_mesh(MeshConfig(fsdp=fsdp), jax.devices()[:devices])
  scores = evaluate(
    make_encoders(model, mesh),
    jax.device_put(params, parameter_shardings(params, mesh)),
    tokenize,
    in_batches(examples, 4),
    batch_size=4,
    class_names=NAMES,
    templates=TEMPLATES,
    logit_scale=1 / 0.07,
  )
  assert scores == pytest.approx(expected)
  assert all(type(score) is float for score in scores.values())


@pytest.mark.parametrize("recipe", [FULL, SWITCHBACK, FP8_TENSORWISE])
def test_padding_the_last_batch_changes_nothing(recipe):
  rng = np.random.default_rng(1)
  x, w = (np.float32(rng.normal(size=shape)) for shape in ((3, 16), (16, 8)))
  encode = jax.jit(lambda x: quantized_dot(x, w, recipe))
  padded = zero_shot._in_pieces(encode, x / 100, 8)
  np.testing.assert_allclose(padded, encode(x / 100), rtol=1e-6, atol=1e-6)


def test_batches_of_any_size_are_encoded_in_one_shape(model):
  shapes = []

  def encode(x):
    shapes.append(x.shape)
    return x * 2

  rows = np.arange(22.0).reshape(11, 2)
  np.testing.assert_array_equal(zero_shot._in_pieces(encode, rows, 4), rows * 2)
  np.testing.assert_array_equal(zero_shot._in_pieces(encode, rows[:1], 4), rows[:1] * 2)
  assert set(shapes) == {(4, 2)}
  assert make_encoders(model, make_mesh(MeshConfig())) is make_encoders(
    model, make_mesh(MeshConfig())
  )


def fake_encoders():
  return types.SimpleNamespace(
    image=lambda params, x: jnp.mean(x.astype(jnp.float32), (1, 2)),
    text=lambda params, x: x[:, :3].astype(jnp.float32),
    cut=lambda texts: texts,
    mesh=make_mesh(MeshConfig()),
  )


@pytest.mark.parametrize("described", [[], [2], [1, 3]])
def test_samples_are_images_with_captions(examples, described):
  batch = {
    "image": examples["image"][:4],
    "captions": [[f"number {i}"] if i in described else [] for i in range(4)],
  }
  found = zero_shot.nearest_captions(fake_encoders(), None, tokenize, batch, batch_size=4)
  assert [sample.captions for sample in found] == [[f"number {i}"] for i in described]
  assert all(sorted(s.nearest) == [f"number {i}" for i in described] for s in found)


def test_only_metrics_that_the_data_support_are_measured(examples):
  fake = fake_encoders()

  def metrics(**changes):
    batches = in_batches(examples | changes.pop("examples", {}), 4)
    return set(evaluate(fake, None, tokenize, batches, batch_size=4, **changes))

  classes = {"class_names": NAMES, "templates": TEMPLATES}
  recalls = {f"{way}_recall@{k}" for way in ("image_to_text", "text_to_image") for k in KS}
  assert metrics() == recalls
  of_classes = {"zero_shot_top1", "zero_shot_loss"}
  assert metrics(**classes) == recalls | of_classes
  assert metrics(**classes, retrieval=False) == of_classes
  assert metrics(examples={"captions": [[]] * 11}, **classes) == of_classes
  with pytest.raises(ValueError, match="split is empty"):
    evaluate(fake, None, tokenize, [], batch_size=4)


def test_the_loss_has_the_logit_scale_of_the_parameters(examples):
  task, mesh = CLIPTask(clip(recipe="full")), make_mesh(MeshConfig(), jax.devices()[:1])
  size, length = MICRO.vision.image_size, MICRO.text.context_length
  rng = np.random.default_rng(0)
  batch = {"image": rng.integers(0, 256, (2, size, size, 3)).astype(np.uint8), "captions": [[], []]}

  def tokens(texts):
    ids = np.full((len(texts), length), 63, np.int32)
    ids[:, 0] = np.arange(len(texts))
    return ids

  params = jax.jit(task.init)(jax.random.key(0))
  found = [
    task.evaluate(
      params | {"logit_scale": jnp.log(scale)},
      mesh,
      lambda _: None,
      tokens,
      [batch | {"label": np.array([0, 1])}],
      batch_size=2,
      class_names=NAMES,
      templates=["{}"],
    )["zero_shot_loss"]
    for scale in (1e-9, 1.0, 50.0, 100.0, 1e4)
  ]
  assert found[0] == found[1] and found[3] == found[4]  # It is in [1, 100].
  assert len(set(found)) == 3


def test_an_evaluation_compiles_only_what_it_says_beforehand(caplog):
  task, mesh = CLIPTask(clip(recipe="full")), make_mesh(MeshConfig())
  size, length = MICRO.vision.image_size, MICRO.text.context_length
  batch = {"image": np.zeros((2, size, size, 3), np.uint8), "captions": [["a"], ["b"]]}
  batches = [batch | {"label": np.full(2, -1)}] * 3
  compiled = lambda: caplog.text.count("Finished XLA compilation of jit(run)")  # noqa: E731
  seen = []

  def look(compile):
    before = compiled()
    if compile:
      compile()
    seen.append((before, compiled()))

  params = jax.jit(task.init)(jax.random.key(0))
  caplog.set_level("WARNING")  # A program's own level may stand from another test.
  with jax.log_compiles():
    tokens = lambda texts: np.full((len(texts), length), 63, np.int32)  # noqa: E731
    task.evaluate(params, mesh, look, tokens, batches, batch_size=2)
  assert compiled() == 2
  assert seen == [(0, 1), (1, 1), (1, 1), (1, 2)]  # Three batches of images, and all texts.
