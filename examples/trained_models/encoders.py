"""Two encoders as functions of their checkpoints' own tensors: BERT and DINOv2.

A model is a folder as transformers saves it: config.json, model.safetensors, and a text encoder's
tokenizer.json. `quantize_model` needs no more than such a function.
"""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from safetensors.numpy import load_file

TEXT, IMAGE = "bert", "dinov2"


def load(folder: Path):
  """(kind, encode, params): encode(params, inputs) has a unit vector [B, D] for each input."""
  config = json.loads((folder / "config.json").read_text())
  kind, heads = config["model_type"], config["num_attention_heads"]
  if kind not in (TEXT, IMAGE):
    raise ValueError(f"{folder}: model_type={kind!r} must be {TEXT!r} or {IMAGE!r}.")
  tensors = load_file(folder / "model.safetensors")
  params = {name: jnp.asarray(x) for name, x in tensors.items() if x.dtype.kind == "f"}
  layers = len({name.split(".")[2] for name in params if name.startswith("encoder.layer.")})
  encode = _bert if kind == TEXT else _dinov2
  return kind, partial(encode, heads, layers, config["layer_norm_eps"]), params


def _bert(heads, layers, epsilon, p, inputs):
  """The mean of the last states over the tokens of a text, for ids and mask [B, L]."""
  ids, mask = inputs["ids"], inputs["mask"]
  positions = p["embeddings.position_embeddings.weight"][: ids.shape[1]]
  x = p["embeddings.word_embeddings.weight"][ids] + positions
  x = x + p["embeddings.token_type_embeddings.weight"][0]
  x = norm(p, "embeddings.LayerNorm", x, epsilon)
  for layer in (f"encoder.layer.{i}" for i in range(layers)):
    a = attention(p, f"{layer}.attention", "self", x, heads, mask[:, None, None])
    x = norm(p, f"{layer}.attention.output.LayerNorm", x + a, epsilon)
    h = jax.nn.gelu(dense(p, f"{layer}.intermediate.dense", x), approximate=False)
    h = dense(p, f"{layer}.output.dense", h)
    x = norm(p, f"{layer}.output.LayerNorm", x + h, epsilon)
  return unit(jnp.sum(x * mask[..., None], 1))


def _dinov2(heads, layers, epsilon, p, image):
  """The class token after the last layer norm, for images [B, H, W, 3]."""
  kernel = p["embeddings.patch_embeddings.projection.weight"]
  (batch, size, _, _), (width, _, patch, _) = image.shape, kernel.shape
  n = size // patch
  x = image.reshape(batch, n, patch, n, patch, 3).transpose(0, 1, 3, 5, 2, 4)
  x = x.reshape(batch, n * n, -1) @ kernel.reshape(width, -1).T
  x = x + p["embeddings.patch_embeddings.projection.bias"]
  positions = p["embeddings.position_embeddings"]
  side = round((positions.shape[1] - 1) ** 0.5)
  grid = positions[:, 1:].reshape(1, side, side, width)
  grid = jax.image.resize(grid, (1, n, n, width), "cubic", antialias=False)
  first = jnp.broadcast_to(p["embeddings.cls_token"] + positions[:, :1], (batch, 1, width))
  x = jnp.concatenate([first, x + grid.reshape(1, n * n, width)], 1)
  for layer in (f"encoder.layer.{i}" for i in range(layers)):
    u = norm(p, f"{layer}.norm1", x, epsilon)
    a = attention(p, f"{layer}.attention", "attention", u, heads, None)
    x = x + p[f"{layer}.layer_scale1.lambda1"] * a
    u = norm(p, f"{layer}.norm2", x, epsilon)
    h = jax.nn.gelu(dense(p, f"{layer}.mlp.fc1", u), approximate=False)
    x = x + p[f"{layer}.layer_scale2.lambda1"] * dense(p, f"{layer}.mlp.fc2", h)
  return unit(norm(p, "layernorm", x, epsilon)[:, 0])


def attention(p, name, inner, x, heads, mask):
  q, k, v = (dense(p, f"{name}.{inner}.{part}", x) for part in ("query", "key", "value"))
  q, k, v = (a.reshape(*a.shape[:2], heads, -1) for a in (q, k, v))
  out = jax.nn.dot_product_attention(q, k, v, mask=mask)
  return dense(p, f"{name}.output.dense", out.reshape(x.shape))


def dense(p, name, x):
  w = p[f"{name}.weight"]
  return x.astype(w.dtype) @ w.T + p[f"{name}.bias"]


def in_bfloat16(params):
  """Parameters with which the blocks' linear layers multiply in bfloat16."""
  return {
    name: x.astype(jnp.bfloat16) if name.startswith("encoder.") and x.ndim == 2 else x
    for name, x in params.items()
  }


def norm(p, name, x, epsilon):
  return jax.nn.standardize(x, epsilon=epsilon) * p[f"{name}.weight"] + p[f"{name}.bias"]


def unit(x):
  return x / jnp.linalg.norm(x, axis=-1, keepdims=True)
