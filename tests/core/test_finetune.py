"""Initial weights, frozen parameters, learning rates by path."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import loop_case
import numpy as np
import optax
import pytest
from clip_case import MICRO, clip, drawn, pairs, random_params
from flax_case import bitwise

from sbjax.interop import weights as convert
from sbjax.interop.config_files import to_open_clip
from sbjax.interop.weights import state_dict
from train import loop
from train.config import Config, ModelConfig, OptimizerConfig
from train.data.tokenizer import make_tokenizer
from train.finetune import (
  check_init,
  check_patterns,
  check_vocabulary,
  initial_params,
  parse_rates,
  scale_by_path,
  stop_gradients,
)
from train.inference import load
from train.loop import jit_train_step
from train.optimizer import cast_matrices, make_optimizer, matrix_dtype
from train.run import Run, make_run

pytestmark = pytest.mark.standard_promotion  # As optax needs.

NEW_STATE = Run.new_state
NAMES = [
  "image/blocks/fc1/kernel",
  "image/proj",
  "text/proj",
  "text/token_embedding/embedding",
  "logit_scale",
]


def config(**fields):
  return Config(model=ModelConfig(size="tiny"), **fields)


def tree():
  return {
    "image": {"proj": jnp.ones((2, 3))},
    "text": {"proj": jnp.full((3, 2), 2.0)},
    "logit_scale": jnp.asarray(1.0),
  }


@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
def test_frozen_parameters_stand_still_and_have_no_state(clip_norm):
  """The others learn as if the frozen ones did not exist."""
  fields = OptimizerConfig(learning_rate=0.1, warmup_steps=0, clip_norm=clip_norm)
  params, alone = tree(), {"text": tree()["text"]}
  gradients = jax.tree.map(lambda p: 3 * p, params)
  optimizer, _ = make_optimizer(fields, 10, freeze=("image/.*", "logit_scale"))
  state = optimizer.init(params)
  sizes = {leaf.size for leaf in jax.tree.leaves(state)}
  assert sizes <= {1, 6} and sum(leaf.size == 6 for leaf in jax.tree.leaves(state)) == 2
  updates, _ = bitwise(optimizer.update)(gradients, state, params)
  np.testing.assert_array_equal(updates["image"]["proj"], 0)
  assert updates["logit_scale"] == 0
  own, _ = make_optimizer(fields, 10)
  expected, _ = bitwise(own.update)({"text": gradients["text"]}, own.init(alone), alone)
  np.testing.assert_array_equal(updates["text"]["proj"], expected["text"]["proj"])


def test_the_first_rate_that_matches_scales_an_update():
  rates = parse_rates(("image/.*=0.5", ".*/proj=0.25"))
  params = tree()
  updates, _ = scale_by_path(rates).update(params, optax.EmptyState())
  np.testing.assert_array_equal(updates["image"]["proj"], 0.5)
  np.testing.assert_array_equal(updates["text"]["proj"], 0.5)
  assert updates["logit_scale"] == 1


def test_a_rate_scales_the_optimizer_s_update():
  fields = OptimizerConfig(learning_rate=0.1, warmup_steps=0)
  params = tree()
  both = [
    make_optimizer(dataclasses.replace(fields, learning_rate_scale=scale), 10)[0]
    for scale in ((), ("text/.*=0.5",))
  ]
  plain, scaled = (
    jax.jit(lambda params, o=o: o.update(params, o.init(params), params)[0])(params) for o in both
  )
  np.testing.assert_array_equal(scaled["text"]["proj"], 0.5 * plain["text"]["proj"])
  np.testing.assert_array_equal(scaled["image"]["proj"], plain["image"]["proj"])


@pytest.mark.slow
def test_a_frozen_tower_gets_no_gradient_and_the_other_one_its_own():
  model, params, (image, text) = clip(), random_params(), pairs()

  def loss(params, freeze):
    out = model.apply({"params": stop_gradients(freeze, params)}, image, text)
    return jnp.sum(out["image_features"] * out["text_features"])

  gradient = bitwise(jax.grad(loss), static_argnums=1)
  free, locked = (gradient(params, freeze) for freeze in ((), ("image/.*",)))
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(locked["image"]))
  jax.tree.map(np.testing.assert_array_equal, locked["text"], free["text"])
  assert any(np.any(leaf) for leaf in jax.tree.leaves(free["image"]))


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"freeze": ("image",)}, r"freeze: the pattern 'image' matches no parameter.*image/proj"),
    ({"freeze": ("visual/.*", "text/.*")}, "'visual/\\.\\*' matches no parameter"),
    ({"freeze": (".*",)}, "leaves no parameter to train"),
    ({"freeze": ("(",)}, r"freeze='\(' is no regular expression"),
    (
      {"optimizer": OptimizerConfig(learning_rate_scale=("txt/.*=1",))},
      r"learning_rate_scale: the pattern 'txt/\.\*' matches no parameter.*text/proj",
    ),
    ({"optimizer": OptimizerConfig(learning_rate_scale=("text/.*",))}, "a pattern and a factor"),
    ({"optimizer": OptimizerConfig(learning_rate_scale=("a=-1",))}, "factor of 0 or more"),
  ],
)
def test_a_wrong_pattern_is_named_with_paths_near_it(fields, message):
  with pytest.raises(ValueError, match=message):
    check_patterns(config(**fields), NAMES)


def export(folder, model_config=MICRO):
  """A folder as `train.export` writes it, but for the tokenizer; its weights are read by a fake."""
  (folder / "open_clip_model.safetensors").touch()
  (folder / "open_clip_config.json").write_text(
    json.dumps({"model_cfg": to_open_clip(model_config)})
  )
  return folder


@pytest.fixture
def weights(monkeypatch):
  """What `load_weights` reads from any file."""
  state = state_dict(random_params(), MICRO)
  monkeypatch.setattr(convert, "read_file", lambda path: state)
  return state


@pytest.mark.parametrize("scan", [True, False])
def test_a_run_begins_with_the_parameters_of_its_checkpoint(tmp_path, weights, scan):
  like = random_params(scan=scan)
  like = jax.tree.map(jnp.zeros_like, like)
  got = initial_params(config(init=str(export(tmp_path))), MICRO, like)
  jax.tree.map(np.testing.assert_array_equal, state_dict(got, MICRO), weights)
  assert jax.tree.structure(got) == jax.tree.structure(like)


def test_siglip_s_bias_is_kept_where_the_loss_has_one(tmp_path, weights):
  like = {**random_params(), "logit_bias": jnp.asarray(-10.0)}
  run = config(init=str(export(tmp_path)))
  assert initial_params(run, MICRO, like)["logit_bias"] == -10
  weights["logit_bias"] = np.asarray(-7, np.float32)
  assert initial_params(run, MICRO, like)["logit_bias"] == -7
  assert "logit_bias" not in initial_params(run, MICRO, random_params())


def test_position_embeddings_of_init_are_resized(tmp_path, weights):
  vision = dataclasses.replace(MICRO.vision, image_size=24)
  larger = dataclasses.replace(MICRO, vision=vision)
  got = initial_params(config(init=str(export(tmp_path))), larger, random_params(larger))
  assert got["image"]["positional_embedding"].shape == (37, 48)


def test_a_checkpoint_with_another_vocabulary_asks_for_its_tokenizer(tmp_path, weights):
  text = dataclasses.replace(MICRO.text, vocab_size=70)
  other = dataclasses.replace(MICRO, text=text)
  with pytest.raises(
    ValueError, match=r"has 70 tokens, and init=.* has 64: give its own tokenizer"
  ):
    initial_params(config(init=str(export(tmp_path))), other, random_params(other))
  text = dataclasses.replace(MICRO.text, eot_id=5)
  other = dataclasses.replace(MICRO, text=text)
  with pytest.raises(ValueError, match=r"has 5 as its end token, and init=.* has 63"):
    initial_params(config(init=str(export(tmp_path))), other, random_params())


def test_a_folder_s_own_tokenizer_must_be_the_run_s(tmp_path):
  """Another one of as many tokens would train without a word."""
  captions = ["two dogs run on a beach", "red cars near children who play football"]
  theirs, ours = (make_tokenizer("bpe", [caption], 270) for caption in captions)
  assert theirs.vocab_size == ours.vocab_size
  folder = export(tmp_path)
  run = config(init=str(folder))
  check_vocabulary(run, ours)  # The folder says nothing.
  tokenizer, _ = theirs.for_transformers()
  (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
  check_vocabulary(run, theirs)
  with pytest.raises(
    ValueError, match=r"data.tokenizer='bpe' gives words other ids.*set data.tokenizer='.*json'"
  ):
    check_vocabulary(run, ours)


def test_a_checkpoint_of_other_options_names_the_parameters(tmp_path, weights):
  like = random_params(zero_init_layer_scale=True)
  with pytest.raises(ValueError, match=r"lacks image/blocks/ls_1/gamma.*zero_init_layer_scale"):
    initial_params(config(init=str(export(tmp_path))), MICRO, like)


def test_an_init_that_is_no_checkpoint_says_what_is_expected(tmp_path):
  with pytest.raises(ValueError, match=r"init='/nowhere' does not exist: expected a state dict"):
    check_init(config(init="/nowhere"), MICRO)
  with pytest.raises(ValueError, match=r"has no weights: expected open_clip_model.safetensors"):
    check_init(config(init=str(tmp_path)), MICRO)
  (tmp_path / "clip.npz").touch()
  with pytest.raises(ValueError, match=r"init: '.*/clip.npz' must end in one of .safetensors"):
    check_init(config(init=str(tmp_path / "clip.npz")), MICRO)
  with pytest.raises(ValueError, match=r"init_model='ViT-Q': 'ViT-Q' is no model"):
    check_init(config(init=str(export(tmp_path)), init_model="ViT-Q"), MICRO)


@pytest.mark.parametrize("file", ["", "open_clip_model.safetensors"])
def test_an_init_of_another_activation_or_width_is_refused(tmp_path, file):
  towers = (
    dataclasses.replace(tower, activation="quick_gelu") for tower in (MICRO.vision, MICRO.text)
  )
  quick = dataclasses.replace(MICRO, **dict(zip(("vision", "text"), towers, strict=True)))
  run = config(init=str(export(tmp_path, quick) / file))
  check_init(run, quick)
  with pytest.raises(
    ValueError, match=r"init=.* vision activation='quick_gelu', not 'gelu', text "
  ):
    check_init(run, MICRO)
  deeper = dataclasses.replace(quick, text=dataclasses.replace(quick.text, layers=3))
  with pytest.raises(ValueError, match=r"text layers=2, not 3\. The config is that of model.size"):
    check_init(run, deeper)


@pytest.mark.parametrize(
  ("file", "values", "field"),
  [
    ("open_clip_config.json", {"preprocess_cfg": {"mean": [0.5, 0.5, 0.5]}}, "mean"),
    ("open_clip_config.json", {"preprocess_cfg": {"std": 0.5}}, "std"),
    ("preprocessor_config.json", {"image_std": [0.5, 0.5, 0.5]}, "image_std"),
    ("processor_config.json", {"image_processor": {"resample": 2}}, "resample"),
  ],
)
def test_an_init_whose_images_are_prepared_otherwise_is_refused(tmp_path, file, values, field):
  folder = export(tmp_path)
  path = folder / file
  given = json.loads(path.read_text()) if path.exists() else {}
  check_init(config(init=str(folder)), MICRO)
  path.write_text(json.dumps({**given, **values}))
  with pytest.raises(
    ValueError, match=rf" {field}=(\[0.5, 0.5, 0.5\]|0.5|2) \({file}\), and this program"
  ):
    check_init(config(init=str(folder)), MICRO)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_an_init_may_be_an_index_of_shards(tmp_path, weights, name):
  folder = export(tmp_path)
  (folder / "open_clip_model.safetensors").rename(folder / name)
  for init in (folder, folder / name):
    run = config(init=str(init))
    check_init(run, MICRO)
    got = initial_params(run, MICRO, random_params())
    jax.tree.map(np.testing.assert_array_equal, state_dict(got, MICRO), weights)


def test_a_run_says_that_it_crops_what_its_init_squashed(tmp_path, capsys):
  folder = export(tmp_path)
  path = folder / "open_clip_config.json"
  check_init(config(init=str(folder)), MICRO)
  assert capsys.readouterr().err == ""
  squash = {"preprocess_cfg": {"resize_mode": "squash"}}
  path.write_text(json.dumps(json.loads(path.read_text()) | squash))
  check_init(config(init=str(folder)), MICRO)
  assert "images were squashed to squares. This run crops them" in capsys.readouterr().err


@pytest.mark.program
def test_a_siglip_run_from_weights_without_a_logit_bias_starts_with_its_own(tmp_path, monkeypatch):
  monkeypatch.setattr(Run, "new_state", NEW_STATE)
  options = {"loss": "siglip", "model.backend": "xla", "model.remat": "none"}
  plain = make_run(loop_case.config(tmp_path / "data", **options), tmp_path)
  model, params = plain.task.model.config, drawn(plain.abstract_state.params)
  params.pop("logit_bias")
  weights = state_dict(params, model)
  monkeypatch.setattr(convert, "read_file", lambda path: weights)
  (tmp_path / "init").mkdir()
  options["init"] = str(export(tmp_path / "init", model))
  state = make_run(loop_case.config(tmp_path / "data", **options), tmp_path).new_state()
  assert state.params["logit_bias"] == -10
  np.testing.assert_array_equal(state.params["image"]["proj"], params["image"]["proj"])


@pytest.mark.program
@pytest.mark.parametrize("states", ["float32", "collage_light"])
@pytest.mark.slow
def test_a_locked_run_keeps_the_image_tower_of_init_and_resumes(tmp_path, monkeypatch, states):
  one = jax.devices()[:1]
  monkeypatch.setattr(jax, "devices", lambda *_: one)
  loop_case.replace_model(monkeypatch.setattr, jit_train_step)
  monkeypatch.setattr(Run, "new_state", NEW_STATE)
  options = {"steps": 1, "model.backend": "xla", "model.remat": "none"}
  options |= {"optimizer.states": states, "optimizer.measure_edq": states != "float32"}
  plain = make_run(loop_case.config(tmp_path / "data", **options), tmp_path)
  model, params = plain.task.model.config, drawn(plain.abstract_state.params)
  weights = state_dict(params, model)
  monkeypatch.setattr(convert, "read_file", lambda path: weights)
  (tmp_path / "init").mkdir()
  locked = {**options, "init": str(export(tmp_path / "init", model)), "freeze": ("image/.*",)}
  workdir, before = tmp_path / "run", cast_matrices(params, matrix_dtype(states))
  image = before["image"]
  for step in (1, 2):
    loop.train(loop_case.config(tmp_path / "data", **{**locked, "steps": step}), workdir)
    run = load(workdir)
    assert run.step == step
    jax.tree.map(np.testing.assert_array_equal, run.params["image"], image)
    jax.tree.map(lambda x, own: np.testing.assert_equal(x.dtype, own.dtype), run.params, before)
    for name in ("token_embedding", "blocks", "ln_final"):
      leaves = zip(*(jax.tree.leaves(p["text"][name]) for p in (run.params, before)), strict=True)
      assert any(np.any(now != then) for now, then in leaves), name
    exported = state_dict(run.params, model)["visual.proj"]
    assert exported.dtype == np.float32
    np.testing.assert_array_equal(exported, np.float32(run.params["image"]["proj"]))
    edq = [0.9 < record["edq"] < 1.1 for record in loop_case.records(workdir) if "edq" in record]
    assert edq == [True] * (step if states != "float32" else 0)
    before = run.params
    monkeypatch.setattr(convert, "read_file", lambda path: pytest.fail("init was read again."))
  scored = loop_case.config(tmp_path / "data", **{**locked, "init": "", "steps": 2})
  make_run(scored, workdir, read_only=True)  # train.evaluate needs no init.
