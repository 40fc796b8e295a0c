"""Scenes without end: images and captions that the devices draw, from (seed, step, row).

`data.name="scenes"` needs no download and no disk: a batch is a jitted function of its step, and
each device draws its rows. So data cost nothing but the drawing, and a run resumes from the number
of the step. Scenes are drawn in three steps: layout.py (what is where), pixels.py (the image),
captions.py (token ids, from the tables of words.py), all with threefry keys.

Splits: "train"; "scenes", others like it, with captions; "classes", one object each of the triples
(shape, colour, texture) that training shows; "heldout", the same of the triples that it never
shows. The last three do not depend on the seed of a run.
"""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from train.config import Config
from train.data.scenes.captions import draw_caption
from train.data.scenes.layout import (
  VARIANTS,
  Scene,
  Variant,
  draw_scene,
  lacking_columns,
  shifted,
)
from train.data.scenes.pixels import draw_pixels, with_contrast, without_columns
from train.data.scenes.words import COLOURS, SHAPES, TEXTURES, VOCABULARY, WORDS
from train.data.tokenizer import Tokenizer
from train.parallel.sharding import BATCH_AXES, batch_sharding

NAME = "scenes"
_PIXELS_AT_ONCE = 2**22  # A pixel has up to a hundred bytes of masks while it is drawn.
CAPTION_LENGTH = 32  # ids of every caption of an evaluation


# Variants with steps in their names, which the functions take.
_CHANGES = {
  r"shift:(\d+(?:,\d+)*)": shifted,
  r"columns:(\d+,\d+)": lacking_columns,
}


class _Split(NamedTuple):
  number: int  # folded into the key
  size: int | None  # scenes; None: without end
  held_out: bool | None  # see draw_scene


SPLITS = {
  "train": _Split(0, None, None),
  "scenes": _Split(1, 2000, None),
  "classes": _Split(2, 40_000, False),
  "heldout": _Split(3, 20_000, True),
}


class Scenes(NamedTuple):
  """The data set "scenes", "scenes/small" for CPUs, or one for loss spikes (docs/scenes.md)."""

  config: Config
  variant: Variant

  @property
  def full_name(self) -> str:
    return self.config.data.name

  @property
  def class_names(self) -> list[str] | None:
    """ "striped red star" and so on, in the order of `Variant.triple`."""
    if not self.config.data.label_key:
      return None
    v = self.variant
    return [
      f"{texture} {colour} {shape}"
      for shape in list(SHAPES)[: v.shapes]
      for colour in list(COLOURS)[: v.colours]
      for texture in list(TEXTURES)[: v.textures]
    ]

  def identity(self) -> dict[str, object]:
    return {}  # The config says all.

  def size(self, split: str) -> int | None:
    return self._part(split)[1]

  def captions(self) -> Iterator[str]:
    """All words, in the order of their ids."""
    yield from WORDS

  def train_iterator(self, tokenizer: Tokenizer, **_) -> "Steps":
    """The number of each step; `to_devices` draws the batch.

    Raises:
      ValueError: the tokenizer does not give the ids of VOCABULARY.
    """
    ids = tokenizer([" ".join(WORDS)], len(WORDS) + 2)[0, 1:-1]
    if not np.array_equal(ids, np.arange(len(VOCABULARY) - len(WORDS), len(VOCABULARY))):
      raise ValueError(
        f"Captions of {NAME} are drawn as ids of its {len(VOCABULARY)} words: data.tokenizer must"
        f" be 'words', and data.tokenizer_vocab_size at least {len(VOCABULARY)}."
      )
    return Steps()

  def to_devices(
    self, mesh: Mesh, *, image_size: int, context_length: int
  ) -> Callable[[dict[str, np.ndarray]], dict[str, jax.Array]]:
    """A jitted function of an item of `Steps`: each device draws its rows.

    Any mesh gives the same batch.
    """
    rows = self.config.batch_size // mesh.size

    def of_device(step):
      first = jax.lax.axis_index(BATCH_AXES) * rows
      index = first.astype(jnp.uint32) + jnp.arange(rows, dtype=jnp.uint32)
      return _train_rows(self, step, index, image_size, context_length)

    on_mesh = jax.shard_map(
      of_device,
      mesh=mesh,
      in_specs=PartitionSpec(),
      out_specs=batch_sharding(mesh).spec,
      check_vma=False,
    )
    return jax.jit(lambda item: on_mesh(item["step"]))

  def eval_batches(
    self, split: str, *, image_size: int, batch_size: int
  ) -> Iterator[dict[str, Any]]:
    """ "classes" and "heldout" have no captions."""
    name, size = self._part(split)
    draw = _drawing(self.variant, name, image_size, CAPTION_LENGTH, batch_size)
    for first in range(0, size, batch_size):
      drawn = draw(np.uint32(first))
      batch = {k: np.array(drawn[k][: size - first]) for k in ("image", "text", "label")}
      described = SPLITS[name].held_out is None
      yield {
        "image": batch["image"],
        "captions": [[text_of(row)] if described else [] for row in batch["text"]],
        "label": np.full_like(batch["label"], -1) if described else batch["label"],
      }

  def _part(self, split: str) -> tuple[str, int | None]:
    """The name and the size of "classes" or "classes[:500]"; None: without end."""
    match = re.fullmatch(r"(\w+)(?:\[:(\d+)\])?", split)
    if not match or match[1] not in SPLITS:
      there = ", ".join(SPLITS)
      raise ValueError(
        f"{self.full_name} has no split {split!r}: it has {there}, and parts such as classes[:500]."
      )
    size = SPLITS[match[1]].size
    return match[1], min(size, int(match[2])) if size and match[2] else size


