"""Other people's models: their matmuls, found in the jaxpr and computed in 8 bits."""
