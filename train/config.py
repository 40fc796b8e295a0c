"""A run is one `Config`, written out in a file of `configs/` and changed by flags.

Every field always exists; an empty string or a zero means "off" where the comment says so.
`check` is called once, after the flags are applied; `LIMITS` has what each value must be.
"""

import dataclasses
import functools
import math
import re
import typing
from collections.abc import Iterator
from typing import Any

from train.paths import check_local


@dataclasses.dataclass(kw_only=True)
class ModelConfig:
  # A key of sbjax.models.sizes.SIZES, a name of open_clip ("ViT-B-32-quickgelu"), or a folder with
  # open_clip_config.json or config.json
  size: str
  image_size: int = 0  # pixels; 0: the size's own
  patch_size: int = 0  # pixels; 0: the size's own
  context_length: int = 0  # 0: the size's own
  # A key of sbjax.RECIPES, "fp8_cscale:4" or another exponent, "fp4" (simulated), or rules by the
  # path of a linear layer: "*/fc1=full, *=switchback".
  recipe: str = "switchback"
  backend: str = ""  # "xla", "mosaic", "triton"; "" chooses
  attention_backend: str = ""  # "xla", "cudnn", "mosaic", "triton"; "" chooses
  dtype: str = "bfloat16"  # compute dtype; parameters are float32, but see optimizer.states
  zero_init_layer_scale: bool = False  # blocks with a learned scale that starts at 0
  qk_norm: bool = False  # layer norm of queries and keys
  # "standard", or "unit": munit scaling, kernels of unit variance, whose learning rate holds at all
  # widths; for the recipe "fp8_static" (docs/unit_scaling.md)
  parametrization: str = "standard"
  tau: float = 0.0  # for "unit": the share of a residual branch; 0: by the number of layers
  patch_dropout: float = 0.0  # fraction of patches dropped in training
  scan: bool = True  # one compiled block, scanned over the layers
  # How many layers of a scan are compiled together; 0: all; -1: all on a GPU, else one by one.
  unroll: int = -1
  # What the backward pass computes again: "none", "block" (all), a key of
  # sbjax.models.transformer.REMAT_POLICIES, or "auto": the fastest of them that fits the devices.
  remat: str = "auto"
  # Layer norm's and GELU's inputs for the backward pass: "original", or "grouped" in 8 bits
  keep: str = "original"


@dataclasses.dataclass(kw_only=True)
class DataConfig:
  # A TFDS data set, or "scenes", which the devices draw; with train_shards, the name to import
  # them under
  name: str = "shapes"
  data_dir: str = ""  # where prepared data sets live; "": TFDS's own default
  root: str = ""  # the folder of the files below
  # Tar shards to import under `name`: globs or {000..099} ranges, relative to root; "::" joins
  # several. "": none.
  train_shards: str = ""
  eval_shards: str = ""  # likewise, for eval_split, which then is one split
  # The key of the captions in a sample's json. "": the txt, a caption a line; if it has none, the
  # json's "captions" or "caption"
  caption_key: str = ""
  # Folders as CLIP_benchmark keeps them, relative to root: scored by each evaluation, too
  eval_data: tuple[str, ...] = ()
  class_names: str = ""  # a file with the names of the classes, one a line. "": numbers
  train_split: str = "train"  # a split of the data set, or a part: "train[:90%]"
  # Likewise; or different ones, with commas: "scenes,classes,heldout". "": none is evaluated
  eval_split: str = "val"
  image_key: str = "image"  # an Image feature
  text_key: str = "captions"  # a Text or Sequence(Text) feature; "": captions from labels
  label_key: str = ""  # a ClassLabel feature; "": no zero-shot classification
  # Prompts with "{}" for a class name: for zero-shot classification, and as captions of data
  # that has only labels.
  templates: tuple[str, ...] = ("a photo of a {}.",)
  # "bpe": train one on the captions; "words": a token for each of their words; "clip"; a path to a
  # tokenizer.json or to CLIP's bpe_simple_vocab_16e6.txt.gz
  tokenizer: str = "bpe"
  tokenizer_vocab_size: int = 1024  # of a tokenizer trained here
  crop_scale: tuple[float, float] = (0.9, 1.0)  # RandomResizedCrop's share of the area
  flip: bool = False  # mirror half of the training images
  workers: int = 0  # worker processes that decode and augment; 0: threads of this process
  prefetch: int = 4  # batches ready ahead of the step
  # Limits on data that others made. An import skips and lists samples beyond them. Images are
  # checked when they are read, too: from the header, before decoding.
  max_member_bytes: int = 2**26  # of a file in a tar shard, held in memory while it is imported
  max_image_pixels: int = 80_000_000  # of an image; decoded, each takes 3 bytes (4 if transparent)
  max_aspect_ratio: float = 100.0  # of an image's longer to its shorter side
  max_label: int = 99_999  # without class_names; each label up to the largest is a class


