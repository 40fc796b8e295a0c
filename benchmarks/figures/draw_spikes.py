"""The figures about loss spikes: counts, traces around a change of the data, and loss scalers."""

import math
import re
from collections.abc import Callable, Sequence

import numpy as np
from scipy.stats import chi2

from benchmarks.figures.analysis import TOP1, at_change, by_run, estimate
from benchmarks.figures.arms import Arm, change_of, series_of
from train.spikes import Spikes, together

PATCHES = "rms/image/patch_embedding/kernel"
_ZOOM = (-15, 45)  # steps around a change that figure 11 shows


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


def b2_of(arm: Arm) -> float:
  """The b2 of an arm that sets it."""
  return dict(arm.changes)["optimizer.b2"]


def _by_b2(arms: Sequence[Arm], rows: dict[str, dict]) -> dict[float, list[dict]]:
  """The rows of arms by b2, the lowest first."""
  groups = series_of(sorted(arms, key=b2_of), b2_of)
  return {b2: [rows[arm.name] for arm in group] for b2, group in groups.items()}


def counts(title: str, label: Callable[[Arm], str]) -> Callable:
  """A drawing of loss spikes a run by b2, a line for each label (figures 6, 7 and 8).

  Below that a loss spike of each label that has one.
  """

  def draw(figure, arms, rows) -> list[str]:
    series = series_of(arms, label)
    spikes = {name: _a_spike([rows[arm.name] for arm in group]) for name, group in series.items()}
    left, right = _above_spikes(figure, title, spikes)
    lines = [
      f"| {title} | b2 | seeds | loss spikes a run, 95 % | after an RMS spike (chance) |"
      " RMS before (chance) | RMS spikes | top-1, % | diverged |",
      "|---|---|---|---|---|---|---|---|---|",
    ]
    b2s = sorted({b2_of(arm) for arm in arms})
    for i, (name, group) in enumerate(series.items()):
      by_b2 = _by_b2(group, rows)
      rates = np.array([_rate(own) for own in by_b2.values()])
      for (b2, own), rate in zip(by_b2.items(), rates, strict=True):
        lines.append(f"| {name} | {b2} | {len(own)} | {_counted(own, rate)} |")
      means, lows, highs = rates.T
      places = [b2s.index(b2) + 0.1 * i for b2 in by_b2]  # Side by side: most are 0.
      left.errorbar(places, means, [means - lows, highs - means], fmt="o", capsize=3, label=name)
      highest = max(by_b2)
      curve = np.reshape(by_b2[highest][0]["curve"], (-1, 2))
      right.plot(*curve.T, linewidth=1, label=f"{name}, b2 {highest}")
    left.set_xticks(range(len(b2s)), list(map(str, b2s)))
    left.set(xlabel="b2", ylabel="loss spikes a run")
    right.set(xlabel="step", ylabel="loss")
    legend(left, title=title)
    legend(right)
    return lines

  return draw


def _above_spikes(figure, title: str, spikes: dict[str, tuple[float, dict] | None]) -> tuple:
  """The two panels of `counts`; below them, the spike of each label that has one is drawn."""
  spikes = {name: spike for name, spike in spikes.items() if spike}
  if not spikes:
    return tuple(figure.subplots(1, 2))
  figure.set_size_inches(12, 10)
  above, below = figure.subfigures(2, 1)
  columns = below.subplots(2, len(spikes), squeeze=False).T
  for panels, (name, (b2, trace)) in zip(columns, spikes.items(), strict=True):
    heading = f"a loss spike; {title}: {name}, b2 {b2}"
    _loss_and_rms(*panels, trace, trace["spike"], heading)
  return tuple(above.subplots(1, 2))


def _rate(rows: Sequence[dict]) -> tuple[float, float, float]:
  """Loss spikes a run, and the ends of their 95 % interval."""
  events = count(rows)
  low, high = interval(events)
  return events / len(rows), low / len(rows), high / len(rows)


