"""Text files that people wrote: UTF-8 with or without a byte-order mark, any line ends."""

from pathlib import Path

from train.errors import RunError


def read_lines(path: Path, keep_empty: bool = False) -> list[str]:
  """The lines without white space around them.

  keep_empty: also empty ones at the end, before the last line end.

  Raises:
    RunError: a line is not UTF-8; the message has its number.
  """
  content = path.read_bytes()
  try:
    text = content.decode("utf-8-sig")
  except UnicodeDecodeError as error:
    number = content.count(b"\n", 0, error.start) + 1
    line = content.split(b"\n")[number - 1]
    raise RunError(
      f"{path}, line {number}: {line[:80]!r} is not UTF-8. Save the file as UTF-8."
    ) from error
  # Unicode has further line ends, which may be in a line.
  lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
  lines = [line.strip() for line in lines]
  if not lines[-1]:  # After the last line end.
    lines.pop()
  while lines and not lines[-1] and not keep_empty:
    lines.pop()
  return lines
