"""Captions of scenes as token ids, by a grammar of tables.

A caption is an opening, up to three noun phrases with relations or "and" between them, and a place
or the background. Each part is a fixed number of slots, filled from tables of ids by gathers; empty
slots hold 0. At the end the ids that are not 0 move to the front.
"""

import jax
import jax.numpy as jnp
import numpy as np

from train.data.scenes import words
from train.data.scenes.layout import LARGE, SIDE, SMALL, Dice, Scene
from train.data.scenes.words import ids, phrases

# Ids of a noun phrase after its number and size: texture, colour and noun, the texture behind the
# noun, and three words. The forms are places in them.
_TEXTURE, _COLOUR, _NOUN, _BEHIND, _IN, _THAT, _IS = 0, 1, 2, (3, 4, 5), 6, 7, 8
_NOTHING = 9
_FORMS = np.array(
  [
    (_TEXTURE, _COLOUR, _NOUN, _NOTHING, _NOTHING),  # striped red star
    (_COLOUR, _NOUN, *_BEHIND),  # red star with stripes
    (_TEXTURE, _NOUN, _IN, _COLOUR, _NOTHING),  # striped star in red
    (_TEXTURE, _NOUN, _THAT, _IS, _COLOUR),  # striped star that is red
  ],
  np.int32,
)
_RELATION_NAMES = tuple(words.RELATIONS)


def draw_caption(key: jax.Array, scene: Scene, length: int) -> jax.Array:
  """int32 [length]: start, words, end, 0 ...; pure, so it may be traced, and mapped.

  A caption has at most 30 ids. A shorter `length` drops its last words and keeps the end.
  """
  dice = Dice(key, 64)
  # Two groups may change places in the caption; a third stays last.
  swap = (dice.below(2) == 1) & (scene.count[1] > 0)
  first, second = jnp.where(swap, 1, 0), jnp.where(swap, 0, 1)
  one_group, three_groups = scene.count[1] == 0, scene.count[2] > 0
  relation = _relation(dice, scene, swap)
  place = (scene.count.sum() == 1) & (dice.below(2) == 1)
  end = jnp.where(place, _place(dice, scene), _background(dice, scene))
  # A caption of three groups has no room for the background.
  end = jnp.where((dice.below(2) == 1) & ~three_groups, end, 0)
  parts = (
    _pick(dice, words.OPENINGS),
    _noun_phrase(dice, scene, first),
    jnp.where(one_group, 0, relation),
    jnp.where(one_group, 0, _noun_phrase(dice, scene, second)),
    jnp.where(three_groups, _pick(dice, words.AND), 0),
    jnp.where(three_groups, _noun_phrase(dice, scene, jnp.int32(2)), 0),
    end,
  )
  return _compact(jnp.concatenate(parts), length)


def _compact(slots: jax.Array, length: int) -> jax.Array:
  """The ids that are not 0 in their order, with the right articles, between start and end."""
  count = jnp.minimum((slots != 0).sum(), length - 2)
  order = jnp.argsort(slots == 0)  # stable
  dense = jnp.pad(slots[order], (0, length))[: length - 1]
  (a,), (an,) = ids(words.A), ids(words.AN)
  takes = jnp.array(words.takes_an())[jnp.roll(dense, -1)]
  dense = jnp.where((dense == a) & takes, an, dense)
  start, end = (words.VOCABULARY.index(word) for word in (words.START, words.END))
  index = jnp.arange(length - 1)
  rest = jnp.where(index < count, dense, jnp.where(index == count, end, 0))
  return jnp.concatenate([jnp.array([start]), rest]).astype(jnp.int32)