@dataclasses.dataclass(kw_only=True)
class OptimizerConfig:
  name: str = "stable_adamw"  # a key of train.optimizer.OPTIMIZERS
  learning_rate: float = 2e-3  # after the warm-up; then a half cosine to 0
  warmup_steps: int = 5000  # steps of linear warm-up
  b1: float = 0.9  # decay of the first moment
  b2: float = 0.98  # decay of the second moment
  # Decay of the second moment in place of b2: 1 - t^-b2_power at step t, from 1. 0: b2
  b2_power: float = 0.0
  eps: float = 1e-6  # added to the root of the second moment
  # Of parameters with two or more dimensions: times the rate. With model.parametrization="unit" it
  # does not depend on the rate: the share of a parameter that a step takes away, such as 1e-4
  weight_decay: float = 0.2
  # For model.parametrization="unit": the width at which learning_rate was found. Kernels of a tower
  # of width d learn at learning_rate * sqrt(base_width / d). 0: at learning_rate
  base_width: int = 0
  # How both moments are kept: "float32", "bfloat16", "coat" or "fp8_lm" (8 bits, 8 and 16 bits).
  # "collage_light" and "collage_plus" also split each matrix into two bfloat16, and the model
  # computes with the first
  states: str = "float32"
  # Patterns of parameters whose moments stay float32 with any `states`: rows of rare tokens have
  # long times without a gradient, and 8 bits are least exact there
  float32_moments: tuple[str, ...] = ("text/token_embedding/.*",)
  measure_edq: bool = False  # for Collage: record how much of each update survives its rounding
  decay_with: str = "clipped"  # StableAdamW: "clipped" (the paper) or "plain" rate (its code)
  clip_norm: float = 0.0  # global gradient norm; 0: off
  # For model.dtype="float16". "fixed" skips tensors whose gradient is not finite (the paper 3.6);
  # "dynamic" skips whole steps then, and adapts the scale
  loss_scale: str = "none"
  initial_loss_scale: float = 65_536.0  # a power of two rounds nothing
  # Factors on the learning rate by a parameter's path: "image/.*=0.1"; the first match applies
  learning_rate_scale: tuple[str, ...] = ()


@dataclasses.dataclass(kw_only=True)
class MeshConfig:
  data: int = -1  # -1: all devices divided by fsdp
  fsdp: int = 1  # parameters and optimizer state are split over this axis
  gradient_dtype: str = "float32"  # or "bfloat16": dtype of kernels' gradients between devices
  # "bfloat16", "e4m3" or "int8": format in which gradients of matrices travel to float32 sums
  gradient_exchange: str = "float32"


