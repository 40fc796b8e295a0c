"""What a scene shows: groups of equal objects, their places and sizes, all as whole numbers.

A scene has up to three groups. The objects of a group share shape, colour and texture, and groups
differ in shape, so "three red stars" is true of at most one group. Lengths are in units of 1/256 of
the image's side. Whole numbers have the same values on every device, so captions do, too.

A tenth of all triples (shape, colour, texture) is held out: those with
(shape + 3 colour + 7 texture) % 10 == 0. Training never shows them, but it shows every pair of two
attributes, with other thirds.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from train.data.scenes.words import COLOURS, PATTERNS, SHAPES, TEXTURES, TONES

SIDE = 256  # units of length in an image's side
GROUPS, OBJECTS = 3, 5  # the most of a scene
SMALL, LARGE = 40, 62  # a smaller radius is small; this radius or more is large

# The numbers of objects in the groups of a scene; each row is drawn equally often.
_LAYOUTS = (
  *[(1, 0, 0)] * 6,
  *[(1, 1, 0)] * 5,
  *[(2, 0, 0), (3, 0, 0), (4, 0, 0), (5, 0, 0)],
  *[(2, 1, 0), (3, 1, 0), (2, 2, 0)],
  *[(1, 1, 1)] * 2,
)
# By the number of objects: the smallest radius and how many radii there are.
_RADII = np.array([(0, 1), (40, 64), (30, 42), (27, 24), (26, 22), (26, 20)], np.int32)


class Variant(NamedTuple):
  """How varied and how hard scenes are.

  shapes, colours, textures: the first of those in train/data/scenes/words.py; colours must be a
    multiple of 10, so that each shape has equally many held-out triples.
  layouts: the numbers of objects in the groups, of which one is drawn.
  noise: the largest standard deviation of a pixel's noise, of 255 levels.
  shifts: pairs (step, contrast), in order: the contrast of the images of training from that
    step on, with steps counted from 1 as in metrics.jsonl. Before the first it is 1.
  columns: half of the images of training lack every second column of pixels, and from the first
    of these steps to before the second all but one in 128. None: no image does.
  """

  shapes: int = len(SHAPES)
  colours: int = len(COLOURS)
  textures: int = len(TEXTURES)
  layouts: tuple[tuple[int, int, int], ...] = _LAYOUTS
  noise: int = 24
  shifts: tuple[tuple[int, float], ...] = ()
  columns: tuple[int, int] | None = None

  @property
  def triples(self) -> int:
    return self.shapes * self.colours * self.textures

  @property
  def objects(self) -> int:
    """The most objects of a scene."""
    return max(sum(counts) for counts in self.layouts)

  def triple(self, shape, colour, texture):
    """The number of a triple, from 0 to triples - 1; of arrays or whole numbers."""
    return (shape * self.colours + colour) * self.textures + texture


LOW_CONTRAST = 1 / 16

VARIANTS = {
  "full": Variant(),
  "hard": Variant(noise=64),
  "small": Variant(8, 10, 4, ((1, 0, 0), (1, 0, 0), (1, 1, 0), (2, 0, 0)), noise=8),
}


def shifted(steps: Sequence[int]) -> Variant:
  """The full variant at LOW_CONTRAST, at full contrast from the first step on, and so on in turn.

  Raises:
    ValueError: the steps do not increase, or one is not from 1 to 2**32 - 1.

  >>> shifted([1500, 1520]).shifts
  ((1, 0.0625), (1500, 1.0), (1520, 0.0625))
  """
  _check_steps(steps)
  contrasts = itertools.cycle((LOW_CONTRAST, 1.0))
  return VARIANTS["full"]._replace(shifts=tuple(zip((1, *steps), contrasts, strict=False)))


def lacking_columns(steps: Sequence[int]) -> Variant:
  """The full variant with `columns`; errors as those of `shifted`.

  >>> lacking_columns([3000, 4000]).columns
  (3000, 4000)
  """
  _check_steps(steps)
  first, end = steps
  return VARIANTS["full"]._replace(columns=(first, end))


def _check_steps(steps: Sequence[int]) -> None:
  if any(a >= b for a, b in itertools.pairwise((0, *steps, 2**32))):
    raise ValueError(f"steps={[*steps]} must increase, from 1 to {2**32 - 1}.")


class Scene(NamedTuple):
  """One scene; int32 arrays of [GROUPS] and of [OBJECTS], and scalars.

  Objects are in the order of drawing: a later one hides an earlier one. A group of 0 objects does
  not exist, and an object that is not present does not either.
  """

  shape: jax.Array  # [GROUPS]: into SHAPES
  colour: jax.Array  # [GROUPS]: into COLOURS
  texture: jax.Array  # [GROUPS]: into TEXTURES
  count: jax.Array  # [GROUPS]: objects, 0 to 5
  radius: jax.Array  # [GROUPS]: of each of its objects
  group: jax.Array  # [OBJECTS]: of each object
  present: jax.Array  # bool [OBJECTS]
  x: jax.Array  # [OBJECTS]: the centre, from the left
  y: jax.Array  # [OBJECTS]: the centre, from the top
  tone: jax.Array  # []: into TONES
  pattern: jax.Array  # []: into PATTERNS


class Dice:
  """Random whole numbers from one key: each call takes the next of `count` words of 32 bits."""

  def __init__(self, key: jax.Array, count: int):
    self._bits = jax.random.bits(key, (count,), jnp.uint32)
    self._used = 0

  def below(self, n: int | jax.Array, count: int | None = None) -> jax.Array:
    """int32 [] or [count], each from 0 to n - 1, for n up to 65,536; exact on every device."""
    first, self._used = self._used, self._used + (count or 1)
    if self._used > len(self._bits):
      raise ValueError(f"The dice have {len(self._bits)} words, and {self._used} are needed.")
    bits = self._bits[first : self._used] >> 16
    drawn = ((bits * jnp.asarray(n).astype(jnp.uint32)) >> 16).astype(jnp.int32)
    return drawn if count else drawn[0]


def is_held_out(shape, colour, texture):
  """Whether training never shows a triple; of arrays or whole numbers.

  >>> is_held_out(3, 2, 3), is_held_out(4, 2, 3)
  (True, False)
  """
  return (shape + 3 * colour + 7 * texture) % 10 == 0


@functools.cache
def allowed(variant: Variant, held_out: bool) -> np.ndarray:
  """int32 [shapes, N, 2]: the (colour, texture) of each shape that are held out, or are not."""
  if variant.colours % 10:
    raise ValueError(f"colours={variant.colours} must be a multiple of 10.")
  colour, texture = np.indices((variant.colours, variant.textures))
  rows = [
    np.argwhere(is_held_out(shape, colour, texture) == held_out) for shape in range(variant.shapes)
  ]
  return np.array(rows, np.int32)


def draw_scene(key: jax.Array, variant: Variant, held_out: bool | None = None) -> Scene:
  """The scene of a key; pure, so it may be traced, and mapped over keys.

  held_out: None: scenes for training. True: one object, of a held-out triple. False: one object, of
    another triple.
  """
  dice = Dice(key, 48)
  layouts = variant.layouts if held_out is None else ((1, 0, 0),)
  layout = dice.below(len(layouts))
  count = jnp.array(layouts, jnp.int32)[layout]
  shape, colour, texture = _triples(dice, variant, bool(held_out))
  low, radii = jnp.array(_RADII)[count.sum()]
  radius = low + jnp.stack([dice.below(radii) for _ in range(GROUPS)])
  # The objects of the layout in a random order, after those that are not present.
  groups, there = _objects(layouts)
  group, present = jnp.array(groups)[layout], jnp.array(there)[layout]
  order = jnp.argsort(dice.below(2**16, OBJECTS) + jnp.where(present, 2**16, 0))
  group, present = group[order], present[order]
  x, y = _centres(dice, count.sum(), radius[group])
  return Scene(
    *(shape, colour, texture, count, radius, group, present, x, y),
    tone=dice.below(len(TONES)),
    pattern=dice.below(len(PATTERNS)),
  )


def _triples(dice: Dice, variant: Variant, held_out: bool) -> tuple[jax.Array, ...]:
  """Shape, colour and texture of each group, [GROUPS] each; no two groups have the same shape."""
  n, pairs = variant.shapes, allowed(variant, held_out)
  first = dice.below(n)
  second = (first + 1 + dice.below(n - 1)) % n
  third = dice.below(n - 2)  # of the shapes without those two
  third = third + (third >= jnp.minimum(first, second)).astype(jnp.int32)
  third = third + (third >= jnp.maximum(first, second)).astype(jnp.int32)
  shape = jnp.stack([first, second, third])
  colour, texture = jnp.array(pairs)[shape, dice.below(pairs.shape[1], GROUPS)].T
  return shape, colour, texture


def _objects(layouts: Sequence[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray]:
  """The group of each object of each layout, and whether it is present, [layouts, OBJECTS]."""
  rows = [np.repeat(np.arange(GROUPS), counts) for counts in layouts]
  groups = [np.pad(row, (0, OBJECTS - len(row))) for row in rows]
  present = [np.arange(OBJECTS) < len(row) for row in rows]
  return np.array(groups, np.int32), np.array(present)


def _centres(dice: Dice, n: jax.Array, radius: jax.Array) -> tuple[jax.Array, jax.Array]:
  """x and y of n objects that are the last ones of [OBJECTS]."""
  one = [_within(dice, radius[-1] * 7 // 8) for _ in range(2)]
  two = _pair(dice, radius)
  cells = jnp.argsort(dice.below(2**16, 9))[:OBJECTS]
  many = [
    SIDE // 6 + SIDE // 3 * place + dice.below(21, OBJECTS) - 10
    for place in (cells % 3, cells // 3)
  ]
  x, y = (
    jnp.where(n == 1, a, jnp.where(n == 2, b, c)) for a, b, c in zip(one, two, many, strict=True)
  )
  return x.astype(jnp.int32), y.astype(jnp.int32)


def _within(dice: Dice, margin: jax.Array) -> jax.Array:
  """A place at least `margin` from both ends of a side."""
  return margin + dice.below(SIDE + 1 - 2 * margin)


def _pair(dice: Dice, radius: jax.Array) -> list[jax.Array]:
  """x and y, [OBJECTS] each, of two objects, 0.65 to 1.3 sums of their radii apart."""
  both = radius[-1] + radius[-2]
  distance = jnp.minimum(both * (166 + dice.below(167)) // 256, SIDE - both)
  angles = np.arange(64) * (2 * np.pi / 64)
  angle, places = dice.below(64), []
  for steps in (np.cos(angles), np.sin(angles)):
    offset = distance * jnp.array(np.round(steps * 256).astype(np.int32))[angle] // 256
    # Both objects are inside: the first centre leaves room for the first radius and the second's.
    low = jnp.maximum(radius[-2], radius[-1] - offset)
    high = SIDE - jnp.maximum(radius[-2], radius[-1] + offset)
    start = low + dice.below(jnp.maximum(high - low, 0) + 1)
    places.append(jnp.full(OBJECTS, start).at[-1].add(offset))
  return places
