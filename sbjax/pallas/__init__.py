"""Kernels: a file has one operation for one kind of device, with the definition's signature."""