@dataclasses.dataclass(kw_only=True)
class Config:
  model: ModelConfig
  data: DataConfig = dataclasses.field(default_factory=DataConfig)
  optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
  mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
  init: str = ""  # a state dict or its folder, of open_clip or transformers; "": random parameters
  # open_clip's name of the model of init; "": its folder's config, or model.size
  init_model: str = ""
  freeze: tuple[str, ...] = ()  # patterns of init's parameters that stand still: "image/.*"
  loss: str = "softmax"  # or "siglip"
  batch_size: int = 16384  # over all devices
  accumulate: int = 1  # microbatches a batch: takes the memory of one, the loss is over all
  steps: int = 20_000  # batches to train on
  seed: int = 0  # of parameters, the order of the data, crops and dropped patches
  log_every: int = 50  # steps between two records of the metrics
  # Patterns of parameters whose gradient and RMS are recorded too, and with them each block's
  # largest |feature|: "image/block_(0|11)/fc2/kernel", whether model.scan is on or off
  watch: tuple[str, ...] = ()
  eval_every: int = 1000  # 0: only at the end
  eval_batch_size: int = 256  # over all devices
  checkpoint_every: int = 1000  # 0: only at the end
  checkpoint_minutes: float = 0.0  # also when so many have passed since the last; 0: off
  checkpoint_keep: int = 3  # how many of the newest checkpoints stay
  # The run saves and stops when it has taken so many hours in one start (exit code 75), but not
  # before the start's first step: a start that takes longer gets on, too. 0: no limit
  max_hours: float = 0.0
  wandb_project: str = ""  # "": no Weights & Biases
  # A run that waits longer for a step or its batch ends with a message; three times that for the
  # first step. 0: it waits forever.
  step_timeout_seconds: int = 600
  pause_timeout_seconds: int = 3600  # the same for an evaluation or a checkpoint
  profile_steps: str = ""  # "a:b": writes a trace of steps a to b to workdir/profile; "": off

  def to_dict(self) -> dict:
    """The fields as nested dictionaries, for JSON."""
    return dataclasses.asdict(self)

  def profiled(self) -> tuple[int, int] | None:
    """The first and the last step of `profile_steps`; None if it is empty.

    Raises:
      ValueError: it is not two steps of this run.
    """
    if not self.profile_steps:
      return None
    match = re.fullmatch(r"(\d+):(\d+)", self.profile_steps)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= last <= self.steps:
      raise ValueError(
        f"profile_steps={self.profile_steps!r} must be 'first:last', two of the steps 1 to"
        f" {self.steps} in their order, such as '10:12'."
      )
    return first, last

  def check(self) -> None:
    """Raises a ValueError that names the first field with an invalid value.

    A path to another machine is a RunError.

    The names of sizes, recipes, backends, losses and optimizers are checked where they are known
    (train/run.py), before data are touched as well.
    """
    for path, field, _ in all_fields():
      value = self.get(path)
      if not _has_type(value, field.type):
        raise ValueError(f"{path}={value!r} must be {TYPES[field.type]}.")
      for words, holds, paths in LIMITS:
        if path in paths.split() and not holds(value):
          raise ValueError(f"{path}={value!r} must be {words}.")
    for path in PATHS:
      value = self.get(path)
      for each in value.split("::") if isinstance(value, str) else value:
        check_local(each, path)
    if not self.init and self.init_model:
      raise ValueError(f"init_model={self.init_model!r} is the model of init, which is not set.")
    dtype, exchange = self.mesh.gradient_dtype, self.mesh.gradient_exchange
    if dtype != "float32" and exchange != "float32":
      raise ValueError(
        f"mesh.gradient_exchange={exchange!r} sums in float32, mesh.gradient_dtype={dtype!r} does"
        " not: leave one of them at 'float32'."
      )
    self._check_parametrization()
    self.profiled()

  def _check_parametrization(self) -> None:
    """Raises a ValueError for fields that do not go with `model.parametrization`."""
    optimizer, is_unit = self.optimizer, self.model.parametrization == "unit"
    if optimizer.base_width and not is_unit:
      raise ValueError(
        f"optimizer.base_width={optimizer.base_width} needs model.parametrization='unit': the best"
        " learning rate of other models depends on the width in other ways. Set it to 0."
      )
    if not is_unit:
      return
    if self.init:
      raise ValueError(
        f"init={self.init!r} has the weights of a standard model, which model.parametrization="
        "'unit' computes differently: set model.parametrization='standard' to fine-tune it."
      )
    if optimizer.weight_decay > MAX_UNIT_DECAY:
      raise ValueError(
        f"optimizer.weight_decay={optimizer.weight_decay} is the share of its size that a parameter"
        f" loses at each step with model.parametrization='unit': at most {MAX_UNIT_DECAY}, such as"
        " 1e-4."
      )
    if optimizer.loss_scale != "none":
      raise ValueError(
        f"optimizer.loss_scale={optimizer.loss_scale!r} must be 'none' with model.parametrization="
        "'unit', whose gradients have unit variance without it."
      )

  def get(self, path: str) -> Any:
    """The value of a field or the group of that path, such as "optimizer.b1"."""
    return functools.reduce(getattr, path.split("."), self)

  @classmethod
  def from_dict(cls, values: dict) -> "Config":
    """The inverse of `to_dict`: a missing field takes its default, an unknown one is ignored."""
    return _from_dict(cls, values)


def flat(config: dict, prefix: str = "") -> dict:
  """The fields of nested dictionaries by their dotted names, as JSON would return them."""
  fields = {}
  for name, value in config.items():
    if isinstance(value, dict):
      fields |= flat(value, f"{prefix}{name}.")
    else:
      fields[prefix + name] = list(value) if isinstance(value, tuple) else value
  return fields


MAX_UNIT_DECAY = 0.01  # More than that in each step leaves nothing of what was learned.

TYPES = {  # What a value of a field's type must be.
  str: "a text",
  int: "a whole number",
  float: "a number",
  bool: "true or false",
  tuple[float, float]: "two numbers, such as (0.5, 1)",
  tuple[str, ...]: "texts, such as ('a {}', 'one {}')",
}


