"""Parameters in 8 bits for inference, CLIP's and any model's, and their files.

A file is one for safetensors, msgpack and orbax: arrays by their paths, and words that say what is
in 8 bits and how. The version of the words rises when an older library would misread them.
"""

import dataclasses
import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, serialization
from flax.traverse_util import flatten_dict, unflatten_dict

from sbjax.convert.quantize_model import path_of
from sbjax.convert.quantize_weights import quantize_weights
from sbjax.interop.files import import_package
from sbjax.interop.serialization import master_of
from sbjax.linear.weight import QuantizedWeight, is_frozen
from sbjax.models.transformer import BLOCK_LINEARS, BlockOptions, is_block_kernel
from sbjax.quantize import INT8, Quantized, Spec, quantize
from sbjax.recipes import Recipe, RecipeRules

VERSION = 1  # 0 had no version, and no frozen weights of any shape.
_TABLE = ("text", "token_embedding", "embedding")


def serving_params(
  params, recipe: Recipe | RecipeRules | str, *, backend: str | None = None
) -> dict:
  """The parameters of a CLIP with its kernels in 8 bits only, for a model of that recipe.

  `CLIP(config, BlockOptions(recipe=recipe)).apply({"params": serving_params(params, recipe)}, ...)`
  multiplies by the same 8-bit kernels as with `params`. The table of token embeddings is quantized
  row by row: in a B/32 it holds a sixth of all parameters. It differs by at most 1/254 of a row's
  largest magnitude. All else stays as it is, and takes 0.4 to 2.2 % of the bytes of the float
  parameters (H/14, B/32). The parameters have no gradients; the input has.

  Args:
    params: float parameters, stacked (`scan=True`) or not.
    recipe: "switchback" has one scale for a kernel; "switchback_q" and "switchback_c" have one for
      each of its columns.

  Raises:
    ValueError: no kernel of a CLIP is among the parameters, or the recipe rounds none of them in
      its forward pass.
  """
  options = BlockOptions(recipe=recipe, backend=backend)
  paths = [path for path in flatten_dict(params) if is_block_kernel(path)]
  if not paths:
    raise ValueError(f"No kernel of {', '.join(BLOCK_LINEARS)} is among the parameters of a CLIP.")
  rules = [("/".join(path), options.recipe_at("/".join(path[:-1]))) for path in paths]
  if all(own.fwd is None for _, own in rules):
    raise ValueError(f"{recipe=} leaves every kernel in 16 bits: take 'switchback_q', for example.")
  served: dict = flatten_dict(quantize_weights(params, rules, backend=backend))  # pyright: ignore
  result = {path: leaf.fwd if is_frozen(leaf) else leaf for path, leaf in served.items()}
  if _TABLE in result:
    result[_TABLE] = quantize(jnp.asarray(result[_TABLE]), Spec(INT8, "rowwise"))
  return unflatten_dict(result)


def size_of(params) -> int:
  """The bytes of parameters, float or 8-bit."""
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))


# ---- Arrays by their paths, and words about those in 8 bits


def _in_8_bits(leaf) -> bool:
  return isinstance(leaf, Quantized) or is_frozen(leaf)


def _named(params) -> dict[str, Any]:
  """The parameters of a tree, or of an nnx module, by their paths."""
  if isinstance(params, nnx.Module):
    params = nnx.state(params, nnx.Param)
  leaves = jax.tree.leaves_with_path(params, is_leaf=_in_8_bits)
  return {path_of(keys): leaf for keys, leaf in leaves}


def _to_arrays(params) -> tuple[dict[str, np.ndarray], dict[str, str]]:
  arrays, specs, masters = {}, {}, {}
  for name, leaf in _named(params).items():
    if not _in_8_bits(leaf):
      arrays[name] = np.asarray(leaf)
      continue
    q = leaf
    if isinstance(leaf, QuantizedWeight):
      q = leaf.fwd
      assert q is not None
      masters[name] = {**dataclasses.asdict(leaf.master), "dtype": leaf.master.dtype.name}
    # As bytes: numpy, by which safetensors reads, lacks fp8.
    arrays |= {f"{name}/values": np.asarray(q.values).view(np.int8)}
    arrays |= {f"{name}/scale": np.asarray(q.scale)}
    specs[name] = [q.spec.dtype.name, q.spec.scaling, q.spec.exponent]
  words = {"version": str(VERSION), "specs": json.dumps(specs), "masters": json.dumps(masters)}
  return arrays, words


