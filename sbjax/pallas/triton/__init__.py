"""Kernels for NVIDIA GPUs from Ampere on: Triton, by jax-triton."""

import importlib.util

from sbjax.ops.device import compute_capability


def unsupported(device) -> str | None:
  """Why these kernels do not run on a device, or None."""
  capability = compute_capability(device)
  if capability is None:
    return f"needs an NVIDIA GPU; JAX's default device is {device.platform!r}."
  if capability < 80:
    return f"needs compute capability 8.0 (A100) or newer; this is {device.device_kind}."
  missing = [m for m in ("triton", "jax_triton") if importlib.util.find_spec(m) is None]
  if missing:
    return f"needs {' and '.join(missing)}: pip install 'sbjax[cuda]'."
  return None
