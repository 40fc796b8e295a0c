"""How long a run's captions are: from a sample at its start, kept in its workdir.

The groups in which the text tower computes a batch follow from it (sbjax/models/text_groups.py), so
a run that continues has the same ones.
"""

import itertools
import json
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np

from train.data.tokenizer import Tokenizer
from train.errors import RunError
from train.parallel import agreement
from train.workdir import newest_step, write_json

_SAMPLE = 4096  # captions


def caption_lengths(
  captions: Iterable[str], tokenizer: Tokenizer, context_length: int, workdir: Path
) -> list[int]:
  """How many captions of a sample have 1, 2, ... `context_length` tokens.

  All processes must call this. Process 0 writes caption_lengths.json, unless there are checkpoints
  and the file is there.

  Raises:
    RunError: the file is damaged.
  """
  path = workdir / "caption_lengths.json"
  kept = newest_step(workdir / "checkpoints") is not None and path.is_file()
  if jax.process_index() == 0 and not kept:
    write_json(path, {"captions": _counts(captions, tokenizer, context_length)})
  agreement.gather("the lengths of captions", None)
  try:
    counts = json.loads(path.read_bytes())["captions"]
    if len(counts) != context_length or not all(type(n) is int and n >= 0 for n in counts):
      raise ValueError
  except (ValueError, LookupError, TypeError) as error:
    raise RunError(
      f"{path} should hold {context_length} numbers of captions. Delete it, and the same command"
      " makes it again."
    ) from error
  return counts


def _counts(captions: Iterable[str], tokenizer: Tokenizer, context_length: int) -> list[int]:
  ids = tokenizer(list(itertools.islice(captions, _SAMPLE)), context_length)
  lengths = np.argmax(ids == tokenizer.eot_id, axis=1) + 1
  return np.bincount(lengths, minlength=context_length + 1)[1:].tolist()
