"""The tile configs of Hopper's matmul that benchmarks/tune.py compares."""

import dataclasses

import jax

from sbjax.ops.device import num_sms
from sbjax.pallas.sm90 import scaled_matmul as kernel

CANDIDATES = [
  kernel.TileConfig(),
  kernel.WIDE,
  kernel.PINGPONG,
  dataclasses.replace(kernel.PINGPONG, raster_order="n", raster_width=16),
  dataclasses.replace(kernel.PINGPONG, raster_order="n", raster_width=16, block_n=160),
  kernel.TALL_PINGPONG,
  dataclasses.replace(kernel.TALL_PINGPONG, raster_order="n", raster_width=16),
]
FOR_FEW_ROWS = [
  kernel.TileConfig(),
  kernel.WIDE,
  kernel.SMALL,
  kernel.NARROW,
  kernel.TileConfig(block_m=64, block_n=128, schedule="cooperative_n", stages=8, cluster=None),
  kernel.TileConfig(block_m=64, block_n=64, schedule="cooperative_n", stages=12, cluster="m"),
]


def rule(m: int, n: int, k: int) -> kernel.TileConfig:
  """The config of a shape that is in no table."""
  return kernel.by_rule(m, n, k, num_sms(jax.devices()[0]) or 132)
