"""Weights of other models: their logits are the originals', with random weights."""

import warnings

import numpy as np
import pytest
from open_clip_case import assert_same_features, import_open_clip, perturb

from sbjax.interop.config_files import config_from_dict, to_hf, to_open_clip
from sbjax.interop.weights import load_weights, save_weights, state_dict
from sbjax.models.clip import CLIP
from sbjax.models.transformer import BlockOptions

# open_clip's fields that change the architecture, by the models that have them.
VARIANTS = {
  "quickgelu": ({"quick_gelu": True}, {}, {}),
  "CLIPA": (
    {},
    {"no_ln_pre": True, "pool_type": "avg", "final_ln_after_pool": True},
    {"pool_type": "last", "no_causal_mask": True},
  ),
  "worldwide": ({}, {}, {"pool_type": "eos", "eos_id": 2}),
  "tanh": ({}, {"act_kwargs": {"approximate": "tanh"}}, {"act_kwargs": {"approximate": "tanh"}}),
  "epsilon": ({}, {"norm_kwargs": {"eps": 1e-2}}, {"norm_kwargs": {"eps": 1e-2}}),
}
VISION_CFG = {"image_size": 16, "patch_size": 4, "width": 48, "layers": 2, "head_width": 16}
TEXT_CFG = {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_variants_equal_open_clip_s(variant):
  open_clip = import_open_clip()
  top, vision, text = VARIANTS[variant]
  cfg = {"embed_dim": 24, "vision_cfg": VISION_CFG | vision, "text_cfg": TEXT_CFG | text, **top}
  model = open_clip.model.CLIP(**cfg).eval()
  perturb(model)
  config = config_from_dict(cfg)
  params = load_weights(model.state_dict(), config)
  assert_same_features(model, params, config)
  for name, tensor in state_dict(params, config).items():
    np.testing.assert_array_equal(tensor, model.state_dict()[name].numpy())


def test_siglip_logits_equal_open_clip_s(tmp_path):
  open_clip = import_open_clip()
  cfg = {
    "embed_dim": 768,
    "init_logit_bias": -10,
    "custom_text": True,
    "vision_cfg": {
      "image_size": 256,
      "timm_model_name": "vit_base_patch32_siglip_256",
      "timm_pool": "map",
      "timm_proj": "none",
    },
    "text_cfg": {
      **TEXT_CFG,
      "no_causal_mask": True,
      "proj_bias": True,
      "pool_type": "last",
      "norm_kwargs": {"eps": 1e-6},
      "act_kwargs": {"approximate": "tanh"},
    },
  }
  model = open_clip.model.CustomTextCLIP(**{k: v for k, v in cfg.items() if k != "custom_text"})
  perturb(model.eval())
  config = config_from_dict(cfg)
  assert config_from_dict(to_open_clip(config, logit_bias=True)) == config
  params = load_weights(model.state_dict(), config)
  assert_same_features(model, params, config)
  save_weights(params, tmp_path / "siglip.safetensors", config)
  open_clip.load_checkpoint(model, str(tmp_path / "siglip.safetensors"), strict=True)
  assert_same_features(model, params, config)


def hf_model(kind, activation):
  """transformers' model of MICRO's size, and its config."""
  import_open_clip()
  transformers = pytest.importorskip("transformers")
  shared = dict(num_attention_heads=2, num_hidden_layers=2, hidden_act=activation)
  vision = dict(hidden_size=32, intermediate_size=86, image_size=16, patch_size=4, **shared)
  text = dict(
    hidden_size=32, intermediate_size=50, max_position_embeddings=8, vocab_size=64, **shared
  )
  torch_seed()
  if kind == "siglip":
    config = transformers.SiglipConfig(text_config=text, vision_config=vision)
    return transformers.SiglipModel(config).eval(), config.to_dict()
  config = transformers.CLIPConfig(
    text_config=text | {"eos_token_id": 63}, vision_config=vision, projection_dim=24
  )
  return transformers.CLIPModel(config).eval(), config.to_dict()


def torch_seed():
  import torch

  torch.manual_seed(0)


class Features:
  """transformers' model with open_clip's call."""

  def __init__(self, model):
    self.model = model

  def __call__(self, image, text):
    out = self.model(input_ids=text, pixel_values=image)
    return out.image_embeds, out.text_embeds, self.model.logit_scale.exp()


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_logits_equal_transformers(tmp_path, kind, activation):
  model, hf_config = hf_model(kind, activation)
  perturb(model)
  config = config_from_dict(hf_config)
  params = load_weights(model.state_dict(), config)
  assert_same_features(Features(model), params, config)
  assert config_from_dict(to_hf(config)) == config
  for name, tensor in state_dict(params, config, format="hf").items():
    np.testing.assert_array_equal(tensor, model.state_dict()[name].numpy())


@pytest.mark.parametrize("rows", [64, 80])
@pytest.mark.parametrize("kind", ["open_clip", "eos", "hf", "hf_largest"])
def test_texts_end_where_their_own_model_ends_them(kind, rows):
  """Also in a table with more rows, and texts without an end token."""
  open_clip = import_open_clip()
  import torch

  ids = np.array([[1, 5, 63, 0, 0, 0, 0, 0], [9, 63, 3, 63, 2, 0, 0, 0], [7, 40, 5, 9, 1, 1, 1, 1]])
  if kind in ("open_clip", "eos"):
    text = TEXT_CFG | {"vocab_size": rows} | (VARIANTS["worldwide"][2] if kind == "eos" else {})
    config = {"embed_dim": 24, "vision_cfg": VISION_CFG, "text_cfg": text}
    model = open_clip.model.CLIP(**config).eval()
    encode = model.encode_text
  else:
    transformers = pytest.importorskip("transformers")
    one = dict(num_attention_heads=2, num_hidden_layers=2, hidden_size=32, intermediate_size=64)
    text = one | {"max_position_embeddings": 8, "vocab_size": rows}
    text["eos_token_id"] = 2 if kind == "hf_largest" else 63
    vision = one | {"image_size": 16, "patch_size": 4}
    model = transformers.CLIPModel(
      transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)
    ).eval()
    config = model.config.to_dict()

    def encode(ids):
      out = model.text_model(input_ids=ids)
      return model.text_projection(out.pooler_output)

  perturb(model)
  with torch.no_grad():
    want = encode(torch.from_numpy(ids)).numpy()
  config = config_from_dict(config)
  params = load_weights(model.state_dict(), config)
  clip = CLIP(config, BlockOptions(dtype="float32"))
  got = clip.apply({"params": params}, ids.astype(np.int32), method="encode_text", normalize=False)
  np.testing.assert_allclose(got, want, atol=1e-4)


