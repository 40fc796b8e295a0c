"""Figures of the SwitchBack paper in miniature, on scenes that the GPU draws or on photos.

  python -m benchmarks.figures 1                   # trains what is missing, then draws
  python -m benchmarks.figures 1 5 9               # of several, one after the other
  python -m benchmarks.figures 1 --draw            # draws what results/figures/runs.jsonl has
  python -m benchmarks.figures 1 --tiny            # two minutes on a CPU: shows that it runs
  python -m benchmarks.figures cifar10 --data ROOT # photos, in a folder that photos.py describes

Runs that are in the results are not trained again, and runs that were interrupted continue, so the
same command may be given until it says that nothing is missing. --whole starts no run, and
continues none, whose whole time exceeds what is left of --seconds: for a machine that is then
gone. Adds a row for each run to benchmarks/results/figures/runs.jsonl and writes figure_1.png and
figure_1.md beside it. `list` lists the figures.
"""

import argparse
import contextlib
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.commit import COMMIT
from benchmarks.figures import arms as all_arms
from benchmarks.figures import draw, photos, runs
from benchmarks.figures.arms import FIGURES, Arm
from benchmarks.tables import read_file
from benchmarks.timing import append

RESULTS = Path(__file__).parent.parent / "results" / "figures"
# Seconds of a step with 1,024 images on an H100: of scenes from results/scenes.jsonl, others from
# runs that shared one, as are the seconds around a run, most of which compile.
_SECONDS = {"ti": 0.0097, "s6": 0.017, "s12": 0.0234, "flickr8k": 0.06, "cifar10": 0.045}
_AROUND = {"ti": 30, "s6": 45, "s12": 85, "flickr8k": 25, "cifar10": 25}
_EVALUATION = 10  # of an evaluation before the last; a guess
# How much longer a step of these recipes takes (images/s of width 192 in the results).
_SLOWER = {"llm_int8": 1.35, "fp8_tensorwise": 1.5}


def main() -> None:
  args = _parse()
  if "list" in args.figures:
    for name, figure in FIGURES.items():
      print(f"{name:8} {len(figure.arms):3} runs  {figure.shows}")
    return
  if args.tiny:
    for name in args.figures:
      _tiny(name)
    return
  if not args.draw:
    _train(args)
  rows = read_rows(args.out)
  for name in args.figures:
    figure = FIGURES[name]
    draw.write(name, figure.arms, rows, args.out.parent)
    left = sum(a.name not in rows for a in figure.arms)
    missing = f"{left} of {len(figure.arms)} runs are missing" if left else "nothing is missing"
    print(f"figure {name}: {missing}")


def _train(args: argparse.Namespace) -> None:
  """Trains the runs that the results lack, and adds their rows."""
  rows, asked = read_rows(args.out), {}
  for name in args.figures:
    for arm in FIGURES[name].arms:
      asked.setdefault(arm.name, (name, arm))  # An arm of several figures is the first one's.
  missing = [a for key, (_, a) in asked.items() if key not in rows and _is_asked(a, args)]
  if not missing:
    return
  gpus = args.gpus if args.gpus is not None else _gpus()
  if not gpus:
    sys.exit(
      f"Figure {' '.join(args.figures)} lacks {len(missing)} runs, about {minutes(missing):.0f}"
      f" minutes of an H100, and there is no NVIDIA GPU here. --tiny shows in two minutes that it"
      f" runs; --draw draws the {len(rows)} runs of {args.out}."
    )
  print(f"{len(missing)} runs, about {minutes(missing) / len(gpus):.0f} minutes", flush=True)
  _prepare(args, missing)
  for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _: sys.exit(f"Stopped by {signal.Signals(number).name}."))
  how = (args.runs, gpus, args.at_once, args.seconds, args.data)

  def expected(arm: Arm) -> float:
    return 60 * minutes([arm]) * args.at_once if args.whole else 0.0

  # Closed in any case, so that no run is left behind.
  with contextlib.closing(runs.train_all(missing, *how, expected)) as ended:
    for row in ended:
      _report(row)
      if "error" not in row:
        figure, _ = asked[row["name"]]
        command = f"python -m benchmarks.figures {figure}"
        append(args.out, [row | {"commit": COMMIT, "command": command}])


