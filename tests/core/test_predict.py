"""Predictions: measured sizes give their figures, others are interpolated, guesses say so."""

import json

import pytest

from benchmarks import predict
from benchmarks.predict import Chip, Estimate
from benchmarks.tables import CHIP, last, read

H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture(scope="module")
def h200():
  return Chip(CHIP, read)


def gains(chip, h200, *args):
  """Estimates for the linear layer, the MLP and the step."""
  return list(predict.predict(chip, h200, *args).values())


def test_a_measured_step_is_predicted_as_measured(h200):
  assert len(h200.steps) == 5
  for row in last([r for r in read("step") if r["chip"] == CHIP], "size"):
    (at,) = (at for at, size in h200.models.items() if size == row["size"])
    *_, step = gains(h200, h200, *at)
    best = max(one["speedup"] for n, one in row["contenders"].items() if n in predict.OURS)
    assert step.gain == pytest.approx(best, abs=6e-4) and step.error == 0
    assert step.how == f"measured: ViT-{row['size']}"


def test_the_gain_of_a_step_compares_the_fastest_of_each_side():
  times = {"flax": 3.0, "flax_loop": 2.0, "full": 0.5, "switchback_loop": 1.25, "switchback": 1.0}
  each = {name: {"milliseconds": time} for name, time in times.items()}
  assert predict.gain_of_step({"contenders": each}) == 2.0
  assert predict.gain_of_step({"contenders": {"flax": {"milliseconds": 3.0}}}) is None


def test_a_measured_mlp_is_predicted_as_measured(h200):
  rows = last([r for r in read("linear") if r["chip"] == CHIP], "dim", "tokens")
  assert len(rows) == 12
  for row in rows:
    _, mlp, _ = gains(h200, h200, row["dim"], row["tokens"])
    assert mlp == Estimate(row["speedup"]["switchback"], 0.0, "measured")


def test_a_layer_is_the_sum_of_its_measured_kernels(h200):
  rows = [{"chip": "any", "m": 100, "n": n, "k": k, "tops": {"xla_bf16": bf16, "ours_int8": int8}}
          for n, k, bf16, int8 in [(64, 16, 1.0, 2.0), (16, 64, 0.5, 2.0)]]  # fmt: skip
  rate = {"operation": "quantize", "format": "int8", "scaling": "rowwise", "chip": "any"}
  quantizers = [rate | {"width": w, "terabytes_per_second": {"ours": 0.5}} for w in (16, 64)]
  chip = Chip("any", {"matmul": rows, "quantize": quantizers, "linear": [], "step": []}.get)
  layer, mlp, step = gains(chip, h200, 16, 100)
  operations = 2 * 100 * 64 * 16
  bf16, int8 = operations / 1 + operations / 0.5, operations / 2 + operations / 2
  of_x, of_w = 3 * 100 * (16 + 64) / 0.5, 64 * 16 / 0.5
  expected = (1.5 * bf16 + 6 * of_w) / (int8 + 0.5 * bf16 + of_x + 10 * of_w)
  assert layer.gain == pytest.approx(expected) and "each measured" in layer.how
  assert mlp.gain == pytest.approx(expected)  # Both layers have the same sizes.
  assert step is None


def test_an_interpolated_size_lies_between_its_neighbours(h200):
  for points in (h200.mlps, h200.steps, h200.products["xla_bf16"]):
    axes = [sorted(set(axis)) for axis in zip(*points, strict=True)]
    for i in range(max(map(len, axes)) - 1):
      at = tuple((a[min(i, len(a) - 2)] * a[min(i, len(a) - 2) + 1]) ** 0.5 for a in axes)
      around = predict.weights(points, at)
      assert sum(around.values()) == pytest.approx(1) and all(w > 0 for w in around.values())
      values = [points[point] for point in around]
      assert min(values) <= predict.interpolate(points, at) <= max(values)
  assert 1.344 < gains(h200, h200, 3000, 65536)[1].gain < 1.41
  assert predict.interpolate({(1,): 1.0, (16,): 16.0}, (2,)) == pytest.approx(2)


def test_out_of_range_sizes_take_the_nearest_measurement_without_bounds(h200):
  for at, near in (((512, 65536), (1024, 65536)), ((8192, 10**6), (4096, 131072))):
    _, mlp, step = gains(h200, h200, *at)
    assert mlp.gain == h200.mlps[near] and mlp.error is step.error is None
    assert "out of range (width 1,024 to 4,096, tokens 16,384 to 131,072" in mlp.how
    assert "out of range (width 768 to 1,664, tokens 32,896 to 100,864" in step.how
    assert "without bounds" in mlp.how and "(" not in str(step).partition("x")[2][:16]
  assert gains(h200, h200, 256, 65536)[0].error is None


def test_a_size_with_a_missing_neighbour_is_not_interpolated():
  # The larger width was measured only with few rows.
  points = {(4.0, 1280, 16384): 1.0, (4.0, 1280, 65536): 2.0, (4.0, 4096, 16384): 3.0}
  assert predict.is_between(points, (4.0, 1280, 30000))
  assert predict.is_between(points, (4.0, 2000, 16384))
  assert not predict.is_between(points, (4.0, 2000, 30000))
  assert not predict.is_between(points, (3.0, 1280, 30000))


