"""Triton kernels without a GPU: interpreted, or compiled to machine code."""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, use_abstract_mesh

from benchmarks.absent_gpu import Device
from sbjax.pallas import triton

# The limit of a thread block.
SHARED_BYTES = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376}


@functools.cache
def interpreted(name):
  """A second copy of sbjax.pallas.<name> whose kernels are interpreted on numpy arrays."""
  pytest.importorskip("triton", reason="the extra `aot` is not installed")
  from triton.runtime import interpreter

  # triton/quantize_sum.py imports it, and would load it interpreted.
  importlib.import_module("sbjax.pallas.triton.quantize")
  # Triton's version truncates float32 to bfloat16 and does not round to fp8 as GPUs do.
  interpreter._convert_float = _convert_float
  # Triton's version calls a function for each element.
  interpreter.ReduceOps.generic_reduce = _reduce
  # Triton's version multiplies the bits of bfloat16.
  interpreter.InterpreterBuilder.create_dot = _dot
  # Triton's version raises an error.
  interpreter.InterpreterBuilder.create_inline_asm = _inline_asm
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TRITON_INTERPRET", "1")  # Read by @triton.jit.
    # What the module imports from these is interpreted too.
    for shared in ("rounding", "activations", "attention_parts", "attention_tiles"):
      copy = _interpreted_copy(f"sbjax.pallas.triton.{shared}")
      patch.setitem(sys.modules, copy.__name__, copy)
      patch.setattr(triton, shared, copy, raising=False)
    return _interpreted_copy(f"sbjax.pallas.{name}")


def _interpreted_copy(name):
  module = _second_copy(name)
  module.triton_call = _interpret
  module.compute_capability = lambda: 90
  return module


def _second_copy(name):
  spec = importlib.util.find_spec(name)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def loaded(name):
  """sbjax.pallas.<name>, or a skip if its imports are missing."""
  for package in ("triton", "jax_triton", "jax_cuda13_plugin"):
    pytest.importorskip(package, reason="the extra `aot` is not installed")
  return importlib.import_module(f"sbjax.pallas.{name}")


def _interpret(
  *operands, kernel, name, grid, out, num_warps, num_stages=1, in_place=None, **constants
):
  """`sbjax.pallas.triton.call.triton_call` in the interpreter; outputs start with wrong values.

  A kernel that writes in place runs twice: with the operand also as an output, as jax-triton 0.3
  passes it, and with None for that output, as 0.4 does.
  """
  del name, num_warps, num_stages
  aliases = in_place or {}

  def run(as_new):
    inputs = [_Tensor(np.array(a)) for a in operands]
    outputs = [_Tensor(np.full(a.shape, 85, a.dtype)) for a in jax.tree.leaves(out)]
    given = list(outputs)
    for operand, output in aliases.items():
      outputs[output] = inputs[operand]
      given[output] = None if as_new else inputs[operand]
    with np.errstate(all="ignore"):
      kernel[(grid,)](*inputs, *given, **constants)
    return [a.array for a in outputs]

  def same_bits(a, b):
    np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))

  results = run(as_new=False)
  if aliases:
    jax.tree.map(same_bits, results, run(as_new=True))
  return jax.tree.unflatten(jax.tree.structure(out), [jnp.asarray(a) for a in results])


class _Tensor:
  """The part of torch.Tensor that the interpreter uses."""

  def __init__(self, array):
    self.array = array

  dtype = property(lambda self: _TorchName(self.array.dtype.name))

  def data_ptr(self):
    return self.array.ctypes.data

  def untyped_storage(self):
    return self

  def cpu(self):
    return self

  def new_empty(self, *_, **__):
    return _Tensor(None)

  def set_(self, storage, *_):
    self.array = storage.array

  def copy_(self, other):
    assert other.array is self.array

  def storage_offset(self):
    return 0

  def size(self):
    return self.array.shape

  def stride(self):
    return ()


class _TorchName(str):
  def __str__(self):
    return f"torch.{super().__str__()}"


_ML_DTYPES = {
  "bf16": ml_dtypes.bfloat16,
  "fp8e4nv": ml_dtypes.float8_e4m3fn,
  "fp8e5": ml_dtypes.float8_e5m2,
  "fp16": np.float16,
  "fp32": np.float32,
}


def _convert_float(data, from_dtype, to_dtype, rounding_mode):
  """Rounds half to even, as ml_dtypes and GPUs do; takes and returns bits."""
  del rounding_mode
  values = np.ascontiguousarray(data).view(_ML_DTYPES[from_dtype.name])
  bits = np.dtype(f"uint{to_dtype.primitive_bitwidth}")
  with np.errstate(all="ignore"):
    return values.astype(_ML_DTYPES[to_dtype.name]).view(bits)


