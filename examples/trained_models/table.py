"""The table of docs/rounding.md about trained models, from the rows of rounding.py."""

NAMES = {"minilm": "MiniLM", "dino": "ViT-S/14"}


def of(rows) -> list[str]:
  """Lines of a table: a model's recipes in the order of the file, without rounding last."""
  head = ["model", "recipe", "outputs", "same neighbour, %", "gradient", "B*, pairs"]
  lines = [f"| {' | '.join(head)} |", "|---|---|---|---|---|---|"]
  latest = {(row["model"], row["recipe"]): row for row in rows}
  for model, name in NAMES.items():
    own = [row for (of_model, _), row in latest.items() if of_model == model]
    for row in sorted(own, key=lambda row: row["recipe"] == "full"):
      same, error = row["same_neighbour"]
      cells = [
        *(name, f"`{row['recipe']}`", _apart(*row["output_cosine"])),
        *(f"{100 * same:.1f} ± {100 * error:.1f}", _apart(*row["gradient_cosine"])),
        _critical(*row["critical_batch"]) if "critical_batch" in row else "",
      ]
      lines.append(f"| {' | '.join(cells)} |")
  return lines


def _apart(cosine: float, error: float) -> str:
  """10,000 x (1 - cosine) with its error; two or three figures."""
  value, error = 1e4 * (1 - cosine), 1e4 * error
  digits = 0 if value >= 27 else 1 if value > 1 else 2
  return f"{value:.{digits}f} ± {error:.{digits}f}"


def _critical(size, low, high) -> str:
  return f"at least {low:,.0f}" if high is None else f"{size:,.0f} ({low:,.0f} to {high:,.0f})"
