"""Models of other projects, in small sizes: from clones of their repositories, and transformers'.

`git clone` these into one folder, for `benchmarks/models.py --sources`: google-research's
vision_transformer and big_vision, google/flax, jax-ml/bonsai, pythoncrazy/jimm. Their code runs as
it is; stand-ins replace packages that they import only to read checkpoints.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp


@dataclasses.dataclass
class Case:
  """A model and a call of it.

  Attributes:
    model: linen or nnx.
    args, options: of the call.
    output: an array of what the call returns.
  """

  model: object
  args: tuple
  options: dict = dataclasses.field(default_factory=dict)
  output: Callable = lambda y: y


def _image(size=32):
  return jax.random.uniform(jax.random.key(1), (2, size, size, 3))


def _tokens(length=8, vocabulary=64):
  return jax.random.randint(jax.random.key(2), (2, length), 1, vocabulary)


@contextlib.contextmanager
def _importable(folder: Path, *needless: str):
  """Finds modules in the folder; stands in for packages that are needless here, if absent."""
  for name in needless:
    if name not in sys.modules and not _is_installed(name):
      sys.modules[name] = mock.MagicMock(__name__=name)
  with mock.patch.object(sys, "path", [str(folder), *sys.path]):
    yield


def _is_installed(name: str) -> bool:
  try:
    return importlib.util.find_spec(name) is not None
  except ImportError:
    return False


def _file(path: Path) -> types.ModuleType:
  """A module of one file, without the packages around it."""
  spec = importlib.util.spec_from_file_location("_".join(path.parts[-3:]), path)
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module  # dataclasses look there.
  spec.loader.exec_module(module)
  return module


def vision_transformer(sources: Path) -> Case:
  with _importable(sources / "vision_transformer"):
    vit = importlib.import_module("vit_jax.models_vit")
  model = vit.VisionTransformer(
    num_classes=16,
    patches=types.SimpleNamespace(size=(8, 8)),
    transformer={"num_layers": 2, "mlp_dim": 256, "num_heads": 4, "dropout_rate": 0.0},
    hidden_size=64,
  )
  return Case(model, (_image(),), {"train": False})


def _big_vision(sources: Path, **options) -> Case:
  with _importable(sources / "big_vision", "absl", "scipy", "scipy.ndimage"):
    sys.modules.setdefault("big_vision.utils", mock.MagicMock(__name__="big_vision.utils"))
    vit = importlib.import_module("big_vision.models.vit")
  model = vit.Model(
    16, variant="mu/8", depth=2, width=64, num_heads=4, head_zeroinit=False, **options
  )
  return Case(model, (_image(),), {}, lambda y: y[0])


def big_vision(sources: Path) -> Case:
  return _big_vision(sources, pool_type="gap")


def big_vision_map(sources: Path) -> Case:
  return _big_vision(sources, pool_type="map", scan=True)


def lm1b(sources: Path) -> Case:
  models = _file(sources / "flax/examples/lm1b/models.py")
  config = models.TransformerConfig(
    vocab_size=64, output_vocab_size=64, share_embeddings=True, logits_via_embedding=True,
    emb_dim=64, num_heads=4, num_layers=2, qkv_dim=64, mlp_dim=256, deterministic=True,
  )  # fmt: skip
  return Case(models.TransformerLM(config), (_tokens(),))


def bonsai_vit(sources: Path) -> Case:
  vit = _file(sources / "bonsai/bonsai/models/vit/modeling.py")
  config = vit.ModelConfig(
    image_size=(32, 32), patch_size=(8, 8), num_channels=3, hidden_dim=64, num_heads=4,
    attn_dropout_prob=0.0, dropout_prob=0.0, mlp_dim=256, eps=1e-6, num_layers=2, num_labels=16,
  )  # fmt: skip
  nnx = importlib.import_module("flax.nnx")
  return Case(
    vit.ViTClassificationModel(config, rngs=nnx.Rngs(0)), (_image(),), {"rngs": nnx.Rngs(0)}
  )


def bonsai_convnext(sources: Path) -> Case:
  convnext = _file(sources / "bonsai/bonsai/models/convnext/modeling.py")
  config = convnext.ModelConfig((1, 1, 2, 1), (16, 32, 64, 64), 0.0, 16, layernorm_eps=1e-6)
  nnx = importlib.import_module("flax.nnx")
  model = convnext.ConvNeXt(config, rngs=nnx.Rngs(0))
  return Case(model, (_image(64),), {"rngs": jax.random.key(0)})


def bonsai_qwen3(sources: Path) -> Case:
  with _importable(sources / "bonsai", "jaxtyping"):
    qwen3 = _file(sources / "bonsai/bonsai/models/qwen3/modeling.py")
  config = qwen3.ModelConfig(
    num_layers=2, vocab_size=64, emb_dim=64, mlp_dim=128, num_heads=4, head_dim=16, num_kv_heads=2,
    rope_theta=10_000, rope_scaling_factor=8.0, local_rope_theta=1e4, norm_eps=1e-6,
    tie_word_embeddings=False,
  )  # fmt: skip
  nnx = importlib.import_module("flax.nnx")
  cache = qwen3.init_cache(config, 2, 8, 0, jnp.float32)
  options = {"cache": cache, "segment_ids": jnp.ones((2, 8), jnp.int32)}
  return Case(qwen3.Qwen3(config, rngs=nnx.Rngs(0)), (_tokens(),), options)


def jimm_clip(sources: Path) -> Case:
  with _importable(sources / "jimm/src", "jaxtyping", "huggingface_hub", "safetensors"):
    clip = importlib.import_module("jimm.models.clip")
  model = clip.CLIP(
    image_resolution=32, vision_layers=2, vision_width=64, vision_patch_size=8, context_length=8,
    vocab_size=64, transformer_width=64, transformer_heads=4, transformer_layers=2,
  )  # fmt: skip
  return Case(model, (_image(), _tokens()))


def hf_gpt2(sources: Path | None) -> Case:
  transformers = importlib.import_module("transformers")
  gpt2 = importlib.import_module("transformers.models.gpt2.modeling_flax_gpt2")
  config = transformers.GPT2Config(64, 16, 64, 2, 4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
  positions = jnp.broadcast_to(jnp.arange(8), (2, 8))
  args = (_tokens(), jnp.ones((2, 8), jnp.int32), positions)
  return Case(gpt2.FlaxGPT2LMHeadModule(config), args, {}, lambda y: y.logits)


def hf_clip(sources: Path | None) -> Case:
  transformers = importlib.import_module("transformers")
  clip = importlib.import_module("transformers.models.clip.modeling_flax_clip")
  size = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
  size |= {"num_attention_heads": 4, "projection_dim": 32}
  config = transformers.CLIPConfig(
    text_config=size | {"vocab_size": 64, "max_position_embeddings": 8},
    vision_config=size | {"image_size": 32, "patch_size": 8},
    projection_dim=32,
  )
  positions = jnp.broadcast_to(jnp.arange(8), (2, 8))
  args = (_tokens(), _image(), jnp.ones((2, 8), jnp.int32), positions)
  return Case(clip.FlaxCLIPModule(config), args, {}, lambda y: y.logits_per_text)


CASES = {
  "google vision_transformer ViT": vision_transformer,
  "big_vision ViT": big_vision,
  "big_vision ViT, MAP head, scan and remat": big_vision_map,
  "Flax's example lm1b, tied embeddings": lm1b,
  "transformers FlaxGPT2": hf_gpt2,
  "transformers FlaxCLIP": hf_clip,
  "bonsai ViT (nnx)": bonsai_vit,
  "bonsai ConvNeXt (nnx)": bonsai_convnext,
  "bonsai Qwen3 (nnx)": bonsai_qwen3,
  "jimm CLIP (nnx)": jimm_clip,
}


def commit(folder: Path) -> str:
  """The commit of a clone, or "" of a folder that is none."""
  command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
  run = subprocess.run(command, capture_output=True, text=True)
  return run.stdout.strip()
