"""The training loop: steps, checkpoints and evaluations until the last step or a signal.

A run resumes here: `_train` restores the newest checkpoint and sets the data iterator to its
position. The host runs one step ahead: it reads a step's metrics after it has started the next.
"""

import contextlib
import functools
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from train import memory
from train.config import Config, Stage
from train.data.prefetch import prefetch_to_device
from train.data.stream.batches import left_out, merged
from train.due import Abandoned, Due, interruptible
from train.errors import RunError
from train.optimizer import learning_rates
from train.parallel import agreement, stop
from train.parallel.ahead import Ahead
from train.parallel.processes import largest_of_all
from train.parallel.sharding import batch_sharding, replicated
from train.parallel.watchdog import Watchdog
from train.record import Recorder, Tracer, read_metrics
from train.report import describe_end, describe_scores, write_report
from train.run import Run, check_continues, make_run
from train.step import make_fits, make_train_step, tensor_names
from train.task import BF16_PEAK
from train.workdir import lock, newest_step, write_json


def train(config: Config, workdir: Path) -> dict:
  """Starts or continues the run that `config` describes; returns the contents of result.json.

  Several processes share `workdir`; only the first writes and returns the result.

  Raises:
    stop.Stopped: a signal, max_hours or the file workdir/stop ended it; its state is saved.
    stop.Interrupted: a signal ended it, and there was nothing to save.
  """
  began = time.monotonic()
  workdir.mkdir(parents=True, exist_ok=True)
  agreement.check_folder(workdir, "--workdir")
  held = lock(workdir) if jax.process_index() == 0 else contextlib.nullcontext()
  with stop.listening(), held:
    stop.describe_by(functools.partial(_describe_saved, workdir / "checkpoints"))
    return _train_alone(config, workdir, began)


def _describe_saved(checkpoints: Path) -> str:
  step = newest_step(checkpoints)
  if step is None:
    return "There is no checkpoint yet: the same command starts again."
  return f"The newest checkpoint is step {step} in {checkpoints}: the same command continues."


def _train_alone(config: Config, workdir: Path, began: float) -> dict:
  first = jax.process_index() == 0
  check_continues(config, workdir)
  run = make_run(config, workdir)
  if finished := _finished(run, workdir):
    if first:
      print(f"Already finished {describe_end(workdir, finished)}", flush=True)
    return finished if first else {}
  if first:
    write_json(workdir / "config.json", config.to_dict())
  run = run.with_text_groups(workdir)
  started = time.perf_counter()
  watchdog = Watchdog(
    config.step_timeout_seconds,
    config.pause_timeout_seconds,
    jax.process_index(),
    jax.process_count(),
    run.checkpointer.describe_newest_on_disk,
  )
  with watchdog, memory.explain_out_of_memory(run, lambda: watchdog.what):
    _train(run, workdir, watchdog, Due(config, workdir, began))
  if not first:
    return {}
  result = _result(run, workdir, time.perf_counter() - started)
  write_json(workdir / "result.json", result)
  print(f"Finished {describe_end(workdir, result)}", flush=True)
  return result


def _train(run: Run, workdir: Path, watchdog: Watchdog, due: Due) -> None:
  """Trains from the newest checkpoint, or step 0, to the last step and its checkpoint."""
  config, checkpointer = run.config, run.checkpointer
  watchdog.pauses_for("the checkpoint to continue from")
  restored = run.restore()
  start, position = (0, None) if restored is None else (restored.step, restored.data)
  iterator = _iterator(run.at(start + 1), workdir, position)
  if restored is None:
    watchdog.waits_for("the initial state", first=True)
    state = run.new_state()
  else:
    state = restored.state
    if jax.process_index() == 0:
      print(f"Continuing after step {start} of {config.steps}, from {checkpointer.directory}.")

  recorder = Recorder(workdir, config, start)
  with contextlib.closing(checkpointer), contextlib.closing(recorder):
    for step, scores in recorder.scores.items():
      checkpointer.scored(step, scores)
    describe(run, recorder, start)
    tracer = Tracer(workdir / "profile", config.profiled())
    with contextlib.closing(tracer):
      _Steps(run, workdir, state, start, recorder, watchdog, tracer, due).take(iterator)
    watchdog.pauses_for("the last checkpoint")
    checkpointer.wait()


