"""Names for our containers in files: what `flax.serialization` and `jax.export` ask for.

Flax knows NamedTuples by itself, JAX knows none. A name is part of the files: it never changes.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
from flax import serialization

from sbjax.linear.grouped import Grouped
from sbjax.linear.weight import LoRAWeight, NoMaster, QuantizedWeight
from sbjax.ops.adam import Coded
from sbjax.ops.rows import LayerNormParams, RMSNormParams
from sbjax.optim.averaged import AveragedState
from sbjax.optim.collage import CompensatedState
from sbjax.optim.loss_scale import LossScaleState
from sbjax.optim.stable_adamw import ScaleByStableAdamState
from sbjax.optim.state_formats import CompressedState
from sbjax.quantize import Quantized, Spec

_NAMEDTUPLES = (
  *(QuantizedWeight, LoRAWeight, Grouped, LayerNormParams, RMSNormParams),
  *(ScaleByStableAdamState, LossScaleState, CompensatedState, CompressedState, Coded),
  AveragedState,
)


def _spec_to_bytes(spec: Spec) -> bytes:
  return json.dumps(dataclasses.asdict(spec) | {"dtype": spec.dtype.name}).encode()


def _spec_of_bytes(data) -> Spec:
  return Spec(**json.loads(bytes(data)))


def _words_of(master: NoMaster) -> dict:
  axes = {name: list(getattr(master, name)) for name in ("shape", "contracted", "batch")}
  return {"dtype": master.dtype.name, **{name: json.dumps(value) for name, value in axes.items()}}


def master_of(words: dict | list) -> NoMaster:
  """The NoMaster that a file describes; axes are lists, or lists in JSON."""
  if isinstance(words, list):  # A file of before had only the shape.
    return NoMaster(tuple(words))
  axes = {name: words[name] for name in ("shape", "contracted", "batch")}
  axes = {n: tuple(json.loads(x) if isinstance(x, str) else x) for n, x in axes.items()}
  return NoMaster(dtype=jnp.dtype(words["dtype"]), **axes)


def _restored_master(target: NoMaster, state: dict) -> NoMaster:
  """The target, which says all; the file's own words, if it has any, must be the same."""
  if state and (found := master_of(state)) != target:
    raise ValueError(f"The file's weight in 8 bits is {found}, not {target} as the target's.")
  return target


def _restored(target: Quantized, state) -> Quantized:
  own = {name: getattr(target, name) for name in ("values", "scale")}
  for name, array in own.items():
    found = state[name]
    if (array.dtype, array.shape) != (found.dtype, found.shape):
      raise ValueError(
        f"The file's {name} of a Quantized are {found.dtype.name} {found.shape}, not"
        f" {array.dtype.name} {array.shape} as the target's."
      )
  own = {n: serialization.from_state_dict(a, state[n], name=n) for n, a in own.items()}
  return dataclasses.replace(target, **own)


def _register() -> None:
  for cls in _NAMEDTUPLES:
    jax.export.register_namedtuple_serialization(cls, serialized_name=f"sbjax.{cls.__name__}")
  jax.export.register_pytree_node_serialization(
    Quantized,
    serialized_name="sbjax.Quantized",
    serialize_auxdata=lambda fields: _spec_to_bytes(*fields),
    deserialize_auxdata=lambda data: (_spec_of_bytes(data),),
  )
  jax.export.register_pytree_node_serialization(
    Spec,
    serialized_name="sbjax.Spec",
    serialize_auxdata=_spec_to_bytes,
    deserialize_auxdata=_spec_of_bytes,
  )
  jax.export.register_pytree_node_serialization(
    NoMaster,
    serialized_name="sbjax.NoMaster",
    serialize_auxdata=lambda master: json.dumps(_words_of(master)).encode(),
    deserialize_auxdata=lambda data: master_of(json.loads(bytes(data))),
  )
  serialization.register_serialization_state(
    Quantized, lambda q: {"values": q.values, "scale": q.scale}, _restored
  )
  serialization.register_serialization_state(Spec, lambda spec: {}, lambda spec, state: spec)
  serialization.register_serialization_state(NoMaster, _words_of, _restored_master)


_register()
