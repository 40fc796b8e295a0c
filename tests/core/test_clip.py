import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clip_case import (
  EOT,
  MICRO,
  clip,
  compiled,
  image_gradient,
  outputs,
  pairs,
  random_params,
  shapes,
)
from PIL import Image

from sbjax.models.clip import CLIP, patch_dropout, resize_grid
from sbjax.models.sizes import SIZES
from sbjax.models.transformer import BlockOptions
from sbjax.recipes import RECIPES, RecipeRules


@pytest.mark.parametrize(
  ("size", "count"),
  [
    ("S/16", 62_257_537),
    ("B/32", 151_277_313),
    ("B/16", 149_620_737),
    ("L/14", 427_616_513),
    ("H/14", 986_109_441),
    ("bigG/14", 2_539_567_105),
  ],
)
def test_parameter_counts_equal_open_clip_s(size, count):
  assert sum(leaf.size for leaf in jax.tree.leaves(shapes(SIZES[size]))) == count


def test_every_size_builds():
  for config in SIZES.values():
    image, size = shapes(config)["image"], (config.vision.width, config.embed_dim)
    projection = image["pool"]["fc2"]["kernel"] if config.vision.pool == "map" else image["proj"]
    assert projection.shape[-1] == size[1] and "blocks" in image
    assert config.vision.pool == "map" or projection.shape == size


def test_outputs_are_float32_unit_vectors_whatever_the_compute_dtype():
  params = random_params()
  full, half = outputs(clip(), params), outputs(CLIP(MICRO), params)
  for name in ("image_features", "text_features"):
    assert half[name].dtype == jnp.float32
    np.testing.assert_allclose(jnp.linalg.norm(half[name], axis=-1), 1, rtol=1e-5)
    np.testing.assert_allclose(half[name], full[name], atol=2**-4)
    assert np.any(half[name] != full[name])


def test_encode_methods_equal_the_call():
  model, params, (image, text) = clip(), random_params(), pairs()
  out = outputs(model, params)
  encode = compiled(
    lambda params: (
      model.apply({"params": params}, image, method="encode_image"),
      model.apply({"params": params}, text, method="encode_text"),
      model.apply({"params": params}, text, normalize=False, method="encode_text"),
    )
  )
  image_features, text_features, raw = encode(params)
  np.testing.assert_allclose(image_features, out["image_features"], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(text_features, out["text_features"], rtol=1e-5, atol=1e-6)
  norm = jnp.linalg.norm(raw, axis=-1, keepdims=True)
  np.testing.assert_allclose(raw / norm, text_features, rtol=1e-5, atol=1e-6)


def test_parameter_tree_is_the_same_for_every_recipe():
  trees = [shapes(recipe=recipe) for recipe in RECIPES.values()]
  assert all(tree == trees[0] for tree in trees)
  assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(trees[0]))


def test_patch_dropout_keeps_the_class_token_and_distinct_patches():
  tokens = jnp.broadcast_to(jnp.arange(1 + 16)[None, :, None], (2000, 17, 3)).astype(jnp.float32)
  kept = np.asarray(patch_dropout(tokens, 0.7, jax.random.key(0)))
  assert kept.shape == (2000, 1 + 4, 3)  # floor(16 * 0.3)
  np.testing.assert_array_equal(kept[:, 0], 0)
  assert all(len(set(row)) == 5 for row in kept[:, :, 0])
  # Each patch is drawn with probability 1/4: within five standard deviations.
  counts = np.bincount(kept[:, 1:, 0].astype(int).ravel(), minlength=17)[1:]
  np.testing.assert_allclose(counts, 500, atol=5 * (2000 * 3 / 16) ** 0.5)


def test_patches_are_dropped_only_in_training():
  params, rngs = random_params(), {"dropout": jax.random.key(4)}
  model = clip(patch_dropout=0.5)
  plain = outputs(clip(), params)["image_features"]
  np.testing.assert_array_equal(outputs(model, params)["image_features"], plain)
  trained = outputs(model, params, train=True, rngs=rngs)["image_features"]
  assert np.all(np.max(np.abs(trained - plain), axis=-1) > 1e-3)
  np.testing.assert_array_equal(
    outputs(clip(), params, train=True)["image_features"], plain
  )  # Without dropout no key is needed.


def with_positions(params, position_LD):
  return {**params, "image": {**params["image"], "positional_embedding": position_LD}}


