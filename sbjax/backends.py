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

from sbjax.formats import INT8
from sbjax.matmul import apply_scales, check_operands, scaled_matmul
from sbjax.pallas.chip import compute_capability, target
from sbjax.pallas.partition import over_shards
from sbjax.quantize import Quantized, check_quantizable, factor_and_scale, quantize

_log = logging.getLogger("sbjax")


class Backend(NamedTuple):
  """The operations of a linear layer in 8 bits."""

  name: str
  quantize: Callable  # (x, spec): as sbjax.quantize.quantize
  quantize_transposed: Callable  # (x, spec): quantize(x.T, spec)
  quantize_both: Callable  # (x, spec): both, for a spec with one scale
  scaled_matmul: Callable  # as sbjax.matmul.scaled_matmul


NAMES = ("xla", "mosaic", "triton")


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
  return _guarded(_kernels(usable[0]), has_fp8=capability >= 89)


def _guarded(kernels: Backend, has_fp8: bool) -> Backend:
  """The kernels where they can and should compute, the definition elsewhere: same numbers."""

  def choose(kernel, definition, *arrays):
    if _explicit():
      return kernel(*arrays)
    # What is traced where a GPU is the default device may still be compiled for a CPU.
    return jax.lax.platform_dependent(*arrays, cuda=kernel, default=definition)

  def guarded(operation):
    kernel, definition = getattr(kernels, operation), getattr(_XLA, operation)

    def run(x, spec):
      if x.dtype == jnp.float64 or not (has_fp8 or spec.dtype == INT8):
        return definition(x, spec)
      return choose(lambda x: kernel(x, spec), lambda x: definition(x, spec), x)

    return run

  def multiply(lhs, rhs, out_dtype, out_sharding=None, *, bias=None):
    (_, k), n = lhs.values.shape, rhs.values.shape[0]
    run = functools.partial(
      _XLA.scaled_matmul, out_dtype=out_dtype, out_sharding=out_sharding, bias=bias
    )
    is_int8 = lhs.values.dtype == INT8
    if k % 16 or n % 16 or jnp.dtype(out_dtype).itemsize > 4 or not (has_fp8 or is_int8):
      _log.debug("sbjax: %s x %s goes to XLA, which takes any size and format", n, k)
      if is_int8:
        warn_of_inexact_int8()
      return run(lhs, rhs)
    kernel = functools.partial(kernels.scaled_matmul, out_dtype=out_dtype, bias=bias)
    return choose(kernel, run, lhs, rhs)

  quantizers = {name: guarded(name) for name in Backend._fields if name.startswith("quantize")}
  return Backend(kernels.name, **quantizers, scaled_matmul=multiply)


def _explicit() -> bool:
  """Whether types carry shardings here (jax.set_mesh with explicit axes)."""
  kinds = jax.sharding.get_abstract_mesh().axis_types
  return any(kind == jax.sharding.AxisType.Explicit for kind in kinds)


def _quantize_transposed(x, spec):
  return quantize(x.T, spec)


def _quantize_both(x, spec):
  found = quantize(x, spec)
  return found, found.T


_XLA = Backend("xla", quantize, _quantize_transposed, _quantize_both, scaled_matmul)


@functools.cache
def _kernels(name: str) -> Backend:
  """Hand-written kernels, each on its shard of what is sharded."""
  from sbjax.pallas import quantize_triton

  if name == "mosaic":
    from sbjax.pallas import scaled_matmul_sm90 as product
  else:
    from sbjax.pallas import scaled_matmul_triton as product
  quantizers = (
    functools.partial(_quantize_shards, quantize_triton, form)
    for form in ("quantize", "quantize_transposed", "quantize_both")
  )
  return Backend(name, *quantizers, functools.partial(_multiply_shards, product))


def _multiply_shards(product, lhs, rhs, out_dtype, out_sharding=None, *, bias=None):
  """scaled_matmul by the kernels in `product`; K split over devices is summed before it is scaled.

  `out_sharding` counts in JAX's explicit mode; else the result is split as the operands are.
  """
  check_operands(lhs.values, rhs.values)

  def local(split, lhs, rhs, lhs_scale, rhs_scale, *bias):
    if "k" not in split:
      lhs, rhs = Quantized(lhs, lhs_scale), Quantized(rhs, rhs_scale)
      return (product.scaled_matmul(lhs, rhs, out_dtype, *bias),)
    total = jax.lax.psum(product.accumulate(lhs, rhs), split["k"])
    return (apply_scales(total, lhs_scale, rhs_scale, out_dtype, *bias),)

  m, n = ("m" if lhs.scale.shape[0] > 1 else None), ("n" if rhs.scale.shape[0] > 1 else None)
  operands = [lhs.values, rhs.values, lhs.scale, rhs.scale]
  inputs = [("m", "k"), ("n", "k"), (m, None), (n, None)]
  if bias is not None:
    operands, inputs = [*operands, bias], [*inputs, ("n",)]
  (y,) = over_shards(local, operands, inputs, [("m", "n")], sixteens="nk")
  return jax.sharding.reshard(y, out_sharding) if out_sharding is not None and _explicit() else y


def _quantize_shards(kernels, form, x, spec):
  """A quantizer by the Triton kernels; a scale that devices share takes the maximum over them."""
  check_quantizable(x, spec)
  per_row = spec.scaling == "rowwise"
  shared = ("k" if form == "quantize" else "m") if per_row else "mk"

  def local(split, x):
    over = [axis for name in shared for axis in split.get(name, ())]
    if not over:
      found = getattr(kernels, form)(x, spec)
      return tuple(jax.tree.leaves(found))
    absmax = kernels.absmax(x, {"k": 1, "m": 0, "mk": None}[shared])
    absmax = jax.lax.pmax(absmax, tuple(over))
    scale = factor_and_scale(absmax, spec)[1]
    turn = {"quantize": False, "quantize_transposed": True, "quantize_both": "both"}[form]
    values = kernels.cast_scaled(x, absmax, spec, transpose=turn)
    if form == "quantize_both":
      return values[0], scale, values[1], scale
    return values, scale.T if form == "quantize_transposed" else scale

  straight = [("m", "k"), ("m" if per_row else None, None)]
  turned = [("k", "m"), ("k" if per_row else None, None)]
  outputs = {
    "quantize": straight, "quantize_transposed": turned, "quantize_both": [*straight, *turned]
  }[form]  # fmt: skip
  found = over_shards(local, [x], [("m", "k")], outputs)
  if form == "quantize_both":
    return Quantized(*found[:2]), Quantized(*found[2:])
  return Quantized(*found)


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
