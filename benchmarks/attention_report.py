"""The tables of attention in docs/performance.md; benchmarks/report.py writes them."""

import statistics

from benchmarks.tables import name_of

OURS = ("mosaic", "triton")
COUNTERS = (
  "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
  "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
  "smsp__issue_active.avg.pct_of_peak_sustained_active",
)


def table(rows: list[dict]) -> list[str]:
  lines = [
    "| forward / forward + backward, ms | batch, tokens, heads, head size | cuDNN"
    " | PyTorch's fastest | ours | over cuDNN |",
    "|---|---|---|---|---|---|",
  ]
  for row in rows:
    times = row["milliseconds"]
    torch, ours = fastest(row, "torch"), fastest(row, OURS)
    shape = f"{row['batch']}, {row['length']}, {row['heads']}, {row['head_dim']}"
    lines.append(
      f"| {row['case']}{', causal' if row['causal'] else ''} | {shape} | {pair(times['cudnn'])} |"
      f" {pair(times[torch]) if torch else ''} | {pair(times[ours])} | **{gain(row, ours):.2f}x** |"
    )
  mean = statistics.geometric_mean(gain(row, fastest(row, OURS)) for row in rows)
  return [*lines, f"\nGeometric mean over cuDNN: {mean:.2f}x."]


def lengths_table(rows: list[dict]) -> list[str]:
  """Forward and backward over cuDNN, by tokens and head size."""
  gains = {(row["length"], row["head_dim"]): gain(row, fastest(row, OURS)) for row in rows}
  sizes = sorted({head_dim for _, head_dim in gains})
  lines = [
    "| tokens | " + " | ".join(f"heads of {size}" for size in sizes) + " |",
    "|---" * (len(sizes) + 1) + "|",
  ]
  for length in sorted({length for length, _ in gains}):
    cells = [f"{gains[length, s]:.2f}x" if (length, s) in gains else "" for s in sizes]
    lines.append(f"| {length} | " + " | ".join(cells) + " |")
  return lines


def counters_table(rows: list[dict]) -> list[str]:
  """What each kernel keeps busy; the last line of a case and a kernel counts."""
  lines = [
    "| kernel | ms | tensor cores busy | shared memory's pipe busy | cycles that issue | DRAM |",
    "|---|---|---|---|---|---|",
  ]
  cases: dict[str, dict[str, dict]] = {}
  for row in rows:
    cases.setdefault(row["case"], {}).update(dict.fromkeys(row["kernels"], row))
  for case, kernels in cases.items():
    for name, row in kernels.items():
      counters = row["kernels"][name]
      what = name.removeprefix("sbjax_attention_").removesuffix("_mosaic_gpu_kernel")
      time = counters["gpu__time_duration.sum"]
      moved = sum(counters.get(f"dram__bytes_{way}.sum", 0) for way in ("read", "write"))
      cells = [f"{counters[c]:.0f}%" if c in counters else "" for c in COUNTERS]
      cells += [f"{moved / time / 1e3:.1f} TB/s" if moved else ""]
      kernel = f"{case}, {what.replace('_', ', ')}, {name_of(row['chip'])}"
      lines.append(f"| {kernel} | {time / 1e6:.3f} | {' | '.join(cells)} |")
  return lines


def fastest(row, start: str | tuple[str, ...]) -> str | None:
  """Of the contenders whose names start so, the one with the fastest forward and backward pass."""
  times = {name: both[1] for name, both in row["milliseconds"].items() if name.startswith(start)}
  return min(times, key=times.__getitem__, default=None)


def gain(row, name: str) -> float:
  """How many times as fast as cuDNN a contender is, forward and backward."""
  return row["milliseconds"]["cudnn"][1] / row["milliseconds"][name][1]


def pair(both) -> str:
  return f"{both[0]:.3f} / {both[1]:.3f}"
