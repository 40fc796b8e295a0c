"""Floating-point operations of a training step, and the peak rates of GPUs."""

from sbjax.models.sizes import CLIPConfig, kept_patches

# Dense bfloat16 operations a second, from NVIDIA's data sheets. Other devices get no MFU.
BF16_PEAK = {
  "NVIDIA H200": 989.4e12,
  "NVIDIA H100 80GB HBM3": 989.4e12,
  "NVIDIA A100-SXM4-40GB": 312e12,
  "NVIDIA A100-SXM4-80GB": 312e12,
}


def model_flops(config: CLIPConfig, batch_size: int, patch_dropout: float = 0.0) -> float:
  """Operations of a step: 6 for each weight and token, 12 * length * width for a token's attention.

  Dropped patches count in the patch embedding only. Recomputation by remat or microbatches does not
  count.
  """
  vision, text = config.vision, config.text
  kept = kept_patches(vision.patches, patch_dropout) + 1
  total = 0.0
  for tower, length in ((vision, kept), (text, text.context_length)):
    weights = tower.width**2 * 4 + 2 * tower.width * int(tower.width * tower.mlp_ratio)
    total += tower.layers * length * (6 * weights + 12 * length * tower.width)
    total += 6 * tower.width * config.embed_dim
  # Pixels take no gradient.
  total += 4 * vision.patches * 3 * vision.patch_size**2 * vision.width
  return batch_size * (total + 6 * batch_size * config.embed_dim)
