"""Contrastive losses over a batch of B image-text pairs: image i belongs only to text i.

Both take L2-normalised features [B, E] of the *global* batch and the factor on their dot products
(not its logarithm). They return the mean loss of a pair and metrics, all float32. These are the
definitions, in plain jnp: if the features are sharded over the batch, XLA gathers one side's
[B, E], and each device holds its rows of the [B, B] logits. Training computes the same losses in
tiles (parallel/tiled_loss.py): train/task.py takes one of `LOSSES`.
"""

import jax
import jax.numpy as jnp

from train.parallel.tiled_loss import tiled_siglip, tiled_softmax


def softmax_contrastive(
  image_features: jax.Array, text_features: jax.Array, logit_scale: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """CLIP's symmetric cross-entropy (Radford et al. 2021, https://arxiv.org/abs/2103.00020)."""
  image_features, text_features = _float32(image_features, text_features)
  logits = logit_scale * _dot_products(image_features, text_features)
  # The diagonal, computed from a device's own rows: jnp.diagonal would gather all devices' logits.
  pairs = logit_scale * jnp.sum(image_features * text_features, axis=1)
  texts_of_image = jax.nn.logsumexp(logits, axis=1)
  images_of_text = jax.nn.logsumexp(logits, axis=0)
  loss = jnp.mean((texts_of_image + images_of_text) / 2 - pairs)
  return loss, {"accuracy": _accuracy(logits)}


def siglip(
  image_features: jax.Array,
  text_features: jax.Array,
  logit_scale: jax.Array,
  logit_bias: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Each of the B x B combinations is a yes or no (Zhai et al. 2023, https://arxiv.org/abs/2303.15343).

  `logit_scale` should start at 10 and `logit_bias` at -10: nearly all combinations are a no.
  """
  image_features, text_features = _float32(image_features, text_features)
  logits = logit_scale * _dot_products(image_features, text_features) + logit_bias
  sign = 2 * jnp.eye(logits.shape[0], dtype=jnp.float32) - 1
  loss = -jnp.mean(jnp.sum(jax.nn.log_sigmoid(sign * logits), axis=1))
  return loss, {"accuracy": _accuracy(logits)}


# The tiled losses by their names in a config, as functions of CLIP's outputs for this device's rows
# of the batch. `axes`: the mesh axes that split the batch inside jax.shard_map (tiled_loss.py).
LOSSES = {
  "softmax": lambda out, axes=(): tiled_softmax(
    out["image_features"], out["text_features"], out["logit_scale"], axes=axes
  ),
  "siglip": lambda out, axes=(): tiled_siglip(
    out["image_features"],
    out["text_features"],
    out["logit_scale"],
    out["logit_bias"],
    axes=axes,
  ),
}


def _float32(*features):
  return (f.astype(jnp.float32) for f in features)


def _dot_products(image_features, text_features):
  # An f32 matmul is TF32 by default on a GPU: 3 digits, too few for logits of up to 100.
  return jnp.dot(image_features, text_features.T, precision="highest")


def _accuracy(logits):
  """The fraction of images whose own text has the highest logit in the batch."""
  return jnp.mean((jnp.argmax(logits, axis=1) == jnp.arange(logits.shape[0])).astype(jnp.float32))
