"""Makes the data set, tokenizer, mesh, task and optimizer of a run from its `Config`.

Training and evaluation both use this, so they cannot disagree.
"""

import contextlib
import dataclasses
import functools
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax

from sbjax.optim.averaged import average_of
from train.checkpoint import Checkpointer, Restored
from train.config import Config, ModelConfig, flat, marked, value_at
from train.data.augment import CentreCrop
from train.data.caption_lengths import caption_lengths
from train.data.decode import Limits
from train.data.source import (
  Source,
  check_eval_splits,
  check_split,
  eval_folders,
  eval_splits,
  open_source,
)
from train.data.tokenizer import Tokenizer, make_tokenizer
from train.data.wds_folder import EVAL_SPLIT
from train.errors import RunError
from train.fields import MAY_CHANGE
from train.finetune import check_init, check_patterns, check_vocabulary, initial_params
from train.optimizer import learning_rates, make_optimizer, make_schedule
from train.parallel import agreement
from train.parallel.sharding import (
  make_mesh,
  parameter_shardings,
  path_name,
  state_shardings,
)
from train.step import TrainState, initial_state, make_init
from train.task import CLIPTask, make_task
from train.tensor_metrics import check_watch
from train.workdir import newest_step, read_config
from train.zero_shot import Sample


class Run(NamedTuple):
  config: Config
  source: Source
  tokenizer: Tokenizer
  tokenizer_checksum: int  # of tokenizer.json
  mesh: jax.sharding.Mesh
  task: CLIPTask
  optimizer: optax.GradientTransformation
  schedule: optax.Schedule
  abstract_state: TrainState  # shapes and shardings
  checkpointer: Checkpointer
  between_batches: Callable[..., None] = lambda _: None  # See CLIPTask.evaluate.

  def at(self, step: int) -> "Run":
    """The run as it computes at a step: with the recipe and the images of its stage."""
    stages = self.config.stages()
    if len(stages) == 1:
      return self
    stage = stages[self.config.stage(step)]
    task = self.task.with_recipe(stage.recipe)
    return self._replace(task=task.with_images(stage.image_size, stage.patch_dropout))

  def with_text_groups(self, workdir: Path) -> "Run":
    """The run as it trains: with captions in groups of their lengths, where that saves something.

    All processes must call this.
    """
    config, text = self.config, self.task.model.config.text
    if config.model.text_groups == 1 or not text.ignores_padding:
      return self
    captions = self.source.captions()
    counts = caption_lengths(captions, self.tokenizer, text.context_length, workdir)
    batches = self.mesh.size * config.accumulate
    rows, most = config.batch_size // batches, config.model.text_groups
    return self._replace(task=self.task.with_text_groups(counts, rows, batches, most))

  def new_state(self) -> TrainState:
    """The state at step 0, created in its shardings, with the parameters of `init` if given."""
    if self.config.init:
      check_vocabulary(self.config, self.tokenizer)
    shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state)
    if not self.config.init:
      init = make_init(self.task, self.optimizer, self.config.seed)
      return jax.jit(init, out_shardings=shardings)()
    model, like = self.task.model, {**jax.eval_shape(self.task.init, jax.random.key(0))}
    if "logit_bias" in like:
      like["logit_bias"] = np.float32(model.init_logit_bias)
    params = initial_params(self.config, model.config, like)
    agreement.check(
      "the initial weights", lambda: {f"the weights of init={self.config.init}": _digest(params)}
    )
    # Every process has all of the arrays, and makes its shards.
    params = jax.tree.map(
      lambda x, sharding: jax.make_array_from_callback(x.shape, sharding, lambda i: x[i]),
      jax.tree.map(np.asarray, params),
      parameter_shardings(params, self.mesh),
    )
    start = functools.partial(initial_state, self.task, self.optimizer, self.config.seed)
    return jax.jit(start, out_shardings=shardings)(params)

  def evaluate_state(self, state: TrainState) -> dict[str, float]:
    """The scores of a state's parameters, and if it has their average, those as "ema/..."."""
    scores = self.evaluate(self.task.joined(state.params, state.frozen))
    if (average := average_of(state.opt_state)) is not None:
      average = self.evaluate(self.task.joined(average, state.frozen))
      scores |= {f"ema/{name}": score for name, score in average.items()}
    return scores

  def evaluate(self, params) -> dict[str, float]:
    """The scores of parameters on the evaluation split, and on the folders of data.eval_data.

    A folder's scores begin with its name, and those of a split, if there are several, with the
    split: "wds_cifar10/zero_shot_top1", "classes/zero_shot_top1".
    """
    config, splits = self.config, eval_splits(self.config)
    scores = {}
    for split in splits:
      prefix = f"{split.partition('[')[0]}/" if len(splits) > 1 else ""
      found = self._evaluate(
        params,
        self._eval_batches(split),
        class_names=self.source.class_names or (),
        templates=config.data.templates,
        retrieval=bool(config.data.text_key),
      )
      scores |= {f"{prefix}{name}": score for name, score in found.items()}
    crop = CentreCrop(self.task.example_sizes["image_size"])
    for folder in eval_folders(config):
      found = self._evaluate(
        params,
        folder.batches(EVAL_SPLIT, crop, config.eval_batch_size, Limits.of(config.data)),
        class_names=folder.class_names,
        templates=folder.templates,
      )
      scores |= {f"{folder.path.name}/{name}": score for name, score in found.items()}
    return scores

  def _evaluate(self, params, batches, **classes) -> dict[str, float]:
    size = self.config.eval_batch_size
    return self.task.evaluate(
      params,
      self.mesh,
      self.between_batches,
      self._tokenize,
      batches,
      batch_size=size,
      **classes,
    )

  def restore(self) -> Restored | None:
    """The newest undamaged checkpoint; None if there is none.

    Raises:
      RunError: no checkpoint can be read, or tokenizer.json is another than the run's.
    """
    restored = self.checkpointer.restore(self.abstract_state)
    if restored is not None:
      check_tokenizer(restored, self.checkpointer.directory.parent)
    return restored

  def samples(self, params) -> list[Sample]:
    """Images of the first evaluation batch, with their nearest captions; [] without a split."""
    splits = eval_splits(self.config)
    if not splits:
      return []
    with contextlib.closing(self._eval_batches(splits[0])) as batches:
      batch = next(batches)
    return self.task.samples(
      params, self.mesh, self._tokenize, batch, batch_size=self.config.eval_batch_size
    )

  def _tokenize(self, texts):
    return self.tokenizer(texts, self.task.example_sizes["context_length"])

  def _eval_batches(self, split: str):
    return self.source.eval_batches(
      split,
      image_size=self.task.example_sizes["image_size"],
      batch_size=self.config.eval_batch_size,
    )


