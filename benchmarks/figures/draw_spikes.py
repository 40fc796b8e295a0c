"""The figures about loss spikes: counts, traces around a change of the data, and loss scalers."""

from collections.abc import Callable, Sequence

import numpy as np
from scipy.stats import chi2

from benchmarks.figures.arms import Arm, change_of
from train.spikes import Spikes, together

PATCHES = "rms/image/patch_embedding/kernel"


def legend(axis, **options) -> None:
  """The axis's legend, if it has a line: runs that diverge early may have none."""
  if axis.get_legend_handles_labels()[0]:
    axis.legend(**options)


def count(rows: Sequence[dict]) -> int:
  """The loss spikes of runs that logged each step, all together."""
  return sum(len(_of(row)["loss"]) for row in rows if "spikes" in row)


def _of(row: dict) -> dict:
  return row["spikes"][PATCHES]


def interval(events: int) -> tuple[float, float]:
  """The exact 95 % interval of the mean of a Poisson count.

  >>> [round(x, 2) for x in interval(4)]
  [1.09, 10.24]
  """
  low = chi2.ppf(0.025, 2 * events) / 2 if events else 0.0
  return float(low), float(chi2.ppf(0.975, 2 * events + 2) / 2)


def _by_b2(arms: Sequence[Arm], rows: dict[str, dict]) -> dict[float, list[dict]]:
  """The rows of arms by b2, the lowest first."""
  found = {}
  for arm in sorted(arms, key=lambda arm: dict(arm.changes)["optimizer.b2"]):
    found.setdefault(dict(arm.changes)["optimizer.b2"], []).append(rows[arm.name])
  return found


def counts(title: str, label: Callable[[Arm], str]) -> Callable:
  """A drawing of loss spikes a run by b2, a line for each label (figures 6, 7 and 8)."""

  def draw(figure, arms, rows) -> list[str]:
    left, right = figure.subplots(1, 2)
    lines = [
      f"| {title} | b2 | seeds | loss spikes a run, 95 % | RMS spikes | diverged |",
      "|---|---|---|---|---|---|",
    ]
    labels = dict.fromkeys(label(arm) for arm in arms)
    for name in labels:
      group = [arm for arm in arms if label(arm) == name]
      points = {}
      for b2, own in _by_b2(group, rows).items():
        events, runs = count(own), len(own)
        low, high = (x / runs for x in interval(events))
        points[b2] = events / runs, low, high
        rms = sum(len(_of(row)["rms"]) for row in own if "spikes" in row)
        diverged = sum("diverged" in row for row in own)
        cells = [name, b2, runs, f"{events / runs:.1f} ({low:.1f} to {high:.1f})", rms, diverged]
        lines.append(f"| {' | '.join(map(str, cells))} |")
      means = [mean for mean, *_ in points.values()]
      errors = [
        [mean - low for mean, low, _ in points.values()],
        [high - mean for mean, _, high in points.values()],
      ]
      left.errorbar(list(map(str, points)), means, errors, marker="o", capsize=3, label=name)
      # `b2` and `own` are those of the highest.
      curve = np.reshape(own[0]["curve"], (-1, 2))
      right.plot(*curve.T, linewidth=1, label=f"{name}, b2 {b2}")
    left.set(xlabel="b2", ylabel="loss spikes a run")
    right.set(xlabel="step", ylabel="loss")
    legend(left, title=title)
    legend(right)
    return lines

  return draw


def around_change(figure, arms, rows) -> list[str]:
  """Figure 9: loss and RMS of the patch embedding; 16 to 21: how spikes follow, by tensor."""
  own = [arm for arm in arms if arm.seed == arms[0].seed]
  axes = figure.subplots(2, len(own), sharex=True, squeeze=False)
  for (above, below), arm in zip(axes.T, own, strict=True):
    trace = rows[arm.name].get("trace", {"step": [], "loss": []})
    above.plot(trace["step"], trace["loss"], linewidth=0.9)
    for name in sorted(n for n in trace if n.startswith("rms/")):
      control = name != PATCHES
      style = {"color": "0.7", "linewidth": 0.6} if control else {"color": "C1"}
      below.plot(trace["step"], trace[name], label=None if control else "patch embedding", **style)
    above.set(title=f"b2 = {arm.value('optimizer.b2')}", ylabel="loss")
    below.set(xlabel="step; grey: fc2 of the blocks", ylabel="RMS")
    for axis in (above, below):
      axis.axvline(change_of(arm), color="r", ls=":")
    legend(below)
  lines = [
    "| b2 | runs | diverged | tensor | largest RMS | RMS spikes | loss spikes |"
    " after an RMS spike | share of steps that are | chance |",
    "|---|---|---|---|---|---|---|---|---|---|",
  ]
  for b2, group in _by_b2(arms, rows).items():
    diverged = sum("diverged" in row for row in group)
    lines += [f"| {b2} | {len(group)} | {diverged} | {line} |" for line in _following(group)]
  return lines


def _following(rows: Sequence[dict]) -> list[str]:
  """How many loss spikes follow RMS spikes of each tensor by 1 to 8 steps, against chance.

  Of the runs that had steps enough for it; an empty line if none had.
  """
  lines, rows = [], [row for row in rows if "spikes" in row]
  for name in sorted({name for row in rows for name in row["spikes"]}):
    own = [row for row in rows if name in row["spikes"]]
    found = together([Spikes(**row["spikes"][name]) for row in own])
    values = [x for row in own for x in row["trace"][name]]
    largest = f"{max(values):.1f}" if values else ""
    lines.append(
      f"{name.removeprefix('rms/')} | {largest} | {len(found.rms)} | {len(found.loss)}"
      f" | {len(found.following)} | {found.share:.2%} | {found.chance:.2g}"
    )
  return lines or [" | ".join([""] * 7)]


def scalers(figure, arms, rows) -> list[str]:
  """Figure 11: six panels around a shift of the data, for two loss scalers."""
  panels = (
    "loss",
    "loss_scale",
    "max_abs_feature/image_block_",  # the last block
    PATCHES,
    "gradient_max_abs/image/class_embedding",
    "gradient_max_abs/image/block_0/qkv/kernel",
  )
  figure.set_size_inches(14, 7)
  axes = figure.subplots(2, 3).ravel()
  lines = [
    "| loss scaler | diverged | top-1, % | least scale around the shift |",
    "|---|---|---|---|",
  ]
  for arm in arms:
    row, scaler = rows[arm.name], dict(arm.changes)["optimizer.loss_scale"]
    trace = row.get("trace", {})
    for axis, wanted in zip(axes, panels, strict=True):
      names = [name for name in trace if name.startswith(wanted)]
      if names:
        axis.plot(trace["step"], trace[names[-1]], label=scaler, linewidth=0.9)
      axis.set(title=names[-1] if names else wanted)
      if wanted not in ("loss", PATCHES):
        axis.set_yscale("log")
    top1 = f"{100 * row['scores']['classes/zero_shot_top1']:.1f}" if "scores" in row else ""
    least = min(trace.get("loss_scale", [float("nan")]), default=float("nan"))
    lines.append(f"| {scaler} | {row.get('diverged', '')} | {top1} | {least:g} |")
  legend(axes[0])
  return lines
