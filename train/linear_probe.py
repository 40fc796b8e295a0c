"""A linear probe: logistic regression on a model's features, beside zero-shot the other score.

As in CLIP's paper (Radford et al. 2021, https://arxiv.org/abs/2103.00020, A.3): L-BFGS, at most
1,000 iterations, and an L2 penalty that is chosen on a part of the training set, from 1e-6 to 1e6
with 8 values a decade. The features are the unit embeddings, as in CLIP_benchmark; the paper took
those before the last projection.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

_ITERATIONS = 1000
_TOLERANCE = 1e-6  # of the gradient of the mean loss
_HELD_OUT = 0.2  # of the training set, to choose the penalty on


class Probe(NamedTuple):
  kernel: jax.Array  # float32 [E, classes]
  bias: jax.Array  # float32 [classes]


def train_probe(
  features: np.ndarray, labels: np.ndarray, classes: int, seed: int = 0
) -> tuple[Probe, float]:
  """The probe of features [N, E] and labels [N] below `classes`, and its penalty.

  The penalty with the best accuracy on a fifth of the examples, drawn by `seed`; of equal ones the
  largest. The probe is then fitted to all examples.

  Raises:
    ValueError: fewer than five examples.
  """
  if len(features) < 5:
    raise ValueError(f"A probe needs at least 5 training examples, not {len(features)}.")
  order = np.random.default_rng(seed).permutation(len(features))
  held_out, rest = np.split(order, [round(_HELD_OUT * len(order))])

  @functools.cache
  def score(log_penalty: float) -> float:
    probe = fit(features[rest], labels[rest], 10**log_penalty, classes)
    return float(np.mean(predict(probe, features[held_out]).argmax(1) == labels[held_out]))

  penalty = 10 ** _search(score)
  return fit(features, labels, penalty, classes), penalty


def _search(score, low: float = -6, high: float = 6) -> float:
  """The best place in [low, high] by the paper's search: steps of 2, then halves around the best.

  Ends at steps of 1/8; of equally good places it takes the largest.
  """
  step = 2.0
  places = [low + step * i for i in range(round((high - low) / step) + 1)]
  best = max(places, key=lambda place: (score(place), place))
  while step > 1 / 8:
    step /= 2
    near = [place for place in (best - step, best, best + step) if low <= place <= high]
    best = max(near, key=lambda place: (score(place), place))
  return best


def fit(features: np.ndarray, labels: np.ndarray, penalty: float, classes: int) -> Probe:
  """Minimizes the sum of cross-entropies + penalty / 2 * |kernel|^2, the bias being free."""
  return _fit(
    jnp.asarray(features, jnp.float32),
    jnp.asarray(labels, jnp.int32),
    jnp.float32(penalty / len(features)),
    classes,
  )


@functools.partial(jax.jit, static_argnames="classes")
def _fit(features, labels, penalty, classes) -> Probe:
  def loss(probe):
    logits = jnp.dot(features, probe.kernel, precision="highest") + probe.bias[None, :]
    each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(each) + penalty / 2 * jnp.sum(jnp.square(probe.kernel))

  optimizer = optax.lbfgs()
  value_and_grad = optax.value_and_grad_from_state(loss)

  def step(carry):
    probe, state, count, _ = carry
    value, grad = value_and_grad(probe, state=state)
    updates, state = optimizer.update(grad, state, probe, value=value, grad=grad, value_fn=loss)
    steepest = jnp.maximum(jnp.max(jnp.abs(grad.kernel)), jnp.max(jnp.abs(grad.bias)))
    return optax.apply_updates(probe, updates), state, count + 1, steepest

  start = Probe(jnp.zeros((features.shape[1], classes)), jnp.zeros(classes))
  return jax.lax.while_loop(
    lambda carry: (carry[2] < _ITERATIONS) & (carry[3] > _TOLERANCE),
    step,
    (start, optimizer.init(start), 0, jnp.float32(jnp.inf)),
  )[0]


def predict(probe: Probe, features: np.ndarray) -> np.ndarray:
  """Logits [N, classes] of features [N, E]."""
  return np.asarray(features) @ np.asarray(probe.kernel) + np.asarray(probe.bias)
