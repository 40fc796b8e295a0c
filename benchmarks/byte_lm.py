"""A causal language model over bytes, built of the project's blocks; benchmarks/width_transfer.py.

It is a text tower without pooling: embeddings, blocks, a layer norm and a head of 256 logits. The
parametrization "unit" has munit's head: N(0, 1), divided by the width.
"""

import functools
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from sbjax import quantized_dot
from sbjax.linear.layers import Embedding
from sbjax.linear.quantized_dot import times
from sbjax.models.clip import text_inits
from sbjax.models.sizes import TextConfig
from sbjax.models.transformer import Block, BlockOptions, blocks, layer_norm
from sbjax.models.unit_block import UNIT_INITS, UnitBlock
from sbjax.studies import unit_scaling as us

VOCABULARY, HEAD_WIDTH = 256, 64
_TEST_SHARE = 20  # One byte in so many, at the end, is for the test.


def config_of(width: int, layers: int, length: int) -> TextConfig:
  """A tower whose heads are as wide at every width, so that logits mean the same."""
  heads = max(width // HEAD_WIDTH, 1)
  return TextConfig(
    context_length=length, vocab_size=VOCABULARY, width=width, layers=layers, heads=heads, eot_id=0
  )


class ByteLM(nn.Module):
  """Logits [B, L, 256] for the byte after each of ids [B, L], in the compute dtype."""

  config: TextConfig
  options: BlockOptions

  @nn.compact
  def __call__(self, ids: jax.Array) -> jax.Array:
    c, options, normal = self.config, self.options, nn.initializers.normal
    unit, shape = options.is_unit, (c.context_length, c.width)
    tokens, positions, head = (1.0, 1.0, 1.0) if unit else (0.02, 0.01, c.width**-0.5)
    x_BLD = Embedding(
      VOCABULARY, c.width, dtype=jnp.float32, embedding_init=normal(tokens), name="token_embedding"
    )(ids)
    x_BLD = x_BLD + self.param("positional_embedding", normal(positions), shape, jnp.float32)[None]
    x_BLD = times(x_BLD, 2**-0.5 if unit else 1).astype(options.dtype)
    block, inits = (UnitBlock, UNIT_INITS) if unit else (Block, text_inits(c.width, c.layers))
    x_BLD, _ = blocks(x_BLD, c, options, block=block, causal=True, inits=inits)
    x_BLD = layer_norm(x_BLD, "ln_final", c.norm_epsilon)
    w = self.param("head", normal(head), (c.width, VOCABULARY), jnp.float32)
    how = {"recipe": "full", "backend": options.backend}
    return us.linear_readout(x_BLD, w, **how) if unit else quantized_dot(x_BLD, w, **how)


def loss_of(model: ByteLM, params, windows: jax.Array) -> jax.Array:
  """The mean cross entropy of windows [B, L + 1] in nats a byte; unit scaling's for "unit"."""
  ids = windows.astype(jnp.int32)
  logits = model.apply({"params": params}, ids[:, :-1])
  if model.options.is_unit:  # Its gradient is not divided by the number of bytes.
    return us.cross_entropy(logits, ids[:, 1:])
  losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), ids[:, 1:])
  return jnp.mean(losses)


def read_captions(paths: Sequence[str | Path]) -> np.ndarray:
  """The captions of tar shards (members .json with "captions"), or text files, as uint8 [N].

  Raises:
    ValueError: a file is missing or has no captions.
  """
  parts = []
  for path in map(Path, paths):
    if not path.is_file():
      raise ValueError(f"There is no file {path}: give tar shards with captions, or text files.")
    parts.append(_shard(path) if ".tar" in path.name else path.read_text().strip())
    if not parts[-1]:
      raise ValueError(f"{path} has no captions: expected members .json with a list 'captions'.")
  return np.frombuffer("\n".join(parts).encode(), np.uint8)


def _shard(path: Path) -> str:
  with tarfile.open(path) as shard:
    members = [m for m in shard if m.name.endswith(".json")]
    samples = [json.loads(shard.extractfile(m).read()) for m in members]
  return "\n".join(text.strip() for sample in samples for text in sample.get("captions", ()))


def split(data: np.ndarray, steps: int, batch: int, length: int, tests: int, seed: int = 0):
  """Where each training window begins, int32 [steps, batch], and test windows [tests, length + 1].

  Raises:
    ValueError: the data is too short.
  """
  end = len(data) - len(data) // _TEST_SHARE
  if len(data) - end <= length or end <= length:
    least = _TEST_SHARE * (length + 2)
    raise ValueError(f"The captions have {len(data)} bytes: windows of {length} need {least}.")
  starts = np.random.default_rng(seed).integers(0, end - length, (steps, batch), np.int32)
  places = np.linspace(end, len(data) - length - 1, tests).astype(int)
  return starts, np.stack([data[i : i + length + 1] for i in places])


def windows_at(data: jax.Array, starts: jax.Array, length: int) -> jax.Array:
  """The windows [B, length + 1] of data [N] that begin at starts [B]."""
  one = functools.partial(jax.lax.dynamic_slice_in_dim, data, slice_size=length + 1)
  return jax.vmap(one)(starts)
