"""The command line: every field is a flag, --help lists them, and a slip is one message."""

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_case import started
from pairwise import mainly

from configs import quickstart
from train import cli
from train.config import all_fields
from train.errors import RunError
from train.fields import KINDS, MAY_CHANGE, about

ROOT = Path(__file__).parents[2]


def changed(*arguments):
  """The quickstart's config after these flags."""
  config = quickstart.get_config()
  overrides, rest = cli.split_flags(arguments)
  assert not rest
  cli.override(config, overrides)
  return config


@pytest.mark.parametrize(
  ("arguments", "expected"),
  [
    (["--config.steps=7"], {"steps": 7}),
    (["--config.steps", "7"], {"steps": 7}),
    (["--config.mesh.fsdp", "-1"], {"mesh.fsdp": -1}),
    (["--config.optimizer.learning_rate=1e-3"], {"optimizer.learning_rate": 1e-3}),
    (["--config.data.flip"], {"data.flip": True}),
    (["--noconfig.model.scan"], {"model.scan": False}),
    (["--config.model.scan=False"], {"model.scan": False}),
    (["--config.data.text_key="], {"data.text_key": ""}),
    (["--config.data.crop_scale=0.5,1"], {"data.crop_scale": (0.5, 1.0)}),
    (["--config.data.crop_scale=(0.5, 1)"], {"data.crop_scale": (0.5, 1.0)}),
    (["--config.data.templates=a red, round {}."], {"data.templates": ("a red, round {}.",)}),
    (["--config.data.templates=('a {}', 'one {}')"], {"data.templates": ("a {}", "one {}")}),
    (["--config.freeze=(image|text)/.*"], {"freeze": ("(image|text)/.*",)}),
    (["--config.watch=[^/]+/proj"], {"watch": ("[^/]+/proj",)}),
    (["--config.freeze=()"], {"freeze": ()}),
    (
      ["--config.data.templates=a {}", "--config.data.templates=one {}"],
      {"data.templates": ("a {}", "one {}")},
    ),
  ],
  ids=str,
)
def test_a_flag_sets_its_field(arguments, expected):
  config = changed(*arguments)
  assert {path: config.get(path) for path in expected} == expected


def test_every_field_can_be_set_by_a_flag_to_its_own_value():
  config = quickstart.get_config()
  for path in all_fields():
    value = config.get(path)
    assert changed(f"--config.{path}={value}").get(path) == value, path


@pytest.mark.parametrize(
  ("argument", "message"),
  [
    ("--config.optimiser.b1=0.5", "no field 'optimiser.b1'. Did you mean optimizer.b1?"),
    ("--config.learning_rate=1", "no field 'learning_rate'. Did you mean optimizer.learning_rate?"),
    ("--config.optimizer.lerning_rate=1", "Did you mean one of optimizer.learning_rate, "),
    ("--config.model=tiny", "no field 'model'. Did you mean one of model.size, "),
    ("--config.steps=many", "--config.steps='many' must be a whole number."),
    ("--config.steps", "--config.steps needs a value"),
    ("--config.optimizer.b1=big", "--config.optimizer.b1='big' must be a number."),
    ("--config.model.scan=maybe", "--config.model.scan='maybe' must be true or false."),
    ("--config.data.crop_scale=a,b", "--config.data.crop_scale='a,b' must be two numbers, such as"),
    ("--config.data.templates=('a {}'", "must be texts, such as"),
    ("--config.freeze=('image/.*')", "must be texts, such as"),
    ("--config.freeze=('image/.*', 1)", "must be texts, such as"),
    ("--noconfig.data.flip=true", "--noconfig.data.flip is for fields that are true or false"),
    ("--noconfig.steps", "--noconfig.steps is for fields that are true or false, without a value"),
  ],
)
def test_a_wrong_flag_is_named_with_what_would_be_right(argument, message):
  with pytest.raises(ValueError) as raised:
    changed(argument)
  assert message in str(raised.value)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("x = 1\ndef get_config(:\n", "config.py, line 2: invalid syntax"),
    ("x = 1\n", "config.py has no function get_config()"),
    (
      "def get_config():\n  return 3\n",
      "config.py: get_config() must return a train.config.Config",
    ),
    ("\ndef get_config():\n  return siez\n", "config.py, line 3: NameError: name 'siez'"),
    ("import train.none_such\n", "config.py, line 1: ModuleNotFoundError: No module named"),
    (None, "There is no config file "),
    ("x = 1\0", "config.py"),
  ],
)
def test_a_wrong_config_file_is_one_message_with_its_line(tmp_path, text, message):
  path = tmp_path / "config.py"
  if text is not None:
    path.write_text(text)
  with pytest.raises(RunError) as raised:
    cli.load_config(str(path))
  assert message in str(raised.value)
  assert str(path) in str(raised.value)


