"""A recipe for each linear layer of a model, by its path."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clip_case import clip, image_gradient, image_loss, pairs, random_params
from dot_case import assert_close, assert_same
from flax_case import bitwise
from jax.sharding import PartitionSpec as P
from pairwise import mainly

from sbjax import RECIPES, RecipeRules, quantized_dot
from sbjax.linear.fused import layer_norm_mlp
from sbjax.models.flax_block import FlaxBlock
from sbjax.models.transformer import Block, BlockOptions, quantize_kernels
from sbjax.ops.rows import LayerNormParams
from sbjax.recipes import parse_recipe
from train.config import MeshConfig
from train.parallel.gather import gather_parameters
from train.parallel.sharding import make_mesh, parameter_specs
from train.step import make_init
from train.task import CLIPTask

SWITCHBACK = RECIPES["switchback"]


def int8_products(model, params) -> int:
  """The number of int8 matmuls in the image tower's loss and gradient."""
  jaxpr = jax.make_jaxpr(jax.grad(functools.partial(image_loss, model)))(params)
  return str(jaxpr).count("preferred_element_type=int32")


@pytest.mark.slow
def test_a_single_rule_for_all_layers_equals_the_recipe():
  params = random_params()
  by_rule = clip(recipe=RecipeRules.of({"*": "switchback"}))
  assert_same(image_gradient(by_rule, params), image_gradient(clip(recipe=SWITCHBACK), params))


@pytest.mark.parametrize("block", mainly([Block], [Block, FlaxBlock]))
def test_a_block_or_a_linear_can_have_its_own_recipe(block):
  params, options = random_params(scan=False), {"scan": False, "block": block}

  def count(**rules):
    return int8_products(clip(recipe=RecipeRules.of(rules), **options), params)

  everywhere = count(**{"*": "switchback"})
  # Forward and input gradient of four linears; Block computes q, k and v in separate products.
  of_a_layer = (6 if block is Block else 4) + 4
  assert everywhere == 3 * of_a_layer
  assert count(**{"*/fc1": "full", "*": "switchback"}) == everywhere - 2 * 3
  assert count(**{"image/block_0/*": "full", "*": "switchback"}) == 2 * of_a_layer
  assert count(**{"image/*/out": "switchback", "*": "full"}) == 2 * 3


@pytest.mark.parametrize("pair", [("full", "switchback"), ("switchback_m", "full")], ids=str)
def test_the_two_linears_of_an_mlp_can_have_different_recipes(pair):
  rng = np.random.default_rng(0)
  x, dy = rng.normal(size=(2, 12, 32)).astype(np.float32)
  w1, w2 = (rng.normal(size=s).astype(np.float32) / 6 for s in ((32, 64), (64, 32)))
  norm = LayerNormParams(jnp.ones(32), jnp.zeros(32))

  def ours(x, w1, w2):
    return layer_norm_mlp(x, norm, w1, None, w2, None, pair, add_residual=True)

  def apart(x, w1, w2):
    n = nn.LayerNorm(epsilon=1e-5, use_bias=False, use_scale=False).apply({}, x)
    h = nn.gelu(quantized_dot(n, w1, pair[0]), approximate=False)
    return x + quantized_dot(h, w2, pair[1])

  actual, expected = (
    jax.jit(lambda *a, f=f: (lambda y, back: (y, back(dy)))(*jax.vjp(f, *a)))(x, w1, w2)
    for f in (ours, apart)
  )
  # Sums in another order change some 8-bit roundings; switchback_m's dw uses rounded inputs.
  assert_close(actual, expected, 2e-2)


def test_quantize_kernels_follows_the_rules():
  rules = RecipeRules.of({"*/fc1": "full", "*": "switchback"})
  params, model = random_params(), clip(recipe=rules)
  quantized = jax.jit(quantize_kernels, static_argnums=1)(params, rules)
  assert set(quantized["image"]["blocks"]) == {"qkv", "out", "fc2"}
  image, text = pairs()
  variables = {"params": params, "quantized": quantized}
  assert_same(
    bitwise(model.apply)(variables, image, text),
    bitwise(model.apply)({"params": params}, image, text),
  )


def test_gather_parameters_follows_the_rules():
  rules = RecipeRules.of({"*/fc1": "full", "*": "switchback"})
  mesh, params = make_mesh(MeshConfig(data=1, fsdp=8)), random_params()
  gather = functools.partial(gather_parameters, options=BlockOptions(recipe=rules), mesh=mesh)
  specs = parameter_specs(params, mesh)
  run = jax.shard_map(gather, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False)
  gathered = jax.eval_shape(run, params)
  assert set(gathered["quantized"]["image"]["blocks"]) == {"qkv", "out", "fc2"}
  shapes = jax.tree.map(lambda leaf: leaf.shape, (gathered["params"], params))
  assert shapes[0] == shapes[1]


def test_rules_do_not_change_the_initial_state():
  rules = RecipeRules.of({"image/block_0/*": "full", "*": "switchback"})
  by_rule, by_recipe = (
    jax.eval_shape(make_init(CLIPTask(clip(recipe=recipe, scan=False)), optax.identity(), 0))
    for recipe in (rules, "switchback")
  )
  assert by_rule == by_recipe


def test_rules_are_parsed_from_a_string():
  rules = {"*/fc1": "full", "*": "switchback"}
  assert parse_recipe("*/fc1=full, *=switchback") == RecipeRules.of(rules)
  assert parse_recipe("switchback") is SWITCHBACK


@pytest.mark.parametrize(
  ("rules", "message"),
  [
    ("*/fc1=full", r"No rule fits the linear layer 'image/blocks/qkv'.*'\*'"),
    ("*/fc3=full, *=switchback", r"'\*/fc3' fits no linear layer.*image/blocks/qkv, "),
    ("image/block_0/*=full, *=switchback", r"'image/block_0/\*' fits no linear.*image/blocks/qkv"),
    ("*/fc1=full, *=switchback, */fc2=full", r"'\*/fc2' fits no linear layer, or only those of"),
    ("*/fc1=full, */fc1=switchback, *=full", r"'\*/fc1' fits no linear layer, or only those of"),
    ("*=int4", "Unknown recipe 'int4'"),
    ("*/fc1=full, switchback", "'switchback' of .* must be a rule: a pattern, '=', a recipe"),
  ],
)
def test_invalid_rules_are_named(rules, message):
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(clip(recipe=parse_recipe(rules)).init, jax.random.key(0), *pairs())