def _parse() -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    "python -m benchmarks.figures",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("figures", nargs="+", choices=[*FIGURES, "list"])
  parser.add_argument("--out", type=Path, default=RESULTS / "runs.jsonl")
  parser.add_argument("--runs", type=Path, default=Path("runs/figures"), help="folder of the runs")
  parser.add_argument("--data", type=Path, help="folder of the shards of flickr8k and cifar10")
  parser.add_argument("--draw", action="store_true", help="train nothing")
  parser.add_argument("--tiny", action="store_true", help="a CPU, and a few steps of two runs")
  parser.add_argument("--sizes", nargs="+", choices=all_arms.SIZES, help="train only these")
  parser.add_argument(
    "--only", nargs="+", help="train only arms whose name has all words of one of these"
  )
  parser.add_argument("--seeds", type=int, default=99, help="train only the first seeds")
  parser.add_argument("--gpus", type=int, nargs="+", help="numbers of the GPUs; default: all")
  parser.add_argument("--at_once", type=int, default=2, help="runs that share a GPU")
  parser.add_argument("--seconds", type=float, default=1e9, help="stop after these")
  parser.add_argument("--whole", action="store_true", help="start none that would last longer")
  return parser.parse_args()


def _is_asked(arm: Arm, args) -> bool:
  words = set(arm.name.split())
  return (
    (not args.sizes or arm.size in args.sizes)
    and arm.seed < args.seeds
    and (not args.only or any(words.issuperset(chosen.split()) for chosen in args.only))
  )


def _prepare(args: argparse.Namespace, missing: list[Arm]) -> None:
  """Imports the photos of arms before their runs start, so that no run waits for another."""
  for name in sorted({arm.size for arm in missing} & photos.CONFIGS.keys()):
    if not args.data:
      sys.exit(
        f"Figure {name} needs --data ROOT, the folder with {name}/{name}-train-*.tar.gz and"
        f" {name}/{name}-test-*.tar.gz; benchmarks/figures/photos.py describes it."
      )
    try:
      photos.prepare(name, args.data, args.runs)
    except ValueError as error:
      sys.exit(f"--data {args.data}: {error}")


def _tiny(name: str) -> None:
  """Trains two arms of a figure for a few steps on whatever is here, and draws them."""
  chosen = [all_arms.tiny(arm) for arm in FIGURES[name].arms[:2]]
  with tempfile.TemporaryDirectory() as folder:
    rows, data = {}, None
    if chosen[0].size in photos.CONFIGS:
      data = Path(folder) / "made_up"
      photos.make_up(data, chosen[0].size)
    for i, arm in enumerate(chosen):
      workdir = Path(folder) / str(i)
      runs.train_one(arm, workdir, all_arms.tiny_config, data)
      row = runs.read_row(arm, workdir)
      _report(row)
      rows[arm.name] = row
    draw.write(name, chosen, rows, Path(folder))
    made = sorted(path.name for path in Path(folder).iterdir() if path.is_file())
  print(f"tiny: {', '.join(made)} were written, and removed")


def _report(row: dict) -> None:
  if "error" in row:
    print(f"{row['name']}: did not end: {row['error']}", flush=True)
  elif "diverged" in row:
    print(f"{row['name']}: diverged at step {row['diverged']}", flush=True)
  else:
    firsts = {k: v for k, v in row["scores"].items() if k.endswith(("top1", "@1"))}
    scores = "  ".join(f"{name} {score:.3f}" for name, score in firsts.items())
    print(f"{row['name']}: loss {row['last_loss']:.3f}  {scores}", flush=True)


def minutes(arms: list[Arm]) -> float:
  """About how long arms take on one H100."""
  total = 0.0
  for arm in arms:
    config = all_arms.config_of(arm)
    step = config.batch_size / 1024 * _SECONDS[arm.size] * _SLOWER.get(config.model.recipe, 1)
    evaluations = (config.steps - 1) // config.eval_every if config.eval_every else 0
    total += config.steps * step + evaluations * _EVALUATION + _AROUND[arm.size]
  return total / 60


def read_rows(path: Path) -> dict[str, dict]:
  """The rows of a file by their names; of several with one name, the last."""
  return {row["name"]: row for row in read_file(path)} if path.is_file() else {}


def _gpus() -> list[int]:
  """The numbers of the machine's NVIDIA GPUs. JAX is not asked: it would take their memory."""
  try:
    found = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
  except OSError:
    return []
  return list(range(found.stdout.count("GPU ")))


if __name__ == "__main__":
  main()