def _iterator(run: Run, workdir: Path, position: dict | None):
  """This process's items of a stage's batches, from a position in the data or the beginning."""
  iterator = run.source.train_iterator(
    run.tokenizer,
    **run.task.train_sizes,
    process_index=jax.process_index(),
    process_count=jax.process_count(),
    workdir=workdir,
  )
  if position is not None:
    iterator.set_state(position)
  return iterator


@contextlib.contextmanager
def _batches(run: Run, iterator, fits: Callable | None) -> Iterator[Iterator[tuple]]:
  """The batches of a stage on the devices, ahead of its steps; see `_with_fits`."""
  put = run.source.to_devices(run.mesh, **run.task.train_sizes)
  ahead = prefetch_to_device(iterator, put, run.config.data.prefetch)
  with contextlib.closing(ahead), contextlib.closing(_with_fits(ahead, fits)) as batches:
    yield batches


class _Steps:
  """The steps of a run after `start`, and what is due after each.

  A run has stages of different recipes and images (`Config.stages`). A later stage's step is
  compiled beside the steps of the one before, from the third on. A stage of other images reads on
  from the position of the last step taken; batches of the old size that were ready ahead are
  dropped.

  A save comes before an evaluation, which takes long: what a kill cuts off there is made up for at
  the next start.
  """

  def __init__(
    self,
    run: Run,
    workdir: Path,
    state,
    start: int,
    recorder: Recorder,
    watchdog: Watchdog,
    tracer: Tracer,
    due: Due,
  ):
    self._whole, self._workdir, self._recorder = run, workdir, recorder
    self._run = run  # as its stage computes
    self._watchdog, self._tracer, self._due = watchdog, tracer, due
    self._state, self._position = state, None
    self._ungrouped: Callable | None = None  # the step of texts that do not fit their groups
    self._ahead: Ahead | None = None  # the step of the next stage
    self._start = self._began = self._step = self._saved = start
    self._meter = _Meter(run, state, recorder)

  def take(self, iterator) -> None:
    """Takes all steps.

    Raises:
      stop.Stopped: the run has to end before the last one; its state is saved.
    """
    run, start = self._whole, self._start
    stages = run.config.stages()[run.config.stage(start + 1) :]
    self._trace(stages[1:])
    train_step = self._begin(stages[0])
    grouped = bool(run.task.text_groups)  # In all stages alike.
    fits = make_fits(run.task, run.config.accumulate, run.mesh) if grouped else None
    with contextlib.ExitStack() as reading:
      batches = reading.enter_context(_batches(self._run, iterator, fits))
      if start and self._due.evaluates_after(start) and not self._recorder.has_scores(start):
        self._evaluate()
      self._take_stage(stages[0], train_step, batches)
      for before, stage in itertools.pairwise(stages):
        if stage.image_size != before.image_size:
          reading.close()
          ours = run.at(stage.last)
          iterator = _iterator(ours, self._workdir, self._position)
          batches = reading.enter_context(_batches(ours, iterator, fits))
        self._take_stage(stage, self._change(stage), batches)

  def _trace(self, stages: Sequence[Stage]) -> None:
    """Raises what is wrong with the steps of later stages, before the first one is taken."""
    for stage in stages:
      self._watchdog.waits_for(f"the step with {stage.words} to be traced", first=True)
      run = self._whole.at(stage.last)
      batch = run.task.abstract_batch(run.config.batch_size)
      jax.eval_shape(jit_train_step(run), run.abstract_state, batch)

  def _compile_after(self, stage: Stage) -> None:
    """Starts to compile the step of the next stage, if there is one."""
    config = self._run.config
    if stage.last == config.steps or not config.compile_ahead:
      return
    following = self._whole.at(stage.last + 1)
    self._ahead = Ahead(
      lambda run: memory.compile_step(run, jit_train_step(run)),
      lambda make: memory.compile_ahead(following, make),
    )

  def _begin(self, stage: Stage) -> Callable:
    """The jitted or compiled step of a stage."""
    self._began, self._ungrouped = self._step, None
    ahead, self._ahead = self._ahead, None
    self._run, train_step, choice = memory.choose_remat(
      self._whole.at(stage.last),
      ahead.step if ahead else jit_train_step,
      self._workdir,
      resumes=self._step > 0,
      waits_for=lambda what: self._watchdog.waits_for(what, first=True),
    )
    self._meter.begin(self._run)
    if choice:
      self._recorder.say(self._step, choice)
    return train_step

  def _change(self, stage: Stage) -> Callable:
    """The compiled step of a stage that follows another; what came before is saved."""
    self._watchdog.waits_for(f"the step with {stage.words} to be compiled", first=True)
    began = time.perf_counter()
    with self._ending():
      train_step = self._begin(stage)
      train_step = memory.compile_step(self._run, train_step)
    seconds = time.perf_counter() - began
    waited = f"waited {seconds:.1f} s for its step to be compiled"
    self._recorder.say(self._step, f"{stage.words} from here, {waited}")
    self._meter.restart_clock(self._step)
    return train_step

  def _take_stage(self, stage: Stage, train_step: Callable, batches) -> None:
    # The run has its policy now, so that an error does not offer what it has.
    with memory.explain_out_of_memory(self._run, lambda: self._watchdog.what):
      for step in range(self._step + 1, stage.last + 1):
        self._take(step, train_step, batches)
        self._follow(step)
        if step == self._began + 2 and step < stage.last:
          self._compile_after(stage)

  def _take(self, step: int, train_step: Callable, batches) -> None:
    watchdog, first = self._watchdog, self._is_first(step)
    watchdog.waits_for(f"the batch of step {step}", first=first)
    waiting = time.perf_counter()
    batch, position, fits = self._next(batches)
    waited = time.perf_counter() - waiting
    if self._tracer.starts(step):
      watchdog.waits_for(f"the result of step {step - 1}", first=first)
      self._meter.flush()
      self._tracer.start()
    fits = bool(np.asarray(fits))
    compiles = first or not (fits or self._ungrouped)
    watchdog.waits_for(f"step {step} to be compiled and started", first=compiles)
    if not fits:
      self._ungrouped = self._ungrouped or jit_train_step(memory.without_text_groups(self._run))
      train_step = self._ungrouped
    with self._tracer.step(step):
      self._state, metrics, finite = train_step(self._state, batch)
    self._step, self._position = step, position
    stop.defer()  # Now there is something to lose.
    watchdog.waits_for(f"the result of step {max(step - 1, self._start + 1)}", first=first)
    self._meter.push(step, metrics, finite, waited, position, fits)
    self._run.checkpointer.check()

  def _next(self, batches):
    if self._step == self._start:
      return next(batches)
    try:
      with interruptible():
        return next(batches)
    except stop.Interrupted:
      self._end(stop.received())

  def _follow(self, step: int) -> None:
    """Does what is due after a step."""
    watchdog, first = self._watchdog, self._is_first(step)
    watchdog.waits_for(f"all processes to end step {step}", first=first)
    due, traced = self._due.after(step), self._tracer.ends(step)
    if not (due.evaluate or due.save or traced):
      return
    watchdog.waits_for(f"the result of step {step}", first=first)
    self._meter.flush()
    if traced:
      watchdog.pauses_for(f"the trace of the steps up to {step} to be written")
      self._tracer.close()
    if due.save:
      self._save()
    if due.end and (due.evaluate or step < self._run.config.steps):
      self._end(due.end)
    if due.evaluate:
      self._evaluate()
    self._meter.restart_clock(step)

  def _is_first(self, step: int) -> bool:
    return step <= self._began + 2  # The first step's result is read in the second.

  def _save(self) -> None:
    if self._saved == self._step:
      return
    self._meter.flush()  # Nothing is saved before it is known to be finite.
    self._watchdog.pauses_for(f"the checkpoint of step {self._step}")
    positions = agreement.gather("the position in the data", self._position)
    position = {**merged(positions), "tokenizer": self._run.tokenizer_checksum}
    self._run.checkpointer.save(self._step, self._state, position)
    self._saved = self._step

  def _evaluate(self) -> None:
    step, run, recorder = self._step, self._run.at(self._step), self._recorder
    self._watchdog.pauses_for(f"the evaluation after step {step}")
    with self._ending():
      scores = run._replace(between_batches=self._due.look).evaluate_state(self._state)
    if scores:
      recorder.write(step, {f"eval/{name}": value for name, value in scores.items()})
      recorder.say(step, "  ".join(f"{name} {value:.3f}" for name, value in scores.items()))
    if (best := run.config.checkpoint_best) and best not in scores:
      raise RunError(
        f"checkpoint_best={best!r} is no score of step {step}: choose one of {', '.join(scores)}."
        " The same command with it continues after this step."
      )
    run.checkpointer.scored(step, scores)
    params = run.task.joined(self._state.params, self._state.frozen)
    _report(run, self._workdir, step, params, scores)

  @contextlib.contextmanager
  def _ending(self) -> Iterator[None]:
    """What takes long between two steps: it is abandoned if the run has to end."""
    try:
      with self._due.abandoning(self._end):
        yield
    except Abandoned:
      self._end(self._due.end)
    except Exception:
      if jax.process_count() > 1 or not stop.received_soon():
        raise
      self._end(stop.received())  # The signal ended the compiler, too.

  def _end(self, reason: int) -> NoReturn:
    """Saves, and raises `stop.Stopped`."""
    self._save()
    self._run.checkpointer.wait()
    raise stop.Stopped(
      f"Stopped by {self._due.describe(reason)} after step {self._step}; saved:"
      f" {self._run.checkpointer.describe_last_good()}. The same command continues.",
      self._due.exit_code(reason),
    )


