"""A config file, and flags that change its fields: --config.optimizer.learning_rate=1e-3.

train/config.py has the one list of fields. Their types say how a flag's text is read, and their
comments are what --help prints.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import re
import runpy
import textwrap
import traceback
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.config import TYPES, Config, all_fields
from train.errors import RunError
from train.paths import local_path

_FLAG = re.compile(r"--?(no)?config\.([^=]*)(?:=(.*))?", re.DOTALL)


class Field(typing.NamedTuple):
  type: Any
  default: Any  # dataclasses.MISSING: it must be given
  comment: str


def load(path: str) -> Config:
  """The Config that the `get_config()` of a file returns."""
  path = str(local_path(path, "--config"))
  if not Path(path).is_file():
    raise RunError(f"There is no config file {path}.")
  try:
    program = runpy.run_path(path, run_name="config")
    if "get_config" not in program:
      raise RunError(f"{path} has no function get_config(), which returns a train.config.Config.")
    config = program["get_config"]()
  except RunError:
    raise
  except SyntaxError as error:
    where = f"{error.filename}, line {error.lineno}" if error.lineno else path
    raise RunError(f"{where}: {error.msg}.") from error
  except Exception as error:
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    where = f"{path}, line {lines[-1]}" if lines else path  # No line: the file is no text.
    raise RunError(f"{where}: {type(error).__name__}: {error}") from error
  if not isinstance(config, Config):
    raise RunError(f"{path}: get_config() must return a train.config.Config, not {config!r}.")
  return config


def split(arguments: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
  """The texts that flags give to each field, in their order, and the other arguments.

  A flag is --config.steps=3, --config.steps 3, or --config.data.flip and --noconfig.data.flip.
  """
  overrides, rest, arguments = {}, [], list(arguments)
  while arguments:
    argument = arguments.pop(0)
    match = _FLAG.fullmatch(argument)
    if not match:
      rest.append(argument)
      continue
    no, path, text = match.groups()
    if no and (text is not None or _field(path).type is not bool):
      raise ValueError(f"--noconfig.{path} is for fields that are true or false, without a value.")
    if text is None and _field(path).type is bool:
      text = "false" if no else "true"
    elif text is None:
      if not arguments or arguments[0].startswith("--"):
        raise ValueError(f"--config.{path} needs a value: --config.{path}=...")
      text = arguments.pop(0)
    overrides.setdefault(path, []).append(text)
  return overrides, rest


def override(config: Config, overrides: dict[str, list[str]]) -> None:
  """Sets the fields of `config`: sequences of texts to all that are given, others to the last."""
  for path, texts in overrides.items():
    kind = _field(path).type
    value = _parse(path, texts[-1], kind)
    if kind == tuple[str, ...]:
      value = sum((_parse(path, text, kind) for text in texts), ())
    group, _, name = path.rpartition(".")
    setattr(config.get(group) if group else config, name, value)


@functools.cache
def fields() -> dict[str, Field]:
  """All fields of Config by their path, in the order of train/config.py."""
  return {
    path: Field(field.type, field.default, _comments(group)[field.name])
    for path, field, group in all_fields()
  }


def describe() -> str:
  """A table of the fields for each group: name, type, default, comment."""
  groups = {}
  for path, field in fields().items():
    groups.setdefault(path.rpartition(".")[0], []).append((path.rpartition(".")[2], field))
  return "\n".join(_table(group, rows) for group, rows in groups.items())


def _table(group: str, rows: Sequence[tuple[str, Field]]) -> str:
  lines = [f"--config.{group}.FIELD=VALUE" if group else "--config.FIELD=VALUE"]
  for name, field in rows:
    kind = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    kind = "texts" if field.type == tuple[str, ...] else kind.partition("[")[0]
    default = "" if field.default is dataclasses.MISSING else f"{field.default!r}"
    head = f"  {name:21} {kind:5} {default:20} "
    lines.append(textwrap.fill(field.comment, 100, initial_indent=head, subsequent_indent=" " * 51))
  return "\n".join(lines) + "\n"


def _field(path: str) -> Field:
  if path not in fields():
    name = path.rpartition(".")[2]
    names = {p: p.rpartition(".")[2] for p in fields()}
    near = [p for p in names if names[p] == name or p.startswith(f"{path}.")]
    near = near or [p for p in names if difflib.get_close_matches(name, [names[p]], cutoff=0.75)]
    near = near or difflib.get_close_matches(path, names)
    hint = f" Did you mean {'one of ' * (len(near) > 1)}{', '.join(near)}?" if near else ""
    raise ValueError(f"The config has no field {path!r}.{hint} --help lists them all.")
  return fields()[path]


@functools.cache
def _comments(group: type) -> dict[str, str]:
  """The comment of each field in the source: on the lines above it, and at its end."""
  comments, above = {}, []
  for line in inspect.getsource(group).splitlines():
    code, _, comment = line.partition("# ")
    field = re.match(r"  (\w+): ", code)
    if field:
      comments[field[1]] = " ".join([*above, comment]).strip()
    above = [*above, comment] if comment and not code.strip() else []
  return comments


def _parse(path: str, text: str, kind: Any) -> Any:
  try:
    return _READERS[kind](text)
  except (KeyError, ValueError, SyntaxError):
    raise ValueError(f"--config.{path}={text!r} must be {TYPES[kind]}.") from None


def _bool(text: str) -> bool:
  return {"true": True, "1": True, "false": False, "0": False}[text.lower()]


def _numbers(text: str) -> tuple[float, ...]:
  return tuple(float(number) for number in text.strip("()[] ").split(",") if number.strip())


def _texts(text: str) -> tuple[str, ...]:
  """One text, such as the pattern (image|text)/.*, or a tuple or list of texts in quotes."""
  if not text.startswith(("(", "[")) or not (text in ("()", "[]") or re.search("['\"]", text)):
    return (text,)
  texts = ast.literal_eval(text)
  if not isinstance(texts, tuple | list) or not all(isinstance(each, str) for each in texts):
    raise ValueError
  return tuple(texts)


_READERS = {  # Of a field's type: the function that reads a text.
  str: str,
  int: int,
  float: float,
  bool: _bool,
  tuple[float, float]: _numbers,
  tuple[str, ...]: _texts,
}
