"""open_clip, for the tests that compare with it (`@pytest.mark.interop`)."""

import importlib
import warnings

import pytest


def import_open_clip():
  """The open_clip module; the test is skipped where the `interop` extra is not installed."""
  pytest.importorskip("torch", reason="needs the `interop` extra")
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    _import_torchvision()
    return pytest.importorskip("open_clip", reason="needs the `interop` extra")


_DECLARED = []  # Operators stay declared as long as their library object lives.


def _import_torchvision():
  """open_clip imports torchvision, and PyPI's torchvision, built against a CUDA torch, does not
  import beside a CPU torch: its operators fail to load, and it then describes two that are not
  there. open_clip needs neither, so declaring them is enough."""
  import torch

  try:
    importlib.import_module("torchvision")
  except RuntimeError as error:
    if "torchvision::nms does not exist" not in str(error):
      raise
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
      library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _DECLARED.append(library)
    importlib.import_module("torchvision")
