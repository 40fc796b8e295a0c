"""Ways to compute a weight gradient `dw = x.T @ dy` from 8-bit operands, and how far off they are.

The sum runs over tokens: x [tokens, K] and dy [tokens, N] are rounded in tiles of so many tokens,
each feature of a tile with a scale of its own, and the tiles' products are added in float32.

What is measured is the rounding alone. 8-bit values are exact in bfloat16, and so is the float32
sum of up to 1,040 tokens' int8 products, which a kernel would make in int32; Hopper's sums of fp8
products have fewer bits than float32, as `as_trained` shows. A candidate is a function of x and dy,
so that a recipe can train with it: STUDIED.
"""

import dataclasses
from dataclasses import replace

import jax
import jax.numpy as jnp

from sbjax import linear
from sbjax.backends import get_backend
from sbjax.formats import max_value
from sbjax.quantize import Quantized, Spec, dequantize, factor_and_scale, largest, quantize
from sbjax.recipes import (
  LLM_INT8,
  SWITCHBACK,
  SWITCHBACK_E4M3_WGRAD,
  SWITCHBACK_FP8_WGRAD,
  Recipe,
  e4m3_row,
  e5m2_row,
  int8_row,
  int8_tensor,
)

DRAWS = 16  # Of a stochastic rounding, to see that their mean comes closer.


@dataclasses.dataclass(frozen=True)
class Candidate:
  x: Spec
  dy: Spec
  tile: int | None = None  # Tokens that share a scale; None: all.
  balanced: bool = False  # After `balance`.
  stochastic: bool = False
  reused: bool = False  # From the int8 tokens that the forward pass and dgrad multiplied.

  def __call__(self, x: jax.Array, dy: jax.Array) -> jax.Array:
    """dw [K, N] in float32; what is rounded stochastically is drawn by the sum of dy."""
    key = None
    if self.stochastic:
      total = jnp.sum(dy.astype(jnp.float32))
      key = jax.random.key(jax.lax.bitcast_convert_type(total, jnp.uint32))
    return weight_gradient(x, dy, self, key)


_INT8, _E4M3 = Candidate(int8_row, int8_row), Candidate(e4m3_row, e4m3_row)
# Tokens in int8 become features in int8: half the bytes to read, and one scale for a whole tile.
_REUSED = Candidate(int8_tensor, int8_tensor, balanced=True, reused=True)
CANDIDATES = {
  "int8, a scale per tensor": Candidate(int8_tensor, int8_tensor),
  "int8, per feature": _INT8,
  "e4m3 x e5m2, per feature": Candidate(e4m3_row, e5m2_row),
  "e4m3 x e4m3, per feature": _E4M3,
  # As DeepSeek-V3 scales activations, there in fp8 (2024, https://arxiv.org/abs/2412.19437, 3.3.2).
  **{f"int8, per feature and {n} tokens": replace(_INT8, tile=n) for n in (2048, 512, 128)},
  **{f"e4m3 x e4m3, per feature and {n} tokens": replace(_E4M3, tile=n) for n in (2048, 512, 128)},
  "stochastic int8, per feature": replace(_INT8, stochastic=True),
  "stochastic int8, per feature and 128 tokens": replace(_INT8, tile=128, stochastic=True),
  "balanced int8, per feature": replace(_INT8, balanced=True),
  **{
    f"balanced int8, per feature and {n} tokens": replace(_INT8, tile=n, balanced=True)
    for n in (2048, 512, 128)
  },
  "balanced e4m3 x e4m3, per feature": replace(_E4M3, balanced=True),
  **{f"balanced int8, per {n} tokens": replace(_REUSED, tile=n, reused=False) for n in (2048, 128)},
  **{
    f"balanced int8 of int8 tokens, per {n} tokens": replace(_REUSED, tile=n) for n in (2048, 128)
  },
}
# Recipes with these in plain jnp, to see whether they train: not how fast a kernel would be.
STUDIED = {
  f"switchback_{name}_wgrad": replace(SWITCHBACK, wgrad=CANDIDATES[candidate])
  for name, candidate in {
    "int8_tiles": "int8, per feature and 128 tokens",
    "stochastic_int8_tiles": "stochastic int8, per feature and 128 tokens",
    "balanced_int8_tiles": "balanced int8, per feature and 128 tokens",
  }.items()
}
# What the library names, with a step's own operands and products.
TRAINABLE = {
  "llm_int8": LLM_INT8,
  "switchback_fp8_wgrad": SWITCHBACK_FP8_WGRAD,
  "switchback_e4m3_wgrad": SWITCHBACK_E4M3_WGRAD,
}


