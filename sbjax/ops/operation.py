"""A row of the table of operations."""

from collections.abc import Callable
from typing import NamedTuple


class Operation(NamedTuple):
  """One operation, whoever computes it.

  definition: in plain jnp. Definitions that quantize take `quantize=`, so that absmax can be
    reduced over devices.
  axes: "operands -> results", the names of each array's axes in turn: m, n, k, or "." for an axis
    that is never split. The last entry serves all further arrays; a vector has its last axis.
  kernels: modules of sbjax.pallas, the fastest first. A module has a function of the operation's
    name with the definition's signature. It may also have
      unsupported(device, *args, **options): why the kernel does not take these, or None;
      is_slower(*args, **options): whether the next kernel is faster with these;
      TAKES: dtypes of `sbjax.quantize.FORMATS`; it takes int8 and fp8 alone if it names none.
    Its folder has `unsupported(device)`: why no kernel there runs on a device, or None. A chip with
    one file, such as sm100.py, needs no folder: `unsupported` gets the device alone, then all.
  static: the arguments that a program is compiled for.
  """

  definition: Callable
  axes: str
  kernels: tuple[str, ...]
  static: tuple[str, ...] = ()
