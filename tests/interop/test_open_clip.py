"""open_clip and we load each other's weights: equal logits, sizes and initial deviations."""

import dataclasses

import clip_case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clip_case import random_params
from open_clip_case import assert_same_features, import_open_clip, perturb

from sbjax.interop import layouts, weights
from sbjax.interop.weights import load_weights, save_weights, state_dict
from sbjax.models.clip import CLIP
from sbjax.models.sizes import SIZES, open_clip_name

_VISION = dataclasses.replace(clip_case.MICRO.vision, mlp_ratio=2.7)
MICRO = dataclasses.replace(clip_case.MICRO, vision=_VISION)


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
    {
      **{k: getattr(text, k) for k in ("context_length", "vocab_size", "width", "layers", "heads")},
      **block,
    },
  ).eval()


def test_b32_logits_equal_open_clip_s():
  open_clip = import_open_clip()
  model = open_clip.create_model("ViT-B-32", pretrained=None).eval()
  perturb(model)
  params = load_weights(model.state_dict(), SIZES["B/32"])
  assert_same_features(model, params, SIZES["B/32"])


@pytest.mark.parametrize("layer_scale", [False, True])
@pytest.mark.parametrize("scan", [False, True])
def test_logits_equal_open_clip_s(layer_scale, scan):
  model = micro_open_clip(import_open_clip(), **({"ls_init_value": 0.3} if layer_scale else {}))
  perturb(model)
  params = load_weights(model.state_dict(), MICRO, scan=scan)
  assert_same_features(model, params, MICRO, scan=scan, zero_init_layer_scale=layer_scale)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".bin"])
@pytest.mark.parametrize("layer_scale", [False, True])
def test_open_clip_loads_what_we_save(tmp_path, suffix, layer_scale):
  open_clip = import_open_clip()
  params = random_params(MICRO, zero_init_layer_scale=layer_scale)
  path = tmp_path / f"clip{suffix}"
  save_weights(params, path, MICRO)
  model = micro_open_clip(open_clip, **({"ls_init_value": 1.0} if layer_scale else {}))
  open_clip.load_checkpoint(model, str(path), strict=True)
  assert_same_features(model, params, MICRO, zero_init_layer_scale=layer_scale)
  jax.tree.map(np.testing.assert_array_equal, load_weights(path, MICRO), params)


def test_open_clip_training_checkpoints_load(tmp_path):
  import_open_clip()
  import torch

  params = random_params(MICRO)
  state = {
    f"module.{name}": torch.from_numpy(array).bfloat16()
    for name, array in state_dict(params, MICRO).items()
  }
  torch.save({"epoch": 3, "state_dict": state}, tmp_path / "epoch_3.pt")
  loaded = load_weights(tmp_path / "epoch_3.pt", MICRO)
  for got, want in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, want.astype(jnp.bfloat16).astype(np.float32))


@pytest.mark.parametrize("size", ["S/16", "B/32", "B/16", "L/14", "H/14", "bigG/14"])
def test_sizes_equal_open_clip_s(size):
  open_clip = import_open_clip()
  import torch

  theirs = open_clip.get_model_config(open_clip_name(size))
  with torch.device("meta"):
    state = open_clip.model.CLIP(**theirs).state_dict()
  ours = SIZES[size]
  shapes = layouts.torch_shapes(weights._shapes(ours, {}), layouts.open_clip_layout(ours, ""))
  assert shapes == {name: tuple(tensor.shape) for name, tensor in state.items()}
  vision, text = theirs["vision_cfg"], theirs["text_cfg"]
  assert ours.vision.heads == vision["width"] // vision.get("head_width", 64)
  assert ours.vision.image_size == vision["image_size"]
  assert ours.text.heads == text["heads"]


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
