"""Noise and bias of rounded gradients: the estimators, and models of linen, nnx and functions."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sbjax import Recipe, Spec
from sbjax.convert.rounding import ALL, Group, gradient_rounding, roundings, sum_group

BATCH, GROUPS, SIZE, WIDTH = 32, 8, 8, 200


def measured(seed, noise, bias, wobble, groups=GROUPS):
  """The Rounding of gradients 1 + noise * z in WIDTH places, with errors bias + wobble * u."""
  random = np.random.default_rng(seed)
  g = 1 + noise * random.normal(size=(groups, SIZE, WIDTH))
  e = bias + wobble * random.normal(size=(groups, SIZE, WIDTH))

  def squares(x):
    of_sum, of_each = (x.sum(1) ** 2).sum(-1), (x**2).sum((1, 2))
    return [{"w": pair} for pair in np.stack([of_sum, of_each], -1).tolist()]

  pairs = zip(squares(g), squares(e), strict=True)
  return roundings([Group(SIZE, one, {"int8": other}) for one, other in pairs], "int8", BATCH)["w"]


TRUTH = {  # (noise, bias, wobble): error over noise, bias over gradient, B*
  (3.0, 0.1, 0.5): (math.hypot(0.1, 0.5) / 3, 0.1, BATCH * 9 / 0.01),
  (1.0, 0.5, 0.1): (math.hypot(0.5, 0.1), 0.5, BATCH * 1 / 0.25),
}


@pytest.mark.parametrize("case", TRUTH, ids=str)
def test_intervals_hold_the_truth_in_95_of_100_cases(case):
  found = [measured(seed, *case) for seed in range(400)]
  for i, truth in enumerate(TRUTH[case]):
    held = np.mean([each[i].low <= truth <= each[i].high for each in found])
    assert 0.92 <= held <= 0.98, (found[0]._fields[i], held)


@pytest.mark.parametrize("case", TRUTH, ids=str)
def test_estimates_are_right_in_the_mean(case):
  found = [measured(seed, *case) for seed in range(100)]
  for i, truth in enumerate(TRUTH[case]):
    assert np.median([each[i].value for each in found]) == pytest.approx(truth, rel=0.05)


def test_an_error_without_a_bias_has_no_measurable_critical_batch():
  found = [measured(seed, 3.0, 0.0, 0.5) for seed in range(100)]
  unknown = [each for each in found if each.critical_batch.high == math.inf]
  assert len(unknown) >= 93
  assert all(each.bias.low == 0 for each in unknown)
  # The plain mean of 64 errors would give B * 3^2 / (.5^2 / 64) with or without a bias.
  assert np.median([each.critical_batch.low for each in found]) > BATCH * 9 / (0.25 / 64)


def test_more_groups_give_narrower_intervals():
  def width(groups):
    found = [measured(seed, 3.0, 0.1, 0.5, groups).bias for seed in range(30)]
    return np.median([each.high - each.low for each in found])

  assert width(32) < 0.6 * width(8)


def biased(w, batch):
  """A linear loss, whose gradient is the mean of a batch and, in column 0, an error of 2."""
  return jnp.sum(w["w"] * jnp.mean(batch, axis=0)) + 2 * jnp.sum(w["w"][:, 0])


def test_sums_of_a_group_are_those_of_its_gradients():
  batches = np.random.default_rng(0).normal(size=(4, 3, 5, 2)).astype(np.float32)
  w = {"w": jnp.zeros((5, 2)), "bias": jnp.zeros(2)}
  exact = functools.partial(jax.grad(lambda w, b: jnp.sum(w["w"] * jnp.mean(b, axis=0))), w)
  group = sum_group(exact, {"biased": functools.partial(jax.grad(biased), w)}, batches)
  g = batches.mean(1)
  assert group.batches == 4 and [*group.gradient] == ["w"]
  np.testing.assert_allclose(group.gradient["w"], [(g.sum(0) ** 2).sum(), (g**2).sum()], rtol=1e-6)
  np.testing.assert_allclose(group.errors["biased"]["w"], [5 * 8.0**2, 4 * 5 * 4.0], rtol=1e-6)


def test_each_layer_of_a_stack_has_sums_of_its_own():
  def tree(batch):
    return {"blocks": {"kernel": batch}, "embedding": batch[0]}

  batches = jax.random.normal(jax.random.key(0), (2, 3, 4, 5))

  def stacked(tree):
    return {"blocks": {"kernel": 1}, "embedding": 0}

  group = sum_group(tree, {}, batches, stacked)
  names = [f"blocks/kernel[{i}]" for i in range(3)]
  assert [*group.gradient] == [*names, "embedding"]
  for i, name in enumerate(names):
    alone = sum_group(lambda batch, i=i: {"w": batch[i]}, {}, batches)
    np.testing.assert_allclose(group.gradient[name], alone.gradient["w"], rtol=1e-6)


class Net(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(4)(nn.relu(nn.Dense(16)(x)))


class NnxNet(nnx.Module):
  def __init__(self, rngs):
    self.one, self.two = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

  def __call__(self, x):
    return self.two(nnx.relu(self.one(x)))


def linen_case():
  params = Net().init(jax.random.key(0), jnp.ones((1, 8)))
  return params, Net().apply, [f"params/Dense_{i}/kernel" for i in range(2)]


def nnx_case():
  graph, params = nnx.split(NnxNet(nnx.Rngs(0)))
  return (
    params,
    lambda params, x: nnx.merge(graph, params)(x),
    ["one/kernel", "two/kernel"],
  )


def batches(count):
  draw = np.random.default_rng(0).normal
  return [draw(size=(16, 8)).astype(np.float32) for _ in range(count)]


INT8 = Spec("int8", "rowwise")
WGRAD = Recipe(fwd=None, dgrad=None, wgrad=(INT8, INT8))


def loss_of(apply):
  return lambda params, x: jnp.mean(jnp.square(apply(params, x) - jnp.sin(x[:, :4])))


@pytest.mark.parametrize("case", [linen_case, nnx_case])
def test_a_rounded_weight_gradient_errs_in_its_own_layer_only(case):
  params, apply, (one, two) = case()
  rules = {"wgrad": [(two, WGRAD)], "all": "switchback"}
  measure = functools.partial(gradient_rounding, loss_of(apply), params, batches(9))
  found = measure(rules, batch_size=16, group=3)
  assert [[*layers] for layers in found.values()] == [[one, two, ALL]] * 2
  assert found["wgrad"][one].error.value == 0 < found["wgrad"][two].error.value
  assert all(0 < rounding.error.value < 0.2 for rounding in found["all"].values())


@pytest.mark.parametrize(
  ("count", "group", "rules", "message"),
  [
    (5, 2, "switchback", r"2 groups .* an interval needs at least 3"),
    (2, 2, "switchback", r"1 group of batches"),
    (6, 1, "switchback", r"group=1 must be at least 2"),
    (6, 2, "full", r"int8 rounds nothing"),
    (6, 2, [("*none*", "switchback")], r"fits no parameter"),
  ],
)
def test_what_cannot_be_measured_is_a_sentence(count, group, rules, message):
  params, apply, _ = linen_case()
  with pytest.raises(ValueError, match=message):
    gradient_rounding(
      loss_of(apply), params, batches(count), {"int8": rules}, batch_size=16, group=group
    )


@pytest.mark.parametrize(
  ("x", "message"), [(math.nan, "is not finite"), (1.0, "The batches have one gradient")]
)
def test_gradients_without_a_noise_are_refused(x, message):
  group = sum_group(lambda b: {"w": b}, {"r": lambda b: {"w": b + 1}}, [jnp.full((2, 2), x)] * 2)
  with pytest.raises(ValueError, match=message):
    roundings([group] * 3, "r", 1)
