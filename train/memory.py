"""Fits a step into the memory of its devices, or says which fields of the config would.

With `model.remat="auto"` the policy is the fastest whose compiled step fits: XLA says how much
memory a step takes when it has compiled it, before it runs. The choice is in remat.json of the
workdir, and a run that continues on the same devices takes it from there.

An out-of-memory error becomes a message with fields that save memory: XLA's own is one line among
hundreds about its allocator, and names none.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from sbjax.recipes import recipes_of
from train.config import Config
from train.errors import RunError
from train.parallel.ahead import is_compiling
from train.parallel.processes import largest_of_all
from train.parallel.sharding import batch_sharding
from train.run import Run
from train.workdir import write_json

# Policies from the fastest on, with what a block saves for the backward pass: bytes a token and
# width, in 16 bits (docs/performance.md): a constant, that times the width of the MLP, and that for
# layer scale. The backward pass repeats: nothing; attention; fc1 too (qkv and out instead, with
# 8-bit operands); all but fc2. A policy is left out if a faster one saves less.
SAVED = {"none": (14, 2, 4), "dots": (10, 2, 2), "attention_dots": (10, 0, 0), "block": (2, 0, 0)}
_SAVED_IN_8_BITS = {
  "none": (13, 1, 4), "dots_and_residuals": (11, 1, 2), "residuals": (3, 1, 0), "block": (2, 0, 0)
}  # fmt: skip
# With model.keep="grouped" (sbjax/linear/grouped.py), and recipes that save 16 and 8 bits.
_SAVED_GROUPED = {
  "none": (12.25, 1.125, 4), "dots_and_residuals": (8.25, 1.125, 4),
  "residuals": (4.25, 1.125, 0), "block": (2, 0, 0),
}  # fmt: skip
_SAVED_GROUPED_IN_8_BITS = {
  "none": (11.25, 1, 4), "dots_and_residuals": (9.25, 1, 4), "residuals": (5.25, 1, 0),
  "block": (2, 0, 0),
}  # fmt: skip
FREE = 0.05  # of the limit stays free: an allocator cannot fill its gaps


class Memory(NamedTuple):
  """Bytes that a device needs for a step, the largest of all devices."""

  fixed: float  # arguments, outputs, and batches that wait
  temporary: float  # activations, gradients; inf: XLA ran out of memory when it compiled

  @property
  def total(self) -> float:
    return self.fixed + self.temporary


def choose_remat(
  run: Run,
  make_step: Callable,
  workdir: Path,
  *,
  resumes: bool,
  waits_for: Callable[[str], None],
) -> tuple[Run, Callable, str]:
  """The run with a policy in place of "auto", its step, and a line about the choice.

  All processes must call this, and get the same policy. If nothing is to be chosen, the line is
  empty: the config names a policy, or a device does not say how much memory it has ("none" then).

  make_step: from a Run to its jitted step.
  resumes: whether the run goes on from a checkpoint, and may take its earlier choice.
  waits_for: is told what is being compiled.
  """
  if run.config.model.remat != "auto":
    return run, make_step(run), ""
  limit = -largest_of_all(-bytes_limit())[0]
  if math.isinf(limit):
    run = _with_remat(run, "none")
    return run, make_step(run), ""
  path, conditions = workdir / "remat.json", _conditions(run, limit)
  if resumes and (policy := _read(path, conditions)):
    run = _with_remat(run, policy)
    return run, make_step(run), f"remat={policy}, as before"
  run, step, tried = _search(run, make_step, (1 - FREE) * limit, waits_for)
  policy, memory = tried.popitem()
  if jax.process_index() == 0:
    write_json(path, {"remat": policy, **conditions})
  line = f"remat={policy}: a step takes {_gigabytes(memory.total)} of the {_gigabytes(limit)}"
  others = ", ".join(f"{name} {_gigabytes(other.total)}" for name, other in tried.items())
  return run, step, f"{line} that JAX has on a device{f' ({others})' if others else ''}"


def compile_ahead(run: Run, make_step: Callable) -> None:
  """Makes the steps that `choose_remat` will make for this run, as far as one process can tell.

  It neither asks other processes nor writes, so it may run in a thread. It tries no other policy
  when a step cannot be compiled: beside another step there is less memory.

  make_step: from a Run to its compiled step.
  """
  limit = bytes_limit()
  if run.config.model.remat != "auto":
    make_step(run)
  elif math.isinf(limit):
    make_step(_with_remat(run, "none"))
  else:
    _search(run, make_step, (1 - FREE) * limit, lambda _: None, lambda *mine: mine)


def bytes_limit() -> float:
  """The bytes that JAX may use on each device of this process; inf where one does not say."""
  stats = (device.memory_stats() or {} for device in jax.local_devices())
  return min(each.get("bytes_limit", math.inf) for each in stats)


def _search(
  run, make_step, limit, waits_for, largest=largest_of_all
) -> tuple[Run, Callable, dict[str, Memory]]:
  """The run with the first policy that fits, else "block"; its step; all compiled, it the last."""
  tried: dict[str, Memory] = {}
  for policy, share in _shares(run.task.model).items():
    if policy != "block" and _is_hopeless(tried.get("none"), share, limit):
      continue
    waits_for(f"the step with remat={policy} to be compiled")
    candidate = _with_remat(run, policy)
    step, tried[policy] = _compiled(candidate, make_step, largest)
    if tried[policy].total <= limit:
      break
  return candidate, step, tried


def _is_hopeless(none: Memory | None, share: float, limit: float) -> bool:
  """Whether a policy that saves this share, or more, cannot fit, whatever else is temporary.

  none: what the step takes that saves everything, where XLA could compile it.
  """
  if none is None or math.isinf(none.temporary):
    return False
  # The shares leave out a few sums of "none", less than a hundredth.
  return none.fixed + 0.99 * share * none.temporary > limit


def compile_step(run: Run, step: Callable) -> Callable:
  """The step of a run, compiled if it is jitted."""
  if not hasattr(step, "lower"):
    return step
  return step.lower(run.abstract_state, run.task.abstract_batch(run.config.batch_size)).compile()


def _compiled(
  run: Run, make_step: Callable, largest: Callable = largest_of_all
) -> tuple[Callable, Memory]:
  """The compiled step of a run, or the jitted one if XLA ran out of memory; and what it takes."""
  step, batch = make_step(run), run.task.abstract_batch(run.config.batch_size)
  rows = batch_sharding(run.mesh)
  a_batch = sum(math.prod(rows.shard_shape(x.shape)) * x.dtype.itemsize for x in batch.values())
  waiting = run.config.data.prefetch + bool(run.task.text_groups)
  fixed, temporary = waiting * a_batch, math.inf
  try:
    step = compile_step(run, step)
  except jax.errors.JaxRuntimeError as error:
    if not is_out_of_memory(error):
      raise
  else:
    stats = step.memory_analysis()
    fixed += stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    temporary = stats.temp_size_in_bytes
  return step, Memory(*largest(fixed, temporary))


def _shares(model) -> dict[str, float]:
  """What each policy saves for the backward pass of a CLIP, over what "none" does, at least."""
  if model.options.is_unit:  # Not counted; no policy is left out.
    return dict.fromkeys(SAVED, 0.0)
  layer_scale = model.options.zero_init_layer_scale
  in_8_bits = all(recipe.saved == "quantized" for recipe in recipes_of(model.options.recipe))
  if model.options.keep == "grouped":
    table = _SAVED_GROUPED_IN_8_BITS if in_8_bits else _SAVED_GROUPED
  else:
    table = _SAVED_IN_8_BITS if in_8_bits else SAVED
  ratios = (model.config.vision.mlp_ratio, model.config.text.mlp_ratio)
  towers = [
    {policy: saved_bytes(entry, ratio, layer_scale) for policy, entry in table.items()}
    for ratio in ratios
  ]
  return {policy: min(tower[policy] / tower["none"] for tower in towers) for policy in table}


def saved_bytes(entry: tuple[float, float, float], mlp_ratio: float, layer_scale: bool) -> float:
  """Bytes a token and width of an entry of the tables."""
  constant, of_mlp, of_layer_scale = entry
  return constant + of_mlp * mlp_ratio + of_layer_scale * layer_scale


def _with_remat(run: Run, policy: str) -> Run:
  model = dataclasses.replace(run.config.model, remat=policy)
  options = dataclasses.replace(run.task.model.options, remat=policy)
  return run._replace(
    config=dataclasses.replace(run.config, model=model), task=run.task.with_options(options)
  )


def without_text_groups(run: Run) -> Run:
  """The run for a batch whose texts do not fit their groups: rare, so it takes time, not memory."""
  return _with_remat(run._replace(task=run.task._replace(text_groups=())), "block")


def _conditions(run: Run, limit: float) -> dict:
  """What a step's memory depends on among all that may change when a run continues."""
  model, images = run.task.model, bool(run.config.model.stages)
  stages = len(run.config.stages()) > 1
  return {
    "device": jax.devices()[0].device_kind,
    "gigabytes": round(limit / 1e9, 1),
    "mesh": dict(run.mesh.shape),
    "gradient_dtype": run.config.mesh.gradient_dtype,
    "gradient_exchange": run.config.mesh.gradient_exchange,
    "accumulate": run.config.accumulate,
    "backend": run.config.model.backend,
    "attention_backend": run.config.model.attention_backend,
    "unroll": model.options.unroll,
    "prefetch": run.config.data.prefetch,
    **({"text_groups": list(map(list, groups))} if (groups := run.task.text_groups) else {}),
    **({"recipe": repr(model.options.recipe)} if stages else {}),
    **({"images": [model.train_image_size, model.patch_dropout]} if images else {}),
  }


