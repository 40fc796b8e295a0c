"""CLIP: a vision transformer and a causal text transformer that meet in one embedding space.

The architecture is open_clip's (https://github.com/mlfoundations/open_clip), so that weights go
both ways (sbjax/models/convert.py). Its four linear layers a block (qkv, out, fc1, fc2) follow a
recipe; everything else computes in `dtype`, and layer norms and the two final projections in
float32. Parameters are float32, and their tree depends on the sizes, `scan`,
`zero_init_layer_scale` and `qk_norm`, never on the recipe.

Letters in shapes: B batch, L length (patches or tokens), D width, H heads, E embedding.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.ad_checkpoint import checkpoint_name

from sbjax.fused import norm_dot, norm_mlp
from sbjax.layers import LayerNorm, LayerScale, SwitchBackDense
from sbjax.linear import quantize_kernel
from sbjax.models.attention import attention, length_for
from sbjax.models.sizes import CLIPConfig, TextConfig, VisionConfig
from sbjax.quantized_dot import DOT_NAME, RESIDUAL_NAME
from sbjax.recipes import FULL, Recipe

# What a rematerialised block keeps besides its input. Policies go by name, since JAX's own
# `checkpoint_dots` does not see a matmul inside a Pallas kernel.
_QKV_NAME, _OUT_NAME = "sbjax_qkv", "sbjax_out"
REMAT_POLICIES = {
  # Every linear's output, 9 widths a token: norms, attention and GELU are computed again.
  "dots": jax.checkpoint_policies.save_only_these_names(DOT_NAME),
  # And the 8-bit operands that recipes with quantized residuals keep for the backward.
  "dots_and_residuals": jax.checkpoint_policies.save_only_these_names(DOT_NAME, RESIDUAL_NAME),
  # These operands alone: with "switchback_m", 5 bytes a width and token, and fc1 is not repeated.
  "residuals": jax.checkpoint_policies.save_only_these_names(RESIDUAL_NAME),
  # The attention's linears alone, 4 widths a token: fc1 is computed again too.
  "attention_dots": jax.checkpoint_policies.save_only_these_names(_QKV_NAME, _OUT_NAME),
}

BLOCK_LINEARS = ("qkv", "out", "fc1", "fc2")
MAX_LOG_LOGIT_SCALE = math.log(100)


class Inits(NamedTuple):
  """How a block's four kernels start."""

  qkv: Callable
  out: Callable
  fc1: Callable
  fc2: Callable


# Where open_clip sets nothing PyTorch's defaults hold: U(-1/sqrt(fan_in), 1/sqrt(fan_in)) for a
# linear layer's kernel and bias, Xavier for attention's fused input projection.
_uniform = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
_VISION_INITS = Inits(nn.initializers.xavier_uniform(), _uniform, _uniform, _uniform)


def _text_inits(width: int, layers: int) -> Inits:
  normal = nn.initializers.normal
  residual = normal(width**-0.5 * (2 * layers) ** -0.5)
  return Inits(normal(width**-0.5), residual, normal((2 * width) ** -0.5), residual)


def _uniform_bias(fan_in: int) -> Callable:
  bound = fan_in**-0.5
  return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


