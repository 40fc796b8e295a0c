"""The data sets of this project, as TFDS builders that need no TensorFlow."""
