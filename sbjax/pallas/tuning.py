"""Tables of tile configs: the fastest one for each device and matmul size.

A table is a JSONL file with one row for each size, as `python -m benchmarks.tune` writes it:

  {"kernel": "scaled_matmul_triton", "device": "NVIDIA A100-SXM4-80GB", "m": 65536, "n": 5120,
   "k": 1280, "config": {"block_n": 256, "num_stages": 4}}

`device` is a device kind as JAX names it, or a compute capability such as "sm_80". `config` has
the fields of the kernel's TileConfig that differ from their defaults. Other fields are ignored.
A kernel may ship a table. `SBJAX_TUNING=PATH` names the user's, which takes precedence and is read
once.
"""

import functools
import json
import math
import os
import re
import typing
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "SBJAX_TUNING"
KERNELS = ("scaled_matmul_sm90", "scaled_matmul_triton")
FIELDS = ("kernel", "device", "m", "n", "k", "config")
MANY_ROWS = 4096  # From this M on, a few blocks more or less make no difference.


def row_for(
  tables: Sequence[list[dict]], m: int, n: int, k: int, devices: Sequence[str], config_type: type
) -> dict | None:
  """The row for (n, k) that applies to m, from the first table and the first of `devices` with one.

  A row applies if its m makes as many blocks along M. A row whose m is at least MANY_ROWS also
  applies to every larger m, and down to half of its own; the nearest one counts.
  """
  for table in tables:
    for device in devices:
      rows = [row for row in table if (row["device"], row["n"], row["k"]) == (device, n, k)]
      for row in rows:
        block_m = config_type(**row["config"]).block_m
        if math.ceil(m / block_m) == math.ceil(row["m"] / block_m):
          return row
      many = [row for row in rows if MANY_ROWS <= row["m"] <= 2 * m]
      if many:
        return min(many, key=lambda row: (abs(math.log(row["m"] / m)), row["m"]))
  return None


def shipped_table(file: str) -> list[dict]:
  """The rows of the table beside a kernel's file; none if there is no table."""
  path = Path(file).with_suffix(".jsonl")
  return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def user_table(kernel: str, config_type: type) -> list[dict]:
  """The rows for this kernel in the file that SBJAX_TUNING names.

  Raises:
    ValueError: a row is wrong. The message has the file, line, field, and the values allowed.
  """
  path = os.environ.get(VARIABLE)
  return read_table(path, kernel, config_type) if path else []


@functools.cache
def read_table(path: str, kernel: str, config_type: type) -> list[dict]:
  try:
    lines = Path(path).read_text().splitlines()
  except OSError as error:
    raise ValueError(
      f"{VARIABLE}={path}: {error.strerror}. It must be a table made by"
      " `python -m benchmarks.tune --out PATH`."
    ) from None
  rows, first = [], {}
  for number, line in enumerate(lines, 1):
    if not line.strip():
      continue
    try:
      row = _checked(line, kernel, config_type)
      key = tuple(row[field] for field in FIELDS[:-1])
      if key in first:
        raise ValueError(f"the same kernel, device, m, n and k as in line {first[key]}; keep one.")
    except ValueError as error:
      raise ValueError(f"{VARIABLE}={path}, line {number}: {error}") from None
    first[key] = number
    if row["kernel"] == kernel:
      rows.append(row)
  return rows


def _checked(line: str, kernel: str, config_type: type) -> dict:
  try:
    row = json.loads(line)
  except json.JSONDecodeError as error:
    raise ValueError(f"not JSON from column {error.colno} on ({error.msg}).") from None
  if not isinstance(row, dict):
    raise ValueError(f"a row must be an object with the fields {', '.join(FIELDS)}.")
  for field in FIELDS:
    if field not in row:
      raise ValueError(f'"{field}" is missing; a row has the fields {", ".join(FIELDS)}.')
  if row["kernel"] not in KERNELS:
    raise ValueError(f'"kernel" must be {" or ".join(KERNELS)}, not {row["kernel"]!r}.')
  device = row["device"]
  if not isinstance(device, str) or not re.fullmatch(r"sm_\d{2,3}|(?!(?i:sm))[A-Za-z].*", device):
    raise ValueError(
      '"device" must be a device kind such as "NVIDIA L4" or a compute capability such as "sm_89",'
      f" not {device!r}."
    )
  for field in ("m", "n", "k"):
    if not _is_positive(row[field]):
      raise ValueError(f'"{field}" must be a positive integer, not {row[field]!r}.')
    if field != "m" and row[field] % 16:
      raise ValueError(f'"{field}" must be a multiple of 16, not {row[field]}.')
  if not isinstance(row["config"], dict):
    raise ValueError(f'"config" must be an object of TileConfig\'s fields, not {row["config"]!r}.')
  if row["kernel"] == kernel:  # Another kernel's TileConfig may not be importable here.
    _check_config(row["config"], config_type)
  return row


def _check_config(config: dict, config_type: type) -> None:
  hints = typing.get_type_hints(config_type)
  for field, value in config.items():
    if field not in hints:
      raise ValueError(f'"config" has no field "{field}"; its fields are {", ".join(hints)}.')
    allowed = _literals(hints[field])
    if allowed and value not in allowed:
      right = " or ".join(map(json.dumps, allowed))
      raise ValueError(f'"{field}" must be {right}, not {json.dumps(value)}.')
    if not allowed and not _is_positive(value):
      raise ValueError(f'"{field}" must be a positive integer, not {json.dumps(value)}.')
  config_type(**config)


def _literals(hint) -> list:
  """The values that a Literal or an optional Literal allows; none for a number."""
  if hint is type(None):
    return [None]
  if typing.get_origin(hint) is typing.Literal:
    return list(typing.get_args(hint))
  return [value for part in typing.get_args(hint) for value in _literals(part)]


def _is_positive(value) -> bool:
  return isinstance(value, int) and not isinstance(value, bool) and value > 0
