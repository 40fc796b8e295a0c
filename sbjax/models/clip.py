"""CLIP: a vision transformer and a causal text transformer that meet in one embedding space.

The architecture is open_clip's (https://github.com/mlfoundations/open_clip), so that weights go
both ways (sbjax/models/convert.py). The four linear layers of a block (qkv, out, fc1, fc2) follow a
recipe. Layer norms and the two final projections compute in float32, everything else in
`BlockOptions.dtype`. Parameters are float32. Their tree depends on the sizes, `scan`,
`zero_init_layer_scale` and `qk_norm`, never on the recipe.

Letters in shapes: B batch, L length (patches or tokens), D width, H heads, E embedding.
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from sbjax.layers import Embedding, SwitchBackDense
from sbjax.models.sizes import CLIPConfig, TextConfig, VisionConfig
from sbjax.models.transformer import BLOCK_LINEARS, Block, BlockOptions, Inits, blocks, layer_norm
from sbjax.recipes import FULL, RecipeRules

MAX_LOG_LOGIT_SCALE = math.log(100)

# Where open_clip sets no initial values, PyTorch's defaults apply: U(-1/sqrt(fan_in),
# 1/sqrt(fan_in)) for a linear layer's kernel and bias, Xavier for attention's input projection.
_uniform = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
_VISION_INITS = Inits(nn.initializers.xavier_uniform(), _uniform, _uniform, _uniform)


def _text_inits(width: int, layers: int) -> Inits:
  normal = nn.initializers.normal
  residual = normal(width**-0.5 * (2 * layers) ** -0.5)
  return Inits(normal(width**-0.5), residual, normal((2 * width) ** -0.5), residual)


class CLIP(nn.Module):
  """Embeds images [B, image_size, image_size, 3] and texts [B, context_length] as [B, E] of norm 1.

  Images are floating point, normalised by mean and deviation. Texts are integer ids; the features
  of a text without `eot_id` are those of its first token.

  Args:
    options: how the blocks of both towers compute.
    patch_dropout: fraction of patches that a training step leaves out (Li et al. 2022,
      https://arxiv.org/abs/2212.00794).
    init_logit_scale, init_logit_bias: initial values of the learned factor on the features' dot
      products and of the learned bias added to them (None: no bias). SigLIP needs 10 and -10.
    block: `Block`, or another module with its fields and parameters (benchmarks/flax_block.py).
  """

  config: CLIPConfig
  options: BlockOptions = BlockOptions()
  patch_dropout: float = 0.0
  init_logit_scale: float = 1 / 0.07
  init_logit_bias: float | None = None
  block: type[nn.Module] = Block

  def setup(self):
    if not 0 <= self.patch_dropout < 1:
      raise ValueError(f"patch_dropout={self.patch_dropout} must be in [0, 1).")
    if isinstance(self.options.recipe, RecipeRules):
      self.options.recipe.check(self._linears())
    c, shared = self.config, (self.config.embed_dim, self.options, self.block)
    self.image = VisionTower(c.vision, *shared, self.patch_dropout)
    self.text = TextTower(c.text, *shared)
    constant = nn.initializers.constant
    log_scale = math.log(self.init_logit_scale)
    self.logit_scale = self.param("logit_scale", constant(log_scale), (), jnp.float32)
    if self.init_logit_bias is not None:
      self.logit_bias = self.param("logit_bias", constant(self.init_logit_bias), (), jnp.float32)

  def _linears(self) -> list[str]:
    """The paths of the blocks' linear layers."""
    towers, scan = {"image": self.config.vision, "text": self.config.text}, self.options.scan
    return [
      f"{tower}/{block}/{linear}"
      for tower, config in towers.items()
      for block in (["blocks"] if scan else [f"block_{i}" for i in range(config.layers)])
      for linear in BLOCK_LINEARS
    ]

  def __call__(
    self,
    image: jax.Array,
    text: jax.Array,
    *,
    train: bool = False,
    first_example: jax.typing.ArrayLike = 0,
  ) -> dict:
    """The inputs of a contrastive loss, all float32.

    Args:
      train: whether to drop patches, which needs a key: `rngs={"dropout": key}`.
      first_example: the index of the first of these examples in a larger batch. The dropped patches
        are the same as if one device had the whole batch.

    Returns:
      image_features, text_features: [B, E], of length 1.
      logit_scale: scalar in [1, 100], the factor on their dot products.
      logit_bias: scalar, if the model has one.
      block_outputs: {"image": [layers], "text": [layers]}, the mean |feature| after each block;
        no gradient flows into it.
    """
    image_features, image_blocks = self.image(image, train=train, first_example=first_example)
    text_features, text_blocks = self.text(text)
    bias = {} if self.init_logit_bias is None else {"logit_bias": self.logit_bias}
    return {
      **bias,
      "image_features": _normalize(image_features),
      "text_features": _normalize(text_features),
      "logit_scale": jnp.exp(_clamp(self.logit_scale, 0.0, MAX_LOG_LOGIT_SCALE)),
      "block_outputs": {"image": image_blocks, "text": text_blocks},
    }

  def encode_image(self, image: jax.Array, train: bool = False, normalize: bool = True):
    """Float32 features [B, E] of images [B, image_size, image_size, 3]."""
    features, _ = self.image(image, train=train)
    return _normalize(features) if normalize else features

  def encode_text(self, text: jax.Array, normalize: bool = True) -> jax.Array:
    """Float32 features [B, E] of token ids [B, context_length]."""
    features, _ = self.text(text)
    return _normalize(features) if normalize else features


class VisionTower(nn.Module):
  """ViT: runs patches and a class token through the blocks, projects the class token to [B, E]."""

  config: VisionConfig
  embed_dim: int
  options: BlockOptions
  block: type[nn.Module]
  patch_dropout: float

  @nn.compact
  def __call__(self, image: jax.Array, *, train: bool, first_example: jax.typing.ArrayLike = 0):
    c, dtype = self.config, self.options.dtype
    normal = nn.initializers.normal(c.width**-0.5)
    if image.shape[1:] != (c.image_size, c.image_size, 3):
      raise ValueError(f"Images must be [B, {c.image_size}, {c.image_size}, 3], not {image.shape}.")
    # A convolution whose stride is its size is a matmul over patches.
    embed = SwitchBackDense(
      c.width,
      use_bias=False,
      dtype=dtype,
      kernel_init=_uniform,
      recipe=FULL,
      name="patch_embedding",
    )
    x_BLD = embed(_patches(image.astype(dtype), c.patch_size))
    class_D = self.param("class_embedding", normal, (c.width,), jnp.float32)
    position_LD = self.param("positional_embedding", normal, (c.patches + 1, c.width), jnp.float32)
    class_B1D = jnp.broadcast_to(class_D.astype(dtype), (x_BLD.shape[0], 1, c.width))
    x_BLD = jnp.concatenate([class_B1D, x_BLD], axis=1) + position_LD.astype(dtype)[None]
    if train and self.patch_dropout:
      key = self.make_rng("dropout")
      x_BLD = patch_dropout(x_BLD, self.patch_dropout, key, first_example)
    x_BLD = layer_norm(x_BLD, "ln_pre")
    x_BLD, outputs = blocks(
      x_BLD, c, self.options, block=self.block, causal=False, inits=_VISION_INITS
    )
    x_BD = layer_norm(x_BLD[:, 0], "ln_post")
    proj = self.param("proj", normal, (c.width, self.embed_dim), jnp.float32)
    return x_BD.astype(jnp.float32) @ proj, outputs


class TextTower(nn.Module):
  """Causal transformer over tokens; projects the first end-of-text token to [B, E]."""

  config: TextConfig
  embed_dim: int
  options: BlockOptions
  block: type[nn.Module]

  @nn.compact
  def __call__(self, text: jax.Array):
    c, normal = self.config, nn.initializers.normal
    if text.shape[1:] != (c.context_length,):
      raise ValueError(f"Texts must be [B, {c.context_length}], not {text.shape}.")
    # The look-up is in float32, since its gradient sums over all occurrences of a token.
    x_BLD = Embedding(
      c.vocab_size, c.width, dtype=jnp.float32, embedding_init=normal(0.02), name="token_embedding"
    )(text)
    position_LD = self.param(
      "positional_embedding", normal(0.01), (c.context_length, c.width), jnp.float32
    )
    x_BLD = (x_BLD + position_LD[None]).astype(self.options.dtype)
    inits = _text_inits(c.width, c.layers)
    x_BLD, outputs = blocks(x_BLD, c, self.options, block=self.block, causal=True, inits=inits)
    eot_B11 = jnp.argmax(text == c.eot_id, axis=1)[:, None, None]
    x_BD = jnp.take_along_axis(x_BLD, eot_B11, axis=1)[:, 0]
    x_BD = layer_norm(x_BD, "ln_final")
    proj = self.param("proj", normal(c.width**-0.5), (c.width, self.embed_dim), jnp.float32)
    return x_BD.astype(jnp.float32) @ proj, outputs


def patch_dropout(
  x_BLD: jax.Array, rate: float, key: jax.Array, first_example: jax.typing.ArrayLike = 0
) -> jax.Array:
  """Keeps the class token at index 0 and a random fraction 1 - rate of each image's patches.

  An image's draw depends only on the key and the image's index, first_example + its row.
  """
  batch, patches = x_BLD.shape[0], x_BLD.shape[1] - 1
  kept = max(1, int(patches * (1 - rate)))
  keys = jax.vmap(functools.partial(jax.random.fold_in, key))(first_example + jnp.arange(batch))
  uniform_BL = jax.vmap(lambda key: jax.random.uniform(key, (patches,)))(keys)
  _, drawn_BL = jax.lax.top_k(uniform_BL, kept)
  patches_BLD = jnp.take_along_axis(x_BLD[:, 1:], drawn_BL[:, :, None], axis=1)
  return jnp.concatenate([x_BLD[:, :1], patches_BLD], axis=1)


def _patches(image_BHWC: jax.Array, size: int) -> jax.Array:
  """The size x size patches of images, row by row, flattened to [B, L, size * size * 3]."""
  b, h, w, c = image_BHWC.shape
  x = image_BHWC.reshape(b, h // size, size, w // size, size, c).transpose(0, 1, 3, 2, 4, 5)
  return x.reshape(b, (h // size) * (w // size), size * size * c)


def _normalize(x_BE: jax.Array) -> jax.Array:
  """Scales rows to length 1. A zero row stays zero and has a finite gradient."""
  square = jnp.sum(jnp.square(x_BE), axis=-1, keepdims=True)
  return x_BE * jax.lax.rsqrt(jnp.maximum(square, 1e-24))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _clamp(x, low, high):
  """Clips x to [low, high]. Outside, only gradients that lead back into the range pass.

  Gradient descent then neither drifts further out nor gets stuck, as it would with `jnp.clip`,
  whose gradient is zero there.
  """
  return jnp.clip(x, low, high)


def _clamp_fwd(x, low, high):
  return jnp.clip(x, low, high), x


def _clamp_bwd(low, high, x, dy):
  outwards = ((x >= high) & (dy < 0)) | ((x <= low) & (dy > 0))
  return (jnp.where(outwards, jnp.zeros_like(dy), dy),)


_clamp.defvjp(_clamp_fwd, _clamp_bwd)
