"""The device that a trace is for, and what it can do.

`SBJAX_ASSUME_CAPABILITY=80` computes on a newer NVIDIA GPU as on an A100: with the kernels, tile
configs and formats of compute capability 8.0. It is read at each trace: set it before the first.
"""

import dataclasses
import os
from typing import Any

import jax

VARIABLE = "SBJAX_ASSUME_CAPABILITY"
# Newer GPUs run code for these. Triton's code for 9.0 and later takes instructions of one GPU.
ASSUMABLE = {"80": "A100", "86": "A10, RTX 30", "89": "L4, L40, RTX 40"}


@dataclasses.dataclass(frozen=True)
class Assumed:
  """A GPU that is to compute as one of an older compute capability, such as "8.0"."""

  chip: Any
  compute_capability: str

  platform = property(lambda self: self.chip.platform)
  num_cores = property(lambda self: num_sms(self.chip))

  @property
  def device_kind(self) -> str:
    """Neither the chip's nor another's: no table of tile configs or results has it."""
    return f"{self.chip.device_kind} as sm_{compute_capability(self)}"


def target() -> Any:
  """The mesh's abstract device where one is set, else JAX's default device; or it `Assumed`.

  An abstract device does not say what it can do. If it stands for one that is here, that does.

  Raises:
    ValueError: SBJAX_ASSUME_CAPABILITY is not in ASSUMABLE, or newer than the device.
  """
  abstract = jax.sharding.get_abstract_mesh().abstract_device
  if abstract is not None:
    return assumed(_here(abstract))
  device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
  is_named = device is None or isinstance(device, str)
  return assumed(jax.devices(device)[0] if is_named else device)


def assumed(device) -> Any:
  """The device as SBJAX_ASSUME_CAPABILITY has it; itself where that is not set, or not a GPU's."""
  if not (number := os.environ.get(VARIABLE)):
    return device
  if number not in ASSUMABLE:
    known = ", ".join(f"{number} ({chips})" for number, chips in ASSUMABLE.items())
    raise ValueError(f"{VARIABLE}={number!r} must be one of {known}.")
  own = compute_capability(device)
  if own is None or own == int(number):
    return device
  if own < int(number):
    raise ValueError(
      f"{VARIABLE}={number} is newer than this {device.device_kind}, which has {own}: a GPU runs"
      " code for its own or an older compute capability."
    )
  return Assumed(device, f"{number[:-1]}.{number[-1]}")


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
