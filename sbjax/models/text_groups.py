"""Texts of a batch in groups of a few lengths, so that a text tower computes little padding.

A causal tower that pools at the end token does not depend on what comes behind that token. So a
batch of B texts [B, L] is sorted by length and cut into groups, static (length, rows): the first
`rows` texts keep their first `length` positions, and so on. The tower runs over all their tokens
together, but for attention, which runs over each group. A text that is too long for its group gets
NaN as features: `fits` says so before.

Letters in shapes: B texts, L positions of a text, T tokens of all groups.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

Groups = tuple[tuple[int, int], ...]  # (length, rows) of each, from the shortest on

STEP = 8  # of a group's length: attention's kernels take 8 positions at a time
_FAILS = 1e-3  # of batches that do not fit, at most
_DRIFT = 0.05  # of texts in longer groups: later texts may be a little longer
_LEAST_GAIN = 0.1  # of the tokens
_GAIN_OF_A_GROUP = 0.03  # of the tokens: each has kernels of its own


def text_ends(text_BL: jax.Array, eot_id: int | None) -> jax.Array:
  """int32 [B]: the position of each text's end token, as `TextConfig.eot_id` says."""
  return jnp.argmax(text_BL if eot_id is None else text_BL == eot_id, axis=1)


def text_fits(text_BL: jax.Array, groups: Groups, eot_id: int | None) -> jax.Array:
  """bool []: whether no text is too long for its group."""
  _, ends_B = _sorted(text_BL, eot_id)
  return jnp.all(ends_B < _lengths(groups))


def group_texts(
  text_BL: jax.Array, groups: Groups, eot_id: int | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Texts as one row of tokens.

  Returns:
    tokens: int32 [T], the groups' rows one after the other.
    ends: int32 [B], in the order of the texts, the place of each one's end token in `tokens`.
    fits: bool [B], whether that place holds it.

  Raises:
    ValueError: the groups are not for B texts of L positions.
  """
  batch, length = text_BL.shape
  if sum(rows for _, rows in groups) != batch or any(not 0 < each <= length for each, _ in groups):
    raise ValueError(f"{groups=} must have {batch} rows in all, of up to {length} positions.")
  order_B, ends_B = _sorted(text_BL, eot_id)
  lengths_B, starts_B = _lengths(groups), _starts(groups)
  parts, first = [], 0
  for each, rows in groups:
    parts.append(text_BL[order_B[first : first + rows], :each].reshape(-1))
    first += rows
  fits_B = ends_B < lengths_B
  places_B = starts_B + jnp.minimum(ends_B, lengths_B - 1)
  back_B = jnp.argsort(order_B)
  return jnp.concatenate(parts), places_B[back_B], fits_B[back_B]


def positions_of_groups(x_LD: jax.Array, groups: Groups) -> jax.Array:
  """[T, D]: of each token, the row of x of its position."""
  parts = [
    jnp.broadcast_to(x_LD[:length], (rows, *x_LD[:length].shape)).reshape(-1, x_LD.shape[1])
    for length, rows in groups
  ]
  return jnp.concatenate(parts)


def choose_groups(
  counts: Sequence[int] | np.ndarray, rows: int, *, at_most: int, batches: int = 1
) -> Groups:
  """The groups that take the fewest tokens; () if they save less than a tenth.

  Args:
    counts: how many of some texts have 1, 2, ... positions, up to the tower's: the sample that
      lengths are expected from.
    rows: texts of a batch.
    at_most: groups.
    batches: of so many rows, which must fit at the same time: those of all devices and microbatches
      of a step. At most one step in a thousand should not fit.
  """
  longest, total = len(counts), sum(counts)
  if at_most < 2 or not total:
    return ()
  cuts = range(STEP, longest, STEP)
  # Of `rows` texts, those longer than a cut, at most. Three more, since rare ones may not be there.
  longer = {
    cut: _upper_count(rows, min(1.0, (1 + _DRIFT) * (sum(counts[cut:]) + 3) / total), batches)
    for cut in cuts
  }
  best, fewest = (), (1 - _LEAST_GAIN) * rows * longest
  for number in range(1, at_most):
    fewest *= 1 - _GAIN_OF_A_GROUP * bool(best)
    for chosen in itertools.combinations(cuts, number):
      edges = [rows, *(longer[cut] for cut in chosen), 0]
      sizes = [more - fewer for more, fewer in itertools.pairwise(edges)]
      groups = tuple(zip((*chosen, longest), sizes, strict=True))
      if (tokens := token_count(groups)) < fewest and all(size > 0 for size in sizes[:-1]):
        best, fewest = tuple(group for group in groups if group[1]), tokens
  return best


def token_count(groups: Groups) -> int:
  """T, the tokens of all groups."""
  return sum(length * rows for length, rows in groups)


def _upper_count(rows: int, probability: float, batches: int) -> int:
  """A number that the count of such texts among `rows` nearly never exceeds."""
  from scipy.stats import binom  # JAX needs scipy; its import takes half a second.

  # Each of a few edges may fail.
  return int(binom.isf(_FAILS / (4 * batches), rows, probability))


def _sorted(text_BL, eot_id) -> tuple[jax.Array, jax.Array]:
  """The order of texts by length, and the positions of their ends in that order."""
  ends_B = text_ends(text_BL, eot_id)
  order_B = jnp.argsort(ends_B, stable=True)
  return order_B, ends_B[order_B]


def _lengths(groups: Groups) -> np.ndarray:
  """int32 [B]: the length of each row's group."""
  return np.concatenate([np.full(rows, length, np.int32) for length, rows in groups])


def _starts(groups: Groups) -> np.ndarray:
  """int32 [B]: where each row begins in the tokens."""
  lengths = _lengths(groups)
  return (np.cumsum(lengths) - lengths).astype(np.int32)
