"""The result files, and the tables that are made from them."""

import pytest

from benchmarks import attention_report, remat_report
from benchmarks.tables import read


def test_remat_values_of_older_rows_are_renamed():
  assert {row["remat"] for row in read("step") + read("open_clip")} == {"none", "block"}


def attention_row(**milliseconds):
  row = {"case": "L/14 text", "causal": True, "head_dim": 64}
  shape = {"batch": 256, "length": 77, "heads": 12}
  return row | shape | {"milliseconds": {"cudnn": [1.0, 4.0], "triton": [0.5, 2.0]} | milliseconds}


def test_attention_s_table_has_the_fastest_of_ours_and_of_pytorch_s():
  rows = [
    attention_row(mosaic=[0.75, 1.0], **{"torch flash": [0.1, 5.0], "torch cuDNN": [0.9, 3.0]}),
    attention_row(mosaic=[0.25, 3.0]),
    attention_row(),
  ]
  _, _, first, *others, mean = attention_report.table(rows)
  assert first.endswith("| 1.000 / 4.000 | 0.900 / 3.000 | 0.750 / 1.000 | **4.00x** |")
  for line in others:  # Without PyTorch.
    assert line.endswith("| 1.000 / 4.000 |  | 0.500 / 2.000 | **2.00x** |")
  assert mean.endswith("2.52x.")  # The cube root of 16.
  assert attention_report.gain(rows[1], "mosaic") == pytest.approx(4 / 3)
  assert attention_report.lengths_table(rows[:1])[-1] == "| 77 | 4.00x |"


def test_the_remat_table_has_the_first_policy_that_fits_a_card_and_its_time():
  gigabytes = {"none": [12.0, 65.0], "dots": [12.0, 60.0], "block": [12.0, 30.0]}
  memory = [{"size": "H/14", "batch_size": 256, "gigabytes": gigabytes}]
  contenders = {"flax": {"milliseconds": 9}, "switchback_dots": {"milliseconds": 5.1}}
  step = {"size": "H/14", "batch_size": 256, "remat": "block", "chip": "NVIDIA H100 80GB HBM3"}
  no_remat = {"switchback": {"milliseconds": 4}, "switchback_no_remat": {"milliseconds": 3}}
  steps = [
    step | {"contenders": contenders},
    step | {"contenders": no_remat, "chip": "NVIDIA H200"},
    step | {"contenders": no_remat, "chip": "NVIDIA H200", "batch_size": 128, "remat": "none"},
  ]
  row = remat_report.table(memory, steps)[-1]
  cells = [cell.strip() for cell in row.strip("|").split("|")]
  assert cells[2:] == ["does not fit", "`dots`, 72 GB, 5 ms on an H100", "`none`, 77 GB, 3 ms"]
