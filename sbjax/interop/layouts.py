"""Names and layouts of a CLIP's tensors in PyTorch's models: open_clip, timm, transformers.

Torch's linear kernels are transposed, and its patch embedding is a convolution [D, 3, patch,
patch]. transformers splits the projection to queries, keys and values in three, timm that of a
pooling in two.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from sbjax.models.sizes import CLIPConfig


class Layout(NamedTuple):
  """The names of a format.

  modules: its names for our modules and parameters. "a + b": parts along the first axis.
  image_block, text_block: the same within a block.
  ones: how many leading axes of size 1 a tensor has more than ours.
  """

  modules: dict[str, str]
  image_block: dict[str, str]
  text_block: dict[str, str]
  ones: dict[str, int]


_TOP = {"logit_scale": "logit_scale", "logit_bias": "logit_bias"}
_OPEN_CLIP_BLOCK = {
  "ln_1": "ln_1",
  "qkv": "attn.in_proj_",
  "out": "attn.out_proj",
  "ls_1/gamma": "ls_1.gamma",
  "ln_2": "ln_2",
  "fc1": "mlp.c_fc",
  "fc2": "mlp.c_proj",
  "ls_2/gamma": "ls_2.gamma",
}
_OPEN_CLIP_IMAGE = {
  "image/class_embedding": "visual.class_embedding",
  "image/positional_embedding": "visual.positional_embedding",
  "image/patch_embedding": "visual.conv1",
  "image/ln_pre": "visual.ln_pre",
  "image/ln_post": "visual.ln_post",
  "image/proj": "visual.proj",
  "image/blocks": "visual.transformer.resblocks",
}
_TIMM_BLOCK = {
  "ln_1": "norm1",
  "qkv": "attn.qkv",
  "out": "attn.proj",
  "ln_2": "norm2",
  "fc1": "mlp.fc1",
  "fc2": "mlp.fc2",
}
_TIMM_IMAGE = {
  "image/positional_embedding": "visual.trunk.pos_embed",
  "image/patch_embedding": "visual.trunk.patch_embed.proj",
  "image/ln_post": "visual.trunk.norm",
  "image/blocks": "visual.trunk.blocks",
  "image/pool/probe": "visual.trunk.attn_pool.latent",
  "image/pool/qkv": "visual.trunk.attn_pool.q + visual.trunk.attn_pool.kv",
  "image/pool/out": "visual.trunk.attn_pool.proj",
  "image/pool/norm": "visual.trunk.attn_pool.norm",
  "image/pool/fc1": "visual.trunk.attn_pool.mlp.fc1",
  "image/pool/fc2": "visual.trunk.attn_pool.mlp.fc2",
}
_TIMM_ONES = {"visual.trunk.pos_embed": 1, "visual.trunk.attn_pool.latent": 2}
_HF_BLOCK = {
  "ln_1": "layer_norm1",
  "qkv": "self_attn.q_proj + self_attn.k_proj + self_attn.v_proj",
  "out": "self_attn.out_proj",
  "ln_2": "layer_norm2",
  "fc1": "mlp.fc1",
  "fc2": "mlp.fc2",
}
_HF_BOTH = {
  "image/positional_embedding": "vision_model.embeddings.position_embedding.weight",
  "image/patch_embedding": "vision_model.embeddings.patch_embedding",
  "image/ln_post": "vision_model.post_layernorm",
  "image/blocks": "vision_model.encoder.layers",
  "text/token_embedding": "text_model.embeddings.token_embedding",
  "text/positional_embedding": "text_model.embeddings.position_embedding.weight",
  "text/ln_final": "text_model.final_layer_norm",
  "text/blocks": "text_model.encoder.layers",
}
_HF_CLIP = {
  "image/class_embedding": "vision_model.embeddings.class_embedding",
  "image/ln_pre": "vision_model.pre_layrnorm",
  "image/proj": "visual_projection.weight",
  "text/proj": "text_projection.weight",
}
_HF_SIGLIP_ONES = {"vision_model.head.probe": 2, "logit_scale": 1, "logit_bias": 1}
_HF_SIGLIP = {
  "image/pool/probe": "vision_model.head.probe",
  "image/pool/qkv": "vision_model.head.attention.in_proj_",
  "image/pool/out": "vision_model.head.attention.out_proj",
  "image/pool/norm": "vision_model.head.layernorm",
  "image/pool/fc1": "vision_model.head.mlp.fc1",
  "image/pool/fc2": "vision_model.head.mlp.fc2",
  "text/proj": "text_model.head.weight",
  "text/proj_bias": "text_model.head.bias",
}


def open_clip_layout(config: CLIPConfig, text_prefix: str) -> Layout:
  linear = config.text.projection == "linear"
  text = {
    "text/token_embedding": "token_embedding",
    "text/positional_embedding": "positional_embedding",
    "text/ln_final": "ln_final",
    "text/proj": "text_projection.weight" if linear else "text_projection",
    "text/proj_bias": "text_projection.bias",
    "text/blocks": "transformer.resblocks",
  }
  modules = _TOP | {ours: text_prefix + theirs for ours, theirs in text.items()}
  if config.vision.pool == "map":
    return Layout(modules | _TIMM_IMAGE, _TIMM_BLOCK, _OPEN_CLIP_BLOCK, _TIMM_ONES)
  return Layout(modules | _OPEN_CLIP_IMAGE, _OPEN_CLIP_BLOCK, _OPEN_CLIP_BLOCK, {})


def hf_layout(config: CLIPConfig) -> Layout:
  siglip = config.vision.pool == "map"
  own, ones = (_HF_SIGLIP, _HF_SIGLIP_ONES) if siglip else (_HF_CLIP, {})
  return Layout(_TOP | _HF_BOTH | own, _HF_BLOCK, _HF_BLOCK, ones)


def layout_of(state: Mapping, config: CLIPConfig) -> Layout:
  """The format of a state dict, by its names."""
  if any(name.startswith(("vision_model.", "text_model.")) for name in state):
    return hf_layout(config)
  prefix = "text." if any(name.startswith("text.") for name in state) else ""
  return open_clip_layout(config, prefix)


_SUFFIXES = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}


def tensor_names(path: tuple[str, ...], shape: tuple[int, ...], layout: Layout) -> list[list[str]]:
  """A format's names for one of our parameters: for each layer of `blocks`, of its parts."""
  if "blocks" not in path:
    return [_parts(path, layout.modules)]
  tower = layout.modules["/".join(path[:2])]
  parts = _parts(path[2:], layout.image_block if path[0] == "image" else layout.text_block)
  return [[f"{tower}.{layer}.{part}" for part in parts] for layer in range(shape[0])]


