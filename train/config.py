"""A run is one `Config`, written out in a file of `configs/` and changed by flags.

Each field says its default, its line of --help, what its value must be, and whether a run that
continues may have another one (train/fields.py). Every field always exists; an empty string or a
zero means "off" where its help says so. `check` is called once, after the flags are applied.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from train.fields import (
  AT_LEAST_1,
  FINITE,
  MAY_CHANGE,
  PATH,
  PER_PROCESS,
  POSITIVE,
  REQUIRED,
  SHARE,
  Limit,
  Mark,
  about,
  check,
  field,
  one_of,
  zero_or_more,
)
from train.paths import check_local


@dataclasses.dataclass(kw_only=True)
class ModelConfig:
  size: str = field(
    REQUIRED,
    """A key of sbjax.models.sizes.SIZES, a name of open_clip ("ViT-B-32-quickgelu",
    "ViT-B-16-SigLIP"), or a folder with open_clip_config.json or config.json""",
    PATH,
  )
  image_size: int = field(0, "pixels; 0: the size's own", zero_or_more("the size's own"))
  patch_size: int = field(0, "pixels; 0: the size's own", zero_or_more("the size's own"))
  context_length: int = field(
    0, "0: the size's own", Limit("0 (the size's own) or at least 3", lambda x: x == 0 or x >= 3)
  )
  recipe: str = field(
    "switchback",
    """A key of sbjax.RECIPES, "fp8_cscale:4" or another exponent, "fp4" (simulated), or rules by
    the path of a linear layer: "*/fc1=full, *=switchback". Several in turn: "switchback until 0.9,
    full", a share of `steps`, or the number of a step.""",
  )
  backend: str = field("", '"xla", "mosaic", "triton"; "" chooses', MAY_CHANGE)
  attention_backend: str = field("", '"xla", "cudnn", "mosaic", "triton"; "" chooses', MAY_CHANGE)
  dtype: str = field(
    "bfloat16",
    "compute dtype; parameters are float32, but see optimizer.states",
    one_of("bfloat16", "float16", "float32"),
  )
  zero_init_layer_scale: bool = field(False, "blocks with a learned scale that starts at 0")
  qk_norm: bool = field(False, "layer norm of queries and keys")
  parametrization: str = field(
    "standard",
    """"standard", or "unit": munit scaling, kernels of unit variance, whose learning rate holds at
    all widths; for the recipe "fp8_static" (docs/unit_scaling.md)""",
  )
  tau: float = field(
    0.0,
    'for "unit": the share of a residual branch; 0: by the number of layers',
    Limit("between 0 (by the number of layers) and 1", lambda x: 0 <= x < 1),
  )
  patch_dropout: float = field(0.0, "fraction of patches dropped in training", SHARE)
  stages: str = field(
    "",
    """Images of several sizes in turn, and for each the fraction of patches dropped if it is not
    patch_dropout: "98px drop 0.5 until 0.5, 154px until 0.9, 224px". Ends are those of `recipe`;
    the last size is the model's own. "": one size""",
  )
  text_groups: int = field(
    6,
    """The captions of a batch are computed in so many groups of lengths, at most, without what
    fills them up; 1: all positions of all captions. The numbers are the same.""",
    Limit("from 1 to 8", lambda x: 1 <= x <= 8),
    MAY_CHANGE,
  )
  scan: bool = field(True, "one compiled block, scanned over the layers")
  unroll: int = field(
    -1,
    "How many layers of a scan are compiled together; 0: all; -1: all on a GPU, else one by one.",
    Limit("-1 (all layers on a GPU), 0 (all layers) or more", lambda x: x >= -1),
    MAY_CHANGE,
  )
  remat: str = field(
    "auto",
    """What the backward pass computes again: "none", "block" (all), a key of
    sbjax.models.transformer.REMAT_POLICIES, or "auto": the fastest of them that fits the
    devices.""",
    MAY_CHANGE,
  )
  keep: str = field(
    "original",
    """Layer norm's and GELU's inputs for the backward pass: "original", or "grouped" in 8 bits""",
  )