def _with_fits(batches: Iterator[tuple], fits: Callable | None) -> Iterator[tuple]:
  """Adds to each batch and position whether the texts fit the groups of the task.

  fits: of `make_fits`, a batch ahead: the devices have the answer when the step before is still
    under way. None: there are no groups.
  """
  if fits is None:
    for batch, position in batches:
      yield batch, position, True
    return
  ahead = None
  for batch, position in batches:
    found = batch, position, fits({"text": batch["text"]})
    if ahead:
      yield ahead
    ahead = found


def jit_train_step(run: Run):
  """The jitted step: `(state, batch) -> (state, metrics, finite)`, the old state donated."""
  config = run.config
  step = make_train_step(
    run.task,
    run.optimizer,
    config.seed,
    config.accumulate,
    mesh=run.mesh,
    gradient_dtype=jnp.dtype(config.mesh.gradient_dtype),
    gradient_exchange=config.mesh.gradient_exchange,
    freeze=config.freeze,
    watch=config.watch,
  )
  shardings = jax.tree.map(lambda x: x.sharding, run.abstract_state)
  everywhere = replicated(run.mesh)
  return jax.jit(
    step,
    in_shardings=(shardings, batch_sharding(run.mesh)),
    out_shardings=(shardings, everywhere, everywhere),
    donate_argnums=0,
  )


