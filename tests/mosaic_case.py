"""Mosaic kernels without a GPU: in Mosaic's interpreter, with what jax 0.11's lacks."""

import contextlib
import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
import pytest

needs_interpreter = pytest.mark.skipif(
  jax.__version_info__ < (0, 11), reason="Mosaic's interpreter needs jax >= 0.11 (Python >= 3.12)"
)


def interpreted(function, *args, **kwargs):
  """Calls a kernel with `interpret` set, and detects races."""
  from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

  with _complete():
    results = function(*args, interpret=plgpu.InterpretGPUParams(detect_races=True), **kwargs)
    results = jax.tree.map(np.asarray, results)
  assert not gpu_callbacks.get_races().races_found
  return results


_quiet = np.errstate(all="ignore")


@contextlib.contextmanager
def _complete():
  """The interpreter, patched."""
  from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret

  with pytest.MonkeyPatch.context() as patch:
    interpreter = jaxpr_interpret.JaxprInterpreter
    for name, replacement in (
      ("_interpret_wgmma_ref_p", _wgmma),
      ("_interpret_run_scoped_p", _run_scoped),
    ):
      native = getattr(interpreter, name)
      patch.setattr(interpreter, name, functools.partialmethod(replacement, native))
    patch.setattr(jaxpr_interpret, "resolve_ref", _resolve_ref)
    # A warning would be an error here, and the other threads would wait for ever.
    patch.setattr(gpu_callbacks, "wgmma", _quiet(gpu_callbacks.wgmma))
    yield


def _wgmma(interpreter, native, eqn, token, get_invals):
  """The interpreter takes a left operand in shared memory only, not one in registers."""
  from jax._src import callback
  from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
  from jax._src.state import types

  if isinstance(eqn.invars[1].aval, types.AbstractRef):
    return native(interpreter, eqn, token, get_invals)
  acc, a, b, *leaves = get_invals()
  b, transforms = _resolve_ref(
    eqn.invars[2].aval, b, jax.tree.unflatten(eqn.params["b_transforms_tree"], leaves)
  )
  where = {"mesh_location": interpreter.mesh_location, "thread": interpreter.thread}
  columns = eqn.invars[0].aval.shape[1]
  token, b = gpu_callbacks.call_get(
    token=token,
    result_shape_and_dtype=jax.ShapeDtypeStruct((a.shape[1], columns), a.dtype),
    allocation_key_as_array=b,
    transforms=transforms,
    source_info=eqn.source_info,
    **where,
  )
  add = functools.partial(_add_product, source_info=eqn.source_info)
  struct = gpu_callbacks.TOKEN_SHAPE_DTYPE
  return callback.io_callback(add, struct, token=token, acc=acc, a=a, b=b, **where), []


@_quiet
def _add_product(*, token, mesh_location, thread, acc, a, b, source_info):
  from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

  memory = gpu_callbacks._get_shared_memory()
  key = gpu_callbacks.HostAllocationKey.from_array(acc)
  at = memory.access(key, ())
  info = gpu_callbacks.memory.GPULoggingInfo(mesh_location, thread, source_info)
  total, _, _ = memory.get_buffer_content(key, at, thread, logging_info=info)
  total = total + np.matmul(np.asarray(a), np.asarray(b), dtype=total.dtype)
  memory.store_buffer_content(key, at, total, thread, logging_info=info)
  return token


def _run_scoped(interpreter, native, eqn, token, get_invals):
  """The interpreter needs something to allocate."""
  if eqn.params["jaxpr"].invars:
    return native(interpreter, eqn, token, get_invals)
  return interpreter.interpret(eqn.params["jaxpr"], token, *get_invals())


def _resolve_ref(aval, key, transforms):
  """The interpreter has a buffer for each name of a RefUnion; here all names have the first's."""
  from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret

  if not isinstance(aval, jaxpr_interpret.mosaic_gpu_core.AbstractRefUnion):
    return key, transforms
  return key[0], tuple(transforms[1:])
