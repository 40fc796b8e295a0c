"""A stack of pre-norm transformer blocks whose linear layers follow a recipe.

Letters in shapes: B batch, L length, D width, H heads.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.ad_checkpoint import checkpoint_name

from sbjax.fused import layer_norm_dense, layer_norm_mlp
from sbjax.fused_ops import NORM_EPSILON
from sbjax.layers import LayerNorm, LayerScale, SwitchBackDense
from sbjax.linear import QuantizedWeight, quantize_weight
from sbjax.models.attention import attention, length_for
from sbjax.models.sizes import TextConfig, VisionConfig
from sbjax.quantized_dot import DOT_NAME, RESIDUAL_NAME, quantized_dot
from sbjax.recipes import Recipe, RecipeRules, as_recipe, recipe_at

# What a rematerialised block keeps besides its input. Policies go by name, since JAX's own
# `checkpoint_dots` does not see a matmul inside a Pallas kernel.
_QKV_NAME, _OUT_NAME = "sbjax_qkv", "sbjax_out"
REMAT_POLICIES = {
  # What every linear gives but the last, 8 widths a token: norms, attention and GELU are computed
  # again. The attention's last gives its sum with x, where no layer scale stands between.
  "dots": jax.checkpoint_policies.save_only_these_names(DOT_NAME),
  # And the 8-bit operands that recipes with quantized residuals keep for the backward.
  "dots_and_residuals": jax.checkpoint_policies.save_only_these_names(DOT_NAME, RESIDUAL_NAME),
  # These operands alone: with "switchback_m", 5 bytes a width and token, and fc1 is not repeated.
  "residuals": jax.checkpoint_policies.save_only_these_names(RESIDUAL_NAME),
  # The attention's linears alone, 4 widths a token: fc1 is computed again too.
  "attention_dots": jax.checkpoint_policies.save_only_these_names(_QKV_NAME, _OUT_NAME),
}


class Inits(NamedTuple):
  """How a block's four kernels start."""

  qkv: Callable
  out: Callable
  fc1: Callable
  fc2: Callable


BLOCK_LINEARS = Inits._fields


