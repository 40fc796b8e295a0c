"""munit scaling's transformer block: unit variance at every depth, so that fp8 needs no scales.

Narayan et al. 2025 (https://arxiv.org/abs/2502.05967). Kernels are drawn from N(0, 1), and their
layers multiply all three matmuls by fan_in**-0.5. A block adds a branch f as

  x <- sqrt(1 - tau) x + sqrt(tau) norm(f(x))

The layer norm stands at the end of the branch: an attention averages its values, and no constant
knows by how much. x itself is not normalised on the way.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from sbjax.linear.layers import SwitchBackDense
from sbjax.models.transformer import OUT_NAME, Block, Inits
from sbjax.ops.matmul import at_least_float32
from sbjax.ops.rows import activate

UNIT_INITS = Inits(*[nn.initializers.normal(1.0)] * 4)


def residual_share(layers: int) -> float:
  """tau of a tower of so many blocks: .4 for up to 6, .3 for 12, .2 for 24, .1 from 48 on.

  The paper has .4 at 4 layers and about .1 in very deep models. Between them our rule takes .1 less
  for each doubling.

  >>> [round(residual_share(layers), 2) for layers in (4, 12, 24, 32, 48, 96)]
  [0.4, 0.3, 0.2, 0.16, 0.1, 0.1]
  """
  return min(max(0.3 - 0.1 * math.log2(layers / 12), 0.1), 0.4)


class UnitBlock(Block):
  """`Block` with munit's residual connections, for x [B, L, D]; the parameters are Block's.

  `ln_1` normalises the attention's result and `ln_2` the MLP's. `BlockOptions.tau` is the share of
  a branch. Layer norms are not fused with the linear layers, which they do not precede.
  """

  def _attention(self, x_BLD):
    width = x_BLD.shape[-1]
    qkv_BLD = self._linear("qkv", width, 3 * width)(x_BLD)
    y_BLD = self._attend(jnp.split(qkv_BLD, 3, axis=-1))
    y_BLD = checkpoint_name(self._linear("out", width, width)(y_BLD), OUT_NAME)
    return self._add(x_BLD, y_BLD, "ln_1")

  def _mlp(self, x_BLD):
    width, hidden = x_BLD.shape[-1], self.config.mlp_width
    h_BLD = activate(self._linear("fc1", width, hidden)(x_BLD), self.config.activation)
    return self._add(x_BLD, self._linear("fc2", hidden, width)(h_BLD), "ln_2")

  def _add(self, x_BLD: jax.Array, y_BLD: jax.Array, norm: str) -> jax.Array:
    """The residual connection of x and a branch's result, computed in float32."""
    tau = self.options.tau or residual_share(self.config.layers)
    y_BLD = nn.LayerNorm(self.config.norm_epsilon, dtype=jnp.float32, name=norm)(
      at_least_float32(y_BLD)
    )
    return ((1 - tau) ** 0.5 * at_least_float32(x_BLD) + tau**0.5 * y_BLD).astype(x_BLD.dtype)

  def _linear(self, name, fan_in, features):
    return SwitchBackDense(
      features,
      dtype=self.options.dtype,
      kernel_init=getattr(self.inits, name),
      recipe=self._recipe(name),
      backend=self.options.backend,
      multiplier=fan_in**-0.5,
      name=name,
    )
