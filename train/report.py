"""Plots a run: loss, RMS of the patch embedding, accuracy and features over the steps."""

from pathlib import Path

from train.record import read_metrics


def write_report(workdir: Path, title: str) -> Path:
  """Draws report.png from metrics.jsonl; returns its path."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  records = read_metrics(workdir / "metrics.jsonl")
  figure, axes = plt.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
  figure.suptitle(title)
  panels = (
    ("loss", _named(records, lambda n: n == "loss")),
    ("RMS of the patch embedding", _named(records, lambda n: n.startswith("rms/"))),
    ("evaluation", _named(records, lambda n: n.startswith("eval/") and _is_headline(n))),
    ("mean |feature| of a block's output", _some_blocks(records)),
  )
  for axis, (heading, curves) in zip(axes.flat, panels, strict=True):
    for name, (steps, values) in curves.items():
      axis.plot(steps, values, marker="." if len(steps) < 40 else None, label=name)
    axis.set_title(heading)
    axis.set_xlabel("step")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    if len(curves) > 1:
      axis.legend(fontsize="small")
    if not curves:
      axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes)
  if panels[1][1]:
    axes.flat[1].axhline(1.0, color="gray", linestyle="--", linewidth=1)
  path = workdir / "report.png"
  figure.savefig(path, dpi=110)
  plt.close(figure)
  return path


def _named(records, wanted) -> dict[str, tuple[list, list]]:
  names = {n: None for r in records for n in r if n != "step" and wanted(n)}
  curves = {}
  for name in names:
    points = [(r["step"], r[name]) for r in records if name in r]
    short = name.removeprefix("eval/").removeprefix("rms/").removeprefix("mean_abs_feature/")
    curves[short] = tuple(map(list, zip(*points, strict=True)))
  return curves


def _is_headline(name: str) -> bool:
  return name.endswith(("top1", "recall@1", "recall@10"))


def _some_blocks(records) -> dict[str, tuple[list, list]]:
  """The curves of four blocks of each tower, from first to last."""
  curves = _named(records, lambda name: name.startswith("mean_abs_feature/"))
  chosen = {}
  for tower in ("image", "text"):
    names = [name for name in curves if name.startswith(tower)]
    chosen |= {names[round(i * (len(names) - 1) / 3)]: None for i in range(4) if names}
  return {name: curves[name] for name in chosen}
