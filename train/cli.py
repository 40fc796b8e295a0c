"""The command line of training and evaluation: a config file, flags that override it, a workdir.

Any field of the config is a flag: --config.optimizer.learning_rate=1e-3. Errors that a user can fix
are printed as one message; --debug shows their traceback.
"""

import contextlib
import functools
import sys
import textwrap
import warnings
from collections.abc import Iterator

from absl import app, flags, logging

from train import config_flags, peers, processes, xla_flags
from train.errors import RunError
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
  if "--help" in sys.argv[1:]:
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
    workdir = local_path(_WORKDIR.value, "--workdir")
    config = config_flags.load(_CONFIG.value)
    config_flags.override(config, overrides)
    if _DISTRIBUTED.value:
      processes.join()
    with peers.linked():
      job(config, workdir)


@contextlib.contextmanager
def explained(debug: bool = False) -> Iterator[None]:
  """Ends the program with one message for an error that a user can fix; quiets other logs."""
  # orbax logs every file that it writes, and its threads log errors that are raised here as well.
  logging.set_verbosity(logging.FATAL)
  sys.unraisablehook = _unraisablehook
  warnings.filterwarnings("ignore", ".*was never awaited", RuntimeWarning)  # of the same writes
  xla_flags.set_flags()
  try:
    yield
  except (RunError, ValueError, NotImplementedError, OSError, ImportError) as error:
    if debug:
      raise
    print(f"\n{_describe(error)}", file=sys.stderr)
    peers.exit_with(128 + error.signum if hasattr(error, "signum") else 1)
  except KeyboardInterrupt:  # Outside the steps, which take it for a signal to save and stop.
    print("\nInterrupted; the same command continues.", file=sys.stderr)
    sys.exit(130)


def _unraisablehook(unraisable) -> None:
  # When one write fails, tensorstore reports the rest to an event loop that orbax has closed.
  if str(unraisable.exc_value) != "Event loop is closed":
    sys.__unraisablehook__(unraisable)


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