def test_a_training_step_takes_small_images_as_the_clip_of_their_size_does():
  """Whose position embedding is the resized one; so the gradient is what the resize passes on."""
  small = dataclasses.replace(MICRO, vision=dataclasses.replace(MICRO.vision, image_size=12))
  params, image = random_params(), pairs()[0][:, :12, :12]
  positions = params["image"]["positional_embedding"]

  def loss(model, params):
    features = model.apply({"params": params}, image, True, method="encode_image")
    return jnp.sum(features**3), features

  def grad(model, params):
    return compiled(jax.value_and_grad(lambda p: loss(model, p), has_aux=True))(params)

  resized, pull = jax.vjp(lambda x: resize_grid(x, 3), positions)
  assert resized.shape == (1 + 9, 48)
  (_, ours), own = grad(clip(train_image_size=12), params)
  (_, theirs), of_small = grad(clip(small), with_positions(params, resized))
  np.testing.assert_allclose(ours, theirs, atol=1e-6)
  (expected,) = pull(of_small["image"].pop("positional_embedding"))
  np.testing.assert_allclose(own["image"].pop("positional_embedding"), expected, atol=1e-5)
  assert np.all(np.any(expected != 0, axis=1))  # All rows learn from small images.
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), own, of_small)


def test_an_evaluation_takes_images_of_the_model_s_own_size_in_every_stage():
  params, plain = random_params(), outputs(clip(), random_params())
  staged = clip(train_image_size=12)
  np.testing.assert_array_equal(outputs(staged, params)["image_features"], plain["image_features"])
  with pytest.raises(ValueError, match=r"\[B, 12, 12, 3\], not \(4, 16, 16, 3\)"):
    outputs(staged, params, train=True)
  assert jax.eval_shape(lambda: staged.init(jax.random.key(0), *pairs()))["params"] == shapes()


@pytest.mark.parametrize("side", [1, 3, 4, 7])
def test_a_position_embedding_is_resized_as_pillow_resizes_an_image(side):
  """Bicubic with antialias, the class token's row apart."""
  positions = random_params()["image"]["positional_embedding"]
  resized, grid = resize_grid(positions, side), np.asarray(positions)
  np.testing.assert_array_equal(resized[0], grid[0])
  images = grid[1:].reshape(4, 4, -1).transpose(2, 0, 1)
  by_pillow = [Image.fromarray(x).resize((side, side), Image.Resampling.BICUBIC) for x in images]
  expected = np.stack([np.asarray(x).ravel() for x in by_pillow], axis=1)
  np.testing.assert_allclose(resized[1:], expected, atol=1e-5)


def test_text_features_come_from_the_first_end_token_and_are_causal():
  image, text = pairs()
  features = outputs(clip(), random_params())["text_features"]
  after = text.at[:, 5:].set(EOT)  # More end tokens.
  np.testing.assert_array_equal(
    outputs(clip(), random_params(), (image, after))["text_features"], features
  )
  before = text.at[:, 3].set(7)
  changed = outputs(clip(), random_params(), (image, before))["text_features"]
  assert np.all(np.max(np.abs(changed - features), axis=-1) > 1e-3)


def text_features(ids, eot_id):
  config = dataclasses.replace(MICRO, text=dataclasses.replace(MICRO.text, eot_id=eot_id))
  batch = pairs(len(ids))[0], jnp.array(ids, jnp.int32)
  return outputs(clip(config), random_params(), batch)["text_features"]


def test_without_an_end_id_the_largest_id_of_a_text_ends_it():
  """The table may have rows beyond the end token's: open_clip's argmax does not see them."""
  ids = [[3, 5, 61, 0, 61, 9, 0, 0], [3, 7, 5, 40, 2, 0, 0, 0]]
  features = text_features(ids, None)
  for row, largest in enumerate((61, 40)):
    np.testing.assert_array_equal(features[row], text_features(ids, largest)[row])


def test_a_text_without_its_end_token_is_read_at_its_first_position():
  """As transformers and open_clip's pooling "eos" do."""
  features = text_features([[3, 5, 61, 0, 0, 0, 0, 0], [3, 9, 9, 9, 9, 9, 9, 9]], 40)
  np.testing.assert_array_equal(features[0], features[1])


def test_image_attention_is_not_causal():
  image, text = pairs()
  features = outputs(clip(), random_params())["image_features"]
  last_patch = image.at[:, 12:, 12:].add(1.0)
  changed = outputs(clip(), random_params(), (last_patch, text))["image_features"]
  assert np.all(np.max(np.abs(changed - features), axis=-1) > 1e-4)


