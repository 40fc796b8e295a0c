"""The command line of training and evaluation: a config file, flags that override it, a workdir.

Any field of the config is a flag: --config.optimizer.learning_rate=1e-3. Errors that a user can fix
are printed as one message; --debug shows their traceback.
"""

import contextlib
import functools
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from typing import NoReturn

from absl import app, flags, logging

from train import config_flags
from train.errors import RunError
from train.parallel import agreement, peers, processes, stop, xla_flags
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


def run(job) -> None:
  """Parses the flags and calls job(config, workdir)."""
  if {"-h", "--help", "-help", "--helpfull", "--helpshort"} & {*sys.argv[1:]}:
    print(_help())
    return
  try:
    overrides, rest = config_flags.split(sys.argv[1:])
  except ValueError as error:
    sys.exit(str(error))
  app.run(
    functools.partial(_run, job, overrides), argv=[sys.argv[0], *rest], flags_parser=_parse_flags
  )


def _run(job, overrides, argv) -> None:
  if len(argv) > 1:
    sys.exit(f"Arguments must be flags: {' '.join(argv[1:])}. Did you mean --config.{argv[1]}?")
  with explained(_DEBUG.value):
    workdir = local_path(_WORKDIR.value, "--workdir", utf8=True)
    config = config_flags.load(_CONFIG.value)
    config_flags.override(config, overrides)
    if _DISTRIBUTED.value:
      processes.join(agreement.described(config))
    with peers.linked():
      job(config, workdir)


@contextlib.contextmanager
def explained(debug: bool = False) -> Iterator[None]:
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
  return "\n".join([*lines, "", config_flags.describe()])
