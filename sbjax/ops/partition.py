"""Any function of kernels on a mesh, by the names of its operands' axes: `partitioned`.

XLA cannot look into a kernel. By itself it would gather sharded operands and run the whole kernel
on every device. Here operands' axes have names, so that each device runs the kernel on its shard,
and reduces where a split axis asks for it. shards.py says how each operation reduces.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.custom_batching import sequential_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from sbjax.ops.device import target

Axes = str | tuple[str, ...]  # Names of mesh axes.
Names = tuple[str | None, ...]  # An operand's axes; None for one that is never split.

# What kernels are in StableHLO. JAX wants to be told that they are not stored for another JAX.
_KERNEL_CALLS = ("mosaic_gpu_v2", "triton_kernel_call", "triton_kernel_call_ffi")


def partitioned(
  local: Callable,
  operands: Sequence[jax.Array],
  inputs: Sequence[Names],
  outputs: Sequence[Names],
  multiple_of_16: Sequence[str] = (),
):
  """`local(run, {}, *operands)`, or on a mesh `local(run, split, *shards)` on every device.

  `split` maps an axis name to the mesh axes that split it; `local` reduces over these. Each axis
  keeps the sharding of the first operand that names it. Conflicting shardings are gathered, and so
  are sizes that a mesh axis does not divide.

  Args:
    local: returns a tuple of arrays. It calls a kernel as `run(kernel, *args, **options)`, with
      arrays and hashable values; its collectives are outside of these calls.
    inputs, outputs: the names of the operands' and the results' axes.
    multiple_of_16: names whose shards must be multiples of 16.
  """
  decide = functools.partial(_split, inputs=inputs, multiple_of_16=multiple_of_16)

  @sequential_vmap
  def run(*operands):
    mesh = jax.sharding.get_abstract_mesh()
    if is_manual():
      # Within a shard_map these are shards already. Kernels know of no varying axes, a module of
      # their own knows of no mesh.
      axes = _varying(operands)
      return _vary_over(axes, local(_call_lowered if axes else _call, {}, *operands))
    if is_explicit():
      split = decide(mesh.shape, [(x.shape, jax.typeof(x).sharding.spec) for x in operands])
      in_specs, out_specs = _specs(split, inputs), _specs(split, outputs)
      operands = jax.tree.map(jax.sharding.reshard, operands, in_specs)
      body = functools.partial(local, _call, split)
      return jax.shard_map(body, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*operands)
    return _automatic(local, decide, inputs, outputs)(*operands)

  return run(*operands)


def is_explicit() -> bool:
  """Whether types carry shardings here (jax.set_mesh with explicit axes)."""
  return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def is_manual() -> bool:
  """Whether arrays are a device's own here (jax.shard_map)."""
  return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types


def reshape(x: jax.Array, shape, splits) -> jax.Array:
  """x reshaped; in explicit mode, which wants the result's sharding, `splits` says it by axis.

  Merged axes have all the mesh axes of their parts; nothing moves if only the first was split.
  """
  return jax.lax.reshape(x, shape, out_sharding=P(*splits)) if is_explicit() else x.reshape(shape)


def splits_of(x: jax.Array) -> list[tuple[str, ...]]:
  """The mesh axes that split each axis of x, by its type."""
  return _splits(jax.typeof(x).sharding.spec, x.ndim)


def _splits(spec: P, ndim: int) -> list[tuple[str, ...]]:
  entries = [*spec, *[None] * (ndim - len(spec))]
  return [entry if isinstance(entry, tuple) else (entry,) if entry else () for entry in entries]


def merge_splits(splits) -> tuple[str, ...]:
  """The mesh axes of axes that become one."""
  return tuple(name for split in splits for name in split)


def unmerge_splits(merged, splits):
  """The mesh axes of axes that were one; none where an operation did not keep them."""
  return splits if merge_splits(splits) == merged else [()] * len(splits)


def as_rows(x: jax.Array) -> jax.Array:
  """x [..., K] as [rows, K]."""
  *lead, last = splits_of(x)
  return reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]), [merge_splits(lead), last])


def from_rows(y: jax.Array, x: jax.Array) -> jax.Array:
  """y [rows, N] as [..., N] with the leading axes of x."""
  rows, columns = splits_of(y)
  splits = [*unmerge_splits(rows, splits_of(x)[:-1]), columns]
  return reshape(y, (*x.shape[:-1], y.shape[1]), splits)


def check_axes(axes: Axes, action: str) -> tuple[str, ...]:
  """The names of mesh axes that this code runs over (jax.shard_map), or a ValueError."""
  axes = axes if isinstance(axes, tuple) else (axes,)
  for name in axes:
    if not isinstance(name, str) or not _is_bound(name):
      raise ValueError(
        f"{name!r} is no mesh axis here; {action} within a jax.shard_map over that axis."
      )
  return axes


def over_shards(reduce: Callable, x: jax.Array, axis_name: Axes | None = None) -> jax.Array:
  """`reduce(x, axes)`, such as `jax.lax.pmean`, over the devices that hold shards of a tensor.

  Args:
    x: what a device computed from its shard.
    axis_name: the mesh axes of these devices; () if each device has whole tensors. None: all axes
      that x varies over in a `jax.shard_map`. If it does not say so (check_vma=False, `jax.pmap`),
      all of its axes: the mean, the maximum and "all are finite" of equal numbers change nothing.
  """
  if axis_name is None:
    axes = jax.sharding.get_abstract_mesh().manual_axes
    axes = tuple(sorted(_varying([x]))) if types_vary(axes) else axes
  else:
    axes = check_axes(axis_name, "update shards")
  return reduce(x, axes) if axes else x