def open_scenes(config: Config) -> Scenes | None:
  """The data set of `data.name`; None if the name is another data set's.

  Raises:
    ValueError: there is no such variant, or it does not go with other fields.
  """
  data = config.data
  variant = find_variant(data.name)
  if variant is None:
    return None
  if data.train_shards:
    raise ValueError(f"data.name={data.name!r} cannot name an import: it names drawn scenes.")
  if data.flip:
    raise ValueError("data.flip=True would mirror scenes, whose captions tell left from right.")
  return Scenes(config, variant)


def find_variant(name: str) -> Variant | None:
  """The variant that `data.name` gives; None if the name is another data set's."""
  base, _, variant = name.partition("/")
  if base != NAME:
    return None
  for pattern, make in _CHANGES.items():
    if not (steps := re.fullmatch(pattern, variant)):
      continue
    try:
      return make([int(step) for step in steps[1].split(",")])
    except ValueError as error:
      raise ValueError(f"data.name={name!r}: {error}") from None
  if (variant or "full") not in VARIANTS:
    known = ", ".join(f"{NAME}/{known}" for known in VARIANTS)
    raise ValueError(
      f"No data set data.name={name!r}: there are {known}, {NAME}/shift:1500 or"
      f" {NAME}/shift:1500,1520,... with the steps at which the contrast changes, and"
      f" {NAME}/columns:3000,4000 with those between which images lack columns."
    )
  return VARIANTS[variant or "full"]


def text_of(ids: np.ndarray) -> str:
  """The words of a row of ids.

  >>> text_of(np.array([1, VOCABULARY.index("red"), VOCABULARY.index("star"), 2, 0]))
  'red star'
  """
  special = len(VOCABULARY) - len(WORDS)
  return " ".join(VOCABULARY[i] for i in ids if i >= special)


def _train_rows(
  scenes: Scenes, step: jax.Array, rows: jax.Array, image_size: int, context_length: int
) -> dict[str, jax.Array]:
  """{"image", "text"} of these rows of a step's batch."""
  key = jax.random.fold_in(_key("train", scenes.config.seed), step)
  drawn = _draw(key, rows, scenes.variant, None, image_size, context_length)
  image = drawn["image"]
  if scenes.variant.shifts:
    image = with_contrast(image, _contrast_at(step, scenes.variant))
  if scenes.variant.columns:
    image = without_columns(image, _lacking(step, rows, scenes.variant))
  return {"image": image, "text": drawn["text"]}


def _contrast_at(step: jax.Array, variant: Variant) -> jax.Array:
  """The contrast of the images of a step, counted from 0."""
  starts, contrasts = zip(*variant.shifts, strict=True)
  passed = (step.astype(jnp.uint32) + 1 >= jnp.array(starts, jnp.uint32)).sum()
  return jnp.array([1.0, *contrasts], jnp.float32)[passed]


def _lacking(step: jax.Array, rows: jax.Array, variant: Variant) -> jax.Array:
  """Which rows of a step, counted from 0, lack columns.

  Few whole images keep the model from forgetting them, and the gradient from rounding to 0.
  """
  first, end = (jnp.uint32(at) for at in variant.columns)
  at = step.astype(jnp.uint32) + 1
  return jnp.where((first <= at) & (at < end), rows % 128 != 0, rows % 2 == 1)


class Steps(grain.DatasetIterator):
  """Counts steps from 0: all that the host sends to draw a batch. Its state is the next step."""

  def __init__(self):
    super().__init__()
    self._step = 0

  def __next__(self) -> dict[str, np.ndarray]:
    self._step += 1
    return {"step": np.uint32(self._step - 1)}

  def get_state(self) -> dict[str, int]:
    return {"batches": self._step}

  def set_state(self, state: dict[str, int]) -> None:
    self._step = state["batches"]

  def close(self) -> None:
    """There is nothing to close."""


def _key(split: str, seed: int) -> jax.Array:
  return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), SPLITS[split].number)


@functools.cache
def _drawing(variant: Variant, split: str, image_size: int, context_length: int, rows: int):
  """A jitted function of a first row that draws that many rows of an evaluation's split."""

  def draw(first):
    index = first + jnp.arange(rows, dtype=jnp.uint32)
    held_out = SPLITS[split].held_out
    return _draw(_key(split, seed=0), index, variant, held_out, image_size, context_length)

  return jax.jit(draw)


def _draw(
  key: jax.Array,
  rows: jax.Array,
  variant: Variant,
  held_out: bool | None,
  image_size: int,
  context_length: int,
) -> dict[str, Any]:
  """The rows of a batch: "image", "text", "label" int32 [b], and the "scene" they show."""
  objects = variant.objects if held_out is None else 1

  def draw(row):
    place, look, say = jax.random.split(jax.random.fold_in(key, row), 3)
    scene: Scene = draw_scene(place, variant, held_out)
    label = variant.triple(scene.shape[0], scene.colour[0], scene.texture[0])
    return {
      "image": draw_pixels(look, scene, image_size, noise=variant.noise, objects=objects),
      "text": draw_caption(say, scene, context_length),
      "label": label.astype(jnp.int32),
      "scene": scene,
    }

  at_once = max(1, _PIXELS_AT_ONCE // image_size**2)
  if len(rows) <= at_once:
    return jax.vmap(draw)(rows)
  return jax.lax.map(draw, rows, batch_size=at_once)
