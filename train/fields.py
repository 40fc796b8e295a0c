"""How a field of the config is declared: its default, its --help, its values, its flag's text.

  steps: int = field(20_000, "batches to train on", AT_LEAST_1, MAY_CHANGE)

That is its default, its line of --help, what its value must be, and whether a run that continues
may have another one. `KINDS` has the types of fields, and how a flag's text is read as each.
"""

import ast
import dataclasses
import enum
import math
import re
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

from train.paths import check_local


class Limit(NamedTuple):
  words: str  # after "must be"
  holds: Callable[[Any], bool]  # false for nan


class Mark(enum.Enum):
  MAY_CHANGE = enum.auto()  # when a run continues: it says where the run computes, what it reports
  PER_PROCESS = enum.auto()  # each process may have its own: where it finds data, how it reads them
  PATH = enum.auto()  # a path, or it may be one; "::" joins several


MAY_CHANGE, PER_PROCESS, PATH = Mark
REQUIRED: Any = dataclasses.MISSING  # in place of a default


class About(NamedTuple):
  help: str
  limits: tuple[Limit, ...]
  marks: frozenset[Mark]


def field(default: Any, help: str, *rules: Limit | Mark) -> Any:
  """A field of a dataclass that says more of itself; see `about`.

  help: lines are joined.
  """
  limits = tuple(rule for rule in rules if isinstance(rule, Limit))
  marks = frozenset(rule for rule in rules if isinstance(rule, Mark))
  return dataclasses.field(
    default=default, metadata={About: About(" ".join(help.split()), limits, marks)}
  )


def about(field: dataclasses.Field) -> About:
  return field.metadata[About]


def zero_or_more(zero: str) -> Limit:
  """zero: what 0 means."""
  return Limit(f"0 ({zero}) or more", lambda x: x >= 0)


def one_of(*names: str) -> Limit:
  *first, last = map(repr, names)
  return Limit(f"{', '.join(first)} or {last}", lambda x: x in names)


AT_LEAST_1 = Limit("at least 1", lambda x: x >= 1)
SHARE = Limit("at least 0 and less than 1", lambda x: 0 <= x < 1)
FINITE = Limit("0 or more, and finite", lambda x: 0 <= x < math.inf)
POSITIVE = Limit("more than 0, and finite", lambda x: 0 < x < math.inf)


class Kind(NamedTuple):
  name: str  # in --help
  words: str  # after "must be"
  read: Callable[[str], Any]  # a flag's text; may raise KeyError, ValueError, SyntaxError


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


KINDS = {  # By a field's type.
  str: Kind("str", "a text", str),
  int: Kind("int", "a whole number", int),
  float: Kind("float", "a number", float),
  bool: Kind("bool", "true or false", _bool),
  tuple[float, float]: Kind("tuple", "two numbers, such as (0.5, 1)", _numbers),
  tuple[float, ...]: Kind("tuple", "numbers, such as (2, 1)", _numbers),
  tuple[str, ...]: Kind("texts", "texts, such as ('a {}', 'one {}')", _texts),
}


def check(path: str, field: dataclasses.Field, value: Any) -> None:
  """Raises a ValueError unless the field of that path can have the value.

  A path to another machine is a RunError.
  """
  if not _has_type(value, field.type):
    raise ValueError(f"{path}={value!r} must be {KINDS[field.type].words}.")
  for limit in about(field).limits:
    if not limit.holds(value):
      raise ValueError(f"{path}={value!r} must be {limit.words}.")
  if PATH in about(field).marks:
    for each in value.split("::") if isinstance(value, str) else value:
      check_local(each, path)


def _has_type(value: Any, kind: Any) -> bool:
  if typing.get_origin(kind) is tuple:
    item = typing.get_args(kind)[0]
    return isinstance(value, tuple | list) and all(_has_type(each, item) for each in value)
  if isinstance(value, bool):  # which is an int, too
    return kind is bool
  return isinstance(value, (int, float) if kind is float else kind)
