"""Names of the library's first form still work, and say the new ones."""

import importlib
import subprocess
import sys

import pytest

import sbjax
from sbjax.interop import moved

# In sbjax these are functions: their modules are there without a warning.
QUIET = ("quantize_model", "quantized_dot", "quantized_einsum", "stable_adamw")


@pytest.mark.parametrize("old", sorted(moved.MODULES))
def test_an_old_module_is_the_new_one(old, monkeypatch):
  new = importlib.import_module(f"sbjax.{moved.MODULES[old]}")
  spec = new.__spec__
  if old in QUIET:
    assert importlib.import_module(f"sbjax.{old}") is new
    return
  monkeypatch.delitem(sys.modules, f"sbjax.{old}", raising=False)
  with pytest.warns(DeprecationWarning, match=rf"sbjax\.{old} is now {new.__name__};"):
    assert importlib.import_module(f"sbjax.{old}") is new
  monkeypatch.delitem(sys.modules, f"sbjax.{old}")
  assert new.__spec__ is spec


@pytest.mark.parametrize("name", sorted(moved.NAMES))
def test_an_old_name_is_that_of_its_module(name):
  with pytest.warns(DeprecationWarning, match=f"sbjax.{name} is now sbjax.{moved.NAMES[name]}."):
    found = getattr(sbjax, name)
  assert found is getattr(importlib.import_module(f"sbjax.{moved.NAMES[name]}"), name)
  assert name not in sbjax.__all__


def test_a_name_that_never_was_is_an_attribute_error():
  assert not hasattr(sbjax, "quantise")


def test_functions_are_not_hidden_by_their_old_modules():
  program = """
import sbjax
from sbjax.stable_adamw import tensor_rms
from sbjax.quantized_dot import DOT_NAME
from sbjax.quantize_model import quantized_einsum
import sbjax.quantized_dot
assert all(callable(f) for f in (sbjax.stable_adamw, sbjax.quantized_dot, sbjax.quantize_model))
"""
  subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
