"""Writes the files of this folder: `python tests/core/served/make.py`. They have version 1.

They are never written anew: every later version of the library has to read them.
"""

import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from sbjax import quantize_weights
from sbjax.interop.serving import VERSION, save_serving

FOLDER = pathlib.Path(__file__).parent
RULES = [("head", None), ("attention/*", "switchback_q"), ("patches", "fp8_switchback")]


class Classifier(nn.Module):
  """A patch convolution, attention and a head: kernels of two, three and four axes."""

  @nn.compact
  def __call__(self, image):
    x = nn.Conv(8, (2, 2), (2, 2), name="patches")(image)
    x = x.reshape(x.shape[0], -1, 8)
    x = x + nn.MultiHeadDotProductAttention(2, name="attention")(nn.LayerNorm(name="norm")(x))
    return nn.Dense(3, name="head")(x.mean(1))


def inputs():
  return jnp.asarray(np.linspace(-1, 1, 2 * 4 * 4 * 3, dtype=np.float32).reshape(2, 4, 4, 3))


def parameters():
  shapes = jax.eval_shape(Classifier().init, jax.random.key(0), inputs())["params"]
  leaves, treedef = jax.tree.flatten(shapes)
  waves = [np.sin(np.arange(a.size) * (i + 1.3)).reshape(a.shape) for i, a in enumerate(leaves)]
  return treedef.unflatten([jnp.asarray(wave, jnp.float32) / 2 for wave in waves])


def served():
  call = lambda params: Classifier().apply({"params": params}, inputs())  # noqa: E731
  return quantize_weights(parameters(), RULES, call=call)


if __name__ == "__main__":
  for suffix in ("safetensors", "msgpack"):
    save_serving(served(), FOLDER / f"classifier-{VERSION}.{suffix}")
