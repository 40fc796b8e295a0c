"""The chip that a trace is for."""

import jax


def target():
  """The mesh's abstract device where one is set, else JAX's default device."""
  device = jax.sharding.get_abstract_mesh().abstract_device or jax.config.jax_default_device
  return jax.devices(device)[0] if device is None or isinstance(device, str) else device


def compute_capability(device) -> int | None:
  """80, 89, 90... of an NVIDIA GPU."""
  found = getattr(device, "compute_capability", None)
  if device.platform not in ("gpu", "cuda") or found is None:
    return None
  major, _, minor = str(found).partition(".")
  return 10 * int(major) + int(minor or 0) if major.isdigit() else None
