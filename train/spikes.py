"""Reads the metrics of runs that logged each step: do loss spikes follow RMS spikes?

python -m train.spikes runs/a runs/b --out=spikes.png

The paper's section 3.4 and appendix D: where the RMS of the patch embedding's update exceeds a
threshold, the second moment is out of date, and a loss spike follows 1 to 8 steps later. The paper
does not print the length of its running mean; here it is --window. A run must have been started
with --config.log_every=1.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.stats import binom, combine_pvalues

from train import cli
from train.errors import RunError
from train.paths import local_path
from train.record import is_patch_embedding_rms, read_metrics
from train.workdir import read_config

LEAD = 8  # A loss spike follows an RMS spike by at most so many steps.


class Rules(NamedTuple):
  """What counts as a spike.

  rms_threshold: an RMS spike reaches it.
  deviations: a loss spike exceeds the running mean by so many running standard deviations.
  window: steps of the running mean and deviation, those before the step.
  first: steps up to there are left out.
  merge: events at most so many steps apart are one. A loss spike has two or more of them.
  """

  rms_threshold: float = 2.3
  deviations: float = 3.2
  window: int = 100
  first: int = 1000
  merge: int = 10


class Spikes(NamedTuple):
  """Steps at which spikes begin, and how RMS and loss spikes go together.

  loss, rms: the first step of each spike.
  following: those of `loss` that follow an RMS spike by 1 to LEAD steps.
  steps: how many steps were looked at.
  share: the share of these that follow an RMS spike so: the chance of a loss spike at random.
  before: the largest RMS of the LEAD steps before each loss spike. It needs no threshold.
  as_large: the share of steps before which the RMS came to as much, for each loss spike.
  """

  loss: np.ndarray
  rms: np.ndarray
  following: np.ndarray
  steps: int
  share: float
  before: Sequence[float] = ()
  as_large: Sequence[float] = ()

  @property
  def chance(self) -> float:
    """The probability of as many following spikes or more, were loss spikes at random steps."""
    return float(binom.sf(len(self.following) - 1, len(self.loss), self.share))

  @property
  def chance_before(self) -> float:
    """The probability of as large RMS before the loss spikes, were they at random steps.

    By Fisher's method of `as_large`; nan without loss spikes, or without that of each.
    """
    if not len(self.loss) or len(self.as_large) != len(self.loss):
      return math.nan
    return float(combine_pvalues(self.as_large).pvalue)


def find_spikes(steps: np.ndarray, loss: np.ndarray, rms: np.ndarray, rules: Rules) -> Spikes:
  """The spikes of a run.

  Args:
    steps, loss, rms: [T]; steps are consecutive. A loss or RMS that is not finite is a spike.

  Raises:
    ValueError: a step is missing, or there are no steps after `rules.first` and the window.
  """
  if len(steps) and not np.array_equal(steps, np.arange(steps[0], steps[0] + len(steps))):
    missing = steps[:-1][np.diff(steps) != 1][0] + 1
    raise ValueError(f"step {missing} is not logged: a run needs --config.log_every=1")
  begin = max(rules.window, int(np.searchsorted(steps, rules.first, side="right")))
  if begin >= len(steps):
    raise ValueError(
      f"has {len(steps)} logged steps, none of them after {rules.first} and a window of"
      f" {rules.window}: lower --first or --window"
    )
  deviates = _deviates(loss, begin, rules)
  reaches = np.flatnonzero(~(rms[begin:] < rules.rms_threshold)) + begin
  loss_spikes = [group[0] for group in _merged(deviates, rules.merge) if len(group) > 1]
  rms_spikes = [group[0] for group in _merged(reaches, rules.merge)]
  follows = np.zeros(len(steps), bool)
  for i in rms_spikes:
    follows[i + 1 : i + 1 + LEAD] = True
  largest = _largest_before(rms)
  before = largest[loss_spikes]
  return Spikes(
    loss=steps[loss_spikes],
    rms=steps[rms_spikes],
    following=steps[[i for i in loss_spikes if follows[i]]],
    steps=len(steps) - begin,
    share=float(follows[begin:].mean()),
    before=before,
    as_large=(largest[begin:] >= before[:, None]).mean(1),
  )


def _largest_before(rms: np.ndarray) -> np.ndarray:
  """The largest RMS of the LEAD steps before each step; one that is not a number is the largest."""
  padded = np.concatenate([np.full(LEAD, -np.inf), np.where(np.isnan(rms), np.inf, rms)])
  return np.lib.stride_tricks.sliding_window_view(padded, LEAD).max(1)[: len(rms)]


def _deviates(loss, begin, rules) -> np.ndarray:
  """Where the loss from `begin` on exceeds the running mean by too much."""
  finite = np.where(np.isfinite(loss), loss, np.nan)
  windows = np.lib.stride_tricks.sliding_window_view(finite, rules.window)
  before = windows[begin - rules.window : len(loss) - rules.window]
  limit = np.nanmean(before, axis=1) + rules.deviations * np.nanstd(before, axis=1)
  return np.flatnonzero(~(loss[begin:] <= limit)) + begin


def _merged(places: np.ndarray, merge: int) -> list[np.ndarray]:
  """Groups of places at most `merge` apart."""
  return [g for g in np.split(places, np.flatnonzero(np.diff(places) > merge) + 1) if len(g)]


def read_run(workdir: Path, rms_name: str = "") -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
  """Steps, losses and RMS of a run or of a metrics.jsonl, and the name of the RMS.

  Raises:
    RunError: there is no such file, or it has no such RMS.
  """
  path = workdir / "metrics.jsonl" if workdir.is_dir() else workdir
  if not path.is_file():
    raise RunError(f"{path} is not there: name the folders of runs.")
  records = [r for r in read_metrics(path) if "loss" in r]
  names = sorted({name for r in records for name in r if name.startswith("rms/")})
  if not names or rms_name not in ("", *names):
    asked = f"{rms_name!r} is not among" if rms_name else "There is no rms/... among"
    raise RunError(f"{path}: {asked} the metrics; RMS are {', '.join(names) or 'none'}.")
  name = rms_name or next(filter(is_patch_embedding_rms, names), names[0])
  columns = ([r.get(key, math.nan) for r in records] for key in ("step", "loss", name))
  steps, loss, rms = (np.array(column, float) for column in columns)
  return steps.astype(int), loss, rms, name


def check_reachable(workdir: Path, threshold: float) -> None:
  """Raises RunError if the run's second moment keeps the RMS below the threshold.

  It has the gradient of the same step, so the RMS is at most 1 / sqrt(1 - b2). With b2_power, b2
  is not used, and 1 - t^-b2_power comes to 1.
  """
  path = workdir / "config.json"
  optimizer = read_config(path)["optimizer"] if path.is_file() else {}
  b2 = 1.0 if not optimizer or optimizer.get("b2_power") else optimizer["b2"]
  if b2 < 1 and threshold > (most := (1 - b2) ** -0.5):
    raise RunError(
      f"{workdir}: with optimizer.b2={b2} the RMS is at most {most:.2f}, below"
      f" --rms_threshold={threshold}: choose a threshold between 1 and {most:.2f}."
    )


def describe(name: str, spikes: Spikes, rms_name: str) -> str:
  first = (
    f"{name}: {_count(spikes.loss, 'loss spike')} and {_count(spikes.rms, 'spike')} of {rms_name}"
    f" in {spikes.steps:,} steps."
  )
  if not len(spikes.loss):
    return first
  return (
    f"{first}\n  {len(spikes.following)} of {_count(spikes.loss, 'loss spike')} came 1 to {LEAD}"
    f" steps after an RMS spike, as did {spikes.share:.1%} of all steps. The chance of as many or"
    f" more at random steps is {spikes.chance:.2g}.\n"
    f"  The largest RMS of the {LEAD} steps before was {np.median(spikes.before):.2f} in the"
    f" median. The chance of as large ones at random steps is {spikes.chance_before:.2g}."
  )


def _count(events, noun: str) -> str:
  return f"{len(events)} {noun}{'s' * (len(events) != 1)}"


def together(found: Sequence[Spikes]) -> Spikes:
  """The counts of several runs, whose steps count alike."""
  steps = sum(spikes.steps for spikes in found)
  share = sum(spikes.share * spikes.steps for spikes in found) / steps
  keys = ("loss", "rms", "following", "before", "as_large")
  joined = {key: np.concatenate([getattr(spikes, key) for spikes in found]) for key in keys}
  return Spikes(**joined, steps=steps, share=share)


def draw(
  path: Path, runs: Sequence[tuple[str, np.ndarray, np.ndarray, np.ndarray, Spikes]]
) -> None:
  """Two panels a run, loss and RMS; dashed: RMS spikes, red: loss spikes that follow one."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(13, 5 * len(runs)), layout="constrained")
  panels = figure.subplots(2 * len(runs), 1, squeeze=False)[:, 0]
  for i, (name, steps, loss, rms, spikes) in enumerate(runs):
    above, below = panels[2 * i : 2 * i + 2]
    above.plot(steps, loss, linewidth=0.8)
    below.plot(steps, rms, linewidth=0.8, color="C1")
    for axis, label in ((above, f"{name}: loss"), (below, "RMS")):
      axis.set_ylabel(label)
      axis.sharex(above)
      for step in spikes.rms:
        axis.axvline(step, color="gray", linestyle="--", linewidth=0.8)
      for step in spikes.loss:
        axis.axvline(step, color="red" if step in spikes.following else "black", linewidth=0.8)
    below.set_xlabel("step. Dashed: RMS spikes; red: loss spikes that follow one; black: others")
  figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    "python -m train.spikes", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument("runs", nargs="+", help="folders of runs, or their metrics.jsonl")
  parser.add_argument("--rms", default="", help="another tensor's, as metrics.jsonl names it")
  parser.add_argument("--out", default="", help="a plot, such as spikes.png")
  for name, default in Rules()._asdict().items():
    parser.add_argument(f"--{name}", type=type(default), default=default)
  options = parser.parse_args(arguments)
  rules = Rules(**{name: getattr(options, name) for name in Rules._fields})
  with cli.report_errors():
    drawn = []
    out = local_path(options.out, "--out")
    for run in [local_path(run, "runs") for run in options.runs]:
      check_reachable(run, rules.rms_threshold)
      steps, loss, rms, rms_name = read_run(run, options.rms)
      try:
        spikes = find_spikes(steps, loss, rms, rules)
      except ValueError as error:
        raise RunError(f"{run}: {error}.") from error
      print(describe(str(run), spikes, rms_name))
      drawn.append((run.name, steps, loss, rms, spikes))
    if len(drawn) > 1:
      print(describe("All runs", together([spikes for *_, spikes in drawn]), "an RMS"))
    if options.out:
      draw(out, drawn)
      print(f"The plot is {out}.")


if __name__ == "__main__":
  main()
