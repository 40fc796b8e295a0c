"""Architectures in the config files of open_clip and of Hugging Face transformers.

open_clip has a JSON file for each model, and writes one beside weights (open_clip_config.json);
transformers writes config.json. What sbjax has no layers for is refused by the architecture's name.
"""

import difflib
import importlib.util
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from sbjax.models.sizes import SIZES, CLIPConfig, TextConfig, VisionConfig

OPEN_CLIP_FILE, HF_FILE = "open_clip_config.json", "config.json"


def read_config(source: str | os.PathLike) -> CLIPConfig:
  """The architecture of a key of SIZES, of one of open_clip's models, or of a folder with weights.

  Args:
    source: such as "B/32", "ViT-B-32-quickgelu" (which reads the installed open_clip), or the path
      of a folder with open_clip_config.json or config.json, or of such a file.

  Raises:
    ValueError: nothing has this name, or sbjax lacks the architecture; the message names it.
  """
  if source in SIZES:
    return SIZES[str(source)]
  path = Path(source).expanduser()
  if path.is_dir():
    found = [path / name for name in (OPEN_CLIP_FILE, HF_FILE) if (path / name).is_file()]
    if not found:
      raise ValueError(
        f"{path} has no config: expected {OPEN_CLIP_FILE} (open_clip) or {HF_FILE} (transformers)."
      )
    path = found[0]
  if path.suffix == ".json":
    return config_from_dict(read_json(path), str(path))
  files = _open_clip_files()
  if str(source) in files:
    return config_from_dict(read_json(files[str(source)]), str(source))
  near = difflib.get_close_matches(str(source), [*SIZES, *files], cutoff=0.5)
  raise ValueError(
    f"{str(source)!r} is no model: known are {', '.join(SIZES)}, the names of open_clip's models,"
    f" and folders with {OPEN_CLIP_FILE} or {HF_FILE}."
    + (f" Near it: {', '.join(near)}." if near else "")
    + ("" if files else f" {_NOT_INSTALLED}")
  )


def config_of(weights: str | os.PathLike) -> CLIPConfig | None:
  """The architecture in the config file of a folder of weights, or beside a file of weights.

  None if there is none. A config.json of something else, such as a training run, is none.

  Raises:
    ValueError: sbjax lacks the architecture; the message names it.
  """
  path = Path(weights).expanduser()
  folder = path if path.is_dir() else path.parent
  for file in (folder / OPEN_CLIP_FILE, folder / HF_FILE):
    if file.is_file() and not {"model_cfg", "vision_cfg", "model_type"}.isdisjoint(read_json(file)):
      return read_config(file)
  return None


def config_from_dict(values: Mapping, name: str = "The config") -> CLIPConfig:
  """The architecture in the contents of a config file; `name` is for messages.

  Raises:
    ValueError: sbjax lacks the architecture; the message names it.
  """
  values = values.get("model_cfg", values)
  if "vision_cfg" in values:
    return _from_open_clip(values, name)
  if "model_type" in values:
    return from_hf(values, name)
  raise ValueError(f"{name} has neither vision_cfg (open_clip) nor model_type (transformers).")


def open_clip_names() -> list[str]:
  """The names of the models in the installed open_clip; [] if it is not installed."""
  return sorted(_open_clip_files())


_NOT_INSTALLED = "open_clip's names need it installed: the extra `interop` (sbjax[interop])."


def read_json(path: Path) -> dict:
  """The object in a JSON file; a ValueError says that it is missing or something else."""
  try:
    values = json.loads(path.read_bytes())
  except FileNotFoundError:
    raise ValueError(f"There is no config file {path}.") from None
  except ValueError as error:
    raise ValueError(f"{path} is not JSON: {error}.") from None
  if not isinstance(values, dict):
    raise ValueError(f"{path} must hold a JSON object.")
  return values


def _open_clip_files() -> dict[str, Path]:
  package = importlib.util.find_spec("open_clip")  # An import would load torch.
  if package is None or package.origin is None:
    return {}
  return {p.stem: p for p in (Path(package.origin).parent / "model_configs").glob("*.json")}


