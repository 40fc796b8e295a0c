"""A stack of blocks: options for speed and memory do not change its results."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clip_case import (
  MICRO,
  apply,
  clip,
  compiled,
  drawn,
  image_gradient,
  image_loss,
  initial_params,
  outputs,
  pairs,
  random_params,
  shapes,
  value_and_image_gradient,
)
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec
from pairwise import mainly

import sbjax.models.transformer
from sbjax import attention
from sbjax.models.flax_block import FlaxBlock
from sbjax.models.sizes import VisionConfig
from sbjax.models.transformer import (
  REMAT_POLICIES,
  Block,
  BlockOptions,
  Inits,
  quantize_kernels,
  unstack_blocks,
)
from sbjax.recipes import RECIPES, SWITCHBACK, SWITCHBACK_M


def test_recipe_reaches_the_four_linears_of_a_block_and_nothing_else():
  jaxpr = jax.make_jaxpr(lambda p: image_loss(clip(recipe=SWITCHBACK), p))(random_params())
  (scan,) = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
  assert str(scan).count("preferred_element_type=int32") == 6  # q, k and v one by one.
  assert str(jaxpr).count("preferred_element_type=int32") == 6


@pytest.mark.parametrize(
  "options", mainly([{"scan": False}], [{"scan": False}, {"unroll": 2}, {"unroll": 0}]), ids=str
)
def test_scanned_and_unrolled_layers_agree(options):
  params = random_params()
  own = params if options.get("scan", True) else unstack_blocks(params)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
    outputs(clip(), params),
    outputs(clip(**options), own),
  )


# Without scan each layer is compiled separately.
SHALLOW = dataclasses.replace(
  MICRO,
  vision=dataclasses.replace(MICRO.vision, layers=1),
  text=dataclasses.replace(MICRO.text, layers=1),
)


def with_params(scan, **options):
  """A model, and parameters for it."""
  config = MICRO if scan else SHALLOW
  return clip(config, scan=scan, **options), random_params(config, scan=scan)


@pytest.mark.parametrize(
  ("scan", "block"), mainly([(True, Block)], [(False, FlaxBlock), (True, Block)])
)
def test_padding_tokens_change_nothing(monkeypatch, scan, block):
  model, params = with_params(scan, recipe=SWITCHBACK, block=block)
  run = functools.partial(value_and_image_gradient, model)
  expected = compiled(lambda params: run(params))(params)
  monkeypatch.setattr(sbjax.models.transformer, "length_for", lambda length, *_: length + 3)
  padded = compiled(lambda params: run(params))(params)  # Traced anew, so a second function.
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), padded, expected
  )


@pytest.mark.parametrize("causal", [False, True])
def test_padding_tokens_neither_give_nor_receive_gradients(causal):
  keys = jax.random.split(jax.random.key(0), 4)
  q, k, v, dy = (jax.random.normal(key, (2, 8, 3, 16)) for key in keys)

  @functools.partial(compiled, static_argnums=0)
  def run(length, dy, *qkv):
    y, vjp = jax.vjp(functools.partial(attention, causal=causal, length=length), *qkv)
    return y, vjp(dy)

  y, gradients = run(5, dy.at[:, 5:].set(0), q, k, v)
  expected, expected_gradients = run(None, dy[:, :5], q[:, :5], k[:, :5], v[:, :5])
  np.testing.assert_allclose(y[:, :5], expected, rtol=1e-5, atol=1e-6)
  assert np.isfinite(y).all()
  for dx, expected_dx in zip(gradients, expected_gradients, strict=True):
    np.testing.assert_allclose(dx[:, :5], expected_dx, rtol=1e-4, atol=1e-5)
  for dx in run(5, dy, q, k, v)[1]:  # Also with gradients of the padding tokens' own output.
    assert not dx[:, 5:].any()


@pytest.mark.parametrize(
  ("remat", "scan"),
  mainly(
    [("block", False), ("residuals", True)],
    [("block", False), ("block", True), *((policy, True) for policy in REMAT_POLICIES)],
  ),
)
def test_remat_changes_no_gradient(remat, scan):
  want, got = (image_gradient(*with_params(scan, remat=r)) for r in ("none", remat))
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize(
  ("options", "barrier"),
  [({"unroll": 1}, False), ({"unroll": 2}, False), ({"unroll": 0}, True), ({"scan": False}, True)],
  ids=str,
)
def test_prevent_cse_is_set_only_without_a_loop(options, barrier):
  model = clip(remat="block", **options)
  params = random_params() if model.options.scan else unstack_blocks(random_params())
  jaxpr = str(jax.make_jaxpr(jax.grad(functools.partial(image_loss, model)))(params))
  assert (f"prevent_cse={barrier}" in jaxpr) and (f"prevent_cse={not barrier}" not in jaxpr)


@pytest.mark.parametrize(
  ("remat", "recomputed"),
  [("block", 5), ("dots", 0), ("dots_and_residuals", 0), ("residuals", 4), ("attention_dots", 1)],
)
def test_remat_recomputes_only_the_linears_that_its_policy_drops(remat, recomputed):
  """Linears are q, k, v, out, fc1 and fc2; fc2's output is never needed again."""

  def int8_dots(remat):
    model = clip(remat=remat, recipe=SWITCHBACK_M)
    step = jax.jit(jax.grad(functools.partial(image_loss, model)))
    lines = step.lower(random_params()).as_text().splitlines()
    return sum("dot_general" in line and "xi32>" in line for line in lines)

  assert int8_dots("none") == 6 + 4  # fwd and dgrad, where q, k and v are one.
  assert int8_dots(remat) == 6 + 4 + recomputed


