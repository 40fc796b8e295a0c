"""Linear layers for Flax whose matmuls follow a recipe; everything else is Flax's own.

The parameter tree is that of `nn.Dense` / `nnx.Linear` whatever the recipe, so a checkpoint
trained in 16 bits loads into an int8 layer and back.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.linen.dtypes import canonicalize_dtype

from sbjax.linear.fused import gated_mlp, layer_norm_dense, layer_norm_mlp
from sbjax.linear.quantized_dot import as_multiplier, as_tokens, quantized_dot
from sbjax.linear.weight import (
  LoRAWeight,
  QuantizedWeight,
  base_weight,
  frozen_bits,
  master_weight,
  serving_weight,
)
from sbjax.ops.rows import NORM_EPSILON, LayerNormParams, Norm, RMSNormParams
from sbjax.quantize import Quantized, dequantize, floating_dtype
from sbjax.recipes import SWITCHBACK, Recipe, as_recipe

# What nn.Dense and nnx.Linear offer to replace the product, which is the recipe's here.
_FIXED = ("precision", "dot_general", "dot_general_cls", "promote_dtype", "preferred_element_type")


class SwitchBackDense(nn.Dense):
  """`nn.Dense` whose matmuls follow `recipe`: x [..., K] -> [..., features].

  The arguments are those of `nn.Dense`; dtype is the compute and output dtype (None: what the
  input and the parameters promote to). The kernel is quantized in the dtype it is kept in, and
  its gradient comes from the float32 accumulator: neither passes through the compute dtype.

  multiplier: multiplies the three matmuls, as in `quantized_dot`.

  Raises:
    ValueError: an integer input, an unknown recipe or backend, or an argument that would replace
      the product, such as precision.

  >>> layer = SwitchBackDense(16, recipe="switchback_m")
  >>> params = layer.init(jax.random.key(0), jnp.ones((4, 32)))["params"]
  >>> jax.tree.map(jnp.shape, params)
  {'bias': (16,), 'kernel': (32, 16)}
  """

  recipe: Recipe | str = SWITCHBACK
  backend: str | None = None
  multiplier: float = 1.0

  def __call__(self, inputs: jax.Array) -> jax.Array:
    inputs = as_tokens(inputs)
    return _linear(self, inputs, *self.parameters(inputs.shape[-1]))

  @nn.compact
  def parameters(self, width: int) -> tuple[Any, jax.Array | None]:
    """The kernel [width, features] and the bias [features] or None, for a function to multiply by.

    The kernel is a `QuantizedWeight` where the collection "quantized" has its 8 bits, or where the
    parameter itself is in 8 bits (see `quantize_weights`), and a `LoRAWeight` where it has an
    adapter (`sbjax.linear.lora`).
    """
    _check_unset(n for n in _FIXED if getattr(self, n, None) is not getattr(nn.Dense, n, None))
    _check_arguments(self.dtype, self.param_dtype, width=width, features=self.features)
    value = _parameter(self, "kernel")
    frozen = _frozen(self, "kernel", base_weight(value), (self.features, width))
    if frozen or isinstance(value, LoRAWeight):
      kernel = as_weight(value)
    else:
      kernel = self.param("kernel", self.kernel_init, (width, self.features), self.param_dtype)
    if self.has_variable("quantized", "kernel"):
      kernel = QuantizedWeight(kernel, *self.get_variable("quantized", "kernel"))
    bias = None
    if self.use_bias:
      bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
    return kernel, bias


class SwitchBackLinear(nnx.Linear):
  """`nnx.Linear` whose matmuls follow `recipe`: x [..., in_features] -> [..., out_features].

  Further arguments are those of `nnx.Linear`. For dtypes and errors see SwitchBackDense.

  >>> layer = SwitchBackLinear(32, 16, rngs=nnx.Rngs(0))
  >>> layer(jnp.ones((4, 32))).shape
  (4, 16)
  """

  def __init__(
    self,
    in_features: int,
    out_features: int,
    *,
    recipe: Recipe | str = SWITCHBACK,
    backend: str | None = None,
    multiplier: float = 1.0,
    rngs: nnx.Rngs,
    **kwargs,
  ):
    _check_unset(kwargs.keys() & set(_FIXED))
    dtypes = kwargs.get("dtype"), kwargs.get("param_dtype", jnp.float32)
    _check_arguments(*dtypes, in_features=in_features, out_features=out_features)
    super().__init__(in_features, out_features, rngs=rngs, **kwargs)
    self.recipe = as_recipe(recipe)
    self.backend = backend
    self.multiplier = as_multiplier(multiplier)
    self.lora = nnx.data(None)  # An Adapter of sbjax.linear.lora.

  def __call__(self, inputs: jax.Array, out_sharding=None) -> jax.Array:
    y = _linear(self, as_tokens(inputs), *self.parameters())
    return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)

  def parameters(self) -> tuple[Any, jax.Array | None]:
    """The kernel and the bias or None, as those of `SwitchBackDense.parameters`."""
    kernel = as_weight(self.kernel.get_value())
    if self.lora is not None:
      kernel = self.lora.beside(kernel)
    return kernel, None if self.bias is None else self.bias[...]


def _check_unset(names) -> None:
  if names := sorted(names):
    raise ValueError(f"The recipe decides the product; leave {', '.join(names)} unset.")


def _check_arguments(dtype, param_dtype, **sizes) -> None:
  if dtype is not None:
    floating_dtype("dtype", dtype)
  floating_dtype("param_dtype", param_dtype)
  for name, size in sizes.items():
    if not isinstance(size, int | np.integer) or size < 1:
      raise ValueError(f"{name}={size!r} must be a positive integer.")


def as_input(x, dtype) -> jax.Array:
  """x in a layer's dtype, None for its own."""
  x = as_tokens(x)
  return x if dtype is None else x.astype(floating_dtype("dtype", dtype))


