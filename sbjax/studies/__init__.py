"""Methods that papers name and the core does not need; nothing here is imported by it."""
