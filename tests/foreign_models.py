"""The structure of models elsewhere, for `quantize_model`: what each adds to a stack of Dense."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx


class Conv1D(nn.Module):
  """GPT2's linear layer in transformers: its own, with the kernel transposed."""

  features: int

  @nn.compact
  def __call__(self, x):
    shape = self.features, x.shape[-1]
    kernel = self.param("kernel", nn.initializers.normal(0.2), shape)
    bias = self.param("bias", nn.initializers.zeros, (self.features,))
    return jax.lax.dot_general(x, kernel.T, (((x.ndim - 1,), (0,)), ((), ()))) + bias


class GPT(nn.Module):
  """Conv1D, attention by einsum, and the token embedding again as the last layer."""

  @nn.compact
  def __call__(self, tokens):
    embed = nn.Embed(24, 16, name="wte")
    x = embed(tokens)
    q, k, v = jnp.split(Conv1D(48, name="c_attn")(nn.LayerNorm()(x)), 3, axis=-1)
    weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
    x = x + Conv1D(16, name="c_proj")(jnp.einsum("bqk,bkd->bqd", weights, v))
    return embed.attend(x)


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, deterministic):
    x = x + nn.MultiHeadDotProductAttention(2, name="attention")(nn.LayerNorm()(x))
    y = nn.gelu(nn.Dense(32, name="fc1")(nn.LayerNorm()(x)))
    y = nn.Dropout(0.5)(y, deterministic)
    return x + nn.Dense(16, name="fc2")(y), None


class ViT(nn.Module):
  """big_vision's: patches, a scan of remat blocks, attention pooling by a learned probe."""

  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, image, *, train=False):
    x = nn.Conv(16, (4, 4), (4, 4), padding="VALID", dtype=self.dtype, name="embedding")(image)
    x = x.reshape(x.shape[0], -1, 16).astype(jnp.float32)
    blocks = nn.scan(
      nn.remat(Block, prevent_cse=False, static_argnums=(2,)),
      variable_axes={"params": 0},
      split_rngs={"params": True, "dropout": True},
      in_axes=nn.broadcast,
      length=2,
    )
    x, _ = blocks(name="blocks")(x, not train)
    probe = jnp.tile(self.param("probe", nn.initializers.normal(1.0), (1, 1, 16)), [len(x), 1, 1])
    x = nn.MultiHeadDotProductAttention(2, name="pool")(probe, x)
    return nn.Dense(8, name="head")(x[:, 0])


class Experts(nn.Module):
  """A layer of experts, whose einsum hands the weights to XLA as the left operand."""

  @nn.compact
  def __call__(self, x):
    w = self.param("wi", nn.initializers.normal(0.2), (2, 16, 8))
    return jnp.einsum("ebd,edf->bef", x, w)


class ConvNeXt(nnx.Module):
  """Patches, a depthwise convolution, a statistic that changes, dropout with its own keys."""

  def __init__(self, rngs):
    self.stem = nnx.Conv(3, 16, (4, 4), (4, 4), rngs=rngs)
    self.depthwise = nnx.Conv(16, 16, (3, 3), feature_group_count=16, rngs=rngs)
    self.norm = nnx.BatchNorm(16, rngs=rngs)
    self.layers = nnx.List([nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)])
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, image):
    x = self.norm(self.depthwise(self.stem(image)))
    x = self.dropout(nnx.gelu(self.layers[0](x)))
    return self.layers[1](x).mean((1, 2))


class Decoder(nnx.Module):
  """Qwen3's: nnx.Einsum, and a cache that is an argument and changes."""

  def __init__(self, rngs):
    self.embed = nnx.Embed(24, 16, rngs=rngs)
    self.q_proj = nnx.Einsum("btd,dnh->btnh", (16, 2, 8), rngs=rngs)
    self.o_proj = nnx.Einsum("btnh,nhd->btd", (2, 8, 16), rngs=rngs)

  def __call__(self, tokens, *, cache):
    cache[...] += 1
    return self.embed.attend(self.o_proj(self.q_proj(self.embed(tokens))))
