"""What the processes of one run must have in common; what differs is named by every process.

JAX checks none of it: processes with two seeds, two versions of a file or two data sets train to
the end, each its own model, or one waits for the other for ever. Before JAX starts, processes.meet
compares what `described` returns. Later, `check` compares what each process found on its disk.
"""

import collections
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import re
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from jax._src import distributed

import sbjax
from sbjax.ops import device
from train.config import Config, flat, marked
from train.errors import RunError
from train.fields import PER_PROCESS

PATIENCE = 24 * 3600.0  # seconds; another process may import a data set meanwhile
_MINUTE, _TICK = 60.0, 1.0
_LATE = 10.0  # seconds after which a network file system shows a new file

_OPTIONS = (
  "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl",
  "jax_threefry_partitionable", "jax_numpy_dtype_promotion", "jax_disable_jit",
)  # fmt: skip
_LISTED = 10  # that many differences are listed
_calls = itertools.count()  # The same in all processes, as they make the same calls.


def described(config: Config) -> dict[str, object]:
  """What must be the same in all processes: the program, config, code, versions and options."""
  config_fields, own = flat(config.to_dict()), marked(PER_PROCESS)
  return {
    "the program": Path(sys.argv[0]).name,
    **{f"config.{name}": v for name, v in config_fields.items() if name not in own},
    **{f"the file {name}": digest for name, digest in _sources().items()},
    "the version of Python": platform.python_version(),
    **{f"the version of {name}": version for name, version in _versions().items()},
    **{name: str(jax.config.values[name]) for name in _OPTIONS if name in jax.config.values},
    "XLA_FLAGS": _xla_flags(),
    device.VARIABLE: os.environ.get(device.VARIABLE),
  }


def _sources() -> dict[str, str]:
  """A digest of each Python file of the library and of the training program."""
  folders = [Path(sbjax.__file__).parent, Path(__file__).parent]
  return {
    str(path.relative_to(folder.parent)): hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    for folder in folders
    for path in sorted(folder.rglob("*.py"))
  }


def _versions() -> dict[str, str | None]:
  """The versions of the packages that training needs; None for one that is not there."""
  try:
    needed = importlib.metadata.requires("sbjax") or []
  except importlib.metadata.PackageNotFoundError:  # A clone that nobody installed.
    needed = ["jax", "flax", "optax", "numpy"]
  names = {"jaxlib"} | {
    re.match(r"[\w.-]+", line)[0]
    for line in needed
    if "extra ==" not in line or re.search(r"extra == .(train|cuda|triton)\b", line)
  }
  return {name: _version(name) for name in sorted(names)}


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _xla_flags() -> list[str]:
  """Those of XLA's flags that name no file: each process may have its own to dump to."""
  return sorted(flag for flag in os.environ.get("XLA_FLAGS", "").split() if "/" not in flag)


def difference(descriptions: Sequence[dict[str, object]]) -> str:
  """A sentence with what differs between the descriptions of processes 0, 1, ...; "" if nothing."""
  names = dict.fromkeys(name for description in descriptions for name in description)
  found = []
  for name in names:
    owners = collections.defaultdict(list)
    for index, description in enumerate(descriptions):
      owners[json.dumps(description.get(name), sort_keys=True)].append(index)
    if len(owners) > 1:
      values = (f"{value} in {_processes(indices)}" for value, indices in owners.items())
      found.append(f"  {name}: {'; '.join(values)}")
  if not found:
    return ""
  more = [f"  and {len(found) - _LISTED} more"] if len(found) > _LISTED else []
  return "\n".join(
    ["The processes of a run must agree, and these do not:", *found[:_LISTED], *more]
  )


def _processes(indices: Sequence[int]) -> str:
  """process 3; processes 0 to 6, 9."""
  runs = []
  for i in indices:
    if runs and runs[-1][1] == i - 1:
      runs[-1][1] = i
    else:
      runs.append([i, i])
  named = ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in runs)
  return f"process {named}" if len(indices) == 1 else f"processes {named}"


def gather(what: str, value) -> list:
  """A JSON value of each process, in order; all must call this at the same point.

  It needs no device, so steps may run meanwhile. A process says each minute for whom all wait.

  what: the work of the others that the wait is for, for its messages.

  Raises:
    RunError: a process does not come within a day.
  """
  count, index = jax.process_count(), jax.process_index()
  if count == 1:
    return [json.loads(json.dumps(value))]
  client, key = distributed.global_state.client, f"sbjax/{next(_calls)}"
  client.key_value_set(f"{key}/{index}", json.dumps(value))
  if index:
    _awaited(f"{key}/0", f"{what} of process 0", says=index == 1)
    return json.loads(_awaited(f"{key}/all", f"{what} of all processes", says=False))
  texts = [_awaited(f"{key}/{i}", f"{what} of process {i}", says=True) for i in range(count)]
  client.key_value_set(f"{key}/all", f"[{','.join(texts)}]")
  return [json.loads(text) for text in texts]


def _awaited(key: str, what: str, says: bool) -> str:
  """The text at a key of the store that process 0 holds, as soon as it is there."""
  client, waited = distributed.global_state.client, 0.0
  while waited < PATIENCE:
    try:
      return client.blocking_key_value_get(key, int(1000 * _TICK))  # Signals are handled between.
    except jax.errors.JaxRuntimeError as error:
      if "DEADLINE_EXCEEDED" not in str(error):
        raise
    waited += _TICK
    if waited % _MINUTE < _TICK and says:
      print(f"Waiting for {what} for {waited / 60:.0f} min.", file=sys.stderr, flush=True)
  raise RunError(
    f"Process {jax.process_index()} waited {PATIENCE / 3600:.0f} hours for {what}, and ends."
  )


def check(what: str, facts: Callable[[], dict[str, object]]) -> None:
  """Raises the same RunError in all processes if their facts differ; one alone needs none."""
  if jax.process_count() > 1 and (differs := difference(gather(what, facts()))):
    raise RunError(differs)


def check_folder(folder: Path, field: str) -> None:
  """Raises in all processes unless they can write to one and the same folder.

  field: the flag that names it.
  """
  if jax.process_count() == 1:
    return
  token = gather("the start", secrets.token_hex(8))[0]
  paths = [folder / f".{token}-{i}" for i in range(jax.process_count())]
  path = paths[jax.process_index()]
  reason = ""
  try:
    path.touch()
  except OSError as error:
    reason = error.strerror or str(error)
  try:
    reasons = gather("a file in the work directory", reason)
    if any(reasons):
      failed = (f"{_processes([i])}: {text}" for i, text in enumerate(reasons) if text)
      raise RunError(f"{field}={folder} cannot be written to, in {'; '.join(failed)}.")
    late = time.monotonic() + _LATE
    missing = [i for i, other in enumerate(paths) if not _there(other, until=late)]
    views = gather("a look at the work directory", missing)
  finally:
    if not reason:
      path.unlink(missing_ok=True)
  if blind := {i: view for i, view in enumerate(views) if view}:
    index, view = next(iter(blind.items()))
    raise RunError(
      f"{field}={folder} must be one folder that all processes share: process {index} does not see"
      f" the file of {_processes(view)} there."
    )


def _there(path: Path, until: float) -> bool:
  """Whether a file of another process is seen; a network file system may show it late."""
  while not path.exists():
    if time.monotonic() > until:
      return False
    time.sleep(0.2)
  return True
