"""Data sets: where pairs come from, how captions become ids and images pixels.

The way of an image in training: source.py finds the data set of the config. Of one on disk,
prepared.py reads records, augment.py decodes and crops their images, and prepared.py stacks a batch
with its token ids. prefetch.py puts batches on their devices for train/loop.py, whose step
normalizes the bytes (preprocessing.py, called by train/task.py) before the model. Data sets of
scenes/ have no files: their images are drawn on the devices.
"""
