"""CLIPTask: the interface between training and the model.

The step, the loop and the run use a model only through its task. Another model needs another class
like CLIPTask, and rules for its parameters in train/parallel/sharding.py.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from sbjax.interop.config_files import read_config
from sbjax.linear.lora import add_lora
from sbjax.models.clip import CLIP
from sbjax.models.sizes import CLIPConfig, kept_patches
from sbjax.models.text_groups import Groups, choose_groups, text_fits
from sbjax.models.transformer import BlockOptions, unstack_blocks
from sbjax.studies.unit_scaling import scaled
from train.config import Config, LoraConfig, ModelConfig
from train.data.preprocessing import normalize, statistics_of
from train.data.tokenizer import Tokenizer
from train.finetune import adapters, frozen_base
from train.loss import LOSSES
from train.optimizer import matrix_dtype
from train.zero_shot import Encoders, Sample, evaluate, make_encoders, nearest_captions

# Dense bfloat16 operations a second, from NVIDIA's data sheets and
# https://docs.cloud.google.com/tpu/docs/v6e and its like for other TPUs. A device of a v4 or v5p is
# a chip with both of its cores. Other devices get no MFU.
BF16_PEAK = {
  "NVIDIA H200": 989.4e12,
  "NVIDIA H100 80GB HBM3": 989.4e12,
  "NVIDIA A100-SXM4-40GB": 312e12,
  "NVIDIA A100-SXM4-80GB": 312e12,
  "TPU v4": 275e12,
  "TPU v5 lite": 197e12,  # v5e
  "TPU v5": 459e12,  # v5p
  "TPU v6 lite": 918e12,  # v6e
}


class CLIPTask(NamedTuple):
  """CLIP on batches {"image": uint8 [B, S, S, 3], "text": int32 [B, L]}."""

  model: CLIP
  contrast: Callable = LOSSES["softmax"]  # or another of LOSSES
  matrix_dtype: jnp.dtype = jnp.dtype(jnp.float32)  # of parameters that decay (train/optimizer.py)
  text_groups: Groups = ()  # of a microbatch of one device, in training (sbjax.models.text_groups)
  lora: LoraConfig | None = None  # of adapters, which alone learn

  name = "CLIP"

  def with_options(self, options: BlockOptions) -> "CLIPTask":
    """The same task, whose model computes in another way."""
    return self._replace(model=self.model.clone(options=options))

  def with_recipe(self, recipe: str) -> "CLIPTask":
    """The same task with another recipe.

    Raises:
      ValueError: it is unknown, or its rules do not fit the linear layers.
    """
    task = self.with_options(dataclasses.replace(self.model.options, recipe=recipe))
    jax.eval_shape(lambda: task.model.init(jax.random.key(0), method="scale"))
    return task

  def with_images(self, size: int, patch_dropout: float) -> "CLIPTask":
    """The same task, whose steps take images of a size, or of the model's own if it is 0.

    Raises:
      ValueError: the patches do not divide it, or it is larger than the model's own.
    """
    own = size in (0, self.model.config.vision.image_size)
    model = self.model.clone(patch_dropout=patch_dropout, train_image_size=None if own else size)
    jax.eval_shape(lambda: model.init(jax.random.key(0), method="scale"))
    return self._replace(model=model)

  def with_tokenizer(self, tokenizer: Tokenizer) -> "CLIPTask":
    """The same task with the tokenizer's vocabulary in place of the size's own."""
    size = self.model.config
    text = dataclasses.replace(size.text, vocab_size=tokenizer.vocab_size, eot_id=tokenizer.eot_id)
    return self._replace(model=self.model.clone(config=dataclasses.replace(size, text=text)))

  def with_text_groups(self, counts: Sequence[int], rows: int, batches: int, most: int):
    """The same task, which trains on texts in groups that fit such texts, if that is exact.

    counts: how many of some texts have 1, 2, ... tokens.
    rows, batches: texts of a microbatch of one device, and how many of these a step has.
    most: groups.
    """
    if not self.model.config.text.ignores_padding:
      return self
    groups = choose_groups(counts, rows, at_most=most, batches=batches)
    return self._replace(text_groups=groups)

  def text_fits(self, batch: dict) -> jax.Array:
    """bool []: whether `apply` takes these texts in its groups."""
    return text_fits(batch["text"], self.text_groups, self.model.config.text.eot_id)

  @property
  def layers(self) -> dict[str, int]:
    """The number of blocks of each tower."""
    return {"image": self.model.config.vision.layers, "text": self.model.config.text.layers}

  @property
  def example_sizes(self) -> dict[str, int]:
    """The arguments of a Source's `train_iterator` that depend on the model."""
    vision, text = self.model.config.vision, self.model.config.text
    return {"image_size": vision.image_size, "context_length": text.context_length}

  @property
  def train_sizes(self) -> dict[str, int]:
    """The same for the images of a training step; an evaluation takes those of the model."""
    sizes = self.example_sizes
    return sizes | {"image_size": self.model.train_image_size or sizes["image_size"]}

  def abstract_batch(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and dtypes of a batch."""
    size, length = self.train_sizes["image_size"], self.train_sizes["context_length"]
    return {
      "image": jax.ShapeDtypeStruct((batch_size, size, size, 3), jnp.uint8),
      "text": jax.ShapeDtypeStruct((batch_size, length), jnp.int32),
    }

  def init(self, key: jax.Array) -> dict:
    """The parameters at step 0, in float32."""
    vision, text = self.model.config.vision, self.model.config.text
    # Always stacked: drawing all layers at once compiles faster, and a run starts from the same
    # parameters with and without scan.
    options = dataclasses.replace(self.model.options, scan=True, unroll=1, recipe="full")
    params = self.model.clone(options=options).init(
      key,
      jnp.zeros((1, vision.image_size, vision.image_size, 3), jnp.float32),
      jnp.zeros((1, text.context_length), jnp.int32),
    )["params"]
    return params if self.model.options.scan else unstack_blocks(params)

  def split(self, values: dict, key: jax.Array) -> tuple[dict, Any]:
    """The parameters that learn and those that stay, of a model's float parameters."""
    if self.lora is None:
      return values, ()
    return adapters(values, self.lora, key), frozen_base(values, self.model.options)

  def joined(self, params: dict, frozen) -> dict:
    """The model's parameters, of those that learn and those that stay."""
    return params if self.lora is None else add_lora(frozen, params, self.lora.alpha)

  def apply(self, variables: dict, batch: dict, key: jax.Array, first_example) -> dict:
    """The training outputs of CLIP: a tower's "_features", "block_...", and scalars.

    first_example: the index of the first of these examples in a larger batch.
    """
    options = {"train": True, "first_example": first_example, "rngs": {"dropout": key}}
    options["text_groups"] = self.text_groups
    image = normalize(batch["image"], statistics_of(self.model.config))
    return self.model.apply(variables, image, batch["text"], **options)

  def loss(self, out: dict, axes: tuple[str, ...]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The mean loss of an example, and metrics; `axes` are the mesh axes that split the batch."""
    if self.model.options.is_unit:
      out = self._with_unit_gradients(out, axes)
    value, metrics = self.contrast(out, axes)
    return value, {**metrics, "logit_scale": out["logit_scale"]}

  def _with_unit_gradients(self, out: dict, axes: tuple[str, ...]) -> dict:
    """CLIP's outputs; the loss's gradient of the projected features has unit variance at the start.

    The mean over B pairs, the factor s on dot products and the normalisation of E features leave a
    gradient of s / (B E). We multiply by the inverse, with s of the first step: a constant, so the
    towers' gradients stay those of one function. The logit scale keeps its own gradient.
    """
    devices = math.prod(jax.lax.axis_size(axis) for axis in axes)
    batch = out["image_features"].shape[0] * devices
    backward = batch * self.model.config.embed_dim / self.model.init_logit_scale
    names = [f"{tower}_features" for tower in self.layers]
    return out | {name: scaled(out[name], 1.0, backward) for name in names}

  def flops(self, batch_size: int) -> float:
    """Floating-point operations of a step."""
    config, size = self.model.config, self.train_sizes["image_size"]
    config = dataclasses.replace(config, vision=dataclasses.replace(config.vision, image_size=size))
    return model_flops(config, batch_size, self.model.patch_dropout, self.text_groups)

  def evaluate(
    self, params, mesh: Mesh, between_batches: Callable[..., None], *args, **options
  ) -> dict[str, float]:
    """The scores of parameters on a mesh; the other arguments are train.zero_shot.evaluate's.

    between_batches: is called before each batch of images or texts, and may raise. It gets a
      function that compiles for the batch, or None if that is done.
    """

    def calling(encode):
      compiled = set()  # shapes of batches

      def call(params, batch):
        known = batch.shape in compiled
        between_batches(None if known else lambda: encode.lower(params, batch).compile())
        compiled.add(batch.shape)
        return encode(params, batch)

      return call

    encoders = self._encoders(mesh)
    encoders = encoders._replace(image=calling(encoders.image), text=calling(encoders.text))
    scalars = {name: np.asarray(x) for name, x in params.items() if name.startswith("logit_")}
    scale = self.model.apply({"params": scalars}, method="scale")
    return evaluate(encoders, params, *args, logit_scale=float(scale), **options)

  def samples(self, params, mesh: Mesh, *args, **options) -> list[Sample]:
    """Images with their nearest captions; the other arguments are `nearest_captions`'s."""
    return nearest_captions(self._encoders(mesh), params, *args, **options)

  def _encoders(self, mesh: Mesh) -> Encoders:
    """The same for all images of training, so that they are compiled once."""
    return make_encoders(self.model.clone(patch_dropout=0.0, train_image_size=None), mesh)


def make_task(config: Config) -> CLIPTask:
  """The CLIP of the config's size, options and loss; its vocabulary is the size's own.

  It has the recipe of the first step and the images of the last; those of all stages are checked.

  Raises:
    ValueError: one of these names nothing.
  """
  size = _size(config.model)
  first = block_options(config.at(0).model)
  options = dataclasses.replace(first, block_maxima=bool(config.watch))
  if config.loss not in LOSSES:
    raise ValueError(f"loss={config.loss!r} is none of {', '.join(LOSSES)}.")
  siglip = {"init_logit_scale": 10.0, "init_logit_bias": -10.0} if config.loss == "siglip" else {}
  last = config.stages()[-1]
  model = CLIP(size, options, patch_dropout=last.patch_dropout, **siglip)
  lora = config.lora if config.lora.rank else None
  task = CLIPTask(model, LOSSES[config.loss], matrix_dtype(config.optimizer.states), lora=lora)
  _check_stages(config, task)
  return task


def _check_stages(config: Config, task: CLIPTask) -> None:
  """Raises a ValueError for recipes or images that do not fit the model."""
  *_, last = stages = config.stages()
  own = task.example_sizes["image_size"]
  try:
    name = "recipe"
    for recipe in dict.fromkeys(stage.recipe for stage in stages[1:]):
      task.with_recipe(recipe)
    name = "stages"
    for stage in stages:
      task.with_images(stage.image_size, stage.patch_dropout)
    if last.image_size not in (0, own):
      raise ValueError(
        f"the last stage's {last.image_size}px must be the model's image_size={own}, whose position"
        f" embedding is saved: end with '{own}px'."
      )
  except ValueError as error:
    raise ValueError(f"model.{name}={getattr(config.model, name)!r}: {error}") from error


def _size(c: ModelConfig) -> CLIPConfig:
  """The size that a ModelConfig names, with the fields that it changes."""
  size = _named_size(c.size)
  vision = dataclasses.replace(
    size.vision,
    image_size=c.image_size or size.vision.image_size,
    patch_size=c.patch_size or size.vision.patch_size,
  )
  context_length = c.context_length or size.text.context_length
  text = dataclasses.replace(size.text, context_length=context_length)
  return CLIPConfig(size.embed_dim, vision, text)


def _named_size(name: str) -> CLIPConfig:
  """An architecture that training supports, by `model.size`."""
  try:
    size = read_config(name)
  except ValueError as error:
    raise ValueError(f"model.size={name!r}: {error}") from error
  if size.text.pool == "last" and size.vision.pool != "map":
    raise ValueError(
      f"model.size={name!r} is a CLIPA. Training does not have its tokenizer (BERT's) and its"
      " preparation of images (ImageNet's statistics, bilinear); the library's CLIP runs it."
    )
  return size


def block_options(config: ModelConfig) -> BlockOptions:
  """The BlockOptions with the values of a ModelConfig's fields of the same names.

  remat="auto" is "none" here: train/memory.py replaces it before a step is compiled.
  """
  values = dataclasses.asdict(config)
  values |= {name: values[name] or None for name in ("backend", "attention_backend", "tau")}
  if config.remat == "auto":
    values["remat"] = "none"
  if config.unroll == -1:
    values["unroll"] = 0 if jax.default_backend() == "gpu" else 1
  fields = dataclasses.fields(BlockOptions)
  return BlockOptions(**{f.name: values[f.name] for f in fields if f.name in values})


def model_flops(
  config: CLIPConfig, batch_size: int, patch_dropout: float = 0.0, text_groups: Groups = ()
) -> float:
  """Operations of a step: 6 for each weight and token, 12 * length * width for a token's attention.

  Dropped patches count in the patch embedding only, and of texts in groups their groups' positions.
  Recomputation by remat or microbatches does not count.
  """
  vision, text = config.vision, config.text
  kept = kept_patches(vision.patches, patch_dropout) + vision.tokens - vision.patches
  texts = text_groups or ((text.context_length, 1),)
  total = 0.0
  for tower, groups in ((vision, ((kept, 1),)), (text, texts)):
    weights = tower.width**2 * 4 + 2 * tower.width * int(tower.width * tower.mlp_ratio)
    rows = sum(number for _, number in groups)
    for length, number in groups:
      of_row = tower.layers * length * (6 * weights + 12 * length * tower.width)
      total += number / rows * of_row
    total += 6 * tower.width * config.embed_dim
  if vision.pool == "map":  # Keys and values of each patch; a query, an output and an MLP.
    total += kept * (12 * vision.width**2 + 12 * vision.width)
    total += 6 * vision.width * (vision.width + 2 * vision.mlp_width)
  # Pixels take no gradient.
  total += 4 * vision.patches * 3 * vision.patch_size**2 * vision.width
  return batch_size * (total + 6 * batch_size * config.embed_dim)