def test_logit_scale_starts_at_the_temperature_of_clip_and_stays_in_range():
  model, key = clip(), jax.random.key(0)
  start = compiled(lambda: model.init(key, *pairs())["params"]["logit_scale"])()  # Nothing else.
  for log_scale, want in ((start, 1 / 0.07), (9.0, 100.0), (-9.0, 1.0)):
    params = {**random_params(), "logit_scale": jnp.float32(log_scale)}
    np.testing.assert_allclose(outputs(model, params)["logit_scale"], want, rtol=1e-6)


def test_the_logit_scale_of_siglip_has_no_limit():
  """Its published weights have scales above 100: ViT-SO400M-14-SigLIP-384's is exp(4.7215)."""
  model = clip(init_logit_scale=10.0, init_logit_bias=-10.0)
  params = {**random_params(), "logit_bias": jnp.float32(-16)}
  for log_scale in (4.7215, -0.5):
    out = outputs(model, {**params, "logit_scale": jnp.float32(log_scale)})
    np.testing.assert_allclose(out["logit_scale"], np.exp(log_scale), rtol=1e-6)


def test_out_of_range_logit_scale_has_gradients_only_towards_the_range():
  @compiled
  def gradient(log_scale, sign):
    def scale(log_scale):
      params = {**random_params(), "logit_scale": log_scale}
      return sign * clip().apply({"params": params}, *pairs())["logit_scale"]

    return jax.grad(scale)(log_scale)

  def of(log_scale, sign):
    return gradient(jnp.float32(log_scale), jnp.float32(sign))

  assert of(9.0, -1) == 0 and of(9.0, 1) > 0  # Descent moves against the gradient.
  assert of(-9.0, 1) == 0 and of(-9.0, -1) < 0
  np.testing.assert_allclose(of(1.0, 1), np.e, rtol=1e-6)


def test_zero_features_stay_zero_with_finite_gradients():
  params = random_params()
  params = {**params, "image": {**params["image"], "proj": jnp.zeros((48, 24))}}
  assert not np.any(outputs(clip(), params)["image_features"])
  gradient = image_gradient(clip(), params)
  assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


def test_equal_options_in_other_spellings_are_equal():
  spelled = BlockOptions(recipe="*/fc1=full, *=switchback", dtype="float32")
  rules = RecipeRules.of({"*/fc1": "full", "*": "switchback"})
  assert spelled == BlockOptions(recipe=rules, dtype=jnp.float32)
  assert hash(spelled) == hash(BlockOptions(recipe=rules, dtype=jnp.float32))
  assert BlockOptions(recipe="full") == BlockOptions()


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: BlockOptions(remat="half"), "remat='half' must be 'none', 'block' .*: dots, dots_and"),
    (lambda: BlockOptions(remat="full"), r"remat='full' must be .* 'block' \(once called 'full'"),
    (lambda: BlockOptions(unroll=-1), r"unroll=-1 must be 0 \(all layers\) or more"),
    (lambda: BlockOptions(dtype="int8"), "dtype=int8 must be floating point"),
    (lambda: BlockOptions(backend="tpu"), "Unknown backend 'tpu'; there are"),
    (lambda: BlockOptions(recipe="int7"), "Unknown recipe 'int7'; known: full"),
    (lambda: BlockOptions(recipe="*/fc1=int7"), "Unknown recipe 'int7'"),
    (lambda: shapes(patch_dropout=1.0), r"patch_dropout=1.0 must be in \[0, 1\)"),
    (lambda: shapes(train_image_size=10), "train_image_size=10 must be .* patch_size=4 .* as 8"),
    (lambda: shapes(train_image_size=20), "=20 must be .* and at most image_size=16, such as 16"),
    (lambda: shapes(train_image_size=0), "train_image_size=0 must be a multiple .* such as 4"),
    (
      lambda: dataclasses.replace(MICRO.vision, image_size=18),
      "image_size=18 must be a multiple of patch_size=4",
    ),
    (lambda: dataclasses.replace(MICRO.vision, heads=5), "width=48 must be a multiple of heads=5"),
    (lambda: dataclasses.replace(MICRO.text, vocab_size=9), "eot_id=63 must be below vocab_size=9"),
    (
      lambda: outputs(clip(), random_params(), (jnp.zeros((2, 16, 16, 1)), pairs()[1])),
      r"\[B, 16, 16, 3\], not \(2, 16, 16, 1\)",
    ),
    (
      lambda: outputs(clip(), random_params(), (pairs()[0], jnp.zeros((4, 9), jnp.int32))),
      r"\[B, 8\], not \(4, 9\)",
    ),
  ],
)
def test_wrong_settings_and_inputs_are_refused_by_name(make, message):
  with pytest.raises(ValueError, match=message):
    make()