def _dot(builder, a, b, sums, *_):
  from triton.runtime.interpreter import TensorHandle

  def values(x):
    dtype = _ML_DTYPES.get(x.dtype.scalar.name, x.data.dtype)
    return np.ascontiguousarray(x.data).view(dtype).astype(sums.data.dtype)

  return TensorHandle(np.matmul(values(a), values(b)) + sums.data, sums.dtype.scalar)


def _inline_asm(builder, asm, constraints, values, *_):
  """The one instruction that kernels write as text."""
  from triton.runtime.interpreter import TensorHandle

  del builder, constraints
  assert asm == "lg2.approx.f32 $0, $1;"
  result = TensorHandle(np.log2(values[0].data), values[0].dtype)
  return types.SimpleNamespace(get_result=lambda i: result)


def _reduce(operation, inputs):
  """Combines halves with halves, as threads do; the size of a Triton axis is a power of two."""
  tensors, axis = operation.unravel(inputs, operation.axis)
  dtypes, arrays = [t.dtype for t in tensors], [t.handle.data for t in tensors]
  while arrays[0].shape[axis] > 1:
    halves = zip(*(np.split(array, 2, axis) for array in arrays), strict=True)
    pairs = [map(operation.to_tensor, half, dtypes) for half in halves]
    combined = operation.combine_fn.fn(*pairs[0], *pairs[1])
    arrays = [t.handle.data for t in (combined if len(arrays) > 1 else (combined,))]
  results = [np.squeeze(array, axis)[()] for array in arrays]
  return list(map(operation.to_tensor, results, dtypes))


def cast_by_way_of_float16(monkeypatch):
  """Makes the interpreter cast to fp8 like Triton on sm_89: it truncates float32, then rounds."""
  from triton.runtime import interpreter

  def convert(data, from_dtype, to_dtype, rounding_mode):
    if from_dtype.name == "fp32" and to_dtype.name.startswith("fp8"):
      # float16 keeps 10 of 23 bits; its subnormals are below both formats' values.
      data = (np.ascontiguousarray(data).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return _convert_float(data, from_dtype, to_dtype, rounding_mode)

  monkeypatch.setattr(interpreter, "_convert_float", convert)


def gpu(capability, cores=None):
  return Device("NVIDIA", cores, "gpu", f"{capability // 10}.{capability % 10}")


@contextlib.contextmanager
def chip(capability, cores=None):
  """Traces for one NVIDIA GPU of this capability: 80, 89, 90..."""
  device = gpu(capability, cores)
  with use_abstract_mesh(AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)):
    yield


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A compiled kernel: its PTX, and the memory that ptxas reports."""

  ptx: str
  shared_bytes: int
  spilled_bytes: int

  def count(self, pattern):
    return len(re.findall(pattern, self.ptx))


def compiled(monkeypatch, tmp_path, capability, function, *arguments):
  """The kernels that `function` calls, lowered for a GPU and assembled by ptxas.

  jax-triton does not compile a kernel twice, so each test needs shapes of its own.
  """
  monkeypatch.setattr("jax_triton.triton_lib._JAX_TRITON_DUMP_DIR", str(tmp_path))
  with chip(capability):
    jax.jit(lambda *a: function(*a)).trace(*arguments).lower(lowering_platforms=("cuda",))
  return [_assembled(path, capability) for path in tmp_path.rglob("*.ptx")]


def assemble(path, capability):
  """Runs CUDA's assembler: the machine's, or Triton's, whose PTX for Blackwell is newer."""
  import triton

  bundled = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"
  ours = shutil.which("ptxas") or bundled / "ptxas"
  arch = f"sm_{capability}{'a' if capability >= 90 else ''}"
  ptxas = bundled / "ptxas-blackwell" if capability >= 100 else ours
  command = [ptxas, f"-arch={arch}", "-v", path, "-o", os.devnull]
  return subprocess.run(command, capture_output=True, text=True)


def _assembled(path, capability):
  run = assemble(path, capability)
  assert run.returncode == 0, run.stderr
  info = path.with_suffix(".compile_info").read_text()
  return Kernel(
    ptx=path.read_text(),
    shared_bytes=int(re.search(r"shared_mem_bytes: (\d+)", info)[1]),
    spilled_bytes=int(re.search(r"(\d+) bytes spill stores", run.stderr)[1]),
  )
