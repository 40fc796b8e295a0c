"""Drawn image-caption pairs: coloured shapes on dull backgrounds, described in many ways.

An image of 48x48 pixels shows one object, or two in a relation. Its captions always name colour and
shape, and some add size, place or background. Backgrounds are grey or dull, so that none has an
object's colour. The test split has single objects, all classes equally often. Every example is a
function of (split, number), so it is the same on every machine and in any order.
"""

import dataclasses
import io
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image, ImageDraw

SIZE = 48  # pixels a side
_SUPERSAMPLE = 4  # Masks are drawn this much larger and averaged, for smooth edges.

COLOURS = {
  "red": (215, 35, 40),
  "orange": (250, 135, 20),
  "yellow": (245, 220, 45),
  "green": (45, 165, 65),
  "cyan": (50, 205, 215),
  "blue": (40, 75, 215),
  "purple": (125, 45, 175),
  "pink": (250, 120, 190),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
CLASSES = tuple(f"{colour} {shape}" for colour, shape in itertools.product(COLOURS, SHAPES))

# Tones with little hue, none of them close to an object's colour.
_TONES = {
  "dark": ((28, 28, 32), (48, 46, 44), (40, 46, 52)),
  "grey": ((110, 110, 112), (128, 124, 118), (100, 108, 112)),
  "light": ((205, 205, 205), (225, 222, 214), (196, 204, 208)),
}
_PATTERNS = ("plain", "gradient", "striped", "checked", "noisy")


class Object(NamedTuple):
  colour: str
  shape: str
  x: float  # of the centre, in pixels
  y: float
  radius: float

  @property
  def name(self) -> str:
    return f"{self.colour} {self.shape}"


class Scene(NamedTuple):
  objects: tuple[Object, ...]  # one or two
  relation: str  # "left" or "above": where the first object is to the second; "" for one object
  tone: str
  pattern: str


@dataclasses.dataclass(eq=False)
class ShapesConfig(tfds.core.BuilderConfig):
  """The number of examples of each split."""

  train: int = 20_000
  val: int = 1_000
  test: int = 2_000


class Shapes(tfds.core.GeneratorBasedBuilder):
  """Coloured shapes with captions; `shapes/tiny` is for tests."""

  VERSION = tfds.core.Version("1.0.0")
  url_infos = None  # Nothing is downloaded. TFDS's default imports a package it does not install.
  BUILDER_CONFIGS = [  # noqa: RUF012
    ShapesConfig(name="full", description="20,000 images to train on."),
    ShapesConfig(name="tiny", description="For tests.", train=240, val=48, test=96),
  ]

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      description=__doc__,
      features=tfds.features.FeaturesDict(
        {
          "image": tfds.features.Image(shape=(SIZE, SIZE, 3), encoding_format="png"),
          "captions": tfds.features.Sequence(tfds.features.Text()),
          "label": tfds.features.ClassLabel(names=CLASSES),  # -1 for two objects
        }
      ),
    )

  def _split_generators(self, dl_manager):
    return {split: self._generate_examples(split) for split in ("train", "val", "test")}

  def _generate_examples(self, split: str) -> Iterator[tuple[int, dict]]:
    for i in range(getattr(self.builder_config, split)):
      rng = np.random.default_rng([*split.encode(), i])
      # The test split goes through the classes in turn; the others draw one at random.
      scene = _single(rng, i % len(CLASSES)) if split == "test" else _scene(rng)
      yield i, example(scene, rng)


def example(scene: Scene, rng: np.random.Generator) -> dict:
  """The record of a scene: image (PNG bytes), captions, label."""
  png = io.BytesIO()
  draw(scene, rng).save(png, format="png", compress_level=1)
  single = len(scene.objects) == 1
  return {
    "image": png.getvalue(),
    "captions": captions(scene, rng),
    "label": CLASSES.index(scene.objects[0].name) if single else -1,
  }


def _scene(rng: np.random.Generator) -> Scene:
  label = int(rng.integers(len(CLASSES)))
  return _single(rng, label) if rng.random() < 0.7 else _pair(rng, label)


