"""Weights & Biases, as a fake module: it records a run, and its failures end nothing."""

import re
import sys
import threading
from types import SimpleNamespace

import pytest

from train import record as wandb_log
from train.config import Config, ModelConfig
from train.errors import RunError
from train.record import WandbLog

CONFIG = Config(model=ModelConfig(size="tiny"), wandb_project="mine")


class FakeRun:
  def __init__(self, fails_at=()):
    self.calls, self._fails_at = [], fails_at

  def log(self, scalars, step):
    self._call("log", step)

  def finish(self):
    self._call("finish")

  def _call(self, name, *values):
    self.calls.append((name, *values))
    if name in self._fails_at:
      raise ConnectionError("no network")


def fake(monkeypatch, run=None):
  """A module `wandb` whose init returns `run`, or fails; its options."""
  options = {}

  def init(**given):
    options.update(given)
    if run is None:
      raise ConnectionError("no network")
    return run

  monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=SimpleNamespace))
  return options


def test_runs_of_one_name_in_two_folders_have_two_logs_and_a_resume_has_its_own(
  monkeypatch, tmp_path
):
  options, ids = fake(monkeypatch, FakeRun()), []
  for folder in ("a/seed0", "b/seed0", "a/../a/seed0"):
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    WandbLog(CONFIG, tmp_path / folder)
    ids.append(options["id"])
  assert ids[0] == ids[2] != ids[1] and all(re.fullmatch("seed0-[0-9a-f]{8}", i) for i in ids)


def use(workdir):
  log = WandbLog(CONFIG, workdir)
  log.log({"loss": 1.0}, step=1)
  log.log({"loss": 2.0}, step=2)
  log.finish()


def test_a_run_is_logged_and_its_start_waits_no_longer_than_a_minute(monkeypatch, tmp_path):
  run = FakeRun()
  options = fake(monkeypatch, run)
  use(tmp_path)
  assert run.calls == [("log", 1), ("log", 2), ("finish",)]
  assert options["project"] == "mine" and options["name"] == tmp_path.name
  assert options["dir"] == str(tmp_path) and options["settings"].init_timeout < 60


@pytest.mark.parametrize(
  ("run", "calls"),
  [
    (None, None),
    (FakeRun(["log"]), [("log", 1)]),
    (FakeRun(["finish"]), [("log", 1), ("log", 2), ("finish",)]),
  ],
)
def test_without_a_network_the_run_goes_on(monkeypatch, tmp_path, capsys, run, calls):
  fake(monkeypatch, run)
  use(tmp_path)
  said = capsys.readouterr().err
  assert said.count("The run goes on without Weights & Biases: ConnectionError: no network.") == 1
  assert "WANDB_MODE=offline" in said
  assert run is None or run.calls == calls


def test_uploads_that_hang_do_not_hold_the_run(monkeypatch, tmp_path):
  released = threading.Event()
  run = SimpleNamespace(log=lambda scalars, step: None, finish=released.wait)
  fake(monkeypatch, run)
  monkeypatch.setattr(wandb_log, "_SECONDS", 0.05)
  use(tmp_path)
  assert not released.is_set()
  released.set()


def test_a_missing_package_is_one_message(monkeypatch, tmp_path):
  monkeypatch.setitem(sys.modules, "wandb", None)
  with pytest.raises(RunError, match="wandb_project='mine' needs Weights & Biases: pip install"):
    WandbLog(CONFIG, tmp_path)