def _off_or_more(words: str) -> tuple:
  return f"0 ({words}) or more", lambda x: x >= 0


LIMITS = (  # What the fields' values must be, in words and as a test that nan fails.
  ("at least 1", lambda x: x >= 1,
   "batch_size accumulate steps log_every eval_batch_size checkpoint_keep"
   " data.max_member_bytes data.max_image_pixels data.max_aspect_ratio"),
  ("0 or more", lambda x: x >= 0, "data.max_label"),
  (*_off_or_more("only at the end"), "eval_every checkpoint_every"),
  (*_off_or_more("no limit"), "step_timeout_seconds pause_timeout_seconds max_hours"),
  (*_off_or_more("by steps only"), "checkpoint_minutes"),
  (*_off_or_more("the size's own"), "model.image_size model.patch_size"),
  ("between 0 (by the number of layers) and 1", lambda x: 0 <= x < 1, "model.tau"),
  (*_off_or_more("learning_rate for all widths"), "optimizer.base_width"),
  ("-1 (all layers on a GPU), 0 (all layers) or more", lambda x: x >= -1, "model.unroll"),
  (*_off_or_more("threads of this process"), "data.workers"),
  (*_off_or_more("no thread"), "data.prefetch"),
  ("0 (the size's own) or at least 3", lambda x: x == 0 or x >= 3, "model.context_length"),
  ("from 0 to 4294967295", lambda x: 0 <= x < 2**32, "seed"),
  ("at least 0 and less than 1", lambda x: 0 <= x < 1,
   "model.patch_dropout optimizer.b1 optimizer.b2"),
  ("from 0 (b2 stays the same) to 1", lambda x: 0 <= x <= 1, "optimizer.b2_power"),
  ("0 or more, and finite", lambda x: 0 <= x < math.inf,
   "optimizer.learning_rate optimizer.weight_decay optimizer.clip_norm"),
  ("more than 0, and finite", lambda x: 0 < x < math.inf,
   "optimizer.eps optimizer.initial_loss_scale"),
  ("-1 (what the other leaves) or at least 1", lambda x: x == -1 or x >= 1, "mesh.data mesh.fsdp"),
  ("'bfloat16', 'float16' or 'float32'", lambda x: x in ("bfloat16", "float16", "float32"),
   "model.dtype"),
  ("'bfloat16' or 'float32'", lambda x: x in ("bfloat16", "float32"), "mesh.gradient_dtype"),
  ("'float32', 'bfloat16', 'e4m3' or 'int8'",
   lambda x: x in ("float32", "bfloat16", "e4m3", "int8"), "mesh.gradient_exchange"),
  ("the name of a feature", bool, "data.image_key"),
  ("at least one text, each with {} for the name of a class",
   lambda x: x and all("{}" in text for text in x), "data.templates"),
  ("two numbers, 0 < low <= high <= 1", lambda x: len(x) == 2 and 0 < x[0] <= x[1] <= 1,
   "data.crop_scale"),
  # 256 bytes, 3 special tokens and a merge.
  ("at least 260", lambda x: x >= 260, "data.tokenizer_vocab_size"),
)  # fmt: skip


PATHS = (  # Fields that are paths or may be; "::" joins several shards.
  *("init", "init_model", "model.size", "data.tokenizer", "data.class_names", "data.eval_data"),
  *("data.data_dir", "data.root", "data.train_shards", "data.eval_shards"),
)


def all_fields(
  group: type = Config, prefix: str = ""
) -> Iterator[tuple[str, dataclasses.Field, type]]:
  """The path, the field and its group, for every field of Config in the order above."""
  for field in dataclasses.fields(group):
    if dataclasses.is_dataclass(field.type):
      yield from all_fields(field.type, f"{prefix}{field.name}.")
    else:
      yield prefix + field.name, field, group


def _has_type(value, kind) -> bool:
  if typing.get_origin(kind) is tuple:
    item = typing.get_args(kind)[0]
    return isinstance(value, (tuple, list)) and all(_has_type(each, item) for each in value)
  if isinstance(value, bool):  # which is an int, too
    return kind is bool
  return isinstance(value, (int, float) if kind is float else kind)


def _from_dict(kind, value):
  if isinstance(value, dict):
    kinds = {field.name: field.type for field in dataclasses.fields(kind)}
    return kind(**{name: _from_dict(kinds[name], v) for name, v in value.items() if name in kinds})
  return tuple(value) if isinstance(value, list) else value
