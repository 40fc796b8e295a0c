"""How 8 bits change a run's gradient and features: python -m train.rounding."""
