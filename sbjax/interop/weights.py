"""CLIP parameters from and to the state dicts of PyTorch: open_clip, OpenAI, transformers, SigLIP.

Torch's blocks are numbered; ours are stacked on a first axis (`scan=True`) or named `block_0`,
`block_1`, ... (`scan=False`). sbjax/interop/layouts.py has each format's names and layouts. Nothing
else differs, so a round trip is exact.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from sbjax.interop import layouts
from sbjax.interop.config_files import config_of, open_clip_names, read_config, refuse
from sbjax.interop.files import read_file, write_file
from sbjax.interop.layouts import Layout
from sbjax.models.clip import CLIP, resize_grid
from sbjax.models.sizes import SIZES, CLIPConfig
from sbjax.models.transformer import BlockOptions, stack_blocks, unstack_blocks

FORMATS = ("open_clip", "hf")


def load_weights(source, config: CLIPConfig, *, scan: bool = True, resize: bool = False) -> dict:
  """Parameters of a CLIP of this config, in float32, from a state dict.

  Its names tell the format: open_clip's (timm's for SigLIP), OpenAI's or transformers'. Buffers
  that are no parameters are left out. If the state dict has layer-scale vectors or SigLIP's bias,
  so do the parameters. Their model then needs `zero_init_layer_scale=True` or an `init_logit_bias`.

  Args:
    source: a path to a .safetensors, .pt, .pth or .bin file, to an index of such shards or to a
      folder with one of them, or a mapping of names to tensors or arrays. OpenAI's TorchScript
      archives work too, and checkpoints of training programs, which hold the model among others
      and its names behind prefixes (`_one_model`). A path's config (`config_of`) must be that of
      the same architecture.
    scan: as in `BlockOptions`.
    resize: whether to interpolate position embeddings for another image size or context length, as
      open_clip does.

  Raises:
    ValueError: names are missing or unexpected, shapes differ, or a value is no tensor, or one of
      integers or 8-bit floats. The message lists them, and names the architecture if sbjax lacks
      it, or models of the state dict's size. Or there are several models, such as a mean of the
      weights (EMA) beside them. Or the weights are OpenAI's, and the config has another activation.
      Or the path's config is that of another architecture.
  """
  if isinstance(source, str | os.PathLike) and (theirs := config_of(source)) is not None:
    check_architecture(config, theirs, os.fspath(source))
  state = read_file(source) if isinstance(source, str | os.PathLike) else dict(source)
  state = _one_model(state)
  _check_openai(state, config)
  state = {n: tensor for n, tensor in state.items() if n.rpartition(".")[2] not in _BUFFERS}
  if strangers := [name for name, tensor in state.items() if not hasattr(tensor, "shape")]:
    raise ValueError(
      f"The state dict holds {', '.join(map(repr, strangers[:5]))}, which are no tensors: expected"
      " names and tensors, at the top or under 'state_dict'."
    )
  options = _options(any(n.endswith(".ls_1.gamma") for n in state), "logit_bias" in state)
  layout = layouts.layout_of(state, config)
  shapes = _shapes(config, options)
  known = layouts.torch_shapes(shapes, layout)
  _check_types({name: state[name] for name in known if name in state})
  state = state | _scalars(state, known)
  if resize:
    state = state | _resized(state, shapes, layout, config)
  _check(state, config, options, layout, resize)
  params = {}
  for path, shape in shapes.items():
    arrays = [
      layouts.from_torch(path, np.concatenate([_to_numpy(state[name]) for name in names]), names[0])
      for names in layouts.tensor_names(path, shape, layout)
    ]
    params[path] = (np.stack(arrays) if "blocks" in path else arrays[0]).reshape(shape)
  params = unflatten_dict(params)
  return params if scan else unstack_blocks(params)


def save_weights(params: dict, path, config: CLIPConfig, *, format: str = "open_clip") -> None:
  """Writes CLIP parameters, stacked or not, as a state dict.

  Args:
    path: its suffix selects the file format: .safetensors, or torch's .pt, .pth or .bin.
    format: as in `state_dict`.
  """
  write_file(state_dict(params, config, format=format), path)


def state_dict(
  params: dict, config: CLIPConfig, *, format: str = "open_clip"
) -> dict[str, np.ndarray]:
  """CLIP parameters, stacked or not, in float32 with the names and layouts of PyTorch's models.

  Args:
    format: "open_clip", or "hf" for transformers' CLIPModel and SiglipModel.

  Raises:
    ValueError: the parameters are not those of this config, or the format has no place for them.
  """
  if format not in FORMATS:
    raise ValueError(f"{format=} must be one of {', '.join(FORMATS)}.")
  params = flatten_dict(stack_blocks(params))
  if ("image", "blocks", "q_norm", "scale") in params:
    raise ValueError(f"{format} has no layer norm over the full width of q and k (qk_norm=True).")
  siglip = config.vision.pool == "map"
  layer_scale = ("image", "blocks", "ls_1", "gamma") in params
  if layer_scale and (format == "hf" or siglip):
    raise ValueError(f"{format} has no layer scale for this model (zero_init_layer_scale=True).")
  if ("logit_bias",) in params and format == "hf" and not siglip:
    raise ValueError(
      "transformers' CLIPModel has no logit_bias (the loss 'siglip'); use open_clip."
    )
  given = {keys: np.shape(array) for keys, array in params.items()}
  options = _options(layer_scale, ("logit_bias",) in params)
  problems = _differences(given, _shapes(config, options))
  if problems:
    raise ValueError(f"The parameters are not those of this config. {problems}")
  layout = layouts.hf_layout(config)
  if format == "open_clip":
    layout = layouts.open_clip_layout(config, "text." if siglip else "")
  state = {}
  for keys, array in params.items():
    layers = array if "blocks" in keys else [array]
    for names, layer in zip(layouts.tensor_names(keys, given[keys], layout), layers, strict=True):
      whole = layouts.to_torch(keys, np.asarray(layer), names[0], layout)
      for name, part in zip(names, layouts.split(whole, names), strict=True):
        state[name] = np.array(part, np.float32, order="C")
  return state


def with_end_last(config: CLIPConfig, params: dict) -> tuple[CLIPConfig, dict]:
  """The model with the largest token id as its end token; the two ids change places.

  transformers' CLIPModel does not read a text at eot_id=2: it takes this number for the largest id.
  """
  text, last = config.text, config.text.vocab_size - 1
  table = np.array(params["text"]["token_embedding"]["embedding"])
  table[[text.eot_id, last]] = table[[last, text.eot_id]]
  config = dataclasses.replace(config, text=dataclasses.replace(text, eot_id=last))
  return config, {**params, "text": {**params["text"], "token_embedding": {"embedding": table}}}


def check_architecture(config: CLIPConfig, theirs: CLIPConfig, source: str) -> None:
  """Raises a ValueError if `theirs`, the model of the weights `source`, computes otherwise.

  Sizes of images and texts, the vocabulary and the end token may differ.
  """
  ours_is, theirs_is = _architecture(config), _architecture(theirs)
  different = [
    f"{name}={value!r}, not {ours_is[name]!r}"
    for name, value in theirs_is.items()
    if ours_is[name] != value
  ]
  if different:
    fits = _models(lambda c: _architecture(c) == theirs_is)
    hint = f" Its architecture is that of {', '.join(fits)}." if fits else ""
    raise ValueError(f"{source} is of another model than the config: {', '.join(different)}.{hint}")


def _architecture(config: CLIPConfig) -> dict:
  """The fields of a model that its weights fix."""
  free, fields = ("image_size", "context_length", "vocab_size", "eot_id", "mlp_ratio"), {}
  for name, tower in (("vision", config.vision), ("text", config.text)):
    values = dataclasses.asdict(tower) | {"mlp_width": tower.mlp_width}
    fields |= {f"{name} {field}": x for field, x in values.items() if field not in free}
  return fields | {"embed_dim": config.embed_dim}


# What torch.compile, DDP, FSDP, activation checkpointing and Fabric put into names, anywhere.
_WRAPPERS = {
  *("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"),
  "_forward_module",
}
_ANCHOR = "logit_scale"  # Every CLIP has one, at its top.


def _one_model(state: Mapping) -> dict:
  """The tensors of the one CLIP in a checkpoint, without what wrappers add to their names.

  A checkpoint may keep it in a mapping (`state_dict`, `model`), and under an attribute's name
  (Lightning's `model.`). Both are where logit_scale is. If no name ends so, the state stays.

  Raises:
    ValueError: there are several, of which only the user knows which one is wanted.
  """
  found = list(_models_in(state))
  places = [".".join([*path, prefix]).rstrip(".") or "the top" for path, prefix, _ in found]
  if len(found) > 1:
    raise ValueError(
      f"The state dict holds {len(found)} models: at {', '.join(places)}. Pass the one that you"
      " want, as a file or a mapping with its tensors only."
    )
  if not found:
    state = state.get("state_dict", state)
    if not isinstance(state, Mapping):
      raise ValueError(f"'state_dict' is a {type(state).__name__}: expected names and tensors.")
    return _unwrapped(state)
  [(_, prefix, names)] = found
  # What is not under the prefix keeps its name, and is unexpected.
  return {name.removeprefix(prefix): tensor for name, tensor in names.items()}


def _models_in(state: Mapping, path: tuple[str, ...] = ()):
  """The (keys that lead there, prefix of names, tensors) of each logit_scale in nested mappings."""
  if any(_is_anchor(name) and hasattr(value, "shape") for name, value in state.items()):
    names = _unwrapped(state)
    for name in filter(_is_anchor, names):
      yield path, name.removesuffix(_ANCHOR), names
  for key, value in state.items():
    # An optimizer's moments have the names of the parameters.
    if isinstance(value, Mapping) and not str(key).startswith("optim"):
      yield from _models_in(value, (*path, str(key)))


def _is_anchor(name) -> bool:
  return isinstance(name, str) and name.rpartition(".")[2] == _ANCHOR


def _unwrapped(state: Mapping) -> dict:
  """The same with names of which wrappers' parts are left out."""
  plain: dict = {}
  for name, value in state.items():
    parts = str(name).split(".")
    short = ".".join(part for part in parts if part not in _WRAPPERS)
    if short in plain:
      raise ValueError(f"The state dict has {short} twice: once as {name}, behind a prefix.")
    plain[short] = value
  return plain


_FLOATS = ("float16", "bfloat16", "float32", "float64")


def _check_types(state: Mapping) -> None:
  """Raises a ValueError for tensors whose numbers need scales, which are kept elsewhere."""
  types = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in state.items()}
  if other := [f"{name} ({dtype})" for name, dtype in types.items() if dtype not in _FLOATS]:
    raise ValueError(
      f"The state dict has {_shortened(other, 4)}: expected weights in {', '.join(_FLOATS)}."
      " Integers and 8-bit floats need scales, which no format here has: take the weights from"
      " before they were quantized."
    )


