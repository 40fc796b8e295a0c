"""munit's blocks and CLIP: unit variance at every depth and width, in fp8 too."""

import dataclasses
import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clip_case import MICRO, clip, drawn, outputs, pairs, random_params, shapes
from flax_case import compiled
from pairwise import mainly

from sbjax.linear.layers import SwitchBackDense
from sbjax.models.clip import CLIP
from sbjax.models.flax_block import FlaxBlock
from sbjax.models.sizes import SIZES, TextConfig
from sbjax.models.transformer import BlockOptions, quantize_kernels
from sbjax.models.unit_block import UNIT_INITS, UnitBlock, residual_share

TOKENS, HEAD = (4, 32), 32


def rms(x):
  return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))


def unit_block(width, layers, causal=True, **options):
  config = TextConfig(
    context_length=TOKENS[1], vocab_size=64, width=width, layers=layers, heads=width // HEAD,
    eot_id=1,
  )  # fmt: skip
  options = BlockOptions(**{"parametrization": "unit", "dtype": jnp.float32} | options)
  return UnitBlock(config, TOKENS[1], causal, UNIT_INITS, options)


@functools.cache
def statistics(width, layers, **options):
  """The RMS, by depth: of x, of its gradient, and by linear layer of its input and output gradient.

  x and the gradient of the last block's output are drawn with unit variance.
  """
  block = unit_block(width, layers, **options)
  sizes = {"qkv": 3 * width, "out": width, "fc1": 4 * width, "fc2": width}
  taps = {name: jnp.zeros((*TOKENS, size)) for name, size in sizes.items()}
  keys = jax.random.split(jax.random.key(0), 2 + layers)
  x, dy = (jax.random.normal(key, (*TOKENS, width)) for key in keys[:2])

  def apply(taps, x, params):
    """The block's output; the taps are added to those of its linear layers."""
    inputs = {}

    def tapped(call, args, kwargs, context):
      y, name = call(*args, **kwargs), context.module.name
      if isinstance(context.module, SwitchBackDense) and context.method_name == "__call__":
        inputs[name] = rms(args[0])
        return y + taps[name]
      return y

    with nn.intercept_methods(tapped):
      return block.apply({"params": params}, x)[0], inputs

  def forward(x, params):
    y, inputs = apply(taps, x, params)
    return y, (x, rms(y), inputs)

  def backward(dy, saved):
    params, x = saved
    _, vjp, _ = jax.vjp(lambda taps, x: apply(taps, x, params), taps, x, has_aux=True)
    gradients, dx = vjp(dy)
    return dx, (rms(dx), jax.tree.map(rms, gradients))

  @compiled
  def run(x, dy, keys):
    params = jax.vmap(lambda key: block.init(key, x[:1])["params"])(keys)
    _, (xs, of_x, inputs) = jax.lax.scan(forward, x, params)
    _, (of_dx, gradients) = jax.lax.scan(backward, dy, (params, xs), reverse=True)
    return of_x, of_dx, inputs, gradients

  return jax.tree.map(np.asarray, run(x, dy, keys[2:]))


DEEP = ({}, {"causal": False}, {"recipe": "fp8_static"})


@pytest.mark.parametrize("options", mainly([{}], DEEP), ids=str)
def test_the_residual_stream_has_unit_variance_at_every_depth(options):
  of_x = statistics(256, 24, **options)[0]
  assert of_x.shape == (24,)
  assert of_x.min() > 0.8 and of_x.max() < 1.25


@pytest.mark.parametrize("options", mainly([DEEP[2]], DEEP), ids=str)
def test_the_operands_of_every_matmul_are_near_unit_variance(options):
  _, of_dx, inputs, gradients = statistics(256, 24, **options)
  # Attention averages values, GELU halves them, and a branch has a share of the gradient.
  for values, low in ((of_dx, 2**-2), *((v, 2**-2) for v in inputs.values())):
    assert values.min() > low and values.max() < 1.25
  for name, values in gradients.items():
    # e5m2 keeps two bits from 2**-14 on, and ends at 2**15.8.
    assert values.min() > 2**-5 and values.max() < 2, name


@pytest.mark.slow
def test_all_widths_have_the_same_statistics():
  by_width = [statistics(width, 6) for width in (64, 256, 512)]
  for depth in jax.tree.leaves(jax.tree.map(lambda *each: np.stack(each), *by_width)):
    assert (depth.max(axis=0) / depth.min(axis=0)).max() < 1.4


@pytest.mark.slow
def test_a_step_of_munits_rate_moves_all_widths_alike(recipe="fp8_static"):
  def moved(width, rate):
    """How far a step of Adam's first size on all kernels moves the output, in RMS."""
    block = unit_block(width, 4, recipe=recipe)
    keys = jax.random.split(jax.random.key(1), 3)
    x, dy = (jax.random.normal(key, (*TOKENS, width)) for key in keys[:2])

    def apply(params):
      return block.apply({"params": params}, x)[0]

    def step(p, g):
      return p - jnp.float32(rate) * jnp.sign(g) if p.ndim == 2 else p

    @compiled
    def run():
      params = block.init(keys[2], x[:1])["params"]
      y, vjp = jax.vjp(apply, params)
      return rms(apply(jax.tree.map(step, params, *vjp(dy))) - y)

    return float(run())

  rate = 0.02
  narrow, wide = moved(64, rate), moved(512, rate * 8**-0.5)
  assert 1 / 1.25 < wide / narrow < 1.25
  assert moved(512, rate) > 1.8 * narrow


