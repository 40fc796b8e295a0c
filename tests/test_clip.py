import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

import sbjax.models.clip
from sbjax.models.clip import CLIP, REMAT_POLICIES, Block, patch_dropout, quantize_kernels
from sbjax.models.convert import unstack_blocks
from sbjax.models.sizes import SIZES, CLIPConfig, TextConfig, VisionConfig
from sbjax.recipes import RECIPES, SWITCHBACK, SWITCHBACK_M

EOT = 63
MICRO = CLIPConfig(
  24,
  VisionConfig(image_size=16, patch_size=4, width=48, layers=3, heads=3),
  TextConfig(context_length=8, vocab_size=64, width=32, layers=2, heads=2, eot_id=EOT),
)
clip = functools.partial(CLIP, MICRO, dtype=jnp.float32)


def pairs(batch=4, config=MICRO):
  """Images, and texts that end at their fifth token."""
  size, text = config.vision.image_size, config.text
  image = jax.random.normal(jax.random.key(1), (batch, size, size, 3))
  ids = jax.random.randint(jax.random.key(2), (batch, text.context_length), 2, text.eot_id)
  return image, ids.at[:, 4].set(text.eot_id)


@functools.cache
def shapes(config=MICRO, **options):
  init = CLIP(config, **options).init
  image, text = jax.eval_shape(functools.partial(pairs, config=config))
  return jax.eval_shape(init, jax.random.key(0), image, text)["params"]


@functools.cache
def random_params(**options):
  """Nothing zero or one: kernels keep a variance, and what multiplies stays near one."""
  rng = np.random.default_rng(0)

  def draw(path, leaf):
    noise = rng.standard_normal(leaf.shape, np.float32)
    if path[-1] == "kernel":
      return jnp.asarray(noise * np.float32(leaf.shape[-2] ** -0.5))
    return jnp.asarray(np.float32(path[-1] in ("scale", "logit_scale")) + noise * np.float32(0.2))

  return unflatten_dict({k: draw(k, v) for k, v in flatten_dict(shapes(**options)).items()})


# Compiling is most of these tests' time.
compiled = functools.partial(
  jax.jit,
  compiler_options={
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
  },
)


@functools.cache
def initial_params():
  return compiled(clip(zero_init_layer_scale=True).init)(jax.random.key(0), *pairs())["params"]


@functools.partial(compiled, static_argnames=("model", "train"))
def apply(model, params, image, text, train=False, rngs=None):
  return model.apply({"params": params}, image, text, train=train, rngs=rngs)


def outputs(model, params, batch=None, **kwargs):
  return apply(model, params, *(pairs() if batch is None else batch), **kwargs)


def image_loss(model, params):
  """Some number that depends on every parameter of the image tower."""
  features = model.apply({"params": params}, pairs()[0], method="encode_image")
  weights = jnp.asarray(np.random.default_rng(5).standard_normal(features.shape, np.float32))
  return jnp.sum(weights * features)


@functools.partial(compiled, static_argnames="model")
def image_gradient(model, params):
  return jax.grad(functools.partial(image_loss, model))(params)["image"]


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
def test_parameters_are_as_many_as_open_clips(size, count):
  assert sum(leaf.size for leaf in jax.tree.leaves(shapes(SIZES[size]))) == count


def test_every_size_builds():
  for config in SIZES.values():
    assert shapes(config)["image"]["proj"].shape == (config.vision.width, config.embed_dim)


def test_outputs_are_float32_unit_vectors_whatever_the_compute_dtype():
  params = random_params()
  full, half = outputs(clip(), params), outputs(CLIP(MICRO), params)
  for name in ("image_features", "text_features"):
    assert half[name].dtype == jnp.float32
    np.testing.assert_allclose(jnp.linalg.norm(half[name], axis=-1), 1, rtol=1e-5)
    np.testing.assert_allclose(half[name], full[name], atol=2**-4)
    assert np.any(half[name] != full[name])


def test_encoders_give_what_the_call_gives():
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


def test_recipe_reaches_the_four_linears_of_a_block_and_nothing_else():
  jaxpr = jax.make_jaxpr(lambda p: image_loss(clip(recipe=SWITCHBACK), p))(random_params())
  (scan,) = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
  assert str(scan).count("preferred_element_type=int32") == 6  # q, k and v one by one.
  assert str(jaxpr).count("preferred_element_type=int32") == 6


def test_scanned_and_unrolled_layers_agree():
  params = random_params()
  scanned, unrolled = outputs(clip(), params), outputs(clip(scan=False), unstack_blocks(params))
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), scanned, unrolled
  )


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scan", [False, True])
def test_tokens_that_fill_up_the_blocks_change_nothing(monkeypatch, scan, fused):
  params = random_params(scan=scan)
  model = clip(recipe=SWITCHBACK, scan=scan, fused=fused)
  expected = outputs(model, params), image_gradient(model, params)
  monkeypatch.setattr(sbjax.models.clip, "length_for", lambda length, *_: length + 3)
  found = outputs(model, params), image_gradient(model, params)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), found, expected)