@dataclasses.dataclass(kw_only=True)
class DataConfig:
  name: str = field(
    "shapes",
    """A TFDS data set, or "scenes", which the devices draw; with train_shards, the name to import
    them under""",
  )
  data_dir: str = field(
    "", """where prepared data sets live; "": TFDS's own default""", PATH, MAY_CHANGE, PER_PROCESS
  )
  root: str = field("", "the folder of the files below", PATH, MAY_CHANGE, PER_PROCESS)
  train_shards: str = field(
    "",
    """Tar shards to import under `name`: globs or {000..099} ranges, relative to root; "::" joins
    several. "": none. With `stream` also https://, s3://, gs:// and hf://, csv, tsv and parquet
    files, and @FILE for a list.""",
    MAY_CHANGE,
  )
  eval_shards: str = field("", "likewise, for eval_split, which then is one split", MAY_CHANGE)
  stream: bool = field(
    False, "read train_shards where they lie, again in each run, and import nothing"
  )
  streams: int = field(
    0,
    """With `stream`: each reads its own shards, and a batch takes equally from each. A divisor of
    the batch size, a multiple of the processes. 0: a power of two, at most 64, that shards and
    batch allow""",
    zero_or_more("at most 64"),
  )
  block: int = field(
    256,
    """With `stream`: neighbouring samples of a shard that are shuffled together. Each stream holds
    two such blocks in memory""",
    AT_LEAST_1,
  )
  weights: tuple[float, ...] = field(
    (),
    """With `stream`: how often samples are drawn from each of the sets of train_shards that "::"
    joins, such as (2, 1). (): all shards are one set""",
    Limit("numbers above 0", lambda x: all(0 < each < math.inf for each in x)),
  )
  unreadable: str = field(
    "end",
    """With `stream`: what a shard does that cannot be read after all tries: "end" the run, or
    "skip", which lists it""",
    one_of("end", "skip"),
    MAY_CHANGE,
  )
  max_bad_share: float = field(
    0.05,
    "With `stream`: a larger share of samples that cannot be used ends the run",
    Limit("from 0 to 1", lambda x: 0 <= x <= 1),
    MAY_CHANGE,
  )
  caption_key: str = field(
    "",
    """The key of the captions in a sample's json. "": the txt, a caption a line; if it has none,
    the json's "captions" or "caption" """,
  )
  eval_data: tuple[str, ...] = field(
    (),
    "Folders as CLIP_benchmark keeps them, relative to root: scored by each evaluation, too",
    PATH,
    MAY_CHANGE,
  )
  class_names: str = field(
    "", 'a file with the names of the classes, one a line. "": numbers', PATH
  )
  train_split: str = field("train", 'a split of the data set, or a part: "train[:90%]"')
  eval_split: str = field(
    "val",
    'Likewise; or different ones, with commas: "scenes,classes,heldout". "": none is evaluated',
    MAY_CHANGE,
  )
  image_key: str = field("image", "an Image feature", Limit("the name of a feature", bool))
  text_key: str = field("captions", 'a Text or Sequence(Text) feature; "": captions from labels')
  label_key: str = field("", 'a ClassLabel feature; "": no zero-shot classification')
  templates: tuple[str, ...] = field(
    ("a photo of a {}.",),
    """Prompts with "{}" for a class name: for zero-shot classification, and as captions of data
    that has only labels.""",
    Limit(
      "at least one text, each with {} for the name of a class",
      lambda x: x and all("{}" in text for text in x),
    ),
  )
  tokenizer: str = field(
    "bpe",
    """"bpe": train one on the captions; "words": a token for each of their words; "clip"; a path to
    a tokenizer.json, to CLIP's bpe_simple_vocab_16e6.txt.gz or to SigLIP's spiece.model""",
    PATH,
  )
  tokenizer_vocab_size: int = field(
    1024,
    "of a tokenizer trained here",
    Limit("at least 260", lambda x: x >= 260),  # 256 bytes, 3 special tokens and a merge
  )
  crop_scale: tuple[float, float] = field(
    (0.9, 1.0),
    "RandomResizedCrop's share of the area",
    Limit("two numbers, 0 < low <= high <= 1", lambda x: len(x) == 2 and 0 < x[0] <= x[1] <= 1),
  )
  flip: bool = field(False, "mirror half of the training images")
  workers: int = field(
    0,
    "worker processes that decode and augment; 0: threads of this process",
    zero_or_more("threads of this process"),
    MAY_CHANGE,
    PER_PROCESS,
  )
  prefetch: int = field(
    4, "batches ready ahead of the step", zero_or_more("no thread"), MAY_CHANGE, PER_PROCESS
  )
  max_member_bytes: int = field(
    2**26,
    """of a file in a tar shard, held in memory while it is imported. This and the next three limit
    data that others made: an import skips and lists samples beyond them. Images are checked when
    they are read, too: from the header, before decoding.""",
    AT_LEAST_1,
    MAY_CHANGE,
  )
  max_image_pixels: int = field(
    80_000_000,
    "of an image; decoded, each takes 3 bytes (4 if transparent)",
    AT_LEAST_1,
    MAY_CHANGE,
  )
  max_aspect_ratio: float = field(
    100.0, "of an image's longer to its shorter side", AT_LEAST_1, MAY_CHANGE
  )
  max_label: int = field(
    99_999,
    "without class_names; each label up to the largest is a class",
    Limit("0 or more", lambda x: x >= 0),
    MAY_CHANGE,
  )


