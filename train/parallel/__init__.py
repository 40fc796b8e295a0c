"""Several devices and processes: who holds what, what they agree on, how they end together."""
