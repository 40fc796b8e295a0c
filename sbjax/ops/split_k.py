"""`x.T @ dy` in 16 bits: a sum over tokens in as many matmuls as keep a chip busy.

cuBLAS gives each core one tile of the output after another, and all wait for the last. A weight
gradient [1280, 5120] is 320 tiles of 128 x 160, on an H200's 132 cores 2.4 for each, in the time of
3. Two matmuls of half the tokens have 640, 4.8 in the time of 5, and take 15 % less, their sum
included. (benchmarks/results/wgrad_time.jsonl has the times; outputs with fewer tiles than cores
it splits itself.)
"""

import math

import jax
import jax.numpy as jnp

from sbjax.ops.device import compute_capability, num_sms, target
from sbjax.ops.matmul import full_dot
from sbjax.ops.partition import is_explicit, is_manual

# What cuBLAS cuts float32 outputs of bfloat16 matmuls into on Hopper.
_TILES = ((128, 256), (256, 128), (128, 160), (160, 128), (128, 320), (320, 128))
_MOST_PARTS, _WORTHWHILE = 4, 0.03
_FEWEST_TOKENS = 16384  # The sum of the parts costs the same however many there are.


def split_k_matmul(
  x: jax.Array, dy: jax.Array, dtype, out_sharding=None, *, parts: int | None = None
) -> jax.Array:
  """`x.T @ dy` [K, N] in `dtype` of x [tokens, K] and dy [tokens, N], summed in float32.

  Of p parts each takes every p-th token, so that tokens split over devices stay where they are.

  Args:
    out_sharding: jax.lax.dot_general's; counts in explicit mode, where there is always one matmul.
    parts: how many matmuls; None for what `num_splits` says.
  """
  if parts is None:
    parts = num_splits(x.shape[0], x.shape[1], dy.shape[1]) if x.dtype.itemsize == 2 else 1
  if parts == 1:
    return full_dot(x, dy, ((0,), (0,)), dtype, out_sharding)
  x, dy = (a.reshape(len(a) // parts, parts, a.shape[1]) for a in (x, dy))
  sums = jax.lax.dot_general(
    x, dy, (((0,), (0,)), ((1,), (1,))), preferred_element_type=jnp.float32
  )
  return jnp.sum(sums, axis=0).astype(dtype)


def num_splits(tokens: int, k: int, n: int) -> int:
  """How many matmuls `split_k_matmul` makes on the chip that this is traced for.

  Each device's share of the tokens must divide; how many devices there are is part of the answer.
  """
  device = target()
  cores = num_sms(device)
  if compute_capability(device) != 90 or cores is None or is_explicit():
    return 1
  if tokens < _FEWEST_TOKENS or math.ceil(k / 128) * math.ceil(n / 256) <= cores:
    return 1
  devices = 1 if is_manual() else jax.device_count()
  fitting = [p for p in range(1, _MOST_PARTS + 1) if tokens % (p * devices) == 0]
  busy = {p: _busy(p, k, n, cores) for p in fitting or [1]}
  return next(p for p, share in busy.items() if share > max(busy.values()) - _WORTHWHILE)


def _busy(parts: int, k: int, n: int, cores: int) -> float:
  """The share of the cores' time that matmuls fill, with the tile that suits best."""
  return max(
    parts * k * n / (math.ceil(parts * math.ceil(k / a) * math.ceil(n / b) / cores) * cores * a * b)
    for a, b in _TILES
  )
