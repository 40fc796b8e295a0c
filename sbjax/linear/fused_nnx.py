"""The fused layers for nnx: a norm with the linear layers after it, in one piece each.

They hold an `nnx.LayerNorm` or `nnx.RMSNorm` and `SwitchBackLinear`s: their state is that of these
modules, and `sbjax.linear.lora` adapts them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sbjax.linear.fused import as_pair, gated_mlp, layer_norm_dense, layer_norm_mlp
from sbjax.linear.grouped import check_keep
from sbjax.linear.layers import SwitchBackLinear, as_input, check_norm
from sbjax.ops.rows import NORM_EPSILON, LayerNormParams, Norm, RMSNormParams
from sbjax.recipes import SWITCHBACK, Recipe

_NORMS = {"layer": nnx.LayerNorm, "rms": nnx.RMSNorm}


class _Fused(nnx.Module):
  """What the layers have in common; further arguments are those of SwitchBackLinear."""

  norm: nnx.LayerNorm | nnx.RMSNorm

  def __init__(
    self,
    width: int,
    linears: dict[str, tuple[int, int]],
    recipes: tuple[Recipe | str, ...],
    *,
    norm: str,
    rngs: nnx.Rngs,
    keep: str = "original",
    epsilon: float = NORM_EPSILON,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
    **kwargs,
  ):
    """linears: the sizes of each by its name."""
    how, of_norm = {"param_dtype": param_dtype, "rngs": rngs}, check_norm(norm, _NORMS)
    for (name, sizes), recipe in zip(linears.items(), recipes, strict=True):
      setattr(self, name, SwitchBackLinear(*sizes, recipe=recipe, dtype=dtype, **how, **kwargs))
    self.norm = of_norm(width, epsilon=epsilon, **how)
    self.dtype, self.keep = dtype, check_keep(keep)

  def _norm(self) -> Norm:
    names = ("scale",) if isinstance(self.norm, nnx.RMSNorm) else ("scale", "bias")
    vectors = [getattr(self.norm, name)[...] for name in names]
    return RMSNormParams(*vectors) if len(names) == 1 else LayerNormParams(*vectors)

  def _options(self, linear: SwitchBackLinear) -> Any:
    """What the layer's function takes besides its operands."""
    names = "keep", "add_residual", "activation"
    own = {name: getattr(self, name) for name in names if hasattr(self, name)}
    return own | {"backend": linear.backend, "epsilon": self.norm.epsilon}


class LayerNormLinear(_Fused):
  """`SwitchBackLinear(nnx.LayerNorm(epsilon=1e-5)(x))` in one piece: `norm` and `linear`.

  Args:
    norm: "layer", or "rms" for `nnx.RMSNorm`.
    keep, epsilon: those of `layer_norm_dense`.

  Further arguments are those of `SwitchBackLinear`. A call returns what `sbjax.LayerNormDense`'s
  does.

  >>> x, y = LayerNormLinear(32, 16, rngs=nnx.Rngs(0))(jnp.ones((4, 32)))
  >>> y.shape
  (4, 16)
  """

  linear: SwitchBackLinear

  def __init__(
    self,
    in_features: int,
    out_features: int,
    *,
    recipe: Recipe | str = SWITCHBACK,
    norm: str = "layer",
    rngs: nnx.Rngs,
    **kwargs,
  ):
    linears = {"linear": (in_features, out_features)}
    super().__init__(in_features, linears, (recipe,), norm=norm, rngs=rngs, **kwargs)

  def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    kernel, bias = self.linear.parameters()
    options = self._options(self.linear) | {"bias": bias, "num_outputs": 1}
    x = as_input(x, self.dtype)
    x, y = layer_norm_dense(x, self._norm(), kernel, self.linear.recipe, **options)
    return x, y[0]


class LayerNormMLP(_Fused):
  """A transformer's MLP in one piece: `norm`, `fc1`, an activation, `fc2`; see `layer_norm_mlp`.

  Args:
    recipe: one for both linear layers, or a pair.
    add_residual, activation: those of `layer_norm_mlp`.

  For the rest see LayerNormLinear. A call returns what `sbjax.LayerNormMLP`'s does.

  >>> mlp = LayerNormMLP(32, 128, add_residual=True, rngs=nnx.Rngs(0))
  >>> mlp(jnp.ones((4, 32))).shape
  (4, 32)
  """

  fc1: SwitchBackLinear
  fc2: SwitchBackLinear

  def __init__(
    self,
    width: int,
    hidden: int,
    *,
    recipe: Recipe | str | tuple[Recipe | str, Recipe | str] = SWITCHBACK,
    norm: str = "layer",
    add_residual: bool = False,
    activation: str = "gelu",
    rngs: nnx.Rngs,
    **kwargs,
  ):
    linears = {"fc1": (width, hidden), "fc2": (hidden, width)}
    first, second = as_pair(recipe)
    super().__init__(width, linears, (first, second), norm=norm, rngs=rngs, **kwargs)
    self.add_residual, self.activation = add_residual, activation

  def __call__(self, x: jax.Array) -> jax.Array | tuple[jax.Array, jax.Array]:
    x, recipes = as_input(x, self.dtype), (self.fc1.recipe, self.fc2.recipe)
    parameters = *self.fc1.parameters(), *self.fc2.parameters()
    return layer_norm_mlp(x, self._norm(), *parameters, recipes, **self._options(self.fc1))


class GatedMLP(_Fused):
  """LLaMA's MLP in one piece: `norm`, `down(silu(gate(n)) * up(n))`; see `gated_mlp`.

  The norm is an RMS norm, and the linear layers have no bias, unless `norm` and `use_bias` say
  otherwise. For the rest see LayerNormMLP.

  >>> mlp = GatedMLP(32, 128, add_residual=True, rngs=nnx.Rngs(0))
  >>> mlp(jnp.ones((4, 32))).shape
  (4, 32)
  """

  gate: SwitchBackLinear
  up: SwitchBackLinear
  down: SwitchBackLinear

  def __init__(
    self,
    width: int,
    hidden: int,
    *,
    recipe: Recipe | str | tuple[Recipe | str, Recipe | str] = SWITCHBACK,
    norm: str = "rms",
    add_residual: bool = False,
    activation: str = "silu",
    use_bias: bool = False,
    rngs: nnx.Rngs,
    **kwargs,
  ):
    linears = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    first, second = as_pair(recipe)
    how = {"norm": norm, "use_bias": use_bias, "rngs": rngs}
    super().__init__(width, linears, (first, first, second), **how, **kwargs)
    self.add_residual, self.activation = add_residual, activation

  def __call__(self, x: jax.Array) -> jax.Array | tuple[jax.Array, jax.Array]:
    (w_gate, b_gate), (w_up, b_up) = self.gate.parameters(), self.up.parameters()
    w_down, b_down = self.down.parameters()
    x, recipes = as_input(x, self.dtype), (self.gate.recipe, self.down.recipe)
    options = {"b_gate": b_gate, "b_up": b_up, "b_down": b_down} | self._options(self.gate)
    return gated_mlp(x, self._norm(), w_gate, w_up, w_down, recipes, **options)
