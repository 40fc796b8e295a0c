"""benchmarks/figures: what is trained, rows of runs, and what is drawn of them."""

import json
import math
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest
from figure_case import call, row_of
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from benchmarks.figures import __main__ as program
from benchmarks.figures import analysis, arms, draw, runs
from benchmarks.figures.arms import FIGURES
from benchmarks.timing import append
from train.workdir import write_json

pytestmark = pytest.mark.standard_promotion  # As optax needs.


@pytest.mark.parametrize("name", FIGURES)
def test_arms_of_a_figure_differ_and_are_valid_configs(name):
  figure = FIGURES[name]
  assert len({arm.name for arm in figure.arms}) == len(figure.arms)
  for arm in figure.arms:
    config = arms.config_of(arm)
    config.check()
    assert config.seed == arm.seed
    assert config.model.patch_dropout == (0 if name == "batch" else 0.5)
    if arm.size in arms.SIZES:
      assert config.optimizer.warmup_steps == config.steps // 4
      assert config.steps >= (1000 if name == "batch" else 8000)


def test_figure_1_has_all_recipes_with_the_same_seeds():
  found = {}
  for arm in FIGURES["1"].arms:
    found.setdefault((arm.size, arm.value("model.recipe")), set()).add(arm.seed)
  assert {recipe for _, recipe in found} == set(arms.RECIPES)
  assert all(seeds == set(range(5 if size == "ti" else 3)) for (size, _), seeds in found.items())


def test_figure_15_shares_its_constant_b2_with_figure_10():
  figure, shared = (set(FIGURES[name].arms) for name in ("15", "10"))
  assert {arm.value("optimizer.b2") for arm in figure & shared} == {0.98, 0.99}
  rest = figure - shared
  assert {arm.value("optimizer.b2_power") for arm in rest} == {0.45, 0.5, 0.65}
  assert {arm.value("optimizer.name") for arm in figure} == {"stable_adamw"}
  assert len(rest) == 9 and len(figure) == 15


def test_the_table_of_figure_10_has_a_part_for_each_batch_and_rate(tmp_path):
  chosen = [arm for arm in FIGURES["10"].arms if arm.seed < 2]
  draw.write("10", chosen, {arm.name: row_of(arm) for arm in chosen}, tmp_path)
  table = (tmp_path / "figure_10.md").read_text().splitlines()[2:]
  cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
  b2s = ["0.5", "0.9", "0.95", "0.98", "0.99", "0.995"]
  assert [line[:3] for line in cells] == [
    [setting, series, b2]
    for setting, some in (("batch 1,024, rate 0.002", b2s), ("batch 4,096, rate 0.01", b2s[3:]))
    for series in ("AdamW", "gradient clipping", "update clipping")
    for b2 in some
  ]
  assert all(line[3] == "2" and line[4].startswith("50.50 ±") for line in cells)


def test_figure_10_draws_each_run_and_no_accuracy_outside_0_to_100():
  chosen = [arm for arm in FIGURES["10"].arms if arm.seed < 2]
  rows = {arm.name: row_of(arm, 0.9 * arm.seed) for arm in chosen}  # The intervals are 1,100 wide.
  figure = Figure()
  draw.accuracy_by_b2(figure, chosen, rows)
  for curves, accuracy, count in zip(figure.axes[::2], figure.axes[1::2], (18, 9), strict=True):
    assert len(curves.lines) == 2 * 3
    assert accuracy.get_ylim() == (-2, 102)
    crosses = [c.get_offsets() for c in accuracy.collections if isinstance(c, PathCollection)]
    assert len(crosses) == count
    assert all(found[:, 1].tolist() == [0, 91] for found in crosses)


def test_the_table_of_figure_15_has_b2_at_the_last_step(tmp_path):
  chosen = FIGURES["15"].arms
  draw.write("15", chosen, {arm.name: row_of(arm) for arm in chosen}, tmp_path)
  table = (tmp_path / "figure_15.md").read_text().splitlines()[2:]
  last = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in table}
  # Of 8,000 steps: 8000^-0.5 is 0.01118.
  expected = {"b2 0.98": "0.9800", "b2 0.99": "0.9900", "1 - t^-0.5": "0.9888"}
  assert last == expected | {"1 - t^-0.45": "0.9825", "1 - t^-0.65": "0.9971"}