def errors(x: jax.Array, dy: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
  """||dw - x.T @ dy|| / ||x.T @ dy|| of bfloat16, of every candidate and of what can be trained.

  A stochastic candidate has a second line: that of the mean of DRAWS draws.
  """
  exact = product(x, dy)

  def error(dw):
    return jnp.linalg.norm(dw - exact) / jnp.linalg.norm(exact)

  found = {"bf16": error(product(to_bfloat16(x), to_bfloat16(dy)))}
  for name, candidate in CANDIDATES.items():
    if candidate.stochastic:
      draw = lambda key, c=candidate: weight_gradient(x, dy, c, key)  # noqa: E731
      dws = jax.lax.map(draw, jax.random.split(key, DRAWS))
      found[name] = error(dws[0])
      found[f"{name}, mean of {DRAWS}"] = error(jnp.mean(dws, axis=0))
    else:
      found[name] = error(weight_gradient(x, dy, candidate))
  return found | {f"as trained: {n}": error(as_trained(x, dy, r)) for n, r in TRAINABLE.items()}


def weight_gradient(x, dy, candidate: Candidate, key: jax.Array | None = None) -> jax.Array:
  """x.T @ dy [K, N] of the rounded operands, in float32; `key` for a stochastic candidate."""
  x, dy = (a.astype(jnp.float32) for a in (x, dy))
  if candidate.reused:
    x, dy = (dequantize(kept_apart(quantize(a, int8_row))) for a in (x, dy))
  if candidate.balanced:
    x, dy = balance(x, dy)
  x_key, dy_key = (None, None) if key is None else jax.random.split(key)
  x = in_tiles(x, candidate.x, candidate.tile, x_key)
  dy = in_tiles(dy, candidate.dy, candidate.tile, dy_key)
  sums = jnp.einsum(
    "tkm,tnm->tkn",
    x.values.astype(jnp.bfloat16),
    dy.values.astype(jnp.bfloat16),
    preferred_element_type=jnp.float32,
  )
  return jnp.sum(sums * (x.scale * dy.scale.swapaxes(1, 2)), axis=0)


def as_trained(x, dy, recipe: Recipe) -> jax.Array:
  """x.T @ dy [K, N] as a step in bfloat16 computes it, on the backend that it chooses."""
  x, dy = (to_bfloat16(a).astype(jnp.bfloat16) for a in (x, dy))
  w = jnp.zeros((x.shape[1], dy.shape[1]), jnp.float32)
  return linear.wgrad(get_backend(), recipe, x, dy, w)


def product(x, dy) -> jax.Array:
  """x.T @ dy in float32, never TF32."""
  return jnp.dot(x.T, dy, precision="highest")


def to_bfloat16(x):
  """x rounded to bfloat16, in float32. XLA may drop two casts, but not this."""
  return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def balance(x: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
  """x and dy with the same product x.T @ dy, and for each token the same absmax.

  A token adds the outer product of its x and its dy: what multiplies one may divide the other.
  Tokens of x are much alike, layer norm sees to that; those of dy differ by orders of magnitude,
  and under one scale the largest takes the bits of all others. Balanced, both differ by the square
  root of that. A token that adds nothing is zero in both, and stretches no scale.
  """
  x_max, dy_max = (jnp.max(jnp.abs(a), axis=1, keepdims=True) for a in (x, dy))
  is_silent = (x_max == 0) | (dy_max == 0)
  factor = jnp.sqrt(dy_max / jnp.where(is_silent, 1.0, x_max))
  return (
    jnp.where(is_silent, 0.0, x * factor),
    jnp.where(is_silent, 0.0, dy / jnp.where(is_silent, 1.0, factor)),
  )


def in_tiles(x: jax.Array, spec: Spec, tile: int | None, key: jax.Array | None = None) -> Quantized:
  """x [tokens, K] in 8 bits, [tiles, K, tile]: `spec` says what shares a tile's scale.

  The last tile is filled up with zeros. With a key the rounding is stochastic.
  """
  (tokens, k), tile = x.shape, tile or len(x)
  filled = jnp.pad(x, ((0, -tokens % tile), (0, 0)))
  turned = filled.reshape(-1, tile, k).swapaxes(1, 2)  # [tiles, K, tile]
  if key is None:
    found = jax.vmap(lambda rows: quantize(rows, spec))(turned)
  else:
    keys = jax.random.split(key, len(turned))
    found = jax.vmap(lambda rows, key: quantize_stochastic(rows, spec, key))(turned, keys)
  return kept_apart(found)


def kept_apart(x: Quantized) -> Quantized:
  """x. XLA may drop a cast to 8 bits and back, but not around this."""
  return Quantized(jax.lax.optimization_barrier(x.values), x.scale, x.spec)


def quantize_stochastic(x: jax.Array, spec: Spec, key: jax.Array) -> Quantized:
  """`quantize` to int8 that rounds up as often as the part it cuts off says: its mean is x."""
  factor, scale = factor_and_scale(largest(x, spec), spec)
  limit = max_value(spec.dtype)
  values = jnp.floor(x.astype(jnp.float32) * factor + jax.random.uniform(key, x.shape))
  return Quantized(jnp.clip(values, -limit, limit).astype(spec.dtype), scale, spec)


def statistics(x: jax.Array, dy: jax.Array) -> dict[str, jax.Array]:
  """Why: how far the largest of what shares a scale is from the rest, and what a batch knows.

  {x, dy} peak: absmax / RMS, of the tensor, and the mean over features and over 128 tokens of a
    feature. Rounding to int8 makes a relative error of peak / (127 * sqrt(12)) where values are
    spread evenly. After `balance` too.
  {x, dy} kurtosis: the mean over features; 3 for a normal distribution.
  noise of the batch: the relative standard error of dw as an estimate for all data, from how far
    the gradients of the batch's two halves are apart.
  """
  found = {}
  balanced_x, balanced_dy = balance(x, dy)
  for name, a in {"x": x, "dy": dy, "balanced x": balanced_x, "balanced dy": balanced_dy}.items():
    tiles = a[: len(a) // 128 * 128].reshape(-1, 128, a.shape[1])
    found |= {
      f"{name}, peak of the tensor": _peak(a, (0, 1)),
      f"{name}, peak of a feature": _peak(a, 0),
      f"{name}, peak of 128 tokens": _peak(tiles, 1),
      f"{name}, kurtosis": jnp.nanmean(jnp.mean((a / _rms(a, 0)) ** 4, axis=0)),
    }
  half = len(x) // 2
  first, second = product(x[:half], dy[:half]), product(x[half:], dy[half:])
  noise = jnp.linalg.norm(first - second) / jnp.linalg.norm(first + second)
  return found | {"noise of the batch": noise}


def _peak(x, axis):
  return jnp.nanmean(jnp.max(jnp.abs(x), axis=axis, keepdims=True) / _rms(x, axis))


def _rms(x, axis):
  return jnp.sqrt(jnp.mean(x**2, axis=axis, keepdims=True))
