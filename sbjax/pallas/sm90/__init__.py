"""Kernels for Hopper (H100, H200), compute capability 9.0: Pallas Mosaic GPU, wgmma and TMA."""
