"""What a run shows for its users: report.png, and its last lines.

The picture has the curves of metrics.jsonl and a few images with their nearest captions. It is
drawn at each evaluation, and a failure to draw never ends a run.
"""

import itertools
import sys
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path

from train.record import is_patch_embedding_rms, read_metrics
from train.zero_shot import Sample

_COLUMNS = 8  # of sample images
_WIDTH = 13  # inches
_ROWS = 13  # of a legend beside its panel


def describe_scores(scores: dict[str, float]) -> str:
  """The scores for one nearest candidate: "zero_shot_top1 0.921, image_to_text_recall@1 0.310"."""
  firsts = (name for name in scores if name.endswith(("top1", "@1")))
  return ", ".join(f"{name} {scores[name]:.3f}" for name in firsts)


def describe_end(workdir: Path, result: dict) -> str:
  """The step, the scores and where everything is, for the contents of result.json."""
  checkpoints = {"checkpoint": result["step"], "the best": result.get("best_step")}
  return (
    f"after step {result['step']}: {describe_scores(result['eval']) or 'not evaluated'}\n"
    f"  report      {workdir / 'report.png'}\n"
    f"  result      {workdir / 'result.json'}"
  ) + "".join(
    f"\n  {name:10}  {workdir / 'checkpoints' / str(step)}"
    for name, step in checkpoints.items()
    if step is not None
  )


def write_report(workdir: Path, title: str, samples: Sequence[Sample] = ()) -> None:
  """Draws report.png from metrics.jsonl and samples, or prints why it could not."""
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")  # Of letters that the font lacks.
      _write(workdir, title, samples)
  except Exception as error:  # The picture matters less than the run.
    print(f"report.png could not be drawn: {type(error).__name__}: {error}", file=sys.stderr)


def _write(workdir: Path, title: str, samples: Sequence[Sample]) -> None:
  import matplotlib
  from matplotlib.figure import Figure

  records = read_metrics(workdir / "metrics.jsonl")
  partial = workdir / "report.partial"
  with matplotlib.rc_context({"text.parse_math": False}):  # A caption may have a "$".
    # Fixed margins: matplotlib's layouts measure all texts, which takes as long as drawing them.
    figure = Figure(figsize=(_WIDTH, 10 + 4.2 * bool(samples)))
    if samples:
      above, below = figure.subfigures(2, 1, height_ratios=(10, 4.2))
      _draw_samples(below, samples)
    else:
      above = figure
    lines = [textwrap.shorten(line, 150, placeholder=" ...") for line in title.splitlines()]
    above.suptitle("\n".join(lines), fontsize="large")
    _make_room(figure, above, _draw_curves(above, records))
    partial.unlink(missing_ok=True)
    figure.savefig(partial, dpi=110, format="png")
  partial.replace(workdir / "report.png")


def _make_room(figure, above, legends) -> None:
  """Leaves room for the legends right of the second column; long ones make the picture wider."""
  widest = max((legend.get_window_extent().width for legend in legends), default=0)
  room = widest / figure.dpi + 0.25  # inches
  width = max(_WIDTH, room + 10.5)
  figure.set_figwidth(width)
  above.subplots_adjust(
    left=0.8 / width, right=1 - room / width, bottom=0.06, top=0.91, wspace=0.16, hspace=0.34
  )


