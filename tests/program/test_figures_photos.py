"""Figures on photos: their shards come from a folder, which no name and no result knows."""

import json
import subprocess
import sys

import jax
import pytest
from figure_case import call, row_of

from benchmarks.figures import __main__ as program
from benchmarks.figures import arms, draw, photos, runs
from benchmarks.figures.arms import FIGURES
from benchmarks.tables import read_file
from train.data import builders


@pytest.fixture(autouse=True)
def environment(monkeypatch):
  """XLA's flags stay as they are."""
  monkeypatch.setattr("train.parallel.xla_flags.set_flags", lambda: None)


@pytest.fixture(params=photos.CONFIGS)
def name(request):
  return request.param


@pytest.fixture
def root(tmp_path, name):
  """A folder with few made-up images, which count as all there are."""
  photos.make_up(tmp_path / "root", name)
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(photos.COUNTS, name, (32, 16))
    yield tmp_path / "root"


def test_arms_on_photos_have_three_recipes_with_the_same_five_seeds(name):
  found = {(arm.value("model.recipe"), arm.seed) for arm in FIGURES[name].arms}
  recipes = ("full", "switchback", "fp8_switchback")
  assert found == {(recipe, seed) for recipe in recipes for seed in range(5)}
  assert len(FIGURES[name].arms) == 15


def test_the_config_of_an_arm_has_the_shards_of_its_data_and_no_folder(name):
  config = arms.config_of(FIGURES[name].arms[0])
  assert config.data.name == name and config.data.train_shards.startswith(f"{name}-train-")
  assert config.data.root == config.data.data_dir == ""


def test_without_data_nothing_is_trained_and_the_shards_are_named(name, monkeypatch, tmp_path):
  monkeypatch.setattr(runs, "train_all", lambda *_: pytest.fail("trained"))
  arguments = (name, "--out", tmp_path / "runs.jsonl", "--runs", tmp_path, "--gpus", 0)
  with pytest.raises(SystemExit, match=rf"needs --data ROOT, .*{name}/{name}-train-\*.tar.gz"):
    call(monkeypatch, *arguments)
  with pytest.raises(SystemExit, match=rf"--data {tmp_path}: No shard .*{name}-train-.* no folder"):
    call(monkeypatch, *arguments, "--data", tmp_path)


def test_a_folder_that_lacks_pictures_is_refused(name, root, tmp_path):
  photos.COUNTS[name] = (33, 16)
  with pytest.raises(ValueError, match="32 images to train on and 16 to test, not 33 and 16"):
    photos.prepare(name, root, tmp_path / "runs")


def test_runs_start_after_the_import_and_rows_do_not_have_its_folder(
  name, root, monkeypatch, tmp_path
):
  out, folder = tmp_path / "runs.jsonl", tmp_path / "runs"

  def train_all(missing, runs_folder, *_):
    assert runs_folder == folder and (folder / "data" / name).is_dir()
    monkeypatch.setattr(builders, "_build", lambda builder: pytest.fail("imported again"))
    photos.prepare(name, root, folder)
    yield from map(row_of, missing)

  monkeypatch.setattr(runs, "train_all", train_all)
  arguments = (name, "--out", out, "--runs", folder, "--gpus", 0, "--data", root)
  call(monkeypatch, *arguments)
  rows = read_file(out)
  assert {row["name"] for row in rows} == {arm.name for arm in FIGURES[name].arms}
  assert {row["command"] for row in rows} == {f"python -m benchmarks.figures {name}"}
  assert str(root) not in out.read_text()


def test_the_process_of_a_run_reads_the_shards_of_data(name, root, monkeypatch, tmp_path):
  commands, configs = [], []

  class Process:
    def __init__(self, command, **_):
      commands.append(command)

    def poll(self):
      return 0

  monkeypatch.setattr(subprocess, "Popen", Process)
  arm = FIGURES[name].arms[0]
  (row,) = runs.train_all([arm], tmp_path / "runs", [0], 1, 60, root)
  assert row["error"] == ""  # Its log is empty.

  def train(config, workdir):
    configs.append(config)
    assert workdir.parent == tmp_path / "runs"
    return {}

  monkeypatch.setattr("train.loop.train", train)
  (command,) = commands
  monkeypatch.setattr(sys, "argv", command[2:])
  runs.main()
  (config,) = configs
  assert config.data.root == str(root / name) and config.seed == arm.seed
  assert config.data.data_dir == str(tmp_path / "runs" / "data")


def test_an_arm_on_scenes_has_no_folder_of_shards(monkeypatch, tmp_path):
  monkeypatch.setattr("train.loop.train", lambda config, _: {"root": config.data.root})
  runs.train_one(FIGURES["1"].arms[0], tmp_path, data=tmp_path / "root")
  assert json.loads((tmp_path / "end.json").read_text()) == {"root": ""}


def test_the_table_on_photos_has_the_paired_difference_by_students_t(tmp_path):
  chosen = FIGURES["cifar10"].arms
  rows = {arm.name: row_of(arm) for arm in chosen}
  for arm in chosen:
    better = arm.seed / 100 if arm.value("model.recipe") == "switchback" else 0
    rows[arm.name]["scores"] = {"zero_shot_top1": 0.5 + (arm.seed % 2) / 10 + better}
  draw.write("cifar10", chosen, rows, tmp_path)
  lines = (tmp_path / "figure_cifar10.md").read_text().splitlines()
  (line,) = (line for line in lines if "`switchback`" in line)
  # Of 0, 1, 2, 3 and 4: 2.776 * sqrt(2.5 / 5).
  assert (
    line.startswith("| CIFAR-10 | `switchback` | 5 | ") and "| 2.00 ± 1.96 | open | 0 |" in line
  )


def test_minutes_of_photos_are_about_one_a_run(name):
  assert 10 < program.minutes(list(FIGURES[name].arms)) < 25


@pytest.mark.parametrize("name", photos.CONFIGS)
@pytest.mark.slow
def test_tiny_trains_on_made_up_pictures(name, monkeypatch, capsys):
  with jax.numpy_dtype_promotion("standard"):  # optax promotes.
    call(monkeypatch, name, "--tiny")
  printed = capsys.readouterr().out
  assert f"{name} batch_size=16 model.recipe=switchback" in printed
  assert f"figure_{name}.png" in printed
