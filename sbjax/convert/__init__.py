"""A model's matmuls and weights in 8 bits, its code as it is. Files: sbjax.interop."""
