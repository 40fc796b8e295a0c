"""Pictures travel as bytes, and become CLIP's input where it is needed: on the device."""

import jax
import jax.numpy as jnp
import numpy as np

# Of OpenAI's training images, which all CLIP models have used since (Radford et al. 2021).
MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)


def normalize(image: jax.Array) -> jax.Array:
  """uint8 [B, H, W, 3] as float32 with OpenAI's mean and deviation, [B, H, W, 3]."""
  mean, std = MEAN.reshape(1, 1, 1, 3), STD.reshape(1, 1, 1, 3)
  return (image.astype(jnp.float32) / 255 - mean) / std