def test_openai_s_archives_load_with_quick_gelu_only(tmp_path):
  open_clip = import_open_clip()
  import torch

  cfg = {"embed_dim": 24, "vision_cfg": VISION_CFG, "text_cfg": TEXT_CFG, "quick_gelu": True}
  model = open_clip.model.CLIP(**cfg).eval()
  for name, value in {"input_resolution": 16, "context_length": 8, "vocab_size": 64}.items():
    model.__dict__.pop(name, None)
    model.register_buffer(name, torch.tensor(value))
  path = str(tmp_path / "ViT-B-32.pt")
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.jit is deprecated.
    torch.jit.save(
      torch.jit.trace(model, (torch.zeros(1, 3, 16, 16), torch.ones(1, 8).long())), path
    )
    params = load_weights(path, config_from_dict(cfg))
  assert_same_features(model, params, config_from_dict(cfg))
  with pytest.raises(ValueError, match=r"OpenAI's weights.*quick_gelu.*config has gelu"):
    load_weights(model.state_dict(), config_from_dict({**cfg, "quick_gelu": False}))


@pytest.mark.parametrize("image_size", [24, 12])
def test_position_embeddings_are_resized_as_open_clip_does(image_size):
  open_clip = import_open_clip()
  cfg = {"embed_dim": 24, "vision_cfg": VISION_CFG, "text_cfg": TEXT_CFG}
  state = open_clip.model.CLIP(**cfg).state_dict()
  cfg = {
    **cfg,
    "vision_cfg": VISION_CFG | {"image_size": image_size},
    "text_cfg": TEXT_CFG | {"context_length": 13},
  }
  model, config = open_clip.model.CLIP(**cfg).eval(), config_from_dict(cfg)
  with pytest.raises(ValueError, match="Only position embeddings differ: resize=True"):
    load_weights(state, config)
  params = load_weights(state, config, resize=True)
  resized = dict(state)
  open_clip.model.resize_pos_embed(resized, model)
  open_clip.model.resize_text_pos_embed(resized, model)
  for tower, name in (("image", "visual.positional_embedding"), ("text", "positional_embedding")):
    np.testing.assert_allclose(
      params[tower]["positional_embedding"], resized[name].numpy(), atol=1e-6
    )
