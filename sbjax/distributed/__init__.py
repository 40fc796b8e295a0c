"""What devices exchange in 8 bits: gradients, and shards of weights."""
