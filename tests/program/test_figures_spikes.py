"""Figures about loss spikes: rows have their traces, and tables what follows what."""

import numpy as np
import pytest
from figure_case import row_of

from benchmarks.figures import arms, draw, draw_spikes, runs
from benchmarks.figures.arms import FIGURES

PATCHES = draw_spikes.PATCHES


@pytest.fixture
def records():
  """A run of 1,500 steps, with an RMS spike at step 1201 and a loss spike at 1205."""
  rng = np.random.default_rng(0)
  found = [
    {"step": step, "loss": 1 + 0.01 * float(rng.standard_normal()), PATCHES: 1.0, "mfu": 0.5}
    for step in range(1, 1500)
  ]
  found[1200][PATCHES] = 5.0
  for i in range(1204, 1208):
    found[i]["loss"] = 9.0
  return found


def test_the_figures_of_spikes_share_runs():
  smallest = {name: {a for a in figure.arms if a.size == "ti"} for name, figure in FIGURES.items()}
  of_6, of_7, of_8, of_10 = (smallest[name] for name in ("6", "7", "8", "10"))
  assert len(of_6) == 15 and of_6 <= of_7 and of_6 <= of_8
  assert len(of_8 & of_10) == 15, "figure 10's AdamW is figure 8's lowest rate"
  assert len(of_7 & of_10) == 6, "and with a batch of 4,096 figure 7's, with two of its b2"
  assert {arm.value("batch_size") for arm in of_7} == {256, 1024, 4096}
  assert {arm.value("optimizer.learning_rate") for arm in of_8} == {2e-3, 5e-3, 1e-2}


def test_pictures_change_at_a_step_of_their_data_s_name():
  at = {
    figure: {arms.change_of(arm) for arm in FIGURES[figure].arms} for figure in ("9", "11", "1")
  }
  assert at == {"9": {3000}, "11": {3000}, "1": {None}}
  one = FIGURES["shift"].arms[0]
  longer = one._replace(changes=(*one.changes, ("data.name", "scenes/shift:15,20,30")))
  assert arms.change_of(longer) == 15 and arms.change_of(arms.tiny(FIGURES["9"].arms[0])) == 6


def test_a_loss_spike_after_an_rms_spike_is_counted(records):
  found = runs.spikes_of(records)["spikes"][PATCHES]
  assert found["rms"] == [1201] and found["loss"] == found["following"] == [1205]
  assert runs.spikes_of(records[::2]) == {}  # Spikes are of consecutive steps.


def test_a_row_has_loss_and_rms_around_a_spike_by_itself(records):
  found = runs.spikes_of(records)
  (one,) = runs.spike_traces(records, found, None)["spike_traces"]
  assert one.keys() == {"spike", "step", "loss", PATCHES} and one["spike"] == 1205
  assert one["step"] == list(range(1175, 1265)) and one["loss"][30:34] == [9.0] * 4
  assert one[PATCHES][26] == 5.0
  assert runs.spike_traces(records, found, change=1190)["spike_traces"]
  for change in (1205, 1197):  # At the change, and 8 steps after it.
    assert runs.spike_traces(records, found, change) == {}
  assert runs.spike_traces(records, {}, None) == {}


@pytest.mark.parametrize("spike, counts", [(3001, "1 | 1 | 1 | 0"), (1500, "1 | 1 | 0 | 1")])
def test_loss_spikes_at_the_change_are_not_counted_as_following(spike, counts, tmp_path):
  arm = FIGURES["9"].arms[0]
  spikes = {"loss": [spike], "rms": [spike - 1], "following": [spike], "steps": 7000, "share": 0.01}
  row = row_of(arm)
  row["spikes"] = dict.fromkeys(row["spikes"], spikes)
  draw.write("9", [arm], {arm.name: row}, tmp_path)
  blocks, patches = (tmp_path / "figure_9.md").read_text().splitlines()[2:]
  assert "| `image/block_*/fc2/kernel` | 2.0 |" in blocks
  assert f"| `image/patch_embedding/kernel` | 2.0 | {counts} | 1.00% |" in patches


def test_the_table_of_figure_8_has_spikes_and_accuracy_by_rate_and_b2(tmp_path):
  lowest, highest = FIGURES["8"].arms[:5], FIGURES["8"].arms[10:15]
  rows = {arm.name: row_of(arm) for arm in (*lowest, *highest)}
  spikes = rows[lowest[3].name]["spikes"][PATCHES]
  older = {key: value for key, value in spikes.items() if key not in ("before", "as_large")}
  rows[lowest[3].name]["spikes"] = {PATCHES: older}
  rows[highest[0].name] = row_of(highest[0]) | {"diverged": 7}
  del rows[highest[0].name]["scores"]
  second = lowest[1]._replace(seed=1)
  rows[second.name] = row_of(second)
  draw.write("8", FIGURES["8"].arms, rows, tmp_path)
  lines = (tmp_path / "figure_8.md").read_text().splitlines()
  # Each made-up run has an RMS spike, and a loss spike after it; 1 % of its steps would be.
  following, before = "1 (0.01)", "2.50 (0.02)"
  cells = ["0.99", "1", "1.0 (0.0 to 5.6)", following, before, "1", "50.00 (1 seed)", "0"]
  both = "| 0.98 | 2 | 1.0 (0.1 to 3.6) | 2 (0.0001) | 2.50 (0.0035) | 2 | 50.50 ±"
  assert lines[5].startswith(f"| 0.002 {both}")
  assert lines[6] == f"| 0.002 | {' | '.join(cells)} |"
  assert lines[3].startswith("| 0.002 | 0.9 | 1 | 1.0 (0.0 to 5.6) | 1 (0.01) |  | 1 |")
  assert lines[11] == f"| 0.01 | {' | '.join([*cells[:6], '', '1'])} |"