@pytest.mark.parametrize(
  ("remat", "scan"),
  [("full", False), ("full", True), *((policy, True) for policy in REMAT_POLICIES)],
)
def test_remat_changes_no_gradient(remat, scan):
  params = random_params() if scan else unstack_blocks(random_params())
  want, got = (image_gradient(clip(scan=scan, remat=r), params) for r in ("none", remat))
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize(
  ("remat", "recomputed"),
  [("full", 3), ("dots", 0), ("dots_and_residuals", 0), ("residuals", 2), ("attention_dots", 1)],
)
def test_remat_computes_again_only_the_linears_that_its_policy_drops(remat, recomputed):
  """Of qkv, out, fc1, fc2: fc2's output is never needed again."""

  def int8_dots(remat):
    model = clip(remat=remat, recipe=SWITCHBACK_M)
    jaxpr = jax.make_jaxpr(jax.grad(functools.partial(image_loss, model)))(random_params())
    return str(jaxpr).count("preferred_element_type=int32")

  assert int8_dots("none") == 4 + 4  # fwd and dgrad
  assert int8_dots(remat) == 4 + 4 + recomputed


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("layer_scale", [True, False])
def test_fused_is_plain_flax_but_for_rounding(scan, layer_scale):
  options = {"scan": scan, "zero_init_layer_scale": layer_scale}
  params = random_params(zero_init_layer_scale=layer_scale)
  params = params if scan else unstack_blocks(params)
  got, want = (image_gradient(clip(fused=fused, **options), params) for fused in (True, False))
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5), got, want)
  got, want = (
    outputs(clip(fused=fused, recipe=SWITCHBACK, **options), params) for fused in (True, False)
  )
  for tower in ("image_features", "text_features"):
    np.testing.assert_allclose(got[tower], want[tower], atol=0.02)


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("recipe", ["switchback", "switchback_m", "switchback_q"])
def test_kernels_quantized_once_a_step_give_the_same_gradient(recipe, scan):
  model = clip(recipe=RECIPES[recipe], remat="full", scan=scan)
  params = random_params() if scan else unstack_blocks(random_params())

  def loss(once, params):
    quantized = quantize_kernels({"image": params["image"]}, model.recipe) if once else {}
    variables = {"params": params, "quantized": quantized}
    features = model.apply(variables, pairs()[0], method="encode_image")
    return jnp.sum(features * jnp.linspace(-1, 1, features.shape[1])[None, :])

  gradients = {once: jax.grad(functools.partial(loss, once)) for once in (False, True)}
  # int8 comes out of a rounding: of a kernel in the forward pass, rematerialised, and in dgrad
  # (which takes the forward's with switchback_m); or once.
  roundings = {
    once: str(jax.make_jaxpr(gradient)(params)).count(" round[")
    for once, gradient in gradients.items()
  }
  assert roundings[True] < roundings[False]
  got, want = (compiled(gradients[once])(params)["image"] for once in (True, False))
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


def test_patch_dropout_keeps_the_class_token_and_distinct_patches():
  tokens = jnp.broadcast_to(jnp.arange(1 + 16)[None, :, None], (2000, 17, 3)).astype(jnp.float32)
  kept = np.asarray(patch_dropout(tokens, 0.7, jax.random.key(0)))
  assert kept.shape == (2000, 1 + 4, 3)  # floor(16 * 0.3)
  np.testing.assert_array_equal(kept[:, 0], 0)
  assert all(len(set(row)) == 5 for row in kept[:, :, 0])
  # Each patch is drawn with probability 1/4: within five standard deviations.
  counts = np.bincount(kept[:, 1:, 0].astype(int).ravel(), minlength=17)[1:]
  np.testing.assert_allclose(counts, 500, atol=5 * (2000 * 3 / 16) ** 0.5)


def test_patches_are_dropped_in_training_alone():
  params, rngs = random_params(), {"dropout": jax.random.key(4)}
  model = clip(patch_dropout=0.5)
  plain = outputs(clip(), params)["image_features"]
  np.testing.assert_array_equal(outputs(model, params)["image_features"], plain)
  trained = outputs(model, params, train=True, rngs=rngs)["image_features"]
  assert np.all(np.max(np.abs(trained - plain), axis=-1) > 1e-3)
  np.testing.assert_array_equal(
    outputs(clip(), params, train=True)["image_features"], plain
  )  # No key is asked for without dropout.


def test_text_is_read_at_its_first_end_and_never_looks_ahead():
  image, text = pairs()
  features = outputs(clip(), random_params())["text_features"]
  after = text.at[:, 5:].set(EOT)  # Ends again, and again.
  np.testing.assert_array_equal(
    outputs(clip(), random_params(), (image, after))["text_features"], features
  )
  before = text.at[:, 3].set(7)
  changed = outputs(clip(), random_params(), (image, before))["text_features"]
  assert np.all(np.max(np.abs(changed - features), axis=-1) > 1e-3)


