"""Explains an out-of-memory error: how much was asked for, and which config fields save memory.

XLA's own message is one line among hundreds about its allocator and names no config fields.
"""

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator

import jax

from train.config import Config
from train.errors import RunError
from train.run import Run

# XLA's messages on a GPU, a TPU and a CPU. The status RESOURCE_EXHAUSTED alone is not enough: it is
# also raised for a kernel with too much shared memory, and for a message that is too long.
_OUT_OF_MEMORY = re.compile(r"out of memory|failed to allocate|exceeded hbm capacity", re.I)
_ASKED = re.compile(r"allocat\w*\D{0,40}?(\d+(?:\.\d+)?) ?([KMGTP]?i?B\b|bytes)", re.I)
_UNITS = {"b": 1, "bytes": 1} | {
  f"{prefix}{i}b": (1024 if i else 1000) ** power
  for power, prefix in enumerate("kmgtp", start=1)
  for i in ("", "i")
}


def is_out_of_memory(error: Exception) -> bool:
  """Whether a device ran out of memory; only the error's text tells."""
  return isinstance(error, jax.errors.JaxRuntimeError) and bool(_OUT_OF_MEMORY.search(str(error)))


@contextlib.contextmanager
def explained(run: Run, during: Callable[[], str]) -> Iterator[None]:
  """Turns an out-of-memory error into a RunError that says what would help.

  during: returns the name of the current work.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if not is_out_of_memory(error):
      raise
    raise RunError(explain(str(error), run, during(), jax.local_devices()[0])) from error


def explain(text: str, run: Run, during: str, device) -> str:
  """The message for an error with this text; the fields most likely to help come first.

  device: a jax.Device, for its kind and `memory_stats()`.
  """
  stats = device.memory_stats() or {}
  asked, limit, used = asked_bytes(text), stats.get("bytes_limit"), stats.get("bytes_in_use", 0)
  params = _bytes_a_device(run.abstract_state.params)
  optimizer = _bytes_a_device(run.abstract_state.opt_state)
  lines = [
    f"Out of memory on a device ({device.device_kind}), at {during}:"
    + (
      f" {_size(asked)} were asked for at once" if asked else " how much was asked for is not said"
    )
    + (f"; JAX may use {_size(limit)} there, and {_size(used)} were in use." if limit else "."),
    f"Of the training state a device holds {_size(params)} of parameters and {_size(optimizer)} of"
    f" optimizer state, and a step makes {_size(params)} of gradients. The rest are activations:"
    f" batch_size={run.config.batch_size} is {run.config.batch_size // run.mesh.size} images a"
    f" device, {run.config.batch_size // run.mesh.size // run.config.accumulate} at a time.",
    "Each of these takes less:",
  ]
  state_is_large = limit is not None and 2 * params + optimizer > limit / 2
  activations = _for_evaluation(run) if "evaluation" in during else _for_activations(run)
  state = _for_state(run, 2 * params + optimizer)
  choices = state + activations if state_is_large else activations + state
  if device.platform == "gpu" and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
    choices.append("XLA_PYTHON_CLIENT_MEM_FRACTION=0.95: JAX takes three quarters of a GPU else")
  return "\n".join(lines + [f"  {choice}" for choice in choices])


def asked_bytes(text: str) -> int | None:
  """The bytes of the allocation that failed; None if the text does not say."""
  match = _ASKED.search(text)
  return int(float(match[1]) * _UNITS[match[2].lower()]) if match else None


def _for_activations(run: Run) -> list[str]:
  config, choices = run.config, []
  if config.model.remat not in ("auto", "block"):  # "auto": no step was compiled yet.
    choices.append(
      f"--config.model.remat=block: a block keeps its input only, and computes the rest again (now"
      f" {config.model.remat})"
    )
  if more := _next_accumulate(config, run.mesh.size):
    choices.append(
      f"--config.accumulate={more}: as many microbatches, the loss over all of them (now"
      f" {config.accumulate})"
    )
  if config.model.recipe in ("full", "switchback", "switchback_q"):
    choices.append(
      "--config.model.recipe=switchback_m: keeps 8-bit operands for the backward pass (now"
      f" {config.model.recipe}; a new run)"
    )
  choices.append(f"--config.batch_size: smaller than {config.batch_size} (a new run)")
  return choices


def _for_evaluation(run: Run) -> list[str]:
  return [f"--config.eval_batch_size: smaller than {run.config.eval_batch_size}"]


def _for_state(run: Run, state: int) -> list[str]:
  fsdp, devices = run.mesh.shape["fsdp"], run.mesh.size
  if devices == 1:
    return ["more devices, with --config.mesh.fsdp: parameters and optimizer state are split"]
  if fsdp == devices:
    return [f"more devices than {devices}: mesh.fsdp={fsdp} splits the state over all there are"]
  return [
    f"--config.mesh.fsdp={devices}: parameters, gradients and optimizer state are split over"
    f" {devices} devices, about {_size(state * fsdp / devices)} instead of {_size(state)} each (now"
    f" {fsdp})"
  ]


def _next_accumulate(config: Config, devices: int) -> int | None:
  """The next larger number of microbatches that divides a device's share of a batch."""
  share = config.batch_size // devices
  larger = (n for n in range(2 * config.accumulate, share + 1) if share % n == 0)
  return next(larger, None)


def _bytes_a_device(tree) -> int:
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
  )


def _size(count: float) -> str:
  return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"
