"""Seconds of training to an accuracy (docs/speedrun.md)."""
