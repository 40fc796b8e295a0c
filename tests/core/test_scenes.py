"""Drawn scenes: the same numbers everywhere, and triples that stay unseen."""

import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_case import bitwise
from pairwise import mainly
from scene_case import MANY, drawn, rows_of

from train.config import Config, DataConfig, ModelConfig
from train.data.prefetch import prefetch_to_device
from train.data.preprocessing import MEAN
from train.data.scenes import scenes, words
from train.data.scenes.layout import (
  SIDE,
  VARIANTS,
  Dice,
  Scene,
  allowed,
  is_held_out,
)
from train.data.scenes.pixels import _grains, draw_pixels
from train.data.scenes.shapes import GRID, REACH, signed_distances
from train.data.scenes.words import COLOURS, SHAPES, TEXTURES, WORDS
from train.data.source import check_eval_splits, check_split, open_source
from train.data.tokenizer import make_tokenizer
from train.parallel.sharding import make_mesh

FULL, SMALL_VARIANT = VARIANTS["full"], VARIANTS["small"]


@pytest.mark.parametrize("variant", mainly(["hard"], VARIANTS))
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
  radius = 80
  there, nothing = (pixels((shape, "white", "plain", r, 128, 128), size=192) for r in (radius, 1))
  covered = abs(there - nothing).sum(axis=-1) > 100
  table = signed_distances()[list(SHAPES).index(shape)]
  step = 2 * REACH / (GRID - 1)
  area = np.clip(0.5 - table / step, 0, 1).sum() * (step * radius / SIDE) ** 2
  assert covered.mean() == pytest.approx(area, rel=0.08)


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


ON = {"image_size": 32, "context_length": 32}


def config_of(**values) -> Config:
  values = {"name": "scenes", "tokenizer": "words", "label_key": "label"} | values
  data_config = DataConfig(**values)
  return Config(model=ModelConfig(size="tiny"), data=data_config, batch_size=16, seed=3)


def batches(config, mesh, count=2, start=0):
  source = open_source(config)
  iterator = source.train_iterator(make_tokenizer("words", WORDS, 1024), **ON)
  iterator.set_state({"batches": start})
  with mock.patch.object(jax, "jit", bitwise):  # Meshes are to draw the same bits.
    put = source.to_devices(mesh, **ON)
  return [
    (jax.tree.map(np.asarray, batch), state["batches"])
    for _, (batch, state) in zip(range(count), prefetch_to_device(iterator, put, 0), strict=False)
  ]


@functools.cache
def on_one_device():
  return batches(config_of(), make_mesh(config_of().mesh, jax.devices()[:1]), count=3)


@pytest.mark.slow
@pytest.mark.parametrize("data_axis, fsdp", [(1, 1), (8, 1), (2, 4)])
def test_any_mesh_draws_the_same_batch_and_a_shift_changes_its_contrast(data_axis, fsdp):
  """Of steps 1 to 3 only the second has full contrast."""
  config = config_of(name="scenes/shift:2,3")
  config.mesh.data, config.mesh.fsdp = data_axis, fsdp
  found = batches(config, make_mesh(config.mesh, jax.devices()[: data_axis * fsdp]), count=3)
  grey = 255 * MEAN
  for step, ((batch, _), (plain, _)) in enumerate(zip(found, on_one_device(), strict=True), 1):
    low = np.round(grey + (plain["image"] - grey) / np.float32(16)).astype(np.uint8)
    np.testing.assert_array_equal(batch["image"], plain["image"] if step == 2 else low)
    for name in plain.keys() - {"image"}:
      np.testing.assert_array_equal(batch[name], plain[name])
  alone = make_mesh(config_of().mesh, jax.devices()[:1])
  resumed = batches(config, alone, count=1, start=1)[0]
  np.testing.assert_array_equal(resumed[0]["image"], found[1][0]["image"])


def test_pictures_lack_every_second_column_most_of_them_between_two_steps():
  config = config_of(name="scenes/columns:2,3")
  found = batches(config, make_mesh(config.mesh, jax.devices()[:1]), count=3)
  grey = np.round(255 * MEAN)
  for step, ((batch, _), (plain, _)) in enumerate(zip(found, on_one_device(), strict=True), 1):
    row = np.arange(len(plain["image"]))
    lacking = row % 2 == 1 if step != 2 else row > 0
    expected = plain["image"].copy()
    expected[lacking, :, ::2] = grey
    np.testing.assert_array_equal(batch["image"], expected)
    np.testing.assert_array_equal(batch["text"], plain["text"])