# open_clip. The fields of its towers that have the same names here, and their defaults.
_VISION = dict(image_size=224, patch_size=16, width=768, layers=12, mlp_ratio=4.0)
_TEXT = dict(context_length=77, vocab_size=49408, width=512, layers=12, heads=8, mlp_ratio=4.0)
# What timm's names begin with, and the architecture.
_TIMM = (
  ("eva", "an EVA-CLIP"),
  ("convnext", "a ConvNeXt CLIP"),
  ("vitamin", "a ViTamin CLIP"),
  ("fastvit", "a MobileCLIP with a FastViT"),
  ("vit_base_mci", "a MobileCLIP with a hybrid ViT"),
  ("vit_pe_", "a Perception Encoder (PE-Core)"),
  ("swin", "a Swin CLIP"),
)
_SIGLIP = re.compile(r"vit_(base|large|so400m|giantopt)_patch(\d+)_siglip_(\d+)")
_SIGLIP_SIZES: dict[str, dict[str, Any]] = {
  "base": dict(width=768, layers=12, heads=12, mlp_ratio=4.0),
  "large": dict(width=1024, layers=24, heads=16, mlp_ratio=4.0),
  "so400m": dict(width=1152, layers=27, heads=16, mlp_ratio=3.7362),
  "giantopt": dict(width=1536, layers=40, heads=16, mlp_ratio=4.0),
}
# Whether timm's tower has the tanh GELU; timm's others have the exact one.
_SIGLIP_TANH = re.compile(r"vit_(base_patch32|large_patch16_siglip_512|so400m_patch16|giantopt)")
# Fields that do not change what a trained model computes, or belong to what is refused anyway.
_INERT = {
  *(*_VISION, *_TEXT, "head_width", "patch_dropout", "hf_tokenizer_name", "tokenizer_kwargs"),
  *("tokenizer_mode", "pad_id", "eos_id", "pool_type", "norm_kwargs", "act_kwargs", "proj_type"),
  *("no_causal_mask", "proj_bias", "no_ln_pre", "ls_init_value", "final_ln_after_pool"),
  *("attn_pooler_queries", "attn_pooler_heads", "hf_model_pretrained", "hf_proj_type"),
  *("hf_pooler_type",),
}
_DEFAULTS = {"pos_embed_type": "learnable", "block_type": None}


def _from_open_clip(values: Mapping, name: str) -> CLIPConfig:
  if missing := [key for key in ("embed_dim", "text_cfg") if values.get(key) is None]:
    raise ValueError(f"{name} has vision_cfg (open_clip) and lacks {' and '.join(missing)}.")
  vision, text = values["vision_cfg"], values["text_cfg"]
  if "multimodal_cfg" in values or vision.get("attentional_pool"):
    refuse(name, "a CoCa")
  if text.get("hf_model_name"):
    refuse(name, f"a CLIP with the text tower {text['hf_model_name']!r} of transformers")
  if isinstance(vision.get("layers"), list):
    refuse(name, "a ResNet CLIP")
  for tower in (vision, text):
    timm = tower.get("timm_model_name")
    other = {k: v for k, v in tower.items() if k not in _INERT and v not in (None, False)}
    unknown = [f"{k}={v!r}" for k, v in other.items() if v != _DEFAULTS.get(k)]
    if not timm and unknown:
      refuse(name, f"a CLIP with {', '.join(unknown)}")
  if bool(vision.get("ls_init_value")) != bool(text.get("ls_init_value")):
    refuse(name, "a CLIP with layer scale in one tower only")
  quick = bool(values.get("quick_gelu"))
  return CLIPConfig(
    values["embed_dim"],
    _open_clip_vision(vision, quick, name),
    _open_clip_text(text, quick, name),
  )


def _open_clip_vision(v: Mapping, quick: bool, name: str) -> VisionConfig:
  fields = {field: v.get(field, default) for field, default in _VISION.items()}
  if isinstance(size := fields["image_size"], list):
    if len(set(size)) > 1:
      refuse(name, f"a CLIP for images that are not square ({size})")
    fields["image_size"] = size[0]
  if timm := v.get("timm_model_name"):
    match = _SIGLIP.fullmatch(timm)
    if match is None or v.get("timm_pool") != "map" or v.get("timm_proj") != "none":
      known = [what for prefix, what in _TIMM if timm.startswith(prefix)]
      refuse(name, known[0] if known else f"a CLIP with timm's {timm!r}")
    return VisionConfig(
      image_size=fields["image_size"],
      patch_size=int(match[2]),
      **_SIGLIP_SIZES[match[1]],
      activation="gelu_tanh" if _SIGLIP_TANH.match(timm) else "gelu",
      norm_epsilon=1e-6,
      pool="map",
      pre_norm=False,
    )
  pools = {"tok": "class", "avg": "average"}
  pool = v.get("pool_type", "tok")
  if pool not in pools or (pool == "avg" and not v.get("final_ln_after_pool")):
    refuse(name, f"a CLIP with an image pooling of {pool!r} before the last layer norm")
  return VisionConfig(
    **fields,
    heads=fields["width"] // v.get("head_width", 64),
    activation=_open_clip_activation(v, quick, name),
    norm_epsilon=_open_clip_epsilon(v),
    pool=pools[pool],
    pre_norm=not v.get("no_ln_pre", False),
  )