def _scalars(state: Mapping, shapes: Mapping) -> dict:
  """The tensors of one number whose shape is another of one number: FSDP needs [1] for a scalar."""
  return {
    name: state[name].reshape(shape)
    for name, shape in shapes.items()
    if name in state
    and math.prod(shape) == 1
    and math.prod(state[name].shape) == 1
    and tuple(state[name].shape) != shape
  }


def _to_numpy(tensor) -> np.ndarray:
  if hasattr(tensor, "detach"):  # A torch tensor; it may be bfloat16, which numpy lacks.
    tensor = tensor.detach().cpu().float().numpy()
  return np.atleast_1d(np.asarray(tensor, np.float32))


def _options(layer_scale: bool, logit_bias: bool) -> dict:
  """The arguments of CLIP that add parameters."""
  bias = {"init_logit_bias": 0.0} if logit_bias else {}
  return {"options": BlockOptions(zero_init_layer_scale=layer_scale), **bias}


def _shapes(config: CLIPConfig, options: dict) -> dict[tuple[str, ...], tuple[int, ...]]:
  """The shapes of a CLIP's stacked parameters, by path."""
  return dict(_traced_shapes(config, **options))


@functools.cache
def _traced_shapes(config: CLIPConfig, **options) -> dict[tuple[str, ...], tuple[int, ...]]:
  model = CLIP(config, **options)
  size = config.vision.image_size
  image = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
  text = jax.ShapeDtypeStruct((1, config.text.context_length), jnp.int32)
  variables = jax.eval_shape(model.init, jax.random.key(0), image, text)
  parameters: dict[tuple[str, ...], jax.Array] = flatten_dict(variables["params"])  # pyright: ignore
  return {path: leaf.shape for path, leaf in parameters.items()}