def _counted(rows: Sequence[dict], rate: Sequence[float]) -> str:
  """The cells of a line of `counts`: spikes, accuracy, and how many runs diverged."""
  scores = list(by_run(rows).values())
  every = [Spikes(**_of(row)) for row in rows if "spikes" in row]
  found = together(every) if every else None
  following, before = "", ""
  if found and len(found.loss):
    following = f"{len(found.following)} ({found.chance:.2g})"
    if not math.isnan(found.chance_before):  # Older rows lack it.
      before = f"{np.median(found.before):.2f} ({found.chance_before:.2g})"
  cells = [
    "{:.1f} ({:.1f} to {:.1f})".format(*rate),
    following,
    before,
    len(found.rms) if found else 0,
    estimate(scores) if scores else "",
    sum("diverged" in row for row in rows),
  ]
  return " | ".join(map(str, cells))


def around_change(figure, arms, rows) -> list[str]:
  """Figure 9: loss and RMS of the patch embedding; 16 to 21: how spikes follow, by tensor.

  Around the change of the data in the runs of the first seed, and below that around the first loss
  spike that came by itself, for each b2 that has one.
  """
  change, groups = change_of(arms[0]), _by_b2(arms, rows)
  itself = {b2: found[1] for b2, group in groups.items() if (found := _a_spike(group))}
  figure.set_size_inches(12, 9 if itself else 5)
  axes = figure.subplots(4 if itself else 2, len(groups), sharey="row", squeeze=False)
  for column, (b2, group) in zip(axes.T, groups.items(), strict=True):
    around = min(group, key=lambda row: row["seed"]).get("trace", {"step": [], "loss": []})
    _loss_and_rms(*column[:2], around, change, f"b2 = {b2}")
    if b2 in itself:
      _loss_and_rms(*column[2:], itself[b2], itself[b2]["spike"], "a spike by itself")
    else:
      for axis in column[2:]:
        axis.set_axis_off()
  lines = [
    "| b2 | runs | diverged | tensor | largest RMS around the change | RMS spikes | loss spikes |"
    " at the change | others after an RMS spike | share of steps that are | chance |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
  ]
  for b2, group in groups.items():
    diverged = sum("diverged" in row for row in group)
    found = _following(group, change)
    lines += [f"| {b2} | {len(group)} | {diverged} | {line} |" for line in found]
  return lines


def _a_spike(rows: Sequence[dict]) -> tuple[float, dict] | None:
  """b2, and loss and RMS around the first loss spike by itself that follows an RMS spike.

  If none does, around the first; None if there is none.
  """
  first = None
  for row in rows:
    for trace in row.get("spike_traces", []):
      found = row["changes"]["optimizer.b2"], trace
      if trace["spike"] in _of(row)["following"]:
        return found
      first = first or found
  return first


def _loss_and_rms(above, below, trace: dict, step: int, title: str) -> None:
  """Two panels: the loss, and the RMS of the patch embedding with the others in grey."""
  above.plot(trace["step"], trace["loss"], linewidth=0.9)
  for name in sorted(n for n in trace if n.startswith("rms/")):
    control = name != PATCHES
    style = {"color": "0.7", "linewidth": 0.6} if control else {"color": "C1"}
    below.plot(trace["step"], trace[name], label=None if control else "patch embedding", **style)
  above.set(title=title, ylabel="loss")
  others = any(name.startswith("rms/") and name != PATCHES for name in trace)
  below.set(xlabel=f"step{'; grey: fc2 of the blocks' if others else ''}", ylabel="RMS")
  for axis in (above, below):
    axis.axvline(step, color="r", ls=":")
    axis.tick_params(labelleft=True)  # Panels share scales, and the first of a row may be empty.
  legend(below)


def _following(rows: Sequence[dict], change: int) -> list[str]:
  """How many loss spikes follow RMS spikes by 1 to 8 steps, against chance: a line for each tensor.

  Loss spikes at the change of the data are left out, since the new images bring them. The same
  tensor of all blocks has one line, with its least and largest numbers. Of the runs that had steps
  enough for it; an empty line if none had.
  """
  formats = "{:.1f}", "{:.0f}", "{:.0f}", "{:.0f}", "{:.0f}", "{:.2%}", "{:.2g}"
  rows = [row for row in rows if "spikes" in row]
  tensors = {}
  for name in sorted({name for row in rows for name in row["spikes"]}):
    numbers = _numbers(name, [row for row in rows if name in row["spikes"]], change)
    tensors.setdefault(re.sub(r"block_\d+", "block_*", name), []).append(numbers)
  lines = []
  for name, blocks in tensors.items():
    least, most = np.min(blocks, 0), np.max(blocks, 0)
    cells = [
      f.format(low) if low == high else f"{f.format(low)} to {f.format(high)}"
      for f, low, high in zip(formats, least, most, strict=True)
    ]
    lines.append(" | ".join([f"`{name.removeprefix('rms/')}`", *cells]))
  return lines or [" | ".join([""] * (1 + len(formats)))]