def _open_clip_text(t: Mapping, quick: bool, name: str) -> TextConfig:
  pool = t.get("pool_type", "argmax")
  if pool not in ("argmax", "eos", "last"):
    refuse(name, f"a CLIP with a text pooling of {pool!r}")
  projection = "none" if t.get("proj_type", "linear") == "none" else "matrix"
  if projection == "matrix" and t.get("proj_bias"):
    projection = "linear"
  return TextConfig(
    **{field: t.get(field, default) for field, default in _TEXT.items()},
    # "argmax" is the largest id, CLIP's end of text.
    eot_id=t.get("eos_id", 2) if pool == "eos" else None,
    activation=_open_clip_activation(t, quick, name),
    norm_epsilon=_open_clip_epsilon(t),
    pool="last" if pool == "last" else "eot",
    causal=not t.get("no_causal_mask", False),
    projection=projection,
  )


def _open_clip_activation(tower: Mapping, quick: bool, name: str) -> str:
  options = tower.get("act_kwargs") or {}
  if options not in ({}, {"approximate": "tanh"}) or (quick and options):
    refuse(name, f"a CLIP with act_kwargs={options}")
  return "quick_gelu" if quick else "gelu_tanh" if options else "gelu"


def _open_clip_epsilon(tower: Mapping) -> float:
  return float((tower.get("norm_kwargs") or {}).get("eps", 1e-5))


def to_open_clip(
  config: CLIPConfig, *, layer_scale: bool = False, logit_bias: bool = False
) -> dict:
  """open_clip's `model_cfg` of an architecture.

  Raises:
    ValueError: open_clip has no place for it.
  """
  v, t = config.vision, config.text
  quick = {v.activation, t.activation} == {"quick_gelu"}
  if "quick_gelu" in (v.activation, t.activation) and not quick:
    raise ValueError("open_clip has quick_gelu in both towers or in none.")
  if t.pool == "eot" and t.eot_id not in (None, t.vocab_size - 1):
    pool = {"pool_type": "eos", "eos_id": t.eot_id}
  else:
    pool = {"pool_type": "last"} if t.pool == "last" else {}
  text = {
    **{field: getattr(t, field) for field in _TEXT},
    **pool,
    **_open_clip_options(t),
    **({} if t.causal else {"no_causal_mask": True}),
    **{"matrix": {}, "linear": {"proj_bias": True}, "none": {"proj_type": "none"}}[t.projection],
  }
  scale = {"ls_init_value": 1e-4} if layer_scale else {}
  return {
    "embed_dim": config.embed_dim,
    **({"quick_gelu": True} if quick else {}),
    **({"init_logit_bias": -10} if logit_bias else {}),
    **({"custom_text": True} if v.pool == "map" else {}),
    "vision_cfg": {**_to_open_clip_vision(v), **scale},
    "text_cfg": {**text, **scale},
  }


def _to_open_clip_vision(v: VisionConfig) -> dict:
  if v.pool == "map":
    return _to_timm(v)
  pool = {"pool_type": "avg", "final_ln_after_pool": True} if v.pool == "average" else {}
  return {
    **{field: getattr(v, field) for field in _VISION},
    "head_width": v.width // v.heads,
    **pool,
    **_open_clip_options(v),
    **({} if v.pre_norm else {"no_ln_pre": True}),
  }


def _to_timm(v: VisionConfig) -> dict:
  """The fields of a SigLIP tower, which open_clip knows by timm's name."""
  for size, known in _SIGLIP_SIZES.items():
    name = f"vit_{size}_patch{v.patch_size}_siglip_{v.image_size}"
    tanh = bool(_SIGLIP_TANH.match(name))
    width, layers, heads, mlp_ratio = known.values()
    sizes = width, layers, heads, int(width * mlp_ratio)
    same = sizes == (v.width, v.layers, v.heads, v.mlp_width)
    if same and tanh == (v.activation == "gelu_tanh") and name in _TIMM_SIGLIPS:
      return {
        "image_size": v.image_size,
        "timm_model_name": name,
        "timm_model_pretrained": False,
        "timm_pool": "map",
        "timm_proj": "none",
      }
  raise ValueError(
    f"open_clip has SigLIP's towers by timm's names ({', '.join(_TIMM_SIGLIPS)}), and none is of"
    " this size and activation; transformers' format (hf) holds any size."
  )


_TIMM_SIGLIPS = (
  *(f"vit_base_patch16_siglip_{size}" for size in (224, 256, 384, 512)),
  "vit_base_patch32_siglip_256",
  *(f"vit_large_patch16_siglip_{size}" for size in (256, 384, 512)),
  *(f"vit_so400m_patch14_siglip_{size}" for size in (224, 378, 384)),
  *(f"vit_so400m_patch16_siglip_{size}" for size in (256, 384, 512)),
  *(f"vit_giantopt_patch16_siglip_{size}" for size in (256, 384)),
)


def _open_clip_options(tower: VisionConfig | TextConfig) -> dict:
  act = {"act_kwargs": {"approximate": "tanh"}} if tower.activation == "gelu_tanh" else {}
  norm = {} if tower.norm_epsilon == 1e-5 else {"norm_kwargs": {"eps": tower.norm_epsilon}}
  return act | norm


# Hugging Face transformers: CLIPModel and SiglipModel.


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