def test_help_says_of_every_field_its_type_and_default_and_what_it_is():
  text = "".join(cli.describe_fields().split())  # Lines may break at a hyphen.
  for path, field in all_fields().items():
    default = "" if field.default is dataclasses.MISSING else repr(field.default)
    star = "*" if MAY_CHANGE in about(field).marks else ""
    said = f"{field.name}{star} {KINDS[field.type].name} {default} {about(field).help}"
    assert about(field).help and "".join(said.split()) in text, path


def program(*arguments, module="train.main"):
  return subprocess.run(
    [sys.executable, "-m", module, *map(str, arguments)],
    cwd=ROOT,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    timeout=300,
  )


def test_help_lists_the_flags_and_the_fields():
  run = program("--help")
  assert run.returncode == 0, run.stderr
  for words in ("--config=", "--workdir=", "--distributed", "--debug", "--config.optimizer."):
    assert words in run.stdout
  assert cli.describe_fields() in run.stdout
  assert max(map(len, run.stdout.splitlines())) <= 100


OWN_WORDS = {
  "train.evaluate": "--config.data.",
  "train.embed": "--texts",
  "train.export": "--format",
  "train.spikes": "--window",
  "train.rounding": "--group",
  "tests.faults": "--draws",
}


# `cli` parses the flags of train.evaluate and train.main; the others are argparse's.
@pytest.mark.parametrize(
  ("module", "flag"),
  mainly(
    [("train.evaluate", "-h"), *((module, "--help") for module in [*OWN_WORDS][1:])],
    itertools.product(OWN_WORDS, ["--help", "-h"]),
  ),
)
def test_every_program_has_help(module, flag):
  run = program(flag, module=module)
  assert run.returncode == 0, run.stderr
  assert OWN_WORDS[module] in run.stdout and not run.stderr


def test_the_help_of_an_evaluation_of_folders_is_after_its_flag():
  run = program("--checkpoint=x", "-h", module="train.evaluate")
  assert run.returncode == 0 and "--max_aspect_ratio" in run.stdout


@pytest.mark.parametrize("encoding", ["ascii", "utf-8", "latin-1"])
def test_a_name_in_any_encoding_can_be_printed(encoding):
  code = "from train import cli\nwith cli.report_errors(): print('caf\\udce9 \\u732b')"
  environment = {**os.environ, "PYTHONIOENCODING": f"{encoding}:strict", "JAX_PLATFORMS": "cpu"}
  run = subprocess.run(
    [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, timeout=300
  )
  assert run.returncode == 0 and b"caf\\udce9 " in run.stdout, run.stderr


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--workdir=x"], "--config=FILE and --workdir=FOLDER are needed"),
    (["--config=configs/quickstart.py"], "--config=FILE and --workdir=FOLDER are needed"),
    (["--config=configs/quickstart.py", "--wrkdir=x"], "Unknown command line flag 'wrkdir'"),
    (
      ["--config=configs/quickstart.py", "--workdir=x", "steps=3"],
      "Did you mean --config.steps=3?",
    ),
    (["--config=no.py", "--workdir=x"], "There is no config file no.py"),
    (["--config=configs/quickstart.py", "--workdir=x", "--config.stesp=3"], "Did you mean steps?"),
    (
      ["--config=configs/quickstart.py", "--workdir=x", "--config.optimizer.learning_rat=1"],
      "no field 'optimizer.learning_rat'. Did you mean one of optimizer.learning_rate, ",
    ),
    (
      ["--config=configs/quickstart.py", "--workdir=x", "--config.steps=many"],
      "--config.steps='many' must be a whole number.",
    ),
  ],
)
def test_a_slip_on_the_command_line_is_one_message(monkeypatch, capsys, arguments, message):
  code, said = started(monkeypatch, capsys, *arguments)
  assert code == 1
  assert message in said
  assert "Traceback" not in said


def test_ctrl_c_outside_the_steps_is_one_line_and_exit_code_130(monkeypatch, capsys):
  def interrupted(config, workdir):
    raise KeyboardInterrupt

  arguments = ("--config=configs/quickstart.py", "--workdir=x")
  code, said = started(monkeypatch, capsys, *arguments, job=interrupted)
  assert code == 130
  assert "Interrupted; the same command continues." in said
  assert "Traceback" not in said


def test_a_missing_extra_is_one_message(monkeypatch, capsys):
  def job(config, workdir):
    raise ImportError("install the extra `interop`")

  arguments = ("--config=configs/quickstart.py", "--workdir=x")
  code, said = started(monkeypatch, capsys, *arguments, job=job)
  assert code == 1
  assert "install the extra `interop`" in said and "Traceback" not in said


def test_a_tilde_in_workdir_is_the_home_folder(monkeypatch, capsys, tmp_path):
  def job(config, workdir):
    sys.exit(str(workdir))

  monkeypatch.setenv("HOME", str(tmp_path))
  arguments = ("--config=configs/quickstart.py", "--workdir=~/x")
  _, said = started(monkeypatch, capsys, *arguments, job=job)
  assert said == str(tmp_path / "x")
