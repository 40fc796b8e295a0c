"""docs/coming_from_open_clip.md: its two commands, and its row for each flag of open_clip."""

import pathlib
import re
import shlex
from typing import NamedTuple

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "coming_from_open_clip.md"


class Row(NamedTuple):
  flag: str  # of open_clip
  default: str
  ours: str
  difference: str


def rows() -> list[Row]:
  """The rows without those that name a group."""
  lines = re.findall(r"^\| `--.*", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
  return [Row(*(cell.strip().strip("`") for cell in line.strip("|").split("|"))) for line in lines]


def commands() -> list[list[str]]:
  """The arguments of open_clip's program and of ours, for the same run."""
  block = PAGE.read_text(encoding="utf-8").split("```")[1]
  lines = block.strip().replace("\\\n", " ").splitlines()
  return [shlex.split(line)[3:] for line in lines]


def our_flags() -> list[str]:
  """The flags of our programs that the page names, some with a value."""
  text = PAGE.read_text(encoding="utf-8")
  flags = re.findall(r"--config\.[^`\s]+", text)
  flags += [row.ours for row in rows() if row.ours.startswith("--")]
  return sorted({word for flag in flags for word in shlex.split(flag)})
