"""Makes batches of examples, and captions of class names."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from train.config import DataConfig
from train.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Tokenize:
  """Makes a batch: stacks the images and tokenizes the captions."""

  tokenizer: Tokenizer
  context_length: int

  def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    return {
      "image": np.stack([example["image"] for example in examples]),
      "text": self.tokenizer([example["caption"] for example in examples], self.context_length),
    }


def stack(examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """A batch to evaluate."""
  return {
    "image": np.stack([example["image"] for example in examples]),
    "captions": [example["captions"] for example in examples],
    "label": np.array([example["label"] for example in examples], np.int32),
  }


def check_captions(data: DataConfig) -> None:
  """Raises a ValueError for a config without a source of captions."""
  if not (data.text_key or data.label_key):
    raise ValueError("Captions come from data.text_key or data.label_key: one of them must be set.")


def prompts(templates: Sequence[str], name: str) -> list[str]:
  """The captions of a class: its name in each template."""
  return [template.replace("{}", name) for template in templates]