def make_run(config: Config, workdir: Path, read_only: bool = False) -> Run:
  """Makes everything that a run needs; prepares the data set if it is missing.

  With `read_only` its checkpoints are only read, so that training may go on beside it.

  Raises:
    ValueError, RunError: a value of the config is invalid, or data is missing.
  """
  config.check()
  # These fail before the data set is prepared, which takes long.
  task = make_task(config)
  if newest_step(workdir / "checkpoints") is None:
    check_init(config, task.model.config)
  mesh = make_mesh(config.mesh)
  optimizer, schedule = make_optimizer(
    config.optimizer, config.steps, config.freeze, config.model.parametrization
  )
  if config.batch_size % (mesh.size * config.accumulate):
    raise ValueError(
      f"batch_size={config.batch_size} must be a multiple of {mesh.size} devices"
      f" x accumulate={config.accumulate}, which is {mesh.size * config.accumulate}"
      f" (mesh.data={mesh.shape['data']} x mesh.fsdp={mesh.shape['fsdp']})."
    )
  if config.lora.rank:
    jax.eval_shape(make_init(task, optimizer, config.seed))  # Its adapters must fit.
  if config.watch:
    check_watch(config.watch, jax.eval_shape(make_init(task, optimizer, 0)).params)
  eval_folders(config)
  source = open_source(config)
  check_split(source, config.data.train_split)
  check_eval_splits(source, eval_splits(config))
  agreement.check("the data set", lambda: {"the data set": source.full_name, **source.identity()})
  tokenizer = _tokenizer(config, source, workdir, task.model.config.text.pool)
  agreement.check("the tokenizer", lambda: {"tokenizer.json": _tokenizer_checksum(workdir)})
  task = task.with_tokenizer(tokenizer)
  abstract = abstract_state(task, optimizer, config.seed, mesh)
  paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(abstract.params))
  check_patterns(config, map(path_name, paths))
  return Run(
    config=config,
    source=source,
    tokenizer=tokenizer,
    tokenizer_checksum=_tokenizer_checksum(workdir),
    mesh=mesh,
    task=task,
    optimizer=optimizer,
    schedule=schedule,
    abstract_state=abstract,
    checkpointer=Checkpointer(
      workdir / "checkpoints",
      config.checkpoint_keep,
      read_only,
      keep_every=config.checkpoint_keep_every,
      best=config.checkpoint_best,
    ),
  )


def check_tokenizer(restored: Restored, workdir: Path) -> None:
  """Raises a RunError if the workdir's tokenizer.json is another than the checkpoint's run had."""
  before = restored.data.get("tokenizer")  # Older checkpoints do not have it.
  if before not in (None, _tokenizer_checksum(workdir)):
    raise RunError(
      f"{workdir / 'tokenizer.json'} is not the one that this run trained with. Delete it, and the"
      " same command makes it again."
    )


def _digest(params) -> int:
  digest = 0
  for x in jax.tree.leaves(params):
    digest = zlib.crc32(np.asarray(x).tobytes(), digest)
  return digest


def _tokenizer_checksum(workdir: Path) -> int:
  return zlib.crc32((workdir / "tokenizer.json").read_bytes())


