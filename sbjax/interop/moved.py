"""Names of version 0.1's first form: they work, with a DeprecationWarning that says the new one."""

import importlib
import importlib.abc
import importlib.util
import sys
import warnings
from typing import Any

_FOLDERS = {
  "ops": ("by_rows", "device", "dither", "matmul", "partition"),
  "linear": ("dot_general", "fused", "grouped", "layers", "quantized_dot"),
  "convert": ("quantize_model", "rewrite"),
  "optim": ("collage", "loss_scale", "stable_adamw", "state_formats"),
  "distributed": ("exchange", "fsdp"),
  "studies": ("fp4", "unit_scaling"),
  "interop": ("serialization",),
}
MODULES = {name: f"{folder}.{name}" for folder, names in _FOLDERS.items() for name in names} | {
  "attention_ops": "ops.attention",
  "backends": "ops.registry",
  "expansion": "ops.adam",
  "formats": "quantize",
  "fused_ops": "ops.rows",
  "products": "convert.matmuls",
  "quantized_einsum": "convert.quantize_model",
  "split_k_matmul": "ops.split_k",
  "models.config_files": "interop.config_files",
  "models.convert": "interop.weights",
  "models.hf_config": "interop.config_files",
  "models.layouts": "interop.layouts",
  "models.serving": "interop.serving",
  "models.weight_files": "interop.files",
}
NAMES = {
  "LayerNormParams": "ops.rows",
  "LayerScale": "linear.layers",
  "QuantizedWeight": "linear.weight",
  "fp8_cscale": "recipes",
  "gather": "distributed.fsdp",
  "gather_weight": "distributed.fsdp",
  "layer_norm_dense": "linear.fused",
  "layer_norm_mlp": "linear.fused",
  "quantize_weight": "linear.weight",
  "quantized_einsum": "convert.quantize_model",
  "quantized_psum": "distributed.exchange",
  "quantized_psum_scatter": "distributed.exchange",
}


def attribute(name: str) -> Any:
  """What was `sbjax.<name>`; an AttributeError for what never was."""
  if name in NAMES:
    value = getattr(importlib.import_module(f"sbjax.{NAMES[name]}"), name)
    _warn(f"sbjax.{name}", f"sbjax.{NAMES[name]}.{name}")
    return value
  raise AttributeError(f"module 'sbjax' has no attribute {name!r}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Finds a module's new place by its old name."""

  def find_spec(self, fullname, path=None, target=None):
    root, _, name = fullname.partition(".")
    if root != "sbjax" or name not in MODULES:
      return None
    return importlib.util.spec_from_loader(fullname, self)

  def create_module(self, spec):
    new = f"sbjax.{MODULES[spec.name.partition('.')[2]]}"
    module = importlib.import_module(new)
    _warn(spec.name, new)
    self._own = module, module.__spec__
    return module

  def exec_module(self, module):
    module, module.__spec__ = self._own  # The import system has put the old name there.


def _warn(old: str, new: str) -> None:
  warnings.warn(f"{old} is now {new}; the old name goes in 0.2.", DeprecationWarning, stacklevel=2)


def install() -> None:
  """Lets imports of old modules find the new ones."""
  sys.meta_path.append(_Finder())
  for name in ("quantize_model", "quantized_dot", "quantized_einsum", "stable_adamw"):
    # Functions of sbjax have these names: an import of a submodule would hide them.
    sys.modules[f"sbjax.{name}"] = importlib.import_module(f"sbjax.{MODULES[name]}")
