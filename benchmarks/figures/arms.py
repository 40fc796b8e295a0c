"""What each figure trains: an `Arm` is the main schedule with some fields of the Config changed.

The main schedule is configs/scenes_s8.py on scenes/hard: images of 64 pixels, batches of 1,024,
8,000 steps of which a quarter is warm-up, StableAdamW with b2 .98, weight decay .2, and half of the
patches dropped. An arm of the size "flickr8k" or "cifar10" has that config of photos.py instead.
Figures share arms, and an arm is trained once. The order of a figure's arms is by seed, so that
runs that were interrupted compare all series with the same seeds.
"""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.figures import photos
from configs import scenes_s8
from train.config import Config

_MODELS = Path(__file__).with_name("models")
# Towers of width 192 and 6 layers; 384 and 6; 384 and 12, which is the image tower of ViT-S.
SIZES = ("ti", "s6", "s12")
WORDS = {
  "ti": "width 192, 6 layers",
  "s6": "width 384, 6 layers",
  "s12": "width 384, 12 layers",
  "flickr8k": "Flickr8k",
  "cifar10": "CIFAR-10",
}
RECIPES = (
  "full", "switchback", "llm_int8", "fp8_tensorwise", "fp8_switchback", "switchback_m",
)  # fmt: skip
B2S = (0.99, 0.98, 0.95, 0.9, 0.5)
_SHIFT, _COLUMNS = "scenes/shift:3000", "scenes/columns:2000,3000"
_TINY = {_SHIFT: "scenes/shift:6", _COLUMNS: "scenes/columns:3,6"}  # those of `tiny`
_PATCHES = "image/patch_embedding/kernel"


class Arm(NamedTuple):
  """A run: a size or a key of photos.CONFIGS, fields of the Config by path, and a seed."""

  size: str
  changes: tuple[tuple[str, object], ...]
  seed: int

  @property
  def name(self) -> str:
    """Such as "ti model.recipe=full seed=0": what a row is found by."""
    changes = [f"{path}={value}" for path, value in self.changes]
    return " ".join([self.size, *changes, f"seed={self.seed}"])

  def value(self, path: str) -> object:
    """The value of a field, changed or not."""
    return config_of(self).get(path)


def arm(size: str, seed: int, **changes) -> Arm:
  """An Arm; a path's dots are written as two underscores: model__recipe="full"."""
  return Arm(size, tuple((k.replace("__", "."), v) for k, v in sorted(changes.items())), seed)


def config_of(arm: Arm) -> Config:
  """The Config of an arm."""
  config = photos.CONFIGS[arm.size]() if arm.size in photos.CONFIGS else _scenes(arm.size)
  config.model.remat, config.seed = "none", arm.seed
  config.eval_every, config.checkpoint_every, config.log_every = 0, 2000, 20
  for path, value in arm.changes:
    group, _, field = path.rpartition(".")
    setattr(config.get(group) if group else config, field, value)
  return config


def series_of(arms: Sequence[Arm], label: Callable[[Arm], Hashable]) -> dict[Any, list[Arm]]:
  """The arms by their labels, in the order in which they come."""
  found = {}
  for arm in arms:
    found.setdefault(label(arm), []).append(arm)
  return found


def change_of(arm: Arm) -> int | None:
  """The step at which an arm's images change: the first of a shift, the second of columns."""
  from train.data.scenes.scenes import find_variant  # Imports JAX, which takes seconds.

  if not (variant := find_variant(arm.value("data.name"))):
    return None
  steps = variant.columns or [step for step, _ in variant.shifts]
  return steps[1] if steps else None  # A shift's first contrast is that of step 1.


def _scenes(size: str) -> Config:
  config = scenes_s8.get_config()
  config.model.size = str(_MODELS / f"{size}.json")
  config.data.name, config.data.eval_split = "scenes/hard", "scenes,classes,heldout"
  return config


def tiny(arm: Arm) -> Arm:
  """The same arm with the smallest model and a few steps, to try the program on a CPU."""
  fields = dict(arm.changes)
  fields |= {"batch_size": 16, "steps": 12}
  if arm.size in photos.CONFIGS:
    return arm._replace(changes=tuple(sorted(fields.items())))
  fields["data.name"] = _TINY.get(fields.get("data.name"), "scenes/small")
  return Arm("tiny", tuple(sorted(fields.items())), arm.seed)


