"""The window of FP8-CSCALE's exponents: the results on record, and their plot."""

import shutil

from benchmarks import cscale_window
from benchmarks.tables import RESULTS, read


def test_the_window_on_record_is_flat_inside_and_rises_at_both_ends():
  losses = {row["variant"]: row["last_losses"][0] for row in read("cscale_window")}
  flat, full = losses.pop("fp8_amax"), losses.pop("full")
  by_exponent = {int(name.partition(":")[2]): loss for name, loss in losses.items()}
  window = [by_exponent[exponent] for exponent in sorted(by_exponent)]
  inside = [loss < flat + 0.05 for loss in window]
  first, end = inside.index(True), len(inside) - inside[::-1].index(True)
  assert abs(flat - full) < 0.05 and all(inside[first:end]) and end - first >= 5
  for outwards in (window[:first][::-1], window[end:]):
    assert outwards == sorted(outwards) and outwards[-1] > flat + 1


def test_the_plot_is_beside_the_results(tmp_path):
  out = tmp_path / "window.jsonl"
  shutil.copy(RESULTS / "cscale_window.jsonl", out)
  cscale_window.plot(out)
  assert (tmp_path / "window.png").stat().st_size > 1000
