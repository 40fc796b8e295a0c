import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interop import import_open_clip

from sbjax.models import convert
from sbjax.models.clip import CLIP
from sbjax.models.config_files import config_from_dict, to_hf, to_open_clip
from sbjax.models.convert import load_weights, save_weights, state_dict
from sbjax.models.sizes import SIZES, CLIPConfig, TextConfig, VisionConfig
from sbjax.models.transformer import BlockOptions

MICRO = CLIPConfig(
  24,
  VisionConfig(image_size=16, patch_size=4, width=48, layers=3, heads=3, mlp_ratio=2.7),
  TextConfig(context_length=8, vocab_size=64, width=32, layers=2, heads=2, eot_id=63),
)
OPEN_CLIP_NAMES = {
  "S/16": "ViT-S-16",
  "B/32": "ViT-B-32",
  "B/16": "ViT-B-16",
  "L/14": "ViT-L-14",
  "H/14": "ViT-H-14",
  "bigG/14": "ViT-bigG-14",
}


def random_params(**options):
  """Random parameters, none zero, one or symmetric."""
  image = jax.ShapeDtypeStruct((1, 16, 16, 3), jnp.float32)
  text = jax.ShapeDtypeStruct((1, 8), jnp.int32)
  init = CLIP(MICRO, BlockOptions(**options)).init
  variables = jax.eval_shape(init, jax.random.key(0), image, text)
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), variables["params"])


def torch_shapes(config, **options):
  return convert._torch_shapes(
    convert._shapes(config, options), convert._open_clip_layout(config, "")
  )


def struct_state(config):
  """A state dict of shapes."""
  return {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in torch_shapes(config).items()}


def micro_open_clip(open_clip, **block):
  """open_clip's model with the sizes of MICRO."""
  vision, text = MICRO.vision, MICRO.text
  return open_clip.model.CLIP(
    MICRO.embed_dim,
    {
      "image_size": vision.image_size,
      "patch_size": vision.patch_size,
      "width": vision.width,
      "layers": vision.layers,
      "head_width": vision.width // vision.heads,
      "mlp_ratio": vision.mlp_ratio,
      **block,
    },
    {**{k: v for k, v in dataclasses.asdict(text).items() if k != "eot_id"}, **block},
  ).eval()


def perturb(model):
  """Moves every parameter, so that none is trivially zero or one."""
  import torch

  torch.manual_seed(0)
  with torch.no_grad():
    for parameter in model.parameters():
      scale = 0.5 * parameter.std() if parameter.ndim > 1 else torch.tensor(0.2)
      parameter.add_(scale * torch.randn_like(parameter))


def assert_same_features(torch_model, params, config, **options):
  import torch

  rng = np.random.default_rng(1)
  vision, text = config.vision, config.text
  image = rng.standard_normal((2, vision.image_size, vision.image_size, 3), np.float32)
  ids = rng.integers(1, text.eot_id, (2, text.context_length), np.int32)
  ids[0, 3], ids[1, -1] = text.eot_id, text.eot_id
  with torch.no_grad():
    want = torch_model(torch.from_numpy(image.transpose(0, 3, 1, 2)), torch.from_numpy(ids).long())
  want_image, want_text, want_scale = (tensor.numpy() for tensor in want[:3])
  bias = {"init_logit_bias": 0.0} if "logit_bias" in params else {}
  model = CLIP(config, BlockOptions(dtype=jnp.float32, **options), **bias)
  got = jax.jit(model.apply)({"params": params}, image, ids)
  np.testing.assert_allclose(got["image_features"], want_image, atol=1e-4)
  np.testing.assert_allclose(got["text_features"], want_text, atol=1e-4)
  np.testing.assert_allclose(
    got["logit_scale"] * (got["image_features"] @ got["text_features"].T),
    want_scale * (want_image @ want_text.T),
    atol=1e-4,
  )


@pytest.mark.interop
def test_b32_logits_equal_open_clip_s():
  open_clip = import_open_clip()
  model = open_clip.create_model("ViT-B-32", pretrained=None).eval()
  perturb(model)
  params = load_weights(model.state_dict(), SIZES["B/32"])
  assert_same_features(model, params, SIZES["B/32"])


@pytest.mark.interop
@pytest.mark.parametrize("layer_scale", [False, True])
@pytest.mark.parametrize("scan", [False, True])
def test_logits_equal_open_clip_s(layer_scale, scan):
  model = micro_open_clip(import_open_clip(), **({"ls_init_value": 0.3} if layer_scale else {}))
  perturb(model)
  params = load_weights(model.state_dict(), MICRO, scan=scan)
  assert_same_features(model, params, MICRO, scan=scan, zero_init_layer_scale=layer_scale)


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


@pytest.mark.interop
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


@pytest.mark.interop
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


@pytest.mark.interop
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


@pytest.mark.interop
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


@pytest.mark.interop
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


@pytest.mark.interop
@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".bin"])
@pytest.mark.parametrize("layer_scale", [False, True])
def test_open_clip_loads_what_we_save(tmp_path, suffix, layer_scale):
  open_clip = import_open_clip()
  params = random_params(zero_init_layer_scale=layer_scale)
  path = tmp_path / f"clip{suffix}"
  save_weights(params, path, MICRO)
  model = micro_open_clip(open_clip, **({"ls_init_value": 1.0} if layer_scale else {}))
  open_clip.load_checkpoint(model, str(path), strict=True)
  assert_same_features(model, params, MICRO, zero_init_layer_scale=layer_scale)
  jax.tree.map(np.testing.assert_array_equal, load_weights(path, MICRO), params)


