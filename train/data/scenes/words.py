"""The words of drawn scenes: shapes, colours, textures, and the phrases of their captions.

All tables are tuples of texts, one entry for each thing and each of its synonyms. A text has words
that stand in VOCABULARY, divided by single spaces. `ids` turns a table into token ids.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

PAD, START, END, UNKNOWN = "<pad>", "<start_of_text>", "<end_of_text>", "<unk>"

# Singular and plural of each noun. train/data/scenes/shapes.py draws the shape of that name.
SHAPES = {
  "circle": ("circle circles", "disc discs"),
  "square": ("square squares", "box boxes"),
  "triangle": ("triangle triangles", "delta deltas"),
  "star": ("star stars", "pentagram pentagrams"),
  "cross": ("cross crosses", "plus pluses"),
  "ring": ("ring rings", "hoop hoops"),
  "heart": ("heart hearts",),
  "crescent": ("crescent crescents", "moon moons"),
  "arrow": ("arrow arrows", "pointer pointers"),
  "frame": ("frame frames",),
  "diamond": ("diamond diamonds", "rhombus rhombuses"),
  "pentagon": ("pentagon pentagons",),
  "octagon": ("octagon octagons",),
  "hexagram": ("hexagram hexagrams",),
  "sunburst": ("sunburst sunbursts", "sun suns"),
  "asterisk": ("asterisk asterisks",),
  "chevron": ("chevron chevrons",),
  "ellipse": ("ellipse ellipses", "oval ovals"),
  "rectangle": ("rectangle rectangles", "bar bars"),
  "capsule": ("capsule capsules", "pill pills"),
  "semicircle": ("semicircle semicircles", "dome domes"),
  "wedge": ("wedge wedges",),
  "trapezoid": ("trapezoid trapezoids", "trapezium trapeziums"),
  "parallelogram": ("parallelogram parallelograms",),
  "kite": ("kite kites",),
  "teardrop": ("teardrop teardrops", "drop drops"),
  "flower": ("flower flowers", "blossom blossoms"),
  "gear": ("gear gears", "cog cogs"),
  "lightning": ("lightning lightnings", "bolt bolts"),
  "hourglass": ("hourglass hourglasses",),
  "house": ("house houses", "hut huts"),
  "cloud": ("cloud clouds",),
}

# sRGB and words of each colour. Ten, as tables of held-out triples need, or twenty.
COLOURS = {
  "red": ((214, 38, 40), ("red", "scarlet")),
  "orange": ((247, 134, 24), ("orange",)),
  "yellow": ((246, 222, 50), ("yellow",)),
  "green": ((34, 150, 62), ("green",)),
  "cyan": ((60, 208, 220), ("cyan", "aqua")),
  "blue": ((44, 84, 220), ("blue",)),
  "purple": ((112, 44, 160), ("purple",)),
  "pink": ((250, 140, 190), ("pink", "rosy")),
  "white": ((246, 246, 246), ("white",)),
  "black": ((18, 18, 20), ("black",)),
  "lime": ((160, 226, 40), ("lime",)),
  "teal": ((14, 128, 128), ("teal",)),
  "navy": ((22, 34, 104), ("navy",)),
  "violet": ((166, 112, 240), ("violet", "lavender")),
  "magenta": ((220, 36, 170), ("magenta", "fuchsia")),
  "maroon": ((118, 16, 34), ("maroon", "burgundy")),
  "brown": ((124, 74, 34), ("brown",)),
  "tan": ((214, 178, 132), ("tan", "beige")),
  "olive": ((120, 122, 28), ("olive",)),
  "grey": ((130, 130, 132), ("grey", "gray")),
}

# Adjectives of each texture, and what may follow the noun instead.
TEXTURES = {
  "plain": (("plain", "solid"), ("", "without pattern")),
  "striped": (("striped", "stripy"), ("with stripes", "with bands")),
  "checked": (("checked", "chequered"), ("with checks", "with squares inside")),
  "dotted": (("dotted", "spotted"), ("with dots", "with spots")),
  "latticed": (("latticed", "gridded"), ("with a grid", "with a lattice")),
  "wavy": (("wavy",), ("with waves", "with wavy lines")),
  "ringed": (("ringed", "concentric"), ("with rings inside", "with circles inside")),
  "speckled": (("speckled", "mottled"), ("with speckles", "with grains")),
}

SIZES = (("small", "little", "tiny"), ("", "medium"), ("large", "big", "huge"))
NUMBERS = (
  ("a", "one", "a"),
  ("two", "2", "a pair of"),
  ("three", "3", "a trio of"),
  ("four", "4", "four"),
  ("five", "5", "five"),
)

# The first group of objects is ... the second.
RELATIONS = {
  "left": ("left of", "to the left of", "on the left side of"),
  "right": ("right of", "to the right of", "on the right side of"),
  "above": ("above", "over", "higher than"),
  "below": ("below", "under", "lower than"),
  "front": ("in front of", "partly covering", "in front of"),
  "behind": ("behind", "partly behind", "partly hidden by"),
  "larger": ("larger than", "bigger than", "that is larger than"),
  "smaller": ("smaller than", "smaller than", "that is smaller than"),
}
INVERSE = (1, 0, 3, 2, 5, 4, 7, 6)  # of each relation, when the groups change places
AND = ("and", "with", "together with")

# Rows from the top, columns from the left.
PLACES = (
  ("at the top left", "in the top left corner"),
  ("at the top", "near the top edge"),
  ("at the top right", "in the top right corner"),
  ("on the left", "near the left edge"),
  ("in the middle", "in the centre"),
  ("on the right", "near the right edge"),
  ("at the bottom left", "in the bottom left corner"),
  ("at the bottom", "near the bottom edge"),
  ("at the bottom right", "in the bottom right corner"),
)

TONES = {  # sRGB and words of each tone of a background
  "dark": ((50, 50, 54), ("dark", "dim")),
  "light": ((208, 206, 200), ("light", "pale")),
  "warm": ((150, 116, 92), ("warm", "earthy")),
  "cool": ((92, 118, 146), ("cool", "bluish")),
  "mossy": ((98, 126, 96), ("mossy", "greenish")),
}
PATTERNS = {
  "even": ("", "even"),
  "shaded": ("shaded", "graded"),
  "barred": ("barred", "lined"),
  "tiled": ("tiled", "tiled"),
  "cloudy": ("cloudy", "blotchy"),
}
BACKGROUNDS = ("background", "backdrop")

OPENINGS = (
  *("", "", "a picture of", "an image of", "a photo of", "a drawing of"),
  *("this shows", "here we see", "a view of", "a scene with"),
)
TEMPLATES = ("a {}", "a picture of a {}", "a photo of a {}", "this shows one {}")

A, AN = "a", "an"
IN, THAT, IS, ARE, ON = "in", "that", "is", "are", "on"


def _texts(table: Any) -> list[str]:
  return [table] if isinstance(table, str) else [text for each in table for text in _texts(each)]


def _words() -> list[str]:
  tables = (
    list(SHAPES.values()),
    [words for _, words in COLOURS.values()],
    list(TEXTURES.values()),
    [words for _, words in TONES.values()],
    *(SIZES, NUMBERS, list(RELATIONS.values()), AND, PLACES, list(PATTERNS.values())),
    *(BACKGROUNDS, OPENINGS, (A, AN, IN, THAT, IS, ARE, ON)),
    [template.replace("{}", "") for template in TEMPLATES],
  )
  return sorted({word for text in _texts(tables) for word in text.split()})


WORDS = tuple(_words())
VOCABULARY = (PAD, START, END, UNKNOWN, *WORDS)  # in the order of their ids
_IDS = {word: i for i, word in enumerate(VOCABULARY)}


def ids(text: str) -> list[int]:
  """The token ids of words divided by spaces; [] for "".

  >>> [VOCABULARY[i] for i in ids("left of")]
  ['left', 'of']
  """
  return [_IDS[word] for word in text.split()]


def phrases(table: Sequence[Sequence[str]]) -> np.ndarray:
  """int32 [things, synonyms, tokens]: the ids of a table of phrases, with 0 after a phrase's end.

  A thing with fewer synonyms than another repeats its own.

  >>> phrases([["left of", "above"], ["behind"]]).shape
  (2, 2, 2)
  """
  synonyms = max(len(row) for row in table)
  tokens = max(len(ids(text)) for row in table for text in row)
  filled = [[row[i % len(row)] for i in range(synonyms)] for row in table]
  rows = [[ids(text) + [0] * (tokens - len(ids(text))) for text in row] for row in filled]
  return np.array(rows, np.int32)


def takes_an() -> np.ndarray:
  """bool [len(VOCABULARY)]: before which words the article is "an"."""
  return np.array([word[0] in "aeiou" or word.startswith("hour") for word in VOCABULARY])
