"""A parameter in 8 bits only, in whatever layout a model gives it before it multiplies by it.

`freeze` makes the 8 bits [..., N, K] of a parameter of any shape, for the axes that matmuls sum
over. `Frozen` is their view in a layout: values as an operand has them, and scales that are 1 along
the axes whose values share one. Transposes that lead there and back cancel in XLA.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sbjax.linear.weight import NoMaster, QuantizedWeight, serving_weight
from sbjax.ops.registry import get_backend
from sbjax.quantize import Quantized, Spec


class SharedScales(ValueError):
  """A product needs one scale along axes that have several."""


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=["spec", "dtype"]
)
@dataclasses.dataclass(frozen=True)
class Frozen:
  """An operand in 8 bits; `values * scale` dequantizes it."""

  values: jax.Array
  scale: Any  # float32; along each axis of 1, or of the values' size
  spec: Spec  # of the forward pass's [N, K]
  dtype: jnp.dtype  # of the floats that it stands for

  @property
  def shape(self) -> tuple[int, ...]:
    return self.values.shape

  @property
  def ndim(self) -> int:
    return self.values.ndim

  def transpose(self, axes) -> "Frozen":
    scale = jax.tree.map(lambda s: s.transpose(axes), self.scale)
    return dataclasses.replace(self, values=self.values.transpose(axes), scale=scale)

  def stacked(self) -> "Frozen":
    """With scales for each index of the first axis, as a loop over it takes them."""
    lead = self.shape[:1]
    scale = jax.tree.map(lambda s: jnp.broadcast_to(s, (*lead, *s.shape[1:])), self.scale)
    return dataclasses.replace(self, scale=scale)

  def dequantized(self) -> jax.Array:
    return (self.values.astype(jnp.float32) * self.scale).astype(self.dtype)

  def grouped(self, batch, contracted, free) -> QuantizedWeight:
    """The weight [*batch, N, K] of a product that sums over those axes.

    Raises:
      SharedScales: values that are summed have several scales.
    """
    own = self.spec.is_rowwise  # A scale for each output, else one for all of them.
    shared = contracted if own else (*contracted, *free)
    if any(self.scale.shape[a] > 1 for a in shared):
      raise SharedScales(f"the axes {(*shared,)} of {self.shape} have several scales")
    moved = self.transpose((*batch, *free, *contracted))
    lead = [self.shape[a] for a in batch]
    n, k = (math.prod(self.shape[a] for a in axes) for axes in (free, contracted))
    rows = [self.shape[a] for a in free] if own else [1] * len(free)
    scale = jnp.broadcast_to(moved.scale, (*lead, *rows, *[1] * len(contracted)))
    scale = scale.reshape((*lead, n if own else 1, 1))
    weight = serving_weight(Quantized(moved.values.reshape((*lead, n, k)), scale, self.spec))
    return weight._replace(master=NoMaster((k, n)))


def view(weight: QuantizedWeight) -> Frozen:
  """The 8 bits of a frozen parameter in the layout of its floats."""
  master, q = _without_sliced_axes(weight), weight.fwd
  assert q is not None
  batch, contracted = master.batch, master.contracted
  free = _others(master.ndim, batch, contracted)
  order, size = (*batch, *free, *contracted), master.shape
  lead = [size[a] for a in batch]
  rows = [size[a] for a in free] if q.spec.is_rowwise else [1] * len(free)
  scale = q.scale.reshape((*lead, *rows, *[1] * len(contracted)))
  values = q.values.reshape([size[a] for a in order])
  return Frozen(values, scale, q.spec, master.dtype).transpose(np.argsort(order))


def _without_sliced_axes(weight: QuantizedWeight) -> NoMaster:
  """Its master; without the axes that a loop over a stack has taken from the arrays since."""
  master = weight.master
  missing = len(master.batch) + 2 - weight.fwd.values.ndim  # pyright: ignore
  gone = master.batch[:missing] if missing > 0 else ()
  kept = [a for a in range(master.ndim) if a not in gone]
  axes = {a: i for i, a in enumerate(kept)}
  return dataclasses.replace(
    master,
    shape=tuple(master.shape[a] for a in kept),
    contracted=tuple(axes[a] for a in master.contracted),
    batch=tuple(axes[a] for a in master.batch if a in axes),
  )


def freeze(w, spec: Spec, contracted, batch=(), *, backend: str | None = None) -> QuantizedWeight:
  """The 8 bits of a parameter w, rounded as the forward pass rounds each of its matmuls' weights.

  Args:
    contracted: the axes that a matmul sums over.
    batch: the axes that count separate matmuls, such as experts or layers.
  """
  free = _others(w.ndim, batch, contracted)
  lead = [w.shape[a] for a in batch]
  k, n = (math.prod(w.shape[a] for a in axes) for axes in (contracted, free))
  kernels = jnp.asarray(w).transpose((*batch, *contracted, *free)).reshape((-1, k, n))
  ops = get_backend(backend)
  parts = [ops.quantize_transposed(kernel, spec) for kernel in kernels]
  fwd = jax.tree.map(lambda *a: jnp.stack(a).reshape((*lead, *a[0].shape)), *parts)
  master = NoMaster(tuple(w.shape), jnp.dtype(w.dtype), tuple(contracted), tuple(batch))
  return QuantizedWeight(master, fwd, None)


def _others(ndim: int, *axes) -> tuple[int, ...]:
  known = {a for group in axes for a in group}
  return tuple(a for a in range(ndim) if a not in known)
