"""Fully sharded weights in 8 bits, for code inside a `jax.shard_map`.

Each device keeps a shard of every weight and gathers the rest when it needs it (Rajbhandari et
al. 2020, https://arxiv.org/abs/1910.02054, stage 3). Two facts make int8 cheap here. The maximum
of a maximum is exact, so that shards quantized with the global absmax are the shards of the
quantized weight. And SwitchBack gives a weight one scale, or one for each column, which serves w
and w.T: one gather of one byte a parameter feeds the forward pass and the input gradient. The
gradient goes the other way: devices sum their shares and keep their shard.
"""

import functools

import jax
import jax.numpy as jnp

from sbjax.distributed.exchange import check_exchange, quantized_psum, quantized_psum_scatter
from sbjax.linear.weight import QuantizedWeight, as_kernel, quantize_weight
from sbjax.ops.partition import Axes, check_axes
from sbjax.quantize import Quantized, Spec, absmax_of, as_floating, floating_dtype, round_to
from sbjax.recipes import Recipe, as_recipe


def gather_weight(
  w: jax.Array,
  recipe: Recipe | str,
  axis_name: str | None,
  *,
  reduce_axes: Axes = (),
  dtype: jnp.dtype = jnp.bfloat16,
  gradient_dtype: jnp.dtype = jnp.float32,
  gradient_exchange: str = "float32",
  backend: str | None = None,
) -> QuantizedWeight | jax.Array:
  """A linear layer's kernel [K, N] from the shards [K / n, N] that n devices keep.

  The result goes wherever the kernel would (`quantized_dot`, `layer_norm_dense`,
  `layer_norm_mlp`, the collection "quantized" of SwitchBackDense) and gives the same numbers. A
  recipe that rounds w in both products gathers 8-bit values, and `master` of the QuantizedWeight is
  a placeholder of zeros that carries the gradient. A recipe that leaves w in 16 bits gathers it in
  `dtype`; one that rounds it in a single product gathers its float32.

  The gradient is summed over `axis_name` and `reduce_axes`, so each device's loss is its share of
  the whole: `local_sum / global_batch`.

  Args:
    w: this device's rows of the kernel, float32.
    recipe: a `Recipe` or the name of one in RECIPES.
    axis_name: the mesh axis over which K is split; None if each device has all of w.
    reduce_axes: further mesh axes whose devices see other data. Leave it empty in a `shard_map`
      with `check_vma=True`, which sums over these axes by itself.
    dtype: the compute dtype, for a weight that stays in 16 bits.
    gradient_dtype: in which devices add up the gradient; bfloat16 moves half of the bytes.
    gradient_exchange: the format in which it travels to float32 sums; see `quantized_pmean`.
    backend: quantizes a kernel that is not split; None chooses.

  Raises:
    ValueError: w is not [K / n, N], an unknown recipe or exchange, an axis that no shard_map has,
      or both a gradient_dtype and a gradient_exchange.

  >>> mesh = jax.make_mesh((1,), ("fsdp",), (jax.sharding.AxisType.Auto,))
  >>> def layer(x, w):
  ...   return quantized_dot(x, gather_weight(w, "switchback", "fsdp"), "switchback")
  >>> layer = jax.shard_map(layer, mesh=mesh, in_specs=(P("fsdp"), P("fsdp")), out_specs=P("fsdp"))
  >>> layer(jnp.ones((4, 32)), jnp.ones((32, 16))).shape
  (4, 16)
  """
  recipe, w, dtype = as_recipe(recipe), as_kernel("w", w), floating_dtype("dtype", dtype)
  _check_axes(axis_name, reduce_axes)
  how = (axis_name, 0, reduce_axes, _sums(gradient_dtype, gradient_exchange))
  if not recipe.rounds_w:
    return _gather(how, w.dtype if recipe.simulated else dtype, w)
  if recipe.fwd is None or recipe.dgrad is None:
    return quantize_weight(_gather(how, w.dtype, w), recipe, backend=backend)
  return _gather_weight(how, recipe, backend, w)


