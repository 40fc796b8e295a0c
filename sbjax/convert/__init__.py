"""Models as they are, in 8 bits: their matmuls, found in the jaxpr. Files: sbjax.interop."""