def test_first_seeds_of_all_series_are_trained_first():
  seeds = [arm.seed for arm in FIGURES["1"].arms]
  assert seeds == sorted(seeds)


def test_an_interval_is_students():
  found = analysis.estimate([1.0, 2.0, 3.0])
  assert found.mean == 2 and found.half == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
  assert math.isnan(analysis.estimate([1.0]).half)


def test_a_difference_is_paired_by_seed():
  base = {0: 10.0, 1: 50.0, 2: 30.0, 8: 0.0}
  apart = analysis.difference({2: 31.0, 1: 51.0, 0: 11.0, 7: 99.0}, base)
  assert apart == (1.0, 0.0, 3)
  assert (apart.within(1.0), apart.within(0.9)) == ("yes", "no")


def test_a_difference_is_within_a_limit_if_its_interval_is():
  found = [analysis.Estimate(mean, 0.3, 5).within(0.5) for mean in (0.2, -0.2, 0.3, -0.7, 0.9)]
  assert found == ["yes", "yes", "open", "open", "no"]
  assert analysis.estimate([0.1]).within(0.5) == "open"


def test_a_run_that_diverged_has_no_score():
  rows = [row_of(FIGURES["1"].arms[0]), {"size": "ti", "seed": 1, "diverged": 12}]
  assert analysis.by_run(rows).keys() == {("ti", 0)}


def test_a_curve_has_the_mean_of_the_losses():
  records = [{"step": step, "loss": 1 / step} for step in range(1, 401)]
  found = runs.curve(records)
  assert len(found["curve"]) == 200 and found["curve"][-1][0] == found["steps"] == 400
  means = [loss for _, loss in found["curve"]]
  assert np.mean(means) == pytest.approx(np.mean([r["loss"] for r in records]), rel=1e-3)


@pytest.mark.parametrize(
  "end", [{"eval": {analysis.TOP1: 0.5}, "jax": "0"}, {"diverged": 3, "why": "Step 3: x"}]
)
def test_a_row_is_of_a_run_that_ended(tmp_path, end):
  arm = FIGURES["1"].arms[0]
  assert "error" in runs.read_row(arm, tmp_path)
  (tmp_path / "metrics.jsonl").write_text('{"step": 20, "loss": 2.0}\n{"step": 40, "loss": 1.0}\n')
  write_json(tmp_path / "end.json", end)
  row = json.loads(json.dumps(runs.read_row(arm, tmp_path)))
  assert row["name"] == arm.name and row["last_loss"] == 1.0
  assert row.get("diverged") == end.get("diverged") and ("scores" in row) == ("eval" in end)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_drawn_of_some_of_its_rows_and_of_all(name, tmp_path):
  chosen = FIGURES[name].arms
  for count in (1, len(chosen)):
    rows = {arm.name: row_of(arm) for arm in chosen[:count]}
    draw.write(name, chosen, rows, tmp_path)
    assert (tmp_path / f"figure_{name}.png").stat().st_size > 5000
    lines = (tmp_path / f"figure_{name}.md").read_text().splitlines()
    assert len(lines) > 2 and len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize("whole", [0, 1])
@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_drawn_of_runs_that_diverged_early(name, whole, tmp_path):
  chosen, rows = FIGURES[name].arms, {}
  for arm in chosen[whole:]:  # As runs.read_row makes it.
    row = {"name": arm.name, "size": arm.size, "changes": dict(arm.changes), "seed": arm.seed}
    logged = {"steps": 12, "curve": [[6, 2.0], [12, 3.0]], "last_loss": 3.0} if whole else {}
    rows[arm.name] = row | {"diverged": 12, "steps": 0, "curve": []} | logged
  rows |= {arm.name: row_of(arm) for arm in chosen[:whole]}
  draw.write(name, chosen, rows, tmp_path)
  assert (tmp_path / f"figure_{name}.png").stat().st_size > 5000


def test_the_table_of_figure_1_has_the_paired_difference(tmp_path):
  chosen = [arm for arm in FIGURES["1"].arms if arm.size == "ti"]
  better = {"switchback": 0.51}
  rows = {arm.name: row_of(arm, better.get(arm.value("model.recipe"), 0.5)) for arm in chosen}
  draw.write("1", chosen, rows, tmp_path)
  (line,) = [x for x in (tmp_path / "figure_1.md").read_text().splitlines() if "`switchback`" in x]
  assert "| 53.00 ± " in line and "| 1.00 ± 0.00 |" in line