@pytest.mark.parametrize("layer_scale", mainly([True], [True, False]))
def test_a_block_equals_plain_flax_to_rounding(layer_scale):
  options, blocks = {"zero_init_layer_scale": layer_scale}, (Block, FlaxBlock)
  params = random_params(**options)
  assert shapes(block=FlaxBlock, **options) == shapes(**options)
  got, want = (image_gradient(clip(block=block, **options), params) for block in blocks)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5), got, want)
  got, want = (outputs(clip(block=block, recipe=SWITCHBACK, **options), params) for block in blocks)
  for tower in ("image_features", "text_features"):
    np.testing.assert_allclose(got[tower], want[tower], atol=0.02)


def image_gradient_of(model, once):
  """A gradient function of the parameters; kernels are quantized once, or at each use."""

  def loss(params):
    own = {"image": params["image"]}
    quantized = quantize_kernels(own, model.options.recipe) if once else {}
    variables = {"params": params, "quantized": quantized}
    features = model.apply(variables, pairs()[0], method="encode_image")
    return jnp.sum(features * jnp.linspace(-1, 1, features.shape[1])[None, :])

  return jax.grad(loss)


@pytest.mark.parametrize("scan", mainly([True], [True, False]))
@pytest.mark.parametrize(
  "recipe",
  mainly(
    ["switchback", "switchback_q"], ["switchback", "switchback_m", "switchback_q", "switchback_c"]
  ),
)
def test_weights_quantized_once_a_step_are_rounded_less_often(recipe, scan):
  model, params = with_params(scan, recipe=RECIPES[recipe], remat="block")
  # A kernel is rounded in the forward pass, in its rematerialization and in dgrad (which reuses the
  # forward's with switchback_m), or only once.
  once, each = (
    str(jax.make_jaxpr(image_gradient_of(model, once))(params)).count(" round[")
    for once in (True, False)
  )
  assert once < each


@pytest.mark.parametrize(
  ("recipe", "scan"),
  mainly(
    [("switchback_cm", True)],
    [("switchback_m", True), ("switchback_cm", True), ("switchback_q", False)],
  ),
)
def test_weights_quantized_once_a_step_give_the_same_gradient(recipe, scan):
  model, params = with_params(scan, recipe=RECIPES[recipe], remat="block")
  got, want = (compiled(image_gradient_of(model, once))(params)["image"] for once in (True, False))
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


@pytest.mark.slow
def test_zero_init_layer_scale_makes_blocks_the_identity():
  outputs_at_start = outputs(clip(zero_init_layer_scale=True), initial_params())["block_outputs"]
  for blocks in outputs_at_start.values():
    assert np.all(blocks == blocks[0])