def test_images_attend_to_patches_on_both_sides():
  image, text = pairs()
  features = outputs(clip(), random_params())["image_features"]
  last_patch = image.at[:, 12:, 12:].add(1.0)
  changed = outputs(clip(), random_params(), (last_patch, text))["image_features"]
  assert np.all(np.max(np.abs(changed - features), axis=-1) > 1e-4)


def test_zero_init_layer_scale_starts_at_the_identity():
  outputs_at_start = outputs(clip(zero_init_layer_scale=True), initial_params())["block_outputs"]
  for blocks in outputs_at_start.values():
    assert np.all(blocks == blocks[0])


@pytest.mark.parametrize("recipe", RECIPES)
def test_zero_init_layer_scale_starts_with_finite_gradients(recipe):
  model = CLIP(MICRO, recipe=RECIPES[recipe], zero_init_layer_scale=True)
  gradient = image_gradient(model, initial_params())
  assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))
  assert not np.any(gradient["blocks"]["out"]["kernel"])
  assert np.all(np.any(gradient["blocks"]["ls_1"]["gamma"], axis=-1))


def test_qk_norm_makes_attention_blind_to_the_scale_of_q_and_k():
  model, params = clip(qk_norm=True), random_params(qk_norm=True)

  def scale_qk(path, leaf):
    if path[-2:] not in (("qkv", "kernel"), ("qkv", "bias")):
      return leaf
    return leaf.at[..., : leaf.shape[-1] * 2 // 3].multiply(8.0)

  scaled = unflatten_dict({k: scale_qk(k, v) for k, v in flatten_dict(params).items()})
  want, got = outputs(model, params), outputs(model, scaled)
  np.testing.assert_allclose(got["image_features"], want["image_features"], atol=1e-3)
  np.testing.assert_allclose(got["text_features"], want["text_features"], atol=1e-3)
  without = random_params()
  scaled = unflatten_dict({k: scale_qk(k, v) for k, v in flatten_dict(without).items()})
  difference = (
    outputs(clip(), scaled)["image_features"] - outputs(clip(), without)["image_features"]
  )
  assert np.max(np.abs(difference)) > 1e-2


def test_logit_scale_starts_at_the_temperature_of_clip_and_stays_in_range():
  model, params = clip(zero_init_layer_scale=True), initial_params()
  for log_scale, want in ((None, 1 / 0.07), (9.0, 100.0), (-9.0, 1.0)):
    if log_scale is not None:
      params = {**params, "logit_scale": jnp.float32(log_scale)}
    np.testing.assert_allclose(outputs(model, params)["logit_scale"], want, rtol=1e-6)


def test_out_of_range_logit_scale_moves_back_but_no_further_out():
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


def test_block_outputs_are_mean_absolute_features():
  model, params = clip(scan=False), unstack_blocks(random_params())

  def blocks(module, method):
    return isinstance(module, Block) and method == "__call__"

  capture = compiled(functools.partial(model.apply, capture_intermediates=blocks))
  out, state = capture({"params": params}, *pairs())
  for tower, layers in (("image", 3), ("text", 2)):
    assert out["block_outputs"][tower].shape == (layers,)
    features = [
      state["intermediates"][tower][f"block_{layer}"]["__call__"][0][0] for layer in range(layers)
    ]
    want = [np.mean(np.abs(x)) for x in features]
    np.testing.assert_allclose(out["block_outputs"][tower], want, rtol=1e-5)


def test_no_gradient_flows_into_block_outputs():
  def total(params):
    blocks = clip().apply({"params": params}, *pairs())["block_outputs"]
    return jnp.sum(blocks["image"]) + jnp.sum(blocks["text"])

  assert not any(
    np.any(leaf) for leaf in jax.tree.leaves(compiled(jax.grad(total))(random_params()))
  )


def test_features_of_length_zero_stay_zero_with_finite_gradients():
  params = random_params()
  params = {**params, "image": {**params["image"], "proj": jnp.zeros((48, 24))}}
  assert not np.any(outputs(clip(), params)["image_features"])
  gradient = image_gradient(clip(), params)
  assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


def test_batch_over_a_mesh_moves_no_activation_between_devices():
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  model, params, batch = clip(), random_params(), pairs(batch=8)
  sharded = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
  replicated = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
  lowered = apply.lower(model, replicated, *sharded).compile()
  hlo = lowered.as_text()
  assert not any(name in hlo for name in ("all-gather", "all-to-all", "collective-permute"))
  got, want = lowered(replicated, *sharded), outputs(model, params, batch)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: shapes(remat="half"), "remat 'half'; known: none, full, dots"),
    (lambda: shapes(patch_dropout=1.0), r"patch_dropout=1.0 must be in \[0, 1\)"),
    (lambda: shapes(recipe="int7"), "int7"),
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
def test_wrong_settings_and_inputs_are_named(make, message):
  with pytest.raises(ValueError, match=message):
    make()