def _of_arrays(path, arrays: dict, words: dict[str, str] | None) -> dict[str, Any]:
  words = words or {}
  if "specs" not in words:
    raise ValueError(f"{path} was not written by save_serving: its metadata have no specs.")
  version = words.get("version", "0")
  if not version.isdecimal() or int(version) > VERSION:
    raise ValueError(
      f"{path} has version {version} of the format, and this sbjax reads versions up to {VERSION}:"
      " install a newer one."
    )
  named, masters = dict(arrays), json.loads(words.get("masters", "{}"))
  for name, (dtype, *scaling) in json.loads(words["specs"]).items():
    spec = Spec(jnp.dtype(dtype), *scaling)
    if missing := [part for part in ("values", "scale") if f"{name}/{part}" not in named]:
      raise ValueError(f"{path} is not whole: it lacks {name}/{missing[0]}.")
    values, scale = named.pop(f"{name}/values"), named.pop(f"{name}/scale")
    named[name] = q = Quantized(jnp.asarray(values.view(spec.dtype)), jnp.asarray(scale), spec)
    if master := masters.get(name):
      named[name] = QuantizedWeight(master_of(master), q, None)
  return named


# ---- Files


def save_serving(params, path) -> None:
  """Writes parameters in 8 bits: a weight as two arrays, its values and its scale.

  Args:
    params: what `quantize_weights` or `serving_params` made; of an nnx module the state of
      `nnx.Param`.
    path: ends in .safetensors or .msgpack, or is a new folder, which orbax writes.

  Raises:
    ImportError: safetensors or orbax is not installed.
  """
  path = os.fspath(path)
  arrays, words = _to_arrays(params)
  if path.endswith(".safetensors"):
    import_package("safetensors.numpy").save_file(arrays, path, words)
  elif path.endswith(".msgpack"):
    with open(path, "wb") as file:
      file.write(serialization.msgpack_serialize({"arrays": arrays, "words": words}))
  else:
    text = np.frombuffer(json.dumps(words).encode(), np.uint8)
    with import_package("orbax.checkpoint").PyTreeCheckpointer() as checkpointer:
      checkpointer.save(os.path.abspath(path), {"arrays": _nested(arrays), "words": text})


def load_serving(path, like=None):
  """The parameters that `save_serving` wrote.

  Args:
    like: parameters of the model, float or not, or their shapes, or an nnx module: the result has
      its structure. None: dictionaries by the parts of the paths.

  Raises:
    ValueError: the file is of a newer version, not whole, of another model than `like`, or was not
      written by `save_serving`.
    ImportError: safetensors or orbax is not installed.
  """
  named = _of_arrays(path, *_read(os.fspath(path)))
  if like is None:
    return _nested(named)
  _check_alike(path, named, _named(like))
  if isinstance(like, nnx.Module):
    graph, own, rest = nnx.split(like, nnx.Param, ...)
    return nnx.merge(graph, _filled(own, named), rest, copy=True)
  return _filled(like, named)


def _read(path: str) -> tuple[Any, Any]:
  """Arrays by their paths, and the words."""
  if path.endswith(".safetensors"):
    with import_package("safetensors").safe_open(path, framework="flax") as file:
      return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
  if path.endswith(".msgpack"):
    with open(path, "rb") as file:
      tree = serialization.msgpack_restore(file.read())
    return (tree["arrays"], tree["words"]) if {"arrays", "words"} <= {*tree} else ({}, None)
  orbax = import_package("orbax.checkpoint")
  with orbax.PyTreeCheckpointer() as checkpointer:
    tree = checkpointer.restore(os.path.abspath(path))
  if not {"arrays", "words"} <= {*tree}:
    return {}, None
  arrays = flatten_dict(tree["arrays"], sep="/")
  return arrays, json.loads(bytes(np.asarray(tree["words"])))  # pyright: ignore


def _nested(named: dict) -> dict:
  return unflatten_dict({tuple(name.split("/")): leaf for name, leaf in named.items()})


def _filled(tree, named: dict):
  keyed, treedef = jax.tree.flatten_with_path(tree, is_leaf=_in_8_bits)
  return treedef.unflatten([named[path_of(keys)] for keys, _ in keyed])


def _check_alike(path, named: dict, expected: dict) -> None:
  for name in expected.keys() - named.keys():
    raise ValueError(f"{path} is of another model: it has no {name}.")
  for name in named.keys() - expected.keys():
    raise ValueError(f"{path} is of another model: it has {name}, which the model lacks.")
  for name, leaf in named.items():
    own, theirs = _shape(leaf), _shape(expected[name])
    if own != theirs:
      raise ValueError(f"{path} is of another model: its {name} is {own}, the model's {theirs}.")


def _shape(leaf) -> tuple[int, ...]:
  if isinstance(leaf, Quantized):
    return leaf.values.shape
  return leaf.master.shape if is_frozen(leaf) else leaf.shape
