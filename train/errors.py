"""What a user can mend: `main` prints such an error as one message, without a traceback."""


class RunError(Exception):
  """A run cannot go on; the message says what stands in the way and what would be right."""
