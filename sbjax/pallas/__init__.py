"""Kernels: one operation on one kind of chip a file, with its definition's signature and bits."""