def tiny_config(arm: Arm) -> Config:
  """The Config of a `tiny` arm."""
  config = config_of(arm)
  config.model = dataclasses.replace(
    config.model, size="tiny", image_size=32, dtype="float32", patch_size=16
  )
  config.data = dataclasses.replace(
    config.data, templates=config.data.templates[:1], workers=0, prefetch=4
  )
  if arm.size not in photos.CONFIGS:
    config.data.eval_split = "scenes[:32],classes[:32],heldout[:32]"
  config.optimizer.warmup_steps, config.log_every, config.eval_batch_size = 3, 1, 32
  config.eval_every = min(config.eval_every, config.steps // 2)
  return config


class Figure(NamedTuple):
  """A figure of the paper: what it shows, and the arms that it needs."""

  shows: str
  arms: tuple[Arm, ...]


def _by_seed(seeds: dict[str, int], make) -> tuple[Arm, ...]:
  """make(size, seed) for each size and its number of seeds: all first seeds first."""
  arms = []
  for seed in range(max(seeds.values())):
    for size, count in seeds.items():
      arms += make(size, seed) if seed < count else []
  return tuple(arms)


def _accuracy(size: str, seed: int) -> list[Arm]:
  return [arm(size, seed, model__recipe=recipe) for recipe in RECIPES]


_EACH_STEP = {"log_every": 1, "optimizer__name": "adamw", "model__recipe": "full"}


def _spikes(size: str, seed: int, values: Sequence = B2S, **fixed) -> list[Arm]:
  return [arm(size, seed, optimizer__b2=b2, **_EACH_STEP, **fixed) for b2 in values]


# The rate of figures 6 and 7. The paper's models spike at 2e-3; they are two to six times as wide.
_HIGH = {"optimizer__learning_rate": 1e-2}
_LARGE = {"batch_size": 4096, **_HIGH}
_BATCHES = ({"batch_size": 256, **_HIGH}, _HIGH, _LARGE)
_RATES = ({}, {"optimizer__learning_rate": 5e-3}, _HIGH)  # 2e-3 is that of the main schedule.


def _spikes_of(changes: Sequence[dict]) -> Callable[[str, int], list[Arm]]:
  return lambda *a: [arm for change in changes for arm in _spikes(*a, **change)]


_REMEDIES = (  # Of fp8 with one scale a tensor (figure 5).
  {},
  {"optimizer__clip_norm": 1.0},
  {"model__qk_norm": True},
  {"model__zero_init_layer_scale": True},
  {"model__qk_norm": True, "model__zero_init_layer_scale": True},
)


def _remedies(size: str, seed: int, remedies=_REMEDIES) -> list[Arm]:
  watch = {"watch": (r"image/block_\d+/fc2/kernel",), "model__recipe": "fp8_tensorwise"}
  return [arm(size, seed, **watch, **remedy) for remedy in remedies]


_CLIPS = (  # Figure 10's series.
  {"optimizer__name": "adamw"},
  {"optimizer__name": "adamw", "optimizer__clip_norm": 1.0},
  {"optimizer__name": "stable_adamw"},
)


def _clips(size: str, seed: int) -> list[Arm]:
  """Figure 10: with the main schedule's batch and rate, and with those at which AdamW spikes."""
  settings = (((0.5, 0.9, 0.95, 0.98, 0.99, 0.995), {}), ((0.98, 0.99, 0.995), _LARGE))
  fixed = {"log_every": 1, "model__recipe": "full"}
  return [
    arm(size, seed, optimizer__b2=b2, **fixed, **setting, **clip)
    for b2s, setting in settings
    for b2, clip in itertools.product(b2s, _CLIPS)
  ]


def _schedules(size: str, seed: int) -> list[Arm]:
  """Figure 15: b2 of 1 - t^-power, and constants, which figure 10 has, too."""
  fixed = {"log_every": 1, "model__recipe": "full", "optimizer__name": "stable_adamw"}
  return [
    *(arm(size, seed, optimizer__b2_power=power, **fixed) for power in (0.45, 0.5, 0.65)),
    *(arm(size, seed, optimizer__b2=b2, **fixed) for b2 in (0.98, 0.99)),
  ]


def _changes(name: str, b2s: Sequence[float]) -> Callable[[str, int], list[Arm]]:
  """AdamW by b2 on images that change at a step."""
  watch = (_PATCHES, r"image/block_\d+/fc2/kernel")
  return lambda *a: _spikes(*a, b2s, data__name=name, watch=watch)


def _scalers(size: str, seed: int) -> list[Arm]:
  """Figure 11: two loss scalers from the default scale, and from one that the shift overflows."""
  watch = (_PATCHES, "image/class_embedding", "image/block_0/qkv/kernel")
  fixed = {
    "data__name": _SHIFT,
    "log_every": 1,
    "model__dtype": "float16",
    "model__recipe": "full",
    "watch": watch,
  }
  scales = ({}, {"optimizer__initial_loss_scale": 2.0**18})
  return [
    arm(size, seed, optimizer__loss_scale=scaler, **fixed, **scale)
    for scale, scaler in itertools.product(scales, ("dynamic", "fixed"))
  ]


def _photos(name: str) -> tuple[Arm, ...]:
  recipes = ("full", "switchback", "fp8_switchback")
  return _by_seed({name: 5}, lambda *a: [arm(*a, model__recipe=recipe) for recipe in recipes])


_PROOF = ("full", "switchback", "switchback_c")
# Images and steps: 34 thousand, 266 thousand and 1.1 million tokens a step, without patch dropout.
_BY_BATCH = ((512, 8000, 5), (16384, 1000, 5), (4096, 2000, 3))


def _pairs() -> tuple[Arm, ...]:
  """16 seeds of three recipes. Figure 1's seeds are last: some of their rows are older."""
  seeds = (*range(5, 16), *range(5))
  return tuple(arm("ti", seed, model__recipe=recipe) for seed in seeds for recipe in _PROOF)


def _by_batch() -> tuple[Arm, ...]:
  fixed = {"model__patch_dropout": 0.0}
  return tuple(
    arm("ti", seed, batch_size=b, steps=s, optimizer__warmup_steps=s // 4, model__recipe=r, **fixed)
    for b, s, seeds in _BY_BATCH
    for seed in range(seeds)
    for r in _PROOF
  )


def served(arm: Arm) -> tuple[str, ...]:
  """Recipes in which an arm is evaluated after its training, beside its own."""
  own = dict(arm.changes)
  if arm.size != "ti" or own.keys() != {"model.recipe"} or arm.seed not in range(5, 13):
    return ()
  return tuple(recipe for recipe in _PROOF if recipe != own["model.recipe"])


_LONG = {"steps": 20_000, "optimizer__warmup_steps": 5000, "eval_every": 2000}

FIGURES = {
  "easy": Figure(
    "two recipes on the easier scenes, smallest size",
    _by_seed(
      {"ti": 5}, lambda *a: [arm(*a, model__recipe=r, data__name="scenes") for r in RECIPES[:2]]
    ),
  ),
  "1": Figure(
    "zero-shot accuracy by size and recipe",
    _by_seed({"ti": 5, "s6": 3, "s12": 3}, _accuracy),
  ),
  "pairs": Figure("16 pairs of full, switchback and finer scales, smallest size", _pairs()),
  "served": Figure(
    "the same weights evaluated in 16 and in 8 bits", tuple(arm for arm in _pairs() if served(arm))
  ),
  "batch": Figure("the difference from full by batch size, smallest size", _by_batch()),
  "2": Figure(
    "loss curves of the smallest and the largest size",
    _by_seed({"ti": 5, "s12": 3}, _accuracy),
  ),
  "5": Figure("fp8 with one scale a tensor, and remedies", _by_seed({"s12": 3}, _remedies)),
  "14": Figure(
    "gradients of fc2 and features by block, with and without layer scale",
    _by_seed({"s6": 1, "s12": 1}, lambda *a: _remedies(*a, remedies=(_REMEDIES[0], _REMEDIES[3]))),
  ),
  "6": Figure(
    "loss spikes by size and b2", _by_seed(dict.fromkeys(SIZES, 3), _spikes_of([_HIGH]))
  ),
  "7": Figure("loss spikes by batch size and b2", _by_seed({"ti": 3}, _spikes_of(_BATCHES))),
  "8": Figure("loss spikes by learning rate and b2", _by_seed({"ti": 3}, _spikes_of(_RATES))),
  "9": Figure(
    "loss and RMS around a change of the patch embedding's gradient",
    _by_seed({"ti": 5}, _changes(_COLUMNS, (0.995, 0.98, 0.9))),
  ),
  "shift": Figure(
    "loss and RMS around a shift of the contrast",
    _by_seed({"ti": 1}, _changes(_SHIFT, (0.98, 0.9))),
  ),
  "10": Figure("accuracy by b2: AdamW, gradient and update clipping", _by_seed({"ti": 3}, _clips)),
  "15": Figure(
    "accuracy with a b2 of 1 - t^-l, and with constants", _by_seed({"ti": 3}, _schedules)
  ),
  "11": Figure("two loss scalers around a shift of the data", _by_seed({"ti": 1}, _scalers)),
  "flickr8k": Figure("recall on Flickr8k's test photos by recipe", _photos("flickr8k")),
  "cifar10": Figure("zero-shot accuracy on CIFAR-10 by recipe", _photos("cifar10")),
  "long": Figure(
    "one longer run, full against switchback",
    _by_seed({"s12": 3}, lambda *a: [arm(*a, model__recipe=r, **_LONG) for r in RECIPES[:2]]),
  ),
}  # fmt: skip
