"""Rows of runs with made-up numbers, and the command of benchmarks/figures."""

import sys

from benchmarks.figures import __main__ as program
from benchmarks.figures import analysis, arms

SCORES = [
  analysis.TOP1,
  analysis.HELD_OUT,
  analysis.LOSS,
  *analysis.RECALL.values(),
  *analysis.CIFAR10.values(),
]


def row_of(arm, top1=0.5) -> dict:
  """A row as runs.py makes it, with made-up numbers."""
  names = ("patch_embedding/kernel", "block_0/fc2/kernel", "block_5/fc2/kernel")
  spikes = {"loss": [1500], "rms": [1497], "following": [1500], "steps": 7000, "share": 0.01}
  spikes |= {"before": [2.5], "as_large": [0.02]}
  statistics = {
    f"{kind}/image{slash}block_{i}{suffix}": 0.1 + i
    for kind, slash, suffix in (
      ("gradient_mean_abs", "/", "/fc2/kernel"),
      ("gradient_max_abs", "/", "/fc2/kernel"),
      ("mean_abs_feature", "_", ""),
      ("max_abs_feature", "_", ""),
    )
    for i in range(6)
  }
  trace = {f"rms/image/{name}": [1.0, 2.0] for name in names}
  trace |= {"step": [2999, 3000], "loss": [1.0, 1.5], "loss_scale": [65536.0, 32768.0]}
  return {
    "name": arm.name,
    "size": arm.size,
    "changes": dict(arm.changes),
    "seed": arm.seed,
    "scores": dict.fromkeys(SCORES, top1) | {analysis.TOP1: top1 + arm.seed / 100},
    "evaluations": [{"step": s, analysis.TOP1: top1 - 0.1 + s / 1e5} for s in (4000, 8000)],
    "curve": [[4000, 2.0], [8000, 1.0]],
    "last_loss": 1.0,
    "served": dict.fromkeys(arms.served(arm), dict.fromkeys(SCORES, top1)),
    "spikes": {f"rms/image/{name}": spikes for name in names},
    "watched": [{"step": step, **statistics} for step in (20, 8000)],
    "trace": trace,
  }


def call(monkeypatch, *arguments):
  monkeypatch.setattr(sys, "argv", ["figures", *map(str, arguments)])
  program.main()
