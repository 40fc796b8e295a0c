"""NVIDIA GPUs that are absent: JAX traces and compiles for them with its CUDA plugin installed."""

import contextlib
import dataclasses
import math

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import (
  AbstractDevice,
  AbstractMesh,
  AxisType,
  Mesh,
  NamedSharding,
  use_abstract_mesh,
)

_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152
  shared_memory_per_core: {per_core}  shared_memory_per_block_optin: {per_block}
  threads_per_core_limit: 2048  core_count: {cores}  fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}  l2_cache_size: {l2}  clock_rate_ghz: {clock}
  device_memory_size: {memory}  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: 0 }}
}}
platform_name: "CUDA"
device_description_str: "{kind}"
"""
_TARGETS = {
  80: dict(
    per_core=167936, per_block=166912, cores=108, fpus=64, bandwidth=2039040000000, l2=41943040,
    clock=1.41, memory=85100068864, major=8, kind="NVIDIA A100-SXM4-80GB",
  ),
  90: dict(
    per_core=233472, per_block=232448, cores=132, fpus=128, bandwidth=4800000000000, l2=52428800,
    clock=1.98, memory=151397597184, major=9, kind="NVIDIA H200",
  ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Device(AbstractDevice):
  compute_capability: str = ""


def mesh(capability: int, shape: tuple[int, ...], axes: tuple[str, ...]):
  """A mesh of absent devices, 80 for A100s and 90 for H200s; code within is traced for them."""
  target = _TARGETS[capability]
  topology = topologies.get_topology_desc(
    platform="cuda",
    topology=f"1x1x{math.prod(shape)}",
    target_config=_TARGET.format(**target),
  )
  device = Device(target["kind"], target["cores"], "gpu", f"{target['major']}.0")
  return mesh_of(topology.devices, device, shape, axes)


@contextlib.contextmanager
def mesh_of(devices, device: AbstractDevice, shape: tuple[int, ...], axes: tuple[str, ...]):
  """A mesh of absent devices of that kind; code within is traced for them."""
  kinds = (AxisType.Auto,) * len(axes)
  # Compilation needs it too: it lowers the partitioned operations.
  with use_abstract_mesh(AbstractMesh(shape, axes, kinds, abstract_device=device)):
    yield Mesh(np.array(devices).reshape(shape), axes)


def argument(mesh, shape, dtype, spec):
  return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