@pytest.mark.interop
def test_open_clip_training_checkpoints_load(tmp_path):
  import_open_clip()
  import torch

  params = random_params()
  state = {
    f"module.{name}": torch.from_numpy(array).bfloat16()
    for name, array in state_dict(params, MICRO).items()
  }
  torch.save({"epoch": 3, "state_dict": state}, tmp_path / "epoch_3.pt")
  loaded = load_weights(tmp_path / "epoch_3.pt", MICRO)
  for got, want in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, want.astype(jnp.bfloat16).astype(np.float32))


@pytest.mark.interop
@pytest.mark.parametrize("size", OPEN_CLIP_NAMES)
def test_sizes_equal_open_clip_s(size):
  open_clip = import_open_clip()
  import torch

  theirs = open_clip.get_model_config(OPEN_CLIP_NAMES[size])
  with torch.device("meta"):
    state = open_clip.model.CLIP(**theirs).state_dict()
  ours = SIZES[size]
  assert torch_shapes(ours) == {name: tuple(tensor.shape) for name, tensor in state.items()}
  vision, text = theirs["vision_cfg"], theirs["text_cfg"]
  assert ours.vision.heads == vision["width"] // vision.get("head_width", 64)
  assert ours.vision.image_size == vision["image_size"]
  assert ours.text.heads == text["heads"]


@pytest.mark.interop
def test_initial_parameters_are_distributed_as_open_clip_s():
  """Means and deviations of every tensor agree within six standard errors of two samples."""
  open_clip = import_open_clip()
  config = dataclasses.replace(MICRO, vision=dataclasses.replace(MICRO.vision, width=144))
  image, text = jnp.zeros((1, 16, 16, 3)), jnp.zeros((1, 8), jnp.int32)
  params = jax.jit(CLIP(config).init)(jax.random.key(0), image, text)["params"]
  ours = state_dict(params, config)
  vision = {"image_size": 16, "patch_size": 4, "width": 144, "layers": 3, "head_width": 48}
  model = open_clip.model.CLIP(
    MICRO.embed_dim,
    {**vision, "mlp_ratio": 2.7},
    {"context_length": 8, "vocab_size": 64, "width": 32, "layers": 2, "heads": 2},
  )
  for name, tensor in model.state_dict().items():
    want, got = tensor.numpy(), ours[name]
    error = 6 * (2 / want.size) ** 0.5 * want.std()
    np.testing.assert_allclose(got.mean(), want.mean(), atol=error + 1e-6, err_msg=name)
    np.testing.assert_allclose(got.std(), want.std(), atol=error, err_msg=name)


@pytest.mark.parametrize("layer_scale", [False, True])
def test_round_trip_is_exact(layer_scale):
  params = random_params(zero_init_layer_scale=layer_scale)
  state = state_dict(params, MICRO)
  assert ("visual.transformer.resblocks.2.ls_2.gamma" in state) == layer_scale
  jax.tree.map(np.testing.assert_array_equal, load_weights(state, MICRO), params)


def test_scanned_and_unrolled_parameters_give_the_same_state_dict():
  state = state_dict(random_params(), MICRO)
  unrolled = load_weights(state, MICRO, scan=False)
  assert jax.tree.structure(unrolled) == jax.tree.structure(random_params(scan=False))
  jax.tree.map(np.testing.assert_array_equal, state_dict(unrolled, MICRO), state)


def test_a_state_dict_error_lists_missing_unexpected_and_misshapen_tensors():
  state = state_dict(random_params(), MICRO)
  state["head.weight"] = state.pop("visual.proj")
  state["ln_final.bias"] = np.zeros(5, np.float32)
  with pytest.raises(ValueError) as error:
    load_weights(state, MICRO)
  assert "Missing: visual.proj." in str(error.value)
  assert "Unexpected: head.weight." in str(error.value)
  assert "ln_final.bias is (5,), not (32,)" in str(error.value)


def test_a_state_dict_of_another_size_names_that_size():
  state = struct_state(SIZES["B/16"])
  with pytest.raises(ValueError, match=r"It fits SIZES\['B/16'\]"):
    load_weights(state, SIZES["B/32"])


def test_parameters_that_open_clip_cannot_hold_are_refused():
  with pytest.raises(ValueError, match="qk_norm=True"):
    state_dict(random_params(qk_norm=True), MICRO)
  deeper = dataclasses.replace(MICRO, text=dataclasses.replace(MICRO.text, layers=3))
  with pytest.raises(ValueError, match=r"text/blocks/fc1/kernel is \(2, 32, 128\), not \(3,"):
    state_dict(random_params(), deeper)


@pytest.mark.parametrize("use", [load_weights, functools.partial(save_weights, random_params())])
def test_an_unknown_suffix_error_lists_the_known_ones(use, tmp_path):
  with pytest.raises(ValueError, match=r"clip.npz' must end in one of .safetensors, .pt"):
    use(str(tmp_path / "clip.npz"), MICRO)


def test_a_missing_torch_error_names_the_extra(monkeypatch, tmp_path):
  monkeypatch.setitem(__import__("sys").modules, "torch", None)
  with pytest.raises(ImportError, match=r"sbjax\[interop\]"):
    save_weights(random_params(), tmp_path / "clip.pt", MICRO)