def types_vary(axes: tuple[str, ...]) -> bool:
  """Whether types say which arrays vary over these axes of a `jax.shard_map`."""
  return bool(axes) and bool(_varying([jax.lax.axis_index(axes[0])]))


def _is_bound(axis_name: str) -> bool:
  try:
    jax.lax.axis_size(axis_name)
  except NameError:
    return False
  return True


def arrays_of(args, options, kinds=(jax.Array, np.ndarray)) -> tuple[list, Callable]:
  """The arrays among arguments, and `call(function, *arrays)` with these in their places."""
  leaves, structure = jax.tree.flatten((args, options))
  places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, kinds)]

  def call(function, *arrays):
    filled = list(leaves)
    for i, array in zip(places, arrays, strict=True):
      filled[i] = array
    args, options = jax.tree.unflatten(structure, filled)
    return function(*args, **options)

  return [leaves[i] for i in places], call


def vary_alike(*arrays):
  """The arrays (pytrees), all varying over each mesh axis that any of them varies over.

  `jax.shard_map` with check_vma=True has this in types, and takes no gradient of another type than
  the operand's. JAX sums a gradient over devices where it meets such a cast.
  """
  return _vary_over(_varying(arrays), arrays)


def _varying(arrays) -> frozenset[str]:
  kinds = (jax.typeof(a).manual_axis_type for a in jax.tree.leaves(arrays))
  return frozenset().union(*(kind.varying for kind in kinds))


def _vary_over(axes: frozenset[str], arrays):
  def cast(array):
    missing = axes - jax.typeof(array).manual_axis_type.varying
    return jax.lax.pcast(array, tuple(sorted(missing)), to="varying") if missing else array

  return jax.tree.map(cast, arrays)


def _automatic(local, decide, inputs, outputs):
  """For `jit` as most use it: XLA decides about shardings while it compiles, and asks then."""
  whole = custom_partitioning(functools.partial(local, _call, {}))

  def partition(mesh, operands, results):
    split = decide(mesh.shape, [(x.shape, x.sharding.spec) for x in operands])
    to, of = (
      tuple(NamedSharding(mesh, spec) for spec in _specs(split, n)) for n in (outputs, inputs)
    )
    return mesh, functools.partial(local, _call_lowered, split), to, of

  whole.def_partition(partition, sharding_rule=_rule(inputs, outputs))
  return whole


def _call(kernel, *args, **options):
  return kernel(*args, **options)


def _call_lowered(kernel, *args, **options):
  """`kernel(*args, **options)`, by a module of its own that is lowered once a process.

  XLA asks for a module for each layer of a model. Lowering a kernel takes half a second; copying
  the lowered module takes some milliseconds.
  """
  arrays, call = arrays_of(args, options)
  shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
  leaves, structure = call(lambda *args, **options: jax.tree.flatten((args, options)), *shapes)
  return _lowered(kernel, structure, tuple(leaves), target()).call(*arrays)


@functools.cache
def _lowered(kernel, structure, leaves: tuple, device) -> jax.export.Exported:
  """The kernel as StableHLO for that device; of `leaves` ShapeDtypeStructs are arrays."""
  args, options = jax.tree.unflatten(structure, leaves)
  shapes, call = arrays_of(args, options, jax.ShapeDtypeStruct)
  run = functools.partial(call, kernel)
  here = jax.sharding.get_abstract_mesh().abstract_device
  platform = "cuda" if device.platform == "gpu" else device.platform
  checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in _KERNEL_CALLS]
  # One device's: of the mesh only the device it stands for counts.
  with use_abstract_mesh(AbstractMesh((), (), abstract_device=here)):
    export = jax.export.export(jax.jit(run), platforms=[platform], disabled_checks=checks)
    return export(*shapes)


def _split(
  mesh: Mapping[str, int],
  operands: Sequence,
  inputs: Sequence[Names],
  multiple_of_16: Sequence[str],
) -> dict[str, tuple[str, ...]]:
  """Which mesh axes each name is split over."""
  split, taken = {}, set()
  for names, (shape, spec) in zip(inputs, operands, strict=True):
    for name, size, axes in zip(names, shape, _splits(spec, len(shape)), strict=True):
      axes = tuple(axis for axis in axes if axis not in taken)
      parts = math.prod(mesh[axis] for axis in axes)
      fits = size % (parts * (16 if name in multiple_of_16 else 1)) == 0
      if name is not None and name not in split and parts > 1 and fits:
        split[name] = axes
        taken.update(axes)
  return split


def _specs(split, arrays: Sequence[Names]) -> tuple[P, ...]:
  return tuple(P(*(split.get(name) for name in names)) for names in arrays)


def _rule(inputs, outputs) -> str:
  """Shardy's einsum-like rule; an axis that is never split gets a letter of its own."""
  unnamed = (f"u{i}" for i in range(100))
  sides = [
    ", ".join(" ".join(name or next(unnamed) for name in names) for names in side)
    for side in (inputs, outputs)
  ]
  return " -> ".join(sides)
