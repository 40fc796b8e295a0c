"""Calls Triton kernels from JAX; no other file knows the versions of jax-triton.

jax-triton 0.3 goes with triton 3.6, and 0.4 with triton 3.7. The matmul spills registers on sm_80
and sm_89 with triton 3.8, and the ptxas of CUDA 13.0 cannot read triton 3.9's PTX for Hopper.
Importing this file imports neither package.
"""

import functools
import importlib.metadata
import inspect
import types

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.interpreters import partial_eval

from sbjax.ops import device as devices


def triton_call(
  *operands, kernel, name, grid, out, num_warps, num_stages=1, in_place=None, **constants
):
  """Runs `kernel(*operands, *outputs, **constants)` in each of `grid` programs.

  A product and a sum are rounded apart: they are not fused into one instruction.

  Args:
    operands: arrays; all other arguments of a kernel are `tl.constexpr`.
    grid: the number of programs.
    out: the outputs, a pytree of jax.ShapeDtypeStruct.
    in_place: {operand: output}, by number, for outputs that take the memory of an operand. XLA
      copies the operand if it is still needed. If the kernel gets None for such an output, it
      writes to the operand.
  """
  jax_triton, old = _jax_triton()
  if isinstance(device := devices.target(), devices.Assumed):
    _assemble_for(devices.compute_capability(device.chip))
  call = functools.partial(
    jax_triton.triton_call,
    kernel=kernel,
    name=name,
    grid=(grid,),
    num_warps=num_warps,
    num_stages=num_stages,
    compute_capability=compute_capability(),
    **constants,
  )
  if old:
    return call(*operands, out_shape=out, enable_fp_fusion=False, input_output_aliases=in_place)
  call = functools.partial(call, backend_options={"enable_fp_fusion": False})
  if not in_place:
    return call(*operands, out_type=out)
  return _call_with_refs(call, operands, kernel.arg_names, out, in_place)


def _call_with_refs(call, operands, names, out, in_place):
  """For jax-triton 0.4, where an operand written in place is a Ref and no output of the kernel."""
  leaves, structure = jax.tree.flatten(out)
  fresh = {i: leaf for i, leaf in enumerate(leaves) if i not in in_place.values()}
  no_outputs = {names[len(operands) + i]: None for i in in_place.values()}

  def run(refs):
    arguments = [refs[in_place[i]] if i in in_place else a for i, a in enumerate(operands)]
    results = call(*arguments, out_type=list(fresh.values()), **no_outputs)
    for i, value in zip(fresh, results, strict=True):
      refs[i][...] = value

  # custom_partitioning cannot lower open Refs, so `run_state` closes them here.
  before = {i: jnp.zeros(leaf.shape, leaf.dtype) for i, leaf in fresh.items()}
  after = pl.run_state(run)(before | {j: operands[i] for i, j in in_place.items()})
  return jax.tree.unflatten(structure, [after[i] for i in range(len(leaves))])


def compute_capability() -> int:
  """80, 89, 90...: that of the device this trace is for."""
  capability = devices.compute_capability(device := devices.target())
  if capability is None:
    raise NotImplementedError(
      f"Triton kernels run on NVIDIA GPUs; JAX's default device is {device.platform!r}."
    )
  return capability


@functools.cache
def _jax_triton():
  """The module, and whether its version is below 0.4."""
  import jax_triton  # pyright: ignore[reportMissingImports]

  major, minor = importlib.metadata.version("jax-triton").split(".")[:2]
  old = (int(major), int(minor)) < (0, 4)
  if not old and jax.__version_info__ >= (0, 12):
    _adapt_dead_code_rule(jax_triton.triton_lib.triton_kernel_call_p)  # pyright: ignore
  return jax_triton, old


@functools.cache
def _assemble_for(capability: int) -> None:
  """From now on the driver assembles kernels for this chip; their PTX may be for an older one.

  jax-triton says PTX's compute capability in both places.
  """
  from jax_triton import triton_lib  # pyright: ignore[reportMissingImports]

  jaxlib, position = triton_lib.triton_kernel_call_lib, 6  # Of the argument `compute_capability`.

  def kernel(*args):
    return jaxlib.TritonKernel(*args[:position], capability, *args[position + 1 :])

  replaced = vars(jaxlib) | {"TritonKernel": kernel}
  triton_lib.triton_kernel_call_lib = types.SimpleNamespace(**replaced)


def _adapt_dead_code_rule(primitive):
  """JAX 0.12 calls dead-code rules with three arguments; jax-triton 0.4.1's has two."""
  rule = partial_eval.dce_rules[primitive]
  if len(inspect.signature(rule).parameters) == 2:
    partial_eval.dce_rules[primitive] = lambda used, live, eqn: rule(used, eqn)  # pyright: ignore
