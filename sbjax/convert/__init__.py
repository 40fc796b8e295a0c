"""`quantize_model`: a model's matmuls in 8 bits, its code as it is. Files: sbjax.interop."""
