"""Architectures in the config.json of Hugging Face transformers: CLIPModel and SiglipModel."""

from collections.abc import Mapping
from typing import Any, NoReturn

from sbjax.models.sizes import CLIPConfig, TextConfig, VisionConfig


def refuse(name: str, what: str) -> NoReturn:
  """Raises a ValueError for an architecture that sbjax lacks."""
  raise ValueError(
    f"{name} is {what}, which sbjax does not have. It has ViT CLIPs (open_clip, OpenAI,"
    " transformers' CLIPModel), CLIPA and SigLIP."
  )


_HF_ACTIVATIONS = {
  "gelu": "gelu",
  "quick_gelu": "quick_gelu",
  "gelu_pytorch_tanh": "gelu_tanh",
  "gelu_new": "gelu_tanh",
}
# transformers' defaults, which config.json leaves out: those of images, of texts.
_HF_DEFAULTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
  "clip": (
    dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
         image_size=224, patch_size=32, hidden_act="quick_gelu", layer_norm_eps=1e-5),
    dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8,
         max_position_embeddings=77, vocab_size=49408, hidden_act="quick_gelu",
         layer_norm_eps=1e-5, eos_token_id=49407),
  ),
  "siglip": (
    dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
         image_size=224, patch_size=16, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6),
    dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
         max_position_embeddings=64, vocab_size=32000, hidden_act="gelu_pytorch_tanh",
         layer_norm_eps=1e-6),
  ),
}  # fmt: skip


def from_hf(values: Mapping, name: str) -> CLIPConfig:
  kind = values["model_type"]
  if kind == "siglip2":
    refuse(name, "a SigLIP2 for any aspect ratio (NaFlex)")
  if kind not in _HF_DEFAULTS:
    refuse(name, f"transformers' {kind!r}")
  # Old files have the same twice. *_config_dict wins, and defaults are what it lacks.
  towers = []
  for tower, default in zip(("vision", "text"), _HF_DEFAULTS[kind], strict=True):
    old = values.get(f"{tower}_config_dict")
    winning = {} if old is None else default | old
    towers.append(default | (values.get(f"{tower}_config") or {}) | winning)
  v, t = ({k: x for k, x in tower.items() if x is not None} for tower in towers)
  siglip = kind == "siglip"
  if siglip and v.get("vision_use_head") is False:
    refuse(name, "a SigLIP without its pooling head")
  embed_dim = v["hidden_size"] if siglip else values.get("projection_dim", 512)
  if embed_dim is None:
    raise ValueError(f"{name} has projection_dim=null: expected a number (transformers' is 512).")
  eot_id = None if siglip else t.get("eos_token_id", "null")
  if not isinstance(eot_id, int | None):
    raise ValueError(f"{name} has eos_token_id={eot_id}: expected the number of the end token.")
  if eot_id == 2:  # By 2 transformers means the largest id, as open_clip's "argmax".
    eot_id = None
  vision = VisionConfig(
    image_size=v["image_size"],
    patch_size=v["patch_size"],
    pool="map" if siglip else "class",
    pre_norm=not siglip,
    **_hf_tower(v, name),
  )
  text = TextConfig(
    context_length=t["max_position_embeddings"],
    vocab_size=t["vocab_size"],
    eot_id=eot_id,
    pool="last" if siglip else "eot",
    causal=not siglip,
    projection="linear" if siglip else "matrix",
    **_hf_tower(t, name),
  )
  return CLIPConfig(embed_dim, vision, text)


def _hf_tower(tower: Mapping, name: str) -> dict:
  width, hidden = tower["hidden_size"], tower["intermediate_size"]
  if tower["hidden_act"] not in _HF_ACTIVATIONS:
    refuse(name, f"a CLIP with the activation {tower['hidden_act']!r}")
  return {
    "width": width,
    "layers": tower["num_hidden_layers"],
    "heads": tower["num_attention_heads"],
    # Half a unit more where int(width * ratio) would be one less.
    "mlp_ratio": (hidden + (int(width * (hidden / width)) < hidden) / 2) / width,
    "activation": _HF_ACTIVATIONS[tower["hidden_act"]],
    "norm_epsilon": float(tower["layer_norm_eps"]),
  }


def to_hf(config: CLIPConfig) -> dict:
  """The contents of transformers' config.json: of a CLIPModel or a SiglipModel.

  Raises:
    ValueError: transformers has no place for the architecture.
  """
  v, t = config.vision, config.text
  siglip = v.pool == "map"
  expected = ("last", False, "linear") if siglip else ("eot", True, "matrix")
  if (t.pool, t.causal, t.projection) != expected or (not siglip and not v.pre_norm):
    raise ValueError("transformers' CLIPModel and SiglipModel have no place for this architecture.")
  if v.pool == "average":
    raise ValueError("transformers' CLIPModel has no average of patches (pool='average').")
  if not siglip and t.eot_id == 2:
    raise ValueError(
      "transformers takes eos_token_id=2 for the largest id. Give the end token another id."
    )
  eos = 2 if t.eot_id is None else t.eot_id
  acts = {ours: theirs for theirs, ours in reversed(_HF_ACTIVATIONS.items())}

  def tower(c):
    return {
      "hidden_size": c.width,
      "intermediate_size": c.mlp_width,
      "num_hidden_layers": c.layers,
      "num_attention_heads": c.heads,
      "hidden_act": acts[c.activation],
      "layer_norm_eps": c.norm_epsilon,
    }

  end = {"projection_size": config.embed_dim} if siglip else {"projection_dim": config.embed_dim}
  kind = "siglip" if siglip else "clip"
  return {
    "architectures": ["SiglipModel" if siglip else "CLIPModel"],
    "model_type": kind,
    **({} if siglip else {"projection_dim": config.embed_dim}),
    "initializer_factor": 1.0,
    "dtype": "float32",
    "vision_config": {
      **tower(v),
      "image_size": v.image_size,
      "patch_size": v.patch_size,
      **({} if siglip else end),
      "model_type": f"{kind}_vision_model",
    },
    "text_config": {
      **tower(t),
      "max_position_embeddings": t.context_length,
      "vocab_size": t.vocab_size,
      **end,
      **({} if siglip else {"eos_token_id": eos, "bos_token_id": None, "pad_token_id": 0}),
      "model_type": f"{kind}_text_model",
    },
  }
