"""Operations: each one's definition in plain jnp, and who computes it."""
