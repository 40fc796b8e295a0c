"""The linear probe is logistic regression at the penalty that its search finds best."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pairwise import mainly

from train import linear_probe
from train.linear_probe import Probe, fit, predict, train_probe


def blobs(examples=300, classes=4, width=8, noise=0.6, seed=0):
  """Unit vectors around a direction for each class."""
  rng = np.random.default_rng(seed)
  centres = np.random.default_rng(1).normal(size=(classes, width))
  labels = rng.integers(0, classes, examples)
  x = centres[labels] + noise * rng.normal(size=(examples, width))
  return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32), labels


def gradient(probe, features, labels, penalty):
  def objective(probe):
    logits = jnp.asarray(features) @ probe.kernel + probe.bias[None]
    each = -jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels]
    return each.sum() + penalty / 2 * jnp.sum(probe.kernel**2)

  return jax.tree.map(np.asarray, jax.jit(jax.grad(objective))(probe))


@pytest.mark.parametrize("penalty", mainly([1.0], [1e-2, 1.0, 1e3]))
def test_the_fit_has_no_gradient(penalty):
  features, labels = blobs()
  probe = fit(features, labels, penalty, 4)
  for ours, scale in zip(
    gradient(probe, features, labels, penalty),
    gradient(Probe(jnp.zeros((8, 4)), jnp.zeros(4)), features, labels, penalty),
    strict=True,
  ):
    assert np.abs(ours).max() < 1e-3 * np.abs(scale).max()


def test_a_large_penalty_leaves_only_the_bias():
  features, labels = blobs()
  probe = fit(features, labels, 1e9, 4)
  assert jnp.abs(probe.kernel).max() < 1e-5
  shares = np.bincount(labels) / len(labels)
  np.testing.assert_allclose(jax.nn.softmax(probe.bias), shares, atol=1e-4)


@pytest.mark.parametrize("best", [-6.0, -5.875, -0.625, 0.0, 3.5, 6.0])
def test_the_search_finds_each_eighth_of_a_decade(best):
  tried = []
  found = linear_probe._search(lambda place: tried.append(place) or -abs(place - best))
  assert found == best
  assert len(set(tried)) <= 7 + 2 * 4 and min(tried) >= -6 and max(tried) <= 6


def test_of_equally_good_penalties_the_search_takes_the_largest():
  assert linear_probe._search(lambda place: 0.0) == 6


def test_a_probe_of_separated_classes_is_right_on_new_examples():
  features, labels = blobs(noise=0.2)
  probe, penalty = train_probe(features, labels, 4)
  new, new_labels = blobs(noise=0.2, seed=5)
  assert np.mean(predict(probe, new).argmax(1) == new_labels) > 0.9
  assert 1e-6 <= penalty <= 1e6
  with pytest.raises(ValueError, match="at least 5 training examples, not 4"):
    train_probe(features[:4], labels[:4], 4)
