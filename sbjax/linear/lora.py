"""LoRA: adapters of low rank on kernels that stay as they are, in 8 bits or floats.

  y = x @ w + (x @ a) @ b * (alpha / rank)

Only a [K, rank] and b [rank, N] learn (Hu et al. 2021, https://arxiv.org/abs/2106.09685). b starts
at 0, so that the first output is that without adapters. The frozen kernel takes x in 8 bits, as the
recipe says, and the adapter in the compute dtype: a linear layer's x before it is rounded, a fused
layer's after it. The backward pass computes no gradient of w and keeps no float master.

For linen the adapters are a tree of their own, which is all that an optimizer sees:

  lora = init_lora(key, params, rank=8, targets=(".*/qkv/kernel",))
  model.apply({"params": add_lora(params, lora, alpha=16)}, x)

For nnx see `adapt` and `merge`.
"""

import difflib
import re
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from sbjax.linear.frozen import freeze
from sbjax.linear.layers import SwitchBackLinear
from sbjax.linear.weight import LoRAWeight, QuantizedWeight, frozen_bits
from sbjax.quantize import Quantized, dequantize, floating_dtype


def init_lora(
  key: jax.Array, params: dict, rank: int, targets: Sequence[str], dtype: Any = jnp.float32
) -> dict:
  """Adapters for the kernels among linen's `params`: {..., "kernel": {"a", "b"}} along their paths.

  Args:
    params: kernels [K, N], or [layers, K, N] of `nn.scan`; floats or frozen in 8 bits.
    targets: regular expressions for whole paths, such as ".*/(qkv|out)/kernel", of kernels of
      SwitchBackDense (LayerNormDense, LayerNormMLP).
    dtype: of the adapters.

  Raises:
    ValueError: a target matches no kernel, or the rank does not fit one.

  >>> lora = init_lora(jax.random.key(0), {"fc1": {"kernel": jnp.ones((32, 16))}}, 8, ("fc1/.*",))
  >>> jax.tree.map(jnp.shape, lora)
  {'fc1': {'kernel': {'a': (32, 8), 'b': (8, 16)}}}
  """
  kernels = {"/".join(path): w for path, w in flatten_dict(params).items() if path[-1] == "kernel"}
  adapters = {}
  for name in _matching(targets, kernels):
    *layers, k, n = _shape(kernels[name])
    own = jax.random.fold_in(key, zlib.crc32(name.encode()))
    adapters[tuple(name.split("/"))] = _init(own, name, (*layers, k, n), rank, dtype)
  return unflatten_dict(adapters)


def add_lora(params: dict, lora: dict, alpha: float) -> dict:
  """The params with each kernel that has an adapter as a LoRAWeight, for the same model.

  Differentiate it in `lora`.
  """
  result: dict[tuple[str, ...], Any] = {**flatten_dict(params)}
  adapters: dict[tuple[str, ...], Any]
  adapters = {**flatten_dict(lora, is_leaf=lambda path, _: path[-1:] == ("kernel",))}
  for path, own in adapters.items():
    if path not in result:
      raise ValueError(f"lora has an adapter for {'/'.join(path)}, which params do not have.")
    result[path] = _adapted(result[path], own["a"], own["b"], alpha)
  return unflatten_dict(result)


def merge_lora(params: dict) -> dict:
  """The params of `add_lora` as floats: w + a @ b for a kernel with an adapter.

  Others that are frozen in 8 bits are dequantized. Kernels for serving are made of the result:
  `sbjax.interop.serving.serving_params(merge_lora(params), recipe)`.
  """

  def floats(path, w):
    if path[-1] == "kernel":
      return _merged(w)
    return dequantize(w) if isinstance(w, Quantized) else w  # A table, row by row.

  return unflatten_dict({path: floats(path, w) for path, w in flatten_dict(params).items()})


class Adapter(nnx.Module):
  """The adapter of a SwitchBackLinear: its parameters are `nnx.LoRAParam`."""

  def __init__(self, a: jax.Array, b: jax.Array, alpha: float):
    self.a, self.b, self.alpha = nnx.LoRAParam(a), nnx.LoRAParam(b), alpha

  def beside(self, kernel) -> LoRAWeight:
    return _adapted(kernel, self.a[...], self.b[...], self.alpha)


