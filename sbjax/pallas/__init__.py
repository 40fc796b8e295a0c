"""Kernels, with the signatures of their definitions: a folder is for one kind of device."""
