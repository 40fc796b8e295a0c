"""The table of remat policies in docs/performance.md; benchmarks/report.py writes it."""

from benchmarks.tables import last, name_of
from train.memory import FREE

# By memory: the GB that CUDA reports, and the chips.
CARDS = {
  "40 GB": (42.3, ("A100",)),
  "80 GB": (84.9, ("A100", "H100")),
  "141 GB": (150.8, ("H200",)),
}


def fits(gigabytes: float, card: float) -> bool:
  """Whether `remat="auto"` takes a step of so many GB, with JAX's limit at .95 of a card."""
  return gigabytes <= (1 - FREE) * 0.95 * card


def table(memory: list[dict], steps: list[dict]) -> list[str]:
  """A line for each step: on each card its policy, memory, and milliseconds where they were timed.

  Args:
    memory: rows of benchmarks/remat_memory.py.
    steps: rows of benchmarks/step.py.
  """
  heads = [f"{card} ({', '.join(chips)})" for card, (_, chips) in CARDS.items()]
  lines = ["| | images a batch | " + " | ".join(heads) + " |", "|---" * (2 + len(CARDS)) + "|"]
  times = _times(steps)
  for row in memory:
    cells = [_cell(row, times, *card) for card in CARDS.values()]
    lines.append(f"| ViT-{row['size']} | {row['batch_size']} | {' | '.join(cells)} |")
  return lines


def _cell(row: dict, times: dict, card: float, chips: tuple[str, ...]) -> str:
  totals = {policy: sum(found) for policy, found in row["gigabytes"].items()}
  policy = next((one for one in totals if fits(totals[one], card)), None)
  if policy is None:
    return "does not fit"
  cell = f"`{policy}`, {totals[policy]:.0f} GB"
  for chip in chips:
    if time := times.get((chip, row["size"], row["batch_size"], policy)):
      cell += f", {time:.0f} ms" + f" on an {chip}" * (len(chips) > 1)
  return cell


def _times(steps: list[dict]) -> dict[tuple, float]:
  """Milliseconds of `switchback` by chip, size, batch and policy."""
  times = {}
  for row in last([row for row in steps if not row.get("patch_dropout")], "chip", "size", "remat"):
    for name, one in row["contenders"].items():
      first, _, policy = name.partition("_")
      policy = {"": row["remat"], "no_remat": "none"}.get(policy, policy)
      if first == "switchback":
        case = name_of(row["chip"]), row["size"], row["batch_size"], policy
        times[case] = one["milliseconds"]
  return times
