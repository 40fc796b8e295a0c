"""Draws a figure and its table from the rows of its arms: `write`.

A series is the arms that differ only in their seed; lines and bars are means over seeds, with 95 %
intervals where there are several seeds.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from benchmarks.figures import draw_spikes
from benchmarks.figures.analysis import (
  CIFAR10,
  HELD_OUT,
  LOSS,
  RECALL,
  TOP1,
  Estimate,
  by_run,
  difference,
  differences,
  estimate,
  slope_of,
)
from benchmarks.figures.arms import WORDS, Arm, series_of
from benchmarks.figures.draw_spikes import legend

Rows = dict[str, dict]
_FINAL = {"top-1 minus `full`, points": TOP1, "loss minus `full`, hundredths": LOSS}


def write(name: str, arms: Sequence[Arm], rows: Rows, folder: Path) -> None:
  """Writes figure_<name>.png and figure_<name>.md of the arms that have rows."""
  have = [arm for arm in arms if arm.name in rows]
  if not have:
    print("No run of this figure has ended: nothing is drawn.")
    return
  figure = plt.figure(figsize=(12, 5), layout="constrained")
  lines = DRAWINGS[name](figure, have, rows)
  figure.savefig(folder / f"figure_{name}.png", dpi=110)
  plt.close(figure)
  (folder / f"figure_{name}.md").write_text("\n".join(lines) + "\n")
  print("\n".join(lines))


def _recipe(arm: Arm) -> str:
  return str(dict(arm.changes)["model.recipe"])


def _remedy(arm: Arm) -> str:
  """Of figure 5: "plain" or what was done."""
  words = {
    "optimizer.clip_norm": "gradient clipping",
    "model.qk_norm": "QK norm",
    "model.zero_init_layer_scale": "layer scale",
  }
  return " + ".join(words[path] for path, _ in arm.changes if path in words) or "plain"


def _clip(arm: Arm) -> str:
  """Of figure 10."""
  changes = dict(arm.changes)
  if changes["optimizer.name"] == "stable_adamw":
    return "update clipping"
  return "gradient clipping" if "optimizer.clip_norm" in changes else "AdamW"


def _scores(arms: Sequence[Arm], rows: Rows, score: str = TOP1) -> dict[tuple[str, int], float]:
  return by_run([rows[arm.name] for arm in arms], score)


def accuracy(figure, arms, rows) -> list[str]:
  """Figure 1: accuracy by size and its paired difference from `full`; a dot for each run."""
  left, right = figure.subplots(1, 2)
  sizes = list(dict.fromkeys(arm.size for arm in arms))
  recipes = series_of(arms, _recipe)
  base = _scores(recipes.get("full", []), rows)
  for i, (recipe, group) in enumerate(recipes.items()):
    runs = [list(_scores(_of_size(group, s), rows).values()) for s in sizes]
    found = [estimate(scores) for scores in runs]
    halves = [e.half if e.n > 2 else 0 for e in found]  # That of two is 9 deviations long.
    places = np.arange(len(sizes)) + 0.06 * i
    (line, *_) = left.errorbar(
      places, [e.mean for e in found], halves, marker="_", capsize=3, label=recipe
    )
    for place, scores in zip(places, runs, strict=True):
      left.plot([place] * len(scores), scores, "o", color=line.get_color(), alpha=0.5)
    apart = differences(_scores(group, rows), base)
    if recipe != "full" and apart:
      mean = estimate(apart)
      right.plot(apart, [recipe] * len(apart), "o", color=line.get_color(), alpha=0.5)
      right.errorbar(mean.mean, recipe, xerr=np.nan_to_num(mean.half), fmt="k|", capsize=5)
  left.set_xticks(range(len(sizes)), [WORDS.get(s, s) for s in sizes])
  left.set(ylabel="zero-shot top-1, %")
  right.axvline(0, color="0.7", linewidth=0.8)
  right.invert_yaxis()
  right.set(
    xlabel="points; black: the mean of all pairs and its 95 % interval",
    title="zero-shot top-1 minus that of full with the same seed",
  )
  legend(left, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
  scores = {"top-1, %": TOP1, "held out, %": HELD_OUT}
  return _accuracy_table(arms, rows, "size", scores, limit=0.5)


def by_recipe(scores: dict[str, str]) -> Callable:
  """A drawing of scores by recipe: a grey line for each seed, and the means; and the table."""

  def draw(figure, arms, rows) -> list[str]:
    recipes = series_of(arms, _recipe)
    axes = figure.subplots(1, len(scores), squeeze=False)[0]
    for axis, (title, score) in zip(axes, scores.items(), strict=True):
      found = [_scores(group, rows, score) for group in recipes.values()]
      for run in sorted(set().union(*found)):
        axis.plot(list(recipes), [one.get(run, np.nan) for one in found], "0.7", linewidth=0.8)
      means = [estimate(list(one.values())) for one in found]
      halves = np.nan_to_num([e.half for e in means])
      axis.errorbar(list(recipes), [e.mean for e in means], halves, fmt="o", capsize=3)
      axis.set(ylabel=title)
    return _accuracy_table(arms, rows, "data", scores, limit=1.0)

  return draw


def _of_size(arms: Sequence[Arm], size: str) -> list[Arm]:
  return [arm for arm in arms if arm.size == size]


def _accuracy_table(arms, rows, what: str, scores: dict[str, str], limit: float) -> list[str]:
  """Scores by heading, their paired differences from `full`, and whether all are in the limit.

  A recipe of several sizes has their pairs together too, in a line without scores.
  """
  headings = [f"{heading} | {heading.removesuffix(', %')} minus `full`" for heading in scores]
  lines = [
    f"| {what} | recipe | seeds | {' | '.join(headings)} | within {limit} | diverged |",
    f"|---|---|---|{'---|---|' * len(scores)}---|---|",
  ]
  sizes = list(dict.fromkeys(arm.size for arm in arms))
  groups = {WORDS.get(size, size): _of_size(arms, size) for size in sizes}
  if len(sizes) > 1:
    groups["all sizes"] = arms
  for word, group in groups.items():
    recipes, together = series_of(group, _recipe), group is arms
    bases = [_scores(recipes.get("full", []), rows, score) for score in scores.values()]
    for recipe, runs in recipes.items():
      cells, verdicts = [], set()
      for base, score in zip(bases, scores.values(), strict=True):
        found = _scores(runs, rows, score)
        apart = difference(found, base)
        compared = recipe != "full" and apart.n > 0
        cells.append(str(estimate(list(found.values()))) if found and not together else "")
        cells.append(str(apart) if compared else "")
        verdicts |= {apart.within(limit)} if compared else set()
      if together and (not verdicts or len({arm.size for arm in runs}) == 1):
        continue
      cells.append(next((v for v in ("no", "open", "yes") if v in verdicts), ""))
      diverged = sum("diverged" in rows[arm.name] for arm in runs)
      lines.append(f"| {' | '.join([word, f'`{recipe}`', str(len(runs)), *cells])} | {diverged} |")
  return lines


def pairs(figure, arms, rows) -> list[str]:
  """Of each recipe: top-1 and the loss minus those of `full` with the same seed."""
  lines = [
    f"| recipe | seeds | top-1, % | {' | '.join(_FINAL)} | diverged |",
    "|---|---|---|---|---|---|",
  ]
  axes = figure.subplots(1, len(_FINAL))
  for name, group in series_of(arms, _recipe).items():
    apart = [_apart(name, arms, rows, score) for score in _FINAL.values()] if name != "full" else []
    for axis, found in zip(axes, apart, strict=name != "full"):
      _dots(axis, name, found)
    cells = [estimate(list(_scores(group, rows).values())), *(estimate(found) for found in apart)]
    lines.append(f"| `{name}` | {len(group)} | {_joined(cells)} | {_diverged(group, rows)} |")
  for axis, title in zip(axes, _FINAL, strict=True):
    axis.axvline(0, color="0.7", linewidth=0.8)
    axis.set(xlabel=title, title="black: the mean and its 95 % interval")
  return lines


def _apart(recipe: str, arms, rows, score: str) -> list[float]:
  """The scores of a recipe's runs minus those of `full` with the same seed."""
  of = series_of(arms, _recipe)
  return differences(*(_scores(of.get(name, []), rows, score) for name in (recipe, "full")))