def check_norm(norm, norms: dict[str, Any]) -> Any:
  """The entry of `norms`; a ValueError unless it has one."""
  if not isinstance(norm, str) or norm not in norms:
    raise ValueError(f"norm={norm!r} must be one of {', '.join(norms)}.")
  return norms[norm]


def _linear(layer, x, kernel, bias):
  like_kernel = jnp.zeros((), master_weight(kernel).dtype)
  x = x.astype(canonicalize_dtype(x, like_kernel, bias, dtype=layer.dtype))
  how = {"multiplier": layer.multiplier, "backend": layer.backend}
  return quantized_dot(x, kernel, layer.recipe, bias=bias, **how)


def as_weight(kernel) -> jax.Array | QuantizedWeight | LoRAWeight:
  """A kernel as `quantized_dot` takes it: an array, or a frozen one in 8 bits; with its adapter."""
  if isinstance(kernel, LoRAWeight):
    return kernel._replace(base=as_weight(kernel.base))
  # Their shape is the layer's, also where a loop took them from a stack.
  bits = frozen_bits(kernel)
  return kernel if bits is None else serving_weight(bits)


def _parameter(module: nn.Module, name: str):
  return module.get_variable("params", name) if module.has_variable("params", name) else None


def _frozen(module: nn.Module, name: str, value, shape) -> Quantized | None:
  """The 8 bits of a parameter that has nothing else, with values of that shape; else None."""
  bits = frozen_bits(value)
  if bits is not None and bits.values.shape != shape:
    path = "/".join((*module.path, name))
    raise ValueError(f"The 8-bit parameter {path} must be {shape}, not {bits.values.shape}.")
  return bits


class Embedding(nn.Embed):
  """`nn.Embed` whose table [num_embeddings, features] may be `Quantized`, row by row."""

  def setup(self):
    shape = (self.num_embeddings, self.features)
    self.table = _frozen(self, "embedding", _parameter(self, "embedding"), shape)
    if self.table is None:
      super().setup()

  def __call__(self, inputs: jax.Array) -> jax.Array:
    if self.table is None:
      return super().__call__(inputs)
    values, scale = (jnp.take(a, inputs, axis=0) for a in (self.table.values, self.table.scale))
    return dequantize(Quantized(values, scale, self.table.spec), self.dtype or jnp.float32)


class LayerNorm(nn.Module):
  """The parameters of a layer norm that a linear layer computes: those of `nn.LayerNorm`."""

  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, width: int) -> LayerNormParams:
    scale = self.param("scale", nn.initializers.ones, (width,), self.param_dtype)
    bias = self.param("bias", nn.initializers.zeros, (width,), self.param_dtype)
    return LayerNormParams(scale, bias)


class RMSNorm(nn.Module):
  """The parameter of an RMS norm that a linear layer computes: that of `nn.RMSNorm`."""

  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, width: int) -> RMSNormParams:
    return RMSNormParams(self.param("scale", nn.initializers.ones, (width,), self.param_dtype))


_NORMS = {"layer": LayerNorm, "rms": RMSNorm}


class _Fused(nn.Module, kw_only=True):
  """What the layers have in common."""

  dtype: Any = None
  recipe: Any = SWITCHBACK  # A Recipe or its name; of an MLP also a pair, as its function takes.
  backend: str | None = None
  keep: str = "original"
  norm: str = "layer"
  epsilon: float = NORM_EPSILON
  kernel_init: Callable = nn.Dense.kernel_init
  param_dtype: Any = jnp.float32

  def _norm(self, width: int) -> Norm:
    _check_arguments(self.dtype, self.param_dtype, width=width)
    return check_norm(self.norm, _NORMS)(self.param_dtype, name="norm")(width)

  def _linear(self, name: str, width: int, features: int, use_bias: bool) -> tuple[Any, Any]:
    """The kernel [width, features] and the bias or None."""
    how = {"kernel_init": self.kernel_init, "param_dtype": self.param_dtype}
    return SwitchBackDense(features, use_bias=use_bias, name=name, **how).parameters(width)

  def _options(self) -> Any:
    """The fields that the layer's function takes under the same names."""
    names = "backend", "keep", "epsilon", "add_residual", "activation"
    return {name: getattr(self, name) for name in names if hasattr(self, name)}


