"""Linear layers for Flax whose matmuls follow a recipe; everything else is Flax's own.

The parameter tree is that of `nn.Dense` / `nnx.Linear` whatever the recipe, so a checkpoint
trained in 16 bits loads into an int8 layer and back.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.dtypes import canonicalize_dtype

from sbjax.quantized_dot import check_floating, quantized_dot
from sbjax.recipes import SWITCHBACK, Recipe, as_recipe

# What nn.Dense and nnx.Linear offer to replace the product: here the recipe is the product.
_REPLACED = (
  "precision",
  "dot_general",
  "dot_general_cls",
  "promote_dtype",
  "preferred_element_type",
)


class SwitchBackDense(nn.Dense):
  """`nn.Dense` whose matmuls follow `recipe`: x [..., K] -> [..., features].

  The arguments are those of `nn.Dense`; dtype is the compute and output dtype (None: what the
  input and the parameters promote to). The kernel is quantized in the dtype it is kept in, and
  its gradient comes from the float32 accumulator: neither passes through the compute dtype.

  Raises:
    ValueError: an integer input, an unknown recipe or backend, or an argument that would replace
      the product (precision, dot_general, dot_general_cls, promote_dtype, preferred_element_type).
  """

  recipe: Recipe | str = SWITCHBACK
  backend: str | None = None

  @nn.compact
  def __call__(self, inputs: jax.Array) -> jax.Array:
    _check_not_replaced(
      {name for name in _REPLACED if getattr(self, name, None) is not getattr(nn.Dense, name, None)}
    )
    shape = (inputs.shape[-1], self.features)
    kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
    bias = None
    if self.use_bias:
      bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
    return _linear(self, inputs, kernel, bias)


class SwitchBackLinear(nnx.Linear):
  """`nnx.Linear` whose matmuls follow `recipe`: x [..., in_features] -> [..., out_features].

  Further arguments are those of `nnx.Linear`. For dtypes and errors see SwitchBackDense.
  """

  def __init__(
    self,
    in_features: int,
    out_features: int,
    *,
    recipe: Recipe | str = SWITCHBACK,
    backend: str | None = None,
    rngs: nnx.Rngs,
    **kwargs,
  ):
    _check_not_replaced(kwargs.keys() & set(_REPLACED))
    super().__init__(in_features, out_features, rngs=rngs, **kwargs)
    self.recipe = as_recipe(recipe)
    self.backend = backend

  def __call__(self, inputs: jax.Array, out_sharding=None) -> jax.Array:
    bias = self.bias[...] if self.use_bias else None
    y = _linear(self, inputs, self.kernel[...], bias)
    return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)


def _check_not_replaced(names) -> None:
  if names:
    raise ValueError(f"The recipe decides the product; leave {', '.join(sorted(names))} unset.")


def _linear(layer, x, kernel, bias):
  check_floating("x", x)
  dtype = canonicalize_dtype(x, kernel, bias, dtype=layer.dtype)
  y = quantized_dot(x.astype(dtype), kernel, layer.recipe, backend=layer.backend)
  return y if bias is None else y + _along_last(bias.astype(dtype), y.ndim)


def _along_last(vector, ndim):
  return vector.reshape((1,) * (ndim - 1) + vector.shape)


class LayerScale(nn.Module):
  """Multiplies x [..., D] by a learned vector gamma [D].

  With init 0 a residual branch starts silent, which keeps features small enough for 8 bits in
  deep models (Touvron et al. 2021, https://arxiv.org/abs/2103.17239; zero: Wortsman et al. 2023).
  """

  initial: float = 0.0
  dtype: jnp.dtype | None = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    gamma = self.param("gamma", nn.initializers.constant(self.initial), (x.shape[-1],), jnp.float32)
    dtype = x.dtype if self.dtype is None else self.dtype
    return x.astype(dtype) * _along_last(gamma.astype(dtype), x.ndim)
