"""The command line of training and evaluation: a config file, flags that override it, a workdir.

Any field of the config is a flag: --config.optimizer.learning_rate=1e-3. Errors that a user can fix
are printed as one message; --debug shows their traceback.
"""

import contextlib
import dataclasses
import difflib
import functools
import re
import runpy
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags, logging

from train.config import Config, all_fields
from train.errors import RunError
from train.fields import KINDS, MAY_CHANGE, about
from train.parallel import agreement, peers, processes, stop, xla_flags
from train.parallel.ahead import is_compiling
from train.paths import local_path

_CONFIG = flags.DEFINE_string("config", None, "What to run: a file of configs/.")
_WORKDIR = flags.DEFINE_string("workdir", None, "The folder for all that the run writes.")
_DISTRIBUTED = flags.DEFINE_bool(
  "distributed",
  False,
  "Several processes: found in the environment of Slurm, Open MPI, Kubernetes or a TPU, or given"
  " by JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES and JAX_PROCESS_ID; docs/clusters.md.",
)
_DEBUG = flags.DEFINE_bool("debug", False, "Show the traceback of an explained error.")

_FIELD_FLAG = re.compile(r"--?(no)?config\.([^=]*)(?:=(.*))?", re.DOTALL)


def run(job) -> None:
  """Parses the flags and calls job(config, workdir)."""
  if {"-h", "--help", "-help", "--helpfull", "--helpshort"} & {*sys.argv[1:]}:
    print(_help())
    return
  try:
    overrides, rest = split_flags(sys.argv[1:])
  except ValueError as error:
    sys.exit(str(error))
  app.run(
    functools.partial(_run, job, overrides), argv=[sys.argv[0], *rest], flags_parser=_parse_flags
  )


def _run(job, overrides, argv) -> None:
  if len(argv) > 1:
    sys.exit(f"Arguments must be flags: {' '.join(argv[1:])}. Did you mean --config.{argv[1]}?")
  with report_errors(_DEBUG.value):
    workdir = local_path(_WORKDIR.value, "--workdir", utf8=True)
    config = load_config(_CONFIG.value)
    override(config, overrides)
    if _DISTRIBUTED.value:
      processes.join(agreement.described(config))
    with peers.linked():
      job(config, workdir)


def _parse_flags(argv):
  try:
    rest = flags.FLAGS(argv)
  except flags.Error as error:
    sys.exit(f"{error} --help lists all flags.")
  if not (_CONFIG.value and _WORKDIR.value):
    sys.exit("--config=FILE and --workdir=FOLDER are needed; --help lists all flags.")
  return rest


def _help() -> str:
  """The program's docstring, its flags, and all fields of the config."""
  modules = dict.fromkeys((__name__, sys.argv[0]))
  lines = [sys.modules["__main__"].__doc__ or ""]
  for flag in (flag for name in modules for flag in flags.FLAGS.get_flags_for_module(name)):
    head = f"  --{flag.name}" + ("" if flag.boolean else "=VALUE")
    lines.append(
      textwrap.fill(
        " ".join(flag.help.split()), 100, initial_indent=f"{head:23} ", subsequent_indent=" " * 24
      )
    )
  return "\n".join([*lines, "", describe_fields()])


def describe_fields() -> str:
  """A table of the config's fields for each group: name, type, default, help.

  A star marks those that may have another value when a run resumes.
  """
  tables = {}
  for path, field in all_fields().items():
    group, _, name = path.rpartition(".")
    prefix = f"--config.{group}." if group else "--config."
    default = "" if field.default is dataclasses.MISSING else repr(field.default)
    star = "*" if MAY_CHANGE in about(field).marks else ""
    head = f"  {name + star:21} {KINDS[field.type].name:5} {default:20} "
    row = textwrap.fill(about(field).help, 100, initial_indent=head, subsequent_indent=" " * 51)
    tables.setdefault(f"{prefix}FIELD=VALUE", []).append(row)
  text = "\n".join("\n".join([title, *rows, ""]) for title, rows in tables.items())
  return f"{text}\n* may have another value when the run resumes.\n"


