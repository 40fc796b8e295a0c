"""The table of operations, and who computes them: the definition in plain jnp, or a kernel.

A backend names who computes. "xla" is the definitions and runs wherever JAX does. "triton" has
Triton's kernels, for NVIDIA GPUs from Ampere on. "mosaic" has each row's first kernel: Mosaic's
where there is one, for Hopper GPUs, else Triton's. Asked for by name, a backend computes, or it
refuses and says why. Only backend None mixes: it takes the fastest kernel that supports the
operands, or the definition. A backend never changes a recipe's numbers.
"""

import functools
import importlib
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from sbjax.ops import adam, attention, matmul, rows
from sbjax.ops.device import compute_capability, slow_int8, target
from sbjax.ops.operation import Operation
from sbjax.ops.partition import arrays_of, is_explicit
from sbjax.ops.shards import on_shards
from sbjax.quantize import E4M3, E5M2, FORMATS, INT8, Spec, folded, quantize

_log = logging.getLogger("sbjax")

_TRITON_GEMM = "--xla_gpu_enable_triton_gemm"  # See warn_of_inexact_int8.


def _quantize(x, spec, *, fold=None, quantize=quantize):
  return quantize(folded(x, fold), spec)


def _quantize_transposed(x, spec, *, quantize=quantize):
  return quantize(x.T, spec)


def _quantize_both(x, spec, *, quantize=quantize):
  values = quantize(x, spec)
  return values, values.T


OPERATIONS = {
  "quantize": Operation(_quantize, "mk -> mk", ("triton.quantize",)),
  "quantize_transposed": Operation(_quantize_transposed, "mk -> km", ("triton.quantize",)),
  "quantize_both": Operation(_quantize_both, "mk -> mk mk km", ("triton.quantize",)),
  **matmul.OPERATIONS,
  **rows.OPERATIONS,
  **attention.OPERATIONS,
  **adam.OPERATIONS,
}


class Backend:
  """The operations as one backend computes them, by their names; and its `name`."""

  def __init__(self, **operations):
    vars(self).update(operations)

  if TYPE_CHECKING:

    def __getattr__(self, operation: str) -> Callable: ...


NAMES = ("xla", "mosaic", "triton")


def get_backend(name: str | None = None) -> Backend:
  """The backend of that name; None chooses the best there is for JAX's default device.

  Raises:
    NotImplementedError: the name is known, but does not run here; says why.
    ValueError: the name is not known.
  """
  if name is None:
    return _default_backend(target())
  check_name(name)
  if reason := _unsupported_reason(name, target()):
    raise NotImplementedError(f"backend={name!r} {reason}")
  return _XLA if name == "xla" else _named_backend(name, target())


def check_name(name: str | None) -> None:
  """Raises the ValueError of `get_backend`, but does not look at the devices: that starts them."""
  if name is not None and (not isinstance(name, str) or name not in NAMES):
    raise ValueError(
      f"Unknown backend {name!r}; there are {', '.join(map(repr, NAMES))}; None chooses."
    )


def runs(name: str) -> bool:
  """Whether the backend of that name runs on JAX's default device."""
  return _unsupported_reason(name, target()) is None


def has_kernel(operation: str, *args, **options) -> bool:
  """Whether backend None computes the operation of these arguments by a kernel."""
  device = target()
  kernels = _kernels(OPERATIONS[operation], device)
  return _choice(kernels, device, args, options)[0] is not None


def _unsupported_reason(name: str, device) -> str | None:
  """Why a backend does not run on a device, or None."""
  kernels = [kernel for row in OPERATIONS.values() for kernel in row.kernels]
  folders = dict.fromkeys(kernel.partition(".")[0] for kernel in kernels)
  reasons = {folder: _module(folder).unsupported(device) for folder in folders}
  in_triton = reasons.pop("triton")
  if name == "mosaic" and None not in reasons.values():
    return next(iter(reasons.values()))
  return None if name == "xla" else in_triton


@functools.cache
def _default_backend(device) -> Backend:
  """All kernels that run on a device, else XLA; warns if the device has no fast int8."""
  chosen, lacking = _kernels_or_xla(device), slow_int8(device)
  if lacking is None:
    return chosen

  def scaled_matmul(lhs, *args, **options):
    if lhs.spec.format.is_exact:
      _warn_of_slow_int8(device.device_kind, lacking)
    return chosen.scaled_matmul(lhs, *args, **options)

  return Backend(**vars(chosen) | {"scaled_matmul": scaled_matmul})


def _kernels_or_xla(device) -> Backend:
  """Logs the choice, or why there is no kernel."""
  capability = compute_capability(device)
  reasons = {name: _unsupported_reason(name, device) for name in ("mosaic", "triton")}
  usable = [name for name, reason in reasons.items() if reason is None]
  if not usable:
    _log.debug("sbjax: backend 'xla' (%s)", "; ".join(f"{n} {r}" for n, r in reasons.items()))
    if capability is not None and capability >= 80:
      warnings.warn(
        f"8-bit matmuls are left to XLA, and slow: backend 'triton' {reasons['triton']}",
        stacklevel=2,
      )
    return _XLA
  _log.debug("sbjax: backend %r on %s", usable[0], device.device_kind)
  kernels = {name: _kernels(row, device) for name, row in OPERATIONS.items()}
  return backend_of(usable[0], kernels, device, is_default=True)


