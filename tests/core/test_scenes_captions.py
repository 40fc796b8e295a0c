"""Captions of drawn scenes: a parser reads them back, and all that they say is true."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pairwise import mainly
from scene_case import MANY, drawn, rows_of

from train.config import Config, DataConfig, ModelConfig
from train.data.scenes import scenes, words
from train.data.scenes.captions import draw_caption
from train.data.scenes.layout import LARGE, SIDE, SMALL, VARIANTS, Scene
from train.data.scenes.words import COLOURS, SHAPES, TEXTURES, VOCABULARY, WORDS
from train.data.tokenizer import Tokenizer, make_tokenizer


def synonyms(table) -> dict[str, int]:
  return {text: i for i, row in enumerate(table) for text in row if text}


NOUNS = {
  noun: (i, k) for i, row in enumerate(SHAPES.values()) for each in row
  for k, noun in enumerate(each.split())
}  # fmt: skip
COLOUR_WORDS = synonyms(row for _, row in COLOURS.values())
ADJECTIVES = synonyms(row for row, _ in TEXTURES.values())
BEHIND = synonyms(row for _, row in TEXTURES.values())
SIZES, NUMBERS = synonyms(words.SIZES), {**synonyms(words.NUMBERS), "an": 0}
TONES = synonyms(row for _, row in words.TONES.values())
PATTERNS = synonyms(words.PATTERNS.values())
LINKS = (("in", "that is"), ("in", "that are"))  # of one object, of several
SCENES = scenes.open_scenes(
  Config(model=ModelConfig(size=""), data=DataConfig(name="scenes", label_key="label"))
)
AFTER_A_NOUN_PHRASE = {
  **{text: ("relation", i) for text, i in synonyms(words.RELATIONS.values()).items()},
  **{text: ("place", i) for text, i in synonyms(words.PLACES).items()},
  **{text: ("and", 0) for text in words.AND},
  **{text: ("background", 0) for text in ("on a", "on an")},
}
OPENINGS = {text: 0 for text in words.OPENINGS if text}


class Reader:
  """Reads a caption from the left, by phrases of tables."""

  def __init__(self, text: str):
    self.rest = text.split()

  def take(self, table):
    """The entry of the longest phrase of the table that comes next; None if there is none."""
    for n in range(6, 0, -1):
      phrase = " ".join(self.rest[:n])
      if len(self.rest) >= n and phrase in table:
        self.rest = self.rest[n:]
        return table[phrase]
    return None


def read_noun_phrase(reader: Reader) -> dict:
  told = {"count": reader.take(NUMBERS) + 1, "size": reader.take(SIZES)}
  told["texture"], told["colour"] = reader.take(ADJECTIVES), reader.take(COLOUR_WORDS)
  told["shape"], plural = reader.take(NOUNS)
  assert plural == (told["count"] > 1)
  colour_after = {f"{link} {name}": i for link in LINKS[plural] for name, i in COLOUR_WORDS.items()}
  for name, table in (("colour", colour_after), ("texture", BEHIND)):
    if (found := reader.take(table)) is not None:
      assert told[name] is None
      told[name] = found
  return {name: value for name, value in told.items() if value is not None}


def read(text: str) -> dict:
  """The facts of a caption; fails unless the grammar explains all of its words."""
  reader = Reader(text)
  reader.take(OPENINGS)
  facts = {"groups": [read_noun_phrase(reader)]}
  while reader.rest:
    found = reader.take(AFTER_A_NOUN_PHRASE)
    assert found, (text, reader.rest)
    kind, value = found
    facts[kind] = value
    if kind in ("relation", "and"):
      facts["groups"].append(read_noun_phrase(reader))
    elif kind == "background":
      facts["pattern"], facts["tone"] = reader.take(PATTERNS), reader.take(TONES)
      assert reader.take(dict.fromkeys(words.BACKGROUNDS, 1)) and not reader.rest, text
  return facts


def group_that_is_told(told: dict, scene: Scene) -> int:
  """The group of the told shape, of which all that is told must be true."""
  (group,) = np.flatnonzero((scene.shape == told["shape"]) & (scene.count > 0))
  size = int(scene.radius[group] >= SMALL) + int(scene.radius[group] >= LARGE)
  for name, true in (
    ("count", scene.count[group]),
    ("colour", scene.colour[group]),
    ("texture", scene.texture[group]),
    ("size", size),
  ):
    assert told.get(name, true) == true, name
  return int(group)


def relation_holds(name: str, scene: Scene, first: int, second: int) -> bool:
  i, j = (int(np.flatnonzero((scene.group == g) & scene.present)[0]) for g in (first, second))
  distance = np.hypot(scene.x[i] - scene.x[j], scene.y[i] - scene.y[j])
  overlap = distance < 0.8 * (scene.radius[first] + scene.radius[second])
  return {
    "left": scene.x[i] < scene.x[j] - 40,
    "right": scene.x[i] > scene.x[j] + 40,
    "above": scene.y[i] < scene.y[j] - 40,
    "below": scene.y[i] > scene.y[j] + 40,
    "front": overlap and i > j,
    "behind": overlap and i < j,
    "larger": scene.radius[first] > 1.3 * scene.radius[second],
    "smaller": scene.radius[second] > 1.3 * scene.radius[first],
  }[name]


@pytest.mark.parametrize("variant", mainly(["hard"], VARIANTS))
def test_captions_are_true(variant):
  scene, captions = drawn(variant)
  seen = set()
  for one, ids in zip(rows_of(scene), captions, strict=True):
    text = scenes.text_of(ids)
    facts = read(text)
    groups = [group_that_is_told(told, one) for told in facts["groups"]]
    assert len(groups) == (one.count > 0).sum(), text
    if "relation" in facts:
      name = list(words.RELATIONS)[facts["relation"]]
      assert relation_holds(name, one, *groups), text
      seen.add(name)
    if "place" in facts:
      x, y = one.x[-1] / SIDE - 0.5, one.y[-1] / SIDE - 0.5
      row, column = divmod(facts["place"], 3)
      assert (y < 0.12) >= (row == 0) and (y > -0.12) >= (row == 2), text
      assert (x < 0.12) >= (column == 0) and (x > -0.12) >= (column == 2), text
      seen.add(facts["place"])
    if "tone" in facts:
      assert facts["tone"] == one.tone
      assert facts["pattern"] in (None, one.pattern)
    assert not re.search(r"\ba [aeio]|\ban [^aeioh]|\ba hour", text), text
  assert seen == {*words.RELATIONS, *range(9)}


def test_captions_vary_and_use_every_word():
  _, captions = drawn()
  texts = [scenes.text_of(row) for row in captions]
  assert len({*texts}) > 0.95 * MANY
  used = {word for text in texts for word in text.split()}
  assert used == {*WORDS}


def test_captions_have_at_most_30_ids_and_shorter_ones_keep_their_end():
  scene, captions = drawn()
  lengths = (captions > 0).sum(axis=1)
  assert lengths.max() <= 30 and lengths.min() >= 4
  end = VOCABULARY.index(words.END)
  assert (captions[:, 0] == VOCABULARY.index(words.START)).all()
  assert (captions[np.arange(MANY), lengths - 1] == end).all()
  one = jax.tree.map(lambda x: jnp.array(x[0]), scene)
  draw = jax.jit(draw_caption, static_argnums=2)
  long, short = (np.asarray(draw(jax.random.key(5), one, n)) for n in (32, 6))
  np.testing.assert_array_equal(short[:5], long[:5])
  assert short[5] == end


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
  return make_tokenizer("words", iter(WORDS), 1024)


def test_the_tokenizer_gives_the_drawn_ids_and_their_text(tokenizer, tmp_path):
  captions = drawn()[1][:256]
  texts = [scenes.text_of(row) for row in captions]
  tokenizer.save(tmp_path / "tokenizer.json")
  for one in (tokenizer, Tokenizer.load(tmp_path / "tokenizer.json")):
    np.testing.assert_array_equal(one(texts, 32), captions)
    assert [one.decode(row) for row in captions] == texts
    assert (one.vocab_size, one.sot_id, one.eot_id) == (len(VOCABULARY), 1, 2)


def test_prompts_of_classes_have_no_unknown_word(tokenizer):
  names = SCENES.class_names
  assert len(names) == len({*names}) == 5120
  prompts = [template.replace("{}", name) for name in names for template in words.TEMPLATES]
  ids = tokenizer(prompts, 32)
  assert (ids != VOCABULARY.index(words.UNKNOWN)).all()
  assert tokenizer(["a red zebra"], 8)[0, 3] == VOCABULARY.index(words.UNKNOWN)


def test_a_tokenizer_with_other_ids_is_refused(tokenizer):
  SCENES.train_iterator(tokenizer)
  for spec, size in (("bpe", 300), ("words", 100)):
    other = make_tokenizer(spec, iter(WORDS), size)
    with pytest.raises(ValueError, match=r"data\.tokenizer must be 'words'"):
      SCENES.train_iterator(other)
