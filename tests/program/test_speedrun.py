"""benchmarks/speedrun: its data, what it reads in logs, its table, and a whole small race."""

import importlib.util
import tarfile

import numpy as np
import pytest

from benchmarks.speedrun import __main__ as speedrun
from benchmarks.speedrun import data, runs, table, tracks
from benchmarks.tables import read_file
from train.data.augment import CentreCrop
from train.data.scenes.words import WORDS
from train.data.wds_folder import open_folder

_CPU = tracks.TRACKS["cpu"]
_SMALL = _CPU._replace(shards=8, each=32, classes=50, image_size=32, batch_size=16)

# A line of open_clip_train.train, with the samples so far and the mean seconds of a batch.
_LINE = "Train Epoch: 0 [{:>4}/6400 (1%)] Data (t): {:.3f} Batch (t): {:.3f}, 9/s, 9/s/gpu LR: 0.1"
_VALUES = [(16, 3, 9.5), (176, 0.125, 0.25), (6400, 0, 0.125)]
_LOG = "\n".join(_LINE.format(*each) for each in _VALUES)


def test_seconds_are_those_of_all_steps_without_the_first_compilation():
  steps = runs.open_clip_steps(_LOG, batch_size=16)
  assert steps == [(1, 9.5, 3), (11, 0.25, 0.125), (400, 0.125, 0)]
  took, waiting = runs.seconds_of(steps)
  assert took == pytest.approx(11 * 0.25 + 389 * 0.125)
  assert waiting == pytest.approx(11 * 0.125)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  folder = tmp_path_factory.mktemp("speedrun")
  return folder, data.write(_SMALL, folder)


def test_shards_hold_the_scenes_of_training_and_the_folder_those_that_are_scored(written):
  folder, found = written
  shards = sorted(folder.glob("train-*.tar"))
  assert len(shards) == _SMALL.shards
  captions = []
  for shard in shards:
    with tarfile.open(shard) as tar:
      captions += [tar.extractfile(m).read().decode() for m in tar if m.name.endswith(".txt")]
  assert len(captions) == _SMALL.shards * _SMALL.each
  assert len({*captions}) > len(captions) / 2
  assert {word for text in captions for word in text.split()} <= {*WORDS}
  lengths = found["words of a caption"]
  assert sum(lengths.values()) == len(captions)
  assert sum(n * count for n, count in lengths.items()) == sum(len(t.split()) for t in captions)

  wds = open_folder(folder / data.WDS)
  scored = [*wds.batches("test", CentreCrop(32), 50)]
  images = np.concatenate([batch["image"] for batch in scored])
  labels = np.concatenate([batch["label"] for batch in scored])
  assert images.shape == (_SMALL.classes, 32, 32, 3)
  assert len({*labels.tolist()}) > 20 and labels.max() < len(wds.class_names) == 320
  drawn = next(data._scenes(_SMALL).eval_batches("classes[:50]", image_size=32, batch_size=50))
  np.testing.assert_array_equal(labels, drawn["label"])
  assert np.abs(images - drawn["image"].astype(np.int32)).mean() < 8  # JPEG


def test_data_that_is_there_is_not_drawn_again_and_other_data_is(written, monkeypatch):
  folder, found = written
  monkeypatch.setattr(data, "_drawn", lambda *_: pytest.fail("draws"))
  again = data.write(_SMALL, folder)
  assert again["made_of"] == found["made_of"]
  with pytest.raises(pytest.fail.Exception, match="draws"):
    data.write(_SMALL._replace(each=64), folder)


def row(words, seed, seconds=None, acc1=0.0, target=0.3, error="", track="b16"):
  ended = {"seconds": seconds, "waiting": 7.0, "acc1": acc1} if seconds else {"error": error}
  named = {"track": track, "words": words, "seed": seed, "chip": "NVIDIA H200", "commit": "abc"}
  return {**named, "target": target, "reached": acc1 >= target, **ended}


def test_an_entry_counts_with_the_mean_of_its_runs():
  rows = [row("slow", 0, 100.0, 0.29), row("slow", 1, 9.0, 0.9), row("slow", 1, 110.0, 0.33)]
  rows += [row("quick", 0, 35.0, 0.2), row("small", 0, 70.0, 0.4, track="cpu")]
  rows.append(row("broken", 0, error="train.main:\nno memory"))
  _, _, slow, quick, small, broken = table.of(rows)
  assert "| slow | 105 ± 64 | 1.00 | 7 | 31.0 ± 25.4 | 30 %: 1 of 2 | H200 |" in slow
  assert "| quick | (35) | 0.33 | 20 | 20.0 | 30 %: 0 of 1 |" in quick  # It missed the target.
  assert "| small | 70 | 1.00 | 10 | 40.0 |" in small  # the first of its track
  assert "| no memory |" in broken


def test_an_unknown_entry_is_named(capsys):
  with pytest.raises(SystemExit):
    speedrun.main(["--folder=x", "--entries", "fastest"])
  assert "'fastest' is none of all tokens, fewer tokens" in capsys.readouterr().err


@pytest.mark.skipif(not importlib.util.find_spec("open_clip"), reason="needs the `interop` extra")
@pytest.mark.parametrize("track", tracks.TRACKS.values(), ids=tracks.TRACKS)
def test_both_programs_get_the_architecture_of_the_track(track):
  model = runs.model_of(track)
  assert model.vision.image_size == track.image_size
  assert model.vision.patches == (track.image_size // model.vision.patch_size) ** 2
  assert model.text.context_length == 77


@pytest.mark.slow
def test_a_race_leaves_a_row_for_each_run_and_repeats_none(monkeypatch, tmp_path, capsys):
  changes = [c for c in _CPU.changes if not c.startswith(("optimizer.warmup", "log_every"))]
  changes += ["optimizer.warmup_steps=2", "log_every=2"]
  small = _SMALL._replace(steps=6, target=0.0, changes=tuple(changes))
  entries = dict(small.entries)
  entries["broken"] = tracks.Entry("a mistake", ("model.recipe=nonsense",))
  monkeypatch.setitem(tracks.TRACKS, "cpu", small._replace(entries=entries, image_size=48))
  arguments = [f"--folder={tmp_path}", f"--out={tmp_path}/rows.jsonl"]
  monkeypatch.setattr(speedrun, "provenance", lambda: {"commit": "abc", "chip": "cpu"})
  speedrun.main(arguments)
  rows = read_file(tmp_path / "rows.jsonl")
  assert [row["entry"] for row in rows] == list(entries)
  *ended, broken = rows
  assert all(row["seconds"] > 0 and 0 <= row["acc1"] <= 1 and row["reached"] for row in ended)
  assert "nonsense" in broken["error"] and not broken["reached"]
  speedrun.main(arguments)
  assert len(read_file(tmp_path / "rows.jsonl")) == len(rows)
  assert "0 %: 1 of 1" in capsys.readouterr().out
