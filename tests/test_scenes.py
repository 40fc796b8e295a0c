"""Drawn scenes: the same numbers everywhere, captions that are true, triples that stay unseen."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train import data
from train.config import Config, DataConfig, ModelConfig
from train.datasets import scenes
from train.datasets import scenes_words as words
from train.datasets.scenes_captions import draw_caption
from train.datasets.scenes_layout import (
  LARGE,
  SIDE,
  SMALL,
  VARIANTS,
  Dice,
  Scene,
  allowed,
  draw_scene,
  is_held_out,
)
from train.datasets.scenes_pixels import _grains, draw_pixels
from train.datasets.scenes_shapes import signed_distances
from train.datasets.scenes_words import COLOURS, SHAPES, TEXTURES, VOCABULARY, WORDS
from train.sharding import make_mesh
from train.tokenizer import Tokenizer, make_tokenizer

FULL, SMALL_VARIANT = VARIANTS["full"], VARIANTS["small"]
MANY = 4096


@functools.cache
def drawn(variant="full") -> tuple[Scene, np.ndarray]:
  """Many scenes, as numpy arrays, and a caption of each, [count, 32]."""

  def one(i):
    place, say = jax.random.split(jax.random.fold_in(jax.random.key(0), i))
    scene = draw_scene(place, VARIANTS[variant])
    return scene, draw_caption(say, scene, 32)

  found = jax.jit(jax.vmap(one))(jnp.arange(MANY))
  return jax.tree.map(np.asarray, found)


def rows_of(scene: Scene):
  """The scenes of a batch, one by one."""
  for i in range(len(scene.tone)):
    yield jax.tree.map(lambda x: x[i], scene)


# --- layout ---


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_never_shows_a_held_out_triple(variant):
  scene, _ = drawn(variant)
  held_out = is_held_out(scene.shape, scene.colour, scene.texture)
  assert not (held_out & (scene.count > 0)).any()


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_a_tenth_is_held_out_and_every_pair_of_attributes_is_shown(variant):
  there = np.indices((variant.shapes, variant.colours, variant.textures))
  held_out = is_held_out(*there)
  assert held_out.sum() * 10 == variant.triples
  for axis in range(3):
    assert not held_out.all(axis=axis).any()
  for held in (True, False):
    pairs = allowed(variant, held)
    found = {(s, *map(int, pair)) for s, row in enumerate(pairs) for pair in row}
    assert found == {tuple(map(int, t)) for t in np.argwhere(held_out == held)}


def test_shapes_colours_and_textures_are_equally_frequent():
  scene, _ = drawn()
  for name, n in (("shape", 32), ("colour", 20), ("texture", 8)):
    counts = np.bincount(getattr(scene, name).ravel(), minlength=n)
    expected = counts.sum() / n
    # Three groups of a scene differ in shape, which only makes the counts more even.
    assert abs(counts - expected).max() < 5 * np.sqrt(expected), name
  layouts = [tuple(map(int, row)) for row in scene.count]
  for layout in {*FULL.layouts}:
    expected = MANY * FULL.layouts.count(layout) / len(FULL.layouts)
    assert abs(layouts.count(layout) - expected) < 5 * np.sqrt(expected)


def test_objects_belong_to_their_groups_and_lie_in_the_image():
  scene, _ = drawn()
  for one in rows_of(scene):
    assert one.present.sum() == one.count.sum()
    members = np.bincount(one.group[one.present], minlength=3)
    np.testing.assert_array_equal(members, one.count)
    assert len({int(s) for s in one.shape[one.count > 0]}) == (one.count > 0).sum()
    x, y = one.x[one.present], one.y[one.present]
    assert min(x.min(), y.min()) >= 20 and max(x.max(), y.max()) <= SIDE - 20
    # No object is hidden: half of its radius stands out from any other object.
    for i in range(len(x)):
      for j in range(i):
        reach = one.radius[one.group[one.present]]
        distance = np.hypot(x[i] - x[j], y[i] - y[j])
        assert distance + reach[j] > reach[i] + reach[j] * 0.25, (one, i, j)


def test_dice_are_whole_numbers_below_n_and_equally_frequent():
  dice = Dice(jax.random.key(0), 12_000)
  rolls = np.asarray(dice.below(6, 6000))
  assert rolls.dtype == np.int32 and set(rolls) == set(range(6))
  assert abs(np.bincount(rolls) - 1000).max() < 5 * np.sqrt(1000)
  assert np.asarray(dice.below(2**16, 5000)).max() > 65_000
  with pytest.raises(ValueError, match="have 12000 words, and 12001"):
    dice.below(2, 1001)


# --- pixels ---


def scene_of(*objects, tone=0, pattern=0) -> Scene:
  """A scene of (shape, colour, texture, radius, x, y), from the back to the front."""
  names = [list(SHAPES), list(COLOURS), list(TEXTURES)]
  n = len(objects)
  numbers = [[names[k].index(each[k]) for each in objects] + [0] * (3 - n) for k in range(3)]
  radius = [each[3] for each in objects] + [30] * (3 - n)
  front = [0] * (5 - n)
  values = {
    **dict(zip(("shape", "colour", "texture"), numbers, strict=True)),
    "count": [1] * n + [0] * (3 - n),
    "radius": radius,
    "group": front + list(range(n)),
    "x": front + [each[4] for each in objects],
    "y": front + [each[5] for each in objects],
    "tone": tone,
    "pattern": pattern,
  }
  present = jnp.array([False] * (5 - n) + [True] * n)
  return Scene(present=present, **{k: jnp.array(v, jnp.int32) for k, v in values.items()})


@functools.cache
def _pixels(size):
  return jax.jit(functools.partial(draw_pixels, size=size, noise=0))


def pixels(*objects, size=64, seed=0, **background) -> np.ndarray:
  scene = scene_of(*objects, **background)
  return np.asarray(_pixels(size)(jax.random.key(seed), scene)).astype(int)


def test_a_later_object_hides_an_earlier_one():
  red = ("square", "red", "plain", 60, 110, 128)
  blue = ("square", "blue", "plain", 60, 146, 128)
  for order, nearest in (((red, blue), "blue"), ((blue, red), "red")):
    r, _, b = pixels(*order)[32, 32]
    assert ("blue" if b > r else "red") == nearest


@pytest.mark.parametrize("colour", ["red", "green", "blue", "white", "black"])
def test_a_plain_object_has_its_colour(colour):
  pixel = pixels(("circle", colour, "plain", 80, 128, 128), seed=3)[32, 32]
  others = {name: rgb for name, (rgb, _) in COLOURS.items() if name in ("red", "green", "blue")}
  others |= {name: COLOURS[name][0] for name in ("white", "black")}
  assert min(others, key=lambda name: abs(pixel - others[name]).sum()) == colour


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_covers_the_pixels_of_its_signed_distance(shape):
  size, radius = 64, 80
  there, nothing = (
    pixels((shape, "white", "plain", r, 128, 128), size=size, tone=0) for r in (radius, 1)
  )
  covered = abs(there - nothing).sum(axis=-1) > 100
  table = signed_distances()[list(SHAPES).index(shape)]
  area = (table < 0).mean() * (2.5 * radius / SIDE) ** 2
  assert covered.mean() == pytest.approx(area, rel=0.12, abs=0.03)


def test_textures_differ():
  images = [pixels(("square", "blue", name, 90, 128, 128))[16:48, 16:48] for name in TEXTURES]
  for i, a in enumerate(images):
    for b in images[:i]:
      assert abs(a - b).mean() > 5
  assert images[0].std(axis=(0, 1)).max() < 30  # plain: light only


def test_grains_have_mean_0_and_variance_1():
  grains = np.asarray(_grains(jax.random.key(0), 64))
  assert grains.shape == (64, 64, 3)
  assert abs(grains.mean()) < 0.03 and grains.std() == pytest.approx(1, abs=0.03)
  assert abs(np.corrcoef(grains.reshape(-1, 3).T) - np.eye(3)).max() < 0.06


# --- captions ---


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


@pytest.mark.parametrize("variant", VARIANTS)
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


# --- tokens ---


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
  names = scenes.find("scenes").class_names
  assert len(names) == len({*names}) == 5120
  prompts = [template.replace("{}", name) for name in names for template in words.TEMPLATES]
  ids = tokenizer(prompts, 32)
  assert (ids != VOCABULARY.index(words.UNKNOWN)).all()
  assert tokenizer(["a red zebra"], 8)[0, 3] == VOCABULARY.index(words.UNKNOWN)


def test_a_tokenizer_with_other_ids_is_refused(tokenizer):
  found = scenes.find("scenes")
  found.check_tokenizer(tokenizer)
  for spec, size in (("bpe", 300), ("words", 100)):
    other = make_tokenizer(spec, iter(WORDS), size)
    with pytest.raises(ValueError, match="data.tokenizer must be 'words'"):
      found.check_tokenizer(other)


# --- batches ---

ON = {"image_size": 32, "context_length": 32}


def config_of(**values) -> Config:
  data_config = DataConfig(name="scenes", tokenizer="words", label_key="label", **values)
  return Config(model=ModelConfig(size="tiny"), data=data_config, batch_size=16, seed=3)


def batches(config, mesh, count=2, start=0):
  source = data.prepare(config.data)
  iterator = data.train_iterator(config, source, make_tokenizer("words", WORDS, 1024), **ON)
  iterator.set_state({"batches": start})
  put = data.to_devices(config, source, mesh, **ON)
  return [
    (jax.tree.map(np.asarray, batch), state["batches"])
    for _, (batch, state) in zip(
      range(count), data.prefetch_to_device(iterator, put, 0), strict=False
    )
  ]


@functools.cache
def on_one_device():
  return batches(config_of(), make_mesh(config_of().mesh, jax.devices()[:1]), count=3)


@pytest.mark.parametrize("data_axis, fsdp", [(8, 1), (2, 4)])
def test_any_mesh_draws_the_same_batch(data_axis, fsdp):
  config = config_of()
  config.mesh.data, config.mesh.fsdp = data_axis, fsdp
  for (batch, _), (expected, _) in zip(
    batches(config, make_mesh(config.mesh)), on_one_device(), strict=False
  ):
    for name, values in expected.items():
      np.testing.assert_array_equal(batch[name], values)


def test_the_state_is_the_step_and_a_resumed_stream_is_the_same():
  mesh = make_mesh(config_of().mesh, jax.devices()[:1])
  whole = on_one_device()
  assert [state for _, state in whole] == [1, 2, 3]
  resumed = batches(config_of(), mesh, count=1, start=2)[0]
  assert resumed[1] == 3
  jax.tree.map(np.testing.assert_array_equal, resumed[0], whole[2][0])
  assert (whole[0][0]["image"] != whole[1][0]["image"]).any()


def test_a_row_is_a_function_of_seed_step_and_row():
  key = jax.random.fold_in(scenes._key("train", 3), 1)

  @jax.jit
  def draw(rows):
    return scenes._draw(key, rows, FULL, None, **ON)

  found = draw(jnp.array([5, 11], jnp.uint32))
  for name in ("image", "text"):
    np.testing.assert_array_equal(found[name], on_one_device()[1][0][name][np.array([5, 11])])
  scene = jax.tree.map(lambda x: np.asarray(x[0]), found["scene"])
  facts = read(scenes.text_of(np.asarray(found["text"][0])))
  assert [group_that_is_told(told, scene) for told in facts["groups"]]


def test_many_rows_are_drawn_in_pieces_with_the_same_numbers(monkeypatch):
  def draw(rows):
    whole = functools.partial(scenes._draw, variant=SMALL_VARIANT, held_out=None)
    key = scenes._key("train", 0)
    return jax.jit(lambda rows: whole(key, rows, image_size=16, context_length=32))(rows)

  rows = jnp.arange(7, dtype=jnp.uint32)
  whole = draw(rows)
  monkeypatch.setattr(scenes, "_PIXELS_AT_ONCE", 3 * 16**2)
  jax.tree.map(np.testing.assert_array_equal, draw(rows), whole)


def test_evaluation_batches_have_captions_or_labels():
  config = config_of()
  source = data.prepare(config.data)
  assert data.class_names(config, source) == source.class_names
  seen = {}
  for split, size in (("scenes[:40]", 40), ("classes[:24]", 24), ("heldout[:40]", 40)):
    data.check_split(source, split)
    found = list(data.eval_batches(config, source, split, image_size=32, batch_size=24))
    assert [len(batch["image"]) for batch in found] == [24, 16][: -(-size // 24)]
    captions = [text for batch in found for text in batch["captions"]]
    labels = np.concatenate([batch["label"] for batch in found])
    assert len(captions) == len(labels) == size
    if split.startswith("scenes"):
      assert (labels == -1).all() and all(len(own) == 1 for own in captions)
    else:
      assert not any(captions)
      attributes = np.array([numbers_of(source.class_names[i]) for i in labels]).T
      assert (is_held_out(*attributes) == split.startswith("heldout")).all()
    seen[split] = found[0]["image"]
  again = next(data.eval_batches(config, source, "scenes", image_size=32, batch_size=24))
  np.testing.assert_array_equal(again["image"], seen["scenes[:40]"])


def numbers_of(name: str) -> tuple[int, int, int]:
  texture, colour, shape = name.split()
  return list(SHAPES).index(shape), list(COLOURS).index(colour), list(TEXTURES).index(texture)


@pytest.mark.parametrize("name, split, message", [
  ("scenes/huge", "scenes", "there are scenes/full, scenes/small"),
  ("scenes", "val", "has no split 'val': it has train, scenes, classes, heldout"),
  ("scenes", "classes[10:]", "has no split 'classes"),
])  # fmt: skip
def test_a_wrong_name_is_explained(name, split, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    data.check_split(data.prepare(DataConfig(name=name)), split)


def test_a_flip_and_an_import_under_the_name_are_refused():
  with pytest.raises(ValueError, match="mirror scenes"):
    data.prepare(DataConfig(name="scenes", flip=True))
  with pytest.raises(ValueError, match="except shapes and scenes"):
    data.prepare(DataConfig(name="scenes", train_shards="a.tar"))
