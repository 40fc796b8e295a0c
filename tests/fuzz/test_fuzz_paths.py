"""Whatever stands at a path that a user gives, a program does its work or ends with one message.

`SBJAX_FUZZ=10` draws ten times as many.
"""

import contextlib
import os
import shutil
import signal
import sys

import jax
import loop_case
import numpy as np
import pytest
from absl.testing import flagsaver
from shards_case import pairs, write_shard

from configs import quickstart
from train import cli, embed, evaluate, export, loop, spikes

# A program that ends leaves files to the system.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
DRAWS = 40 * max(1, int(os.environ.get("SBJAX_FUZZ", "1")))


def junk(path):
  path.write_bytes(np.random.default_rng(0).bytes(600))


def full_folder(path):
  path.mkdir()
  (path / "a b.tar").write_text("x")


# What may stand where a file or a folder is wanted; the function makes it.
ODD = {
  "nothing": lambda path: None,
  "a folder": lambda path: path.mkdir(),
  "a full folder": full_folder,
  "an empty file": lambda path: path.write_bytes(b""),
  "a text": lambda path: path.write_text("hello\n"),
  "an object": lambda path: path.write_text("{}"),
  "an array": lambda path: path.write_text("[1]"),
  "null": lambda path: path.write_text("null"),
  "a link to nothing": lambda path: path.symlink_to(path.parent / "none"),
  "a link to itself": lambda path: path.symlink_to(path),
  "a pipe": lambda path: os.mkfifo(path),
  "junk": junk,
}
TEXTS = (
  *("", "-", "x" * 300, "a\nb", "~nobody-has-this-name/x", "/dev/null/x", "/dev/full"),
  *("/proc/self/mem", "caf\udce9", "[", "{", "*", "a{0..2}b", "..", "%s", "a=b", "s3://b"),
)

SHARDS = ("--config.data.name=mine", "--config.data.train_shards=*.tar")
TRAIN = {  # The flags of the training program with a path; {} is it.
  "workdir": ("--workdir={}",),
  "config": ("--config={}",),
  "data_dir": ("--config.data.data_dir={}",),
  "root": (*SHARDS, "--config.data.root={}"),
  "class_names": (*SHARDS, "--config.data.label_key=label", "--config.data.class_names={}"),
  "train_shards": (*SHARDS, "--config.data.train_shards={}"),
  "eval_shards": (*SHARDS, "--config.data.eval_shards={}"),
  "eval_data": ("--config.data.eval_data={}",),
  "tokenizer": ("--config.data.tokenizer={}",),
  "init": ("--config.init={}",),
  "init_model": ("--config.init=w.pt", "--config.init_model={}"),
  "size": ("--config.model.size={}",),
}
INSIDE = ("config.json", "tokenizer.json", "metrics.jsonl", "result.json", "checkpoints", ".lock",
          "tensorboard", "report.png", "report.partial", "checkpoints/2", "remat.json")  # fmt: skip
OTHERS = {  # Programs by name: the function, and flags with a path; run is a finished run.
  "evaluate checkpoint": (evaluate.main, ("--checkpoint={}", "--data=wds_x")),
  "evaluate data": (evaluate.main, ("--checkpoint=run", "--data={}")),
  "evaluate out": (evaluate.main, ("--checkpoint=run", "--data=wds_x", "--out={}")),
  "evaluate tokenizer": (
    evaluate.main,
    ("--checkpoint=w.pt", "--model=tiny", "--tokenizer={}", "--data=wds_x", "--out=o"),
  ),
  "evaluate model": (
    evaluate.main,
    ("--checkpoint=w.pt", "--model={}", "--data=wds_x", "--out=o"),
  ),
  "embed checkpoint": (embed.main, ("--checkpoint={}", "--data=a.tar", "--out=o")),
  "embed data": (embed.main, ("--checkpoint=run", "--data={}", "--out=o")),
  "embed out": (embed.main, ("--checkpoint=run", "--data=a.tar", "--out={}")),
  "embed texts": (embed.main, ("--checkpoint=run", "--texts={}", "--out=o")),
  "export workdir": (export.main, ("--workdir={}", "--format=hf")),
  "export out": (export.main, ("--workdir=run", "--format=hf", "--out={}")),
  "spikes run": (spikes.main, ("{}",)),
  "spikes out": (spikes.main, ("run", "--out={}")),
}
WDS = ("classnames.txt", "zeroshot_classification_templates.txt", "dataset_type.txt", "test",
       "test/0.tar", "test/nshards.txt")  # fmt: skip


