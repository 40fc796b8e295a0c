"""Converts CLIP parameters to open_clip state dicts, and back.

Torch's linear kernels are transposed, and its patch embedding is a convolution [D, 3, patch,
patch]. Its blocks are numbered; ours are stacked on a first axis (`scan=True`) or named `block_0`,
`block_1`, ... (`scan=False`). Nothing else differs, so a round trip is exact.
"""

import importlib
import os
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from sbjax.models.clip import CLIP
from sbjax.models.sizes import SIZES, CLIPConfig
from sbjax.models.transformer import BlockOptions, stack_blocks, unstack_blocks


def load_open_clip(source, config: CLIPConfig, *, scan: bool = True) -> dict:
  """Parameters of a CLIP of this config, in float32, from an open_clip state dict.

  If the state dict has layer-scale vectors or SigLIP's bias, so do the parameters. Their model then
  needs `zero_init_layer_scale=True` or an `init_logit_bias`.

  Args:
    source: a path to a .safetensors, .pt, .pth or .bin file, or a mapping of names to tensors or
      arrays. Checkpoints of open_clip's training (`state_dict`, `module.`) work too.
    scan: as in `BlockOptions`.

  Raises:
    ValueError: names are missing or unexpected, or shapes differ. The message lists them, and names
      the key of SIZES that fits, if there is one.
  """
  state = _read(source) if isinstance(source, str | os.PathLike) else dict(source)
  state = state.get("state_dict", state)
  state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
  options = _options(any(n.endswith(".ls_1.gamma") for n in state), "logit_bias" in state)
  _check(state, config, options)
  params = {}
  for path, shape in _shapes(config, options).items():
    arrays = [_from_torch(path, _to_numpy(state[name])) for name in _names(path, shape)]
    params[path] = np.stack(arrays) if "blocks" in path else arrays[0]
  params = unflatten_dict(params)
  return params if scan else unstack_blocks(params)


def save_open_clip(params: dict, path, config: CLIPConfig) -> None:
  """Writes CLIP parameters, stacked or not, as an open_clip state dict.

  Args:
    path: its suffix selects the format: .safetensors, or torch's .pt, .pth or .bin.
  """
  _write(open_clip_state_dict(params, config), path)


def open_clip_state_dict(params: dict, config: CLIPConfig) -> dict[str, np.ndarray]:
  """CLIP parameters, stacked or not, in float32 with open_clip's names and layouts.

  Raises:
    ValueError: the parameters are not those of this config, or open_clip has no place for them.
  """
  params = flatten_dict(stack_blocks(params))
  if ("image", "blocks", "q_norm", "scale") in params:
    raise ValueError("open_clip has no layer norm over the full width of q and k (qk_norm=True).")
  given = {keys: np.shape(array) for keys, array in params.items()}
  options = _options(("image", "blocks", "ls_1", "gamma") in params, ("logit_bias",) in params)
  problems = _differences(given, _shapes(config, options))
  if problems:
    raise ValueError(f"The parameters are not those of this config. {problems}")
  state = {}
  for keys, array in params.items():
    layers = array if "blocks" in keys else [array]
    for name, layer in zip(_names(keys, given[keys]), layers, strict=True):
      state[name] = np.array(_to_torch(keys, np.asarray(layer)), np.float32, order="C")
  return state


_NAMES = {
  "logit_scale": "logit_scale",
  "logit_bias": "logit_bias",
  "image/class_embedding": "visual.class_embedding",
  "image/positional_embedding": "visual.positional_embedding",
  "image/patch_embedding/kernel": "visual.conv1.weight",
  "image/ln_pre/scale": "visual.ln_pre.weight",
  "image/ln_pre/bias": "visual.ln_pre.bias",
  "image/ln_post/scale": "visual.ln_post.weight",
  "image/ln_post/bias": "visual.ln_post.bias",
  "image/proj": "visual.proj",
  "image/blocks": "visual.transformer.resblocks",
  "text/token_embedding/embedding": "token_embedding.weight",
  "text/positional_embedding": "positional_embedding",
  "text/ln_final/scale": "ln_final.weight",
  "text/ln_final/bias": "ln_final.bias",
  "text/proj": "text_projection",
  "text/blocks": "transformer.resblocks",
}
_BLOCK_NAMES = {
  "ln_1/scale": "ln_1.weight",
  "ln_1/bias": "ln_1.bias",
  "qkv/kernel": "attn.in_proj_weight",
  "qkv/bias": "attn.in_proj_bias",
  "out/kernel": "attn.out_proj.weight",
  "out/bias": "attn.out_proj.bias",
  "ls_1/gamma": "ls_1.gamma",
  "ln_2/scale": "ln_2.weight",
  "ln_2/bias": "ln_2.bias",
  "fc1/kernel": "mlp.c_fc.weight",
  "fc1/bias": "mlp.c_fc.bias",
  "fc2/kernel": "mlp.c_proj.weight",
  "fc2/bias": "mlp.c_proj.bias",
  "ls_2/gamma": "ls_2.gamma",
}