class LayerNormDense(_Fused):
  """`SwitchBackDense(features)(nn.LayerNorm(epsilon=1e-5)(x))` in one piece.

  The parameters are {"norm": {"scale", "bias"}, "dense": {"kernel", "bias"}}; of norm="rms" there
  is no bias of the norm.

  Args:
    norm: "layer", or "rms" for `nn.RMSNorm`.
    epsilon, keep: those of `layer_norm_dense`.
    kernel_init, param_dtype: those of `nn.Dense`; the norm's parameters have that dtype, too.

  Returns:
    x, for a residual connection, and the result [..., features]: both in `dtype` (None: x's own).

  >>> (x, y), _ = LayerNormDense(16).init_with_output(jax.random.key(0), jnp.ones((4, 32)))
  >>> y.shape
  (4, 16)
  """

  features: int
  _: KW_ONLY
  use_bias: bool = True

  @nn.compact
  def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = as_input(x, self.dtype)
    norm = self._norm(x.shape[-1])
    kernel, bias = self._linear("dense", x.shape[-1], self.features, self.use_bias)
    options = self._options() | {"bias": bias, "num_outputs": 1}
    x, y = layer_norm_dense(x, norm, kernel, self.recipe, **options)
    return x, y[0]


class LayerNormMLP(_Fused):
  """A transformer's MLP in one piece: layer norm, linear, exact GELU, linear; see `layer_norm_mlp`.

  The parameters are {"norm": {"scale", "bias"}, "fc1": {"kernel", "bias"}, "fc2": {...}}; of
  norm="rms" there is no bias of the norm. `activation` is that of `layer_norm_mlp`; `recipe` may be
  a pair. For the rest see LayerNormDense.

  Returns:
    x, for a residual connection, and the result, both [..., K] in `dtype` (None: x's own); or with
    `add_residual` their sum.

  >>> mlp = LayerNormMLP(128, add_residual=True)
  >>> mlp.init_with_output(jax.random.key(0), jnp.ones((4, 32)))[0].shape
  (4, 32)
  """

  hidden: int
  _: KW_ONLY
  add_residual: bool = False
  use_bias: bool = True
  activation: str = "gelu"

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array | tuple[jax.Array, jax.Array]:
    x = as_input(x, self.dtype)
    width = x.shape[-1]
    norm = self._norm(width)
    fc1 = self._linear("fc1", width, self.hidden, self.use_bias)
    fc2 = self._linear("fc2", self.hidden, width, self.use_bias)
    return layer_norm_mlp(x, norm, *fc1, *fc2, self.recipe, **self._options())


class GatedMLP(_Fused):
  """LLaMA's MLP in one piece: RMS norm, `down(silu(gate(n)) * up(n))`; see `gated_mlp`.

  The parameters are {"norm": {"scale"}, "gate": {"kernel"}, "up": {...}, "down": {...}}, with
  biases if asked for. activation="gelu_tanh" makes it T5's and Gemma's.

  Returns:
    As LayerNormMLP.

  >>> mlp = GatedMLP(128, add_residual=True)
  >>> mlp.init_with_output(jax.random.key(0), jnp.ones((4, 32)))[0].shape
  (4, 32)
  """

  hidden: int
  _: KW_ONLY
  add_residual: bool = False
  use_bias: bool = False
  activation: str = "silu"
  norm: str = "rms"

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array | tuple[jax.Array, jax.Array]:
    x = as_input(x, self.dtype)
    width = x.shape[-1]
    norm = self._norm(width)
    w_gate, b_gate = self._linear("gate", width, self.hidden, self.use_bias)
    w_up, b_up = self._linear("up", width, self.hidden, self.use_bias)
    w_down, b_down = self._linear("down", self.hidden, width, self.use_bias)
    options = {"b_gate": b_gate, "b_up": b_up, "b_down": b_down} | self._options()
    return gated_mlp(x, norm, w_gate, w_up, w_down, self.recipe, **options)


class LayerScale(nn.Module):
  """Multiplies x [..., D] by a learned vector gamma [D].

  With init 0 a residual branch starts silent, which keeps features small enough for 8 bits in
  deep models (Touvron et al. 2021, https://arxiv.org/abs/2103.17239; zero: Wortsman et al. 2023).

  >>> LayerScale().init_with_output(jax.random.key(0), jnp.ones((1, 3)))[0]
  Array([[0., 0., 0.]], dtype=float32)
  """

  initial: float = 0.0
  dtype: jnp.dtype | None = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    gamma = self.param("gamma", nn.initializers.constant(self.initial), (x.shape[-1],), jnp.float32)
    dtype = x.dtype if self.dtype is None else self.dtype
    return x.astype(dtype) * gamma.astype(dtype).reshape((1,) * (x.ndim - 1) + gamma.shape)
