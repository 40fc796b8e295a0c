"""Batches of images to evaluate or to embed: decoded in threads, in the order of the examples."""

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from train.data.machine import cores


def decoded(
  examples: Iterable[dict[str, Any]],
  crop: Callable[[dict[str, Any]], dict[str, Any]],
  batch_size: int,
  skipped: list[tuple[str, str]] | None = None,
) -> Iterator[dict[str, Any]]:
  """Batches of examples with their pixels, made in threads, two batches ahead.

  {"where", "captions": lists, "label": int32 [b], "image": uint8 [b, S, S, 3]}; a batch may be
  smaller than `batch_size`.

  Args:
    examples: as `crop` takes them.
    crop: CentreCrop or Squash.
    skipped: takes ("where", reason) of an image that cannot be decoded; None: that is an error.
  """
  examples = iter(examples)

  def submitted():
    while group := list(itertools.islice(examples, batch_size)):
      yield [(example, pool.submit(crop, example)) for example in group]

  with ThreadPoolExecutor(cores()) as pool:
    ahead = collections.deque()
    for group in itertools.chain(submitted(), [None, None]):
      ahead.append(group)
      if len(ahead) > 2 and (batch := _batch(ahead.popleft(), skipped)):
        yield batch


def _batch(group, skipped) -> dict[str, Any] | None:
  """The batch of examples and the futures of their pixels; None if all are skipped."""
  examples, pixels = [], []
  for example, future in group:
    try:
      pixels.append(future.result()["image"])
    except ValueError as error:
      if skipped is None:
        raise
      skipped.append((example["where"], str(error)))
    else:
      examples.append(example)
  if not examples:
    return None
  return {
    "where": [example["where"] for example in examples],
    "captions": [example["captions"] for example in examples],
    "label": np.array([example["label"] for example in examples], np.int32),
    "image": np.stack(pixels),
  }