def _parts(path: tuple[str, ...], modules: dict[str, str]) -> list[str]:
  if (name := "/".join(path)) in modules:
    return [modules[name]]
  suffix = _SUFFIXES[path[-1]]
  return [
    module + ("" if module.endswith("_") else ".") + suffix
    for module in modules["/".join(path[:-1])].split(" + ")
  ]


def split(whole: np.ndarray, names: list[str]) -> list[np.ndarray]:
  """The parts of a tensor; of keys and values (`.kv.`) there are twice as many rows."""
  if len(names) == 1:
    return [whole]
  units = np.cumsum([2 if ".kv." in name else 1 for name in names])
  return np.split(whole, [len(whole) * unit // units[-1] for unit in units[:-1]])


def _is_transposed(path: tuple[str, ...], name: str) -> bool:
  """Whether torch has a linear layer's weight for this parameter of ours."""
  return path[-1] == "kernel" or (path[-1] == "proj" and name.endswith(".weight"))


def to_torch(path: tuple[str, ...], array: np.ndarray, name: str, layout: Layout) -> np.ndarray:
  if path[-2:] == ("patch_embedding", "kernel"):
    size = math.isqrt(array.shape[0] // 3)
    return array.reshape(size, size, 3, -1).transpose(3, 2, 0, 1)
  array = array.T if _is_transposed(path, name) else array
  return array.reshape((1,) * layout.ones.get(name, 0) + array.shape)


def from_torch(path: tuple[str, ...], array: np.ndarray, name: str) -> np.ndarray:
  if path[-2:] == ("patch_embedding", "kernel"):
    return array.transpose(2, 3, 1, 0).reshape(-1, array.shape[0])
  return array.T if _is_transposed(path, name) else array


def torch_shapes(shapes: dict, layout: Layout) -> dict[str, tuple[int, ...]]:
  torch_shapes = {}
  for path, shape in shapes.items():
    one = np.broadcast_to(np.float32(0), shape[1:] if "blocks" in path else shape)
    for names in tensor_names(path, shape, layout):
      parts = split(to_torch(path, one, names[0], layout), names)
      torch_shapes |= {name: part.shape for name, part in zip(names, parts, strict=True)}
  return torch_shapes