def _draw_curves(figure, records: list[dict]) -> list:
  """Draws the panels; returns their legends."""
  panels = {
    "loss": _named(records, lambda n: n == "loss"),
    "evaluation": _named(records, _is_headline),
    "learning rate": _named(records, lambda n: n == "learning_rate"),
    "RMS of the patch embedding": _named(records, is_patch_embedding_rms),
    "images/s": _named(records, lambda n: n == "images_per_second"),
    "mean |feature| of a block's output": _some_blocks(records),
  }
  changes = _changes(records)
  legends = []
  for axis, (heading, curves) in zip(figure.subplots(3, 2).flat, panels.items(), strict=True):
    for name, (steps, values) in curves.items():
      label = textwrap.fill(name, 40)
      axis.plot(steps, values, marker="." if len(steps) < 40 else None, label=label)
    axis.set_title(heading, y=1)  # By default matplotlib measures all texts around an axis.
    axis.set_xlabel("step")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    for step, stage in changes.items():
      axis.axvline(step, color="gray", linestyle=":", linewidth=1)
      if heading == "loss":
        place = {"transform": axis.get_xaxis_transform(), "va": "top", "fontsize": "small"}
        axis.text(step, 0.99, f" {stage}", color="gray", **place)
    if heading == "RMS of the patch embedding" and curves:
      axis.axhline(1.0, color="gray", linestyle="--", linewidth=1)
      place = {"transform": axis.get_yaxis_transform(), "va": "bottom", "fontsize": "small"}
      axis.text(0.01, 1.0, "clipped above", color="gray", **place)
    if heading in ("learning rate", "images/s"):
      axis.set_ylim(bottom=0)
    if len(curves) > 1:
      lines = len(curves) * max(-(-len(name) // 40) for name in curves)
      columns = -(-lines // _ROWS)
      place = {"loc": "upper left", "bbox_to_anchor": (1, 1), "ncols": columns}
      legends.append(axis.legend(**place, fontsize="small", frameon=False))
    if not curves:
      axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes)
  return legends


def _changes(records: list[dict]) -> dict[int, str]:
  """The first recorded step of each stage but the first one, and what to call it."""
  stages = [(r["step"], _stage(r)) for r in records if "stage" in r]
  return {
    step: stage for (_, before), (step, stage) in itertools.pairwise(stages) if stage != before
  }


def _stage(record: dict) -> str:
  number = f"recipe {record['stage']}"
  if "image_size" not in record:
    return number
  return f"stage {record['stage']}: {record['image_size']} px"


def _draw_samples(figure, samples: Sequence[Sample]) -> None:
  """Each image under its caption and above the nearest captions, its own in green."""
  figure.suptitle("evaluation images: a caption above, the nearest captions below (its own: green)")
  figure.subplots_adjust(left=0.02, right=0.98, bottom=0.02, top=0.82, wspace=0.06, hspace=0.05)
  no_ticks = {"xticks": (), "yticks": ()}
  images, texts = figure.subplots(2, _COLUMNS, height_ratios=(1, 0.9), subplot_kw=no_ticks)
  for axis, text, sample in zip(images, texts, samples, strict=False):
    axis.imshow(sample.image)
    axis.set_title(_lines(sample.captions[0]), fontsize="small", y=1)
    for i, caption in enumerate(sample.nearest):
      colour = "green" if caption in sample.captions else "black"
      text.text(0, 1 - i / 3, _lines(caption), va="top", fontsize="small", color=colour)
  for axis in figure.axes:
    axis.axis("off")


def _lines(caption: str) -> str:
  return textwrap.fill(caption, 22, max_lines=2, placeholder=" ...")


def _named(records, wanted) -> dict[str, tuple[list, list]]:
  names = {n: None for r in records for n in r if n != "step" and wanted(n)}
  curves = {}
  for name in names:
    points = [(r["step"], r[name]) for r in records if name in r]
    short = name.removeprefix("eval/").removeprefix("rms/").removeprefix("mean_abs_feature/")
    curves[short] = tuple(map(list, zip(*points, strict=True)))
  return curves


def _is_headline(name: str) -> bool:
  return name.startswith("eval/") and name.endswith(("top1", "recall@1", "recall@10"))


def _some_blocks(records) -> dict[str, tuple[list, list]]:
  """The curves of four blocks of each tower, from first to last."""
  curves = _named(records, lambda name: name.startswith("mean_abs_feature/"))
  chosen = {}
  for tower in ("image", "text"):
    names = [name for name in curves if name.startswith(tower)]
    names.sort(key=lambda name: int(name.rpartition("_")[2]))  # JAX sorted them as texts.
    chosen |= {names[round(i * (len(names) - 1) / 3)]: None for i in range(4) if names}
  return {name: curves[name] for name in chosen}
