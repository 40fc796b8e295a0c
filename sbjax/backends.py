"""Who computes: each backend offers the same operations with the same numbers.

"xla" is the definition in plain jnp and runs wherever JAX does. "mosaic" multiplies on Hopper GPUs,
"triton" on NVIDIA GPUs from Ampere on; both quantize in Triton. A recipe never names a backend, a
backend never changes a recipe's numbers, and a backend asked for by name is never swapped for
another.
"""

import functools
import importlib.util
import logging
import os
import warnings
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sbjax import fused_ops, shards
from sbjax.device import compute_capability, target
from sbjax.formats import INT8
from sbjax.matmul import scaled_matmul
from sbjax.partition import is_explicit
from sbjax.quantize import Quantized, Spec, quantize

_log = logging.getLogger("sbjax")

_TRITON_GEMM = "--xla_gpu_enable_triton_gemm"  # See warn_of_inexact_int8.


class Backend(NamedTuple):
  """The operations of a linear layer in 8 bits, and of what stands between two."""

  name: str
  quantize: Callable  # (x, spec): as sbjax.quantize.quantize
  quantize_transposed: Callable  # (x, spec): quantize(x.T, spec)
  quantize_both: Callable  # (x, spec): both, for a spec with one scale
  scaled_matmul: Callable  # as sbjax.matmul.scaled_matmul
  norm_quantize: Callable  # as in sbjax.fused_ops, and all that follow
  norm_backward: Callable
  gelu_quantize: Callable
  gelu_backward: Callable
  quantize_sum: Callable


NAMES = ("xla", "mosaic", "triton")
_QUANTIZERS = ("quantize", "quantize_transposed", "quantize_both")
_ROWS = ("norm_quantize", "norm_backward", "gelu_quantize", "gelu_backward", "quantize_sum")


def get_backend(name: str | None = None) -> Backend:
  """The backend of that name; None chooses the best there is for JAX's default device.

  Raises:
    NotImplementedError: the name is known, but does not run here; says why.
    ValueError: the name is not known.
  """
  if name is None:
    return _chosen(target())
  if name not in NAMES:
    offered = ", ".join(repr(known) for known in NAMES)
    raise ValueError(f"Unknown backend {name!r}; there are {offered}; None chooses.")
  if reason := _lacks(name, target()):
    raise NotImplementedError(f"backend={name!r} {reason}")
  return _XLA if name == "xla" else _kernels(name)


def _lacks(name: str, device) -> str | None:
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
def _chosen(device) -> Backend:
  """Mosaic before Triton before XLA; whatever the first lacks is said once."""
  capability = compute_capability(device)
  reasons = {name: _lacks(name, device) for name in ("mosaic", "triton")}
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
  return _guarded(_kernels(usable[0]), device.device_kind, has_fp8=(capability or 0) >= 89)


def _guarded(kernels: Backend, chip: str, has_fp8: bool) -> Backend:
  """The kernels where they can and should compute, the definition elsewhere: same numbers."""

  def choose(kernel, definition, *arrays):
    if is_explicit():
      return kernel(*arrays)
    # What is traced where a GPU is the default device may still be compiled for a CPU.
    return jax.lax.platform_dependent(*arrays, cuda=kernel, default=definition)

  def guarded(name):
    kernel, definition = getattr(kernels, name), getattr(_XLA, name)

    def run(*args):
      reason = _rows_lack(name, args)
      if any(a.dtype == jnp.float64 for a in jax.tree.leaves(args)):
        reason = "for at most 32 bits"
      elif not has_fp8 and any(spec.dtype != INT8 for spec in _specs(args)):
        reason = f"for int8 alone on {chip}"
      if reason:
        _log.debug("sbjax: %s goes to XLA; it has a kernel %s", name, reason)
        return definition(*args)
      return choose(kernel, definition, *args)

    return jax.jit(run)  # A model's layers repeat: each size is traced and lowered once.

  @functools.partial(jax.jit, static_argnums=(2, 3))
  def multiply(lhs, rhs, out_dtype, out_sharding=None, *, bias=None, residual=None):
    k, n = lhs.values.shape[1], rhs.values.shape[0]
    options = dict(out_dtype=out_dtype, out_sharding=out_sharding, bias=bias, residual=residual)
    run = functools.partial(_XLA.scaled_matmul, **options)
    is_int8 = lhs.values.dtype == INT8
    if k % 16 or n % 16 or jnp.dtype(out_dtype).itemsize > 4 or not (has_fp8 or is_int8):
      _log.debug("sbjax: %s x %s goes to XLA, which takes any size and format", n, k)
      if is_int8:
        warn_of_inexact_int8()
      return run(lhs, rhs)
    return choose(functools.partial(kernels.scaled_matmul, **options), run, lhs, rhs)

  operations = {name: guarded(name) for name in (*_QUANTIZERS, *_ROWS)}
  return Backend(kernels.name, scaled_matmul=multiply, **operations)


