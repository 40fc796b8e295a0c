"""StableAdamW, its moments in 8 bits, and loss scales, as optax has them."""
