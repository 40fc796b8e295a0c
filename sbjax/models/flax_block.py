"""A transformer block of plain Flax layers, with the parameters of sbjax.models.transformer.Block.

Layer norm, GELU and residual connections are not fused with the linear layers, and each rounds its
result to the compute dtype. Usage: `CLIP(config, options, block=FlaxBlock)`.
"""

import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from sbjax.linear.layers import LayerScale
from sbjax.models.transformer import OUT_NAME, Block, layer_norm

_ACTIVATIONS = {
  "gelu": functools.partial(nn.gelu, approximate=False),
  "gelu_tanh": nn.gelu,
  "quick_gelu": lambda x: x * nn.sigmoid(x * jnp.asarray(1.702, x.dtype)),
}


class FlaxBlock(Block):
  """The baseline of benchmarks: each linear layer quantizes its operands by itself."""

  def _attention(self, x_BLD):
    width = x_BLD.shape[-1]
    qkv_BLD = self._linear("qkv", width, 3 * width)(self._norm("ln_1", x_BLD))
    y_BLD = self._attend(jnp.split(qkv_BLD, 3, axis=-1))
    y_BLD = checkpoint_name(self._linear("out", width, width)(y_BLD), OUT_NAME)
    return x_BLD + self._layer_scale("ls_1", y_BLD)

  def _mlp(self, x_BLD):
    width = x_BLD.shape[-1]
    fc1 = self._linear("fc1", width, self.config.mlp_width)
    fc2 = self._linear("fc2", self.config.mlp_width, width)
    y_BLD = fc2(_ACTIVATIONS[self.config.activation](fc1(self._norm("ln_2", x_BLD))))
    return x_BLD + self._layer_scale("ls_2", y_BLD)

  def _norm(self, name, x_BLD):
    return layer_norm(x_BLD, name, self.config.norm_epsilon)

  def _layer_scale(self, name, y_BLD):
    return LayerScale(name=name)(y_BLD) if self.options.zero_init_layer_scale else y_BLD


class PlainBlock(FlaxBlock):
  """Its linear layers are products of jnp, which `quantize_model` finds; they have no recipe."""

  def _linear(self, name, fan_in, features):
    linear = super()._linear(name, fan_in, features)

    def apply(x_BLD):
      parameters: Any = linear.parameters(fan_in)
      kernel, bias = parameters
      return x_BLD @ kernel.astype(x_BLD.dtype) + bias.astype(x_BLD.dtype)[None, None]

    return apply