# Buffers: open_clip drops the first four, transformers the fifth; torch's AveragedModel counts.
_BUFFERS = (
  *("attn_mask", "input_resolution", "context_length", "vocab_size", "position_ids"),
  "n_averaged",
)


def _check_openai(state: Mapping, config: CLIPConfig) -> None:
  """Only OpenAI's files have input_resolution, and all of its models have quick_gelu."""
  activations = {config.vision.activation, config.text.activation}
  if "input_resolution" in state and activations != {"quick_gelu"}:
    raise ValueError(
      "These are OpenAI's weights, which need activation='quick_gelu', and the config has"
      f" {', '.join(sorted(activations))}. Use open_clip's config with -quickgelu in its name, such"
      " as read_config('ViT-B-32-quickgelu')."
    )


def _resized(state: Mapping, shapes: dict, layout: Layout, config: CLIPConfig) -> dict:
  """The position embeddings whose length is another than the config's, interpolated."""
  resized, class_tokens = {}, int(config.vision.pool != "map")
  for tower in ("image", "text"):
    path = (tower, "positional_embedding")
    ((name,),) = layouts.tensor_names(path, shapes[path], layout)
    if name not in state:
      continue
    old = _to_numpy(state[name])
    length, width = shapes[path]
    if old.shape[-1] == width and old.size != length * width:
      old = jnp.asarray(old.reshape(-1, width))
      if tower == "image":
        new = resize_grid(old, math.isqrt(length - class_tokens), class_tokens)
      else:
        new = jax.image.resize(old, (length, width), "linear", antialias=False)
      resized[name] = layouts.to_torch(path, np.asarray(new), name, layout)
  return resized


