"""Files of open_clip, transformers, Flax and JAX: architectures, weights, containers."""
