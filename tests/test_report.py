"""report.png: curves, scores and samples; a failure to draw ends nothing."""

import json

import numpy as np
from PIL import Image

from train import report
from train.report import describe_end, write_report
from train.zero_shot import Sample

RECORDS = [
  {"step": 1, "loss": 4.0, "learning_rate": 0.0, "images_per_second": 900.0},
  {"step": 2, "loss": 3.0, "learning_rate": 1e-3, "images_per_second": 950.0},
  {"step": 2, "eval/zero_shot_top1": 0.5, "eval/zero_shot_top5": 0.75},
]
TITLE = "tiny on shapes"


def workdir_with(folder, records):
  (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
  return folder


def height(path):
  with Image.open(path) as image:
    return image.height


def test_a_report_is_drawn_from_the_metrics_and_samples(tmp_path, capsys):
  pixels = np.zeros((8, 8, 3), np.uint8)
  captions = ["costs $3 or $4", "一只红色的狗", "a " * 60]  # Glyphs that the font lacks.
  workdir = workdir_with(tmp_path, RECORDS)
  write_report(workdir, TITLE, [Sample(pixels, captions[:1], captions)] * 9)
  assert capsys.readouterr().err == ""
  taller = height(workdir / "report.png")
  write_report(workdir, TITLE)
  assert taller > height(workdir / "report.png") > 0
  assert not list(workdir.glob("*.partial"))


def test_the_blocks_are_the_first_to_the_last_in_number():
  # A jitted step returns a dict in the order of its sorted keys.
  names = sorted(f"mean_abs_feature/image_block_{i}" for i in range(12))
  chosen = report._some_blocks([{"step": 1} | dict.fromkeys(names, 1.0)])
  assert [int(name.rpartition("_")[2]) for name in chosen] == [0, 4, 7, 11]


def test_a_failure_to_draw_is_printed_and_ends_nothing(tmp_path, capsys):
  write_report(tmp_path, TITLE)
  assert "report.png could not be drawn: FileNotFoundError" in capsys.readouterr().err
  workdir_with(tmp_path, RECORDS)
  (tmp_path / "report.partial").mkdir()
  write_report(tmp_path, TITLE)
  assert "report.png could not be drawn: IsADirectoryError" in capsys.readouterr().err


def test_the_last_lines_have_the_scores_and_the_paths(tmp_path):
  scores = {"zero_shot_top1": 0.5, "zero_shot_top5": 0.75, "image_to_text_recall@1": 0.125}
  lines = describe_end(tmp_path, {"step": 7, "eval": scores}).splitlines()
  assert lines[0] == "after step 7: zero_shot_top1 0.500, image_to_text_recall@1 0.125"
  paths = [tmp_path / "report.png", tmp_path / "result.json", tmp_path / "checkpoints" / "7"]
  assert [line.split()[-1] for line in lines[1:]] == [str(path) for path in paths]