def _specs(args) -> list[Spec]:
  return [a for a in args if isinstance(a, Spec)]


def _quantize_transposed(x, spec):
  return quantize(x.T, spec)


def _quantize_both(x, spec):
  found = quantize(x, spec)
  return found, found.T


_XLA = Backend(
  "xla",
  quantize,
  _quantize_transposed,
  _quantize_both,
  scaled_matmul,
  *(getattr(fused_ops, name) for name in _ROWS),
)


@functools.cache
def _kernels(name: str) -> Backend:
  """Hand-written kernels, each on its shard of what is sharded."""
  from sbjax.pallas import gelu_triton, norm_triton, quantize_triton

  if name == "mosaic":
    from sbjax.pallas import scaled_matmul_sm90 as product
  else:
    from sbjax.pallas import scaled_matmul_triton as product
  by_rows = {n: getattr(norm_triton if n.startswith("norm") else gelu_triton, n) for n in _ROWS}
  return _on_shards(name, product, quantize_triton, by_rows)


def _on_shards(name: str, product, quantizers, by_rows: dict[str, Callable]) -> Backend:
  """A backend of two modules' kernels, and of those for the operations of sbjax.fused_ops."""
  operations: dict[str, Callable] = {
    form: functools.partial(shards.quantize, quantizers, form) for form in _QUANTIZERS
  }
  operations |= {n: _row_operation(kernel, name, n) for n, kernel in by_rows.items()}
  operations["quantize_sum"] = _quantize_sum(by_rows["quantize_sum"], operations["quantize"])
  multiply = functools.partial(shards.scaled_matmul, product)
  return Backend(name, scaled_matmul=multiply, **operations)


def _row_operation(kernel, backend: str, name: str):
  """The kernel on shards of whole rows; what it cannot do is an error."""
  splits_rows = not name.startswith("norm")  # Layer norm needs its whole row.

  def run(*args):
    if reason := _rows_lack(name, args):
      raise NotImplementedError(
        f"backend={backend!r} has a kernel of {name} {reason}; backend=None leaves it to XLA."
      )
    return shards.by_rows(kernel, getattr(fused_ops, name), *args, splits_rows=splits_rows)

  return run


def _quantize_sum(kernel, quantize):
  """The kernel where it can, else the quantizer and XLA's sum."""

  def run(parts, spec):
    width = sum(part.shape[1] for part in parts)
    if spec.scaling != "rowwise" or width > fused_ops.MAX_WIDTH_IN_REGISTERS:
      return fused_ops.quantize_sum(parts, spec, quantize=quantize)
    # A shard of each part is no shard of all.
    return shards.by_rows(kernel, fused_ops.quantize_sum, parts, spec, splits_rows=len(parts) == 1)

  return run


def _rows_lack(name: str, args) -> str | None:
  """Which rows the kernel of that operation takes, if these are not such; else None."""
  if name not in _ROWS or name == "quantize_sum":
    return None
  width = jax.tree.leaves(args)[0].shape[1]
  specs = [*_specs(args), *(a.spec for a in args if isinstance(a, Quantized))]
  if not all(spec.is_rowwise for spec in specs):
    return "for a scale a row, not one for all rows"
  if width > fused_ops.MAX_WIDTH_IN_REGISTERS:
    most = fused_ops.MAX_WIDTH_IN_REGISTERS
    return f"for rows of at most {most:,}, which stay in registers, not {width:,}"
  return None


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
