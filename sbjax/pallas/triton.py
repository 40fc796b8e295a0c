"""Calling Triton kernels from JAX: the one place that knows jax-triton's versions.

jax-triton 0.3 goes with triton 3.6, and 0.4 with triton 3.7. Triton 3.8 keeps too much of a matmul
in registers on sm_80 and sm_89 (it spills), and what 3.9 writes for Hopper, the ptxas of CUDA 13.0
does not read. Importing this file imports neither package.
"""

import functools
import importlib.metadata
import importlib.util
import inspect

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.interpreters import partial_eval

from sbjax import device as devices


def triton_call(
  *operands, kernel, name, grid, out, num_warps, num_stages=1, in_place=None, **constants
):
  """Runs `kernel(*operands, *outputs, **constants)` on each program of the one-axis grid.

  A product and a sum stay two roundings: nothing is contracted to a fused multiply-add.

  Args:
    operands: arrays; a kernel takes all else as `tl.constexpr`.
    grid: the number of programs.
    out: the outputs, jax.ShapeDtypeStruct each.
    in_place: which operand's memory an output takes, by their numbers; XLA copies the operand
      where it is still needed. Where the kernel gets None for such an output it writes to the
      operand.
  """
  jax_triton, old = _jax_triton()
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
  """As jax-triton 0.4 has it: what is written in place is a Ref, and no output of the kernel."""
  leaves, structure = jax.tree.flatten(out)
  fresh = {i: leaf for i, leaf in enumerate(leaves) if i not in in_place.values()}
  left_out = {names[len(operands) + i]: None for i in in_place.values()}

  def run(refs):
    arguments = [refs[in_place[i]] if i in in_place else a for i, a in enumerate(operands)]
    found = call(*arguments, out_type=list(fresh.values()), **left_out)
    for i, value in zip(fresh, found, strict=True):
      refs[i][...] = value

  # Refs that end here: what partitions a program over devices lowers no others.
  before = {i: jnp.zeros(leaf.shape, leaf.dtype) for i, leaf in fresh.items()}
  after = pl.run_state(run)(before | {j: operands[i] for i, j in in_place.items()})
  return jax.tree.unflatten(structure, [after[i] for i in range(len(leaves))])


def compute_capability() -> int:
  """80, 89, 90...: of the chip that this trace is for."""
  found = devices.compute_capability(device := devices.target())
  if found is None:
    raise NotImplementedError(
      f"Triton kernels run on NVIDIA GPUs; JAX's default device is {device.platform!r}."
    )
  return found


@functools.cache
def _jax_triton():
  """The module, and whether it is one before 0.4."""
  missing = [m for m in ("triton", "jax_triton") if importlib.util.find_spec(m) is None]
  if missing:
    raise NotImplementedError(
      f"Triton kernels need {' and '.join(missing)}: pip install 'sbjax[cuda]'."
    )
  import jax_triton  # pyright: ignore[reportMissingImports]

  major, minor = importlib.metadata.version("jax-triton").split(".")[:2]
  old = (int(major), int(minor)) < (0, 4)
  if not old and jax.__version_info__ >= (0, 12):
    _adapt_dead_code_rule(jax_triton.triton_lib.triton_kernel_call_p)  # pyright: ignore
  return jax_triton, old


def _adapt_dead_code_rule(primitive):
  """jax-triton 0.4.1 has a rule of two arguments where JAX 0.12 calls it with three."""
  rule = partial_eval.dce_rules[primitive]
  if len(inspect.signature(rule).parameters) == 2:
    partial_eval.dce_rules[primitive] = lambda used, live, eqn: rule(used, eqn)  # pyright: ignore