def _single(rng: np.random.Generator, label: int) -> Scene:
  radius = rng.uniform(15, 22)
  x, y = rng.uniform(radius, SIZE - radius, 2)
  return Scene((Object(*CLASSES[label].split(), x, y, radius),), "", *_background(rng))


def _pair(rng: np.random.Generator, label: int) -> Scene:
  other = (label + int(rng.integers(1, len(CLASSES)))) % len(CLASSES)  # another class
  objects = []
  for name, centre in ((CLASSES[label], SIZE / 4), (CLASSES[other], SIZE * 3 / 4)):
    radius = rng.uniform(9.5, 11.5)
    along = centre + rng.uniform(-1, 1) * (SIZE / 4 - radius)
    across = rng.uniform(radius, SIZE - radius)
    objects.append((name, along, across, radius))
  relation = str(rng.choice(["left", "above"]))
  placed = (
    Object(*name.split(), *((a, b) if relation == "left" else (b, a)), radius)
    for name, a, b, radius in objects
  )
  return Scene(tuple(placed), relation, *_background(rng))


def _background(rng: np.random.Generator) -> tuple[str, str]:
  return str(rng.choice(list(_TONES))), str(rng.choice(_PATTERNS))


def draw(scene: Scene, rng: np.random.Generator) -> Image.Image:
  """The scene as an RGB image of SIZE x SIZE."""
  image = Image.fromarray(_background_pixels(scene.tone, scene.pattern, rng))
  for thing in scene.objects:
    colour = np.add(COLOURS[thing.colour], rng.integers(-14, 15, 3)).clip(0, 255)
    turn = rng.uniform(-10, 10)
    image.paste(tuple(int(c) for c in colour), mask=_mask(thing, turn))
  return image


