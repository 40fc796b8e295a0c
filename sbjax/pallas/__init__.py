"""Kernels, with the signatures of their definitions: triton/ from the A100 on, sm90/ for Hopper."""