def test_a_figure_of_counts_draws_a_spike_for_each_label_that_has_one(monkeypatch, tmp_path):
  drawn = []
  monkeypatch.setattr(draw_spikes, "_loss_and_rms", lambda *a: drawn.append(a[2:]))
  chosen = FIGURES["8"].arms[:15]
  rows = {arm.name: row_of(arm) for arm in chosen}
  # Step 1,500 is after an RMS spike.
  for arm, *steps in (chosen[2], 1200, 1500), (chosen[3], 1500), (chosen[10], 1300, 1400):
    rows[arm.name]["spike_traces"] = [{"spike": step} for step in steps]
  draw.write("8", chosen, rows, tmp_path)
  labels = "learning rate: 0.002, b2 0.95", "learning rate: 0.01, b2 0.99"
  assert [title for _, _, title in drawn] == [f"a loss spike; {label}" for label in labels]
  assert [step for _, step, _ in drawn] == [1500, 1300]


def test_blocks_share_a_line_with_their_least_and_largest_numbers(tmp_path):
  arm = FIGURES["9"].arms[0]
  row = row_of(arm)
  row["trace"]["rms/image/block_5/fc2/kernel"] = [1.0, 3.5]
  draw.write("9", [arm], {arm.name: row}, tmp_path)
  assert "| `image/block_*/fc2/kernel` | 2.0 to 3.5 | 1 |" in (tmp_path / "figure_9.md").read_text()


def test_a_figure_draws_the_loss_around_the_change_and_around_a_spike(monkeypatch, tmp_path):
  drawn = []
  monkeypatch.setattr(draw_spikes, "_loss_and_rms", lambda *a: drawn.append(a[2:]))
  chosen = FIGURES["9"].arms[:3]
  rows = {arm.name: row_of(arm) for arm in chosen}
  spike = {"spike": 1500, "step": [1499, 1500], "loss": [1.0, 2.0], PATCHES: [3.0, 1.0]}
  rows[chosen[0].name]["spike_traces"] = [spike]
  draw.write("9", chosen, rows, tmp_path)
  by_itself = [(trace, step) for trace, step, title in drawn if "by itself" in title]
  assert by_itself == [(spike, 1500)]
  assert [title for _, step, title in drawn if step == 3000] == [
    f"b2 = {b2}" for b2 in (0.9, 0.98, 0.995)
  ]


def test_the_table_of_figure_11_has_scales_and_what_was_skipped(tmp_path):
  dynamic, fixed, *_ = FIGURES["11"].arms
  rows = {arm.name: row_of(arm) for arm in (dynamic, fixed)}
  trace = {"step": [2998, 2999, 3000, 3001], "loss": [1.0] * 4}
  rows[dynamic.name]["trace"] = trace | {
    "loss_scale": [262100.0, 262100.0, 131100.0, 65540.0],  # As a row has them: four digits.
    "skipped_updates": [1.0, 1.0, 2.0, 3.0],
  }
  rows[fixed.name]["trace"] = trace | {"loss_scale": [65540.0] * 4}
  draw.write("11", FIGURES["11"].arms, rows, tmp_path)
  first, second = (tmp_path / "figure_11.md").read_text().splitlines()[2:]
  assert first == "| dynamic | 2^16 |  | 50.0 | 2^18 | 2^16 | 2 |"
  assert second == "| fixed | 2^16 |  | 50.0 | 2^16 | 2^16 |  |"


def test_figure_11_draws_the_loss_and_not_its_scale(monkeypatch, tmp_path):
  drawn = {}

  def keep(figure, *args, **kwargs):
    drawn.update({a.get_title(): [line.get_ydata() for line in a.lines] for a in figure.axes})

  monkeypatch.setattr("matplotlib.figure.Figure.savefig", keep)
  arm = FIGURES["11"].arms[0]
  draw.write("11", [arm], {arm.name: row_of(arm)}, tmp_path)
  assert list(drawn["loss"][0]) == [1.0, 1.5] and list(drawn["loss_scale"][0]) == [65536, 32768]


def test_figure_11_has_a_cross_for_each_value_that_overflowed(monkeypatch, tmp_path):
  crosses = {}

  def keep(figure, *args, **kwargs):
    for axis in figure.axes:
      found = [list(line.get_xdata()) for line in axis.lines if line.get_marker() == "x"]
      crosses.update({axis.get_title(): found} if found else {})

  monkeypatch.setattr("matplotlib.figure.Figure.savefig", keep)
  arm, watched = FIGURES["11"].arms[0], "gradient_max_abs/image/class_embedding"
  row = row_of(arm)
  row["trace"] |= {watched: [0.5, float("inf")]}
  draw.write("11", [arm], {arm.name: row}, tmp_path)
  assert crosses == {watched: [[3000]]}
