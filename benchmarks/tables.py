"""Reads the result files. Each line is a measurement; the last of a case on a chip counts."""

import json
from pathlib import Path

RESULTS = Path(__file__).with_name("results")
CHIP = "NVIDIA H200"  # The chip that most was measured on.


def read(name: str) -> list[dict]:
  return read_file(RESULTS / f"{name}.jsonl")


def read_file(path: Path) -> list[dict]:
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  for row in rows:
    if row.get("remat") == "full":  # The name in older rows.
      row["remat"] = "block"
  return rows


def last(rows, *keys) -> list[dict]:
  """The last row of each case, in the order of the file."""
  latest = {}
  for row in reversed(rows):
    latest.setdefault(tuple(row[key] for key in keys), row)
  return list(reversed(latest.values()))


def name_of(chip: str) -> str:
  """A chip's short name: NVIDIA H100 80GB HBM3 is H100; as sm_80, if its code is for that."""
  return " as ".join(part.removeprefix("NVIDIA ").split()[0] for part in chip.split(" as "))


def card_rows(path: Path, section: str) -> list[dict]:
  """A section's rows in a file that benchmarks/card.py wrote, with the chip in each."""
  return _rows_of(json.loads(path.read_text()), section)


def cards(section: str) -> list[dict]:
  """The rows of all cards among the result files, without cards made with --backend."""
  files = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("card_*.json"))]
  return [row for card in files if not card.get("backend") for row in _rows_of(card, section)]


def _rows_of(card: dict, section: str) -> list[dict]:
  return [{"chip": card["chip"]} | row for row in card["sections"].get(section, {}).get("rows", [])]