class CLIP(nn.Module):
  """Images [B, image_size, image_size, 3] and texts [B, context_length] as unit vectors [B, E].

  Images are floating point and normalised already (mean and deviation); texts are integer ids,
  and a text without `eot_id` is read at its first token.

  Args:
    recipe: what the block linears' matmuls are rounded to.
    backend: who computes them; None chooses.
    fused: layer norm with what it feeds and the MLP as one operation each (sbjax.fused); False is
      plain Flax around SwitchBackDense, rounded to the compute dtype in more places.
    dtype: compute dtype.
    zero_init_layer_scale: each residual branch is multiplied by a learned vector that starts at
      0 (Wortsman et al. 2023, https://arxiv.org/abs/2304.13013).
    qk_norm: layer norm over the full width of q and of k, before they are split into heads.
    patch_dropout: fraction of patches that a training step leaves out (Li et al. 2022,
      https://arxiv.org/abs/2212.00794).
    scan: one compiled block scanned over layers, parameters stacked as [layers, ...] in `blocks`;
      False: `block_0`, `block_1`, ...
    remat: "none", "full" (a block keeps its input alone) or a key of REMAT_POLICIES.
    init_logit_scale, init_logit_bias: what the factor on the features' dot products and, unless
      None, a learned number added to them start at; the SigLIP loss wants 10 and -10.
    activation_sharding: where the blocks' [B, L, D] inputs and outputs live. None: XLA chooses,
      and may take the layout of a split embedding table, which splits widths and gathers tokens.
  """

  config: CLIPConfig
  recipe: Recipe = FULL
  backend: str | None = None
  fused: bool = True
  dtype: jnp.dtype = jnp.bfloat16
  zero_init_layer_scale: bool = False
  qk_norm: bool = False
  patch_dropout: float = 0.0
  scan: bool = True
  remat: str = "none"
  init_logit_scale: float = 1 / 0.07
  init_logit_bias: float | None = None
  activation_sharding: jax.sharding.Sharding | None = None

  def setup(self):
    if self.remat not in ("none", "full", *REMAT_POLICIES):
      known = ", ".join(("none", "full", *REMAT_POLICIES))
      raise ValueError(f"Unknown remat {self.remat!r}; known: {known}.")
    if not 0 <= self.patch_dropout < 1:
      raise ValueError(f"patch_dropout={self.patch_dropout} must be in [0, 1).")
    blocks = functools.partial(
      _blocks,
      scan=self.scan,
      remat=self.remat,
      recipe=self.recipe,
      backend=self.backend,
      fused=self.fused,
      dtype=self.dtype,
      zero_init_layer_scale=self.zero_init_layer_scale,
      qk_norm=self.qk_norm,
      # Parameters are made from a batch of one, which cannot be split.
      sharding=None if self.is_initializing() else self.activation_sharding,
    )
    embed_dim = self.config.embed_dim
    self.image = VisionTower(self.config.vision, embed_dim, blocks, self.dtype, self.patch_dropout)
    self.text = TextTower(self.config.text, embed_dim, blocks, self.dtype)
    constant = nn.initializers.constant
    log_scale = math.log(self.init_logit_scale)
    self.logit_scale = self.param("logit_scale", constant(log_scale), (), jnp.float32)
    if self.init_logit_bias is not None:
      self.logit_bias = self.param("logit_bias", constant(self.init_logit_bias), (), jnp.float32)

  def __call__(self, image: jax.Array, text: jax.Array, *, train: bool = False) -> dict:
    """What a contrastive loss needs, all float32.

    Returns:
      image_features, text_features: [B, E], of length 1.
      logit_scale: scalar in [1, 100], what their dot products are multiplied by.
      logit_bias: scalar, if the model has one.
      block_outputs: {"image": [layers], "text": [layers]}, the mean |feature| after each block;
        no gradient flows into it.
    """
    image_features, image_blocks = self.image(image, train=train)
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


def quantize_kernels(params, recipe: Recipe, *, backend: str | None = None) -> dict:
  """The collection "quantized" that goes with a CLIP's `params`: its block kernels in 8 bits.

  `model.apply({"params": params, "quantized": quantize_kernels(params, recipe)}, ...)` quantizes a
  kernel once, however often a step uses it: forward, rematerialised, backward, for each microbatch.
  The result is the same without it.
  """
  if recipe.fwd is None and recipe.dgrad is None:
    return {}

  def once(w):
    kernel = quantize_kernel(jax.lax.stop_gradient(w), recipe, backend=backend)
    return kernel.fwd, kernel.dgrad

  found = {}
  for path, w in flatten_dict(params).items():
    if path[-1] == "kernel" and path[-2] in BLOCK_LINEARS:
      found[path] = jax.vmap(once)(w) if w.ndim == 3 else once(w)  # [layers, K, N] of a scan.
  return unflatten_dict(found)


class VisionTower(nn.Module):
  """ViT: patches and a class token through the blocks, the class token projected to [B, E]."""

  config: VisionConfig
  embed_dim: int
  blocks: Callable  # _blocks, with what CLIP knows filled in
  dtype: jnp.dtype
  patch_dropout: float

  @nn.compact
  def __call__(self, image: jax.Array, *, train: bool):
    c, normal = self.config, nn.initializers.normal(self.config.width**-0.5)
    if image.shape[1:] != (c.image_size, c.image_size, 3):
      raise ValueError(f"Images must be [B, {c.image_size}, {c.image_size}, 3], not {image.shape}.")
    # A convolution whose stride is its size is a matmul over patches.
    embed = SwitchBackDense(
      c.width,
      use_bias=False,
      dtype=self.dtype,
      kernel_init=_uniform,
      recipe=FULL,
      name="patch_embedding",
    )
    x_BLD = embed(_patches(image.astype(self.dtype), c.patch_size))
    class_D = self.param("class_embedding", normal, (c.width,), jnp.float32)
    position_LD = self.param("positional_embedding", normal, (c.patches + 1, c.width), jnp.float32)
    class_B1D = jnp.broadcast_to(class_D.astype(self.dtype), (x_BLD.shape[0], 1, c.width))
    x_BLD = jnp.concatenate([class_B1D, x_BLD], axis=1) + position_LD.astype(self.dtype)[None]
    if train and self.patch_dropout:
      x_BLD = patch_dropout(x_BLD, self.patch_dropout, self.make_rng("dropout"))
    x_BLD = _layer_norm(x_BLD, "ln_pre")
    x_BLD, outputs = self.blocks(x_BLD, c, causal=False, inits=_VISION_INITS)
    x_BD = _layer_norm(x_BLD[:, 0], "ln_post")
    proj = self.param("proj", normal, (c.width, self.embed_dim), jnp.float32)
    return x_BD.astype(jnp.float32) @ proj, outputs


