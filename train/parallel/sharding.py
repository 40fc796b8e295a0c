"""Shardings of arrays: a mesh with the axes `data` and `fsdp`, and a rule for every parameter.

The batch is split over both axes. Parameters and optimizer state are split only over `fsdp`
(Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, stage 3), and each kernel is gathered
for its matmuls. A rule has a pattern for the parameter's path and the mesh axes of its trailing
dimensions. The leading layer axis of `nn.scan` is never split.
"""

import functools
import re
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sbjax.optim.state_formats import CompressedState, join_details, split_details
from train.config import MeshConfig

BATCH_AXES = ("data", "fsdp")

RULES = (
  (r"/(kernel|embedding)/", ()),  # 8 bits of one that is frozen, or an adapter
  (r"/(qkv|out|fc1|fc2)/kernel$", ("fsdp", None)),
  (r"/patch_embedding/kernel$", (None, "fsdp")),
  (r"/token_embedding/embedding$", (None, "fsdp")),
  (r"/proj$", ("fsdp", None)),
  (r"/(class|positional)_embedding$", ()),
  (r"/(bias|scale|gamma|proj_bias|probe)$", ()),
  (r"^logit_(scale|bias)$", ()),
)


def make_mesh(config: MeshConfig, devices=None) -> Mesh:
  """All devices as a `data` x `fsdp` mesh; a size of -1 is the devices divided by the other."""
  devices = np.asarray(jax.devices() if devices is None else devices)
  data, fsdp = config.data, config.fsdp
  if data == -1 and fsdp > 0:
    data = devices.size // fsdp
  elif fsdp == -1 and data > 0:
    fsdp = devices.size // data
  if data < 1 or fsdp < 1 or data * fsdp != devices.size:
    raise ValueError(
      f"mesh.data={config.data} x mesh.fsdp={config.fsdp} does not make {devices.size} devices;"
      " set one of them to -1, and the other to a divisor of the number of devices."
    )
  return Mesh(devices.reshape(data, fsdp), BATCH_AXES)


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def rows_to_devices(mesh: Mesh) -> Callable[[dict], dict]:
  """A function from this process's rows of a batch, by name, to the batch of all processes."""
  put = functools.partial(jax.make_array_from_process_local_data, batch_sharding(mesh))
  return lambda batch: {name: put(values) for name, values in batch.items()}


def path_name(path) -> str:
  """A parameter's path as "image/blocks/fc1/kernel"."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def parameter_axes(name: str) -> tuple[str | None, ...]:
  """The mesh axes that RULES gives to the trailing dimensions of a parameter.

  Raises:
    ValueError: no rule covers it.
  """
  axes = next((axes for pattern, axes in RULES if re.search(pattern, name)), None)
  if axes is None:
    raise ValueError(f"No sharding rule covers parameter {name!r}; add one to RULES.")
  return axes


def parameter_shardings(params, mesh: Mesh):
  """The tree of NamedShardings that RULES gives to a tree of parameters (or their shapes).

  Raises:
    ValueError: no rule covers a parameter, or an axis does not divide its dimension.
  """

  def sharding(path, leaf):
    name = path_name(path)
    axes = parameter_axes(name)
    spec = (None,) * (leaf.ndim - len(axes)) + axes
    for size, axis in zip(leaf.shape, spec, strict=True):
      if axis is not None and size % mesh.shape[axis]:
        raise ValueError(
          f"mesh.{axis}={mesh.shape[axis]} does not divide a dimension of {size} of parameter"
          f" {name!r} {leaf.shape}; choose a divisor."
        )
    return NamedSharding(mesh, PartitionSpec(*spec))

  return jax.tree_util.tree_map_with_path(sharding, params)


def parameter_specs(params, mesh: Mesh):
  """The PartitionSpecs of `parameter_shardings`, for a `shard_map`."""
  return jax.tree.map(lambda sharding: sharding.spec, parameter_shardings(params, mesh))


def state_shardings(state, params, mesh: Mesh):
  """Shardings for any tree that holds copies of `params`, such as an optimizer's state.

  A leaf whose path contains a parameter's ("0/mu/image/proj"), with as many axes as the parameter,
  is split like the parameter along the axes that have the same size, and so are the scales of a
  `CompressedState`. All other leaves are replicated.
  """
  shardings = parameter_shardings(params, mesh)
  known = {
    path_name(path): (leaf.shape, sharding)
    for (path, leaf), sharding in zip(
      jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(shardings), strict=True
    )
  }

  def sharding(path, leaf):
    size = len(path)
    parts = (path_name(path[i:j]) for i in range(size) for j in range(size, i, -1))
    owner = next((known[name] for name in parts if name in known), None)
    if owner is None or len(owner[0]) != leaf.ndim:
      return replicated(mesh)
    shape, of_parameter = owner
    spec = (*of_parameter.spec, *[None] * (leaf.ndim - len(of_parameter.spec)))
    axes = [
      a if own == whole else None for a, own, whole in zip(spec, leaf.shape, shape, strict=True)
    ]
    return NamedSharding(mesh, PartitionSpec(*axes))

  def sharding_of(path, node):
    if not isinstance(node, CompressedState):
      return sharding(path, node)
    joined = jax.tree_util.tree_map_with_path(
      lambda rest, leaf: sharding((*path, *rest), leaf), join_details(node)
    )
    return split_details(joined, replicated(mesh), replicated(mesh))

  return jax.tree_util.tree_map_with_path(
    sharding_of, state, is_leaf=lambda x: isinstance(x, CompressedState)
  )