def test_the_block_equals_its_equations():
  width, layers = 64, 12
  block = unit_block(width, layers)
  params = drawn(
    jax.eval_shape(block.init, jax.random.key(0), jnp.zeros((*TOKENS, width)))["params"]
  )
  x = jax.random.normal(jax.random.key(3), (*TOKENS, width))
  got, _ = compiled(block.apply)({"params": params}, x)
  np.testing.assert_allclose(got, in_numpy(np.float64(x), params), rtol=1e-4, atol=1e-5)


def in_numpy(x, params, tau=0.3):
  p = jax.tree.map(np.float64, params)
  (b, length, _), heads = x.shape, x.shape[-1] // HEAD

  def linear(x, name):
    return x @ p[name]["kernel"] / np.sqrt(x.shape[-1]) + p[name]["bias"]

  def add(x, y, name):
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)
    return np.sqrt(1 - tau) * x + np.sqrt(tau) * (y * p[name]["scale"] + p[name]["bias"])

  qkv = linear(x, "qkv").reshape(b, length, 3, heads, HEAD)
  logits = np.einsum("bqhd,bkhd->bhqk", qkv[:, :, 0], qkv[:, :, 1]) / np.sqrt(HEAD)
  weights = np.exp(logits) * np.tri(length)
  weights /= weights.sum(-1, keepdims=True)
  y = np.einsum("bhqk,bkhd->bqhd", weights, qkv[:, :, 2]).reshape(x.shape)
  x = add(x, linear(y, "out"), "ln_1")
  h = np.float64(jax.nn.gelu(linear(x, "fc1").astype(np.float32), approximate=False))
  return add(x, linear(h, "fc2"), "ln_2")


def test_tau_falls_with_depth():
  taus = [residual_share(layers) for layers in range(1, 100)]
  assert all(a >= b for a, b in itertools.pairwise(taus))
  np.testing.assert_allclose([residual_share(n) for n in (4, 12, 24, 48)], [0.4, 0.3, 0.2, 0.1])


UNIT = {"parametrization": "unit"}


@pytest.mark.parametrize("scan", [True, False])
def test_the_parameters_are_those_of_the_standard_model(scan):
  assert shapes(scan=scan, **UNIT) == shapes(scan=scan)


@pytest.mark.slow
def test_initial_kernels_and_embeddings_have_unit_variance():
  key = jax.random.key(0, impl="unsafe_rbg")
  params = compiled(clip(**UNIT).init)(key, *pairs())["params"]
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if name.endswith("bias"):
      assert not leaf.any(), name
    elif name.endswith(("kernel", "embedding", "proj")):
      assert abs(rms(leaf) - 1) < 0.2, name


@pytest.mark.slow
def test_embeddings_blocks_and_projected_features_have_unit_variance():
  config = dataclasses.replace(
    MICRO,
    embed_dim=256,  # The class token's features hardly differ between images.
    vision=dataclasses.replace(MICRO.vision, layers=1),
    text=dataclasses.replace(MICRO.text, layers=1),
  )
  model, (image, text) = clip(config, scan=False, **UNIT), pairs(32)
  key = jax.random.key(0, impl="unsafe_rbg")

  @compiled
  def run(image, text):
    params = model.init(key, image, text)["params"]
    how = {"capture_intermediates": lambda _, method: method == "__call__"}
    return model.apply({"params": params}, image, text, mutable=["intermediates"], **how)[1]

  seen = run(image, text)["intermediates"]
  assert abs(rms(seen["image"]["patch_embedding"]["__call__"][0]) - 1) < 0.2
  for tower in ("image", "text"):
    stream, _ = seen[tower]["block_0"]["__call__"][0]
    assert abs(rms(stream) - 1) < 0.15, tower
    assert abs(rms(seen[tower]["__call__"][0][0]) - 1) < 0.2, tower  # Before normalisation.


def test_weights_quantized_once_give_the_same_features(recipe="fp8_static"):
  model, params = clip(recipe=recipe, **UNIT), random_params(**UNIT)

  @compiled
  def run(params):
    variables = {"params": params, "quantized": quantize_kernels(params, recipe)}
    return model.apply(variables, *pairs())

  got = run(params)
  for name in ("image_features", "text_features"):
    np.testing.assert_allclose(got[name], outputs(model, params)[name], rtol=1e-5, atol=1e-6)


MAP = dataclasses.replace(
  MICRO,
  embed_dim=48,
  vision=dataclasses.replace(MICRO.vision, pool="map", pre_norm=False),
)


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: BlockOptions(parametrization="mup"), "'mup' must be one of standard, unit"),
    (lambda: BlockOptions(tau=0.2), "needs parametrization='unit'"),
    (lambda: BlockOptions(tau=1.0, **UNIT), "tau=1.0 must be between 0 and 1"),
    (lambda: BlockOptions(tau=float("nan"), **UNIT), "tau=nan must be between 0 and 1"),
    (lambda: BlockOptions(zero_init_layer_scale=True, **UNIT), "needs parametrization='standard'"),
    (
      lambda: BlockOptions(keep="grouped", **UNIT),
      "keep='grouped' needs parametrization='standard'",
    ),
    (lambda: shapes(block=FlaxBlock, **UNIT), "block=FlaxBlock needs parametrization='standard'"),
    (lambda: shapes(MAP, **UNIT), "no pooling by attention"),
  ],
  ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_do_not_go_together_are_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_the_default_is_the_standard_parametrization():
  assert not BlockOptions().is_unit
  assert not CLIP(SIZES["tiny"]).options.is_unit
