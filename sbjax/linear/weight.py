"""A weight and its 8-bit forms: quantized once for all its uses in a step, or frozen in 8 bits.

A frozen weight may have an adapter of low rank beside it, which learns.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sbjax.ops.registry import Backend, get_backend
from sbjax.quantize import Quantized, as_floating
from sbjax.recipes import Recipe, as_recipe

_FLOAT32 = jnp.dtype(jnp.float32)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NoMaster:
  """Stands for a master that is not there: the weight is frozen in 8 bits.

  A layer's kernel is [K, N]. A parameter of any shape says which of its axes a matmul sums over,
  and which count separate matmuls, each with scales of its own; the rest are those of the output.
  """

  shape: tuple[int, ...]  # of w [K, N], or of the parameter
  dtype: jnp.dtype = _FLOAT32
  contracted: tuple[int, ...] = (0,)
  batch: tuple[int, ...] = ()

  @property
  def ndim(self) -> int:
    return len(self.shape)


class QuantizedWeight(NamedTuple):
  """A weight and its 8-bit forms for a recipe: quantized once for all its uses in a step.

  Its gradient is that of `master`; the rest is a constant that follows from it.
  """

  master: Any  # jax.Array w [K, N], or NoMaster
  fwd: Quantized | None  # w.T [..., N, K] as the forward pass takes it; None: not, or as dgrad.T
  dgrad: Quantized | None  # w [K, N] as the input gradient takes it, or None


class LoRAWeight(NamedTuple):
  """`base + a @ b`: a constant kernel and an adapter of low rank (`sbjax.linear.lora`).

  Gradients are those of a and b; base has none, be it in 8 bits or floats.
  """

  base: Any  # jax.Array w [K, N], or a QuantizedWeight
  a: jax.Array  # [K, r]
  b: jax.Array  # [r, N], with the adapter's factor in it


def quantize_weight(
  w: jax.Array, recipe: Recipe | str, *, backend: str | None = None
) -> QuantizedWeight | jax.Array:
  """w [K, N] as `recipe` multiplies with it, to be used wherever w is; w itself for "full".

  For a kernel that is used more than once a step: rematerialised, or over several microbatches.

  >>> w = quantize_weight(jnp.ones((32, 16)), "switchback")
  >>> w.dgrad.values.dtype, quantized_dot(jnp.ones((4, 32)), w, "switchback").shape
  (dtype('int8'), (4, 16))
  """
  recipe, ops, w = as_recipe(recipe), get_backend(backend), as_kernel("w", w)
  if not recipe.rounds_w:
    return w
  constant = jax.lax.stop_gradient(w)
  fwd, dgrad = (pair and pair[1] for pair in (recipe.fwd, recipe.dgrad))
  if recipe.shares_w:
    values, transposed = ops.quantize_both(constant, dgrad)
    return QuantizedWeight(w, transposed, values)
  transposed = None if fwd is None else ops.quantize_transposed(constant, fwd)
  return QuantizedWeight(w, transposed, None if dgrad is None else ops.quantize(constant, dgrad))


def serving_weight(w: Quantized) -> QuantizedWeight:
  """A frozen kernel: only its 8 bits for the forward pass [N, K] are there.

  The gradient of the input comes from the same 8 bits; the kernel itself has none.
  """
  return QuantizedWeight(NoMaster(w.values.shape[::-1]), w, None)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def without_gradient(name: str, scale):
  """The scale of a kernel that is frozen in 8 bits; an error where it is differentiated."""
  return scale


@without_gradient.defjvp
def _no_gradient(name, primals, tangents):
  raise ValueError(
    f"{name} is frozen in 8 bits and has no gradient: differentiate the input, the bias or an"
    " adapter (sbjax.linear.lora), or give the layer its float weights."
  )


def as_kernel(name: str, w) -> Any:
  """w as JAX's array; a ValueError unless it is floating point [K, N]."""
  if isinstance(w, NoMaster):
    return w
  w = as_floating(name, w)
  if w.ndim != 2:
    raise ValueError(f"{name} must be a kernel [K, N], not {w.shape}.")
  return w


def base_weight(w) -> Any:
  """w without its adapter."""
  return w.base if isinstance(w, LoRAWeight) else w


def master_weight(w) -> Any:
  w = base_weight(w)
  return w.master if isinstance(w, QuantizedWeight) else w


def is_frozen(w) -> bool:
  """Whether there are only 8 bits of w, or of its base."""
  return isinstance(master_weight(w), NoMaster)


def frozen_bits(w) -> Quantized | None:
  """The 8 bits [..., N, K] of a kernel that has nothing else; None for any other."""
  if isinstance(w, QuantizedWeight) and is_frozen(w):
    w = w.fwd
  return w if isinstance(w, Quantized) else None


def saved_weight(w):
  """The part of w that is saved for the backward pass; of a QuantizedWeight only the 8 bits."""
  if isinstance(w, LoRAWeight):
    return w._replace(base=saved_weight(w.base))
  if not isinstance(w, QuantizedWeight) or is_frozen(w):
    return w
  like = w.master if w.dgrad is None else jnp.zeros((0,), w.master.dtype)
  return QuantizedWeight(like, None, w.dgrad)


def split_columns(ops: Backend, recipe: Recipe, w, bias, num_outputs: int) -> list[tuple]:
  """(w, bias) of so many equal parts of the output, for `forward`; quantized as the whole is."""
  if num_outputs == 1:
    return [(w, bias)]
  if isinstance(w, LoRAWeight):
    parts = split_columns(ops, recipe, w.base, bias, num_outputs)
    bs = jnp.split(w.b, num_outputs, axis=1)
    return [(LoRAWeight(base, w.a, b), bias) for (base, bias), b in zip(parts, bs, strict=True)]
  if recipe.fwd is not None and not isinstance(w, QuantizedWeight):
    w = QuantizedWeight(w, ops.quantize_transposed(w, recipe.fwd[1]), None)
  q, size = recipe.fwd and w.fwd, master_weight(w).shape[1] // num_outputs

  def part(columns: slice) -> tuple:
    if q is None:
      kernel = master_weight(w)[:, columns]
    else:
      scale = q.scale[columns] if q.spec.is_rowwise else q.scale
      kernel = w._replace(fwd=Quantized(q.values[columns], scale, q.spec))
    return kernel, None if bias is None else bias[columns]

  return [part(slice(i * size, (i + 1) * size)) for i in range(num_outputs)]


def cotangent(w, dw):
  """The gradient of w in the form of w; of a QuantizedWeight's 8 bits there is none."""
  return QuantizedWeight(dw, None, None) if isinstance(w, QuantizedWeight) else dw