def abstract_state(task: CLIPTask, optimizer, seed: int, mesh: jax.sharding.Mesh) -> TrainState:
  """The shapes and shardings of a run's state on a mesh."""
  abstract = jax.eval_shape(make_init(task, optimizer, seed))
  shardings = state_shardings(abstract, abstract.params, mesh)
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings
  )


def check_continues(config: Config, workdir: Path) -> None:
  """Raises a RunError if this config would not continue the checkpoints of the workdir."""
  done = newest_step(workdir / "checkpoints")
  if done is None:
    return  # A first try may have failed; its config binds nobody.
  if config.steps < done:
    raise RunError(
      f"{workdir} holds a run after step {done}, and steps={config.steps} is before it: choose at"
      f" least {done}, or a new --workdir."
    )
  path = workdir / "config.json"
  if not path.is_file():
    return
  defaults = Config(model=ModelConfig(size=""))  # Older files lack newer fields.
  now, saved = flat(config.to_dict()), flat(read_config(path))
  before = flat(defaults.to_dict()) | saved
  if gone := [f"{name}={value!r}" for name, value in saved.items() if name not in now]:
    print(f"{path}: {', '.join(gone)} is ignored: no such field any more.", file=sys.stderr)
  changed = [
    f"{name}: {before[name]!r} -> {value!r}"
    for name, value in sorted(now.items())
    if not (name in marked(MAY_CHANGE) or _same(before[name], value))
  ]
  if changed:
    raise RunError(
      f"{workdir} holds a run with another config ({'; '.join(changed)})."
      " Choose a new --workdir, or go back to that config to continue it."
    )
  if jax.process_index() == 0 and (said := _describe_schedules(config, before, done)):
    print(said, flush=True)


def _describe_schedules(config: Config, before: dict, done: int) -> str:
  """What other steps of a run, or of its cool-down, change after step `done`; "" if none do.

  before: the fields of the run's config so far, by their paths.
  """
  old = {name: before[name] for name in ("steps", "optimizer.cooldown_steps")}
  old = {name: value for name, value in old.items() if value != config.get(name)}
  if not old:
    return ""
  optimizer = config.optimizer
  cooldown, peak = optimizer.cooldown_steps, optimizer.learning_rate
  options = dataclasses.replace(optimizer, cooldown_steps=before["optimizer.cooldown_steps"])
  was = learning_rates(make_schedule(options, peak, before["steps"]))
  now = learning_rates(make_schedule(optimizer, peak, config.steps))
  changes = ", ".join(f"{name}={value} -> {config.get(name)}" for name, value in old.items())
  values = ", ".join(f"{name}={value}" for name, value in old.items())
  if optimizer.schedule == "cosine":
    end = f"the learning rate falls to 0 at step {config.steps} now"
  elif cooldown:
    end = f"the learning rate falls to 0 from step {config.steps - cooldown} to {config.steps} now"
  else:
    end = "the learning rate has no cool-down now"
  return (
    f"{changes} changes the schedule: {end}. Step {done} had {was(done):.3g}; step {done + 1} has"
    f" {now(done + 1):.3g}, where {values} gives {was(done + 1):.3g}."
    f"{_describe_stages(config, before['steps'], done)}"
  )


def _describe_stages(config: Config, steps_before: int, done: int) -> str:
  """What another number of steps changes in the schedules of a model; "" if nothing."""
  before, said = dataclasses.replace(config, steps=steps_before), ""
  for name, noun in (("recipe", "recipes"), ("stages", "stages")):
    now, then = config.schedule(name), before.schedule(name)
    if now[:-1] == then[:-1]:
      continue
    pairs = zip(now[:-1], then[:-1], strict=True)
    ends = ", ".join(f"{value} after step {last} ({was})" for (value, last), (_, was) in pairs)
    said += (
      f" The {noun} end elsewhere, too, with those of steps={steps_before} in brackets: {ends}."
      f" Step {done} had {value_at(then, done)}; step {done + 1} has {value_at(now, done + 1)}."
    )
  return said


def _same(a, b) -> bool:
  return a == b or (a != a and b != b)  # NaN is the same as NaN here.


def _tokenizer(config: Config, source: Source, workdir: Path, pool: str) -> Tokenizer:
  """The tokenizer in the workdir if checkpoints depend on it; else makes it."""
  path = workdir / "tokenizer.json"
  needed = newest_step(workdir / "checkpoints") is not None
  if jax.process_index() == 0 and not (needed and path.is_file()):
    tokenizer = make_tokenizer(
      config.data.tokenizer, source.captions(), config.data.tokenizer_vocab_size, pool
    )
    partial = path.with_suffix(".partial")
    tokenizer.save(partial)
    partial.replace(path)
  agreement.gather("the tokenizer", None)
  try:
    return Tokenizer.load(path, pool)
  except ValueError as error:
    raise RunError(f"{error} Delete it, and the same command makes it again.") from error
