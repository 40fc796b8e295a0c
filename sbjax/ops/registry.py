"""Who computes: each backend offers the same operations with the same numbers.

"xla" is the definition in plain jnp and runs wherever JAX does. "mosaic" multiplies on Hopper GPUs,
"triton" on NVIDIA GPUs from Ampere on; both quantize in Triton. A recipe never names a backend, a
backend never changes a recipe's numbers, and a backend asked for by name is never swapped for
another.
"""

import functools
import importlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from sbjax.ops.device import compute_capability, target
from sbjax.ops.operations import OPERATIONS, on_shards, unsupported_reason
from sbjax.ops.partition import arrays_of, is_explicit

_log = logging.getLogger("sbjax")

_TRITON_GEMM = "--xla_gpu_enable_triton_gemm"  # See warn_of_inexact_int8.


class Backend(NamedTuple):
  """The operations of a linear layer in 8 bits, those between two layers, and attention."""

  name: str
  quantize: Callable  # (x, spec): as sbjax.quantize.quantize
  quantize_transposed: Callable  # (x, spec): quantize(x.T, spec)
  quantize_both: Callable  # (x, spec): both, for a spec with one scale
  scaled_matmul: Callable  # as sbjax.ops.matmul.scaled_matmul
  norm_quantize: Callable  # as in sbjax.ops.rows, and so are the rest
  norm_backward: Callable
  gelu_quantize: Callable
  gelu_backward: Callable
  quantize_sum: Callable
  attention_forward: Callable  # as in sbjax.ops.attention
  attention_backward: Callable
  adam_direction: Callable  # as sbjax.ops.adam.adam_direction


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
  return _XLA if name == "xla" else _by_kernels(name, target(), falls_back=False)


def check_name(name: str | None) -> None:
  """Raises the ValueError of `get_backend`, without a look at the devices, which starts JAX's own.

  Layers and models are described before `jax.distributed.initialize`.
  """
  if name is not None and (not isinstance(name, str) or name not in NAMES):
    offered = ", ".join(repr(known) for known in NAMES)
    raise ValueError(f"Unknown backend {name!r}; there are {offered}; None chooses.")


def runs(name: str) -> bool:
  """Whether the backend of that name runs on JAX's default device."""
  return _unsupported_reason(name, target()) is None


def has_kernel(operation: str, *args, **options) -> bool:
  """Whether backend None computes the operation of these arguments by a Triton kernel."""
  has_fp8 = (compute_capability(target()) or 0) >= 89
  return runs("triton") and unsupported_reason(operation, has_fp8, args, options) is None


def _unsupported_reason(name: str, device) -> str | None:
  """Why a backend does not run on a device, or None."""
  if name == "xla":
    return None
  capability = compute_capability(device)
  if capability is None:
    return f"needs an NVIDIA GPU; JAX's default device is {device.platform!r}."
  if name == "mosaic" and capability != 90:
    return f"needs compute capability 9.0 (H100, H200); this is {device.device_kind}."
  if name == "mosaic" and jax.__version_info__ < (0, 11):
    return f"needs jax >= 0.11 (Python >= 3.12); this is {jax.__version__}."
  if name == "triton" and capability < 80:
    return f"needs compute capability 8.0 (A100) or newer; this is {device.device_kind}."
  missing = [m for m in ("triton", "jax_triton") if importlib.util.find_spec(m) is None]
  if missing:
    return f"needs {' and '.join(missing)}: pip install 'sbjax[cuda]'."
  return None


@functools.cache
def _default_backend(device) -> Backend:
  """Mosaic before Triton before XLA; logs the choice, or why there is none, once."""
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
  return _by_kernels(usable[0], device, falls_back=True)


@functools.cache
def _by_kernels(name: str, device, falls_back: bool) -> Backend:
  """The kernels of a backend, and the definition or an error where they do not support operands."""
  has_fp8 = (compute_capability(device) or 0) >= 89
  return backend_of(name, _modules(name), has_fp8=has_fp8, falls_back=falls_back)


def _modules(name: str) -> dict[str, Any]:
  return {
    operation: importlib.import_module(f"sbjax.pallas.{getattr(row, name)}")
    for operation, row in OPERATIONS.items()
  }


def backend_of(
  name: str, kernels: Mapping[str, Any], *, has_fp8: bool = True, falls_back: bool = False
) -> Backend:
  """The backend whose operations are the functions of that name in `kernels`, each on its shards.

  Args:
    kernels: for each operation a module; that of "quantize" also has `absmax` and `cast_scaled`,
      that of "scaled_matmul" also `accumulate`.
    has_fp8: whether the device has fp8.
    falls_back: whether operands that no kernel supports are left to XLA, or an error.
  """
  rows = (_operation(op, name, kernels, has_fp8, falls_back) for op in Backend._fields[1:])
  return Backend(name, *rows)


def _operation(operation: str, backend: str, kernels, has_fp8: bool, falls_back: bool) -> Callable:
  kernel = functools.partial(on_shards, operation, kernels)
  definition = OPERATIONS[operation].definition

  def run(*args, **options):
    reason = unsupported_reason(operation, has_fp8, args, options)
    if reason and falls_back:
      _log.debug("sbjax: %s goes to XLA; the kernel %s", operation, reason)
      return getattr(_XLA, operation)(*args, **options)
    if reason:
      raise NotImplementedError(
        f"backend={backend!r}: the kernel of {operation} {reason}; backend=None leaves it to XLA."
      )
    if is_explicit() or not falls_back:
      return kernel(*args, **options)
    arrays, call = arrays_of(args, options)
    # A program that is traced where a GPU is the default device may still be compiled for a CPU.
    by_kernel, by_xla = functools.partial(call, kernel), functools.partial(call, definition)
    return jax.lax.platform_dependent(*arrays, cuda=by_kernel, default=by_xla)

  # A model's layers repeat: each size is traced and lowered once.
  positions = (2,) if operation == "scaled_matmul" else ()
  return jax.jit(run, static_argnums=positions, static_argnames=_STATIC_NAMES)


_STATIC_NAMES = ("out_dtype", "out_sharding", "activation", "epsilon", "causal", "length")


def _scaled_matmul(lhs, rhs, *args, **options):
  if lhs.spec.format.is_exact:
    warn_of_inexact_int8()
  return OPERATIONS["scaled_matmul"].definition(lhs, rhs, *args, **options)


_XLA = Backend(
  "xla",
  **{name: row.definition for name, row in OPERATIONS.items()} | {"scaled_matmul": _scaled_matmul},
)


@functools.cache
def warn_of_inexact_int8() -> None:
  """Warns once where XLA may get int8 products wrong.

  On an NVIDIA GPU XLA may give an int8 matmul to a Triton kernel whose contracted tile is 16, half
  of what the tensor core takes, and the sum comes out twice as large: seen with jax 0.11.2 on an
  H200 for matmuls of some hundred rows; at CLIP's sizes larger tiles win and the sums are exact.
  """
  if jax.default_backend() == "gpu" and _TRITON_GEMM not in os.environ.get("XLA_FLAGS", ""):
    warnings.warn(
      "XLA's Triton kernels can return twice the sum of a small int8 matmul on a GPU. Set"
      f" XLA_FLAGS={_TRITON_GEMM}=false before JAX starts: cuBLAS is exact (and compiles faster).",
      stacklevel=2,
    )