def gather(
  x: jax.Array,
  axis_name: str | None,
  *,
  axis: int = 0,
  reduce_axes: Axes = (),
  gradient_dtype: jnp.dtype = jnp.float32,
  gradient_exchange: str = "float32",
) -> jax.Array:
  """An array from the shards that devices keep, in x's dtype; its gradient is summed and split.

  Args:
    x: this device's shard.
    axis_name: the mesh axis over which `axis` of x is split; None if each device has all of x.
    axis: of x.
    reduce_axes, gradient_dtype, gradient_exchange: see `gather_weight`.
  """
  x = as_floating("x", x)
  _check_axes(axis_name, reduce_axes)
  if not isinstance(axis, int) or not 0 <= axis < max(x.ndim, 1):
    raise ValueError(f"{axis=} must be an axis of x {x.shape}, counted from 0.")
  how = axis_name, axis, reduce_axes, _sums(gradient_dtype, gradient_exchange)
  return _gather(how, x.dtype, x)


def _sums(gradient_dtype, gradient_exchange: str) -> tuple[jnp.dtype, str]:
  """How devices sum a gradient: the dtype of the sums, and the format that travels."""
  dtype = floating_dtype("gradient_dtype", gradient_dtype)
  if check_exchange(gradient_exchange) != "float32" and dtype != jnp.float32:
    raise ValueError(
      f"{gradient_exchange=} sums in float32: leave gradient_dtype at float32, not {dtype.name}."
    )
  return dtype, gradient_exchange


def _check_axes(axis_name, reduce_axes) -> None:
  names = reduce_axes if isinstance(reduce_axes, tuple) else (reduce_axes,)
  check_axes(names if axis_name is None else (axis_name, *names), "gather")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(how, dtype, x):
  axis_name, axis, *_ = how
  return x if axis_name is None else _all_gather(x.astype(dtype), axis_name, axis).astype(x.dtype)


_gather.defvjp(
  lambda *args: (_gather(*args), None),
  lambda how, dtype, _, gradient: (_reduce_scatter(gradient, *how),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather_weight(how, recipe, backend, w):
  axis_name = how[0]
  if axis_name is None:
    return quantize_weight(w, recipe, backend=backend)
  (_, fwd), (_, dgrad) = recipe.fwd, recipe.dgrad
  values = _quantize_shards(w, dgrad, axis_name, contracted=1)
  transposed = None  # The layer makes it of `values`, again for a backward pass that repeats it.
  if not recipe.shares_w:
    transposed = _quantize_shards(w, fwd, axis_name, contracted=0)
  rows = jax.lax.axis_size(axis_name) * w.shape[0]
  master = jnp.zeros((rows, w.shape[1]), w.dtype)
  # Each device has a gradient of its own for it, where types say so (check_vma=True).
  return QuantizedWeight(jax.lax.pcast(master, axis_name, to="varying"), transposed, values)


_gather_weight.defvjp(
  lambda *args: (_gather_weight(*args), None),
  lambda how, recipe, backend, _, gradient: (_reduce_scatter(gradient.master, *how),),
)


def _quantize_shards(w, spec: Spec, axis_name, contracted: int) -> Quantized:
  """`quantize` of the whole kernel [K, N], or of its transpose [N, K] if K is contracted.

  `contracted` is the axis of w along which a row-wise scale is shared: 0 is K, which is split.
  """
  x, split = (w, 0) if contracted else (w.T, 1)
  absmax = absmax_of(x, spec)
  if spec.takes_absmax and spec.axis in (split, None):
    absmax = jax.lax.pmax(absmax, axis_name)
  rounded = round_to(x, absmax, spec)
  values, scale = rounded.values, rounded.scale
  if spec.axis == 1 - split:
    scale = _all_gather(scale, axis_name, split)
  values = _all_gather(values if contracted else values.T, axis_name, 0)
  return Quantized(values if contracted else values.T, scale, spec)


def _all_gather(x, axis_name, axis):
  return jax.lax.all_gather(x, axis_name, axis=axis, tiled=True)


def _reduce_scatter(gradient, axis_name, axis, reduce_axes, sums):
  """A gradient summed over devices; this device's shard where the parameter is split."""
  dtype, exchange = sums
  if exchange != "float32":
    if axis_name is not None:
      gradient = quantized_psum_scatter(gradient, axis_name, axis=axis, format=exchange)
    return quantized_psum(gradient, reduce_axes, format=exchange) if reduce_axes else gradient
  total = gradient.astype(dtype)
  if axis_name is not None:
    total = jax.lax.psum_scatter(total, axis_name, scatter_dimension=axis, tiled=True)
  total = jax.lax.psum(total, reduce_axes) if reduce_axes else total
  return total.astype(gradient.dtype)