@contextlib.contextmanager
def limited(seconds=200):
  """A call that waits for ever is an error."""

  def late(*_):
    raise AssertionError("It waits for ever.")

  before = signal.signal(signal.SIGALRM, late)
  signal.alarm(seconds)
  try:
    yield
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  return loop_case.untrained_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def train(monkeypatch, run):
  """train(*flags): the training program, without the model's work."""
  loop_case.replace_model(monkeypatch.setattr, loop_case.standing_step)
  devices = jax.devices()[:1]
  monkeypatch.setattr(jax, "devices", lambda *_: devices)
  monkeypatch.setattr(sys, "excepthook", sys.excepthook)
  monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
  small = {**loop_case.SMALL, "steps": 2, "data.data_dir": run / "data"}
  fields = [f"--config.{name}={value}" for name, value in small.items()]

  def call(*flags):
    program = ["train.main", f"--config={quickstart.__file__}", "--workdir=w"]
    monkeypatch.setattr(sys, "argv", [*program, *fields, *flags])
    with flagsaver.flagsaver():
      cli.run(loop.train)

  return call


def draws():
  """(what is tried, what stands there) of each draw, the same in each run."""
  tried = [*TRAIN, *(f"inside {name}" for name in INSIDE), *OTHERS, *(f"wds {n}" for n in WDS)]
  for i in range(DRAWS):
    rng = np.random.default_rng(i)
    what = tried[i] if i < len(tried) else tried[rng.integers(len(tried))]
    odd = [*ODD, *(() if what.startswith(("inside", "wds")) else TEXTS)]
    yield what, odd[rng.integers(len(odd))]


def place(path, odd):
  """Puts `odd` at a path in place of what is there."""
  if path.is_dir():
    shutil.rmtree(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.unlink(missing_ok=True)
  ODD[odd](path)


@pytest.mark.parametrize(("what", "odd"), [*draws()])
def test_whatever_stands_at_a_path_a_program_works_or_says_one_message(
  train, run, tmp_path, monkeypatch, capsys, what, odd
):
  monkeypatch.chdir(tmp_path)
  shutil.copytree(run, "run", ignore=shutil.ignore_patterns("data"))
  write_shard("a.tar", pairs(8))
  (tmp_path / "w.pt").write_bytes(b"no weights")
  (tmp_path / "wds_x" / "test").mkdir(parents=True)
  write_shard(tmp_path / "wds_x" / "test" / "0.tar", pairs(2))
  (tmp_path / "wds_x" / "dataset_type.txt").write_text("retrieval")
  group, _, name = what.partition(" ")
  value = odd
  if group in ("inside", "wds"):
    place(tmp_path / ("run" if group == "inside" else "wds_x") / name, odd)
  elif odd in ODD:
    place(tmp_path / "odd", odd)
    value = str(tmp_path / "odd")
  if group == "inside":
    main, flags = (lambda flags: train(*flags)), ("--workdir=run", "--config.steps=4")
  elif group == "wds":
    main, flags = evaluate.main, ("--checkpoint=run", "--data=wds_x", "--out=o")
  else:
    main, flags = OTHERS.get(what) or ((lambda flags: train(*flags)), TRAIN[what])
  code = 0
  with limited():
    try:
      main([flag.replace("{}", value) for flag in flags])
    except SystemExit as error:
      code = error.code
  text = f"{code}{capsys.readouterr().err}" if isinstance(code, str) else capsys.readouterr().err
  assert "Traceback" not in text
  assert code in (0, None) or text.strip()
