"""The Triton kernels that JAX gets, and whether CUDA's assembler takes them."""

import dataclasses
import re
import tempfile

from jax_triton import triton_lib

from tests.triton_case import assemble


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A compiled kernel: what its PTX is made for, and what JAX assembles it for."""

  name: str
  shared_bytes: int
  ptx: str
  capability: int  # 80, 89, 90...

  @property
  def target(self) -> str:
    return re.search(r"\.target (\w+)", self.ptx)[1]

  def assembled(self) -> tuple[str, int]:
    """What ptxas says against it, or "", and how many bytes of registers it spills."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
      file.write(self.ptx)
      file.flush()
      run = assemble(file.name, self.capability)
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", run.stderr)))
    return run.stderr if run.returncode else "", spilled


def kernels() -> list[Kernel]:
  """Gets each kernel from now on."""
  found, jaxlib = [], triton_lib.triton_kernel_call_lib
  make = jaxlib.TritonKernel

  def noting(name, warps, ctas, shared_bytes, ptx, ttir, capability, *args):
    found.append(Kernel(name, shared_bytes, ptx, capability))
    return make(name, warps, ctas, shared_bytes, ptx, ttir, capability, *args)

  jaxlib.TritonKernel = noting
  return found
