"""Imports open_clip for tests that compare with it."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.data_open_clip import import_torchvision
from sbjax.models.clip import CLIP
from sbjax.models.transformer import BlockOptions


def import_open_clip():
  """The open_clip module; the test is skipped where the `interop` extra is not installed."""
  pytest.importorskip("torch", reason="needs the `interop` extra")
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import_torchvision()
    return pytest.importorskip("open_clip", reason="needs the `interop` extra")


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
  ids = rng.integers(1, text.end_id, (2, text.context_length), np.int32)
  ids[0, 3], ids[1, -1] = text.end_id, text.end_id
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