@pytest.mark.parametrize("recipe", mainly(["switchback_m"], RECIPES))
def test_zero_init_layer_scale_starts_with_finite_gradients(recipe):
  x = jax.random.normal(jax.random.key(1), (4, 5, 16), jnp.bfloat16)
  block = Block(
    VisionConfig(image_size=4, patch_size=2, width=16, layers=1, heads=2, mlp_ratio=2),
    length=5,
    causal=False,
    inits=Inits(*[nn.initializers.normal()] * 4),
    options=BlockOptions(recipe=recipe, zero_init_layer_scale=True),
  )
  params = drawn(jax.eval_shape(block.init, jax.random.key(0), x)["params"])
  for name in ("ls_1", "ls_2"):
    params[name] = {"gamma": jnp.zeros(16)}

  def loss(params):
    y = block.apply({"params": params}, x)[0].astype(jnp.float32)
    return jnp.sum(y * jnp.linspace(-1, 1, 16)[None, None, :])

  gradient = compiled(jax.grad(loss))(params)
  assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))
  assert not np.any(gradient["out"]["kernel"])
  assert np.any(gradient["ls_1"]["gamma"])


def test_qk_norm_makes_attention_invariant_to_the_scale_of_q_and_k():
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


def test_qk_norm_has_the_epsilon_of_its_tower():
  """An epsilon far above the variance of q and k makes them small."""
  config = dataclasses.replace(MICRO.vision, norm_epsilon=1e6)
  block = Block(
    config,
    length=5,
    causal=False,
    inits=Inits(*[nn.initializers.normal(1.0)] * 4),
    options=BlockOptions(qk_norm=True, dtype=jnp.float32),
  )
  x = jax.random.normal(jax.random.key(0), (1, 5, config.width))

  @compiled
  def run(key, x):
    def is_norm(module, _):
      return "_norm" in str(module.name)

    return block.apply(block.init(key, x), x, capture_intermediates=is_norm)

  _, state = run(jax.random.key(1), x)
  for name in ("q_norm", "k_norm"):
    (normed,) = state["intermediates"][name]["__call__"]
    assert np.max(np.abs(normed)) < 0.1, name


def test_block_outputs_are_the_mean_and_the_largest_absolute_feature():
  model, params = clip(scan=False, block_maxima=True), unstack_blocks(random_params())

  def blocks(module, method):
    return isinstance(module, Block) and method == "__call__"

  capture = compiled(functools.partial(model.apply, capture_intermediates=blocks))
  out, state = capture({"params": params}, *pairs())
  for tower, layers in (("image", 3), ("text", 2)):
    assert out["block_outputs"][tower].shape == (layers,)
    features = [
      state["intermediates"][tower][f"block_{layer}"]["__call__"][0][0] for layer in range(layers)
    ]
    for name, statistic in (("block_outputs", np.mean), ("block_maxima", np.max)):
      want = [statistic(np.abs(x)) for x in features]
      np.testing.assert_allclose(out[name][tower], want, rtol=1e-5)


def test_no_gradient_flows_into_block_outputs():
  def total(params):
    blocks = clip().apply({"params": params}, *pairs())["block_outputs"]
    return jnp.sum(blocks["image"]) + jnp.sum(blocks["text"])

  assert not any(
    np.any(leaf) for leaf in jax.tree.leaves(compiled(jax.grad(total))(random_params()))
  )


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


def test_quantize_kernels_accepts_a_recipe_name_and_refuses_unknown_layers():
  params = {"image": {"block_0": {"fc1": {"kernel": jnp.ones((16, 16))}}}}
  by_name, expected = (quantize_kernels(params, r) for r in ("switchback", RECIPES["switchback"]))
  jax.tree.map(np.testing.assert_array_equal, by_name, expected)
  with pytest.raises(ValueError, match="No kernel of qkv, out, fc1, fc2"):
    quantize_kernels({"Dense_0": {"kernel": jnp.ones((16, 16))}}, "switchback")