def test_the_table_of_figure_1_has_the_pairs_of_all_sizes_together(tmp_path):
  chosen = [arm for arm in FIGURES["1"].arms if arm.size != "s6"]
  better = {("ti", "switchback"): 0.52, ("s12", "switchback"): 0.44}
  rows = {a.name: row_of(a, better.get((a.size, a.value("model.recipe")), 0.5)) for a in chosen}
  draw.write("1", chosen, rows, tmp_path)
  lines = [x for x in (tmp_path / "figure_1.md").read_text().splitlines() if "all sizes" in x]
  (line,) = [x for x in lines if "`switchback`" in x]
  # 5 pairs with +2 and 3 with -6: mean -1, deviation sqrt(120 / 7), and t's quantile is 2.365.
  assert line.startswith("| all sizes | `switchback` | 8 |  | -1.00 ± 3.46 |")
  assert not [x for x in lines if "`full`" in x]
  one_size = {name: row for name, row in rows.items() if "s12" not in name or "llm" not in name}
  draw.write("1", chosen, one_size, tmp_path)
  lines = [x for x in (tmp_path / "figure_1.md").read_text().splitlines() if "all sizes" in x]
  assert len(lines) == 4 and not [x for x in lines if "`llm_int8`" in x]


def test_figure_1_draws_each_run_s_difference_from_full_with_the_same_seed():
  chosen = [arm for arm in FIGURES["1"].arms if arm.seed < 2]
  better = {"switchback": 0.52, "llm_int8": 0.44}
  rows = {a.name: row_of(a, better.get(a.value("model.recipe"), 0.5)) for a in chosen}
  figure = Figure()
  draw.accuracy(figure, chosen, rows)
  dots = {}
  for line in figure.axes[1].lines:
    if line.get_marker() == "o":
      dots[line.get_ydata()[0]] = line.get_xdata()
  assert set(dots) == set(arms.RECIPES) - {"full"}
  np.testing.assert_allclose(dots["switchback"], [2] * 6)  # three sizes, two seeds
  np.testing.assert_allclose(dots["llm_int8"], [-6] * 6)


def test_without_a_gpu_the_command_says_how_long_it_takes(monkeypatch, tmp_path):
  monkeypatch.setattr(program, "_gpus", list)
  with pytest.raises(SystemExit, match=r"lacks 66 runs, about \d+ minutes .* --tiny"):
    call(monkeypatch, 1, "--out", tmp_path / "runs.jsonl")


def test_runs_that_have_rows_are_not_trained_again(monkeypatch, tmp_path, capsys):
  out, trained = tmp_path / "runs.jsonl", []
  chosen = FIGURES["9"].arms
  for arm in chosen[1:]:
    append(out, [row_of(arm)])

  def train_all(missing, *_):
    trained.extend(missing)
    yield from map(row_of, missing)

  monkeypatch.setattr(runs, "train_all", train_all)
  call(monkeypatch, 9, "--out", out, "--gpus", 0)
  assert trained == [chosen[0]] and "nothing is missing" in capsys.readouterr().out
  call(monkeypatch, 9, "--out", out, "--gpus", 0)
  assert trained == [chosen[0]]


def test_arms_of_several_figures_are_trained_once_and_are_the_first_figures(monkeypatch, tmp_path):
  out, trained = tmp_path / "runs.jsonl", []

  def train_all(missing, *_):
    trained.extend(missing)
    yield from map(row_of, missing)

  monkeypatch.setattr(runs, "train_all", train_all)
  call(monkeypatch, 15, 10, "--out", out, "--gpus", 0)
  both = {arm.name for name in ("10", "15") for arm in FIGURES[name].arms}
  assert len(trained) == len(both) and {arm.name for arm in trained} == both
  commands = {row["name"]: row["command"] for row in program.read_rows(out).values()}
  of_15 = {arm.name for arm in FIGURES["15"].arms}
  assert all(commands[n].endswith(" 15" if n in of_15 else " 10") for n in both)
  assert (tmp_path / "figure_10.png").is_file() and (tmp_path / "figure_15.png").is_file()


