"""Who computes: each backend offers the same two operations with the same numbers.

"xla" is the definition in plain jnp and runs wherever JAX does. Kernels for one kind of chip
join `_BACKENDS` under their own name. A recipe never names a backend, a backend never changes
a recipe's numbers, and a backend asked for by name is never swapped for another.
"""

from collections.abc import Callable
from typing import NamedTuple

from sbjax import matmul, quantize


class Backend(NamedTuple):
  name: str
  quantize: Callable  # as sbjax.quantize.quantize
  scaled_matmul: Callable  # as sbjax.matmul.scaled_matmul


_BACKENDS = {"xla": Backend("xla", quantize.quantize, matmul.scaled_matmul)}
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
