"""CLIP parameters for inference in 8 bits: int8 values and scales in place of float kernels.

The kernels of the blocks are quantized for the forward pass, in the one orientation that it takes.
The table of token embeddings is quantized row by row: in a B/32 it holds a sixth of all parameters.
All else stays as it is, and takes 0.4 to 2.2 % of the bytes of the float parameters (H/14, B/32).
"""

import json
import os

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from sbjax.interop.files import import_package
from sbjax.models.transformer import quantize_weights
from sbjax.quantize import INT8, Quantized, Spec, quantize
from sbjax.recipes import Recipe, RecipeRules

_TABLE = ("text", "token_embedding", "embedding")


def serving_params(
  params, recipe: Recipe | RecipeRules | str, *, backend: str | None = None
) -> dict:
  """The parameters of a CLIP with its kernels in 8 bits only, for a model of that recipe.

  `CLIP(config, BlockOptions(recipe=recipe)).apply({"params": serving_params(params, recipe)}, ...)`
  multiplies by the same 8-bit kernels as with `params`. Only the token embeddings differ, by at
  most 1/254 of their row's largest magnitude. The parameters have no gradients;
  the input has.

  Args:
    params: float parameters, stacked (`scan=True`) or not.
    recipe: "switchback" has one scale for a kernel; "switchback_q" and "switchback_c" have one for
      each of its columns.

  Raises:
    ValueError: no kernel of a CLIP is among the parameters, or the recipe rounds none of them in
      its forward pass.
  """
  result: dict = flatten_dict(params)  # pyright: ignore
  quantized: dict = flatten_dict(quantize_weights(params, recipe, backend=backend))  # pyright: ignore
  kernels = {path: forward for path, (forward, _) in quantized.items() if forward is not None}
  if not kernels:
    raise ValueError(f"{recipe=} leaves every kernel in 16 bits: take 'switchback_q', for example.")
  result |= kernels
  if _TABLE in result:
    result[_TABLE] = quantize(jnp.asarray(result[_TABLE]), Spec(INT8, "rowwise"))
  return unflatten_dict(result)


def save_serving(params: dict, path) -> None:
  """Writes `serving_params` as .safetensors: a kernel as two arrays, its values and its scale.

  Raises:
    ImportError: safetensors is not installed.
  """
  arrays, specs = {}, {}
  for keys, leaf in flatten_dict(params).items():
    name = "/".join(keys)
    if isinstance(leaf, Quantized):
      # As bytes: numpy, by which safetensors reads, lacks fp8.
      arrays |= {f"{name}/values": leaf.values.view(jnp.int8), f"{name}/scale": leaf.scale}
      specs[name] = [leaf.spec.dtype.name, leaf.spec.scaling, leaf.spec.exponent]
    else:
      arrays[name] = jnp.asarray(leaf)
  save_file = import_package("safetensors.flax").save_file
  save_file(arrays, os.fspath(path), {"specs": json.dumps(specs)})


def load_serving(path) -> dict:
  """The parameters that `save_serving` wrote.

  Raises:
    ValueError: the file holds other arrays.
    ImportError: safetensors is not installed.
  """
  with import_package("safetensors").safe_open(os.fspath(path), framework="flax") as file:
    arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    specs = json.loads((file.metadata() or {}).get("specs", "null"))
  if specs is None:
    raise ValueError(f"{path} was not written by save_serving: its metadata have no specs.")
  for name, (dtype, *scaling) in specs.items():
    spec = Spec(jnp.dtype(dtype), *scaling)
    values, scale = arrays.pop(f"{name}/values"), arrays.pop(f"{name}/scale")
    arrays[name] = Quantized(values.view(spec.dtype), scale, spec)
  return unflatten_dict({tuple(name.split("/")): array for name, array in arrays.items()})


def size_of(params) -> int:
  """The bytes of parameters, float or 8-bit."""
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
