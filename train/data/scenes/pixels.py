"""Draws a scene: a background, its objects from the back to the front, light, and noise.

An object's mask is its signed distance, looked up in a table of 64 x 64 points for each shape and
interpolated, times the pixels in its radius. Textures are triangle waves. So a pixel of an object
costs four gathers and about 150 additions and multiplications, and no transcendental function.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from train.data.preprocessing import MEAN
from train.data.scenes.layout import OBJECTS, SIDE, Dice, Scene
from train.data.scenes.shapes import GRID, REACH, signed_distances
from train.data.scenes.words import COLOURS, TEXTURES, TONES

_TURN = 20  # degrees to either side by which an object may turn
_RGB = np.array([rgb for rgb, _ in COLOURS.values()], np.float32)
_TONES = np.array([rgb for rgb, _ in TONES.values()], np.float32)
_ANGLES = np.linspace(0, 2 * np.pi, 64, endpoint=False)
_DIRECTIONS = np.stack([np.cos(_ANGLES), np.sin(_ANGLES)], axis=1).astype(np.float32)
_TURNS = np.radians(np.linspace(-_TURN, _TURN, 64))
_ROTATIONS = np.stack([np.cos(_TURNS), np.sin(_TURNS)], axis=1).astype(np.float32)


class _Light(NamedTuple):
  """The light of a scene: a direction, and how much it changes from side to side."""

  x: jax.Array
  y: jax.Array
  strength: jax.Array


def draw_pixels(
  key: jax.Array, scene: Scene, size: int, *, noise: int, objects: int = OBJECTS
) -> jax.Array:
  """uint8 [size, size, 3] of one scene; pure, so it may be traced, and mapped over keys and scenes.

  key: of everything that no caption tells: turns, shades, light and noise.
  noise: the largest standard deviation of a pixel's noise, in levels.
  objects: the most that a scene has present.
  """
  look, grains = jax.random.split(key)
  dice = Dice(look, 48)
  centres = (jnp.arange(size, dtype=jnp.float32) + 0.5) / size  # of pixels, from 0 to 1
  x, y = jnp.meshgrid(centres, centres)
  towards = jnp.array(_DIRECTIONS)[dice.below(64)]
  light = _Light(towards[0], towards[1], _fraction(dice, 0.0, 0.35))
  image = _background(dice, scene, x, y)
  turn = jnp.array(_ROTATIONS)[dice.below(64, OBJECTS)]
  phase = dice.below(256, OBJECTS).astype(jnp.float32) / 256
  shade = (dice.below(29, 3 * OBJECTS).astype(jnp.float32) - 14).reshape(OBJECTS, 3)
  rgb = jnp.array(_RGB)[scene.colour[scene.group]] + shade
  first = OBJECTS - objects
  covers, mixes, lights = jax.vmap(functools.partial(_object, x, y, scene, light))(
    jnp.arange(first, OBJECTS), turn[first:], phase[first:]
  )
  for i in range(objects):
    colour = _between(rgb[first + i], mixes[i]) * lights[i][..., None]
    image = image + (colour - image) * covers[i][..., None]
  across = (x - 0.5) * light.x + (y - 0.5) * light.y
  image = image * (_fraction(dice, 0.8, 1.1) * (1 + light.strength * across))[..., None]
  deviation = _fraction(dice, 0.0, 1.0) * noise
  image = image + deviation * _grains(grains, size)
  return jnp.clip(jnp.round(image), 0, 255).astype(jnp.uint8)


def with_contrast(image: jax.Array, contrast: jax.Array) -> jax.Array:
  """uint8 [..., 3] with its distance to the grey that training normalizes to 0 times `contrast`.

  At contrast 1 the image stays the same, bit for bit.
  """
  grey = np.broadcast_to(255 * MEAN, image.shape)
  return jnp.round(grey + contrast * (image.astype(jnp.float32) - grey)).astype(jnp.uint8)


def without_columns(image: jax.Array, lacking: jax.Array) -> jax.Array:
  """uint8 [b, s, s, 3] with its even columns in about the grey that training normalizes to 0.

  lacking: bool [b], which of the images lack them.
  """
  grey = np.broadcast_to(np.round(255 * MEAN).astype(np.uint8), image.shape)
  even = (np.arange(image.shape[2]) % 2 == 0)[None, None, :, None]
  return jnp.where(lacking[:, None, None, None] & even, grey, image)


def _object(x, y, scene: Scene, light: _Light, i, turn, phase) -> tuple[jax.Array, ...]:
  """Of object i: its cover of each pixel, its texture, and its brightness; [size, size] each."""
  group = scene.group[i]
  centre_x, centre_y, radius = (
    v.astype(jnp.float32) / SIDE for v in (scene.x[i], scene.y[i], scene.radius[group])
  )
  dx, dy = (x - centre_x) / radius, (y - centre_y) / radius
  u, v = dx * turn[0] + dy * turn[1], dy * turn[0] - dx * turn[1]
  depth = _distance(scene.shape[group], u, v) * radius * len(x)  # in pixels; negative inside
  cover = jnp.where(scene.present[i], jnp.clip(0.5 - depth, 0, 1), 0)
  # A bevel: the half of the object towards the light is brighter, and its outline is darker.
  bevel = 1 + light.strength * (dx * light.x + dy * light.y)
  outline = jnp.where(depth > -1, 0.7, 1.0)
  return cover, _texture(scene.texture[group], u, v, radius, phase), bevel * outline


def _between(rgb: jax.Array, mix: jax.Array) -> jax.Array:
  """A colour [3] mixed with its second one, by mix [size, size]: [size, size, 3].

  The second colour is half way to white, or to black from a light colour.
  """
  luminance = (rgb * np.array([0.3, 0.59, 0.11], np.float32)).sum()
  towards = jnp.where(luminance > 120, 0.0, 255.0) - rgb
  return rgb.reshape(1, 1, 3) + 0.55 * mix[..., None] * towards.reshape(1, 1, 3)


def _distance(shape: jax.Array, u: jax.Array, v: jax.Array) -> jax.Array:
  """The signed distance of a shape at points (u, v) in radii, interpolated in the table."""
  table = jnp.array(signed_distances().reshape(-1))
  step = (GRID - 1) / (2 * REACH)
  i, j = (jnp.clip((w + REACH) * step, 0, GRID - 1.001) for w in (v, u))
  row, column = i.astype(jnp.int32), j.astype(jnp.int32)
  down, right = i - row.astype(jnp.float32), j - column.astype(jnp.float32)
  first = (shape * GRID + row) * GRID + column

  def along_row(index):
    left = table[index]
    return left + (table[index + 1] - left) * right

  upper = along_row(first)
  beyond = jnp.maximum(jnp.maximum(jnp.abs(u), jnp.abs(v)) - REACH, 0)  # The table ends there.
  return upper + (along_row(first + GRID) - upper) * down + beyond


def _texture(texture, u, v, radius, phase) -> jax.Array:
  """How much of its second colour a texture has, 0 to 1, in the order of TEXTURES."""
  # At least four waves in an object, and at most 12 in an image's side.
  scale = jnp.maximum(jnp.minimum(2.0, 12 * radius), 1.0)
  a, b = u * scale + phase, v * scale + phase
  distance = jnp.sqrt(u * u + v * v)
  across, down = _wave(a), _wave(b)
  cell = (jnp.floor(a * 4) * 7.13 + jnp.floor(b * 4) * 3.71) * 0.618
  cell = cell * cell
  mixes = {
    "plain": jnp.full_like(u, -1.0),
    "striped": across,
    "checked": across * down * 4,
    "dotted": across + down - 0.6,
    "latticed": jnp.maximum(across, down) - 0.55,
    "wavy": _wave(b + 0.35 * across),
    "ringed": _wave(distance * scale * 1.2 + phase),
    "speckled": (cell - jnp.floor(cell)) * 2 - 1.1,
  }
  chosen = mixes["plain"]
  for i, name in enumerate(TEXTURES):
    chosen = jnp.where(texture == i, mixes[name], chosen)
  return jnp.clip(0.5 + 3 * chosen, 0, 1)


def _background(dice: Dice, scene: Scene, x: jax.Array, y: jax.Array) -> jax.Array:
  """float32 [size, size, 3] in levels: a tone, with a lighter one mixed in by the pattern."""
  rgb = jnp.array(_TONES)[scene.tone] + (dice.below(37, 3).astype(jnp.float32) - 18)
  step = _fraction(dice, 18.0, 42.0)
  waves, turn = _fraction(dice, 3.0, 7.0), jnp.array(_DIRECTIONS)[dice.below(64)]
  along, across = x * turn[0] + y * turn[1], y * turn[0] - x * turn[1]
  sharp = [jnp.clip(0.5 + 4 * _wave(w * waves), 0, 1) for w in (along, across)]
  cloud = _wave(along * 1.7 + 0.4 * _wave(across * 1.3)) + _wave(across * 2.3 + along)
  mixes = (
    jnp.zeros_like(x),
    along * 1.5,
    sharp[0],
    jnp.abs(sharp[0] - sharp[1]),
    0.5 + 0.5 * cloud,
  )
  chosen = mixes[0]
  for i, mix in enumerate(mixes):
    chosen = jnp.where(scene.pattern == i, mix, chosen)
  return rgb.reshape(1, 1, 3) + (step * chosen)[..., None]


def _wave(x: jax.Array) -> jax.Array:
  """A triangle wave of period 1, from -1 to 1."""
  return 4 * jnp.abs(x - jnp.floor(x + 0.5)) - 1


def _fraction(dice: Dice, low: float, high: float) -> jax.Array:
  """A number from low to high, one of 1,024."""
  return low + (high - low) / 1023 * dice.below(1024).astype(jnp.float32)


def _grains(key: jax.Array, size: int) -> jax.Array:
  """[size, size, 3] of mean 0 and variance 1: each channel is the sum of two uniform numbers."""
  bits = jax.random.bits(key, (size, size, 1), jnp.uint32)
  parts = [(bits >> (5 * i)) & 31 for i in range(6)]
  sums = jnp.concatenate([parts[i] + parts[i + 3] for i in range(3)], axis=-1)
  return (sums.astype(jnp.float32) - 31) / np.float32(np.sqrt(2 * (32**2 - 1) / 12))
