"""Floating-point operations of a training step, and how many a chip can do."""

from sbjax.models.sizes import CLIPConfig

# Of bfloat16 a second, dense, from NVIDIA's sheets. A chip that is not here gets no MFU.
BF16_PEAK = {
  "NVIDIA H200": 989.4e12,
  "NVIDIA H100 80GB HBM3": 989.4e12,
  "NVIDIA A100-SXM4-40GB": 312e12,
  "NVIDIA A100-SXM4-80GB": 312e12,
}


def model_flops(config: CLIPConfig, batch_size: int, patch_dropout: float = 0.0) -> float:
  """Of a step: 6 for each weight and token, 12 * length * width for each token's attention.

  Patches that are dropped are embedded, and go no further. What remat or microbatches compute
  again is not counted.
  """
  vision, text = config.vision, config.text
  kept = max(1, int(vision.patches * (1 - patch_dropout))) + 1
  total = 0.0
  for tower, length in ((vision, kept), (text, text.context_length)):
    weights = tower.width**2 * 4 + 2 * tower.width * int(tower.width * tower.mlp_ratio)
    total += tower.layers * length * (6 * weights + 12 * length * tower.width)
    total += 6 * tower.width * config.embed_dim
  # Pixels take no gradient.
  total += 4 * vision.patches * 3 * vision.patch_size**2 * vision.width
  return batch_size * (total + 6 * batch_size * config.embed_dim)