class _Meter:
  """Reads the previous step's metrics, raises if a tensor is not finite, and times the steps."""

  def __init__(self, run: Run, state, recorder: Recorder):
    self._recorder = recorder
    self._names = tensor_names(state.params, run.task)
    self._learning_rate = learning_rates(run.schedule)
    # 0 if the device is not listed.
    self._peak_flops = run.mesh.size * BF16_PEAK.get(jax.devices()[0].device_kind, 0)
    self._pending = None
    self._first = True
    self._batches = self._ungrouped = 0
    # The last step that the device had ended when the clock was read or started.
    self._ended = None
    self._start_clock()
    self.begin(run)

  def begin(self, run: Run) -> None:
    """Measures the steps of a stage from here on."""
    self._run, self._flops = run, run.task.flops(run.config.batch_size)

  def restart_clock(self, step: int) -> None:
    """Times the steps after `step`, which the device has ended."""
    self._ended = step
    self._start_clock()

  def _start_clock(self) -> None:
    self._since, self._waited = time.perf_counter(), 0.0

  def _read_clock(self, step: int) -> None:
    """Times the steps that the device ended since the last reading, up to `step` or the next.

    A device that computes while the host starts a step (a CPU) has ended that step too. If it ended
    nothing since, the times are still those of the last reading.
    """
    if self._pending and self._pending[2].is_ready():
      step += 1
    if step > self._ended:
      seconds = time.perf_counter() - self._since
      self._seconds, self._wait = (x / (step - self._ended) for x in (seconds, self._waited))
    self._ended = step
    self._start_clock()

  def push(self, step, metrics, finite, waited, position, fits) -> None:
    self._waited += waited  # First: the clock of the previous step still runs.
    self._batches, self._ungrouped = self._batches + 1, self._ungrouped + (not fits)
    self._ended = step - 1 if self._ended is None else self._ended
    pending, self._pending = self._pending, (step, metrics, finite, position)
    self._read(pending)

  def flush(self) -> None:
    pending, self._pending = self._pending, None
    self._read(pending)

  def _read(self, pending) -> None:
    if pending is None:
      return
    step, metrics, finite, position = pending
    finite = np.asarray(finite)
    if not finite.all():
      raise self._not_finite(step, finite, float(metrics["loss"]))
    self._recorder.advance(step)
    config = self._run.config
    if step % config.log_every == 0 or step == config.steps:
      self._read_clock(step)
      self._log(step, metrics, left_out(position))
    elif self._first:
      self._read_clock(step)
      self._recorder.say(step, f"the first step took {self._seconds:.1f} s")
    self._first = False

  def _log(self, step, metrics, left_out: float | None) -> None:
    config = self._run.config
    seconds = self._seconds
    waited, peak_bytes, bad = largest_of_all(self._wait, _peak_bytes(), left_out or 0.0)
    scalars = {name: float(value) for name, value in jax.device_get(metrics).items()}
    scalars |= {
      "learning_rate": self._learning_rate(step),
      "step_seconds": seconds,
      "data_wait_seconds": waited,
      "images_per_second": config.batch_size / seconds,
    }
    if left_out is not None:
      scalars["left_out_share"] = bad
    if self._run.task.text_groups:
      scalars["ungrouped_share"] = self._ungrouped / self._batches
    if len(config.stages()) > 1:
      scalars["stage"] = config.stage(step) + 1
    if config.model.stages:
      scalars["image_size"] = self._run.task.train_sizes["image_size"]
      scalars["patch_dropout"] = self._run.task.model.patch_dropout
    if self._peak_flops:
      scalars["mfu"] = self._flops / seconds / self._peak_flops
    if peak_bytes:
      scalars["peak_gigabytes"] = peak_bytes / 1e9
    self._recorder.write(step, scalars)
    left = (config.steps - step) * seconds
    self._recorder.say(
      step,
      f"loss {scalars['loss']:.4f}  lr {scalars['learning_rate']:.2e}"
      f"  {scalars['images_per_second']:,.0f} images/s"
      f"  waiting for data {waited / seconds:.0%}"
      f"  {left // 60:.0f} min {left % 60:02.0f} s left",
    )

  def _not_finite(self, step: int, finite, loss: float) -> RunError:
    wrong = [name for name, ok in zip(self._names, finite, strict=True) if not ok]
    return RunError(
      f"Step {step}: {wrong[0]} is not finite, and {len(wrong) - 1} tensors after it; the loss is"
      f" {loss}. The last good checkpoint is {self._run.checkpointer.describe_last_good()}."
    )