@dataclasses.dataclass(kw_only=True)
class OptimizerConfig:
  name: str = field("stable_adamw", "a key of train.optimizer.OPTIMIZERS")
  learning_rate: float = field(2e-3, "after the warm-up; then as schedule says", FINITE)
  warmup_steps: int = field(5000, "steps of linear warm-up")
  schedule: str = field(
    "cosine",
    """After the warm-up: "cosine", half a one to 0; "constant"; "inverse_sqrt", the rate times
    sqrt(warmup_steps / step)""",
  )
  cooldown_steps: int = field(
    0,
    """for "constant" and "inverse_sqrt": the last of `steps`, in which the rate falls to 0 along a
    line""",
    zero_or_more("no cool-down"),
    MAY_CHANGE,
  )
  b1: float = field(0.9, "decay of the first moment", SHARE)
  b2: float = field(0.98, "decay of the second moment", SHARE)
  b2_power: float = field(
    0.0,
    "Decay of the second moment in place of b2: 1 - t^-b2_power at step t, from 1. 0: b2",
    Limit("from 0 (b2 stays the same) to 1", lambda x: 0 <= x <= 1),
  )
  eps: float = field(1e-6, "added to the root of the second moment", POSITIVE)
  weight_decay: float = field(
    0.2,
    """Of parameters with two or more dimensions: times the rate. With model.parametrization="unit"
    it does not depend on the rate: the share of a parameter that a step takes away, such as
    1e-4""",
    FINITE,
  )
  base_width: int = field(
    0,
    """For model.parametrization="unit": the width at which learning_rate was found. Kernels of a
    tower of width d learn at learning_rate * sqrt(base_width / d). 0: at learning_rate""",
    zero_or_more("learning_rate for all widths"),
  )
  states: str = field(
    "float32",
    """How both moments are kept: "float32", "bfloat16", "coat" or "fp8_lm" (8 bits, 8 and 16 bits).
    "collage_light" and "collage_plus" also split each matrix into two bfloat16, and the model
    computes with the first""",
  )
  float32_moments: tuple[str, ...] = field(
    ("text/token_embedding/.*",),
    """Patterns of parameters whose moments stay float32 with any `states`: rows of rare tokens have
    long times without a gradient, and 8 bits are least exact there""",
  )
  measure_edq: bool = field(
    False, "for Collage: record how much of each update survives its rounding"
  )
  decay_with: str = field(
    "clipped", 'StableAdamW: "clipped" (the paper) or "plain" rate (its code)'
  )
  clip_norm: float = field(0.0, "global gradient norm; 0: off", FINITE)
  loss_scale: str = field(
    "none",
    """For model.dtype="float16". "fixed" skips tensors whose gradient is not finite (the paper
    3.6); "dynamic" skips whole steps then, and adapts the scale""",
  )
  initial_loss_scale: float = field(65_536.0, "a power of two rounds nothing", POSITIVE)
  ema: float = field(
    0.0,
    """decay of an average of the parameters over the steps, such as 0.9999; evaluations score it,
    too. 0: none""",
    Limit("0 (no average) or more, and less than 1", lambda x: 0 <= x < 1),
  )
  learning_rate_scale: tuple[str, ...] = field(
    (),
    """Factors on the learning rate by a parameter's path: "image/.*=0.1"; the first match
    applies""",
  )


_AXIS = Limit("-1 (what the other leaves) or at least 1", lambda x: x == -1 or x >= 1)