def _joined(cells: Sequence[Estimate]) -> str:
  """The cells of top-1 and of `_FINAL`; empty without a run."""
  texts = [str(cell) if cell.n else "" for cell in cells]
  return " | ".join(texts + [""] * (1 + len(_FINAL) - len(texts)))


def _diverged(arms, rows) -> int:
  return sum("diverged" in rows[arm.name] for arm in arms)


def _dots(axis, name: str, found: Sequence[float]) -> None:
  """A dot for each of the values on a line of its own, and their mean."""
  mean = estimate(found)
  axis.plot(found, [name] * len(found), "o", alpha=0.5)
  axis.errorbar(mean.mean, name, xerr=np.nan_to_num(mean.half), fmt="k|", capsize=5)


def served(figure, arms, rows) -> list[str]:
  """For each recipe of training: the same weights evaluated in 8 bits, minus in 16."""
  titles = [title.replace("`full`", "in 16 bits") for title in _FINAL]
  lines = [f"| trained | evaluated | seeds | {' | '.join(titles)} |", "|---|---|---|---|---|"]
  axes = figure.subplots(1, len(_FINAL))
  for trained, group in series_of(arms, _recipe).items():
    runs = [rows[arm.name] for arm in group if "scores" in rows[arm.name]]
    by_way = [{trained: run["scores"], **run["served"]} for run in runs if "served" in run]
    for way in dict.fromkeys(way for run in by_way for way in run if way != "full"):
      apart = [[100 * (run[way][s] - run["full"][s]) for run in by_way] for s in _FINAL.values()]
      for axis, found in zip(axes, apart, strict=True):
        _dots(axis, f"{trained},\nin {way}", found)
      cells = " | ".join(str(estimate(found)) for found in apart)
      lines.append(f"| `{trained}` | `{way}` | {len(by_way)} | {cells} |")
  for axis, title in zip(axes, titles, strict=True):
    axis.axvline(0, color="0.7", linewidth=0.8)
    axis.set(xlabel=title)
  return lines