class TextTower(nn.Module):
  """Causal transformer over tokens, read at the first end-of-text token, projected to [B, E]."""

  config: TextConfig
  embed_dim: int
  blocks: Callable  # _blocks, with what CLIP knows filled in
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, text: jax.Array):
    c, normal = self.config, nn.initializers.normal
    if text.shape[1:] != (c.context_length,):
      raise ValueError(f"Texts must be [B, {c.context_length}], not {text.shape}.")
    # In float32 up to the look-up: its gradient sums over every occurrence of a token.
    x_BLD = nn.Embed(
      c.vocab_size, c.width, dtype=jnp.float32, embedding_init=normal(0.02), name="token_embedding"
    )(text)
    position_LD = self.param(
      "positional_embedding", normal(0.01), (c.context_length, c.width), jnp.float32
    )
    x_BLD = (x_BLD + position_LD[None]).astype(self.dtype)
    inits = _text_inits(c.width, c.layers)
    x_BLD, outputs = self.blocks(x_BLD, c, causal=True, inits=inits)
    eot_B11 = jnp.argmax(text == c.eot_id, axis=1)[:, None, None]
    x_BD = jnp.take_along_axis(x_BLD, eot_B11, axis=1)[:, 0]
    x_BD = _layer_norm(x_BD, "ln_final")
    proj = self.param("proj", normal(c.width**-0.5), (c.width, self.embed_dim), jnp.float32)
    return x_BD.astype(jnp.float32) @ proj, outputs