def _names(path: tuple[str, ...], shape: tuple[int, ...]) -> list[str]:
  """open_clip's names for one of our parameters: a name for each layer of `blocks`."""
  if "blocks" not in path:
    return [_NAMES["/".join(path)]]
  tower, block = _NAMES["/".join(path[:2])], _BLOCK_NAMES["/".join(path[2:])]
  return [f"{tower}.{layer}.{block}" for layer in range(shape[0])]


def _to_torch(path: tuple[str, ...], array: np.ndarray) -> np.ndarray:
  if "patch_embedding" in path:
    size = round((array.shape[0] / 3) ** 0.5)
    return array.reshape(size, size, 3, -1).transpose(3, 2, 0, 1)
  return array.T if path[-1] == "kernel" else array


def _from_torch(path: tuple[str, ...], array: np.ndarray) -> np.ndarray:
  if "patch_embedding" in path:
    return array.transpose(2, 3, 1, 0).reshape(-1, array.shape[0])
  return array.T if path[-1] == "kernel" else array


def _to_numpy(tensor) -> np.ndarray:
  if hasattr(tensor, "detach"):  # A torch tensor; it may be bfloat16, which numpy lacks.
    tensor = tensor.detach().cpu().float().numpy()
  return np.asarray(tensor, np.float32)


def _options(layer_scale: bool, logit_bias: bool) -> dict:
  """The arguments of CLIP that add parameters."""
  bias = {"init_logit_bias": 0.0} if logit_bias else {}
  return {"options": BlockOptions(zero_init_layer_scale=layer_scale), **bias}


def _shapes(config: CLIPConfig, options: dict) -> dict[tuple[str, ...], tuple[int, ...]]:
  """The shapes of a CLIP's stacked parameters, by path."""
  model = CLIP(config, **options)
  size = config.vision.image_size
  image = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
  text = jax.ShapeDtypeStruct((1, config.text.context_length), jnp.int32)
  variables = jax.eval_shape(model.init, jax.random.key(0), image, text)
  parameters: dict[tuple[str, ...], jax.Array] = flatten_dict(variables["params"])  # pyright: ignore
  return {path: leaf.shape for path, leaf in parameters.items()}


def _torch_shapes(shapes: dict) -> dict[str, tuple[int, ...]]:
  torch_shapes = {}
  for path, shape in shapes.items():
    one = np.broadcast_to(np.float32(0), shape[1:] if "blocks" in path else shape)
    for name in _names(path, shape):
      torch_shapes[name] = _to_torch(path, one).shape
  return torch_shapes


def _check(state: Mapping, config: CLIPConfig, options: dict) -> None:
  given = {name: tuple(tensor.shape) for name, tensor in state.items()}
  problems = _differences(given, _torch_shapes(_shapes(config, options)))
  if not problems:
    return
  fits = [
    f" It fits SIZES[{size!r}]."
    for size, known in SIZES.items()
    if _torch_shapes(_shapes(known, options)) == given
  ]
  raise ValueError(f"The state dict does not fit the config. {problems}{''.join(fits)}")


def _differences(given: dict, expected: dict) -> str:
  """The differences between shapes by name, in up to three sentences; "" if there are none."""
  named = {
    "Missing": [_joined(name) for name in expected if name not in given],
    "Unexpected": [_joined(name) for name in given if name not in expected],
    "Shapes": [
      f"{_joined(name)} is {given[name]}, not {shape}"
      for name, shape in expected.items()
      if name in given and given[name] != shape
    ],
  }
  return " ".join(f"{what}: {_shortened(names)}." for what, names in named.items() if names)


def _joined(name: str | tuple[str, ...]) -> str:
  return name if isinstance(name, str) else "/".join(name)


def _shortened(names: list[str], limit: int = 8) -> str:
  more = f" and {len(names) - limit} more" if len(names) > limit else ""
  return ", ".join(names[:limit]) + more


_TORCH_SUFFIXES = (".pt", ".pth", ".bin")


def _read(path) -> dict:
  if _suffix(path) == ".safetensors":
    # Through torch, since numpy lacks bfloat16.
    return _import("safetensors.torch").load_file(path)
  return _import("torch").load(path, map_location="cpu", weights_only=True)


def _write(state: dict[str, np.ndarray], path) -> None:
  if _suffix(path) == ".safetensors":
    _import("safetensors.numpy").save_file(state, path)
  else:
    torch = _import("torch")
    torch.save({name: torch.from_numpy(array) for name, array in state.items()}, path)


def _suffix(path) -> str:
  suffix = os.path.splitext(path)[1]
  if suffix not in (".safetensors", *_TORCH_SUFFIXES):
    known = ", ".join((".safetensors", *_TORCH_SUFFIXES))
    raise ValueError(f"{os.fspath(path)!r} must end in one of {known}.")
  return suffix


def _import(name: str):
  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise ImportError(
      f"open_clip checkpoints need {name}: install the extra `interop` (sbjax[interop])."
    ) from error