def by_batch(figure, arms, rows) -> list[str]:
  """The differences from `full` by batch size, and their slope against its logarithm."""
  lines = [
    f"| recipe | batch | seeds | top-1, % | {' | '.join(_FINAL)} |",
    "|---|---|---|---|---|---|",
  ]
  axes = figure.subplots(1, len(_FINAL))
  batches = dict(sorted(series_of(arms, lambda arm: arm.value("batch_size")).items()))
  for name, group in series_of(arms, _recipe).items():
    apart = [
      {batch: _apart(name, some, rows, score) for batch, some in batches.items()}
      for score in (_FINAL.values() if name != "full" else ())
    ]
    for axis, found in zip(axes, apart, strict=name != "full"):
      means = [estimate(values) for values in found.values()]
      halves = np.nan_to_num([mean.half for mean in means])
      drawn = axis.errorbar(
        [f"{b:,}" for b in batches], [m.mean for m in means], halves, marker="o", capsize=3
      )
      drawn.set_label(name)
    for batch, some in batches.items():
      own = [arm for arm in some if arm in group]
      cells = [estimate(list(_scores(own, rows).values()))]
      cells += [estimate(found[batch]) for found in apart]
      lines.append(f"| `{name}` | {batch:,} | {len(own)} | {_joined(cells)} |")
    slopes = [slope_of([(np.log2(b), v) for b in f for v in f[b]]) for f in apart]
    if slopes:
      lines.append(
        f"| `{name}` | slope, a doubling | {slopes[0].n} |  | {' | '.join(map(str, slopes))} |"
      )
  for axis, title in zip(axes, _FINAL, strict=True):
    axis.axhline(0, color="0.7", linewidth=0.8)
    axis.set(xlabel="images a batch", ylabel=title)
    legend(axis)
  return lines


