"""Chooses `model.remat="auto"`: the fastest policy whose compiled step fits the devices.

XLA says how much memory a step takes when it has compiled it, before it runs. The choice is in
remat.json of the workdir, and a run that continues on the same devices takes it from there.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from sbjax.recipes import recipes_of
from train.memory import is_out_of_memory
from train.processes import largest_of_all
from train.run import Run
from train.sharding import batch_sharding
from train.task import make_task
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


def choose(
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


def bytes_limit() -> float:
  """The bytes that JAX may use on each device of this process; inf where one does not say."""
  stats = (device.memory_stats() or {} for device in jax.local_devices())
  return min(each.get("bytes_limit", math.inf) for each in stats)


def _search(run, make_step, limit, waits_for) -> tuple[Run, Callable, dict[str, Memory]]:
  """The run with the first policy that fits, else "block"; its step; all compiled, it the last."""
  tried: dict[str, Memory] = {}
  for policy, share in _shares(run.task.model).items():
    if policy != "block" and _is_hopeless(tried.get("none"), share, limit):
      continue
    waits_for(f"the step with remat={policy} to be compiled")
    candidate = _with_remat(run, policy)
    step, tried[policy] = _compiled(candidate, make_step)
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


def _compiled(run: Run, make_step: Callable) -> tuple[Callable, Memory]:
  """The compiled step of a run, or the jitted one if XLA ran out of memory; and what it takes."""
  step, batch = make_step(run), run.task.abstract_batch(run.config.batch_size)
  rows = batch_sharding(run.mesh)
  a_batch = sum(math.prod(rows.shard_shape(x.shape)) * x.dtype.itemsize for x in batch.values())
  fixed, temporary = run.config.data.prefetch * a_batch, math.inf
  try:
    step = step.lower(run.abstract_state, batch).compile()
  except jax.errors.JaxRuntimeError as error:
    if not is_out_of_memory(error):
      raise
  else:
    stats = step.memory_analysis()
    fixed += stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    temporary = stats.temp_size_in_bytes
  return step, Memory(*largest_of_all(fixed, temporary))


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
  config = dataclasses.replace(run.config, model=model)
  return run._replace(config=config, task=make_task(config, run.tokenizer))


def _conditions(run: Run, limit: float) -> dict:
  """What a step's memory depends on among all that may change when a run continues."""
  return {
    "device": jax.devices()[0].device_kind,
    "gigabytes": round(limit / 1e9, 1),
    "mesh": dict(run.mesh.shape),
    "gradient_dtype": run.config.mesh.gradient_dtype,
    "gradient_exchange": run.config.mesh.gradient_exchange,
    "accumulate": run.config.accumulate,
    "backend": run.config.model.backend,
    "attention_backend": run.config.model.attention_backend,
    "unroll": run.task.model.options.unroll,
    "prefetch": run.config.data.prefetch,
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