def adapt(
  model: nnx.Module,
  rank: int,
  alpha: float,
  targets: Sequence[str],
  *,
  rngs: nnx.Rngs,
  dtype: Any = jnp.float32,
) -> None:
  """Gives SwitchBackLinears of an nnx model adapters and freezes their kernels in 8 bits, in place.

  Train `nnx.LoRAParam`: `nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)` has a state for them only.

  Args:
    targets: regular expressions for whole paths of modules, such as ".*/fc1".

  Raises:
    ValueError: a target matches no SwitchBackLinear, or the rank does not fit one.

  >>> model = nnx.Dict(fc1=SwitchBackLinear(32, 16, rngs=nnx.Rngs(0)))
  >>> adapt(model, rank=8, alpha=16, targets=("fc1",), rngs=nnx.Rngs(1))
  >>> model.fc1.kernel.get_value().fwd.values.dtype, model(jnp.ones((4, 32))).shape
  (dtype('int8'), (4, 16))
  """
  linears = _linears(model)
  for name in _matching(targets, linears):
    layer = linears[name]
    if layer.lora is not None:
      raise ValueError(f"{name} has an adapter already: `merge` the model first.")
    shape = layer.in_features, layer.out_features
    made = _init(rngs.params(), name, shape, rank, dtype)
    kernel = layer.kernel.get_value()
    if layer.recipe.fwd is not None and not isinstance(kernel, QuantizedWeight):
      kernel = freeze(kernel, layer.recipe.fwd[1], contracted=(0,))
    layer.lora = nnx.data(Adapter(made["a"], made["b"], alpha))  # pyright: ignore
    layer.kernel = nnx.Param(kernel)  # pyright: ignore


def merge(model: nnx.Module) -> None:
  """The inverse of `adapt`, in place: kernels are floats again, with their adapters in them."""
  for layer in _linears(model).values():
    if layer.lora is not None:
      layer.kernel = nnx.Param(_merged(layer.lora.beside(layer.kernel.get_value())))
      layer.lora = nnx.data(None)


def _linears(model: nnx.Module) -> dict[str, SwitchBackLinear]:
  modules = nnx.iter_modules(model)
  return {"/".join(map(str, p)): m for p, m in modules if isinstance(m, SwitchBackLinear)}


def _matching(targets: Sequence[str], names) -> list[str]:
  """The names that a target matches; a ValueError for a target that matches none."""
  if isinstance(targets, str) or not targets:
    raise ValueError(f"{targets=} must be a tuple of patterns, such as ('.*/fc1/kernel',).")
  for target in targets:
    try:
      found = any(re.fullmatch(target, name) for name in names)
    except re.error as error:
      raise ValueError(f"targets: {target!r} is no regular expression: {error}.") from None
    if not found:
      near = difflib.get_close_matches(target, names, n=4, cutoff=0) or ["none"]
      raise ValueError(
        f"targets: the pattern {target!r} matches no kernel that takes an adapter. A pattern is for"
        f" the whole path. Paths near it: {', '.join(near)}."
      )
  return [name for name in names if any(re.fullmatch(target, name) for target in targets)]


def _init(key, name: str, shape, rank: int, dtype) -> dict[str, jax.Array]:
  """a of variance 1 / K, so that x @ a varies as x does; b is 0."""
  *layers, k, n = shape
  if not isinstance(rank, int) or not 1 <= rank <= min(k, n):
    raise ValueError(f"rank={rank!r} must be from 1 to {min(k, n)} for {name} [{k}, {n}].")
  dtype = floating_dtype("dtype", dtype)
  a = jax.random.normal(key, (*layers, k, rank), dtype) * jnp.asarray(k**-0.5, dtype)
  return {"a": a, "b": jnp.zeros((*layers, rank, n), dtype)}


def _adapted(kernel, a, b, alpha: float) -> LoRAWeight:
  factor = jnp.asarray(alpha / a.shape[-1], b.dtype)
  return LoRAWeight(kernel, a, b * factor)


def _shape(w) -> tuple[int, ...]:
  """[K, N] or [layers, K, N]."""
  if (bits := frozen_bits(w)) is None:
    return w.shape
  *layers, n, k = bits.values.shape
  return (*layers, k, n)


def _merged(w):
  """A kernel in floats."""
  if isinstance(w, LoRAWeight):
    base = _merged(w.base)
    return base + (w.a.astype(jnp.float32) @ w.b.astype(jnp.float32)).astype(base.dtype)
  return w if (bits := frozen_bits(w)) is None else jnp.matrix_transpose(dequantize(bits))