def curves(label: Callable[[Arm], str]) -> Callable:
  """A drawing of loss curves, a panel for each size and a line for each label."""

  def draw(figure, arms, rows) -> list[str]:
    sizes = list(dict.fromkeys(arm.size for arm in arms))
    lines = ["| size | series | seeds | last loss | diverged |", "|---|---|---|---|---|"]
    for axis, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
      for name, group in series_of(_of_size(arms, size), label).items():
        found = [rows[arm.name] for arm in group]
        plot_curve(axis, found, name)
        last = estimate([r["last_loss"] for r in found if "diverged" not in r])
        diverged = sum("diverged" in r for r in found)
        lines.append(f"| {WORDS.get(size, size)} | {name} | {len(found)} | {last} | {diverged} |")
      axis.set(title=WORDS.get(size, size), xlabel="step", ylabel="loss")
      legend(axis)
    return lines

  return draw


def through_a_run(figure, arms, rows) -> list[str]:
  """Loss curves and, for each evaluation, accuracy and its paired difference from `full`."""
  left, right = figure.subplots(1, 2)
  recipes = series_of(arms, _recipe)
  for name, group in recipes.items():
    plot_curve(left, [rows[arm.name] for arm in group], name)
  scores = {name: _at_evaluations(group, rows) for name, group in recipes.items()}
  lines = ["| step | recipe | seeds | top-1, % | top-1 minus `full` |", "|---|---|---|---|---|"]
  for name, found in scores.items():
    apart = {s: difference(one, scores.get("full", {}).get(s, {})) for s, one in found.items()}
    for step, one in found.items():
      cells = [f"{step:,}", f"`{name}`", len(one), estimate(list(one.values()))]
      cells.append(apart[step] if name != "full" and apart[step].n else "")
      lines.append(f"| {' | '.join(map(str, cells))} |")
    if name != "full" and apart:
      means, halves = zip(*((e.mean, np.nan_to_num(e.half)) for e in apart.values()), strict=True)
      right.errorbar(list(apart), means, halves, marker="o", capsize=3, label=name)
  right.axhline(0, color="0.7", linewidth=0.8)
  left.set(xlabel="step", ylabel="loss")
  right.set(xlabel="step", ylabel="zero-shot top-1 minus that of full, points")
  legend(left)
  return lines


def _at_evaluations(arms: Sequence[Arm], rows: Rows) -> dict[int, dict[tuple[str, int], float]]:
  """By step: the accuracy in percent, by size and seed."""
  found = {}
  for row in (rows[arm.name] for arm in arms):
    for one in row.get("evaluations", []):
      found.setdefault(one["step"], {})[row["size"], row["seed"]] = 100 * one[TOP1]
  return found


def plot_curve(axis, found: Sequence[dict], name: str | None, colour=None) -> None:
  """The mean of the curves that have all steps, else the longest."""
  longest = max(len(row["curve"]) for row in found)
  if not longest:  # All diverged before a step was logged.
    return
  whole = np.array([row["curve"] for row in found if len(row["curve"]) == longest])
  axis.plot(whole[0, :, 0], whole[:, :, 1].mean(0), label=name, linewidth=1, color=colour)


def remedies(figure, arms, rows) -> list[str]:
  """Figure 5: loss curves of the remedies, and the features of the blocks at the end."""
  left, right = figure.subplots(1, 2)
  lines = ["| series | seeds | diverged | top-1, % |", "|---|---|---|---|"]
  for name, group in series_of(arms, _remedy).items():
    found = [rows[arm.name] for arm in group]
    plot_curve(left, found, name)
    records = next((r["watched"] for r in found if "watched" in r), None)
    if records and name in ("plain", "layer scale"):
      for record, style in ((records[0], "--"), (records[-1], "-")):
        values = _of_blocks(record, "mean_abs_feature/image_block_")
        right.plot(values, style, marker=".", label=f"{name}, step {record['step']}")
    diverged, scores = sum("diverged" in r for r in found), list(_scores(group, rows).values())
    lines.append(f"| {name} | {len(found)} | {diverged} | {estimate(scores) if scores else ''} |")
  left.set(xlabel="step", ylabel="loss")
  right.set(xlabel="block of the image tower", ylabel="mean magnitude of features", yscale="log")
  _plain(right.yaxis)
  legend(left)
  legend(right)
  return lines


