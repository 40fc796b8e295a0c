"""Texts in groups of a few lengths: the features and gradients of a tower over all positions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbjax.models.clip import CLIP
from sbjax.models.flax_block import FlaxBlock
from sbjax.models.sizes import SIZES
from sbjax.models.text_groups import choose_groups, text_ends, text_fits, token_count
from sbjax.models.transformer import Block, BlockOptions
from train.config import MeshConfig
from train.parallel.sharding import make_mesh
from train.zero_shot import make_encoders

EOT = 1
GROUPS = ((8, 3), (16, 2), (24, 3))
TINY = SIZES["tiny"]


def texts(lengths, eot_id=EOT, context_length=24, seed=0):
  """Random tokens, an end token, and rubbish behind it."""
  rng = np.random.default_rng(seed)
  text = rng.integers(2, 1000, (len(lengths), context_length))
  end = 1023 if eot_id is None else eot_id
  for row, length in zip(text, lengths, strict=True):
    row[length - 1] = end
  return jnp.asarray(text, jnp.int32)


def tiny(eot_id=EOT, **options):
  vision = dataclasses.replace(TINY.vision, layers=1, width=16, heads=1)  # of no interest here
  size = dataclasses.replace(
    TINY, vision=vision, text=dataclasses.replace(TINY.text, eot_id=eot_id)
  )
  block = options.pop("block", Block)
  return CLIP(size, BlockOptions(dtype=jnp.float32, **options), block=block)


def loss_and_gradients(model, text, groups, params):
  image = jax.random.normal(jax.random.key(1), (len(text), 32, 32, 3))

  def loss(params):
    out = model.apply({"params": params}, image, text, text_groups=groups)
    logits = 10 * out["image_features"] @ out["text_features"].T
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.diagonal(logits)), out

  (value, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
  return value, out["text_features"], gradients


def init(model):
  image, text = jnp.zeros((1, 32, 32, 3)), jnp.zeros((1, 24), jnp.int32)
  return model.init(jax.random.key(0), image, text)["params"]


@pytest.mark.parametrize(
  ("lengths", "how"),
  [
    ([5, 24, 3, 16, 8, 20, 9, 1], {}),
    ([5, 24, 3, 16, 8, 20, 9, 1], {"eot_id": None, "scan": False}),
    ([8, 8, 8, 16, 16, 24, 24, 24], {"recipe": "switchback", "remat": "block"}),
    ([2] * 8, {"parametrization": "unit"}),
    ([24, 7, 6, 17, 9, 3, 20, 15], {"block": FlaxBlock, "qk_norm": True}),
  ],
  ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else ",".join(value),
)
def test_groups_give_the_same_loss_and_gradients(lengths, how):
  model = tiny(**how)
  text = texts(lengths, model.config.text.eot_id)
  assert text_fits(text, GROUPS, model.config.text.eot_id)
  params = init(model)
  expected, features, gradients = loss_and_gradients(model, text, (), params)
  got, features_got, gradients_got = loss_and_gradients(model, text, GROUPS, params)
  np.testing.assert_allclose(features_got, features, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(got, expected, rtol=1e-6)
  close = 1e-3 if "recipe" in how else 2e-6  # A value at the edge is rounded the other way.
  scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradients))
  for one, other in zip(*map(jax.tree.leaves, (gradients_got, gradients)), strict=True):
    np.testing.assert_allclose(one, other, atol=close * scale)


def test_a_text_without_an_end_has_the_features_of_its_first_position():
  model = tiny()
  text = texts([24, 24, 24, 9, 9, 3, 3, 3]).at[5].set(7)
  params = init(model)
  _, features, _ = loss_and_gradients(model, text, (), params)
  _, got, _ = loss_and_gradients(model, text, GROUPS, params)
  np.testing.assert_allclose(got, features, rtol=1e-5, atol=1e-6)


def test_a_text_too_long_for_its_group_is_no_number():
  model = tiny()
  text = texts([24, 24, 24, 17, 9, 9, 3, 3])  # 9 does not fit into 8.
  assert not text_fits(text, GROUPS, EOT)
  _, features, _ = loss_and_gradients(model, text, GROUPS, init(model))
  bad = np.isnan(np.asarray(features)).any(axis=1)
  assert bad.any() and not bad[[0, 1, 2, 6, 7]].any()


@pytest.mark.parametrize("groups", [((8, 7),), ((8, 4), (25, 4)), ((0, 8),)])
def test_groups_for_another_batch_are_refused(groups):
  model = tiny()
  with pytest.raises(ValueError, match=r"must have 8 rows in all, of up to 24 positions"):
    model.init(jax.random.key(0), jnp.zeros((8, 32, 32, 3)), texts([3] * 8), text_groups=groups)


def test_a_tower_that_reads_the_last_position_refuses_groups():
  text = dataclasses.replace(TINY.text, pool="last", causal=False)
  model = CLIP(dataclasses.replace(TINY, text=text))
  with pytest.raises(ValueError, match="causal text tower with pool='eot'"):
    model.init(jax.random.key(0), jnp.zeros((8, 32, 32, 3)), texts([3] * 8), text_groups=GROUPS)


def lengths_like_captions(count, rng):
  """As captions of the web: mostly short, with a tail."""
  return np.clip(np.round(np.exp(rng.normal(2.7, 0.5, count))) + 2, 3, 77).astype(int)


@pytest.mark.parametrize(("rows", "batches"), [(1024, 1), (256, 4), (64, 16), (16, 8)])
def test_chosen_groups_hold_batches_of_the_same_lengths(rows, batches):
  rng = np.random.default_rng(rows)
  counts = np.bincount(lengths_like_captions(4096, rng), minlength=78)[1:]
  groups = choose_groups(counts, rows, at_most=4, batches=batches)
  assert 2 <= len(groups) <= 4 and sum(n for _, n in groups) == rows
  assert token_count(groups) < (0.45 if rows >= 256 else 0.7) * 77 * rows
  failed = 0
  for _ in range(400 // batches):
    lengths = np.sort(lengths_like_captions(rows * batches, rng).reshape(batches, rows), axis=1)
    failed += np.any(lengths > np.repeat(*map(list, zip(*groups, strict=True))))
  assert failed <= 0.01 * (400 // batches) + 1


def test_more_groups_take_fewer_tokens():
  rng = np.random.default_rng(0)
  counts = np.bincount(lengths_like_captions(4096, rng), minlength=78)[1:]
  tokens = [token_count(choose_groups(counts, 512, at_most=n)) for n in range(2, 9)]
  assert tokens == sorted(tokens, reverse=True) and len(set(tokens)) >= 3
  assert tokens[-1] == tokens[-2], "A group that saves nearly nothing has kernels of its own."


def test_no_groups_where_they_save_little():
  assert choose_groups([0] * 76 + [1000], 64, at_most=4) == ()
  assert choose_groups([0] * 77, 64, at_most=4) == ()
  assert choose_groups([1000] + [0] * 76, 64, at_most=1) == ()
  assert choose_groups([5, 5], 64, at_most=4) == ()


def test_ends():
  text = jnp.array([[5, 1, 7, 1], [1, 9, 9, 9], [4, 4, 4, 4]])
  np.testing.assert_array_equal(text_ends(text, 1), [1, 0, 0])
  np.testing.assert_array_equal(text_ends(text, None), [2, 1, 0])


def test_texts_are_cut_behind_the_last_end_of_all():
  model = tiny(eot_id=EOT)
  size = dataclasses.replace(model.config.text, context_length=77)
  model = model.clone(config=dataclasses.replace(model.config, text=size))
  text = np.array(texts([3, 20, 33, 9], context_length=77))
  cut = make_encoders(model, make_mesh(MeshConfig(), jax.devices()[:1])).cut(text)
  np.testing.assert_array_equal(cut, text[:, :48])
  image, whole = jnp.zeros((1, 32, 32, 3)), jnp.zeros((1, 77), jnp.int32)
  params = jax.jit(model.init)(jax.random.key(0), image, whole)["params"]
  encode = functools.partial(model.apply, {"params": params}, method="encode_text")
  np.testing.assert_allclose(encode(cut), encode(text), rtol=1e-5, atol=1e-6)
  with pytest.raises(ValueError, match=r"Texts must be \[B, 77\]"):
    encode(np.zeros((4, 78), np.int32))


def test_texts_of_a_tower_that_reads_the_last_position_stay_whole():
  text = dataclasses.replace(TINY.text, pool="last", causal=False)
  model = CLIP(dataclasses.replace(TINY, text=text))
  rows = np.array(texts([3, 4]))
  assert make_encoders(model, make_mesh(MeshConfig(), jax.devices()[:1])).cut(rows) is rows
  with pytest.raises(ValueError, match=r"Texts must be \[B, 24\]"):
    model.init(jax.random.key(0), jnp.zeros((2, 32, 32, 3)), rows[:, :16])
