"""The device that a trace is for, and what it can do."""

import jax


def target():
  """The mesh's abstract device where one is set, else JAX's default device.

  An abstract device does not say what it can do. If it stands for one that is here, that does.
  """
  abstract = jax.sharding.get_abstract_mesh().abstract_device
  if abstract is not None:
    return _here(abstract)
  device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
  return jax.devices(device)[0] if device is None or isinstance(device, str) else device


def _here(abstract):
  """The first device of the abstract one's kind; it itself where there is none."""
  if hasattr(abstract, "compute_capability"):
    return abstract
  try:
    devices = jax.devices(abstract.platform)
  except RuntimeError:
    return abstract
  return next((d for d in devices if d.device_kind == abstract.device_kind), abstract)


def compute_capability(device) -> int | None:
  """80, 89, 90... of an NVIDIA GPU."""
  capability = getattr(device, "compute_capability", None)
  if device.platform not in ("gpu", "cuda") or capability is None:
    return None
  major, _, minor = str(capability).partition(".")
  return 10 * int(major) + int(minor or 0) if major.isdigit() else None


def slow_int8(device) -> str | None:
  """What a chip has in place of a fast int8 matmul; None: its int8 is as fast as its fp8."""
  if compute_capability(device) == 103:
    return "0.15 int8 POP/s, and 4.5 in fp8"  # NVIDIA's data sheet of the B300, without sparsity.
  if device.device_kind.startswith("TPU7"):  # Ironwood, by jax.experimental.pallas.tpu.TpuInfo.
    return "no int8 matmul, and fp8 at twice bfloat16's rate"
  return None


def num_sms(device) -> int | None:
  """How many streaming multiprocessors a GPU has, where that is known."""
  # An abstract device has num_cores, a real one core_count.
  return getattr(device, "num_cores", None) or getattr(device, "core_count", None)
