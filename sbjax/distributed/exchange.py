"""Gradients exchanged between devices in 8 bits and summed in float32, inside a `jax.shard_map`.

An all-reduce in two phases. Each of n devices splits its gradient into n parts:

  1. It rounds the parts and sends part i to device i (all-to-all), which sums its n parts in
     float32. A reduce-scatter ends here.
  2. It rounds its sum and sends it to all devices (all-gather).

Nothing is added in 8 bits, so nothing overflows and devices need share no scale, unlike FP8-LM's
(Peng et al. 2023, https://arxiv.org/abs/2310.18313). All devices end with the same bits.

In 8 bits a value takes 1 + 4 / tile bytes a phase: `tile` neighbours in a part share a float32
scale. A NaN or an infinity makes its whole tile NaN on every device (in bfloat16 it stays alone).
Arrays are sent as uint8: XLA for CPUs sends fp8 as float16. A leaf of S values in 8 bits takes 2 S
bytes beside the gradient and the result, and 4 S / n for the device's own part in float32.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sbjax.ops.matmul import at_least_float32
from sbjax.ops.partition import Axes, check_axes
from sbjax.quantize import E4M3, INT8, Quantized, Spec, as_floating, dequantize, quantize

# How a format rounds a tile; None: it has no tiles. "float32" is JAX's own psum.
EXCHANGES = {
  "float32": None,
  "bfloat16": None,
  "e4m3": Spec(E4M3, "rowwise"),
  "int8": Spec(INT8, "rowwise"),
}
_BUCKET = 2**28  # Leaves travel together in messages of about so many bytes.


def quantized_pmean(
  tree, axis_name: Axes, *, format: str = "e4m3", tile: int = 512, min_size: int = 4096
):
  """The mean of a tree of arrays over devices, sent in few bits: `jax.lax.pmean` of gradients.

  For a `jax.shard_map` with check_vma=False; else JAX does not know that the result is the same on
  every device. It is: bit for bit. Leaves that are large enough share messages, so a tree takes
  one all-to-all and one all-gather for each 256 MB. Small leaves take one float32 sum together.

  Args:
    tree: any pytree of floating-point arrays: this device's gradients.
    axis_name: a mesh axis or several; over a single device the tree comes back as it is.
    format: "float32", "bfloat16", "e4m3" or "int8"; what travels. Sums are float32.
    tile: how many values share a scale.
    min_size: leaves with fewer values, or less than a tile for each device, are summed in float32.

  Returns:
    The tree, with the leaves' shapes and dtypes.

  Raises:
    ValueError: a leaf that is no floating-point array, an axis that no shard_map has, an unknown
      format, or a tile or min_size that is no whole number; or a derivative of a rounded exchange.

  >>> mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
  >>> specs = {"in_specs": P("data"), "out_specs": P(), "check_vma": False}
  >>> mean = jax.shard_map(lambda g: quantized_pmean(g, "data"), mesh=mesh, **specs)
  >>> mean({"w": jnp.ones((2, 3))})["w"].shape
  (2, 3)
  """
  return _all_reduce(tree, axis_name, format, tile, min_size, mean=True)


def quantized_psum(
  tree, axis_name: Axes, *, format: str = "e4m3", tile: int = 512, min_size: int = 4096
):
  """The sum of a tree of arrays over devices, sent in few bits; see `quantized_pmean`."""
  return _all_reduce(tree, axis_name, format, tile, min_size, mean=False)


def quantized_psum_scatter(
  x: jax.Array,
  axis_name: Axes,
  *,
  axis: int = 0,
  format: str = "e4m3",
  tile: int = 512,
  min_size: int = 4096,
) -> jax.Array:
  """This device's part of a sum over devices, sent in few bits: the first phase alone.

  `jax.lax.psum_scatter(x, axis_name, scatter_dimension=axis, tiled=True)` for gradients of
  parameters that are split over `axis_name` (Rajbhandari et al. 2020,
  https://arxiv.org/abs/1910.02054). The sum is rounded only once.

  Args:
    x: floating point, this device's gradient of the whole parameter.
    axis_name: n devices of a mesh axis, or of several.
    axis: of x, counted from 0, which is split into n parts: that of this device is returned.
    format, tile, min_size: see `quantized_pmean`.

  Raises:
    ValueError: as `quantized_pmean`, or n does not divide that axis of x.
  """
  x = as_floating("x", x)
  n = _check(axis_name, format, tile, min_size)
  if type(axis) is not int or not 0 <= axis < x.ndim or x.shape[axis] % n:
    raise ValueError(
      f"{axis=} must be an axis of x {x.shape}, counted from 0, that {n} devices divide."
    )
  if n == 1:
    return x
  if _is_small(x, n, format, tile, min_size):
    wide = at_least_float32(x)
    total = jax.lax.psum_scatter(wide, axis_name, scatter_dimension=axis, tiled=True)
    return total.astype(x.dtype)
  whole = jnp.moveaxis(x, axis, 0)
  shape = (whole.shape[0] // n, *whole.shape[1:])
  parts = whole.reshape(n, -1)
  parts = jnp.pad(parts, ((0, 0), (0, -parts.shape[1] % tile)))
  (total,) = _sums([parts], axis_name, format, tile)
  total = total[: math.prod(shape)].reshape(shape)
  return jnp.moveaxis(total, 0, axis).astype(x.dtype)


def _all_reduce(tree, axis_name, format, tile, min_size, mean: bool):
  n = _check(axis_name, format, tile, min_size)
  paths, structure = jax.tree_util.tree_flatten_with_path(tree)
  leaves = [as_floating(jax.tree_util.keystr(path) or "tree", leaf) for path, leaf in paths]
  if n == 1:
    return jax.tree.unflatten(structure, leaves)
  small = [i for i, x in enumerate(leaves) if _is_small(x, n, format, tile, min_size)]
  large = [i for i in range(len(leaves)) if i not in set(small)]
  totals: dict[int, jax.Array] = {}
  if small:
    sums = jax.lax.psum([at_least_float32(leaves[i]) for i in small], axis_name)
    totals.update(zip(small, [x / n for x in sums] if mean else sums, strict=True))
  for bucket in _buckets(large, [x.size for x in leaves]):
    parts = [_parts(leaves[i], n, tile) for i in bucket]
    sums = _sums(parts, axis_name, format, tile)
    sums = _gathered([x / n for x in sums] if mean else sums, axis_name, format, tile)
    totals.update(zip(bucket, sums, strict=True))
  totals = {i: x.reshape(-1)[: leaves[i].size].reshape(leaves[i].shape) for i, x in totals.items()}
  return jax.tree.unflatten(structure, [totals[i].astype(x.dtype) for i, x in enumerate(leaves)])


def check_exchange(format: str) -> str:
  """The format's name; a ValueError unless it is one of EXCHANGES."""
  if not isinstance(format, str) or format not in EXCHANGES:
    known = ", ".join(map(repr, EXCHANGES))
    raise ValueError(f"{format!r} is no format of a gradient exchange: take one of {known}.")
  return format


def _check(axis_name: Axes, format: str, tile: int, min_size: int) -> int:
  """The number of devices, if all arguments are valid."""
  check_exchange(format)
  for name, value, least in (("tile", tile, 1), ("min_size", min_size, 0)):
    if type(value) is not int or value < least:
      raise ValueError(f"{name}={value!r} must be a whole number, at least {least}.")
  check_axes(axis_name, "exchange gradients")
  return jax.lax.axis_size(axis_name)


def _is_small(x, n: int, format: str, tile: int, min_size: int) -> bool:
  """Whether x is summed in float32. With less than a tile a device, padding would be sent."""
  return format == "float32" or x.size < max(min_size, n * tile)


def _buckets(indices: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
  """The indices in groups of at most _BUCKET values, or of a single larger leaf."""
  buckets, filled = [], _BUCKET
  for i in indices:
    if filled + sizes[i] > _BUCKET:
      buckets.append([])
      filled = 0
    buckets[-1].append(i)
    filled += sizes[i]
  return buckets


def _parts(x, n: int, tile: int) -> jax.Array:
  """x [...] as [n, size], size a multiple of `tile`, with zeros at the end."""
  size = -(-x.size // (n * tile)) * tile
  return jnp.pad(x.reshape(-1), (0, n * size - x.size)).reshape(n, size)


def _sums(parts: Sequence[jax.Array], axis_name, format, tile) -> list[jax.Array]:
  """This device's parts [size], summed in float32, from all devices' [n, size]."""
  send = functools.partial(
    jax.lax.all_to_all, axis_name=axis_name, split_axis=0, concat_axis=0, tiled=True
  )
  return [jnp.sum(x, axis=0) for x in _sent(send, parts, format, tile)]


def _gathered(sums: Sequence[jax.Array], axis_name, format, tile) -> list[jax.Array]:
  """The sums [n, size] of all devices from this one's [size]."""
  send = functools.partial(jax.lax.all_gather, axis_name=axis_name, axis=0, tiled=True)
  return _sent(send, [x[None] for x in sums], format, tile)


def _sent(send: Callable, arrays: Sequence[jax.Array], format, tile) -> list[jax.Array]:
  """The float32 arrays [n, size] that arrive if all devices `send` theirs, in one message."""
  encoded = [_encode(x, format, tile) for x in arrays]
  arrived = send(jnp.concatenate(encoded, axis=1))
  ends = np.cumsum([x.shape[1] for x in encoded])
  each = jnp.split(arrived, ends[:-1], axis=1)
  return [_decode(a, x.shape[1], format, tile) for a, x in zip(each, arrays, strict=True)]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _encode(x, format: str, tile: int) -> jax.Array:
  """x [n, size] as bytes: the numbers of a row, then its scales."""
  if format == "bfloat16":
    numbers = [x.astype(jnp.bfloat16)]
  else:
    rounded = quantize(x.reshape(-1, tile), EXCHANGES[format])
    numbers = [rounded.values, rounded.scale]
  as_bytes = [jax.lax.bitcast_convert_type(a, jnp.uint8).reshape(len(x), -1) for a in numbers]
  return jnp.concatenate(as_bytes, axis=1)


@_encode.defjvp
def _encode_jvp(*_):
  raise ValueError(
    "An exchange of gradients has no derivative: apply it to the result of jax.grad, or use"
    " jax.lax.psum within the loss."
  )


def _decode(packed, size: int, format: str, tile: int) -> jax.Array:
  """The float32 numbers [n, size] in bytes [n, ...]."""
  n = len(packed)
  if format == "bfloat16":
    pairs = packed.reshape(n, size, 2)
    return jax.lax.bitcast_convert_type(pairs, jnp.bfloat16).astype(jnp.float32)
  spec = EXCHANGES[format]
  values = jax.lax.bitcast_convert_type(packed[:, :size], spec.dtype).reshape(-1, tile)
  scale = jax.lax.bitcast_convert_type(packed[:, size:].reshape(-1, 1, 4), jnp.float32)
  return dequantize(Quantized(values, scale, spec)).reshape(n, size)