def _peak_bytes() -> int:
  """The peak memory use of this process's devices, the largest of them; 0 if none reports it."""
  stats = (device.memory_stats() or {} for device in jax.local_devices())
  return max(each.get("peak_bytes_in_use", 0) for each in stats)


def describe(run: Run, recorder: Recorder, start: int) -> None:
  config = run.config
  state, lora = run.abstract_state, run.config.lora
  count, frozen = (f"{_size(tree) / 1e6:.1f} M" for tree in (state.params, state.frozen))
  of = f"{count} trainable and {frozen} frozen parameters" if lora.rank else f"{count} parameters"
  device = jax.devices()[0]
  recorder.say(
    start,
    f"{run.task.name} {config.model.size}, {of},"
    f" {_how(config)}, {config.data.name}, batch {config.batch_size}, on"
    f" {run.mesh.size} x {device.device_kind} (data {run.mesh.shape['data']},"
    f" fsdp {run.mesh.shape['fsdp']})",
  )
  if groups := run.task.text_groups:
    each = sum(length * rows for length, rows in groups) / sum(rows for _, rows in groups)
    recorder.say(
      start,
      f"captions in groups of {', '.join(f'{rows} x {length}' for length, rows in groups)} tokens:"
      f" {each:.1f} each in place of {run.task.model.config.text.context_length}",
    )