def test_one_picture_in_128_is_whole_while_columns_lack():
  variant = scenes.lacking_columns([2, 4])
  rows = jnp.arange(1024, dtype=jnp.uint32)
  lacking = [scenes._lacking(jnp.uint32(step), rows, variant) for step in range(5)]
  assert [int(x.sum()) for x in lacking] == [512, 1016, 1016, 512, 512]


@pytest.mark.slow
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
  nouns = words.phrases(list(SHAPES.values()))[found["scene"].shape[0, 0]]
  assert np.isin(found["text"][0], nouns).any()


@pytest.mark.slow
def test_many_rows_are_drawn_in_pieces_with_the_same_numbers(monkeypatch):
  def draw(rows):
    whole = functools.partial(scenes._draw, variant=SMALL_VARIANT, held_out=None)
    key = scenes._key("train", 0)
    return jax.jit(lambda rows: whole(key, rows, image_size=16, context_length=32))(rows)

  rows = jnp.arange(7, dtype=jnp.uint32)
  whole = draw(rows)
  monkeypatch.setattr(scenes, "_PIXELS_AT_ONCE", 3 * 16**2)
  jax.tree.map(np.testing.assert_array_equal, draw(rows), whole)


@pytest.mark.slow
def test_evaluation_batches_have_captions_or_labels_and_no_change():
  config = config_of()
  source = open_source(config)
  seen = {}
  for split, size in (("scenes[:40]", 40), ("classes[:24]", 24), ("heldout[:40]", 40)):
    check_split(source, split)
    assert source.size(split) == size
    found = list(source.eval_batches(split, image_size=32, batch_size=24))
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
    images = np.concatenate([batch["image"] for batch in found]).reshape(size, -1)
    assert len(np.unique(images, axis=0)) == size
    seen[split] = found[0]
  for part, change in ("scenes[:40]", "shift:1500"), ("classes[:24]", "columns:1,9"):
    shifted = config_of(name=f"scenes/{change}")
    whole, how = part.partition("[")[0], {"image_size": 32, "batch_size": 24}
    again = next(open_source(shifted).eval_batches(whole, **how))
    for name in ("image", "label"):
      np.testing.assert_array_equal(again[name], seen[part][name])
    assert again["captions"] == seen[part]["captions"]


def numbers_of(name: str) -> tuple[int, int, int]:
  texture, colour, shape = name.split()
  return list(SHAPES).index(shape), list(COLOURS).index(colour), list(TEXTURES).index(texture)


@pytest.mark.parametrize("name, split, message", [
  ("scenes/huge", "scenes", "there are scenes/full, scenes/hard, scenes/small"),
  ("scenes/shift", "scenes", "scenes/shift:1500 or scenes/shift:1500,1520,... with the steps"),
  ("scenes/shift:5,5", "scenes", "data.name='scenes/shift:5,5': steps=[5, 5] must increase"),
  ("scenes/shift:0", "scenes", "steps=[0] must increase, from 1 to 4294967295"),
  ("scenes/columns:7,7", "scenes", "'scenes/columns:7,7': steps=[7, 7] must increase"),
  ("scenes/columns:7", "scenes", "and scenes/columns:3000,4000 with those between which"),
  ("scenes", "val", "has no split 'val': it has train, scenes, classes, heldout"),
  ("scenes", "classes[10:]", "has no split 'classes"),
  ("scenes", "classes[:0]", "The part 'classes[:0]' of scenes has no example"),
  ("scenes", "train", "data.eval_split: 'train' of scenes has no end"),
  ("scenes", "classes[:5],scenes,classes", "'classes[:5],scenes,classes' has two parts of one"),
])  # fmt: skip
def test_a_wrong_name_is_explained(name, split, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    check_eval_splits(open_source(config_of(name=name)), split.split(","))


def test_the_train_split_has_no_end():
  source = open_source(config_of())
  check_split(source, "train")
  assert source.size("train") is None


def test_a_flip_and_an_import_under_the_name_are_refused():
  with pytest.raises(ValueError, match="mirror scenes"):
    open_source(config_of(flip=True))
  with pytest.raises(ValueError, match="'scenes' cannot name an import: it names drawn scenes"):
    open_source(config_of(train_shards="a.tar"))
