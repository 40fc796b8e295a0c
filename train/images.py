"""Normalizes images on the device: until then they are bytes."""

import jax
import jax.numpy as jnp
import numpy as np

# Statistics of OpenAI's training images (Radford et al. 2021); later CLIP models use them too.
MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)


def normalize(image: jax.Array) -> jax.Array:
  """Normalizes uint8 [B, H, W, 3] by OpenAI's mean and deviation to float32 [B, H, W, 3]."""
  mean, std = MEAN.reshape(1, 1, 1, 3), STD.reshape(1, 1, 1, 3)
  return (image.astype(jnp.float32) / 255 - mean) / std