def _noun_phrase(dice: Dice, scene: Scene, group: jax.Array) -> jax.Array:
  """The 9 slots of a group: number, size, then the words of one of the forms."""
  texture, count = scene.texture[group], scene.count[group]
  several = (count > 1).astype(jnp.int32)
  # Of ten phrases seven tell texture and colour, two the colour only, one the texture only.
  told = dice.below(10)
  has_texture, has_colour = told < 8, told != 7
  whole = has_texture & has_colour
  form = jnp.where(whole, dice.below(len(_FORMS)), 0)
  behind = _pick(dice, [row for _, row in words.TEXTURES.values()], texture)
  is_are = jnp.array([*ids(words.IS), *ids(words.ARE)])[several]
  adjective = _pick(dice, [row for row, _ in words.TEXTURES.values()], texture)
  colour = _pick(dice, [row for _, row in words.COLOURS.values()], scene.colour[group])
  noun = _pick(dice, list(words.SHAPES.values()), scene.shape[group])[several]
  values = jnp.concatenate(
    [
      jnp.where(has_texture, adjective, 0),
      jnp.where(has_colour, colour, 0),
      noun[None],
      behind,
      jnp.array([*ids(words.IN), *ids(words.THAT)]),
      is_are[None],
      jnp.zeros(1, jnp.int32),
    ]
  )
  number = _pick(dice, words.NUMBERS, jnp.maximum(count, 1) - 1)
  radius = scene.radius[group]
  size = (radius >= SMALL).astype(jnp.int32) + (radius >= LARGE).astype(jnp.int32)
  size = jnp.where(dice.below(3) == 0, _pick(dice, words.SIZES, size), 0)
  return jnp.concatenate([number, size, values[jnp.array(_FORMS)[form]]])


def relations(scene: Scene) -> jax.Array:
  """bool [8]: which of RELATIONS the first group has to the second, if both are one object."""
  first, second = (
    jnp.argmax((scene.group == group) & scene.present).astype(jnp.int32) for group in (0, 1)
  )
  dx, dy = scene.x[second] - scene.x[first], scene.y[second] - scene.y[first]
  one, two = scene.radius[0], scene.radius[1]
  apart = SIDE * 3 // 16
  # Their circles overlap by a fifth of both radii.
  overlap = 25 * (dx * dx + dy * dy) < 16 * (one + two) * (one + two)
  held = jnp.stack(
    [
      *(dx > apart, dx < -apart, dy > apart, dy < -apart),
      *(overlap & (first > second), overlap & (first < second)),
      *(3 * one > 4 * two, 3 * two > 4 * one),
    ]
  )
  return held & (scene.count[0] == 1) & (scene.count[1] == 1)


def _relation(dice: Dice, scene: Scene, swap: jax.Array) -> jax.Array:
  """A relation that holds; "and" if there is none, for three groups, and in a quarter of cases."""
  held = relations(scene)
  chosen = jnp.argmax(jnp.where(held, 1 + dice.below(2**15, len(held)), 0)).astype(jnp.int32)
  chosen = jnp.where(swap, jnp.array(words.INVERSE)[chosen], chosen)
  told = _pick(dice, [words.RELATIONS[name] for name in _RELATION_NAMES], chosen)
  plain = _pick(dice, words.AND)
  plain = jnp.pad(plain, (0, len(told) - len(plain)))
  tells = held.any() & (scene.count[2] == 0) & (dice.below(4) > 0)
  return jnp.where(tells, told, plain)


def _place(dice: Dice, scene: Scene) -> jax.Array:
  """Where the only object is, by thirds of the places that its centre may have."""
  radius = scene.radius[0] * 7 // 8
  third = jnp.maximum((SIDE - 2 * radius) // 3, 1)
  column, row = (jnp.clip((w[-1] - radius) // third, 0, 2) for w in (scene.x, scene.y))
  return _pick(dice, words.PLACES, row * 3 + column)


def _background(dice: Dice, scene: Scene) -> jax.Array:
  """For example "on a shaded dark backdrop"."""
  tone = _pick(dice, [row for _, row in words.TONES.values()], scene.tone)
  pattern = _pick(dice, list(words.PATTERNS.values()), scene.pattern)
  before = jnp.array([*ids(words.ON), *ids(words.A)])
  return jnp.concatenate([before, pattern, tone, _pick(dice, words.BACKGROUNDS)])


def _pick(dice: Dice, table, row: jax.Array | None = None) -> jax.Array:
  """int32 [tokens]: one of the synonyms of a row of a table, or of a table of one row."""
  filled = phrases([table] if row is None else table)
  return jnp.array(filled)[0 if row is None else row, dice.below(filled.shape[1])]