def _plain(axis) -> None:
  """Numbers without powers of ten on a logarithmic axis that spans less than two."""
  axis.set_major_formatter("{x:g}")
  axis.set_minor_formatter("{x:g}")


def _of_blocks(record: dict, prefix: str, suffix: str = "") -> list[float]:
  """A statistic of the blocks 0, 1, ... of a record."""
  found = []
  while (value := record.get(f"{prefix}{len(found)}{suffix}")) is not None:
    found.append(value)
  return found


def by_block(figure, arms, rows) -> list[str]:
  """Figure 14: fc2's gradient and the features over the steps, for some blocks."""
  panels = {
    "mean magnitude of fc2's gradient": ("gradient_mean_abs/image/block_", "/fc2/kernel"),
    "largest magnitude of fc2's gradient": ("gradient_max_abs/image/block_", "/fc2/kernel"),
    "mean magnitude of features": ("mean_abs_feature/image_block_", ""),
    "largest magnitude of features": ("max_abs_feature/image_block_", ""),
  }
  series = series_of(arms, lambda arm: f"{WORDS.get(arm.size, arm.size)}, {_remedy(arm)}")
  figure.set_size_inches(14, 3 * len(series))
  axes = figure.subplots(len(series), len(panels), squeeze=False, sharey="col")
  lines = ["| series | statistic | first block | last block |", "|---|---|---|---|"]
  for row, (name, group) in zip(axes, series.items(), strict=True):
    records = rows[group[0].name].get("watched", [])
    for axis, (title, (prefix, suffix)) in zip(row, panels.items(), strict=True):
      values = np.array([_of_blocks(r, prefix, suffix) for r in records])
      if values.size:
        for block in sorted(
          {0, values.shape[1] // 3, 2 * values.shape[1] // 3, values.shape[1] - 1}
        ):
          axis.plot([r["step"] for r in records], values[:, block], label=f"block {block}")
        lines.append(f"| {name} | {title} | {values[-1, 0]:.3g} | {values[-1, -1]:.3g} |")
      axis.set(title=f"{name}\n{title}", yscale="log")
    legend(row[0], loc="lower right", fontsize="small")
  return lines


def _setting(arm: Arm) -> str:
  """Of figure 10."""
  rate = arm.value("optimizer.learning_rate")
  return f"batch {arm.value('batch_size'):,}, rate {rate:g}"


def accuracy_by_b2(figure, arms, rows) -> list[str]:
  """Figure 10: for each batch and rate, loss curves at the highest b2 and accuracy by b2."""
  settings = series_of(arms, _setting)
  figure.set_size_inches(12, 5 * len(settings))
  lines = [
    "| setting | series | b2 | seeds | top-1, % | loss spikes | diverged |",
    "|---|---|---|---|---|---|---|",
  ]
  axes = figure.subplots(len(settings), 2, squeeze=False)
  for (left, right), (setting, some) in zip(axes, settings.items(), strict=True):
    for name, group in series_of(some, _clip).items():
      table = _at_b2s(left, right, name, group, rows)
      lines += [f"| {setting} | {name} | {line} |" for line in table]
    left.set(xlabel="step", ylabel="loss", title=f"{setting}, b2 {max(_b2s(some))}")
    right.set(xlabel="b2", ylabel="zero-shot top-1, %", title=setting)
    low, high = right.get_ylim()
    right.set_ylim(max(low, -2), min(high, 102))  # An interval may leave 0 to 100 %.
    legend(right)
  return lines


def _at_b2s(left, right, name: str, arms: Sequence[Arm], rows: Rows) -> list[str]:
  """A series of figure 10: a line and a point for each run, and the ends of its lines."""
  found, lines = {}, []
  of_b2 = series_of(arms, draw_spikes.b2_of)
  for b2, group in of_b2.items():
    found[str(b2)], cells = _outcome(group, rows)
    lines.append(f"{b2} | {cells}")
  halves = np.nan_to_num([e.half for e in found.values()])
  means = [e.mean for e in found.values()]
  drawn = right.errorbar(list(found), means, halves, marker="o", capsize=3, label=name)
  colour = drawn[0].get_color()
  for b2, group in of_b2.items():
    scores = list(_scores(group, rows).values())
    right.scatter([str(b2)] * len(scores), scores, 50, color=colour, marker="x")
  for arm in of_b2[max(_b2s(arms))]:
    plot_curve(left, [rows[arm.name]], None, colour)
  return lines


def _b2s(arms: Sequence[Arm]) -> list[float]:
  return [draw_spikes.b2_of(arm) for arm in arms]


def _outcome(arms: Sequence[Arm], rows: Rows) -> tuple[Estimate, str]:
  """The accuracy, and the cells of figures 10 and 15: seeds, accuracy, loss spikes, diverged."""
  own, found = [rows[arm.name] for arm in arms], estimate(list(_scores(arms, rows).values()))
  diverged = sum("diverged" in row for row in own)
  return found, f"{len(own)} | {found} | {draw_spikes.count(own)} | {diverged}"


def _b2(arm: Arm) -> str:
  """Of figure 15: "b2 0.98" or "1 - t^-0.5"."""
  changes = dict(arm.changes)
  power = changes.get("optimizer.b2_power")
  return f"1 - t^-{power}" if power else f"b2 {changes['optimizer.b2']}"


def last_b2(arm: Arm) -> float:
  """b2 at the last step."""
  power = arm.value("optimizer.b2_power")
  return 1 - arm.value("steps") ** -power if power else arm.value("optimizer.b2")


def accuracy_by_last_b2(figure, arms, rows) -> list[str]:
  """Figure 15: loss curves, and accuracy by b2 at the last step, constant or grown to it."""
  left, right = figure.subplots(1, 2)
  lines = [
    "| series | last b2 | seeds | top-1, % | loss spikes | diverged |",
    "|---|---|---|---|---|---|",
  ]
  points = {"constant b2": [], "b2 of 1 - t^-l": []}
  for name, group in series_of(arms, _b2).items():
    last, (found, cells) = last_b2(group[0]), _outcome(group, rows)
    lines.append(f"| {name} | {last:.4f} | {cells} |")
    plot_curve(left, [rows[arm.name] for arm in group], name)
    kind = "b2 of 1 - t^-l" if group[0].value("optimizer.b2_power") else "constant b2"
    points[kind].append((1 / (1 - last), found.mean, np.nan_to_num(found.half)))
  for kind, some in points.items():
    if some:
      right.errorbar(*zip(*some, strict=True), marker="o", capsize=3, label=kind)
  left.set(xlabel="step", ylabel="loss")
  right.set(xlabel="1 / (1 - last b2): steps", ylabel="zero-shot top-1, %", xscale="log")
  _plain(right.xaxis)
  legend(left)
  legend(right)
  return lines


DRAWINGS = {
  "easy": accuracy,
  "1": accuracy,
  "pairs": pairs,
  "served": served,
  "batch": by_batch,
  "2": curves(_recipe),
  "5": remedies,
  "14": by_block,
  "6": draw_spikes.counts("size", lambda arm: WORDS.get(arm.size, arm.size)),
  "7": draw_spikes.counts("batch", lambda arm: str(arm.value("batch_size"))),
  "8": draw_spikes.counts("learning rate", lambda arm: str(arm.value("optimizer.learning_rate"))),
  "9": draw_spikes.around_change,
  "shift": draw_spikes.around_change,
  "10": accuracy_by_b2,
  "15": accuracy_by_last_b2,
  "11": draw_spikes.scalers,
  "flickr8k": by_recipe(RECALL),
  "cifar10": by_recipe(CIFAR10),
  "long": through_a_run,
}
