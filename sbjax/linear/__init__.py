"""Linear layers in 8 bits: the matmuls, their gradients, and Flax's modules."""
