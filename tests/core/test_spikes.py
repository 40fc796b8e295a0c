"""Spikes of the loss that follow spikes of the RMS are found and counted."""

import json
import math
import re

import numpy as np
import pytest

from train import spikes
from train.errors import RunError
from train.spikes import Rules, Spikes, find_spikes

RULES = Rules(window=50, first=200)


def run(steps=2000, loss_at=(), rms_at=(), length=4, seed=0):
  """Steps, and a noisy loss and RMS with spikes of some steps."""
  noise = np.random.default_rng(seed)
  loss, rms = 3 + 0.01 * noise.normal(size=steps), 1 + 0.05 * noise.random(steps)
  for step in loss_at:
    loss[step - 1 : step - 1 + length] += 1
  for step in rms_at:
    rms[step - 1 : step + 1] = 2.5
  return np.arange(1, steps + 1), loss, rms


def write(folder, steps, loss, rms, name="rms/image/patch_embedding/kernel", b2=0.98):
  folder.mkdir(parents=True)
  rows = zip(steps.tolist(), loss.tolist(), rms.tolist(), strict=True)
  lines = [json.dumps({"step": s, "loss": x, name: r}) for s, x, r in rows]
  (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
  (folder / "config.json").write_text(json.dumps({"optimizer": {"b2": b2}}))
  return folder


def test_loss_spikes_1_to_8_steps_after_an_rms_spike_follow_it():
  rms_at = (400, 600, 800, 1000, 1200)
  found = find_spikes(*run(loss_at=(401, 608, 809, 1000, 1500), rms_at=rms_at), RULES)
  assert found.rms.tolist() == list(rms_at)
  assert found.loss.tolist() == [401, 608, 809, 1000, 1500]
  assert found.following.tolist() == [401, 608]
  assert found.steps == 1800 and found.share == pytest.approx(5 * 8 / 1800)


def test_early_steps_and_single_deviations_are_no_loss_spikes():
  steps, loss, rms = run(loss_at=(100, 500), rms_at=(90, 498))
  loss[999] += 1  # One deviation.
  found = find_spikes(steps, loss, rms, RULES)
  assert found.loss.tolist() == [500] and found.rms.tolist() == [498]


def test_events_within_ten_steps_are_one_spike():
  steps, loss, rms = run(rms_at=(500, 511, 531))
  loss[[700, 709, 718, 740, 749]] += 1
  found = find_spikes(steps, loss, rms, RULES)
  assert found.rms.tolist() == [500, 531] and found.loss.tolist() == [701, 741]


def test_a_loss_that_is_not_finite_is_a_spike_and_no_part_of_the_mean():
  steps, loss, rms = run(rms_at=(498,))
  loss[499:503] = np.nan, np.inf, np.nan, np.nan
  loss[519:522] += 1
  found = find_spikes(steps, loss, rms, RULES)
  assert found.loss.tolist() == [500, 520] and found.following.tolist() == [500]


def test_the_rms_before_a_loss_spike_is_compared_with_that_before_all_steps():
  steps, loss, rms = run(loss_at=(500, 900, 1300), rms_at=(495, 1290))
  rms[1297] = 1.5  # Step 1,298: below the threshold.
  found = find_spikes(steps, loss, rms, RULES)
  assert found.following.tolist() == [500]
  assert found.before[0] == 2.5 and found.before[1] < 1.06 and found.before[2] == 1.5
  # 2.5 is at two steps, so it is before nine; there are two such, and 1.5 is before one more.
  assert found.as_large[[0, 2]] == pytest.approx([2 * 9 / 1800, (2 * 9 + 7) / 1800])
  assert 0.02 < found.as_large[1] < 1
  both = spikes.together([found, found])
  assert both.before.tolist() == [*found.before, *found.before]
  assert both.chance_before < found.chance_before < 0.01


def test_an_rms_that_is_not_a_number_is_the_largest_before_a_loss_spike():
  largest = spikes._largest_before(np.array([3.0, 1.0, np.nan, 2.0]))
  assert largest.tolist() == [-np.inf, 3, 3, np.inf]


def test_the_chance_of_the_rms_before_is_fisher_s():
  spike = np.array([5]), np.array([]), np.array([])
  one, product = Spikes(*spike, 100, 0.0, before=[1.0], as_large=[0.05]), 0.05**2
  assert one.chance_before == pytest.approx(0.05)
  expected = product * (1 - math.log(product))  # That of two uniform numbers with this product.
  assert spikes.together([one, one]).chance_before == pytest.approx(expected)
  assert math.isnan(Spikes(*spike, 100, 0.0).chance_before), "rows of older runs lack it"
  found = [
    find_spikes(*run(loss_at=(300 + 97 * s,), seed=s), RULES).chance_before for s in range(9)
  ]
  assert 0.2 < np.median(found) < 0.8, "of loss spikes that no RMS precedes"


def chance(following, loss, share):
  none = np.array([], int)
  return Spikes(np.arange(loss), none, np.arange(following), steps=10_000, share=share).chance


def test_chance_is_the_tail_of_a_binomial_distribution():
  assert chance(0, 5, 0.1) == pytest.approx(1)
  assert chance(2, 3, 0.5) == pytest.approx(0.5)
  assert chance(28, 30, 0.01) == pytest.approx(435 * 1e-56 * 0.99**2, rel=0.01)
  assert chance(0, 0, 0.0) == 1
  # Half of all outcomes, and half of those with the mean itself.
  middle = 1 / math.sqrt(math.pi * 2500)
  assert chance(2500, 5000, 0.5) == pytest.approx(0.5 + middle / 2, rel=1e-4)
  random = [find_spikes(*run(loss_at=(500 + s,), rms_at=(900,)), RULES) for s in range(3)]
  assert all(found.chance == 1 for found in random)


def test_the_program_counts_runs_alone_and_together_and_draws(tmp_path, capsys):
  folders = [
    write(tmp_path / "a", *run(loss_at=(500,), rms_at=(495,))),
    write(tmp_path / "b", *run(loss_at=(600, 900), rms_at=(595,))),
  ]
  out = tmp_path / "spikes.png"
  spikes.main([*map(str, folders), "--window=50", "--first=200", f"--out={out}"])
  said = capsys.readouterr().out
  assert "a: 1 loss spike and 1 spike of rms/image/patch_embedding/kernel in 1,800 steps" in said
  assert "1 of 1 loss spike came 1 to 8 steps after an RMS spike, as did 0.4% of all steps" in said
  assert "All runs: 3 loss spikes and 2 spikes of an RMS in 3,600 steps" in said
  assert "2 of 3 loss spikes came" in said
  assert "The largest RMS of the 8 steps before was 2.50 in the median. The chance of" in said
  assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 10_000


def test_of_a_run_without_loss_spikes_no_chance_is_told(tmp_path, capsys):
  spikes.main([str(write(tmp_path / "calm", *run(rms_at=(500,)))), "--window=50", "--first=200"])
  said = capsys.readouterr().out
  assert "calm: 0 loss spikes and 1 spike of" in said and "chance" not in said


def test_the_rms_is_the_patch_embedding_s_unless_another_is_named(tmp_path):
  folder = write(tmp_path / "run", *run())
  control, bias = "rms/image/block_1/fc2/kernel", "rms/image/patch_embedding/bias"
  path = folder / "metrics.jsonl"
  records = [json.loads(line) | {control: 1.5, bias: 2.0} for line in path.read_text().splitlines()]
  path.write_text("".join(json.dumps(record) + "\n" for record in records))
  assert spikes.read_run(folder)[3] == "rms/image/patch_embedding/kernel"
  _, _, rms, name = spikes.read_run(folder, control)
  assert name == control and (rms == 1.5).all()


def test_a_threshold_that_b2_keeps_out_of_reach_is_refused(tmp_path):
  def configured(b2, b2_power):
    optimizer = {"b2": b2, "b2_power": b2_power}
    (tmp_path / "config.json").write_text(json.dumps({"optimizer": optimizer}))
    return tmp_path

  spikes.check_reachable(configured(0.98, 0.0), 7.0)
  with pytest.raises(RunError, match=r"b2=0\.98 the RMS is at most 7\.07"):
    spikes.check_reachable(configured(0.98, 0.0), 7.1)
  spikes.check_reachable(configured(0.98, 0.65), 7.1)  # 1 - t^-0.65 takes b2's place.


@pytest.mark.parametrize(
  ("change", "options", "message"),
  [
    (lambda s, x, r: (s[::50], x[::50], r[::50]), [], "step 2 is not logged: .*log_every=1"),
    (lambda s, x, r: (s, x, r), ["--first=5000"], "2000 logged steps, none of them after 5000"),
    (lambda s, x, r: (s, x, r), ["--rms=rms/other"], "'rms/other' is not among .*patch_embedding"),
  ],
)
def test_what_cannot_be_counted_is_said(tmp_path, capsys, change, options, message):
  folder = write(tmp_path / "run", *change(*run()))
  with pytest.raises(SystemExit) as end:
    spikes.main([str(folder), *options])
  assert re.search(message, f"{end.value} {capsys.readouterr().err}", re.DOTALL)


def test_a_threshold_that_no_rms_reaches_is_refused(tmp_path, capsys):
  folder = write(tmp_path / "run", *run(), b2=0.5)
  with pytest.raises(SystemExit) as end:
    spikes.main([str(folder)])
  assert "the RMS is at most 1.41" in f"{end.value} {capsys.readouterr().err}"
  with pytest.raises(SystemExit) as end:
    spikes.main([str(tmp_path / "nowhere")])
  assert "is not there" in f"{end.value} {capsys.readouterr().err}"