# Names of tensors that tell an architecture.
_FOREIGN = {
  "visual.layer1.": "a ResNet CLIP",
  "text_decoder.": "a CoCa",
  "visual.attn_pool.": "a CoCa",
  "visual.trunk.stem.": "a CLIP with a convolutional tower of timm (ConvNeXt, FastViT, ViTamin)",
  "visual.trunk.stages.": "a CLIP with a staged tower of timm (ConvNeXt, FastViT, ViTamin)",
  "visual.trunk.layers.": "a Swin CLIP",
  "visual.trunk.cls_token": "an EVA-CLIP or another ViT of timm with a class token",
  "visual.blocks.": "an EVA-CLIP",
  "text.transformer.encoder.": "a CLIP with a text tower of transformers",
  "text.transformer.embeddings.": "a CLIP with a text tower of transformers",
  "qformer.": "a BLIP-2",
}


def _check(state: Mapping, config: CLIPConfig, options: dict, layout: Layout, resize: bool) -> None:
  given = {name: tuple(tensor.shape) for name, tensor in state.items()}
  problems = _differences(given, layouts.torch_shapes(_shapes(config, options), layout))
  if not problems:
    return
  for prefix, architecture in _FOREIGN.items():
    if any(name.startswith(prefix) for name in given):
      refuse("The state dict", f"that of {architecture}")
  hints = []
  if fits := _that_fit(given, options):
    hints.append(
      f"Its shapes are those of {', '.join(fits)}; tensors do not tell the activation (-quickgelu)"
      " or the number of heads."
    )
  elif not resize and _fits_resized(state, config, options, layout):
    hints.append("Only position embeddings differ: resize=True interpolates them.")
  raise ValueError(" ".join(["The state dict does not fit the config.", problems, *hints]))


def _that_fit(given: dict, options: dict) -> list[str]:
  """Models with these shapes."""

  def fits(config: CLIPConfig) -> bool:
    layout = layouts.layout_of(given, config)
    token = (config.text.vocab_size, config.text.width)
    if given.get(layout.modules["text/token_embedding"] + ".weight") != token:
      return False
    return layouts.torch_shapes(_shapes(config, options), layout) == given

  return _models(fits)


def _models(fits: Callable[[CLIPConfig], bool]) -> list[str]:
  """Models that fit: keys of SIZES as "SIZES['B/32']", names of open_clip's."""
  found = [f"SIZES[{size!r}]" for size, config in SIZES.items() if fits(config)]
  for name in open_clip_names():
    try:
      config = read_config(name)
    except ValueError:  # sbjax lacks the architecture.
      continue
    if fits(config):
      found.append(f"open_clip's {name}")
  return found


def _fits_resized(state: Mapping, config: CLIPConfig, options: dict, layout: Layout) -> bool:
  shapes = _shapes(config, options)
  resized = {**state, **_resized(state, shapes, layout, config)}
  given = {name: tuple(tensor.shape) for name, tensor in resized.items()}
  return given == layouts.torch_shapes(shapes, layout)


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
