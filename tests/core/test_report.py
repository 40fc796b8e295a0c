"""report.png: curves, scores and samples; a failure to draw ends nothing."""

import json

import numpy as np
import pytest
from matplotlib.figure import Figure
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


def test_a_line_is_drawn_where_another_recipe_begins():
  records = [{"step": i, "loss": 1.0, "stage": 1 + (i > 4) + (i > 6)} for i in range(2, 10, 2)]
  assert report._changes([*records, {"step": 8, "eval/top1": 0.5}]) == {
    6: "recipe 2",
    8: "recipe 3",
  }
  figure = Figure()
  report._draw_curves(figure, records)
  assert {"recipe 2", "recipe 3"} <= {text.get_text().strip() for text in figure.axes[0].texts}
  assert report._changes(RECORDS) == {}
  sized = [{**r, "image_size": 98 if r["step"] < 6 else 224} for r in records]
  assert report._changes(sized) == {6: "stage 2: 224 px", 8: "stage 3: 224 px"}


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


@pytest.mark.parametrize("folders", [0, 1, 9])
def test_each_legend_is_whole(tmp_path, monkeypatch, folders):
  ways = ("image_to_text_recall@1", "text_to_image_recall@10", "zero_shot_top1")
  names = [*ways, *(f"wds_{'long_' * i * i}/{way}" for i in range(folders) for way in ways)]
  scores = {f"eval/{name}": 0.5 for name in names}
  blocks = {
    f"mean_abs_feature/{tower}_block_{i}": 1.0 for tower in ("image", "text") for i in (0, 9)
  }
  workdir_with(tmp_path, [*RECORDS, {"step": 2} | scores, {"step": 2} | blocks])
  figures = []
  save = Figure.savefig
  monkeypatch.setattr(Figure, "savefig", lambda f, *a, **k: (figures.append(f), save(f, *a, **k)))
  write_report(tmp_path, TITLE)
  (figure,) = figures
  legends = [axis.get_legend() for axis in figure.axes if axis.get_legend()]
  assert [len(legend.get_texts()) for legend in legends] == [len(names), 4]
  axes = [axis.get_window_extent() for axis in figure.axes]
  for legend, panel in zip(legends, (axes[1], axes[5]), strict=True):
    box = legend.get_window_extent()
    assert panel.x1 <= box.x0 and box.x1 <= figure.bbox.x1
    assert box.y0 >= panel.y0 - panel.height / 4  # Above the next one.


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
