"""The command line of training and evaluation: a config file, flags that override it, a workdir.

Any field of the config is a flag: --config.optimizer.learning_rate=1e-3. Errors that a user can fix
are printed as one message; --debug shows their traceback.
"""

import dataclasses
import difflib
import functools
import re
import sys
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

from train import config, processes, xla_flags
from train.errors import RunError

_CONFIG = config_flags.DEFINE_config_file("config", None, "What to run: a file of configs/.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the run keeps what it makes.")
_DISTRIBUTED = flags.DEFINE_bool(
  "distributed",
  False,
  "Several processes: found in the environment of Slurm, Open MPI, Kubernetes or a TPU, or given"
  " by JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES and JAX_PROCESS_ID; docs/clusters.md.",
)
_DEBUG = flags.DEFINE_bool("debug", False, "Show the traceback of an explained error.")


def run(job) -> None:
  """Parses the flags and calls job(config, workdir)."""
  app.run(functools.partial(_run, job), flags_parser=_parse_flags)


def _run(job, argv) -> None:
  if len(argv) > 1:
    sys.exit(f"Arguments must be flags: {' '.join(argv[1:])}. Did you mean --config.{argv[1]}?")
  # orbax logs every file that it writes, and its threads log errors that are raised here as well.
  logging.set_verbosity(logging.FATAL)
  sys.unraisablehook = _unraisablehook
  xla_flags.set_flags()
  try:
    if _DISTRIBUTED.value:
      processes.join()
    job(_CONFIG.value, Path(_WORKDIR.value))
  except (RunError, ValueError, NotImplementedError, OSError) as error:
    if _DEBUG.value:
      raise
    print(f"\n{_describe(error)}", file=sys.stderr)
    sys.exit(128 + error.signum if hasattr(error, "signum") else 1)


def _unraisablehook(unraisable) -> None:
  # When one write fails, tensorstore reports the rest to an event loop that orbax has closed.
  if str(unraisable.exc_value) != "Event loop is closed":
    sys.__unraisablehook__(unraisable)


def _describe(error: Exception) -> str:
  if isinstance(error, OSError) and error.strerror:
    return f"{error.strerror}: {error.filename or 'while writing to the workdir'}"
  return str(error)


def _parse_flags(argv):
  """Parses flags; an error names the unknown field and those with similar names."""
  flags.mark_flags_as_required(["config", "workdir"])
  try:
    return app.parse_flags_with_usage(argv)
  except (KeyError, AttributeError) as error:
    field = re.search(r"[Ff]ield (\w+) not found", str(error))
    if not field:
      raise
    near = difflib.get_close_matches(field[1], _field_names(), n=3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    sys.exit(f"The config has no field {field[1]!r}.{hint} train/config.py lists them all.")
  except (ValueError, TypeError, OSError) as error:
    sys.exit(f"{error}")


def _field_names() -> list[str]:
  groups = (config.Config, config.ModelConfig, config.DataConfig, config.OptimizerConfig)
  return [f.name for group in (*groups, config.MeshConfig) for f in dataclasses.fields(group)]