@pytest.fixture(autouse=True)
def signals():
  """The command handles some, and each test begins without."""
  before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
  yield
  for number, handler in before.items():
    signal.signal(number, handler)


def test_an_error_of_one_run_does_not_stop_the_others(monkeypatch, tmp_path):
  monkeypatch.setattr(runs, "_TRAIN", [sys.executable, "-c", "pass"])
  read, chosen = runs.read_row, FIGURES["9"].arms[:3]

  def read_row(arm, workdir):
    if arm == chosen[0]:
      raise OSError("damaged")
    return read(arm, workdir)

  monkeypatch.setattr(runs, "read_row", read_row)
  monkeypatch.setattr(threading, "excepthook", lambda _: None)
  found = list(runs.train_all(chosen, tmp_path, [0], 2, 100))
  assert [row["name"] for row in found] == [arm.name for arm in chosen[1:]]


def test_a_run_that_ignores_its_signal_is_killed(monkeypatch, tmp_path):
  code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
  monkeypatch.setattr(runs, "_TRAIN", [sys.executable, "-c", code])
  monkeypatch.setattr(runs, "_PATIENCE", 0.5)
  assert [row["error"] for row in runs.train_all(FIGURES["9"].arms[:1], tmp_path, [0], 1, 1)]


@pytest.mark.parametrize("records", [0, 5])
def test_a_run_that_diverges_early_has_a_row(tmp_path, records):
  for arm in (FIGURES["1"].arms[0], FIGURES["9"].arms[0], FIGURES["14"].arms[0]):
    lines = [
      json.dumps({"step": step, "loss": 2.0, "rms/x": 1.0}) for step in range(1, records + 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    write_json(tmp_path / "end.json", {"diverged": 7, "why": "Step 7: x"})
    row = runs.read_row(arm, tmp_path)
    assert row["diverged"] == 7 and row["steps"] == len(row["curve"]) == records


def test_whole_starts_what_ends_in_time_with_as_many_at_once(monkeypatch, tmp_path):
  asked = {}

  def train_all(missing, folder, gpus, at_once, seconds, data, expected):
    asked.update({arm.size: expected(arm) for arm in missing})
    yield from ()

  monkeypatch.setattr(runs, "train_all", train_all)
  how = ("--out", tmp_path / "runs.jsonl", "--gpus", 0, "--at_once", 3)
  call(monkeypatch, 2, *how)
  assert set(asked.values()) == {0}
  call(monkeypatch, 2, *how, "--whole")
  assert asked["ti"] > 3 * 8000 * 0.0097 and asked["s12"] > 3 * 8000 * 0.0234
  longer = FIGURES["long"].arms[0]
  assert longer.value("steps") // longer.value("eval_every") == 10  # The last is in each run.
  once = longer._replace(changes=tuple(c for c in longer.changes if c[0] != "eval_every"))
  assert program.minutes([longer]) - program.minutes([once]) == pytest.approx(9 * 10 / 60)


def test_only_wants_all_words_of_one_of_its_choices(monkeypatch, tmp_path):
  asked = []

  def train_all(missing, *_):
    asked.extend(missing)
    yield from ()

  monkeypatch.setattr(runs, "train_all", train_all)
  chosen = ("--only", "seed=1 optimizer.b2=0.99", "optimizer.b2=0.9")
  call(monkeypatch, 9, "--out", tmp_path / "runs.jsonl", "--gpus", 0, *chosen)
  call(monkeypatch, 6, "--out", tmp_path / "runs.jsonl", "--gpus", 0, *chosen)
  # Of 6, b2 .9 of three sizes and seeds, and one seed of .99; no figure 9 with .98 or .995.
  found = [(arm.size, arm.value("optimizer.b2"), arm.seed) for arm in asked]
  assert sum(size == "ti" and b2 == 0.9 for size, b2, _ in found) == 5 + 3
  assert sorted(size for size, b2, seed in found if (b2, seed) == (0.99, 1)) == ["s12", "s6", "ti"]
  assert len(found) == 5 + 9 + 3


def test_a_run_that_would_not_end_in_time_is_not_started(monkeypatch, tmp_path):
  monkeypatch.setattr(runs, "_TRAIN", [sys.executable, "-c", "pass"])
  chosen = FIGURES["2"].arms
  expected = {arm: 500 if arm.size == "s12" else 50 for arm in chosen}
  found = runs.train_all(chosen, tmp_path, [0], 4, 100, expected=expected.get)
  assert {row["size"] for row in found} == {"ti"}


# The first run ends at once. The others say that they run, and that they were told to end.
_SLEEPER = """
import json, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[2])
def end(*_):
  (folder / "told").touch()
  sys.exit()
signal.signal(signal.SIGTERM, end)
if json.loads(sys.argv[1])[1] == [["model.recipe", "full"]]:
  while len(list(folder.parent.glob("*/runs"))) < 2:
    time.sleep(0.05)
  (folder / "metrics.jsonl").touch()
  (folder / "end.json").write_text(json.dumps({"diverged": 1, "why": "Step 1"}))
  sys.exit()
(folder / "runs").touch()
time.sleep(60)
"""


@pytest.mark.parametrize("stopped_by", [signal.SIGTERM, signal.SIGHUP])
def test_runs_end_with_the_command_that_started_them(monkeypatch, tmp_path, stopped_by):
  """Else they would hold the GPUs, and their folders, when the command is given again."""
  monkeypatch.setattr(runs, "_TRAIN", [sys.executable, "-c", _SLEEPER])
  monkeypatch.setattr(program, "_report", lambda row: os.kill(os.getpid(), stopped_by))
  how = ("--out", tmp_path / "runs.jsonl", "--runs", tmp_path, "--gpus", 0, "--at_once", 3)
  with pytest.raises(SystemExit, match=stopped_by.name):
    call(monkeypatch, 2, *how)
  run, told = ({path.parent for path in tmp_path.glob(f"*/{name}")} for name in ("runs", "told"))
  assert len(run) >= 2 and told == run
  time.sleep(1)
  assert {path.parent for path in tmp_path.glob("*/runs")} == run, "another was started"


def test_a_longer_run_has_the_difference_at_each_evaluation(tmp_path):
  chosen = FIGURES["long"].arms
  better = {"switchback": 0.51}
  rows = {arm.name: row_of(arm, better.get(arm.value("model.recipe"), 0.5)) for arm in chosen}
  draw.write("long", chosen, rows, tmp_path)
  lines = (tmp_path / "figure_long.md").read_text().splitlines()[2:]
  ours = [line for line in lines if "switchback" in line]
  assert len(lines) == 4 and len(ours) == 2
  assert all("| 3 |" in line and line.endswith("| 1.00 ± 0.00 |") for line in ours)


def _row(arm, better: dict[str, float]) -> dict:
  """A row whose top-1 is 0.5 and something, and whose loss is 0.5, for its recipe."""
  return row_of(arm, 0.5) | {
    "scores": {
      analysis.TOP1: 0.5 + better[arm.value("model.recipe")] * (1 + arm.seed % 2),
      analysis.LOSS: 0.5,
    }
  }


BETTER = {"full": 0.0, "switchback": -0.01, "switchback_c": 0.02}


def test_pairs_are_compared_by_seed_and_the_older_ones_come_last(tmp_path):
  chosen = FIGURES["pairs"].arms
  assert [arm.seed for arm in chosen[::3]] == [*range(5, 16), *range(5)]
  rows = {arm.name: _row(arm, BETTER) for arm in chosen}
  for arm in FIGURES["1"].arms:  # Older rows have no loss: they count for top-1 only.
    if arm.name in rows:
      del rows[arm.name]["scores"][analysis.LOSS]
  draw.write("pairs", chosen, rows, tmp_path)
  assert (tmp_path / "figure_pairs.md").read_text().splitlines()[2:] == [
    "| `full` | 16 | 50.00 ± 0.00 |  |  | 0 |",
    "| `switchback` | 16 | 48.50 ± 0.28 | -1.50 ± 0.28 | 0.00 ± 0.00 | 0 |",
    "| `switchback_c` | 16 | 53.00 ± 0.55 | 3.00 ± 0.55 | 0.00 ± 0.00 | 0 |",
  ]


def test_8_bits_are_compared_with_16_for_the_same_weights(tmp_path):
  chosen = FIGURES["served"].arms
  assert {arm.seed for arm in chosen} == set(range(5, 13))
  own = chosen[1].value("model.recipe")
  assert arms.served(chosen[1]) == ("full", "switchback_c") and own == "switchback"
  assert not arms.served(FIGURES["1"].arms[0]) and not arms.served(FIGURES["batch"].arms[0])
  rows = {}
  for arm in chosen:
    row = _row(arm, BETTER)
    others = {
      recipe: {analysis.TOP1: row["scores"][analysis.TOP1] + 0.01, analysis.LOSS: 0.75}
      for recipe in arms.served(arm)
    }
    rows[arm.name] = row | {"served": others}
  draw.write("served", chosen, rows, tmp_path)
  table = (tmp_path / "figure_served.md").read_text()
  assert "| `full` | `switchback` | 8 | 1.00 ± 0.00 | 25.00 ± 0.00 |" in table
  assert "| `switchback` | `switchback` | 8 | -1.00 ± 0.00 | -25.00 ± 0.00 |" in table
  assert "| `switchback` | `switchback_c` | 8 | 0.00 ± 0.00 | 0.00 ± 0.00 |" in table


def test_the_slope_is_that_of_a_doubling_of_the_batch(tmp_path):
  chosen = FIGURES["batch"].arms
  assert len({a.name for a in chosen}) == 39
  tokens = {arm.value("batch_size") * 65 for arm in chosen}
  assert [round(n / 1e3) for n in sorted(tokens)] == [33, 266, 1065]
  rows = {}
  for arm in chosen:
    row = _row(arm, dict.fromkeys(BETTER, 0))
    if arm.value("model.recipe") == "switchback":
      row["scores"][analysis.TOP1] -= math.log2(arm.value("batch_size") / 512) / 100
    rows[arm.name] = row
  draw.write("batch", chosen, rows, tmp_path)
  assert (tmp_path / "figure_batch.md").read_text().splitlines()[2:9] == [
    "| `full` | 512 | 5 | 50.00 ± 0.00 |  |  |",
    "| `full` | 4,096 | 3 | 50.00 ± 0.00 |  |  |",
    "| `full` | 16,384 | 5 | 50.00 ± 0.00 |  |  |",
    "| `switchback` | 512 | 5 | 50.00 ± 0.00 | 0.00 ± 0.00 | 0.00 ± 0.00 |",
    "| `switchback` | 4,096 | 3 | 47.00 ± 0.00 | -3.00 ± 0.00 | 0.00 ± 0.00 |",
    "| `switchback` | 16,384 | 5 | 45.00 ± 0.00 | -5.00 ± 0.00 | 0.00 ± 0.00 |",
    "| `switchback` | slope, a doubling | 13 |  | -1.00 ± 0.00 | 0.00 ± 0.00 |",
  ]


def test_a_run_is_scored_in_the_other_recipes_after_its_training(monkeypatch, tmp_path):
  arm = arms.tiny(FIGURES["served"].arms[0])
  arm = arm._replace(changes=(*((k, v) for k, v in arm.changes if k != "steps"), ("steps", 4)))
  monkeypatch.setattr(runs, "served", lambda arm: ("switchback",))
  runs.train_one(arm, tmp_path, arms.tiny_config)
  row = runs.read_row(arm, tmp_path)
  ours = row["served"]["switchback"]
  assert ours.keys() == row["scores"].keys()
  assert 0 < abs(ours[analysis.LOSS] - row["scores"][analysis.LOSS]) < 0.01


def test_evaluations_are_kept_if_there_are_several():
  one = {"step": 2000, "eval/classes/zero_shot_top1": 0.25, "eval/scenes/text_to_image_recall@1": 1}
  records = [{"step": 20, "loss": 1.0}, one, one | {"step": 4000}]
  found = runs.evaluations(records)["evaluations"]
  assert found == [{"step": step, analysis.TOP1: 0.25} for step in (2000, 4000)]
  assert runs.evaluations(records[:2]) == {}


def test_tiny_trains_two_runs_and_draws_them(monkeypatch, capsys):
  call(monkeypatch, 1, "--tiny")
  printed = capsys.readouterr().out
  assert "model.recipe=full" in printed and "model.recipe=switchback" in printed
  assert "figure_1.png" in printed