@functools.cache
def _named_backend(name: str, device) -> Backend:
  """The first kernel of each operation that the backend has for a device."""
  prefix = "triton." if name == "triton" else ""
  kernels = {n: _kernels(row, device, prefix)[:1] for n, row in OPERATIONS.items()}
  return backend_of(name, kernels, device)


def _kernels(row: Operation, device, prefix: str = "") -> list:
  """The modules of an operation's kernels that run on a device, the fastest first."""
  names = [name for name in row.kernels if name.startswith(prefix)]
  folders = [_module(name.partition(".")[0]) for name in names]
  pairs = zip(names, folders, strict=True)
  return [_module(name) for name, folder in pairs if folder.unsupported(device) is None]


def _module(name: str) -> Any:
  return importlib.import_module(f"sbjax.pallas.{name}")


def backend_of(
  name: str, kernels: Mapping[str, Sequence[Any]], device, is_default: bool = False
) -> Backend:
  """The backend whose operations are the functions of that name in `kernels`, each on its shards.

  kernels: for each operation modules as `Operation` describes them.
  is_default: whether operands that no kernel takes are left to XLA, or an error.
  """
  operations = {n: _operation(n, name, kernels, device, is_default) for n in OPERATIONS}
  return Backend(name=name, **operations)


def _operation(operation: str, backend: str, kernels, device, is_default: bool) -> Callable:
  definition, axes, _, static = OPERATIONS[operation]

  @functools.wraps(definition)  # It says where the static arguments stand.
  def run(*args, **options):
    kernel, reason = _choice(kernels[operation], device, args, options)
    if kernel is None and is_default:
      _log.debug("sbjax: %s goes to XLA; the kernel %s", operation, reason)
      return getattr(_XLA, operation)(*args, **options)
    if kernel is None:
      raise NotImplementedError(
        f"backend={backend!r}: the kernel of {operation} {reason}; backend=None chooses another."
      )
    quantizer = kernels["quantize"][0]
    by_kernel = functools.partial(on_shards, operation, definition, axes, kernel, quantizer)
    if is_explicit() or not is_default:
      return by_kernel(*args, **options)
    arrays, call = arrays_of(args, options)
    # A program that is traced where a GPU is the default device may still be compiled for a CPU.
    by_kernel, by_xla = (functools.partial(call, how) for how in (by_kernel, definition))
    return jax.lax.platform_dependent(*arrays, cuda=by_kernel, default=by_xla)

  # A model's layers repeat: each size is traced and lowered once.
  return jax.jit(run, static_argnames=static)


def _choice(kernels: Sequence[Any], device, args, options) -> tuple[Any, str | None]:
  """The fastest kernel that takes these arguments; or None, and why each does not."""
  reasons = [_refusal(kernel, device, args, options) for kernel in kernels]
  taking = [kernel for kernel, reason in zip(kernels, reasons, strict=True) if reason is None]
  for kernel in taking:
    is_slower = getattr(kernel, "is_slower", None)
    if kernel is taking[-1] or not (is_slower and is_slower(*args, **options)):
      return kernel, None
  return None, "; ".join(dict.fromkeys(filter(None, reasons))) or "is for other devices"


def _refusal(kernel, device, args, options) -> str | None:
  """Why a kernel does not take these arguments, or None. Nothing else checks it."""
  leaves = jax.tree.leaves((args, options), is_leaf=lambda leaf: isinstance(leaf, Spec))
  dtypes = [leaf.dtype for leaf in leaves if hasattr(leaf, "dtype")]
  if jnp.float64 in dtypes:
    return "takes at most 32 bits, not float64"
  for dtype in filter(FORMATS.get, dtypes):
    if dtype not in getattr(kernel, "TAKES", (INT8, E4M3, E5M2)):
      return f"takes no {dtype.name}"
    least = FORMATS[dtype].capability
    if least > (compute_capability(device) or 0):
      return f"takes no {dtype.name} below compute capability {least / 10}"
  if not hasattr(kernel, "unsupported"):
    return None
  return kernel.unsupported(device, *args, **options)


def _scaled_matmul(lhs, rhs, *args, **options):
  if lhs.spec.format.is_exact:
    warn_of_inexact_int8()
  return matmul.scaled_matmul(lhs, rhs, *args, **options)


@functools.cache
def _warn_of_slow_int8(kind: str, lacking: str) -> None:
  warnings.warn(
    f"{kind} has {lacking}: an int8 recipe is slow there. Take recipe 'fp8_switchback', which has"
    " SwitchBack's scales in fp8.",
    stacklevel=2,
  )


_DEFINITIONS = {name: row.definition for name, row in OPERATIONS.items()}
_XLA = Backend(name="xla", **_DEFINITIONS | {"scaled_matmul": _scaled_matmul})


@functools.cache
def warn_of_inexact_int8() -> None:
  """Warns once where XLA may get int8 matmuls wrong.

  On an NVIDIA GPU XLA may give an int8 matmul of some hundred rows to a Triton kernel whose
  contracted tile is 16, and the sum comes out twice as large (jax 0.11.2 on an H200).
  """
  if jax.default_backend() == "gpu" and _TRITON_GEMM not in os.environ.get("XLA_FLAGS", ""):
    warnings.warn(
      "XLA's Triton kernels can return twice the sum of a small int8 matmul on a GPU. Set"
      f" XLA_FLAGS={_TRITON_GEMM}=false before JAX starts: cuBLAS is exact (and compiles faster).",
      stacklevel=2,
    )
