"""Files of PyTorch's state dicts: safetensors, torch's own, and OpenAI's TorchScript archives."""

import importlib
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
# The weights in a folder, in the order in which they are looked for.
WEIGHT_FILES = (
  *("open_clip_model.safetensors", "open_clip_pytorch_model.safetensors"),
  *("open_clip_pytorch_model.bin", "model.safetensors", "model.safetensors.index.json"),
  *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
_INDEX = ".index.json"  # Names the shard of each tensor, and lies beside the shards.


def is_weights(path: str | os.PathLike) -> bool:
  """Whether a path ends as a file of weights does, or as an index of shards."""
  return os.fspath(path).removesuffix(_INDEX).endswith(WEIGHT_SUFFIXES)


def read_file(source: str | os.PathLike) -> dict:
  """What a file, an index of shards or a folder's first of WEIGHT_FILES holds.

  Raises:
    ValueError: there is no such file or folder, it cannot be read, or its suffix is unknown.
    ImportError: torch or safetensors is not installed.
  """
  path = Path(source).expanduser()
  if not path.suffix and not path.exists():
    known = ", ".join(WEIGHT_SUFFIXES)
    raise ValueError(f"There is no folder {path}; a file ends in one of {known}.")
  if path.is_dir():
    found = [path / name for name in WEIGHT_FILES if (path / name).is_file()]
    if not found:
      raise ValueError(f"{path} has no weights: expected {', '.join(WEIGHT_FILES)}.")
    path = found[0]
  return _read_shards(path) if path.name.endswith(_INDEX) else _read_file(path)


def _read_shards(index: Path) -> dict:
  """The tensors that an index names, each from its shard."""
  try:
    shards = json.loads(index.read_bytes())["weight_map"]
    names: dict[str, list[str]] = {}
    for tensor, shard in shards.items():
      names.setdefault(shard, []).append(tensor)
  except FileNotFoundError:
    raise ValueError(f"There is no file {index}: expected an index of shards.") from None
  except (ValueError, KeyError, TypeError, AttributeError):
    raise ValueError(f"{index} is no index of shards: expected a weight_map in JSON.") from None
  if strange := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
    raise ValueError(f"{index} names the shard {strange[0]!r}: expected a file beside it.")
  if missing := [shard for shard in names if not (index.parent / shard).is_file()]:
    raise ValueError(f"{index} names {', '.join(missing)}, which is not beside it: copy it there.")
  state = {}
  for shard, tensors in names.items():
    held = _read_file(index.parent / shard)
    if absent := [tensor for tensor in tensors if tensor not in held]:
      raise ValueError(f"{index.parent / shard} lacks {absent[0]}, which {index.name} says it has.")
    state |= {tensor: held[tensor] for tensor in tensors}
  return state


def _read_file(path: Path) -> dict:
  suffix = file_suffix(path)
  if not path.is_file():
    raise ValueError(f"There is no file {path}: expected a state dict ({suffix}).")
  # safetensors through torch, since numpy lacks bfloat16.
  package = import_package("safetensors.torch" if suffix == ".safetensors" else "torch")
  try:
    if suffix == ".safetensors":
      return package.load_file(path)
    if _is_torchscript(path):  # OpenAI's own files.
      return package.jit.load(path, map_location="cpu").state_dict()
    state = package.load(path, map_location="cpu", weights_only=True)
  except (OSError, MemoryError):
    raise
  except Exception as error:  # Broken files raise many kinds, such as EOFError.
    reason = f"{type(error).__name__} {str(error).partition('. ')[0]}".strip()
    raise ValueError(
      f"{path} cannot be read: {reason}. Is it a whole download, and does it hold tensors only?"
    ) from error
  if not isinstance(state, Mapping):
    raise ValueError(f"{path} holds a {type(state).__name__}, and no state dict.")
  return dict(state)


def _is_torchscript(path: Path) -> bool:
  if not zipfile.is_zipfile(path):
    return False
  with zipfile.ZipFile(path) as archive:
    return any(name.endswith("/constants.pkl") for name in archive.namelist())


def write_file(state: dict[str, np.ndarray], path: str | os.PathLike) -> None:
  """Writes arrays by name, in the format of the path's suffix.

  Raises:
    ValueError: the suffix is unknown.
    ImportError: torch or safetensors is not installed.
  """
  path = Path(path).expanduser()
  if file_suffix(path) == ".safetensors":
    # transformers refuses a file that does not say this.
    import_package("safetensors.numpy").save_file(state, path, metadata={"format": "pt"})
  else:
    torch = import_package("torch")
    torch.save({name: torch.from_numpy(array) for name, array in state.items()}, path)


def file_suffix(path: str | os.PathLike) -> str:
  """The suffix of a file of weights, with its dot; a ValueError if no such file has it."""
  suffix = os.path.splitext(path)[1]
  if suffix not in WEIGHT_SUFFIXES:
    raise ValueError(f"{os.fspath(path)!r} must end in one of {', '.join(WEIGHT_SUFFIXES)}.")
  return suffix


def import_package(name: str):
  """The package that reads and writes a file, or one of its modules.

  Raises:
    ImportError: it is not installed.
  """
  try:
    return importlib.import_module(name)
  except ImportError as error:
    package = (error.name or name).partition(".")[0]
    raise ImportError(
      f"This file needs {package}: install it, or the extra `interop` (sbjax[interop])."
    ) from error
