"""Kernels for NVIDIA GPUs from Ampere on, compute capability 8.0 and more: Triton by jax-triton."""
