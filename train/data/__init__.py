"""Data sets: where pairs come from, how captions become ids and images pixels.

The way of an image in training: source.py finds the data set of the config. Of one on disk,
prepared.py reads records, augment.py decodes and crops, and the tokenizer joins a batch.
prefetch.py puts batches on their devices for train/loop.py, whose step normalizes the bytes
(preprocessing.py, called by train/task.py) before the model. The scenes are drawn on the devices.
"""
