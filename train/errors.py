"""Errors that a user can fix: `main` prints them as one message, without a traceback."""


class RunError(Exception):
  """A run cannot go on; the message gives the reason and the remedy."""
