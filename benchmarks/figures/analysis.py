"""Means and 95 % intervals over runs, and differences that are paired by size and seed."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import t

from train.spikes import LEAD

TOP1 = "classes/zero_shot_top1"
HELD_OUT = "heldout/zero_shot_top1"
LOSS = "classes/zero_shot_loss"  # Rows from before 2026-11-29 lack it.
# Scores on photos, by the headings of their columns.
RECALL = {
  "image to text, %": "image_to_text_recall@1",
  "text to image, %": "text_to_image_recall@1",
}
CIFAR10 = {"top-1, %": "zero_shot_top1"}


class Estimate(NamedTuple):
  """A mean over n runs and half of its 95 % interval (Student's t); nan with one run."""

  mean: float
  half: float
  n: int

  def __str__(self) -> str:
    return f"{self.mean:.2f} ± {self.half:.2f}" if self.n > 1 else f"{self.mean:.2f} (1 seed)"

  def within(self, limit: float) -> str:
    """Whether the mean is in [-limit, limit]: "yes", "no", or "open" if some of its interval is.

    >>> [Estimate(mean, 0.3, 5).within(0.5) for mean in (0.1, 0.3, -0.9)]
    ['yes', 'open', 'no']
    """
    least, most = abs(self.mean) - self.half, abs(self.mean) + self.half
    return "yes" if most <= limit else "no" if least > limit else "open"


def estimate(values: Sequence[float]) -> Estimate:
  """The mean and half of its 95 % interval.

  >>> estimate([1.0, 3.0]).mean
  2.0
  """
  x = np.asarray(values, float)
  if len(x) < 2:
    return Estimate(float(x.mean()) if len(x) else math.nan, math.nan, len(x))
  half = t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / math.sqrt(len(x))
  return Estimate(float(x.mean()), float(half), len(x))


def by_run(rows: Sequence[dict], score: str = TOP1) -> dict[tuple[str, int], float]:
  """100 times the score of the rows that have it and did not diverge, by size and seed."""
  scored = [row for row in rows if score in row.get("scores", ())]
  return {(row["size"], row["seed"]): 100 * row["scores"][score] for row in scored}


def differences(ours: dict, base: dict) -> list[float]:
  """Ours minus base for each key that both have."""
  return [ours[key] - base[key] for key in sorted(ours.keys() & base.keys())]


def difference(ours: dict, base: dict) -> Estimate:
  """The mean of `differences`."""
  return estimate(differences(ours, base))


def slope_of(points: Sequence[tuple[float, float]]) -> Estimate:
  """The least-squares slope of points (x, y), and half of its 95 % interval.

  >>> slope_of([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)])
  Estimate(mean=2.0, half=0.0, n=3)
  """
  if len({x for x, _ in points}) < 2 or len(points) < 3:
    return Estimate(math.nan, math.nan, len(points))
  x, y = np.transpose(points)
  x, y, free = x - x.mean(), y - y.mean(), len(points) - 2
  slope = x @ y / (x @ x)
  error = math.sqrt(np.sum((y - slope * x) ** 2) / free / (x @ x))
  return Estimate(float(slope), float(t.ppf(0.975, free) * error), len(points))


def at_change(step: int, change: int | None) -> bool:
  """Whether a spike begins at a change of the data, or so soon after that it may be the cause.

  >>> at_change(3001, 3000), at_change(2999, 3000), at_change(5, None)
  (True, False, False)
  """
  return change is not None and 0 <= step - change <= LEAD