class Block(nn.Module):
  """Pre-norm transformer block: x [B, L, D] plus attention of it, plus an MLP of that.

  length: how many of the L tokens count; the rest is padding.
  """

  heads: int
  length: int
  mlp_width: int
  causal: bool
  inits: Inits
  recipe: Recipe
  backend: str | None
  fused: bool
  dtype: jnp.dtype
  zero_init_layer_scale: bool
  qk_norm: bool
  sharding: jax.sharding.Sharding | None

  @nn.compact
  def __call__(self, x_BLD: jax.Array):
    """The block's output [B, L, D], and its mean |feature|."""
    x_BLD = self._place(x_BLD)
    x_BLD, y_BLD = self._attention(x_BLD)
    x_BLD += self._layer_scale("ls_1", y_BLD)
    x_BLD, y_BLD = self._mlp(x_BLD)
    x_BLD += self._layer_scale("ls_2", y_BLD)
    x_BLD = self._place(x_BLD)
    # Without stop_gradient every block would keep the signs for its backward pass.
    features = jax.lax.stop_gradient(x_BLD[:, : self.length]).astype(jnp.float32)
    return x_BLD, jnp.mean(jnp.abs(features))

  def _attention(self, x_BLD):
    width, zeros = x_BLD.shape[-1], nn.initializers.zeros
    qkv = self._linear("qkv", 3 * width, self.inits.qkv, zeros)
    if self.fused:
      kernel, bias = qkv.parameters(width)
      norm = LayerNorm(name="ln_1")(width)
      options = {"recipe": self.recipe, "backend": self.backend, "parts": 3}
      x_BLD, qkv_BLD = norm_dot(x_BLD, norm, kernel, bias=bias, **options)
    else:
      qkv_BLD = jnp.split(qkv(_layer_norm(x_BLD, "ln_1")), 3, axis=-1)
    q_BLD, k_BLD, v_BLD = (checkpoint_name(h, _QKV_NAME) for h in qkv_BLD)
    if self.qk_norm:
      q_BLD, k_BLD = _layer_norm(q_BLD, "q_norm"), _layer_norm(k_BLD, "k_norm")
    q_BLHD, k_BLHD, v_BLHD = (
      h.reshape(*h.shape[:2], self.heads, width // self.heads) for h in (q_BLD, k_BLD, v_BLD)
    )
    y_BLHD = attention(q_BLHD, k_BLHD, v_BLHD, causal=self.causal, length=self.length)
    out = self._linear("out", width, self.inits.out, zeros)
    return x_BLD, checkpoint_name(out(y_BLHD.reshape(x_BLD.shape)), _OUT_NAME)

  def _mlp(self, x_BLD):
    width = x_BLD.shape[-1]
    fc1 = self._linear("fc1", self.mlp_width, self.inits.fc1, _uniform_bias(width))
    fc2 = self._linear("fc2", width, self.inits.fc2, _uniform_bias(self.mlp_width))
    if not self.fused:
      return x_BLD, fc2(nn.gelu(fc1(_layer_norm(x_BLD, "ln_2")), approximate=False))
    norm = LayerNorm(name="ln_2")(width)
    kernels = *fc1.parameters(width), *fc2.parameters(self.mlp_width)
    return norm_mlp(x_BLD, norm, *kernels, self.recipe, backend=self.backend)

  def _linear(self, name, features, kernel_init, bias_init):
    return SwitchBackDense(
      features,
      dtype=self.dtype,
      kernel_init=kernel_init,
      bias_init=bias_init,
      recipe=self.recipe,
      backend=self.backend,
      name=name,
    )

  def _place(self, x_BLD):
    """x where `sharding` says, and its gradient."""
    if self.sharding is None:
      return x_BLD
    return jax.lax.with_sharding_constraint(x_BLD, self.sharding)

  def _layer_scale(self, name, x_BLD):
    return LayerScale(0.0, name=name)(x_BLD) if self.zero_init_layer_scale else x_BLD


def _blocks(x_BLD, config: VisionConfig | TextConfig, *, scan: bool, remat: str, **options):
  """x through a tower's blocks, made inside the calling module; also their outputs [layers]."""
  length, block = x_BLD.shape[1], Block
  padding = length_for(length, options["dtype"], config.width // config.heads) - length
  x_BLD = jnp.pad(x_BLD, ((0, 0), (0, padding), (0, 0)))
  if remat != "none":
    # Inside a scan nothing can be shared with the forward pass, so no barrier is needed.
    block = nn.remat(Block, policy=REMAT_POLICIES.get(remat), prevent_cse=not scan)
  if scan:
    block = nn.scan(
      block,
      variable_axes={"params": 0, "quantized": 0},
      split_rngs={"params": True},
      length=config.layers,
    )
  mlp_width = int(config.width * config.mlp_ratio)
  block = functools.partial(
    block, heads=config.heads, length=length, mlp_width=mlp_width, **options
  )
  if scan:
    x_BLD, outputs = block(name="blocks")(x_BLD)
    return x_BLD[:, :length], outputs
  outputs = []
  for layer in range(config.layers):
    x_BLD, output = block(name=f"block_{layer}")(x_BLD)
    outputs.append(output)
  return x_BLD[:, :length], jnp.stack(outputs)


def patch_dropout(x_BLD: jax.Array, rate: float, key: jax.Array) -> jax.Array:
  """Keeps the class token, first, and of the patches a uniformly drawn 1 - rate for each image."""
  batch, patches = x_BLD.shape[0], x_BLD.shape[1] - 1
  kept = max(1, int(patches * (1 - rate)))
  _, drawn_BL = jax.lax.top_k(jax.random.uniform(key, (batch, patches)), kept)
  patches_BLD = jnp.take_along_axis(x_BLD[:, 1:], drawn_BL[:, :, None], axis=1)
  return jnp.concatenate([x_BLD[:, :1], patches_BLD], axis=1)


def _patches(image_BHWC: jax.Array, size: int) -> jax.Array:
  """Squares of size x size pixels, row by row, flattened: [B, L, size * size * 3]."""
  b, h, w, c = image_BHWC.shape
  x = image_BHWC.reshape(b, h // size, size, w // size, size, c).transpose(0, 1, 3, 2, 4, 5)
  return x.reshape(b, (h // size) * (w // size), size * size * c)


def _layer_norm(x: jax.Array, name: str) -> jax.Array:
  """Layer norm in float32 whatever the compute dtype, inside the calling module."""
  norm = nn.LayerNorm(epsilon=1e-5, dtype=jnp.float32, name=name)
  return norm(x.astype(jnp.float32)).astype(x.dtype)


def _normalize(x_BE: jax.Array) -> jax.Array:
  """Rows of length 1; a zero row stays zero, and its gradient finite."""
  square = jnp.sum(jnp.square(x_BE), axis=-1, keepdims=True)
  return x_BE * jax.lax.rsqrt(jnp.maximum(square, 1e-24))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _clamp(x, low, high):
  """x in [low, high]. Beyond an end only a gradient that leads back in passes, so that gradient
  descent neither drifts further out nor gets stuck, as it would on `jnp.clip`'s zero gradient."""
  return jnp.clip(x, low, high)


def _clamp_fwd(x, low, high):
  return jnp.clip(x, low, high), x


def _clamp_bwd(low, high, x, dy):
  outwards = ((x >= high) & (dy < 0)) | ((x <= low) & (dy > 0))
  return (jnp.where(outwards, jnp.zeros_like(dy), dy),)


_clamp.defvjp(_clamp_fwd, _clamp_bwd)