def test_the_docstring_states_the_errors_of_the_check(h200):
  stated = predict.__doc__.replace("\n", " ")
  for checked in (
    predict.leave_one_out(h200.steps),
    predict.leave_one_out(h200.mlps),
    predict.check_sums(h200),
  ):
    errors = [abs(predicted / measured - 1) for measured, predicted in checked.values()]
    assert max(errors) == predict.worst(checked)
    mean = sum(errors) / len(errors)
    assert f"{max(errors):.1%} ({mean:.1%}" in stated
    (first, *_) = (line for line in predict.report(h200) if f"{max(errors):.1%} at worst" in line)
    assert f"{mean:.1%} in the mean" in first


def test_a_size_left_out_does_not_predict_itself():
  checked = predict.leave_one_out({(1,): 1.0, (2,): 5.0, (4,): 4.0})
  assert checked[1,] == (1.0, 5.0) and checked[4,] == (4.0, 5.0)
  assert checked[2,] == (5.0, pytest.approx(2.0))
  assert predict.worst(checked) == 4.0


def test_error_bounds_are_the_worst_errors_of_the_checks(h200):
  layer, mlp, step = gains(h200, h200, 1400, 50000)
  assert mlp.error == predict.worst(predict.leave_one_out(h200.mlps))
  assert step.error == predict.worst(predict.leave_one_out(h200.steps))
  assert layer.error == predict.worst(predict.check_sums(h200))
  assert str(Estimate(2.0, 0.1, "so")).split() == ["2.00x", "(1.80", "to", "2.20)", "so"]


def test_another_mlp_ratio_scales_a_measured_mlp_by_its_kernels(h200):
  _, four, _ = gains(h200, h200, 1280, 65536)
  _, three, _ = gains(h200, h200, 1280, 65536, 3.0)
  _, eight, _ = gains(h200, h200, 1280, 65536, 8.0)
  sums = [
    predict.sum_of_kernels(h200, 65536, [(1280, hidden), (hidden, 1280)]) for hidden in (3840, 5120)
  ]
  assert three.gain == pytest.approx(four.gain * sums[0] / sums[1]) and three.error > 0.05
  assert eight.error is None and "out of range and without bounds" in eight.how


def test_a_chip_without_quantizers_or_mlps_says_so(h200):
  layer, mlp, step = gains(Chip(H100, read), h200, 1280, 16384)
  assert "no quantizers of this chip are measured: at most this" in layer.how
  assert layer.error is mlp.error is step.error is None
  assert "ViT-B/32's 1.40x, changed as the NVIDIA H200's" in step.how


def card(tmp_path):
  times = {"flax": {"milliseconds": 200.0}, "switchback": {"milliseconds": 160.0}}
  product = {"case": "1", "m": 16384, "n": 5120, "k": 1280,
             "tops": {"xla_bf16": 100.0, "ours_int8": 200.0}}  # fmt: skip
  failed = {"case": "2", "failed": {"case": "left out: no time was left"}}
  half = product | {"case": "3", "n": 1280, "k": 5120, "tops": {"xla_bf16": 100.0}}
  sections = {
    "matmul": {"rows": [failed, product, half]},
    "step": {"rows": [failed, {"size": "B/16", "batch_size": 128, "contenders": times}]},
    "quantize": {"rows": [failed], "failed": "stopped after 60 s"},
  }
  path = tmp_path / "card_l40.json"
  path.write_text(json.dumps({"chip": "NVIDIA L40", "sections": sections}))
  return path


def run(monkeypatch, capsys, *arguments):
  monkeypatch.setattr("sys.argv", ["predict", *map(str, arguments)])
  predict.main()
  return capsys.readouterr().out


def test_a_card_is_read(monkeypatch, capsys, tmp_path):
  path = card(tmp_path)
  said = run(monkeypatch, capsys, "--card", path, "--width", 768, "--tokens", 128 * 197)
  assert said.startswith("NVIDIA L40, width 768, 25,216 tokens")
  assert said.splitlines()[-1].split("step")[1].split() == ["1.25x", "measured:", "ViT-B/16"]
  assert "at most this" in said
  said = run(monkeypatch, capsys, "--card", path, "--width", 1280, "--tokens", 65792)
  h200 = Chip(CHIP, read)
  theirs = h200.steps[1280, 65792] / predict.interpolate(h200.steps, (768, 25216))
  assert (
    f"{1.25 * theirs:.2f}x" in said and "ViT-B/16's 1.25x, changed as the NVIDIA H200's" in said
  )


def test_unpredictable_requests_give_helpful_errors(monkeypatch, capsys, tmp_path):
  size = ("--width", 768, "--tokens", 1024)
  with pytest.raises(SystemExit, match=r"'NVIDIA L40'.*NVIDIA H200, .*benchmarks\.card.*--card"):
    run(monkeypatch, capsys, *size, "--chip", "NVIDIA L40")
  (tmp_path / "no.json").write_text("{}")
  with pytest.raises(SystemExit, match=r"no\.json is no card.*benchmarks\.card"):
    run(monkeypatch, capsys, *size, "--card", tmp_path / "no.json")
  for wrong, says in (
    (("--width", 0, "--tokens", 5), "'0' must be a positive integer"),
    (("--width", 768), "--width and --tokens are needed, or --check"),
    ((*size, "--mlp_ratio", 0), "--mlp_ratio must be from 0.1 to 100, not 0.0"),
  ):
    with pytest.raises(SystemExit):
      run(monkeypatch, capsys, *wrong)
    assert says in capsys.readouterr().err


def test_check_prints_measured_and_predicted_gains(monkeypatch, capsys):
  said = run(monkeypatch, capsys, "--check")
  assert "ViT-H/14, 1,280 x 65,792 tokens: measured 1.685x, predicted" in said
