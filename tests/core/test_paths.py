"""Paths are of this machine: what names another place is refused before anything is written."""

import argparse
import pathlib
import re

import pytest
from cli_case import started

from configs import quickstart
from train import embed, evaluate, export, inference, spikes
from train.config import marked
from train.data.tokenizer import make_tokenizer
from train.errors import RunError
from train.fields import PATH
from train.paths import check_local, local_path

REMOTE = ("gs://bucket/a", "s3://b/c.tar", "https://x.org/a", "hf://d", "S3://b", "hf-hub:laion/m",
          "pipe:curl x", "file:///a", pathlib.Path("gs://bucket/a"))  # fmt: skip
LOCAL = ("a", "/a/b", "./gs", "a:b", "c:/x", "run=3:4", "B/32", "ViT-B-32", "", "-", "a//b", "a\nb",
         "x" * 300, "12:30/a")  # fmt: skip
ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("path", REMOTE)
def test_a_place_on_another_machine_is_refused_by_the_name_of_its_flag(path):
  with pytest.raises(RunError, match=f"^--out={re.escape(repr(str(path)))} is no path of this"):
    local_path(path, "--out")


@pytest.mark.parametrize("path", LOCAL)
def test_a_local_path_stays_as_it_is(path):
  assert local_path(path, "--out") == pathlib.Path(path)


def test_a_null_byte_is_named():
  with pytest.raises(RunError, match=r"--out='a\\x00b' has a null byte"):
    check_local("a\0b", "--out")


def test_a_tilde_without_a_home_is_one_message(monkeypatch):
  monkeypatch.delenv("HOME", raising=False)
  monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
  with pytest.raises(RunError, match="--workdir='~/runs' needs a home folder: set HOME"):
    local_path("~/runs", "--workdir")
  assert local_path("runs", "--workdir") == pathlib.Path("runs")


@pytest.mark.parametrize("field", sorted(marked(PATH)))
def test_each_path_of_a_config_is_checked(field):
  config, name = quickstart.get_config(), field.rpartition(".")[2]
  is_tuple = isinstance(config.get(field), tuple)
  group = config.data if field.startswith("data.") else config
  group = config.model if field.startswith("model.") else group
  setattr(
    group, name, ("a", "gs://b") if is_tuple else "a::gs://b" if "shards" in name else "gs://b"
  )
  with pytest.raises(RunError, match=f"^{field}='gs://b' is no path of this machine"):
    config.check()


def test_a_remote_workdir_or_config_writes_nothing(monkeypatch, capsys, tmp_path):
  monkeypatch.chdir(tmp_path)
  good = f"{ROOT}/configs/quickstart.py"
  for flags in (
    (f"--config={good}", "--workdir=gs://bucket/run"), ("--config=gs://a.py", "--workdir=x"),
  ):  # fmt: skip
    code, said = started(monkeypatch, capsys, *flags, job=None)
    assert code == 1 and "is no path of this machine" in said and "Traceback" not in said
  assert not list(tmp_path.iterdir())


def _embed(**flags):
  options = {"data": [], "texts": "", "query": [], "out": "out", "checkpoint": "run", "model": ""}
  options |= {"tokenizer": "", "dtype": "", "int8": False, "batch_size": 8, "shard_size": 8}
  embed.embed(argparse.Namespace(**options | flags))


@pytest.mark.parametrize(
  ("call", "flag"),
  [
    (lambda: inference.load("s3://b/w.pt"), "--checkpoint"),
    (lambda: inference.load("w.pt", size="hf-hub:laion/m"), "--model"),
    (lambda: make_tokenizer("s3://b/t.json", None, 0), "tokenizer"),
    (lambda: export.export("s3://b/run", "hf"), "--workdir"),
    (lambda: export.export("run", "hf", "s3://b/out"), "--out"),
    (lambda: _embed(data=["s3://b/a.tar"]), "--data"),
    (lambda: _embed(texts="s3://b/a.txt"), "--texts"),
    (lambda: _embed(texts="a.txt", out="s3://b"), "--out"),
  ],
)
def test_programs_refuse_a_remote_path_before_they_start(tmp_path, monkeypatch, call, flag):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "a.txt").write_text("a text\n")
  with pytest.raises(RunError, match=f"{flag}=.* is no path of this machine"):
    call()
  assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize(
  ("main", "flags"),
  [
    (evaluate.main, ["--checkpoint=s3://b", "--data=x"]),
    (evaluate.main, ["--checkpoint=run", "--data=s3://b"]),
    (evaluate.main, ["--checkpoint=run", "--data=x", "--out=s3://b"]),
    (embed.main, ["--checkpoint=run", "--out=s3://b", "--data=x"]),
    (spikes.main, ["s3://b"]),
    (spikes.main, ["run", "--out=s3://b.png"]),
    (export.main, ["--workdir=run", "--format=hf", "--out=s3://b"]),
  ],
  ids=lambda value: getattr(value, "__module__", str(value)),
)
def test_a_program_ends_with_one_message_for_a_remote_path(
  tmp_path, monkeypatch, capsys, main, flags
):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(SystemExit) as raised:
    main(flags)
  assert raised.value.code not in (0, None)
  assert "is no path of this machine" in f"{raised.value.code}{capsys.readouterr().err}"
  assert not list(tmp_path.iterdir())


def test_no_program_resolves_a_path_by_itself():
  """So that what a path may be is decided in one place."""
  files = [path for path in (ROOT / "train").rglob("*.py") if path.name != "paths.py"]
  assert not [str(path) for path in files if "expanduser" in path.read_text()]