def _background_pixels(tone: str, pattern: str, rng: np.random.Generator) -> np.ndarray:
  """uint8 `[SIZE, SIZE, 3]`: two shades of a tone, mixed by the pattern."""
  base = np.array(_TONES[tone][rng.integers(3)], float)
  step = rng.uniform(14, 26) * (-1 if tone == "light" else 1)
  angle, period = rng.uniform(0, math.pi), rng.uniform(5, 9)
  y, x = np.mgrid[:SIZE, :SIZE]
  across = x * math.cos(angle) + y * math.sin(angle)
  mix = {
    "plain": lambda: np.zeros((SIZE, SIZE)),
    "gradient": lambda: (across - across.min()) / np.ptp(across) * 1.5,
    "striped": lambda: across // period % 2,
    "checked": lambda: (x // period + y // period) % 2,
    "noisy": lambda: rng.uniform(0, 1.5, (SIZE, SIZE)),
  }[pattern]()
  return (base + step * mix[..., None]).clip(0, 255).astype(np.uint8)


def _mask(thing: Object, turn: float) -> Image.Image:
  """The part of each pixel that an object covers, rotated by `turn` degrees."""
  mask = Image.new("L", (SIZE * _SUPERSAMPLE,) * 2)
  pen = ImageDraw.Draw(mask)
  x, y, radius = (v * _SUPERSAMPLE for v in (thing.x, thing.y, thing.radius))
  if thing.shape in ("circle", "ring"):
    pen.circle((x, y), radius, fill=255)
    if thing.shape == "ring":
      pen.circle((x, y), radius * 0.55, fill=0)
  else:
    angles = np.radians(_OUTLINES[thing.shape][0] + turn)
    reach = radius * _OUTLINES[thing.shape][1]
    pen.polygon([*zip(x + reach * np.sin(angles), y - reach * np.cos(angles), strict=True)], 255)
  return mask.reduce(_SUPERSAMPLE)


def _cross_outline() -> tuple[np.ndarray, np.ndarray]:
  arm = math.degrees(math.atan(0.36))  # half an arm's width, seen from the centre
  quarter = [-arm, arm, 45.0]
  angles = np.concatenate([np.array(quarter) + 90 * i for i in range(4)])
  return angles, np.tile([1, 1, math.hypot(0.36, 0.36) / math.hypot(1, 0.36)], 4)


# Corners of each polygon: degrees clockwise from the top, and distance in radii.
_OUTLINES = {
  "square": (np.array([45.0, 135, 225, 315]), np.ones(4)),
  "triangle": (np.array([0.0, 120, 240]), np.ones(3)),
  "star": (np.arange(10) * 36.0, np.tile([1, 0.42], 5)),
  "cross": _cross_outline(),
}

_OPENINGS = (
  "{}",
  "a picture of {}",
  "an image of {}",
  "a drawing of {}",
  "a photo of {}",
  "there is {}",
  "this shows {}",
  "here we see {}",
)
_SIMPLE = ("{a} {c} {s}", "{a} {c} {s}", "a {s} in {c}", "a {s} that is {c}", "one {c} {s}")
_DETAILED = (
  "{z_a} {z} {c} {s}",
  "{a} {c} {s} {p}",
  "{a} {c} {s} on {b}",
  "{z_a} {z} {c} {s} on {b}",
  "{z_a} {z} {c} {s} {p}",
)
_RELATIONS = {
  "left": (("to the left of", "left of", "on the left side of"), ("to the right of", "right of")),
  "above": (("above", "over", "higher than"), ("below", "under", "beneath")),
}
_TONE_WORDS = {"dark": ("dark", "black"), "grey": ("grey", "gray"), "light": ("light", "pale")}
_PATTERN_WORDS = {
  "plain": ("plain ", ""),
  "gradient": ("shaded ", ""),
  "striped": ("striped ",),
  "checked": ("checked ", "chequered "),
  "noisy": ("noisy ", "grainy "),
}


def captions(scene: Scene, rng: np.random.Generator) -> list[str]:
  """Five different sentences, each with every object's colour and shape."""
  sentence = _of_one if len(scene.objects) == 1 else _of_two
  sentences: dict[str, None] = {}  # an ordered set
  while len(sentences) < 5:
    sentences[_pick(rng, _OPENINGS).format(sentence(scene, rng))] = None
  return list(sentences)


def _of_one(scene: Scene, rng: np.random.Generator) -> str:
  thing = scene.objects[0]
  size = _pick(rng, _size_words(thing.radius))
  return _pick(rng, _SIMPLE if rng.random() < 0.5 else _DETAILED).format(
    a=_article(thing.colour),
    c=thing.colour,
    s=thing.shape,
    z_a=_article(size),
    z=size,
    p=_place(thing),
    b=_background_words(scene, rng),
  )


def _of_two(scene: Scene, rng: np.random.Generator) -> str:
  first, second = (f"{_article(thing.colour)} {thing.name}" for thing in scene.objects)
  forward, backward = _RELATIONS[scene.relation]
  form = rng.integers(4)
  if form == 0:
    return f"{first} and {second}"
  if form == 1:
    return f"{second} {_pick(rng, backward)} {first}"
  end = f" on {_background_words(scene, rng)}" if form == 2 else ""
  return f"{first} {_pick(rng, forward)} {second}{end}"


def _background_words(scene: Scene, rng: np.random.Generator) -> str:
  tone, pattern = _pick(rng, _TONE_WORDS[scene.tone]), _pick(rng, _PATTERN_WORDS[scene.pattern])
  return f"a {pattern}{tone} background"


def _size_words(radius: float) -> tuple[str, ...]:
  if radius < 17:
    return ("small", "little", "tiny")
  return ("medium", "mid-sized") if radius < 19.5 else ("large", "big", "huge")


def _place(thing: Object) -> str:
  third = SIZE / 8  # a third of the range of centres
  row = "top" if thing.y < SIZE / 2 - third else "bottom" if thing.y > SIZE / 2 + third else ""
  column = "left" if thing.x < SIZE / 2 - third else "right" if thing.x > SIZE / 2 + third else ""
  if row and column:
    return f"in the {row} {column} corner"
  return f"at the {row}" if row else f"on the {column}" if column else "in the middle"


def _article(word: str) -> str:
  return "an" if word[0] in "aeiou" else "a"


def _pick(rng: np.random.Generator, options: tuple[str, ...]) -> str:
  return options[rng.integers(len(options))]