def _numbers(name: str, rows: Sequence[dict], change: int) -> tuple[float, ...]:
  """What a line of `_following` has of one tensor."""
  every = [Spikes(**row["spikes"][name]) for row in rows]
  found = together([without(spikes, change) for spikes in every])
  loss = sum(len(spikes.loss) for spikes in every)
  largest = max((x for row in rows for x in row["trace"][name]), default=np.nan)
  counts = len(found.rms), loss, loss - len(found.loss), len(found.following)
  return largest, *counts, found.share, found.chance


def without(spikes: Spikes, change: int | None) -> Spikes:
  """The spikes without those of the loss at a change of the data, and without what was before."""
  loss, following = (
    np.array([step for step in steps if not at_change(step, change)], int)
    for steps in (spikes.loss, spikes.following)
  )
  return spikes._replace(loss=loss, following=following, before=(), as_large=())


def scalers(figure, arms, rows) -> list[str]:
  """Figure 11: six panels around a shift of the data, for two loss scalers.

  A cross near the top of a panel is a step whose value overflowed.
  """
  panels = (
    "loss",
    "loss_scale",
    r"max_abs_feature/image_block_\d+",  # the last is drawn
    PATCHES,
    "gradient_max_abs/image/class_embedding",
    "gradient_max_abs/image/block_0/qkv/kernel",
  )
  figure.set_size_inches(14, 7)
  axes = figure.subplots(2, 3).ravel()
  lines = [
    "| loss scaler | first scale | diverged | top-1, % | scale before the shift | least after it |"
    " skipped in 200 steps |",
    "|---|---|---|---|---|---|---|",
  ]
  for i, arm in enumerate(arms):
    row, scaler = rows[arm.name], arm.value("optimizer.loss_scale")
    first = _power(arm.value("optimizer.initial_loss_scale"))
    trace = row.get("trace", {"step": []})
    for axis, wanted in zip(axes, panels, strict=True):
      names = [name for name in trace if re.fullmatch(wanted, name)]
      if names:
        _line(axis, trace["step"], trace[names[-1]], f"{scaler}, from {first}", 0.97 - 0.03 * i)
      axis.set(title=names[-1] if names else wanted, xlim=np.add(change_of(arm), _ZOOM))
      if wanted not in ("loss", PATCHES):
        axis.set_yscale("log", base=2 if wanted == "loss_scale" else 10)
    top1 = f"{100 * row['scores'][TOP1]:.1f}" if "scores" in row else ""
    cells = [scaler, first, row.get("diverged", ""), top1, *_scales(trace, change_of(arm))]
    lines.append(f"| {' | '.join(map(str, cells))} |")
  legend(axes[0])
  return lines


def _line(axis, steps, values, label: str, height: float) -> None:
  """A line, with a cross at this share of the panel's height for each value that overflowed."""
  (line,) = axis.plot(steps, values, label=label, linewidth=0.9)
  over = [step for step, value in zip(steps, values, strict=True) if math.isinf(value)]
  if over:
    place = {"color": line.get_color(), "transform": axis.get_xaxis_transform()}
    (crosses,) = axis.plot(over, [height] * len(over), "x", **place)
    crosses.set_in_layout(False)  # It may lie outside the panel's steps.


def _scales(trace: dict, change: int) -> tuple[str, str, str]:
  """The loss scale before a change, the least after it, and what was skipped from it on."""
  before = [i for i, step in enumerate(trace["step"]) if step < change]
  after = [i for i, step in enumerate(trace["step"]) if step >= change]
  if not before or not after:
    return "", "", ""
  scales, skipped = trace["loss_scale"], trace.get("skipped_updates")
  count = f"{skipped[-1] - skipped[before[-1]]:.0f}" if skipped else ""
  return _power(scales[before[-1]]), _power(min(scales[i] for i in after)), count


def _power(scale: float) -> str:
  return f"2^{math.log2(scale):.0f}"
