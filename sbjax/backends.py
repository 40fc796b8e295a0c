"""Who computes: each backend offers the same two operations with the same numbers.

"xla" is the definition in plain jnp and runs wherever JAX does. Kernels for one kind of chip
join `_BACKENDS` under their own name. A recipe never names a backend, a backend never changes
a recipe's numbers, and a backend asked for by name is never swapped for another.
"""

import functools
import os
import warnings
from collections.abc import Callable
from typing import NamedTuple

import jax

from sbjax.matmul import scaled_matmul
from sbjax.quantize import quantize


class Backend(NamedTuple):
  name: str
  quantize: Callable  # as sbjax.quantize.quantize
  scaled_matmul: Callable  # as sbjax.matmul.scaled_matmul


_BACKENDS = {"xla": Backend("xla", quantize, scaled_matmul)}
_PLANNED = ("mosaic", "triton")


def get_backend(name: str | None = None) -> Backend:
  """The backend of that name; None chooses the best there is, today always "xla".

  Raises:
    NotImplementedError: the name is known, but its kernels are not in this version.
    ValueError: the name is not known.
  """
  if name is None:
    return _BACKENDS["xla"]
  if name in _BACKENDS:
    return _BACKENDS[name]
  offered = ", ".join(repr(known) for known in _BACKENDS)
  if name in _PLANNED:
    raise NotImplementedError(f"backend={name!r} has no kernels yet; this version has {offered}.")
  raise ValueError(f"Unknown backend {name!r}; this version has {offered}; None chooses.")


@functools.cache
def warn_of_inexact_int8() -> None:
  """Warns once where XLA may get int8 products wrong.

  On an NVIDIA GPU XLA may give an int8 matmul to a Triton kernel whose contracted tile is 16, half
  of what the tensor core takes, and the sum comes out twice as large: seen with jax 0.11.2 on an
  H200 for matmuls of some hundred rows; at CLIP's sizes larger tiles win and the sums are exact.
  """
  flag = "xla_gpu_enable_triton_gemm"
  if jax.default_backend() == "gpu" and flag not in os.environ.get("XLA_FLAGS", ""):
    warnings.warn(
      "XLA's Triton kernels can return twice the sum of a small int8 matmul on a GPU. Set"
      f" XLA_FLAGS=--{flag}=false before JAX starts: cuBLAS is exact (and compiles faster).",
      stacklevel=2,
    )
