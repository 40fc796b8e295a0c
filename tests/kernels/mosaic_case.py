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

  # TMA operations that share a clock would seem to be ordered.
  params = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=997)
  with _complete():
    results = function(*args, interpret=params, **kwargs)
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
    state = gpu_callbacks.GPURaceDetectionState
    for name, is_write in (("check_read", False), ("check_write", True)):
      check = functools.partialmethod(_check, getattr(state.__base__, name), is_write)
      patch.setattr(state, name, check)
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
  multiply = functools.partial(_multiply, source_info=eqn.source_info)
  struct = gpu_callbacks.TOKEN_SHAPE_DTYPE
  token = callback.io_callback(
    multiply, struct, token=token, acc=acc, a=a, b=b, transforms=transforms, **where
  )
  return token, []


@_quiet
def _multiply(*, token, mesh_location, thread, acc, a, b, transforms, source_info):
  from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

  memory = gpu_callbacks._get_shared_memory()
  info = gpu_callbacks.memory.GPULoggingInfo(mesh_location, thread, source_info)
  key = gpu_callbacks.HostAllocationKey.from_array(b)
  transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
  at = memory.access(key, transforms)
  b, _, clock = memory.get_buffer_content(key, at, thread, logging_info=info)
  # wgmma reads as TMA does: what other instructions wrote must have been committed.
  gpu_callbacks.get_races().check_read(thread, clock.async_smem_clock, key, at, source_info)
  key = gpu_callbacks.HostAllocationKey.from_array(acc)
  at = memory.access(key, ())
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
  """The interpreter has a buffer for each name of a RefUnion; here like names share one."""
  from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret

  if not isinstance(aval, jaxpr_interpret.mosaic_gpu_core.AbstractRefUnion):
    return key, transforms
  members = jaxpr_interpret.union_members(aval)
  arrays = [jaxpr_interpret._member_inner_aval(member) for member in members]
  slot = [member.transforms[0] for member in members].index(transforms[0])
  return key[arrays.index(arrays[slot])], tuple(transforms[1:])


def _check(self, native, is_write, thread, clock, key, access, source_info=None):
  """The interpreter compares accesses by different names as if each took the whole memory."""
  from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

  native(self, thread, clock, key, access.range, source_info)
  with self.lock:
    union, _ = self.ref_union_members.get(key, (None, None))
  if union is None:
    return
  shape, dtype = gpu_callbacks._get_shared_memory().buffer_shape_and_dtype(key)
  found = _first_and_last_byte(access.range, shape, dtype)
  with self.lock:
    others = list(self.union_accesses[union])
    self.union_accesses[union].append((thread, clock, key, is_write, found))
  for other_thread, other_clock, other_key, other_write, other in others:
    overlap = found[0] <= other[1] and other[0] <= found[1]
    if key == other_key or not (is_write or other_write) or not overlap:
      continue
    if not other_clock.ordered(clock):
      with self.lock:
        self.races_found = True
      raise RuntimeError(f"{thread}, {key}, bytes {found} and {other_thread}, {other_key}, {other}")


def _first_and_last_byte(indices, shape, dtype):
  """Of slices [slot, rows]; columns are whole."""
  places = np.arange(np.prod(shape[:2])).reshape(shape[:2])[tuple(indices)[:2]]
  row = np.prod(shape[2:]) * np.dtype(dtype).itemsize
  return places.min() * row, places.max() * row + row - 1
