"""Imports open_clip for tests that compare with it (`@pytest.mark.interop`)."""

import warnings

import pytest

from benchmarks.data_open_clip import import_torchvision


def import_open_clip():
  """The open_clip module; the test is skipped where the `interop` extra is not installed."""
  pytest.importorskip("torch", reason="needs the `interop` extra")
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import_torchvision()
    return pytest.importorskip("open_clip", reason="needs the `interop` extra")