@dataclasses.dataclass(kw_only=True)
class MeshConfig:
  data: int = field(-1, "-1: all devices divided by fsdp", _AXIS, MAY_CHANGE)
  fsdp: int = field(1, "parameters and optimizer state are split over this axis", _AXIS, MAY_CHANGE)
  gradient_dtype: str = field(
    "float32",
    """or "bfloat16": dtype of kernels' gradients between devices""",
    one_of("bfloat16", "float32"),
    MAY_CHANGE,
  )
  gradient_exchange: str = field(
    "float32",
    '"bfloat16", "e4m3" or "int8": format in which gradients of matrices travel to float32 sums',
    one_of("float32", "bfloat16", "e4m3", "int8"),
    MAY_CHANGE,
  )


@dataclasses.dataclass(kw_only=True)
class LoraConfig:
  rank: int = field(
    0,
    """of adapters on the kernels of init; they alone learn, and init is frozen in the recipe's 8
    bits. 0: all parameters learn""",
    zero_or_more("all parameters learn"),
  )
  alpha: float = field(16.0, "alpha / rank multiplies what an adapter adds", POSITIVE)
  targets: tuple[str, ...] = field(
    (".*/(qkv|out|fc1|fc2)/kernel",), "patterns of the kernels that get an adapter"
  )


class Stage(NamedTuple):
  """The steps of a run that compute alike."""

  last: int  # step
  recipe: str
  image_size: int  # 0: the model's own, in a run without `model.stages`
  patch_dropout: float

  @property
  def words(self) -> str:
    recipe = f"recipe {self.recipe}"
    if not self.image_size:
      return recipe
    return f"{self.image_size} px, patch dropout {self.patch_dropout:g}, {recipe}"