def _read(path: Path, conditions: dict) -> str | None:
  """The policy that process 0 finds in remat.json, chosen under these conditions; else None."""
  known = list(dict.fromkeys([*SAVED, *_SAVED_IN_8_BITS]))
  try:
    found = json.loads(path.read_bytes())
    index = known.index(found.pop("remat")) if found.items() >= conditions.items() else -1
  except (OSError, ValueError, LookupError, TypeError, AttributeError):
    index = -1  # Missing or damaged: chosen again.
  index = int(multihost_utils.broadcast_one_to_all(np.int32(index)))
  return None if index < 0 else known[index]


def _gigabytes(count: float) -> str:
  return "more than there is" if math.isinf(count) else f"{count / 1e9:.3g} GB"


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
def explain_out_of_memory(run: Run, during: Callable[[], str]) -> Iterator[None]:
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
  held = params + _bytes_a_device(run.abstract_state.frozen)
  optimizer = _bytes_a_device(run.abstract_state.opt_state)
  lines = [
    f"Out of memory on a device ({device.device_kind}), at {during}:"
    + (
      f" {_size(asked)} were asked for at once" if asked else " how much was asked for is not said"
    )
    + (f"; JAX may use {_size(limit)} there, and {_size(used)} were in use." if limit else "."),
    f"Of the training state a device holds {_size(held)} of parameters and {_size(optimizer)} of"
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
  if is_compiling():
    choices.append("--config.compile_ahead=False: no step is compiled beside this one (now True)")
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
  if (recipe := config.model.recipe) in ("full", "switchback", "switchback_q", "switchback_c"):
    saving = "switchback_cm" if recipe == "switchback_c" else "switchback_m"
    choices.append(
      f"--config.model.recipe={saving}: keeps 8-bit operands for the backward pass (now"
      f" {recipe}; a new run)"
    )
  choices.append(f"--config.batch_size: smaller than {config.batch_size} (a new run)")
  return choices


def _for_evaluation(run: Run) -> list[str]:
  return [f"--config.eval_batch_size: smaller than {run.config.eval_batch_size}"]


def _for_state(run: Run, state: int) -> list[str]:
  fsdp, devices = run.mesh.shape["fsdp"], run.mesh.size
  if run.config.lora.rank:  # Each device has all of the frozen base; the rest is small.
    return []
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
