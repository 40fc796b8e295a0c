"""Models whose linear layers follow a recipe."""
