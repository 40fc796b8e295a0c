"""Measures what recipes do to a trained model's gradient and outputs, in parts that a file keeps.

The gradients are those of training: its step's loss, mesh, microbatches and dropped patches, on the
batches that follow the checkpoint. The layers are the blocks' linear layers, by the names that they
have in an unrolled model. Outputs are those of a model of the same weights whose linear layers are
plain products (`sbjax.convert.switches`).
"""

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from sbjax.convert.rounding import Group, Rounding, roundings, sum_group
from sbjax.convert.switches import Forward, forward_rounding
from sbjax.models.flax_block import PlainBlock
from sbjax.models.transformer import is_block_kernel, unstack_blocks
from sbjax.recipes import Recipe, parse_recipe, recipes_of
from train.data.preprocessing import normalize, statistics_of
from train.errors import RunError
from train.optimizer import STACK
from train.run import Run
from train.step import make_differentiate
from train.workdir import write_json

_PAIRS = 1024  # The most of a batch whose outputs are measured, on one device.


class Subject(NamedTuple):
  """What is measured: a run with weights, and the position of its data."""

  run: Run
  params: Any
  position: dict  # of the data iterator
  step: int | None  # of the checkpoint


class Measured(NamedTuple):
  """What the file has."""

  about: dict  # of what it was measured; another start with the same goes on
  groups: list[Group]  # a recipe may be missing in the last ones
  forward: dict[str, Forward]  # by recipe

  def gradients(self, recipe: str, batch_size: int) -> dict[str, Rounding]:
    """The Rounding of each layer."""
    return roundings([group for group in self.groups if recipe in group.errors], recipe, batch_size)


def about(subject: Subject, group: int) -> dict:
  """All that the numbers depend on but the recipes and the number of batches."""
  run = subject.run
  digest = hashlib.sha256()
  for leaf in jax.tree.leaves(subject.params):
    digest.update(np.ascontiguousarray(leaf).tobytes())
  return {
    "weights": digest.hexdigest()[:16],
    "step": subject.step,
    "data": run.source.full_name,
    "split": run.config.data.train_split,
    "first_batch": subject.position["batches"],
    "batch_size": run.config.batch_size,
    "accumulate": run.config.accumulate,
    "seed": run.config.seed,
    "dtype": run.config.model.dtype,
    "group": group,
  }


def check_recipes(names: list[str]) -> None:
  """Raises a ValueError for a recipe that is unknown or rounds nothing."""
  for name in names:
    if not any(recipe.rounds for recipe in recipes_of(parse_recipe(name))):
      raise ValueError(f"--recipes: {name!r} rounds nothing, so there is nothing to measure.")


def measure(
  subject: Subject, names: list[str], count: int, group: int, path: Path, say: Callable[[str], None]
) -> Measured:
  """Measures `count` groups, and what recipes do to the outputs; begins with what the file has.

  The file is written after each group and each recipe.
  """
  for name in names:
    _by_layer(name, subject.params)
  key, run = about(subject, group), subject.run
  measured = read(path, key, say)
  gradients = _Gradients(subject, names)
  for i in range(count):
    found = measured.groups[i] if i < len(measured.groups) else Group(group, {}, {})
    missing = [name for name in names if name not in found.errors]
    if not missing:
      continue
    rounded = {name: gradients.of(name) for name in missing}
    more = sum_group(gradients.of("full"), rounded, gradients.batches(i * group, group))
    more = more._replace(errors={**found.errors, **more.errors})
    measured.groups[i : i + 1] = [more]
    _write(path, measured)
    say(f"gradients of {(i + 1) * group} of {count * group} batches of {run.config.batch_size}")
  for name in names:
    if name not in measured.forward and not run.task.model.options.is_unit:
      measured.forward[name] = _forward(subject, name, next(gradients.batches(0, 1))[0])
      _write(path, measured)
      say(f"outputs with {name}")
  return measured


def read(path: Path, key: dict, say: Callable[[str], None]) -> Measured:
  """What a file has of what `key` describes."""
  empty = Measured(key, [], {})
  if not path.is_file():
    return empty
  try:
    before = json.loads(path.read_text())
    changed = [name for name, value in key.items() if before["about"][name] != value]
    if not changed:
      groups = [Group(**each) for each in before["groups"]]
      return Measured(key, groups, {k: Forward(**f) for k, f in before["forward"].items()})
  except (ValueError, KeyError, TypeError) as error:
    raise RunError(f"{path} is damaged: delete it, and the same command starts anew.") from error
  old = ", ".join(f"{name} {before['about'][name]}" for name in changed)
  say(f"{path} was of another measurement ({old}): it is measured anew.")
  return empty


