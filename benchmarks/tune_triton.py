"""The tile configs of the Triton matmul that benchmarks/tune.py compares."""

from sbjax.pallas.triton import scaled_matmul as kernel
from sbjax.pallas.triton.call import compute_capability

CANDIDATES = [
  kernel.TileConfig(block_m=128, block_n=256, num_stages=3),
  kernel.TileConfig(block_m=128, block_n=256, num_stages=4),
  kernel.TileConfig(block_m=128, block_n=256, block_k=64, num_stages=4),
  kernel.TileConfig(block_m=256, block_n=128, num_stages=3),
  kernel.TileConfig(block_m=256, block_n=128, block_k=64, num_stages=4),
  kernel.TileConfig(),
  kernel.TileConfig(num_warps=4),
  kernel.TileConfig(block_k=64, num_warps=4, num_stages=4),
  kernel.TileConfig(block_k=64, num_warps=4, num_stages=4, group_m=16),
  kernel.TileConfig(block_m=64, block_n=256, num_warps=4, num_stages=3),
  kernel.TileConfig(block_m=128, block_n=64, num_warps=4, num_stages=4),
]
FOR_FEW_ROWS = [
  kernel.TileConfig(block_m=128, block_n=64, num_warps=4, num_stages=4),
  kernel.TileConfig(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=4),
  kernel.TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=4),
  kernel.TileConfig(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=6),
  kernel.TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=5),
  kernel.TileConfig(block_m=32, block_n=128, num_warps=4, num_stages=4),
  kernel.TileConfig(block_m=32, block_n=64, num_warps=4, num_stages=5),
]


def rule(m: int, n: int, k: int) -> kernel.TileConfig:
  """The config of a shape that is in no table."""
  del k
  return kernel.by_rule(m, n, compute_capability())