@dataclasses.dataclass(kw_only=True)
class Config:
  model: ModelConfig
  data: DataConfig = dataclasses.field(default_factory=DataConfig)
  optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
  mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
  lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
  init: str = field(
    "", 'a state dict or its folder, of open_clip or transformers; "": random parameters', PATH
  )
  init_model: str = field(
    "", """open_clip's name of the model of init; "": its folder's config, or model.size""", PATH
  )
  freeze: tuple[str, ...] = field((), """patterns of init's frozen parameters: "image/.*" """)
  loss: str = field("softmax", 'or "siglip", the sigmoid loss, with any model')
  batch_size: int = field(16384, "over all devices", AT_LEAST_1)
  # Patch dropout draws other patches after a change of `accumulate`.
  accumulate: int = field(
    1, "microbatches a batch: takes the memory of one, the loss is over all", AT_LEAST_1, MAY_CHANGE
  )
  steps: int = field(20_000, "batches to train on", AT_LEAST_1, MAY_CHANGE)
  compile_ahead: bool = field(
    True,
    "of stages (model.recipe, model.stages), the next one's step while one trains",
    MAY_CHANGE,
  )
  seed: int = field(
    0,
    "of parameters, the order of the data, crops and dropped patches",
    Limit("from 0 to 4294967295", lambda x: 0 <= x < 2**32),
  )
  log_every: int = field(50, "steps between two records of the metrics", AT_LEAST_1, MAY_CHANGE)
  watch: tuple[str, ...] = field(
    (),
    """Patterns of parameters whose gradient and RMS are recorded too, and with them each block's
    largest |feature|: "image/block_(0|11)/fc2/kernel", whether model.scan is on or off""",
    MAY_CHANGE,
  )
  eval_every: int = field(1000, "0: only at the end", zero_or_more("only at the end"), MAY_CHANGE)
  eval_batch_size: int = field(256, "over all devices", AT_LEAST_1, MAY_CHANGE)
  checkpoint_every: int = field(
    1000, "0: only at the end", zero_or_more("only at the end"), MAY_CHANGE
  )
  checkpoint_minutes: float = field(
    0.0,
    "also when so many have passed since the last; 0: off",
    zero_or_more("by steps only"),
    MAY_CHANGE,
  )
  checkpoint_keep: int = field(3, "how many of the newest checkpoints stay", AT_LEAST_1, MAY_CHANGE)
  checkpoint_keep_every: int = field(
    0, "the checkpoints at its multiples stay, too; 0: none", zero_or_more("none"), MAY_CHANGE
  )
  checkpoint_best: str = field(
    "",
    """A score, such as "zero_shot_top1": the checkpoint with the best stays, too, and each
    evaluated step has one. Of a loss the least is the best. "": none""",
    MAY_CHANGE,
  )
  max_hours: float = field(
    0.0,
    """The run saves and stops when it has taken so many hours in one start (exit code 75), but not
    before the start's first step: a start that takes longer gets on, too. 0: no limit""",
    zero_or_more("no limit"),
    MAY_CHANGE,
  )
  wandb_project: str = field("", '"": no Weights & Biases', MAY_CHANGE)
  step_timeout_seconds: int = field(
    600,
    """A run that waits longer for a step or its batch ends with a message;
    three times that for the first step. 0: it waits forever.""",
    zero_or_more("no limit"),
    MAY_CHANGE,
  )
  pause_timeout_seconds: int = field(
    3600, "the same for an evaluation or a checkpoint", zero_or_more("no limit"), MAY_CHANGE
  )
  profile_steps: str = field(
    "", '"a:b": writes a trace of steps a to b to workdir/profile; "": off', MAY_CHANGE
  )

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

  def stages(self) -> tuple[Stage, ...]:
    """The steps from each end in `model.recipe` or `model.stages` to the next.

    Raises:
      ValueError: one of them is no schedule, or has no such images.
    """
    recipes, images = self.schedule("recipe"), self.schedule("stages")
    ends = sorted({last for _, last in (*recipes, *images)})
    return tuple(
      Stage(last, value_at(recipes, last), *self._images(value_at(images, last))) for last in ends
    )

  def schedule(self, name: str) -> tuple[tuple[str, int], ...]:
    """The values in turn of `model.recipe` or `model.stages`, each with its last step.

    Raises:
      ValueError: an end is no share of the steps and no step, or a value has no steps.
    """
    text = getattr(self.model, name)
    value, *parts = re.split(r"(?:^|\s)until(?:\s|$)", text)
    if not parts:
      return ((text.strip(), self.steps),)
    values: list[tuple[str, int]] = []
    for part in parts:
      end, _, following = part.partition(",")
      values.append((value.strip(), _last_step(name, text, end.strip(), self.steps)))
      value = following
    values.append((value.strip(), self.steps))
    _check_values(name, text, values)
    return tuple(values)

  def _images(self, text: str) -> tuple[int, float]:
    """The size of images and the patch dropout of a part of `model.stages`."""
    if not self.model.stages:
      return 0, self.model.patch_dropout
    match = re.fullmatch(r"([1-9][0-9]{0,4})px(?:\s+drop\s+(0?\.[0-9]+|0))?", text)
    if not match:
      raise ValueError(
        f"model.stages={self.model.stages!r}: {text!r} must be a size in pixels, such as '98px', or"
        " with a share of the patches to drop, at least 0 and less than 1: '98px drop 0.5'."
      )
    size, dropout = match.groups()
    return int(size), self.model.patch_dropout if dropout is None else float(dropout)

  def stage(self, step: int) -> int:
    """The index of the stage of a step; the last one's for later steps."""
    return sum(step > stage.last for stage in self.stages()[:-1])

  def at(self, step: int) -> "Config":
    """The same config with the recipe of a step alone."""
    recipe = value_at(self.schedule("recipe"), step)
    return dataclasses.replace(self, model=dataclasses.replace(self.model, recipe=recipe))

  def check(self) -> None:
    """Raises a ValueError that names the first field with an invalid value.

    A path to another machine is a RunError.

    The names of sizes, recipes, backends, losses and optimizers are checked where they are known
    (train/run.py), before data are touched as well.
    """
    for path, each in all_fields().items():
      check(path, each, self.get(path))
    if not self.init and self.init_model:
      raise ValueError(f"init_model={self.init_model!r} is the model of init, which is not set.")
    dtype, exchange = self.mesh.gradient_dtype, self.mesh.gradient_exchange
    if dtype != "float32" and exchange != "float32":
      raise ValueError(
        f"mesh.gradient_exchange={exchange!r} sums in float32, mesh.gradient_dtype={dtype!r} does"
        " not: leave one of them at 'float32'."
      )
    self._check_checkpoints()
    self._check_parametrization()
    self._check_lora()
    self.profiled()
    for name in ("train_shards", "eval_shards") if not self.data.stream else ():
      for each in getattr(self.data, name).split("::"):
        check_local(each, f"data.{name}", "; data.stream=true reads such shards where they are")
    self.stages()

  def _check_checkpoints(self) -> None:
    """Raises a ValueError for checkpoints that are to stay and would not be made."""
    kept, every = self.checkpoint_keep_every, self.checkpoint_every
    if kept and (not every or kept % every):
      raise ValueError(
        f"checkpoint_keep_every={kept} must be a multiple of checkpoint_every={every}, which must"
        " be more than 0: other steps have no checkpoint."
      )
    if self.checkpoint_best and not (self.data.eval_split or self.data.eval_data):
      raise ValueError(
        f"checkpoint_best={self.checkpoint_best!r} needs an evaluation: set data.eval_split or"
        " data.eval_data."
      )

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

  def _check_lora(self) -> None:
    """Raises a ValueError for fields that do not go with `lora.rank`."""
    if not self.lora.rank:
      return
    given = f"lora.rank={self.lora.rank}"
    if not self.init:
      raise ValueError(f"{given} adapts trained weights, and init is not set: set init.")
    if self.freeze:
      raise ValueError(f"freeze={self.freeze} must be () with {given}, which freezes all of init.")
    if len(self.schedule("recipe")) > 1:
      raise ValueError(
        f"model.recipe={self.model.recipe!r} must be one recipe with {given}: the frozen kernels"
        " are in its 8 bits."
      )
    if self.mesh.fsdp != 1:
      raise ValueError(
        f"mesh.fsdp={self.mesh.fsdp} must be 1 with {given}: each device holds the frozen kernels"
        " whole, in 8 bits."
      )

  def get(self, path: str) -> Any:
    """The value of a field or the group of that path, such as "optimizer.b1"."""
    return functools.reduce(getattr, path.split("."), self)

  @classmethod
  def from_dict(cls, values: dict) -> "Config":
    """The inverse of `to_dict`: a missing field takes its default, an unknown one is ignored."""
    return _from_dict(cls, values)


