"""Reads the result files: a line a measurement, of which a case's last on a chip counts."""

import json
from pathlib import Path

RESULTS = Path(__file__).with_name("results")
CHIP = "NVIDIA H200"  # The chip that most was measured on.


def read(name: str) -> list[dict]:
  rows = [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]
  for row in rows:
    if row.get("remat") == "full":  # As older rows call it.
      row["remat"] = "block"
  return rows


def last(rows, *keys) -> list[dict]:
  """The last of each case, in the order of the file."""
  found = {}
  for row in reversed(rows):
    found.setdefault(tuple(row[key] for key in keys), row)
  return list(reversed(found.values()))


def card_rows(path: Path, section: str) -> list[dict]:
  """A section's rows in a file that benchmarks/card.py wrote, with the chip in each."""
  card = json.loads(path.read_text())
  return [{"chip": card["chip"]} | row for row in card["sections"].get(section, {}).get("rows", [])]


def cards(section: str) -> list[dict]:
  """The rows of all cards among the result files, but those of a backend that was named."""
  paths = sorted(RESULTS.glob("card_*.json"))
  return [
    row
    for path in paths
    if not json.loads(path.read_text()).get("backend")
    for row in card_rows(path, section)
  ]