def _size(tree) -> int:
  """How many numbers its arrays have."""
  return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def _how(config: Config) -> str:
  """The recipe, and the images if there is a schedule of them."""
  stages = f", images {config.model.stages}" if config.model.stages else ""
  return f"recipe {config.model.recipe}{stages}"


def _report(run: Run, workdir: Path, step: int, params, scores: dict[str, float]) -> None:
  config, samples = run.config, run.samples(params)
  if jax.process_index() == 0:
    title = f"{config.model.size} on {config.data.name}, {_how(config)}"
    write_report(workdir, f"{title}\nstep {step}: {describe_scores(scores)}", samples)


def _finished(run: Run, workdir: Path) -> dict | None:
  """The result of a run that has all its steps, and its last checkpoint intact; else None."""
  try:
    result = json.loads((workdir / "result.json").read_bytes())
    finished = result["step"] == run.config.steps
  except (FileNotFoundError, ValueError, LookupError, TypeError):
    return None
  restored = run.restore() if finished else None
  return result if restored and restored.step == run.config.steps else None


def _result(run: Run, workdir: Path, seconds: float) -> dict:
  """The last metrics and scores, with the recipe, device and jax version of the run."""
  records = read_metrics(workdir / "metrics.jsonl")
  scores = [r for r in records if any(name.startswith("eval/") for name in r)] or [{}]
  losses = [r for r in records if "loss" in r]  # Empty if someone deleted metrics.jsonl.
  rates = [r["images_per_second"] for r in losses]
  return {
    "step": run.config.steps,
    "loss": losses[-1]["loss"] if losses else None,
    "eval": {k.removeprefix("eval/"): v for k, v in scores[-1].items() if k != "step"},
    **({"best_step": run.checkpointer.best_step()} if run.config.checkpoint_best else {}),
    "images_per_second": float(np.median(rates)) if rates else None,
    "seconds": round(seconds, 1),  # of the process that finished the run
    "recipe": run.config.model.recipe,
    **_of_stages(run.config, losses),
    **_of_adapters(run),
    "device": f"{run.mesh.size} x {jax.devices()[0].device_kind}",
    "jax": jax.__version__,
  }


def _of_adapters(run: Run) -> dict:
  """How many parameters learn and how many stay; {} for a run without adapters."""
  state = run.abstract_state
  sizes = {"trainable": _size(state.params), "frozen": _size(state.frozen)}
  return {"parameters": sizes} if run.config.lora.rank else {}


def _of_stages(config: Config, records: list[dict]) -> dict:
  """{"stages": each with its steps, recipe, images and speed}; {} for a run that has only one."""
  stages, first = [], 1
  for stage in config.stages():
    rates = [r["images_per_second"] for r in records if first <= r["step"] <= stage.last]
    images = {"image_size": stage.image_size, "patch_dropout": stage.patch_dropout}
    stages.append(
      {
        "steps": [first, stage.last],
        "recipe": stage.recipe,
        **(images if stage.image_size else {}),
        "images_per_second": float(np.median(rates)) if rates else None,
      }
    )
    first = stage.last + 1
  return {"stages": stages} if len(stages) > 1 else {}
