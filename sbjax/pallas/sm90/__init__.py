"""Kernels for Hopper (H100, H200): Pallas Mosaic GPU, wgmma and TMA."""

import jax

from sbjax.ops.device import compute_capability


def unsupported(device) -> str | None:
  """Why these kernels do not run on a device, or None."""
  capability = compute_capability(device)
  if capability is None:
    return f"needs an NVIDIA GPU; JAX's default device is {device.platform!r}."
  if capability != 90:
    return f"needs compute capability 9.0 (H100, H200); this is {device.device_kind}."
  if jax.__version_info__ < (0, 11):
    return f"needs jax >= 0.11 (Python >= 3.12); this is {jax.__version__}."
  return None
