"""Tar shards and their like, read where they lie: no import, no copy, exact to resume."""
