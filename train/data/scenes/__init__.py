"""Scenes: images and captions that the devices draw, without end."""