class Block(nn.Module):
  """Pre-norm transformer block: x [B, L, D] plus attention of it, plus an MLP of that.

  length: how many of the L tokens count; the rest is padding.
  """

  heads: int
  length: int
  mlp_width: int
  causal: bool
  inits: Inits
  recipe: Recipe | RecipeRules
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
    x_BLD = self._place(self._mlp(self._attention(x_BLD)))
    # Without stop_gradient every block would keep the signs for its backward pass.
    features = jax.lax.stop_gradient(x_BLD[:, : self.length]).astype(jnp.float32)
    return x_BLD, jnp.mean(jnp.abs(features))

  @property
  def _adds(self) -> bool:
    """Whether a residual connection is added by the product before it."""
    return self.fused and not self.zero_init_layer_scale

  def _attention(self, x_BLD):
    """x plus attention of it."""
    width, zeros = x_BLD.shape[-1], nn.initializers.zeros
    qkv = self._linear("qkv", 3 * width, self.inits.qkv, zeros)
    if self.fused:
      kernel, bias = qkv.parameters(width)
      norm = LayerNorm(name="ln_1")(width)
      options = {"recipe": self._recipe("qkv"), "backend": self.backend, "num_outputs": 3}
      x_BLD, qkv_BLD = layer_norm_dense(x_BLD, norm, kernel, bias=bias, **options)
    else:
      qkv_BLD = jnp.split(qkv(layer_norm(x_BLD, "ln_1")), 3, axis=-1)
    q_BLD, k_BLD, v_BLD = (checkpoint_name(h, _QKV_NAME) for h in qkv_BLD)
    if self.qk_norm:
      q_BLD, k_BLD = layer_norm(q_BLD, "q_norm"), layer_norm(k_BLD, "k_norm")
    q_BLHD, k_BLHD, v_BLHD = (
      h.reshape(*h.shape[:2], self.heads, width // self.heads) for h in (q_BLD, k_BLD, v_BLD)
    )
    y_BLHD = attention(q_BLHD, k_BLHD, v_BLHD, causal=self.causal, length=self.length)
    y_BLD = y_BLHD.reshape(x_BLD.shape)
    out = self._linear("out", width, self.inits.out, zeros)
    if self._adds:
      kernel, bias = out.parameters(width)
      options = {"backend": self.backend, "bias": bias, "residual": x_BLD}
      return checkpoint_name(
        quantized_dot(y_BLD, kernel, self._recipe("out"), **options), _OUT_NAME
      )
    return x_BLD + self._layer_scale("ls_1", checkpoint_name(out(y_BLD), _OUT_NAME))

  def _mlp(self, x_BLD):
    """x plus an MLP of it."""
    width = x_BLD.shape[-1]
    fc1 = self._linear("fc1", self.mlp_width, self.inits.fc1, _uniform_bias(width))
    fc2 = self._linear("fc2", width, self.inits.fc2, _uniform_bias(self.mlp_width))
    if not self.fused:
      y_BLD = fc2(nn.gelu(fc1(layer_norm(x_BLD, "ln_2")), approximate=False))
      return x_BLD + self._layer_scale("ls_2", y_BLD)
    norm = LayerNorm(name="ln_2")(width)
    recipes = self._recipe("fc1"), self._recipe("fc2")
    kernels = *fc1.parameters(width), *fc2.parameters(self.mlp_width)
    options = {"backend": self.backend, "add_residual": self._adds}
    found: Any = layer_norm_mlp(x_BLD, norm, *kernels, recipes, **options)
    return found if self._adds else found[0] + self._layer_scale("ls_2", found[1])

  def _linear(self, name, features, kernel_init, bias_init):
    return SwitchBackDense(
      features,
      dtype=self.dtype,
      kernel_init=kernel_init,
      bias_init=bias_init,
      recipe=self._recipe(name),
      backend=self.backend,
      name=name,
    )

  def _recipe(self, name):
    """That of the linear layer of this name."""
    return recipe_at(self.recipe, "/".join((*self.path, name)))

  def _place(self, x_BLD):
    """x where `sharding` says, and its gradient."""
    if self.sharding is None:
      return x_BLD
    return jax.lax.with_sharding_constraint(x_BLD, self.sharding)

  def _layer_scale(self, name, x_BLD):
    return LayerScale(0.0, name=name)(x_BLD) if self.zero_init_layer_scale else x_BLD


def blocks(
  x_BLD, config: VisionConfig | TextConfig, *, scan: bool, unroll: int, remat: str, **options
):
  """x through a tower's blocks, made inside the calling module; their mean |feature| [layers]."""
  length, block = x_BLD.shape[1], Block
  padding = length_for(length, options["dtype"], config.width // config.heads) - length
  x_BLD = jnp.pad(x_BLD, ((0, 0), (0, padding), (0, 0)))
  if remat != "none":
    # Inside a loop nothing can be shared with the forward pass, so no barrier is needed.
    is_loop = scan and 0 < unroll < config.layers
    block = nn.remat(Block, policy=REMAT_POLICIES.get(remat), prevent_cse=not is_loop)
  if scan:
    block = nn.scan(
      block,
      variable_axes={"params": 0, "quantized": 0},
      split_rngs={"params": True},
      length=config.layers,
      unroll=unroll or config.layers,
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


def quantize_weights(
  params, recipe: Recipe | RecipeRules | str, *, backend: str | None = None
) -> dict:
  """The collection "quantized" that goes with a CLIP's `params`: its block kernels in 8 bits.

  `model.apply({"params": params, "quantized": quantize_weights(params, recipe)}, ...)` quantizes a
  kernel once, however often a step uses it: forward, rematerialised, backward, for each microbatch.
  The result is the same without it. Kernels that a recipe leaves in 16 bits are not in it.

  Raises:
    ValueError: none of the parameters is a block's kernel.
  """
  recipe = recipe if isinstance(recipe, RecipeRules) else as_recipe(recipe)

  def once(w, recipe):
    kernel = quantize_weight(jax.lax.stop_gradient(w), recipe, backend=backend)
    assert isinstance(kernel, QuantizedWeight)  # The recipe rounds it.
    return kernel.fwd, kernel.dgrad

  parameters: dict[tuple[str, ...], jax.Array] = flatten_dict(params)  # pyright: ignore
  kernels = {
    path: w for path, w in parameters.items() if path[-1] == "kernel" and path[-2] in BLOCK_LINEARS
  }
  if not kernels:
    raise ValueError(f"No kernel of {', '.join(BLOCK_LINEARS)} is among the parameters of a CLIP.")
  quantized = {}
  for path, w in kernels.items():
    own = recipe_at(recipe, "/".join(path[:-1]))
    if own.rounds_w:
      stacked = w.ndim == 3  # [layers, K, N] of a scan.
      layers = [once(layer, own) for layer in (w if stacked else [w])]
      quantized[path] = jax.tree.map(lambda *a: jnp.stack(a), *layers) if stacked else layers[0]
  return unflatten_dict(quantized)


def stack_blocks(params: dict) -> dict:
  """`block_0`, `block_1`, ... of both towers stacked as `blocks`: what `scan=True` takes."""
  return {**params, **{tower: _stack(params[tower]) for tower in ("image", "text")}}


def unstack_blocks(params: dict) -> dict:
  """`blocks` of both towers as `block_0`, `block_1`, ...: what `scan=False` takes."""
  return {**params, **{tower: _unstack(params[tower]) for tower in ("image", "text")}}


def _stack(tower: dict) -> dict:
  if "blocks" in tower:
    return tower
  rest = {name: value for name, value in tower.items() if not name.startswith("block_")}
  blocks = [tower[f"block_{layer}"] for layer in range(len(tower) - len(rest))]
  return {**rest, "blocks": jax.tree.map(lambda *leaves: np.stack(leaves), *blocks)}


def _unstack(tower: dict) -> dict:
  if "blocks" not in tower:
    return tower
  rest = {name: value for name, value in tower.items() if name != "blocks"}
  layers = len(jax.tree.leaves(tower["blocks"])[0])
  blocks = {
    f"block_{layer}": jax.tree.map(lambda leaf, layer=layer: leaf[layer], tower["blocks"])
    for layer in range(layers)
  }
  return {**rest, **blocks}


def layer_norm(x: jax.Array, name: str) -> jax.Array:
  """Layer norm in float32 whatever the compute dtype, inside the calling module."""
  norm = nn.LayerNorm(epsilon=NORM_EPSILON, dtype=jnp.float32, name=name)
  return norm(x.astype(jnp.float32)).astype(x.dtype)


def _uniform_bias(fan_in: int) -> Callable:
  bound = fan_in**-0.5
  return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)
