"""Every Triton kernel for Blackwell GPUs, compiled and assembled."""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.triton_case import SHARED_BYTES

ROOT = pathlib.Path(__file__).parents[2]
NAMES = {
  "_absmax_kernel", "_attention_backward_kernel", "_attention_forward_kernel", "_attention_kernel",
  "_attention_packed_keys_kernel", "_attention_queries_kernel", "_cast_kernel",
  "_gelu_backward_kernel", "_gelu_kernel", "_glu_backward_kernel", "_glu_kernel", "_kernel",
  "_norm_backward_kernel", "_norm_kernel", "_quantize_sum_kernel", "_rowwise_kernel",
  "_scaled_matmul_kernel",
}  # fmt: skip


@pytest.mark.parametrize("capability", [100, 120])
def test_every_triton_kernel_is_compiled_and_assembled_for_blackwell(capability):
  for package in ("triton", "jax_triton", "jax_cuda13_plugin"):
    pytest.importorskip(package, reason="the extra `aot` is not installed")
  command = [sys.executable, "-m", "tests.aot.blackwell", str(capability)]
  run = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
  assert run.returncode == 0, run.stderr[-5000:]
  kernels = json.loads(run.stdout.splitlines()[-1])
  assert {name for name, *_ in kernels} == NAMES
  for name, shared_bytes, target, _, error, spilled in kernels:
    assert (target, error) == (f"sm_{capability}a", ""), name
    assert shared_bytes <= SHARED_BYTES[capability], name
    assert spilled == 0 or (capability, name) == (120, "_attention_backward_kernel"), name
  matmuls = [made for name, _, _, made, *_ in kernels if name == "_scaled_matmul_kernel"]
  instructions = {instruction for made in matmuls for instruction in made}
  fp8 = "tcgen05.mma.cta_group::1.kind::f8f6f4" if capability == 100 else "e4m3.e4m3"
  assert any("s32.s8.s8" in one for one in instructions)
  assert any(fp8 in one for one in instructions)