def value_at(schedule: tuple[tuple[str, int], ...], step: int) -> str:
  """The value of a `Config.schedule` at a step; the last one for later steps."""
  return next((value for value, last in schedule if step <= last), schedule[-1][0])


class _Schedule(NamedTuple):
  noun: str  # for one of its values
  example: str


_SCHEDULES = {  # By the field of ModelConfig.
  "recipe": _Schedule("recipe", "switchback until 0.9, full"),
  "stages": _Schedule("stage", "98px drop 0.5 until 0.9, 224px"),
}


def _last_step(name: str, text: str, end: str, steps: int) -> int:
  """The step of an end in a schedule: a whole number, or a share of the steps."""
  if re.fullmatch(r"[0-9]{1,15}", end):
    return int(end)
  try:
    share = float(end)
  except ValueError:
    share = math.nan
  if not 0 < share < 1:
    raise ValueError(
      f"model.{name}={text!r}: 'until {end}' must be followed by a comma and the next"
      f" {_SCHEDULES[name].noun}, and {end!r} be a share of the steps between 0 and 1, such as 0.9,"
      " or a step, such as 9000."
    )
  return round(share * steps)


def _check_values(name: str, text: str, values: list[tuple[str, int]]) -> None:
  """Raises a ValueError if a part of a schedule has no value or no step."""
  noun, example = _SCHEDULES[name]
  if not values[-1][0]:
    raise ValueError(
      f"model.{name}={text!r} must end with a {noun} without 'until', such as {example!r}."
    )
  before = 0
  for own, last in values:
    if not own:
      raise ValueError(f"model.{name}={text!r} must have a {noun} before each 'until'.")
    if last <= before:
      raise ValueError(
        f"model.{name}={text!r} leaves no step to {own!r}, after step {before} and up to step"
        f" {last} of steps={values[-1][1]}: each {noun} must end after the one before."
      )
    before = last


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


@functools.cache
def all_fields() -> dict[str, dataclasses.Field]:
  """Every field by its path, such as "optimizer.b1", in the order above."""
  return dict(_fields(Config, ""))


def marked(mark: Mark) -> set[str]:
  """The paths of the fields with a mark, such as MAY_CHANGE."""
  return {path for path, each in all_fields().items() if mark in about(each).marks}


def _fields(group: type, prefix: str) -> Iterator[tuple[str, dataclasses.Field]]:
  for each in dataclasses.fields(group):
    if dataclasses.is_dataclass(each.type):
      yield from _fields(each.type, f"{prefix}{each.name}.")
    else:
      yield prefix + each.name, each


def _from_dict(kind, value):
  if isinstance(value, dict):
    kinds = {field.name: field.type for field in dataclasses.fields(kind)}
    return kind(**{name: _from_dict(kinds[name], v) for name, v in value.items() if name in kinds})
  return tuple(value) if isinstance(value, list) else value