def load_config(path: str) -> Config:
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


def split_flags(arguments: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
  """The texts that flags give to each field, in their order, and the other arguments.

  A flag is --config.steps=3, --config.steps 3, or --config.data.flip and --noconfig.data.flip.
  """
  overrides, rest, arguments = {}, [], list(arguments)
  while arguments:
    argument = arguments.pop(0)
    match = _FIELD_FLAG.fullmatch(argument)
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
    if _field(path).type == tuple[str, ...]:
      value = sum((_parse(path, text) for text in texts), ())
    else:
      value = _parse(path, texts[-1])
    group, _, name = path.rpartition(".")
    setattr(config.get(group) if group else config, name, value)


def _parse(path: str, text: str) -> Any:
  kind = KINDS[_field(path).type]
  try:
    return kind.read(text)
  except (KeyError, ValueError, SyntaxError):
    raise ValueError(f"--config.{path}={text!r} must be {kind.words}.") from None


def _field(path: str) -> dataclasses.Field:
  """The field of that path; a ValueError names those near it if there is none."""
  names = {path: field.name for path, field in all_fields().items()}
  if path not in names:
    name = path.rpartition(".")[2]
    near = [p for p in names if names[p] == name or p.startswith(f"{path}.")]
    near = near or [p for p in names if difflib.get_close_matches(name, [names[p]], cutoff=0.75)]
    near = near or difflib.get_close_matches(path, names)
    hint = f" Did you mean {'one of ' * (len(near) > 1)}{', '.join(near)}?" if near else ""
    raise ValueError(f"The config has no field {path!r}.{hint} --help lists them all.")
  return all_fields()[path]


@contextlib.contextmanager
def report_errors(debug: bool = False) -> Iterator[None]:
  """Ends the program with one message for an error that a user can fix; quiets other logs."""
  for stream in (sys.stdout, sys.stderr):  # A name may have letters that the encoding lacks.
    if hasattr(stream, "reconfigure"):
      stream.reconfigure(errors="backslashreplace")
  # orbax logs every file that it writes, and its threads log errors that are raised here as well.
  logging.set_verbosity(logging.FATAL)
  sys.unraisablehook = _quiet(sys.unraisablehook)
  warnings.filterwarnings("ignore", ".*was never awaited", RuntimeWarning)  # of the same writes
  xla_flags.set_flags()
  with stop.listening():
    try:
      yield
    except stop.Interrupted as error:
      _end(error, error.exit_code)
    except stop.Stopped as error:
      _end(error, error.exit_code, together=True)
    except KeyboardInterrupt:
      _end("Interrupted; the same command continues.", 130, together=True)
    except Exception as error:
      if stop.received_soon():  # It may have ended a compiler, for example.
        interrupted = stop.interrupted()
        _end(f"{interrupted}\n{_describe(error)}", interrupted.exit_code)
      if debug or not isinstance(error, _EXPLAINED):
        if is_compiling():  # Python's own end would wait for it.
          traceback.print_exc()
          peers.exit_with(1)
        raise
      _end(_describe(error), 1)


_EXPLAINED = (RunError, ValueError, NotImplementedError, OSError, ImportError)


def _end(message: object, code: int, together: bool = False) -> NoReturn:
  print(f"\n{message}", file=sys.stderr)
  peers.exit_with(code, together)


def _quiet(hook: Callable) -> Callable:
  """Without what tensorstore reports after a failed write to an event loop that orbax closed."""
  return lambda raised: None if str(raised.exc_value) == "Event loop is closed" else hook(raised)


def _describe(error: Exception) -> str:
  if isinstance(error, OSError) and error.strerror:
    return f"{error.strerror}: {error.filename or 'while writing to the workdir'}"
  return str(error)
