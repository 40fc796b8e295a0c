"""The result files, and the tables that are made from them."""

import json
import re
import subprocess

import pytest

from benchmarks import attention_report, remat_report
from benchmarks.commit import commit_of
from benchmarks.tables import RESULTS, read


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json*")), ids=lambda path: path.name)
def test_a_result_names_the_commit_that_made_it(path):
  text = path.read_text()
  rows = (
    [json.loads(text)["device"]]
    if path.suffix == ".json"
    else map(json.loads, text.split("\n")[:-1])
  )
  for row in rows:
    assert re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", row["commit"]), row


def test_a_checkout_is_dirty_if_a_file_differs_that_is_no_result(tmp_path, monkeypatch):
  def git(*command):
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    run = subprocess.run(["git", *name, *command], cwd=tmp_path, check=True, capture_output=True)
    return run.stdout.decode().strip()

  monkeypatch.delenv("SBJAX_COMMIT", raising=False)
  code, results = tmp_path / "code.py", tmp_path / "benchmarks/results/rows.jsonl"
  results.parent.mkdir(parents=True)
  for file in (code, results):
    file.touch()
  assert commit_of(tmp_path) is None
  monkeypatch.setenv("SBJAX_COMMIT", "1234567")
  assert commit_of(tmp_path) == "1234567"
  git("init")
  git("add", ".")
  git("commit", "-m", "first")
  commit = git("rev-parse", "--short", "HEAD")
  results.write_text("{}")
  assert commit_of(tmp_path) == commit
  code.write_text("pass")
  assert commit_of(tmp_path) == f"{commit}-dirty"


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
  with_another = attention_report.table(rows[:1], [rows[2] | {"chip": "NVIDIA H100 80GB HBM3"}])
  assert with_another[2].endswith("| **4.00x** | 2.00x |")
  assert with_another[-1].endswith("4.00x, on H100 2.00x.")
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
