"""A small CLIP for tests: its parameters, its batch, its outputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from flax_case import compiled

from sbjax.models.clip import CLIP
from sbjax.models.sizes import CLIPConfig, TextConfig, VisionConfig
from sbjax.models.transformer import BlockOptions

EOT = 63
MICRO = CLIPConfig(
  24,
  VisionConfig(image_size=16, patch_size=4, width=48, layers=3, heads=3),
  TextConfig(context_length=8, vocab_size=64, width=32, layers=2, heads=2, eot_id=EOT),
)


def clip(config=MICRO, **options):
  """A CLIP that computes in float32; options are its own and those of its blocks."""
  own = {name: options.pop(name) for name in list(options) if hasattr(CLIP, name)}
  return CLIP(config, BlockOptions(**{"dtype": jnp.float32, **options}), **own)


def pairs(batch=4, config=MICRO):
  """Images, and texts that end at their fifth token."""
  size, text = config.vision.image_size, config.text
  image = jax.random.normal(jax.random.key(1), (batch, size, size, 3))
  ids = jax.random.randint(jax.random.key(2), (batch, text.context_length), 2, text.end_id)
  return image, ids.at[:, 4].set(text.end_id)


@functools.cache
def shapes(config=MICRO, **options):
  init = clip(config, **options).init
  image, text = jax.eval_shape(functools.partial(pairs, config=config))
  return jax.eval_shape(init, jax.random.key(0), image, text)["params"]


def drawn(shapes):
  """Random parameters, none zero or one: kernels keep the variance, scales stay near one."""
  rng = np.random.default_rng(0)

  def draw(path, leaf):
    noise = rng.standard_normal(leaf.shape, np.float32)
    if path[-1] == "kernel":
      return jax.device_put(noise * np.float32(leaf.shape[-2] ** -0.5))
    return jax.device_put(
      np.float32(path[-1] in ("scale", "logit_scale")) + noise * np.float32(0.2)
    )

  with jax.ensure_compile_time_eval():  # Callers cache the result, and may call within a trace.
    return unflatten_dict({k: draw(k, v) for k, v in flatten_dict(shapes).items()})


@functools.cache
def random_params(config=MICRO, **options):
  return drawn(shapes(config, **options))


@functools.cache
def initial_params():
  key = jax.random.key(0, impl="unsafe_rbg")  # Threefry for every tensor takes long to compile.
  return compiled(clip(zero_init_layer_scale=True).init)(key, *pairs())["params"]


@functools.partial(compiled, static_argnames=("model", "train"))
def apply(model, params, image, text, train=False, rngs=None):
  return model.apply({"params": params}, image, text, train=train, rngs=rngs)


def outputs(model, params, batch=None, **kwargs):
  return apply(model, params, *(pairs() if batch is None else batch), **kwargs)


def image_loss(model, params):
  """A scalar that depends on every parameter of the image tower."""
  features = model.apply({"params": params}, pairs()[0], method="encode_image")
  weights = jnp.asarray(np.random.default_rng(5).standard_normal(features.shape, np.float32))
  return jnp.sum(weights * features)


def value_and_image_gradient(model, params):
  """All outputs, and `image_gradient`."""
  gradient = jax.grad(functools.partial(image_loss, model))(params)["image"]
  return model.apply({"params": params}, *pairs()), gradient


@functools.partial(compiled, static_argnames="model")
def image_gradient(model, params):
  return jax.grad(functools.partial(image_loss, model))(params)["image"]
