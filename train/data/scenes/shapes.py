"""A table of the signed distances of 32 shapes, from which scenes take their masks.

Each shape lies in the unit circle, with y downwards. Distances are negative inside. They are exact
for polygons and circles; a maximum of two of them is a bound, which is exact at the outline.
"""

import functools

import numpy as np

from train.data.scenes.words import SHAPES

GRID = 64  # points a side
REACH = 1.25  # the table covers [-REACH, REACH] along both axes


@functools.cache
def signed_distances() -> np.ndarray:
  """float32 [32, GRID, GRID] in the order of SHAPES; the axes are shape, y and x.

  The values are multiples of 1 / 4096, so that they are the same on every machine.

  >>> bool(signed_distances()[0, 32, 32] < 0), bool(signed_distances()[0, 0, 0] > 0)
  (True, True)
  """
  axis = np.linspace(-REACH, REACH, GRID)
  y, x = np.meshgrid(axis, axis, indexing="ij")
  drawn = _shapes(x, y)
  table = np.stack([drawn[name] for name in SHAPES])
  return (np.round(table * 4096) / 4096).astype(np.float32)


def _shapes(x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
  """The signed distance of every shape at the points (x, y)."""

  def polygon(*corners):
    return _polygon(np.array(corners, float), x, y)

  def star(points, inner, turn=0.0):
    radii = np.tile([1.0, inner], points)
    return _polygon(_polar(radii, turn), x, y)

  def circle(cx, cy, radius):
    return np.hypot(x - cx, y - cy) - radius

  def regular(sides, turn=0.0):
    return _polygon(_polar(np.ones(sides), turn), x, y)

  turns = np.linspace(0, 2 * np.pi, 96, endpoint=False)
  square = polygon((-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8))
  hole = polygon((-0.46, -0.46), (0.46, -0.46), (0.46, 0.46), (-0.46, 0.46))
  bar = np.maximum(abs(x) - 0.17, abs(y) - 1.0)
  bars = [np.maximum(abs(_turned(x, y, t)) - 0.17, np.hypot(x, y) - 1.0) for t in (60, 120)]
  lobes = [13, -5, -2, -1]
  height = -2.5 - sum(size * np.cos((i + 1) * turns) for i, size in enumerate(lobes))
  heart = np.stack([16 * np.sin(turns) ** 3, height], axis=1)
  drop = np.stack([0.66 * np.sin(turns) * np.sin(turns / 2), -np.cos(turns)], axis=1)
  arc = [(np.cos(t), np.sin(t)) for t in np.linspace(0, np.pi / 2, 24)]
  puffs = ((-0.55, 0.12, 0.42), (0.0, -0.2, 0.55), (0.55, 0.1, 0.43), (0.0, 0.25, 0.4))
  return {
    "circle": circle(0, 0, 0.95),
    "square": square,
    "triangle": regular(3),
    "star": star(5, 0.42),
    "cross": polygon(*_plus(0.3)),
    "ring": abs(circle(0, 0, 0.74)) - 0.22,
    "heart": _polygon(heart / 17.5, x, y),
    "crescent": np.maximum(circle(-0.05, 0, 0.95), -circle(0.4, 0, 0.8)),
    "arrow": polygon(
      *((-0.95, -0.22), (0.1, -0.22), (0.1, -0.62), (0.95, 0)),
      *((0.1, 0.62), (0.1, 0.22), (-0.95, 0.22)),
    ),
    "frame": np.maximum(square, -hole),
    "diamond": polygon((0, -1), (0.64, 0), (0, 1), (-0.64, 0)),
    "pentagon": regular(5),
    "octagon": regular(8, 22.5),
    "hexagram": star(6, 0.577),
    "sunburst": star(14, 0.66),
    "asterisk": np.minimum(bar, np.minimum(*bars)),
    "chevron": polygon((-0.7, -0.9), (0, -0.9), (0.8, 0), (0, 0.9), (-0.7, 0.9), (0.1, 0)),
    "ellipse": _polygon(np.stack([np.cos(turns), 0.58 * np.sin(turns)], axis=1), x, y),
    "rectangle": polygon((-0.95, -0.42), (0.95, -0.42), (0.95, 0.42), (-0.95, 0.42)),
    "capsule": np.hypot(np.maximum(abs(x) - 0.58, 0), y) - 0.4,
    "semicircle": np.maximum(circle(0, 0.45, 0.98), y - 0.45),
    "wedge": _polygon(np.array([(0, 0), *arc]) * 1.4 - 0.62, x, y),
    "trapezoid": polygon((-0.42, -0.65), (0.42, -0.65), (0.92, 0.65), (-0.92, 0.65)),
    "parallelogram": polygon((-0.45, -0.5), (0.98, -0.5), (0.45, 0.5), (-0.98, 0.5)),
    "kite": polygon((0, -0.95), (0.66, -0.32), (0, 1), (-0.66, -0.32)),
    "teardrop": _polygon(drop, x, y),
    "flower": _polygon(_polar(0.72 + 0.28 * np.cos(5 * turns)), x, y),
    "gear": _polygon(_polar(np.where(np.arange(96) // 6 % 2, 0.74, 1.0)), x, y),
    "lightning": polygon(
      *((0.2, -1), (-0.62, 0.14), (-0.1, 0.14), (-0.3, 1), (0.62, -0.24), (0.06, -0.24), (0.5, -1))
    ),
    "hourglass": polygon((-0.7, -0.9), (0.7, -0.9), (0.12, 0), (0.7, 0.9), (-0.7, 0.9), (-0.12, 0)),
    "house": polygon((0, -0.95), (0.85, -0.15), (0.62, -0.15), (0.62, 0.8), (-0.62, 0.8),
                     (-0.62, -0.15), (-0.85, -0.15)),
    "cloud": np.maximum(np.min([circle(*puff) for puff in puffs], axis=0), y - 0.5),
  }  # fmt: skip


def _polygon(corners: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
  """The signed distance of a polygon with corners [N, 2], by its edges and the even-odd rule."""
  squared, inside = np.full(x.shape, np.inf), np.zeros(x.shape, bool)
  for (ax, ay), (bx, by) in zip(corners, np.roll(corners, -1, axis=0), strict=True):
    ex, ey, px, py = bx - ax, by - ay, x - ax, y - ay
    along = np.clip((px * ex + py * ey) / (ex * ex + ey * ey), 0, 1)
    squared = np.minimum(squared, (px - along * ex) ** 2 + (py - along * ey) ** 2)
    crosses = (ay > y) != (by > y)
    inside ^= crosses & (px < (ex * py / ey if ey else 0))
  return np.sqrt(squared) * np.where(inside, -1, 1)


def _polar(radii: np.ndarray, turn: float = 0.0) -> np.ndarray:
  """Corners [N, 2] at equal angles, clockwise from the top, turned by degrees."""
  angles = np.linspace(0, 2 * np.pi, len(radii), endpoint=False) + np.radians(turn)
  return np.stack([radii * np.sin(angles), -radii * np.cos(angles)], axis=1)


def _plus(half: float) -> list[tuple[float, float]]:
  """The corners of a cross with arms of width 2 * half."""
  quarter = np.array([(half, -0.95), (half, -half), (0.95, -half)])
  turned = [quarter @ np.linalg.matrix_power([[0, 1], [-1, 0]], i) for i in range(4)]
  return [tuple(corner) for part in turned for corner in part]


def _turned(x: np.ndarray, y: np.ndarray, degrees: float) -> np.ndarray:
  """The first coordinate of points after a turn."""
  return x * np.cos(np.radians(degrees)) + y * np.sin(np.radians(degrees))
