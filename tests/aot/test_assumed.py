"""An H200 that is to compute as an A100, absent: whose kernels, for which chip."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from sbjax.ops.device import VARIABLE
from tests.aot.test_aot import HAS_MOSAIC, KERNELS, TRITON, own

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def proofs():
  """What tests/aot/assumed.py found, by the capability that was assumed."""
  for package in ("jax_cuda13_plugin", "jax_plugins.xla_cuda13", "triton", "jax_triton"):
    pytest.importorskip(package, reason="the extra `aot` is not installed")
  return {number: proof(number) for number in ("80", "")}


def proof(number):
  environment = os.environ | {"JAX_PLATFORMS": "cpu", VARIABLE: number}
  command = [sys.executable, "-m", "tests.aot.assumed"]
  run = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
  assert run.returncode == 0, run.stderr[-5000:]
  return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(("number", "target"), [("80", "sm_80"), ("", "sm_90a")])
def test_kernels_are_made_for_the_assumed_chip_and_assembled_for_the_own(proofs, number, target):
  kernels = [kernel for case in proofs[number].values() for kernel in case["kernels"]]
  names = {name for name, *_ in kernels}
  assert {"_cast_kernel", "_gelu_backward_kernel", "_attention_queries_kernel"} <= names
  assert ("_scaled_matmul_kernel" in names) == (bool(number) or not HAS_MOSAIC)  # Else Mosaic's.
  for name, *made in kernels:
    assert made == [target, 90, ""], name


def test_only_an_assumed_a100_has_no_mosaic_kernels(proofs):
  for number, expected in {"80": {TRITON}, "": KERNELS[90]}.items():
    called = {name: own(case["targets"]) for name, case in proofs[number].items()}
    assert called == dict.fromkeys(called, expected) | {"attention": {TRITON}}


def test_only_an_assumed_a100_has_no_kernels_of_fp8(proofs):
  names = {
    number: {name for name, *_ in case["fp8_switchback"]["kernels"]}
    for number, case in proofs.items()
  }
  # Layer norm's gradient is a kernel in every recipe.
  assert names["80"] == {"_norm_backward_kernel"}
  assert names[""] > {"_norm_backward_kernel", "_cast_kernel", "_gelu_backward_kernel"}
