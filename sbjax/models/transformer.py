"""A stack of pre-norm transformer blocks whose linear layers follow a recipe.

Letters in shapes: B batch, L length, D width, H heads.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.ad_checkpoint import checkpoint_name

from sbjax.attention import BACKENDS, attention, length_for
from sbjax.linear.fused import layer_norm_dense, layer_norm_mlp
from sbjax.linear.grouped import check_keep
from sbjax.linear.layers import LayerNorm, LayerScale, SwitchBackDense
from sbjax.linear.quantized_dot import DOT_NAME, RESIDUAL_NAME, quantized_dot
from sbjax.linear.weight import QuantizedWeight, quantize_weight
from sbjax.models.sizes import TextConfig, VisionConfig
from sbjax.models.text_groups import Groups
from sbjax.ops.registry import get_backend
from sbjax.ops.rows import NORM_EPSILON
from sbjax.recipes import FULL, Recipe, RecipeRules, as_recipe, parse_recipe

# Names for checkpoint policies. JAX's own `checkpoint_dots` does not see a matmul inside a Pallas
# kernel, so policies go by these names and those of sbjax.quantized_dot.
QKV_NAME, OUT_NAME = "sbjax_qkv", "sbjax_out"
_TILE = 128  # rows of a matmul's tile, which all tokens of groups fill
REMAT_POLICIES = {
  # Keeps the outputs of every linear layer but the last, 8 widths a token. The backward pass
  # repeats norms, attention and GELU. Without layer scale, `out`'s output includes the residual.
  "dots": jax.checkpoint_policies.save_only_these_names(DOT_NAME),
  # Keeps the 8-bit operands of recipes with saved="quantized" too.
  "dots_and_residuals": jax.checkpoint_policies.save_only_these_names(DOT_NAME, RESIDUAL_NAME),
  # Keeps only these operands: with "switchback_m", 5 bytes a width and token; fc1 is not repeated.
  "residuals": jax.checkpoint_policies.save_only_these_names(RESIDUAL_NAME),
  # Keeps the outputs of qkv and out, 4 widths a token; fc1 is repeated.
  "attention_dots": jax.checkpoint_policies.save_only_these_names(QKV_NAME, OUT_NAME),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockOptions:
  """How the blocks of a model compute, the same in every tower.

  Args:
    recipe: of the linear layers' matmuls: a Recipe or its name, or RecipeRules or their text, for
      paths such as "image/blocks/fc1" (with scan) and "image/block_0/fc1" (without).
    backend: the name of the backend for matmuls and fused operations; None chooses.
    attention_backend: the one of `sbjax.attention`; None chooses.
    dtype: compute dtype.
    zero_init_layer_scale: multiplies each residual branch by a learned vector that starts at 0
      (Wortsman et al. 2023, https://arxiv.org/abs/2304.13013).
    qk_norm: layer norm over the full width of q and of k, before they are split into heads.
    scan: True scans one block over the layers, with parameters stacked as [layers, ...] in
      `blocks`. False makes `block_0`, `block_1`, ...
    unroll: how many layers of a scan are compiled together; 0: all of them. A GPU then neither
      copies the arrays saved for the backward pass nor waits between layers: benchmarks/step.py.
    remat: "none", "block" (saves only a block's input and computes the rest again) or a key of
      REMAT_POLICIES.
    keep: the inputs of layer norm and GELU for the backward pass: "original", or "grouped" in e4m3
      (COAT), with a scale for each 16 numbers. With remat the policies "residuals" and
      "dots_and_residuals" keep them that way.
    block_maxima: whether CLIP's outputs have the largest magnitude after each block, too.
    activation_sharding: of the blocks' [B, L, D] inputs and outputs. None: XLA chooses. It may
      follow the sharding of a split embedding table, which splits widths and gathers tokens.
    parametrization: "standard", or "unit" for munit scaling (sbjax/models/unit_block.py).
    tau: of "unit": the share of a residual branch, between 0 and 1; None: `residual_share` of the
      tower's layers.

  Raises:
    ValueError, NotImplementedError: a value is unknown, or the backend does not run here.
  """

  recipe: Recipe | RecipeRules | str = FULL
  backend: str | None = None
  attention_backend: str | None = None
  dtype: jnp.dtype = jnp.bfloat16
  zero_init_layer_scale: bool = False
  qk_norm: bool = False
  scan: bool = True
  unroll: int = 1
  remat: str = "none"
  keep: str = "original"
  block_maxima: bool = False
  activation_sharding: jax.sharding.Sharding | None = None
  parametrization: str = "standard"
  tau: float | None = None

  def __post_init__(self):
    if isinstance(self.recipe, str):
      object.__setattr__(self, "recipe", parse_recipe(self.recipe))
    elif not isinstance(self.recipe, RecipeRules):
      as_recipe(self.recipe)
    if self.backend is not None:
      get_backend(self.backend)
    if self.attention_backend not in (None, *BACKENDS):
      raise ValueError(
        f"attention_backend={self.attention_backend!r} must be one of {', '.join(BACKENDS)}; None"
        " chooses."
      )
    object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
    if not jnp.issubdtype(self.dtype, jnp.floating):
      raise ValueError(f"dtype={self.dtype} must be floating point, such as 'bfloat16'.")
    if self.unroll < 0:
      raise ValueError(f"unroll={self.unroll} must be 0 (all layers) or more.")
    if self.remat not in ("none", "block", *REMAT_POLICIES):
      raise ValueError(
        f"remat={self.remat!r} must be 'none', 'block' (once called 'full': keeps a block's input"
        f" only) or a policy: {', '.join(REMAT_POLICIES)}."
      )
    check_keep(self.keep)
    check_parametrization(self.parametrization, self.tau, self.zero_init_layer_scale)
    if self.is_unit and self.keep != "original":
      raise ValueError(
        f"keep={self.keep!r} needs parametrization='standard': 'unit' has no fused layer norm or"
        " GELU whose input it could group."
      )

  @property
  def is_unit(self) -> bool:
    return self.parametrization == "unit"

  def recipe_at(self, path: str) -> Recipe:
    """The recipe of the linear layer at a path."""
    return self.recipe.at(path) if isinstance(self.recipe, RecipeRules) else as_recipe(self.recipe)


PARAMETRIZATIONS = ("standard", "unit")


def check_parametrization(name: str, tau: float | None, layer_scale: bool) -> None:
  """Raises a ValueError for an unknown parametrization, or options that do not go with it."""
  if name not in PARAMETRIZATIONS:
    raise ValueError(f"parametrization={name!r} must be one of {', '.join(PARAMETRIZATIONS)}.")
  if tau is not None and not 0 < tau < 1:
    raise ValueError(f"{tau=} must be between 0 and 1; None: by the number of layers.")
  if tau is not None and name != "unit":
    raise ValueError(f"{tau=} needs parametrization='unit': other blocks add their branches.")
  if name == "unit" and layer_scale:
    raise ValueError(
      "zero_init_layer_scale=True needs parametrization='standard': with 'unit' a layer norm ends"
      " each branch, and tau is its share."
    )


class Inits(NamedTuple):
  """The initializers of a block's four kernels."""

  qkv: Callable
  out: Callable
  fc1: Callable
  fc2: Callable


BLOCK_LINEARS = Inits._fields


class Block(nn.Module):
  """Pre-norm transformer block: x + attention(x), then x + MLP(x), for x [B, L, D].

  config: of the tower.
  length: the number of tokens before the padding.
  groups: (tokens, rows) of sequences that x [1, L, D] holds one after the other, each of which
    attends to itself; (): each row of x is a sequence.
  """

  config: VisionConfig | TextConfig
  length: int
  causal: bool
  inits: Inits
  options: BlockOptions
  groups: Groups = ()

  @nn.compact
  def __call__(self, x_BLD: jax.Array):
    """The block's output [B, L, D], and statistics of it by the names of CLIP's outputs."""
    x_BLD = self._place(x_BLD)
    x_BLD = self._place(self._mlp(self._attention(x_BLD)))
    # Without stop_gradient every block would save the signs for its backward pass.
    features = jax.lax.stop_gradient(x_BLD[:, : self.length]).astype(jnp.float32)
    features = jnp.abs(features)
    statistics = {"block_outputs": jnp.mean(features)}
    if self.options.block_maxima:
      statistics["block_maxima"] = jnp.max(features)
    return x_BLD, statistics

  def _attention(self, x_BLD):
    """x + attention(norm(x))."""
    width, backend = x_BLD.shape[-1], self.options.backend
    kernel, bias = self._linear("qkv", width, 3 * width).parameters(width)
    norm, recipe = LayerNorm(name="ln_1")(width), self._recipe("qkv")
    x_BLD, qkv_BLD = layer_norm_dense(
      *(x_BLD, norm, kernel, recipe),
      **{"bias": bias, "backend": backend, "num_outputs": 3, "epsilon": self.config.norm_epsilon},
      keep=self.options.keep,
    )
    y_BLD, recipe = self._attend(qkv_BLD), self._recipe("out")
    kernel, bias = self._linear("out", width, width).parameters(width)
    layer_scale = self.options.zero_init_layer_scale
    residual = None if layer_scale else x_BLD
    y_BLD = quantized_dot(y_BLD, kernel, recipe, bias=bias, backend=backend, residual=residual)
    y_BLD = checkpoint_name(y_BLD, OUT_NAME)
    return x_BLD + LayerScale(name="ls_1")(y_BLD) if layer_scale else y_BLD

  def _attend(self, qkv_BLD):
    """Multi-head attention of q, k and v, each [B, L, D]; the heads are concatenated."""
    q_BLD, k_BLD, v_BLD = (checkpoint_name(h, QKV_NAME) for h in qkv_BLD)
    if self.options.qk_norm:
      epsilon = self.config.norm_epsilon
      q_BLD, k_BLD = layer_norm(q_BLD, "q_norm", epsilon), layer_norm(k_BLD, "k_norm", epsilon)
    if not self.groups:
      return self._attend_rows((q_BLD, k_BLD, v_BLD), self.length)
    outs, first = [], 0
    for length, rows in self.groups:
      last, more = first + rows * length, _padding(length, self.config, self.options)
      qkv = (h[0, first:last].reshape(rows, length, -1) for h in (q_BLD, k_BLD, v_BLD))
      qkv = [jnp.pad(h, ((0, 0), (0, more), (0, 0))) for h in qkv]
      outs.append(self._attend_rows(qkv, length)[:, :length].reshape(last - first, -1))
      first = last
    return jnp.pad(jnp.concatenate(outs), ((0, q_BLD.shape[1] - first), (0, 0)))[None]

  def _attend_rows(self, qkv_BLD, length):
    """Attention within each row, whose padding begins at `length`."""
    qkv_BLHD = (split_heads(h, self.config.heads) for h in qkv_BLD)
    how = {"causal": self.causal, "length": length, "backend": self.options.attention_backend}
    return attention(*qkv_BLHD, **how).reshape(qkv_BLD[0].shape)

  def _mlp(self, x_BLD):
    """x + MLP(norm(x))."""
    width, layer_scale = x_BLD.shape[-1], self.options.zero_init_layer_scale
    norm, recipes = LayerNorm(name="ln_2")(width), (self._recipe("fc1"), self._recipe("fc2"))
    fc1 = self._linear("fc1", width, self.config.mlp_width).parameters(width)
    fc2 = self._linear("fc2", self.config.mlp_width, width).parameters(self.config.mlp_width)
    y: Any = layer_norm_mlp(
      *(x_BLD, norm, *fc1, *fc2, recipes),
      backend=self.options.backend,
      add_residual=not layer_scale,
      activation=self.config.activation,
      epsilon=self.config.norm_epsilon,
      keep=self.options.keep,
    )
    return y[0] + LayerScale(name="ls_2")(y[1]) if layer_scale else y

  def _linear(self, name, fan_in, features):
    is_mlp = name in ("fc1", "fc2")
    return SwitchBackDense(
      features,
      dtype=self.options.dtype,
      kernel_init=getattr(self.inits, name),
      bias_init=_uniform_bias(fan_in) if is_mlp else nn.initializers.zeros,
      recipe=self._recipe(name),
      backend=self.options.backend,
      name=name,
    )

  def _recipe(self, name):
    return self.options.recipe_at("/".join((*self.path, name)))

  def _place(self, x_BLD):
    """Constrains x and its gradient to `activation_sharding`."""
    # Parameters are initialized with a batch of one, which cannot be split.
    if self.options.activation_sharding is None or self.is_initializing():
      return x_BLD
    return jax.lax.with_sharding_constraint(x_BLD, self.options.activation_sharding)


def blocks(
  x_BLD,
  config: VisionConfig | TextConfig,
  options: BlockOptions,
  *,
  block: type[nn.Module],
  causal: bool,
  inits: Inits,
  groups: Groups = (),
):
  """Applies a tower's blocks as submodules of the caller.

  groups: of the sequences in x, as in `Block`.

  Returns x [B, L, D], and the blocks' statistics, [layers] each.
  """
  length = x_BLD.shape[1]
  padding = -length % _TILE if groups else _padding(length, config, options)
  x_BLD = jnp.pad(x_BLD, ((0, 0), (0, padding), (0, 0)))
  if options.remat != "none":
    # XLA cannot merge a loop's recomputation with its forward pass, so it needs no barrier.
    is_loop = options.scan and 0 < options.unroll < config.layers
    policy = REMAT_POLICIES.get(options.remat)
    block = nn.remat(block, policy=policy, prevent_cse=not is_loop)
  if options.scan:
    block = nn.scan(
      block,
      variable_axes={"params": 0, "quantized": 0},
      split_rngs={"params": True},
      length=config.layers,
      unroll=options.unroll or config.layers,
    )
  make = functools.partial(
    block,
    config=config,
    length=length,
    causal=causal,
    inits=inits,
    options=options,
    groups=groups,
  )
  if options.scan:
    x_BLD, statistics = make(name="blocks")(x_BLD)
    return x_BLD[:, :length], statistics
  each = []
  for layer in range(config.layers):
    x_BLD, statistics = make(name=f"block_{layer}")(x_BLD)
    each.append(statistics)
  return x_BLD[:, :length], jax.tree.map(lambda *layers: jnp.stack(layers), *each)


def _padding(length: int, config: VisionConfig | TextConfig, options: BlockOptions) -> int:
  """How many positions the attention adds to `length`."""
  head_dim = config.width // config.heads
  return length_for(length, options.dtype, head_dim, options.attention_backend) - length


def quantize_kernels(
  params, recipe: Recipe | RecipeRules | str, *, backend: str | None = None
) -> dict:
  """The collection "quantized" for a CLIP's `params`: the kernels of its blocks in 8 bits.

  `model.apply({"params": params, "quantized": quantize_kernels(params, recipe)}, ...)` quantizes a
  kernel once, however often a step uses it: forward, rematerialised, backward, for each microbatch.
  The results are the same without it. Kernels that the recipe does not round are not in it.

  Raises:
    ValueError: none of the parameters is a block's kernel.
  """
  options = BlockOptions(recipe=recipe, backend=backend)

  def once(w, recipe):
    kernel = quantize_weight(jax.lax.stop_gradient(w), recipe, backend=backend)
    assert isinstance(kernel, QuantizedWeight)  # The recipe rounds it.
    return kernel.fwd, kernel.dgrad

  parameters: dict[tuple[str, ...], jax.Array] = flatten_dict(params)  # pyright: ignore
  kernels = {path: w for path, w in parameters.items() if is_block_kernel(path)}
  if not kernels:
    raise ValueError(f"No kernel of {', '.join(BLOCK_LINEARS)} is among the parameters of a CLIP.")
  quantized = {}
  for path, w in kernels.items():
    own = options.recipe_at("/".join(path[:-1]))
    if own.rounds_w:
      stacked = w.ndim == 3  # [layers, K, N] of a scan.
      layers = [once(layer, own) for layer in (w if stacked else [w])]
      quantized[path] = jax.tree.map(lambda *a: jnp.stack(a), *layers) if stacked else layers[0]
  return unflatten_dict(quantized)


def is_block_kernel(path: tuple[str, ...]) -> bool:
  """Whether a parameter is the kernel of a linear layer that follows a recipe."""
  return path[-1] == "kernel" and path[-2] in BLOCK_LINEARS and "pool" not in path


def stack_blocks(params: dict) -> dict:
  """Stacks `block_0`, `block_1`, ... of both towers as `blocks`, for `scan=True`."""
  return {**params, **{tower: _stack(params[tower]) for tower in ("image", "text")}}


def unstack_blocks(params: dict) -> dict:
  """Splits `blocks` of both towers into `block_0`, `block_1`, ..., for `scan=False`."""
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


def split_heads(x_BLD: jax.Array, heads: int) -> jax.Array:
  """[B, L, D] as [B, L, H, D / H]."""
  return x_BLD.reshape(*x_BLD.shape[:2], heads, x_BLD.shape[2] // heads)


def layer_norm(x: jax.Array, name: str, epsilon: float = NORM_EPSILON) -> jax.Array:
  """Layer norm in float32 for any compute dtype, as a submodule of the caller."""
  norm = nn.LayerNorm(epsilon=epsilon, dtype=jnp.float32, name=name)
  return norm(x.astype(jnp.float32)).astype(x.dtype)


def _uniform_bias(fan_in: int) -> Callable:
  bound = fan_in**-0.5
  return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)
