"""Text files that people wrote: UTF-8 with or without a byte-order mark, any line ends."""

from pathlib import Path

from train.errors import RunError


def read_lines(path: Path) -> list[str]:
  """The lines without white space around them; empty ones at the end are left out.

  Raises:
    RunError: a line is not UTF-8; the message has its number.
  """
  content = path.read_bytes()
  try:
    text = content.decode("utf-8-sig")
  except UnicodeDecodeError as error:
    number = content.count(b"\n", 0, error.start) + 1
    raise RunError(
      f"{path}, line {number}: {content.splitlines()[number - 1][:80]!r} is not UTF-8. Save the"
      " file as UTF-8."
    ) from error
  # Unicode has further line ends, which may be in a line.
  lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
  lines = [line.strip() for line in lines]
  while lines and not lines[-1]:
    lines.pop()
  return lines