def _write(path: Path, measured: Measured) -> None:
  write_json(
    path,
    {
      "about": measured.about,
      "groups": [group._asdict() for group in measured.groups],
      "forward": {name: forward._asdict() for name, forward in measured.forward.items()},
    },
  )


def unrolled(recipe: str) -> bool:
  """Whether a recipe has rules for layers of a stack, which only an unrolled model can follow."""
  return "block_" in recipe


class _Gradients:
  """The gradients of the blocks' kernels, as functions of a pair (batch, step)."""

  def __init__(self, subject: Subject, names: list[str]):
    self._subject, self._unrolls = subject, any(map(unrolled, names))
    self._params = unstack_blocks(subject.params) if self._unrolls else subject.params
    self.of = functools.cache(self._compiled)

  def _compiled(self, recipe: str) -> Callable:
    run = self._subject.run
    config, options = run.config, run.task.model.options
    scan = options.scan and not self._unrolls
    remat = "block" if config.model.remat == "auto" else config.model.remat
    options = dataclasses.replace(options, recipe=recipe, scan=scan, unroll=1, remat=remat)
    task = run.task.with_options(options)
    differentiate = make_differentiate(task, config.accumulate, run.mesh, freeze=config.freeze)
    scaled = config.optimizer.loss_scale != "none"  # All that is measured is a ratio of gradients.
    scale = jnp.float32(config.optimizer.initial_loss_scale) if scaled else None

    @jax.jit
    def gradient(params, batch, step):
      key = jax.random.fold_in(jax.random.key(config.seed), step)
      return _kernels(differentiate(params, batch, key, scale)[1])

    return lambda pair: gradient(self._params, *pair)

  def batches(self, first: int, count: int) -> Iterator[tuple[dict, jax.Array]]:
    """Batches of training, from the `first` after the checkpoint's, with their steps."""
    run, position = self._subject.run, self._subject.position
    sizes = run.task.example_sizes
    iterator = run.source.train_iterator(run.tokenizer, **sizes)
    put, start = run.source.to_devices(run.mesh, **sizes), position["batches"] + first
    iterator.set_state({**position, "batches": start})
    try:
      for step in range(start, start + count):
        yield put(next(iterator)), jnp.int32(step)
    finally:
      iterator.close()


def _kernels(tree) -> dict[str, jax.Array]:
  """The kernels of the blocks' linear layers by their names in an unrolled model."""
  found = {}
  for path, x in flatten_dict(tree).items():
    if is_block_kernel(path):
      layer = "/".join(path[:-1])
      each = [(layer.replace(STACK, f"block_{i}"), w) for i, w in enumerate(x)]
      found.update(each if STACK in path else [(layer, x)])
  return found


def _by_layer(recipe: str, params) -> dict[str, Recipe]:
  """The recipe of each layer; a ValueError for rules that fit none."""
  own, layers = parse_recipe(recipe), [*jax.eval_shape(_kernels, params)]
  if isinstance(own, Recipe):
    return dict.fromkeys(layers, own)
  stack = (lambda x: x) if unrolled(recipe) else lambda x: re.sub(r"/block_\d+/", f"/{STACK}/", x)
  own.check(dict.fromkeys(map(stack, layers)))
  return {layer: own.at(stack(layer)) for layer in layers}


def _forward(subject: Subject, recipe: str, batch: dict) -> Forward:
  """The errors of features and logits of a batch, on one device."""
  device = jax.devices()[0]
  params = jax.device_put(unstack_blocks(subject.params), device)
  batch = jax.device_put({name: x[:_PAIRS] for name, x in batch.items()}, device)
  model = subject.run.task.model
  options = dataclasses.replace(model.options, recipe="full", scan=False, remat="none")
  model = model.clone(options=options, block=PlainBlock)

  def outputs(params, batch):
    image = normalize(batch["image"], statistics_of(model.config))
    out = model.apply({"params": params}, image, batch["text"])
    image, text = out["image_features"], out["text_features"]
    logits = out["logit_scale"] * jnp.dot(image, text.T, precision="highest")
    # A constant in all logits changes no loss.
    return {"image": image, "text": text, "logits": logits - jnp.mean(logits)}

  rules = [(f"{layer}/kernel", own) for layer, own in _by_layer(recipe, params).items()]
  found = forward_rounding(outputs, params, [batch], [*rules, ("*", None)])
  return found._replace(
    **{
      name: {path.removesuffix("/kernel"): value for path, value in getattr(found, name).items()}
      for name in ("products", "alone", "without")
    }
  )
